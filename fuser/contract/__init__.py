"""The contract of an op: its declarations, and the parts of it that the compiler knows."""
