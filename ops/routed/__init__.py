"""Rows of tokens to their experts, and back."""
