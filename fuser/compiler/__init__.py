"""The compiler: from a container and a call to a plan, through a graph and the fusions that match it."""
