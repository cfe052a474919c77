"""Tensors in 8 and 4 bits: formats, recipes, copies and the definition of every quantiser."""
