"""The compiler: from a container and a call to a plan, by way of a graph and the fusions that match it."""
