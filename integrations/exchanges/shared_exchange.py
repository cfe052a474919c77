"""Expert-parallel exchanges for layers of other frameworks. Layers with equal exchanges share one group."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from ...fuser import Sequential
from ...ops import Scale
from ...ops.ep import EPCombine, EPDispatch, Group
from ...ops.ep.settings import FIXED

_MOST_TOKENS = 1 << 24  # of a group without a capacity, which reserves nothing for them


class ExchangeOptions(NamedTuple):
    """The options that a layer of another framework passes to :class:`fusible.ep.Group`, which describes them.

    Attributes:
        max_tokens: None for any number; only possible if the number of rows is not fixed.
    """

    max_tokens: int | None = None
    capacity: float | int | str = "exact"
    combine: str = "exact"
    transport: str = "collective"
    timeout: float = 60.0
    overflow: str = "raise"
    overlap: int | None = None
    overlap_dispatch: int | None = None
    overlap_combine: bool | None = None
    float8_gradients: bool = False

    @property
    def needs_tokens(self) -> bool:
        """Whether the largest number of tokens is not given, but fixes the number of rows."""
        return self.max_tokens is None and (self.capacity != "exact" or self.transport in FIXED)

    def tokens(self) -> int:
        """The largest number of tokens that a rank gives to a call.

        Raises:
            ValueError: it is not given, but the capacity depends on it.
        """
        if self.needs_tokens:
            raise ValueError(
                f"max_tokens is needed for capacity {self.capacity!r} with transport {self.transport!r}: the largest "
                "number of tokens that a rank gives to a layer; or leave both at their defaults"
            )
        return _MOST_TOKENS if self.max_tokens is None else self.max_tokens


class ExchangeOps(NamedTuple):
    """The two ends of an exchange.

    Attributes:
        weighted_combine: multiplies rows by ``scales`` before it combines them.
    """

    group: Group
    dispatch: EPDispatch
    combine: EPCombine
    weighted_combine: Sequential


@cache
def exchange_ops(
    process_group: dist.ProcessGroup,
    num_experts: int,
    top_k: int,
    hidden: int,
    dtype: torch.dtype,
    options: ExchangeOptions,
) -> ExchangeOps:
    """The ops that all layers of a process with equal exchanges share; the first call for them is collective.

    Raises:
        ValueError: the options do not fit, or ranks differ in them.
    """
    of_group = options._replace(max_tokens=options.tokens())._asdict()
    group = Group(process_group, num_experts=num_experts, top_k=top_k, hidden=hidden, dtype=dtype, **of_group)
    combine = EPCombine(group)
    return ExchangeOps(group, EPDispatch(group), combine, Sequential(Scale(), combine))


_agreed: dict[tuple[Hashable, ...], int] = {}


def agreed_tokens(x: Tensor, process_group: dist.ProcessGroup, *exchange: Hashable) -> int:
    """The largest number of tokens that a rank had in the first call for an exchange, at least one.

    The first call is collective.

    Args:
        x: tokens [T, H] of this rank.
        process_group, exchange: the arguments of :func:`exchange_ops`.
    """
    key = process_group, *exchange
    if key not in _agreed:
        most = torch.tensor(max(1, x.shape[0]), device=x.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, process_group)
        _agreed[key] = int(most)
    return _agreed[key]
