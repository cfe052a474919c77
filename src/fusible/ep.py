"""Expert parallelism: layers whose experts are spread over ranks."""

from .ops.ep import CapacityError, EPCombine, EPDispatch, Group, PeerError, Statistics
from .ops.fused import EPGroupedMLP

__all__ = ["CapacityError", "EPCombine", "EPDispatch", "EPGroupedMLP", "Group", "PeerError", "Statistics"]
