"""Expert parallelism: layers whose experts are spread over ranks."""

from .ops.ep import CapacityError, EPCombine, EPDispatch, Group, PeerError, Statistics

__all__ = ["CapacityError", "EPCombine", "EPDispatch", "Group", "PeerError", "Statistics"]
