"""The problems that kernels solve, as values, and the interface of an implementation."""
