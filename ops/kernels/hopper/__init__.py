"""Our CUDA kernels for Hopper."""
