"""The settings that all ranks of a group must agree on, and values derived from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

OVERFLOW = ("raise", "drop")
COMBINE = ("exact", "reduced")
TRANSPORTS = ("auto", "collective", "symmetric", "rails")
FIXED = ("symmetric", "rails")  # transports whose host does not wait for sizes
CAPACITIES = ("exact", "worst")
_LEAST_SECONDS, _MOST_SECONDS = 1e-3, 1e9  # clocks count milliseconds in 64 bits, or nanoseconds


class Settings(NamedTuple):
    """The arguments of a :class:`Group`, which must be equal on all ranks.

    Attributes:
        capacity: as passed: a factor of ``max_tokens * top_k``, a number of rows, ``"exact"`` or ``"worst"``.
    """

    num_experts: int
    max_tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    capacity: float | int | str
    overflow: str
    combine: str
    transport: str
    lanes: int
    timeout: float
    overlap: int | None
    overlap_dispatch: int | None
    overlap_combine: bool | None
    float8_gradients: bool

    def problem(self, ranks: int) -> str | None:
        """The first problem of the settings for this number of ranks, or None."""
        return next(self._problems(ranks), None)

    def _problems(self, ranks: int) -> Iterator[str]:
        for name in ("num_experts", "max_tokens", "top_k", "hidden", "lanes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                yield f"{name} must be a positive int, got {value!r}"
        if self.num_experts % ranks:
            yield (
                f"num_experts must be a multiple of the number of ranks, as each owns equally many; "
                f"got {self.num_experts} experts for {ranks} ranks"
            )
        if not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point and self.dtype.itemsize > 1):
            yield f"dtype must be a floating-point dtype of at least 16 bits, got {self.dtype!r}"
        choices = {"overflow": OVERFLOW, "combine": COMBINE, "transport": TRANSPORTS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield f"{name} must be one of {', '.join(map(repr, allowed))}, got {getattr(self, name)!r}"
        for name, blocks in self._multiprocessors():
            if type(blocks) is not int or blocks < 0:
                yield f"{name} must be a number of multiprocessors, 0 for none, got {blocks!r}"
        if self.overlap_combine is not None and type(self.overlap_combine) is not bool:
            yield f"overlap_combine must be True, False or None, got {self.overlap_combine!r}"
        if type(self.float8_gradients) is not bool:
            yield f"float8_gradients must be True or False, got {self.float8_gradients!r}"
        elif self.float8_gradients and self.dtype != torch.bfloat16:
            yield f"float8_gradients needs torch.bfloat16, which holds the values exactly, got {self.dtype}"
        if not _is_number(self.timeout) or not (self.timeout == 0 or _LEAST_SECONDS <= self.timeout <= _MOST_SECONDS):
            yield f"timeout must be a number of seconds from 0.001 to 1e9, or 0 for none, got {self.timeout!r}"
        if not self._is_capacity():
            yield (
                "capacity must be a factor of max_tokens * top_k (a float), a number of rows (an int), "
                f"'exact' or 'worst', got {self.capacity!r}"
            )
        elif self.transport in FIXED and self.capacity == "exact":
            yield (
                "capacity 'exact' needs transport 'collective', as the host waits for it; "
                f"give {self.transport!r} a number"
            )
        if (self.transport, self.combine, self.overlap_combine) == ("symmetric", "reduced", True):
            yield "overlap_combine=True needs combine='exact': with 'reduced', rows are summed before they leave"
        if self.transport == "rails" and self.combine == "exact":
            yield "combine 'exact' is not possible with transport 'rails', where each host rounds its sums: 'reduced'"

    def _multiprocessors(self) -> Iterator[tuple[str, Any]]:
        """The names and values of the settings that are numbers of multiprocessors, where they are given."""
        for name in ("overlap", "overlap_dispatch"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def _is_capacity(self) -> bool:
        if isinstance(self.capacity, str):
            return self.capacity in CAPACITIES
        return _is_number(self.capacity) and math.isfinite(self.capacity) and self.capacity > 0

    def rows(self, ranks: int) -> int | None:
        """The number of rows that a rank can own at once; None for the number that arrives."""
        worst = self.worst(ranks)
        if self.capacity == "exact":
            return None
        if isinstance(self.capacity, str):
            return worst
        return min(worst, self.capacity if type(self.capacity) is int else math.ceil(self.capacity * self.slots))

    @property
    def slots(self) -> int:
        """The largest number of slots of a rank's tokens."""
        return self.max_tokens * self.top_k

    def worst(self, ranks: int) -> int:
        """The number of rows on a rank if every token chooses as many of its experts as possible, each once."""
        return ranks * self.slots

    def rounding(self, ranks: int) -> str | None:
        """The effect of ``combine="reduced"`` on bits and traffic, in words; None if sums are exact."""
        if self.combine == "exact":
            return None
        if self.transport == "rails":
            return "combine 'reduced': each host rounds its sum of a token's rows, so bits depend on the hosts"
        others, k = ranks - 1, self.top_k
        reduced, exact = others * (1 - (others / ranks) ** k), others / ranks * k
        return (
            "combine 'reduced': each rank rounds its sum of a token's rows, so bits depend on the ranks; "
            f"under even load {reduced:.1f} rows per token travel back, {exact:.1f} with 'exact'"
        )

    def difference(self, others: Sequence[Settings]) -> str | None:
        """The first rank with other settings, and the difference; None if all are equal."""
        for rank, other in enumerate(others):
            for name, mine, theirs in zip(self._fields, self, other, strict=True):
                other_kind = name == "capacity" and type(mine) is not type(theirs)  # 2 rows are no factor of 2.0
                if mine != theirs or other_kind:
                    return f"rank {rank} has {name}={theirs!r}, this rank has {mine!r}; give all ranks the same"
        return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value
