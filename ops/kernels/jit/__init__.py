"""Compiles kernels while the program runs: NVRTC from memory, a cache on disk, and launches by the driver."""
