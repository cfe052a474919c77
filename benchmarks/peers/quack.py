"""QuACK (``quack-kernels``): grouped GEMMs in CuTe DSL with gated activations as epilogues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..contestant import Contestant, InterleavedContestant, interleaved, leaf
from ..problem import Problem
from ..timing import interleaved as timed_by_turns
from .peer import HOPPER, Peer
from .routed import SortedRows, routed

# Rows and columns of a tile, and whether two groups of warps work on tiles by turns.
TILES = ((256, 128, False), (256, 192, False), (128, 256, False), (128, 128, True), (128, 192, True), (192, 128, True))
Launch = Callable[[Any], Any]  # of a configuration


@cache
def configurations(device: torch.device) -> Sequence[Any]:
    """The configurations to try for each product. They stay alive, as the library caches launches by their identity."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != HOPPER[0]:
        return (None,)  # the default of the library
    make = partial(import_module("quack.gemm_config").GemmConfig, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)
    return tuple(make(tile_m=m, tile_n=n, pingpong=pingpong) for m, n, pingpong in TILES)


class Tuner:
    """The fastest configuration of each product, timed when its shapes are first seen.

    The library's own tuner tries dozens, which takes minutes per product.
    """

    def __init__(self) -> None:
        self._best: dict[tuple[Any, ...], Any] = {}

    def run(self, key: tuple[Any, ...], launch: Launch, device: torch.device) -> Any:
        """Launches the fastest configuration; finds it first if the key is new."""
        if key not in self._best:
            self._best[key] = _fastest(launch, configurations(device), device)
        return launch(self._best[key])


def _fastest(launch: Launch, candidates: Sequence[Any], device: torch.device) -> Any:
    works, failure = [], None
    for candidate in candidates:
        try:
            launch(candidate)
        except Exception as error:
            failure = error
        else:
            works.append(candidate)
    if not works:
        assert failure is not None
        raise failure
    if len(works) == 1:
        return works[0]
    seconds = timed_by_turns({str(i): partial(launch, c) for i, c in enumerate(works)}, 3, device, steady=True)
    return works[int(min(seconds, key=seconds.__getitem__))]


_tuner = Tuner()


class QuackLayout(NamedTuple):
    """The first row of each group, and how W1 is stored."""

    starts: Tensor  # int32 [E + 1]
    concatenated: bool  # the rows of the gate stand first in W1, instead of by turns

    def of(self, operand: str) -> tuple[str, ...] | None:
        """The keyword argument that names the operand stored in this way."""
        return (operand,) if self.concatenated else None


def _product(name: str, a: Tensor, b: Tensor, out: Tensor, **form: Any) -> Tensor:
    """A grouped GEMM. The library accepts a configuration only in the function behind its tuner."""
    gemm = import_module("quack.gemm_interface").gemm_tuned.fn
    key = name, tuple(a.shape), tuple(b.shape), a.dtype, form["concat_layout"]
    _tuner.run(key, lambda config: gemm(a, b, out, config=config, **form), a.device)
    return out


class _QuackExperts(torch.autograd.Function):
    """The experts with a separate op for row scales, as no epilogue of the library multiplies rows in a forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scales: Tensor, w1: Tensor, w2: Tensor, layout: QuackLayout) -> Tensor:
        pre, hidden = x.new_empty(x.shape[0], w1.shape[1]), x.new_empty(x.shape[0], w2.shape[2])
        gated = partial(
            import_module("quack.gemm_interface").gemm_gated,
            *(x, w1.mT),
            activation="swiglu",
            preact_out=pre,
            postact_out=hidden,
            cu_seqlens_m=layout.starts,
            tuned=False,
            concat_layout=layout.of("B"),
        )
        key = "fc1", tuple(x.shape), tuple(w1.shape), x.dtype, layout.concatenated
        _tuner.run(key, lambda config: gated(config=config), x.device)
        y = torch.empty_like(x)
        narrower = hidden if w2.shape[2] < w2.shape[1] else y
        if narrower is hidden:
            hidden.mul_(scales.unsqueeze(-1))
        _product("fc2", hidden, w2.mT, y, cu_seqlens_m=layout.starts, concat_layout=None)
        if narrower is y:
            y.mul_(scales.unsqueeze(-1))
        ctx.layout = layout
        ctx.save_for_backward(x, scales, w1, w2, pre)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        x, scales, w1, w2, pre = ctx.saved_tensors
        layout, dy = ctx.layout, dy.contiguous()
        dgated = partial(
            import_module("quack.gemm_interface").gemm_dgated,
            *(dy, w2),
            PreAct=pre,
            activation="swiglu",
            colvec_scale=scales,
            colvec_reduce=True,
            cu_seqlens_m=layout.starts,
            dynamic_scheduler=False,
            tuned=False,
        )
        key = "dgrad2", tuple(dy.shape), tuple(w2.shape), dy.dtype
        dpre, hidden, dscales = _tuner.run(key, lambda config: dgated(config=config), dy.device)
        rows, sizes = {"cu_seqlens_m": layout.starts}, {"cu_seqlens_k": layout.starts}
        dw2 = _product("wgrad2", dy.mT, hidden, torch.empty_like(w2), **sizes, concat_layout=None)
        dx = _product("dgrad1", dpre, w1, torch.empty_like(x), **rows, concat_layout=layout.of("B"))
        dw1 = torch.empty_like(w1)
        _product("wgrad1", x.mT, dpre, dw1.mT, **sizes, concat_layout=layout.of("out"))
        return dx, dscales.to(scales.dtype), dw1, dw2, None


def starts_of(split_sizes: Tensor) -> Tensor:
    """The first row of each group, int32 [E + 1]."""
    return torch.nn.functional.pad(split_sizes.cumsum(0), (1, 0)).to(torch.int32)


def experts(rows: SortedRows, w1: Tensor, w2: Tensor) -> Tensor:
    """The experts of rows sorted by expert; W1 has gate rows first."""
    layout = QuackLayout(starts_of(rows.split_sizes), concatenated=True)
    y: Tensor = _QuackExperts.apply(rows.x, rows.scales, w1, w2, layout)  # type: ignore[no-untyped-call]
    return y


def contestant(problem: Problem) -> Contestant:
    """QuACK as a contestant, with W1 stored in the order that it prefers."""
    layout = QuackLayout(starts_of(problem.split_sizes), concatenated=False)
    x, scales, w1, w2 = map(leaf, (problem.x, problem.scales, interleaved(problem.w1), problem.w2))

    def forward() -> Tensor:
        y: Tensor = _QuackExperts.apply(x, scales, w1, w2, layout)  # type: ignore[no-untyped-call]
        return y

    return InterleavedContestant(forward, (x, scales, w1, w2), problem.dy)


PEER = Peer(
    "quack",
    "quack.gemm_interface",
    "Hopper or Blackwell, bfloat16, `pip install quack-kernels`; six tiles a product are tried at the first call",
    contestant,
    routed(experts),
)
