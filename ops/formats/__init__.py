"""Quantised operands: recipes, the copies of tensors that they ask for, and what computes them."""
