"""Ops without groups: activations, biases, scales, branches, linears."""
