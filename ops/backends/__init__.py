"""Implementations of the kernels. Only ``ops/kernels.py`` imports them."""
