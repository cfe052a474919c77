"""State dicts of other libraries: layouts of experts, order of rows, loading."""
