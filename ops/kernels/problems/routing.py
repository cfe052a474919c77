"""The problems of bringing rows to their experts and back, with indices of 32 bits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from .gemm import nbytes

_MANY = 2**30  # slots of which some kernels take fewer only


class SlotOrder(NamedTuple):
    """The result of a kernel for a :class:`Routing`, with 32-bit indices."""

    tokens_per_expert: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor
    scales: Tensor | None = None


class PermutationKernels(Protocol):
    """A module of kernels that bring rows to their experts and back."""

    def route(self, ids: Tensor, num_experts: int, weights: Tensor | None, /) -> SlotOrder:
        """See :class:`OrderSlots`."""

    def permute(self, x: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor, out: Tensor, fill: bool, /) -> None:
        """See :class:`SpreadRows`."""

    def unpermute(self, rows: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor, out: Tensor, /) -> None:
        """See :class:`SumRows`."""

    def of_slots(self, numbers: Tensor, row_of_slot: Tensor, tokens_per_expert: Tensor, out: Tensor, /) -> None:
        """See :class:`GatherSlots`."""


@dataclass(slots=True)
class OrderSlots:
    """Sorts the slots by expert, stably.

    Attributes:
        ids: [T, k], of experts; those below 0 and from ``num_experts`` on are of none.
        dtype: of the rows that will be moved.
        weights: [T, k], to be brought into the order of the rows, in float32; None: there are none.
        out: what the kernels allocate.
    """

    PASS: ClassVar[str] = "route"
    ids: Tensor
    num_experts: int
    dtype: torch.dtype
    weights: Tensor | None = None
    out: SlotOrder | None = None

    @property
    def cache_key(self) -> Hashable:
        """The key that decides whether kernels accept it."""
        ids = self.ids
        return ids.dtype, ids.device, self.num_experts, self.dtype, ids.numel() < _MANY

    @property
    def bytes(self) -> int:
        return nbytes(self.ids)

    def solve(self, kernels: PermutationKernels) -> None:
        self.out = kernels.route(self.ids, self.num_experts, self.weights)


@dataclass(slots=True)
class _Moved:
    """Rows that are moved between slots and experts.

    Attributes:
        source, out: the rows that are read and written.
        ids: int32 [T, k]: the row of each slot.
        tokens_per_expert: int32 [E + 1]: how many rows each expert has, and how many all have together.
    """

    source: Tensor
    ids: Tensor
    tokens_per_expert: Tensor
    out: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def num_experts(self) -> int:
        """One, since the indices do not say how many."""
        return 1

    @property
    def cache_key(self) -> Hashable:
        """As of :class:`OrderSlots`."""
        ids = self.ids
        return ids.dtype, ids.device, 1, self.source.dtype, ids.numel() < _MANY

    @property
    def bytes(self) -> int:
        return nbytes(self.source, self.out)


@dataclass(slots=True)
class SpreadRows(_Moved):
    """``out[ids[t, j]] = source[t]``; rows from the last of ``tokens_per_expert`` on become zero with ``fill``."""

    PASS: ClassVar[str] = "spread"
    fill: bool = True

    def solve(self, kernels: PermutationKernels) -> None:
        kernels.permute(self.source, self.ids, self.tokens_per_expert, self.out, self.fill)


@dataclass(slots=True)
class SumRows(_Moved):
    """``out[t]`` = the sum over j of ``source[ids[t, j]]``, of those before the last of ``tokens_per_expert``."""

    PASS: ClassVar[str] = "sum"

    def solve(self, kernels: PermutationKernels) -> None:
        kernels.unpermute(self.source, self.ids, self.tokens_per_expert, self.out)


@dataclass(slots=True)
class GatherSlots(_Moved):
    """``out[t, j] = source[ids[t, j]]``, 0 for those from the last of ``tokens_per_expert`` on; numbers of rows."""

    PASS: ClassVar[str] = "by slot"

    def solve(self, kernels: PermutationKernels) -> None:
        kernels.of_slots(self.source, self.ids, self.tokens_per_expert, self.out)


Permuting = OrderSlots | SpreadRows | SumRows | GatherSlots
