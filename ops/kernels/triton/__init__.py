"""Our own kernels in Triton, for every GPU from compute capability 8.0 on that has none of its own.

``gemm``, ``row_kernels`` and ``permutation`` are what is chosen from; they import ``device`` when a kernel runs, and
so Triton.
"""
