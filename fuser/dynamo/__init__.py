"""The front end of ``torch.compile``."""
