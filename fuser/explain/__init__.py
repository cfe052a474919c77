"""Says what a call runs, and why each fusion and each kernel was or was not taken."""
