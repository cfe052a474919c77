"""Doors to kernels of single ops; each file declares its own kernels."""
