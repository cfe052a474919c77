"""User-written functions of one element, read as programs. Knows no op and no kernel."""
