"""Commands other than benchmarks; each takes the arguments after its name."""
