"""Containers: a sequence of ops, an op called alone, and the state that both keep between calls."""
