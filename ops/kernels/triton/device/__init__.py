"""What imports Triton: kernels and their launches. The rest of the package finds out first whether it is there."""

import triton  # noqa: F401  # a package without it is left out by what imports all modules
