"""Commands that are no benchmark; each takes the arguments behind its name."""
