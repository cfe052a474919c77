"""The interface of transports, which move rows between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..routed.call import RoutedCall
from .overlap import Overlaps


class Exchange(NamedTuple):
    """One use of a lane: dispatch and combine, with their backward.

    Attributes:
        lane: the index of the lane; ``number``: the number of earlier exchanges on it.
    """

    lane: int
    number: int

    def named(self, kind: str) -> str:
        """The name of a part in errors: ``kind`` is dispatch, combine, or the backward of one."""
        return f"{kind} of exchange {self.number} on lane {self.lane}"


class Table(Protocol):
    """The rows of the slots of all ranks; a named tuple, so that a backward can save it.

    Attributes:
        exchange: the exchange that it belongs to.
        split_sizes: int32 [E / R]: the number of rows of each expert of this rank.
        row_of_slot: [T, k]: the row of each slot of this rank, in the transport's numbering.
        num_rows: Q, the number of rows of this rank's experts, tail included.
    """

    @property
    def exchange(self) -> Exchange: ...
    @property
    def split_sizes(self) -> Tensor: ...
    @property
    def row_of_slot(self) -> Tensor: ...
    @property
    def num_rows(self) -> int: ...


class DispatchedRows(NamedTuple):
    """The result of a dispatch.

    Attributes:
        table: a :class:`Table`.
        rows: [Q, columns of the tokens], from :meth:`Transport.pull`; an :class:`EPDispatch` may decode them.
        scales: the routing weights of the rows.
        arriving: counters of rows that may still arrive during the next kernel that reads these counters; None: the
            rows are there. Keep them until all rows have arrived.
    """

    table: Any
    rows: Any
    scales: Tensor
    arriving: Any = None


class Transport(Protocol):
    """Moves rows between the ranks of a group. All ranks call the same methods in the same order.

    Rows of experts are sorted by expert, then rank, token and slot, like in one process with the tokens of all ranks in
    turn. Rows after them, up to Q, are a tail.
    """

    name: str
    overlaps: Overlaps
    """The moves that run beside products."""
    final: tuple[type[Exception], ...]
    """The errors after which ranks cannot meet again."""

    def dispatch(self, exchange: Exchange, call: RoutedCall, fill: bool, beside: bool) -> DispatchedRows:
        """The :class:`Table` of the ids [T, k], the rows of :meth:`pull`, and their weights.

        An id below 0, or of E or more, belongs to no expert. The weights [Q] have one number per row, in at least
        float32, from the weights [T, k] of the slots of all ranks; their tail is zero.

        Args:
            call: the call; all ranks must agree on its wanted gradients, which the backward of the dispatch will
                compute.
            beside: whether the rows may arrive during the next launched kernel, if the group overlaps them.

        Raises:
            CapacityError: a rank would own more rows than there is room for.
            PeerError: a rank did not come.
        """

    def pull(self, tokens: Tensor, table: Any, kind: str, fill: bool) -> Tensor:
        """Pulls rows [Q, H] of this rank's experts from the tokens [T, H] of all ranks.

        Args:
            fill: whether the tail must be zero; otherwise it is arbitrary.
        """

    def start_sum(
        self, rows: Tensor | None, table: Any, kind: str, products_follow: bool = False
    ) -> Callable[[], Tensor]:
        """Starts to sum the rows [Q, H] of all ranks by token; returns a function that gives the sums [T, H] of this
        rank.

        Rows may be overwritten once the function has returned. None: they were sent to :meth:`row_slots`.

        Args:
            products_follow: whether products are launched before the function is called, in parallel to the sums.
        """

    def return_numbers(self, numbers: Tensor, table: Any, dtype: torch.dtype, kind: str) -> Tensor:
        """Sends numbers [Q] of the experts' rows back to their slots [T, k]; slots of no expert get 0."""

    def row_buffer(self, table: Any) -> Tensor | None:
        """[Q, H]: memory for the rows of the next :meth:`start_sum` on that lane, in forward or backward.

        None if any memory will do.
        """

    def row_slots(self, table: Any) -> Any:
        """The memory that rows of a combine are sent to as they are computed: see
        :class:`fusible.ops.kernels.RowSlots`.

        None if rows only go to :meth:`start_sum`.
        """

    def statistics(self) -> Mapping[str, int]:
        """The largest number of rows that a rank had to own, and the number of dropped rows, so far."""

    def check(self) -> None:
        """Raises errors that a device has reported, from exchanges that the host has not waited for.

        Raises:
            CapacityError: a rank would own more rows than its capacity.
            PeerError: a rank did not take part, or did something else.
        """

    def finish(self) -> None:
        """Waits until this rank has finished its work."""

    def reset(self) -> None:
        """Starts anew after a :class:`CapacityError`.

        All ranks must have finished; none continues before all have reset.
        """

    def foresee(self, kind: str, *tensors: Tensor) -> None:
        """Records for a trace the kernels of a move of such tensors."""
