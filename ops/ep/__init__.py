"""Expert parallelism: each rank owns some experts, and tokens travel to them and back."""

from .balance import balanced_order
from .combine import EPCombine
from .dispatch import EPDispatch
from .errors import CapacityError, PeerError
from .group import Group, Statistics

__all__ = ["CapacityError", "EPCombine", "EPDispatch", "Group", "PeerError", "Statistics", "balanced_order"]
