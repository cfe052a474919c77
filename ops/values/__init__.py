"""Values that ops and kernels share: activations, grouped tensors, and the checks of arguments."""
