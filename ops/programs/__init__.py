"""Functions of one element, written by users and read as programs. Knows no op and no kernel."""
