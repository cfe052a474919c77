"""Independent products, launched directly one after another, so that they share their last rounds."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ....fuser.contract.torch_private import current_dispatch_mode, dispatch_mode_depth
from ....fuser.replay.capture import Capture


class Turn(NamedTuple):
    """The workspace of one of the products, and those of the next ones.

    Attributes:
        followers: the workspaces of the next products.
        follows: whether an earlier product's launch has zeroed all counters.
    """

    workspace: int
    nbytes: int
    followers: list[int]
    follows: bool

    @property
    def fields(self) -> dict[str, object]:
        """The fields of a launch."""
        return {"followers": self.followers, "follows": self.follows}


class Independent:
    """Products of one backward that do not read one another's results.

    Between two of them the stream may run nothing that touches their memory, or memory that they get afterwards: no
    operation of torch but allocations. The extension compares the addresses of consecutive products, since freed memory
    that one reads may be the result of the next; it also notices its own launches between them.
    """

    __slots__ = ("_count", "_memory", "_next")

    def __init__(self, count: int) -> None:
        self._count, self._next = count, 0
        self._memory: Tensor | None = None

    @classmethod
    def of(cls, count: int) -> Independent | None:
        """For ``count`` products; None if there is nothing to gain, or an allocation may run an operation."""
        return None if count < 2 or _fills_allocations() else cls(count)

    def next_turn(self, like: Tensor, nbytes: int) -> Turn | None:
        """The turn of the next product, in memory that all share; None if no more of them were counted.

        Args:
            like: a tensor on the device.
            nbytes: the workspace of each, a multiple of 16.
        """
        at = self._next
        if at == self._count:
            return None
        if self._memory is None:
            self._memory = like.new_empty(self._count * nbytes, dtype=torch.uint8)
        self._next, first = at + 1, self._memory.data_ptr()
        followers = [first + i * nbytes for i in range(at + 1, self._count)]
        return Turn(first + at * nbytes, nbytes, followers, at > 0)


def _fills_allocations() -> bool:
    """Whether an operation writes to new memory, or another mode may see to that."""
    if torch.are_deterministic_algorithms_enabled():  # which fills it
        return True
    return dispatch_mode_depth() > isinstance(current_dispatch_mode(), Capture)
