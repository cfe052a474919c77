"""``EPCombine``: sends rows of experts back to the ranks of their tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ...fuser import ArgumentError, Grads, Op, Promises, TensorSpec
from ...fuser.contract import tracing as trace
from .dispatch import TableForeseen, check_lane, check_rows_of, pulled, start_sum
from .group import Group
from .transport import Exchange


class EPCombine(Op):
    """Combines rows [Q, H] of this rank's experts to tokens [T, H]: the sum of each token's rows, from all ranks.

    The group's ``combine`` determines the rounding of sums. EPCombine does not apply the routing weights; put
    ``Scale()``, or an activation with scales, before it. It ends the exchange that the :class:`EPDispatch` of the same
    group and lane began.

    Args:
        group: the group of ranks.
        lane: the index of the group's lane.

    Keyword Args:
        row_of_slot: int32 or int64 [T, k], from the :class:`EPDispatch`.

    Raises:
        TypeError: ``group`` is not a :class:`Group`.
        ValueError: the group has no such lane.
        ArgumentError: in a call, the rows do not fit the group.
        PeerError: a rank did not take part.
        RuntimeError: there is no open :class:`EPDispatch` of this group and lane.
    """

    promises = Promises(values_checked=frozenset(), eager_only="it waits for other ranks")

    class Saved(NamedTuple):
        table: Any

    def __init__(self, group: Group, lane: int = 0) -> None:
        super().__init__()
        self.group, self.lane = group, check_lane("EPCombine", group, lane)

    def check(self, x: TensorSpec, *, row_of_slot: Tensor) -> TensorSpec:
        check_rows_of(self.group, x, "rows [Q, H]")
        rows = self.group.local_capacity
        if rows is not None and x.shape[0] != rows:
            raise ArgumentError(f"x must be the {rows} rows of the EPDispatch before it, got {list(x.shape)}")
        if row_of_slot.device != x.device:
            raise ArgumentError(f"row_of_slot must be on {x.device}, as x, got {row_of_slot.device}; move neither")
        return TensorSpec((row_of_slot.shape[0], x.shape[1]), x.dtype, x.device)

    def fwd(self, x: Tensor, *, row_of_slot: Tensor) -> tuple[Tensor, Saved]:
        if trace.active():
            table: Any = TableForeseen(Exchange(self.lane, 0), row_of_slot, row_of_slot, x.shape[0])
        else:
            self.group.check()
            table = self.group.lanes[self.lane].end(row_of_slot)
        return start_sum(self.group, x, table, "combine")(), self.Saved(table)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return {"x": lambda: pulled(self.group, dy, saved.table, "combine backward", fill=True)}

    def extra_repr(self) -> str:
        return f"{self.group!r}, lane={self.lane}"
