"""Rows from tokens to their experts, and back."""
