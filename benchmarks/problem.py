"""The problem of the benchmarks: the experts of one layer on random rows, and the error of a result."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .arguments import add_common_arguments, positive


class Preset(NamedTuple):
    """The experts of a published model: their number, sizes, top-k and activation.

    If they are spread over ``ranks``, numbers of experts and rows are those of one rank.
    """

    experts: int
    features: int
    hidden: int
    top_k: int
    ranks: int = 1
    glu: str = "swiglu"


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The activation between the linears of an expert in most models."""
    return F.silu(gate) * up


def situ_glu(gate: Tensor, up: Tensor) -> Tensor:
    """Kimi-K3's, with its betas of 4 and 25."""
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


GLUS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"swiglu": swiglu, "situ-glu": situ_glu}
PRESETS = {
    "small": Preset(8, 256, 512, 2),
    "mixtral": Preset(8, 4096, 14336, 2),
    "qwen3": Preset(128, 2048, 768, 8),
    "gpt-oss": Preset(32, 2880, 2880, 4),
    "deepseek-v3-ep8": Preset(32, 7168, 2048, 8, ranks=8),
    "kimi-k3": Preset(896, 3584, 3072, 16, glu="situ-glu"),
    "kimi-k3-ep8": Preset(112, 3584, 3072, 16, ranks=8, glu="situ-glu"),
}
PUBLISHED = ("mixtral", "qwen3", "gpt-oss", "deepseek-v3-ep8")  # measured by default: all contestants fit one GPU
DISTRIBUTIONS = ("balanced", "random", "zipf", "one")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class InaccurateError(Exception):
    """A contestant's result is wrong, so its speed does not count."""


class Sizes(NamedTuple):
    """The sizes of a command line."""

    experts: int
    features: int
    hidden: int
    rows: int


def add_size_arguments(
    parser: ArgumentParser,
    tokens: int | Collection[int],
    preset: str | Collection[str] = "small",
    nargs: str | None = None,
) -> None:
    """Arguments that say how large the experts and their input are; :func:`sizes_of` reads them."""
    parser.add_argument(
        "--preset", choices=PRESETS, nargs=nargs, default=preset, help="sizes of a published model's experts"
    )
    for name in ("experts", "features", "hidden"):
        parser.add_argument(f"--{name}", type=positive, help="instead of the preset's")
    help_ = "each makes as many rows as the preset's top-k, spread over its ranks"
    parser.add_argument("--tokens", type=positive, nargs=nargs, default=tokens, help=help_)


def add_run_arguments(parser: ArgumentParser, contestants: Collection[str], rounds: int) -> None:
    """Adds the arguments for dtype, distribution and contestants, and :func:`add_common_arguments`."""
    cuda = torch.cuda.is_available()
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32", help="of rows and weights")
    splits = "how rows are spread over the experts"
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, nargs="+", default=["random"], help=splits)
    who = "the contestants to time, if they can run here"
    parser.add_argument("--contestants", choices=contestants, nargs="+", default=list(contestants), help=who)
    add_common_arguments(parser, rounds)


