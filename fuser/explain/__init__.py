"""Explanations of what a call runs, and why each fusion and kernel was or was not used."""
