"""Our own kernels in Triton, for every GPU from compute capability 8.0 on that has none of its own.

``gemm`` and ``row_kernels`` are what is chosen from; they import ``device``, and so Triton, when a kernel runs.
"""
