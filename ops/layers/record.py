"""Recording of the experts that routers choose, for replay: in a rollout, for the update that learns from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...fuser.contract.torch_private import current_graph_task

if TYPE_CHECKING:
    from .route import Routes

_MOST_IN_16_BITS = 2**15
"""The most experts whose ids int16 holds."""


class Record:
    """The experts of the calls of some routers, in the layout that inference engines store.

    Attributes:
        names: the names of the routers in the model, in the order of their layers; empty for a single router.
    """

    def __init__(self, routers: Sequence[nn.Module], names: Sequence[str] = ("",)) -> None:
        self.names = tuple(names)
        self._routers = routers
        self._ids: list[list[Tensor]] = [[] for _ in routers]

    @contextmanager
    def recording(self) -> Iterator[Record]:
        """Records the choices of the routers within the body."""
        with ExitStack() as hooks:
            for router, ids in zip(self._routers, self._ids, strict=True):
                hooks.enter_context(router.register_forward_hook(_Noting(ids)))
            yield self

    @property
    def ids(self) -> Tensor:
        """The experts of each token in each layer, of all calls together, int16 [T, L, k]; of a single router [T, k].

        Invalid tokens have -1. With more than 32768 experts, ids are int32.

        Raises:
            RuntimeError: a router has had no tokens, or more of them or more choices than another one.
        """
        tokens = [sum(ids.shape[0] for ids in of_router) for of_router in self._ids]
        if not self._ids or not all(self._ids) or len(set(tokens)) > 1:
            raise RuntimeError(
                f"record: each router must have had tokens, as many as the others, got {self._each(tokens)}"
            )
        layers = [torch.cat(of_router) for of_router in self._ids]
        choices = [ids.shape[1] for ids in layers]
        if len(set(choices)) > 1:
            raise RuntimeError(f"record: all routers must make as many choices a token, got {self._each(choices)}")
        return layers[0] if self.names == ("",) else torch.stack(layers, 1)

    def _each(self, numbers: Sequence[int]) -> str:
        """A number of each router, with its name."""
        named = zip(self.names, numbers, strict=True)
        return ", ".join(f"{name or 'the router'}: {n}" for name, n in named) or "no router"


class _Noting:
    """A forward hook that records a router's choice, but none that a backward computes again."""

    def __init__(self, ids: list[Tensor]) -> None:
        self._ids = ids

    def __call__(self, router: nn.Module, arguments: object, routes: Routes) -> None:
        if torch.compiler.is_dynamo_compiling() or current_graph_task() == -1:
            fits = routes.tokens_per_expert.shape[0] <= _MOST_IN_16_BITS
            self._ids.append(routes.top_k_index.to(torch.int16 if fits else torch.int32))