def sizes_of(args: Namespace, preset: str | None = None, tokens: int | None = None) -> Sizes:
    """The sizes read by :func:`add_size_arguments`; ``preset`` and ``tokens`` select one of several."""
    model = PRESETS[preset or args.preset]
    experts, features, hidden = (getattr(args, name) or getattr(model, name) for name in Preset._fields[:3])
    return Sizes(experts, features, hidden, (tokens or args.tokens) * model.top_k // model.ranks)


def split_sizes(distribution: str, experts: int, rows: int) -> Tensor:
    """int64 [experts] that sum to ``rows``: how many rows each expert gets.

    They are equal, or spread by a factor exp(0.3 N(0, 1)), or fall with the rank to the power -0.6 (in a random order),
    or one has all.
    """
    generator = torch.Generator().manual_seed(0)
    ranks = torch.randperm(experts, generator=generator) + 1
    shares = {
        "balanced": torch.ones(experts),
        "random": (0.3 * torch.randn(experts, generator=generator)).exp(),
        "zipf": ranks**-0.6,
        "one": torch.eye(experts)[0],
    }[distribution]
    ends = (shares.double().cumsum(0) / shares.double().sum() * rows).round().long()
    return torch.diff(ends, prepend=ends.new_zeros(1))


class Result(NamedTuple):
    """The output and the gradients of all inputs."""

    y: Tensor
    x: Tensor
    scales: Tensor
    w1: Tensor
    w2: Tensor


ROWS = ("y", "x", "scales")  # of a result; its other tensors have a part for each expert


@dataclass(frozen=True)
class Problem:
    """``y = (glu(x W1^T) * scales) W2^T`` by expert, and the gradient ``dy`` of the output."""

    x: Tensor  # [T, K]
    split_sizes: Tensor  # [E]
    scales: Tensor  # [T]
    w1: Tensor  # [E, 2F, K]
    w2: Tensor  # [E, K, F]
    dy: Tensor  # [T, K]
    glu: str = field(default="swiglu", kw_only=True)  # of GLUS

    @classmethod
    def make(
        cls,
        experts: int,
        features: int,
        hidden: int,
        sizes: Tensor,
        device: torch.device | str,
        dtype: torch.dtype,
        glu: str = "swiglu",
    ) -> Problem:
        """Draws rows of unit variance, and weights that keep unit variance."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * scale).to(dtype)

        rows = int(sizes.sum())
        w1 = torch.empty(experts, 2 * hidden, features, device=device, dtype=dtype)
        w2 = torch.empty(experts, features, hidden, device=device, dtype=dtype)
        for g in range(experts):  # expert by expert: the float32 numbers of all of them may not fit
            w1[g], w2[g] = draw(*w1.shape[1:], scale=features**-0.5), draw(*w2.shape[1:], scale=hidden**-0.5)
        scales = draw(rows, dtype=torch.float32).sigmoid()
        return cls(draw(rows, features), sizes.to(device), scales, w1, w2, draw(rows, features), glu=glu)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward's matrix products; the backward has twice as many."""
        _, columns, features = self.w1.shape
        return 3 * self.x.shape[0] * columns * features

    def errors(self, result: Any) -> dict[str, float]:
        """Relative error (Frobenius norm) of each tensor against float64 arithmetic on the same rounded inputs."""
        names = type(result)._fields
        wrong = dict.fromkeys(names, 0.0)
        norm = dict.fromkeys(names, 0.0)
        start = 0
        for g, size in enumerate(self.split_sizes.tolist()):
            rows = slice(start, start + size)
            truth = self._truth(g, rows)
            for name, should in truth._asdict().items():
                came = getattr(result, name)[rows if name in ROWS else g]
                wrong[name] += float((came.double() - should).square().sum())
                norm[name] += float(should.square().sum())
            start += size
        return {name: (wrong[name] / max(norm[name], 1e-300)) ** 0.5 for name in wrong}

    def _truth(self, group: int, rows: slice) -> Any:
        """The result of one expert in float64."""
        wide = (self.x[rows], self.scales[rows], self.w1[group], self.w2[group])
        x, scales, w1, w2 = (t.detach().double().requires_grad_() for t in wide)
        with torch.enable_grad():
            gate, up = (x @ w1.mT).chunk(2, -1)
            y = (GLUS[self.glu](gate, up) * scales.unsqueeze(-1)) @ w2.mT
        return Result(y.detach(), *torch.autograd.grad(y, (x, scales, w1, w2), self.dy[rows].double()))


class Asked(NamedTuple):
    """One problem that a command line asks for."""

    preset: str
    tokens: int
    distribution: str
    problem: Problem

    def __str__(self) -> str:
        return f"{self.preset}, {self.tokens} tokens, {self.distribution}"

    def about(self) -> dict[str, Any]:
        """The parameters of the problem, as a dict."""
        return {name: value for name, value in self._asdict().items() if name != "problem"}


def add_asked_arguments(
    parser: ArgumentParser, tokens: Collection[int], contestants: Collection[str], rounds: int
) -> None:
    """Arguments that :func:`asked` reads: by default, the published models on a GPU, a small one on a CPU."""
    cuda = torch.cuda.is_available()
    add_size_arguments(parser, tokens if cuda else [1024], PUBLISHED if cuda else ["small"], nargs="+")
    add_run_arguments(parser, contestants, rounds)
    parser.add_argument("--main-grad", action="store_true", help="also weight gradients added to float32 buffers")


def asked(args: Namespace) -> Iterator[Asked]:
    """Yields the problem of every preset, number of tokens and distribution in ``args``, made one at a time."""
    for preset, tokens, distribution in product(args.preset, args.tokens, args.distribution):
        experts, features, hidden, rows = sizes_of(args, preset, tokens)
        splits = split_sizes(distribution, experts, rows)
        device, dtype, glu = args.device, DTYPES[args.dtype], PRESETS[preset].glu
        problem = Problem.make(experts, features, hidden, splits, device, dtype, glu)
        yield Asked(preset, tokens, distribution, problem)
