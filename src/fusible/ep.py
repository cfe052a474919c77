"""Expert parallelism: layers whose experts are spread over ranks."""

from .ops.ep import CapacityError, EPCombine, EPDispatch, Group, PeerError, Statistics, balanced_order
from .ops.fused import EPGroupedMLP

__all__ = [
    "CapacityError",
    "EPCombine",
    "EPDispatch",
    "EPGroupedMLP",
    "Group",
    "PeerError",
    "Statistics",
    "balanced_order",
]
