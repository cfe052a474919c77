"""Times experts whose activation is a function of a user's against the built-in one.

Short and long functions, functions of numbers of columns, and a bias before the gate; inside the grouped GEMM and as a
kernel of their own; with ``--compiled`` also ``grouped_mm`` and the same function under ``torch.compile``, and with
``--first-calls`` how long a compiler takes. Run it with ``python -m fusible.benchmarks.functions``.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusible
from fusible.ops.kernels import Layout, kernel_cache
from fusible.ops.kernels.jit import epilogue

from .problem import Sizes, add_size_arguments, sizes_of, split_sizes
from .timing import interleaved, markdown

_FUSIONS = frozenset({"GroupedMLP", "GroupedLinearGLU"})
Function = Callable[..., Tensor]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """A short function."""
    return F.silu(gate) * up


def mish_glu(gate: Tensor, up: Tensor) -> Tensor:
    """A long one: some 45 instructions for an element of the backward."""
    return F.mish(gate) * up


def sloped(gate: Tensor, up: Tensor, beta: Tensor) -> Tensor:
    """The short one with a slope inside, which each expert learns for each column."""
    return gate * torch.sigmoid(gate * beta) * up


def shifted(gate: Tensor, up: Tensor, beta: Tensor, shift: Tensor) -> Tensor:
    """The same with two numbers of a column."""
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


def of_columns(function: Function, sizes: Sizes, device: str, **dtypes: torch.dtype) -> fusible.Pointwise:
    """A function of gate, up and numbers of each expert's columns."""
    start = {n: torch.ones(sizes.experts, sizes.hidden, device=device, dtype=dtype) for n, dtype in dtypes.items()}
    return fusible.Pointwise(function, halves="concat", columns=start)


def contestants(sizes: Sizes, device: str) -> Mapping[str, FunctionContestant]:
    """By name."""

    def experts(*acts: nn.Module, fused: bool = True) -> FunctionContestant:
        shapes = (sizes.features, 2 * sizes.hidden), (sizes.hidden, sizes.features)
        options = {"bias": False, "device": device, "dtype": torch.bfloat16}
        first, second = (fusible.GroupedLinear(sizes.experts, *shape, **options) for shape in shapes)  # type: ignore[arg-type]
        model = fusible.Sequential(first, *acts, second)
        return FunctionContestant(model, [p for p in model.parameters() if p.requires_grad], fused)

    column = partial(of_columns, sloped, sizes, device)
    bf16, fp32 = torch.bfloat16, torch.float32

    def biased() -> list[nn.Module]:
        return [fusible.Bias(2 * sizes.hidden, device=device, dtype=bf16), fusible.SwiGLU()]

    return {
        "SwiGLU": experts(fusible.SwiGLU()),
        "function": experts(fusible.Pointwise(swiglu, halves="concat")),
        "long function": experts(fusible.Pointwise(mish_glu, halves="concat")),
        "column bf16": experts(column(beta=bf16)),
        "column fp32": experts(column(beta=fp32)),
        "column frozen": experts(column(beta=fp32).requires_grad_(False)),
        "column unfused": experts(column(beta=bf16), fused=False),
        "two columns": experts(of_columns(shifted, sizes, device, beta=bf16, shift=fp32)),
        "bias": experts(*biased()),
        "bias unfused": experts(*biased(), fused=False),
    }


def compiled_contestants(sizes: Sizes, device: str) -> Mapping[str, FunctionContestant]:
    """``grouped_mm`` and a function, all of it under ``torch.compile``."""
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    weights = [
        torch.randn(sizes.experts, out, depth, **options)  # type: ignore[call-overload]
        for out, depth in ((2 * sizes.hidden, sizes.features), (sizes.features, sizes.hidden))
    ]

    def experts(function: Function) -> FunctionContestant:
        def forward(x: Tensor, split_sizes: Tensor) -> Tensor:
            ends = split_sizes.cumsum(0).to(torch.int32)
            gate, up = F.grouped_mm(x, weights[0].mT, offs=ends).chunk(2, -1)
            return F.grouped_mm(function(gate, up), weights[1].mT, offs=ends)

        return FunctionContestant(torch.compile(forward), weights)

    return {f"compiled {f.__name__}": experts(f) for f in (swiglu, mish_glu)}


def seconds(
    sizes: Sizes, device: str, rounds: int, compiled: bool = False, chosen: Sequence[str] | None = None
) -> Mapping[str, Mapping[str, float]]:
    """Median seconds of each contestant, both directions and the forward alone."""
    every = {**contestants(sizes, device), **(compiled_contestants(sizes, device) if compiled else {})}
    every = {name: each for name, each in every.items() if chosen is None or name in chosen or compiled}
    groups = split_sizes("random", sizes.experts, sizes.rows).to(device)
    x = torch.randn(sizes.rows, sizes.features, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    both: dict[str, Callable[[], None]] = {n: partial(each.step, x, groups, dy) for n, each in every.items()}
    forward: dict[str, Callable[[], None]] = {n: partial(each.infer, x, groups) for n, each in every.items()}
    for function in (*both.values(), *forward.values()):  # compiled, and captured for replays
        for _ in range(3):
            function()
    return {
        "forward and backward": interleaved(both, rounds, device, steady=True),
        "forward": interleaved(forward, rounds, device, steady=True),
    }


class FirstCalls(NamedTuple):
    """Seconds until the kernels of both directions are ready: compiled, and read from the cache on disk."""

    compiled: float
    kept: float


def first_calls(function: Function) -> FirstCalls:
    """Of a function of gate and up in the grouped GEMM, with an empty cache and with what that leaves in it."""
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
    """Prints a table in Markdown for each preset, and what else is asked for."""
    parser = argparse.ArgumentParser(prog="functions", description=__doc__.splitlines()[0] if __doc__ else None)
    add_size_arguments(parser, 4096, ["qwen3"], nargs="+")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contestants", nargs="+", help="some of them, by name")
    parser.add_argument(
        "--compiled", action="store_true", help="torch.compile of grouped_mm and the same functions too"
    )
    parser.add_argument("--first-calls", action="store_true", help="how long the kernels take to be ready")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.first_calls:
        for function in (swiglu, mish_glu):
            first = first_calls(function)
            print(f"{function.__name__}: compiled in {first.compiled:.2f} s, kept {first.kept * 1e3:.1f} ms")
    for preset in args.preset:
        sizes = sizes_of(args, preset, args.tokens if isinstance(args.tokens, int) else args.tokens[0])
        times = seconds(sizes, device, args.rounds, args.compiled, args.contestants)
        base = next(iter(times["forward"]))
        rows = [
            [name, *[f"{each[name] * 1e3:.3f} ({each[name] / each[base]:.3f})" for each in times.values()]]
            for name in times["forward"]
        ]
        shape = f"{preset}: {sizes.experts} experts of {sizes.features} x {sizes.hidden}, {sizes.rows} rows"
        print(markdown((f"{shape}, bf16, {device}, ms (of {base})", *times), rows))


if __name__ == "__main__":
    main()
