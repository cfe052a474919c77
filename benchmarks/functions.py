"""Times experts whose activation is a function of a user's against the built-in one.

Short and long functions, functions of numbers of columns, and a bias before the gate; inside the grouped GEMM, as a
kernel of their own, and under ``torch.compile`` behind ``grouped_mm``; and how long the kernels take to be ready.
``python -m fusible.benchmarks.functions`` takes the sizes of four published models.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible
from fusible.ops.formats.recipe import Recipe
from fusible.ops.kernels import Layout, kernel_cache
from fusible.ops.kernels.jit import epilogue

from .problem import Sizes, add_size_arguments, sizes_of, split_sizes
from .recipes import RECIPES
from .timing import interleaved, markdown, relative

_FUSIONS = frozenset({"GroupedMLP", "GroupedLinearGLU"})
Function = Callable[..., Tensor]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """A short function."""
    return F.silu(gate) * up


def mish_glu(gate: Tensor, up: Tensor) -> Tensor:
    """A long function, with some 45 instructions per element of the backward."""
    return F.mish(gate) * up


def sloped(gate: Tensor, up: Tensor, beta: Tensor) -> Tensor:
    """The short function with a learned slope for each expert and column."""
    return gate * torch.sigmoid(gate * beta) * up


def shifted(gate: Tensor, up: Tensor, beta: Tensor, shift: Tensor) -> Tensor:
    """The short function with two numbers for each column."""
    return gate * torch.sigmoid(gate * beta) * (up + shift)


class FunctionContestant(NamedTuple):
    """Experts with some activation, and whether they may be fused."""

    model: Callable[..., Tensor]
    parameters: Sequence[Tensor]
    fused: bool = True

    def step(self, x: Tensor, sizes: Tensor, dy: Tensor) -> None:
        """Forward and backward."""
        with nullcontext() if self.fused else fusible.config(disable_fusions=_FUSIONS):
            torch.autograd.grad(self.model(x, split_sizes=sizes), [x, *self.parameters], dy)

    def infer(self, x: Tensor, sizes: Tensor) -> None:
        """Forward without gradients."""
        with torch.no_grad(), nullcontext() if self.fused else fusible.config(disable_fusions=_FUSIONS):
            self.model(x, split_sizes=sizes)


def function_of(function: Function, sizes: Sizes, device: str, **columns: torch.dtype) -> list[nn.Module]:
    """A function of gate, up and per-column numbers of each expert, which have these types."""
    start = {n: torch.ones(sizes.experts, sizes.hidden, device=device, dtype=dtype) for n, dtype in columns.items()}
    return [fusible.Pointwise(function, halves="concat", columns=start)]


def biased(sizes: Sizes, device: str) -> list[nn.Module]:
    """The function with a bias, shared by all experts, before gate and up meet."""
    return [fusible.Bias(2 * sizes.hidden, device=device, dtype=torch.bfloat16), fusible.SwiGLU()]


ACTS: Mapping[str, Callable[[Sizes, str], list[nn.Module]]] = {
    "SwiGLU": lambda sizes, device: [fusible.SwiGLU()],
    "function": partial(function_of, swiglu),
    "long function": partial(function_of, mish_glu),
    "column": partial(function_of, sloped, beta=torch.bfloat16),
    "two columns": partial(function_of, shifted, beta=torch.bfloat16, shift=torch.float32),
    "bias": biased,
}
"""The op between the linears, by name; the others are compared with the first."""
UNFUSED, COMPILED = ("SwiGLU", "function", "two columns", "bias"), {"function": swiglu, "long function": mish_glu}
CONTESTANTS = (*ACTS, *(f"{name} unfused" for name in UNFUSED), *(f"{name} compiled" for name in COMPILED))
"""Unfused: as a kernel of its own. Compiled: ``grouped_mm`` and the function, all of it under ``torch.compile``."""
PUBLISHED = {"qwen3": 32768, "mixtral": 8192, "gpt-oss": 32768, "deepseek-v3-ep8": 8192}
"""Tokens of each preset that is timed without any being asked for."""


def contestant(name: str, sizes: Sizes, device: str, recipe: Recipe | None = None) -> FunctionContestant:
    """One of :data:`CONTESTANTS`, whose linears follow the recipe unless it is compiled."""
    act, _, kind = name.rpartition(" ")
    if kind == "compiled":
        return _compiled(COMPILED[act], sizes, device)
    fused, (first, second) = kind != "unfused", _linears(sizes, device, recipe)
    model = fusible.Sequential(first, *ACTS[name if fused else act](sizes, device), second)
    return FunctionContestant(model, [*model.parameters()], fused)


@lru_cache(maxsize=1)
def _linears(sizes: Sizes, device: str, recipe: Recipe | None) -> list[nn.Module]:
    """Linears that all our contestants share, so that the addresses of weights make no difference."""
    shapes = (sizes.features, 2 * sizes.hidden), (sizes.hidden, sizes.features)
    options = {"bias": False, "device": device, "dtype": torch.bfloat16, "recipe": recipe}
    return [fusible.GroupedLinear(sizes.experts, *shape, **options) for shape in shapes]  # type: ignore[arg-type]


def _compiled(function: Function, sizes: Sizes, device: str) -> FunctionContestant:
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    weights = [
        torch.randn(sizes.experts, out, depth, **options)  # type: ignore[call-overload]
        for out, depth in ((2 * sizes.hidden, sizes.features), (sizes.features, sizes.hidden))
    ]

    def forward(x: Tensor, split_sizes: Tensor) -> Tensor:
        ends = split_sizes.cumsum(0).to(torch.int32)
        gate, up = F.grouped_mm(x, weights[0].mT, offs=ends).chunk(2, -1)
        return F.grouped_mm(function(gate, up), weights[1].mT, offs=ends)

    return FunctionContestant(torch.compile(forward, dynamic=False), weights)


class Times(NamedTuple):
    """Median seconds by contestant, and the ratio to the first one's from neighbouring calls."""

    seconds: Mapping[str, float]
    ratios: Mapping[str, float]


