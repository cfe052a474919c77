"""Expert-parallel exchanges for layers of other frameworks. Layers with equal exchanges share one group."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

from ..fuser import Sequential
from ..ops import Scale
from ..ops.ep import EPCombine, EPDispatch, Group

_MOST_TOKENS = 1 << 24  # of a group without a capacity, which reserves nothing for them


class ExchangeOptions(NamedTuple):
    """The options of a :class:`fusible.ep.Group` that a layer of another framework needs; described there.

    Attributes:
        max_tokens: None for any number; only possible if the number of rows is not fixed.
    """

    max_tokens: int | None = None
    capacity: float | int | str = "exact"
    combine: str = "exact"
    transport: str = "collective"
    timeout: float = 60.0

    def tokens(self) -> int:
        """The largest number of tokens that a rank gives to a call.

        Raises:
            ValueError: it is not given, but the capacity depends on it.
        """
        if self.max_tokens is not None:
            return self.max_tokens
        if self.capacity != "exact" or self.transport == "symmetric":
            raise ValueError(
                f"max_tokens is needed for capacity {self.capacity!r} with transport {self.transport!r}: the largest "
                "number of tokens that a rank gives to a layer; or leave both at their defaults"
            )
        return _MOST_TOKENS


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
    asked: dict[str, Any] = options._replace(max_tokens=options.tokens())._asdict()
    group = Group(process_group, num_experts=num_experts, top_k=top_k, hidden=hidden, dtype=dtype, **asked)
    combine = EPCombine(group)
    return ExchangeOps(group, EPDispatch(group), combine, Sequential(Scale(), combine))
