"""Several ways to compute a :class:`Problem`: ours with and without fusions, and hand-written ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusible
from fusible.fuser import registry
from fusible.ops.kernels.pytorch.grouped_mm import MAX_GROUPS

from .contestant import Contestant, activated, leaf
from .peers import PEERS
from .problem import GLUS, Problem
from .recipes import RECIPES, rounding

STREAMS = 4


def experts(problem: Problem) -> fusible.Sequential:
    """Our layer on the memory of the problem's weights."""
    groups, columns, features = problem.w1.shape
    fc1 = fusible.GroupedLinear(groups, features, columns, bias=False, device="meta")
    fc2 = fusible.GroupedLinear(groups, columns // 2, features, bias=False, device="meta")
    fc1.weight, fc2.weight = nn.Parameter(problem.w1), nn.Parameter(problem.w2)
    act = fusible.SwiGLU() if problem.glu == "swiglu" else fusible.Pointwise(GLUS[problem.glu], halves="concat")
    return fusible.Sequential(fc1, act, fusible.Scale(), fc2)


def fused(problem: Problem) -> Contestant:
    """Our layer, with the plan that the compiler chooses."""
    model, x, scales = experts(problem), leaf(problem.x), leaf(problem.scales)
    leaves = (x, scales, *model.parameters())
    return Contestant(lambda: model(x, split_sizes=problem.split_sizes, scales=scales), leaves, problem.dy)


def on_triton(problem: Problem) -> Contestant:
    """The same plan, on our kernels in Triton."""
    whole = fused(problem)

    def forward() -> Tensor:
        with fusible.config(backend="triton"):
            return whole.forward()

    return Contestant(forward, whole.leaves, problem.dy)


def unfused(problem: Problem) -> Contestant:
    """Our layer without fusions, op by op."""
    whole, names = fused(problem), [fusion.name for fusion in registry]

    def forward() -> Tensor:
        with fusible.config(disable_fusions=names):
            return whole.forward()

    return Contestant(forward, whole.leaves, problem.dy)


def under_recipe(problem: Problem, name: str) -> Contestant:
    """Our layer under a recipe, with weights quantised at every forward."""
    whole, recipe = fused(problem), RECIPES[name]

    def forward() -> Tensor:
        with fusible.config(recipe=recipe):
            return whole.forward()

    return Contestant(forward, whole.leaves, problem.dy, rounding=rounding(recipe))


def loop(problem: Problem) -> Contestant:
    """An ``nn.Linear`` pair for each expert, called on its rows; the outputs are put together."""
    sizes = problem.split_sizes.tolist()  # waits for the device, as such code does
    ups = [_linear(w) for w in problem.w1]
    downs = [_linear(w) for w in problem.w2]
    x, scales = leaf(problem.x), leaf(problem.scales)

    def forward() -> Tensor:
        parts = []
        for up, down, rows, scale in zip(ups, downs, torch.split(x, sizes), torch.split(scales, sizes), strict=True):
            parts.append(down(activated(problem.glu, up(rows), scale)))
        return torch.cat(parts)

    return Contestant(forward, (x, scales, *(m.weight for m in (*ups, *downs))), problem.dy)


def loop_on_streams(problem: Problem) -> Contestant:
    """The loop with its experts on four streams in turn; autograd runs each backward on the stream of its forward."""
    whole, sizes = loop(problem), problem.split_sizes.tolist()
    x, scales, *weights = whole.leaves
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]  # type: ignore[no-untyped-call]
    groups = len(weights) // 2

    def forward() -> Tensor:
        current = torch.cuda.current_stream()
        parts = []
        for stream in streams:
            stream.wait_stream(current)
        for g, (rows, scale) in enumerate(zip(torch.split(x, sizes), torch.split(scales, sizes), strict=True)):
            with torch.cuda.stream(streams[g % STREAMS]):
                hidden = activated(problem.glu, F.linear(rows, weights[g]), scale)
                parts.append(F.linear(hidden, weights[groups + g]))
        for stream in streams:
            current.wait_stream(stream)
        return torch.cat(parts)

    return Contestant(forward, whole.leaves, problem.dy)


def grouped_mm(problem: Problem) -> Contestant:
    """``torch.nn.functional.grouped_mm`` and torch's own autograd."""
    return _by_grouped_mm(problem, activated)


def grouped_mm_compiled(problem: Problem) -> Contestant:
    """:func:`grouped_mm` with the activation compiled into one kernel."""
    return _by_grouped_mm(problem, torch.compile(activated, dynamic=True))


@dataclass(frozen=True)
class Dense(Contestant):
    """The matrix products alone, as if one expert took all rows."""

    w1: Tensor
    w2: Tensor
    x: Tensor
    pre: Tensor
    hidden: Tensor

    def backward(self, y: Tensor) -> tuple[Tensor, ...]:
        dhidden, dw2 = self.dy @ self.w2, self.dy.mT @ self.hidden
        return dhidden, dw2, self.pre @ self.w1, self.pre.mT @ self.x


def dense(problem: Problem) -> Contestant:
    """The dense products as an upper bound; they compute no activation."""
    x, w1, w2 = problem.x, problem.w1[0], problem.w2[0]
    pre = x @ w1.mT
    hidden = pre[:, : w2.shape[1]].contiguous()

    def forward() -> Tensor:
        x @ w1.mT
        return hidden @ w2.mT

    return Dense(forward, (), problem.dy, w1, w2, x, pre, hidden)


CONTESTANTS: dict[str, Callable[[Problem], Contestant]] = {
    "fused": fused,
    "triton": on_triton,
    "unfused": unfused,
    "loop": loop,
    "loop-on-streams": loop_on_streams,
    "grouped_mm": grouped_mm,
    "grouped_mm+compile": grouped_mm_compiled,
    "dense": dense,
}


def refusal(name: str, problem: Problem) -> str | None:
    """The reason why a contestant cannot take part, or None."""
    if name in PEERS:
        why = PEERS[name].refusal(problem.x.device, problem.x.dtype)
        return why or (None if problem.glu in PEERS[name].glus else f"does not compute {problem.glu}")
    if name == "loop-on-streams":
        return None if problem.x.is_cuda else "needs a CUDA device"
    if name == "triton":
        return None if problem.x.is_cuda and find_spec("triton") else "needs a CUDA device, and Triton"
    if not name.startswith("grouped_mm"):
        return None
    if (groups := problem.split_sizes.numel()) > MAX_GROUPS:
        return f"takes at most {MAX_GROUPS} groups, got {groups}"
    if not problem.x.is_cuda or problem.x.dtype != torch.bfloat16:
        return "needs bfloat16 on a CUDA device"
    return None if hasattr(F, "grouped_mm") else f"torch {torch.__version__} has no grouped_mm"


def _by_grouped_mm(problem: Problem, activation: Callable[[str, Tensor, Tensor], Tensor]) -> Contestant:
    x, scales, w1, w2 = map(leaf, (problem.x, problem.scales, problem.w1, problem.w2))
    ends = problem.split_sizes.cumsum(0).to(torch.int32)

    def forward() -> Tensor:
        hidden = activation(problem.glu, F.grouped_mm(x, w1.mT, offs=ends), scales)
        return F.grouped_mm(hidden, w2.mT, offs=ends)

    return Contestant(forward, (x, scales, w1, w2), problem.dy)


def _linear(weight: Tensor) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    module.weight = nn.Parameter(weight)
    return module


def race(problem: Problem, names: Sequence[str]) -> dict[str, Contestant]:
    """The named contestants that can take part."""
    return {name: CONTESTANTS[name](problem) for name in names if refusal(name, problem) is None}