def times(
    sizes: Sizes, device: str, rounds: int, names: Sequence[str], recipe: Recipe | None = None
) -> Mapping[str, Times]:
    """Times of both directions together, and of the forward alone."""
    every = {name: contestant(name, sizes, device, recipe) for name in names}
    groups = split_sizes("random", sizes.experts, sizes.rows).to(device)
    x = torch.randn(sizes.rows, sizes.features, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    both: dict[str, Callable[[], None]] = {n: partial(each.step, x, groups, dy) for n, each in every.items()}
    forward: dict[str, Callable[[], None]] = {n: partial(each.infer, x, groups) for n, each in every.items()}
    for function in (*both.values(), *forward.values()):  # compiled, and captured for replays
        for _ in range(3):
            function()
    return {
        kind: Times(interleaved(each, rounds, device, steady=True), relative(each, 4 * rounds, device))
        for kind, each in (("forward and backward", both), ("forward", forward))
    }


class FirstCalls(NamedTuple):
    """Seconds until the kernels of both directions are ready: compiled, and read from the cache on disk."""

    compiled: float
    kept: float


def first_calls(function: Function) -> FirstCalls:
    """First-call times of a function of gate and up in the grouped GEMM, with an empty cache and then a filled one."""
    spec = fusible.Pointwise(function, halves="concat").spec
    assert spec is not None
    assert spec.program is not None
    forms = [
        epilogue.form_of(spec.program, backward, layout, torch.bfloat16, None, 768, False)
        for backward, layout in ((False, Layout.NT), (True, Layout.NN))
    ]
    with _empty_cache():
        return FirstCalls(_until_ready(forms), _until_ready(forms))


def _until_ready(forms: Sequence[epilogue.EpilogueForm]) -> float:
    epilogue.handles.cache_clear()
    start = time.perf_counter()
    for form in forms:
        why = epilogue.refusal(form)
        assert why is None, why
    return time.perf_counter() - start


@contextmanager
def _empty_cache() -> Iterator[None]:
    before = os.environ.get("FUSIBLE_CACHE_DIR")
    with TemporaryDirectory() as folder:
        os.environ["FUSIBLE_CACHE_DIR"] = folder
        kernel_cache.cache_clear()
        try:
            yield
        finally:
            del os.environ["FUSIBLE_CACHE_DIR"]
            if before is not None:
                os.environ["FUSIBLE_CACHE_DIR"] = before
            kernel_cache.cache_clear()


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the time until kernels are ready, and a Markdown table for each preset."""
    parser = argparse.ArgumentParser(prog="functions", description=__doc__.splitlines()[0] if __doc__ else None)
    add_size_arguments(parser, [], list(PUBLISHED), nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contestants", choices=CONTESTANTS, nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--recipe", choices=RECIPES, help="of the linears of all but those that are compiled")
    parser.add_argument("--no-first-calls", action="store_true", help="not how long the kernels take to be ready")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not args.no_first_calls:
        for function in (swiglu, mish_glu):
            first = first_calls(function)
            print(f"{function.__name__}: compiled in {first.compiled:.2f} s, kept {first.kept * 1e3:.1f} ms")
    for preset in args.preset:
        for tokens in args.tokens or [PUBLISHED.get(preset, 4096)]:
            sizes = sizes_of(args, preset, tokens)
            measured = times(sizes, device, args.rounds, args.contestants, RECIPES.get(args.recipe))
            shape = f"{preset}, {tokens} tokens: {sizes.experts} experts of {sizes.features} x {sizes.hidden}"
            shape += f", {args.recipe or 'bf16'}"
            print(_table(f"{shape}, {device}, ms (of {args.contestants[0]})", measured), flush=True)


def _table(heading: str, measured: Mapping[str, Times]) -> str:
    rows = [
        [name, *[f"{each.seconds[name] * 1e3:.3f} ({each.ratios[name]:.3f})" for each in measured.values()]]
        for name in measured["forward"].seconds
    ]
    return markdown((heading, *measured), rows)


if __name__ == "__main__":
    main()
