"""Doors to kernels beside the one of all: each file declares its own kernels."""
