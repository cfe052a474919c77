"""Ops with one product or function per group of rows, and the functions around them."""
