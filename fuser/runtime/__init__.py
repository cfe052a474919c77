"""Runs one op under autograd: calls, residuals, buffers."""
