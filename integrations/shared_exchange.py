"""Expert-parallel exchanges in the layers of other frameworks: all layers that exchange alike share one group."""

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
    """What a layer of another framework asks of its :class:`fusible.ep.Group`, where the arguments are described.

    Attributes:
        max_tokens: None: any number; only where the rows are as many as come.
    """

    max_tokens: int | None = None
    capacity: float | int | str = "exact"
    combine: str = "exact"
    transport: str = "collective"
    timeout: float = 60.0

    def tokens(self) -> int:
        """The largest number of tokens that a rank gives to a call.

        Raises:
            ValueError: it is not said, and the capacity depends on it.
        """
        if self.max_tokens is not None:
            return self.max_tokens
        if self.capacity != "exact" or self.transport == "symmetric":
            raise ValueError(
                f"max_tokens is needed for capacity {self.capacity!r} with transport {self.transport!r}: the largest "
                "number of tokens that a rank gives to a layer; or leave both as they are by default"
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
    """Those of all layers of a process whose exchanges are alike; the first call for them is collective.

    Raises:
        ValueError: the options do not fit, or ranks differ in them.
    """
    asked: dict[str, Any] = options._replace(max_tokens=options.tokens())._asdict()
    group = Group(process_group, num_experts=num_experts, top_k=top_k, hidden=hidden, dtype=dtype, **asked)
    combine = EPCombine(group)
    return ExchangeOps(group, EPDispatch(group), combine, Sequential(Scale(), combine))
