"""The modules that import Triton: kernels and their launches. The rest of the package first checks that it exists."""
