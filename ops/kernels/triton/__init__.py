"""Our own kernels in Triton, for every GPU from compute capability 8.0 on that has none of its own.

``gemm`` and ``rows`` are what is chosen from; they import Triton when a kernel runs for the first time.
"""
