"""Changes of whole modules in place."""
