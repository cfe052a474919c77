"""In-place changes of whole modules."""
