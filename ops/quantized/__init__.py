"""Linears whose operands are quantised, above the kernels; the number formats are in ``ops/formats``."""
