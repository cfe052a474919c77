"""What moves rows between ranks: the interface behind which transports stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class Exchange(NamedTuple):
    """One use of a lane: rows to their experts, and back. Its backward is part of it.

    Attributes:
        lane: whose; ``number``: how many there were on it before.
    """

    lane: int
    number: int

    def named(self, kind: str) -> str:
        """What errors call a part of it: ``kind`` is dispatch, combine, or the backward of one."""
        return f"{kind} of exchange {self.number} on lane {self.lane}"


class Table(Protocol):
    """Where the slots of all ranks have their rows; a named tuple, so that a backward may keep it.

    Attributes:
        exchange: whose it is.
        split_sizes: int32 [E / R]: the number of rows of each expert of this rank.
        row_of_slot: [T, k]: which row each slot of this rank is, by a numbering of the transport.
        num_rows: Q, the number of rows that hold those of this rank's experts, and a tail.
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
    """What a dispatch gives.

    Attributes:
        table: a :class:`Table`.
        rows: of :meth:`Transport.pull`; ``scales``: their weights.
        arriving: counters of the rows, which may still come while the next kernel runs that is told of them; None:
            whatever is launched next finds them. It is to be kept as long as the rows come.
    """

    table: Any
    rows: Tensor
    scales: Tensor
    arriving: Any = None


class Transport(Protocol):
    """Moves rows between the ranks of a group. All ranks call the same methods in the same order.

    Rows of experts are sorted by expert, then rank, token and slot, as one process has them that has the tokens of all
    ranks in turn. What is behind them, up to Q rows, is a tail.
    """

    name: str

    def dispatch(
        self,
        exchange: Exchange,
        tokens: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        wanted: frozenset[str],
        fill: bool,
        beside: bool,
    ) -> DispatchedRows:
        """The :class:`Table` of the ids [T, k], the rows of :meth:`pull`, and their weights.

        An id below 0, or of E or more, is of no expert. The weights are one number [Q] a row, in float32 at least, from
        those [T, k] of the slots of all ranks; their tail is zero.

        Args:
            wanted: the gradients that the backward of the dispatch will be asked for, which ranks must agree on.
            beside: whether the rows may come while the kernel runs that is launched next, if the group overlaps them.

        Raises:
            CapacityError: a rank would own more rows than there is room for.
            PeerError: a rank did not come.
        """

    def pull(self, tokens: Tensor, table: Any, kind: str, fill: bool) -> Tensor:
        """Rows [Q, H] of this rank's experts, from the tokens [T, H] of all ranks.

        Args:
            fill: whether the tail shall be zero; else it may be anything.
        """

    def start_sum(
        self, rows: Tensor | None, table: Any, kind: str, products_follow: bool = False
    ) -> Callable[[], Tensor]:
        """Starts to sum the rows [Q, H] of all ranks by token; returns what gives the sums [T, H] of this rank's.

        Rows may be overwritten once the sums are there. None: they have gone to :meth:`row_slots`.

        Args:
            products_follow: whether products are launched before the sums are asked for, beside which they may run.
        """

    def return_numbers(self, numbers: Tensor, table: Any, dtype: torch.dtype, kind: str) -> Tensor:
        """Of each slot [T, k] the number of its row, from those [Q] of all ranks; 0 for slots of no expert."""

    def row_buffer(self, table: Any) -> Tensor | None:
        """[Q, H]: memory for rows that :meth:`start_sum` is given next on that lane, in a forward or a backward.

        None: any memory is as good.
        """

    def row_slots(self, table: Any) -> Any:
        """Where the rows of a combine go as they are computed: see :class:`fusible.ops.kernels.RowSlots`.

        None: nowhere but to :meth:`start_sum`, which is told otherwise.
        """

    def statistics(self) -> Mapping[str, int]:
        """The largest number of rows that a rank had to own, and the number of rows left out, so far."""

    def check(self) -> None:
        """Raises what a device has reported since, of exchanges that the host has not waited for.

        Raises:
            CapacityError: a rank would own more rows than there is room for.
            PeerError: a rank did not come, or did something else.
        """

    def finish(self) -> None:
        """Waits until this rank has done what it was asked for."""

    def reset(self) -> None:
        """Begins anew after a :class:`CapacityError`. All ranks have finished; none goes on before all have reset."""

    def foresee(self, kind: str, *tensors: Tensor) -> None:
        """Tells a trace what a move of such tensors runs."""
