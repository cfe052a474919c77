"""The contract of an op: what ops declare, and what every part of the compiler knows of them."""
