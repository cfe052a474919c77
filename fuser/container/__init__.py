"""Containers: a sequence of ops, an op called alone, and what both keep between calls."""
