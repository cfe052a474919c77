"""What the benchmarks compute: the experts of one layer, on made-up rows; and how far a result is from the truth."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Preset(NamedTuple):
    """The experts of a published model: how many, their sizes, and how many each token visits."""

    experts: int
    features: int
    hidden: int
    top_k: int


PRESETS = {
    "small": Preset(8, 256, 512, 2),
    "mixtral": Preset(8, 4096, 14336, 2),
    "qwen3-30b-a3b": Preset(128, 2048, 768, 8),
    "gpt-oss-20b": Preset(32, 2880, 2880, 4),
    "deepseek-v3-ep8": Preset(32, 7168, 2048, 8),
}
DISTRIBUTIONS = ("balanced", "random", "zipf", "one")


class Sizes(NamedTuple):
    """What a command line asks for."""

    experts: int
    features: int
    hidden: int
    rows: int


def add_size_arguments(parser: ArgumentParser, tokens: int) -> None:
    """Arguments that say how large the experts and their input are; :func:`sizes_of` reads them."""
    parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes of a published model's experts")
    for name in ("experts", "features", "hidden"):
        parser.add_argument(f"--{name}", type=int, help="instead of the preset's")
    parser.add_argument("--tokens", type=int, default=tokens, help="each makes as many rows as the preset's top-k")


def sizes_of(args: Namespace) -> Sizes:
    """What :func:`add_size_arguments` has read."""
    preset = PRESETS[args.preset]
    experts, features, hidden = (getattr(args, name) or getattr(preset, name) for name in Preset._fields[:3])
    return Sizes(experts, features, hidden, args.tokens * preset.top_k)


def split_sizes(distribution: str, experts: int, rows: int) -> Tensor:
    """int64 [experts] that sum to ``rows``: how many rows each expert gets."""
    shares = {
        "balanced": torch.ones(experts),
        "random": torch.rand(experts, generator=torch.Generator().manual_seed(0)),
        "zipf": 1 / torch.arange(1, experts + 1),
        "one": torch.eye(experts)[0],
    }[distribution]
    ends = (shares.double().cumsum(0) / shares.double().sum() * rows).round().long()
    return torch.diff(ends, prepend=ends.new_zeros(1))


class Result(NamedTuple):
    """The output, and the gradients of everything that it depends on."""

    y: Tensor
    x: Tensor
    scales: Tensor
    w1: Tensor
    w2: Tensor


@dataclass(frozen=True)
class Problem:
    """``y = (swiglu(x W1^T) * scales) W2^T`` by expert, and the gradient ``dy`` that comes back."""

    x: Tensor  # [T, K]
    split_sizes: Tensor  # [E]
    scales: Tensor  # [T]
    w1: Tensor  # [E, 2F, K]
    w2: Tensor  # [E, K, F]
    dy: Tensor  # [T, K]

    @classmethod
    def make(
        cls, experts: int, features: int, hidden: int, sizes: Tensor, device: torch.device | str, dtype: torch.dtype
    ) -> Problem:
        """Random rows of unit variance; weights such that what they give has unit variance too."""
        generator = torch.Generator(device).manual_seed(0)

        def draw(*shape: int, scale: float = 1.0, dtype: torch.dtype = dtype) -> Tensor:
            return (torch.randn(shape, generator=generator, device=device, dtype=torch.float32) * scale).to(dtype)

        rows = int(sizes.sum())
        w1 = torch.empty(experts, 2 * hidden, features, device=device, dtype=dtype)
        w2 = torch.empty(experts, features, hidden, device=device, dtype=dtype)
        for g in range(experts):  # expert by expert: the float32 numbers of all of them may not fit
            w1[g], w2[g] = draw(*w1.shape[1:], scale=features**-0.5), draw(*w2.shape[1:], scale=hidden**-0.5)
        scales = draw(rows, dtype=torch.float32).sigmoid()
        return cls(draw(rows, features), sizes.to(device), scales, w1, w2, draw(rows, features))

    @property
    def flops(self) -> int:
        """Floating-point operations of the matrix products, forward; the backward has twice as many."""
        _, columns, features = self.w1.shape
        return 3 * self.x.shape[0] * columns * features

    def errors(self, result: Result) -> dict[str, float]:
        """Relative error (Frobenius norm) of each tensor against float64 arithmetic on the same rounded inputs."""
        wrong = dict.fromkeys(Result._fields, 0.0)
        norm = dict.fromkeys(Result._fields, 0.0)
        start = 0
        for g, size in enumerate(self.split_sizes.tolist()):
            rows = slice(start, start + size)
            truth = self._truth(g, rows)
            came = Result(result.y[rows], result.x[rows], result.scales[rows], result.w1[g], result.w2[g])
            for name, is_, should in zip(Result._fields, came, truth, strict=True):
                wrong[name] += float((is_.double() - should).square().sum())
                norm[name] += float(should.square().sum())
            start += size
        return {name: (wrong[name] / max(norm[name], 1e-300)) ** 0.5 for name in wrong}

    def _truth(self, group: int, rows: slice) -> Result:
        """What one expert gives, in float64."""
        wide = (self.x[rows], self.scales[rows], self.w1[group], self.w2[group])
        x, scales, w1, w2 = (t.detach().double().requires_grad_() for t in wide)
        with torch.enable_grad():
            gate, up = (x @ w1.mT).chunk(2, -1)
            y = (F.silu(gate) * up * scales.unsqueeze(-1)) @ w2.mT
        return Result(y.detach(), *torch.autograd.grad(y, (x, scales, w1, w2), self.dy[rows].double()))
