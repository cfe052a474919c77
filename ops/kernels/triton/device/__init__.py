"""What imports Triton: kernels and their launches. The rest of the package finds out first whether it is there."""
