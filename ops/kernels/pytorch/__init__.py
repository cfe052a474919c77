"""PyTorch implementations, for every device and dtype."""
