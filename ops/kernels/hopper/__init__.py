"""CUDA kernels for Hopper GPUs."""
