"""Captures the kernel launches of a call, and replays them for later calls of the same form."""
