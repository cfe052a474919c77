"""The matrix products of the experts, each alone, and several ways to compute them: ours and others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.fuser.contract import tracing as trace
from fusible.ops import kernels
from fusible.ops.formats.copies import Columns
from fusible.ops.formats.recipe import Recipe
from fusible.ops.kernels.extension import compiled
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.hopper.operands import LAYOUTS
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout, stacked
from fusible.ops.kernels.pytorch import grouped_mm as grouped_mm_backend
from fusible.ops.quantized.linear import product, transposed_operand, weight_grad
from fusible.ops.quantized.operands import tokens_for
from fusible.ops.quantized.weights import operands_of

from .problem import Problem

Function = Callable[[], Tensor]


def products(problem: Problem, main_grad: bool = False) -> Iterator[tuple[str, GroupedGemm]]:
    """The matrix products of the experts, by name: forward, gradients of the rows, gradients of the weights.

    With ``main_grad``, also the gradients of the weights accumulated into a float32 buffer.
    """
    p, generator = problem, torch.Generator(problem.x.device).manual_seed(1)
    shape = p.x.shape[0], p.w1.shape[1]
    wide = torch.randn(shape, generator=generator, device=p.x.device, dtype=p.x.dtype)  # stands for a gradient
    hidden = wide[:, : p.w2.shape[2]].contiguous()
    operands = {
        "fc1": (Layout.NT, p.x, p.w1),
        "fc2": (Layout.NT, hidden, p.w2),
        "dgrad1": (Layout.NN, wide, p.w1),
        "dgrad2": (Layout.NN, p.dy, p.w2),
        "wgrad1": (Layout.TN, wide, p.x),
        "wgrad2": (Layout.TN, p.dy, hidden),
    }
    for name, (layout, a, b) in operands.items():
        yield name, _product(layout, a, b, p.split_sizes)
        if main_grad and layout is Layout.TN:
            yield f"{name}+=", _product(layout, a, b, p.split_sizes, main_grad)


def ours(p: GroupedGemm) -> Function:
    """Our product, as the ops call it."""

    def run() -> Tensor:
        kernels.grouped_gemm(p.layout, p.a, p.b, p.split_sizes, out=p.out, terms=kernels.Terms(beta=p.beta))
        return stacked(p.out)

    return run


def tiles(p: GroupedGemm) -> dict[str, Function]:
    """Our kernels for this product by the name of their tile; empty if they cannot compute it."""
    if hopper.refusal(p) is not None:
        return {}

    def run(variant: int) -> Tensor:
        hopper.launch(p, variant)
        return stacked(p.out)

    extension, wide = compiled(), stacked(p.out).dtype is torch.float32
    built = extension.FP32_OUTPUT_TILE_VARIANTS if wide else extension.TILE_VARIANTS
    return {f"tile {variant}": partial(run, variant) for variant in built[LAYOUTS[p.layout]]}


def dense(p: GroupedGemm) -> Function:
    """One dense product with the same number of operations."""
    b = stacked(p.b)
    left, right = {
        Layout.NT: lambda: (p.a, b[0].mT),
        Layout.NN: lambda: (p.a, b[0]),
        Layout.TN: lambda: (p.a.mT, b),
    }[p.layout]()
    out = p.a.new_empty(left.shape[0], right.shape[1])
    return lambda: torch.mm(left, right, out=out)


def loop(p: GroupedGemm) -> Function:
    """One product per group; it knows the sizes beforehand, and so never waits for the device."""
    sizes, b, out = p.split_sizes.tolist(), stacked(p.b), stacked(p.out)
    lefts: Sequence[Tensor] = torch.split(p.a, sizes)
    if p.layout is Layout.TN:
        parts = list(zip([left.mT for left in lefts], torch.split(b, sizes), out, strict=True))
    else:
        parts = list(zip(lefts, b.mT if p.layout is Layout.NT else b, torch.split(out, sizes), strict=True))

    def run() -> Tensor:
        for left, right, result in parts:
            torch.mm(left, right, out=result)
        return out

    return run


def grouped_mm(p: GroupedGemm) -> Function:
    """``torch.nn.functional.grouped_mm``, which allocates its result."""
    ends, b = p.split_sizes.cumsum(0).to(torch.int32), stacked(p.b)
    left, right = p.a.mT if p.layout is Layout.TN else p.a, b.mT if p.layout is Layout.NT else b
    return lambda: F.grouped_mm(left, right, offs=ends)


CONTESTANTS: dict[str, Callable[[GroupedGemm], Function]] = {
    "ours": ours,
    "dense": dense,
    "loop": loop,
    "grouped_mm": grouped_mm,
}


def refusal(name: str, p: GroupedGemm) -> str | None:
    """The reason why a contestant cannot take part, or None."""
    if name in ("loop", "grouped_mm") and p.beta is not None:
        return "does not add to float32"
    return grouped_mm_backend.refusal(p) if name == "grouped_mm" else None


def backend_of(p: GroupedGemm) -> str:
    """The backend that runs our product."""
    with trace.recording() as recorded:
        ours(p)()
    return recorded.calls[0].kernel


def _product(layout: Layout, a: Tensor, b: Tensor, sizes: Tensor, main_grad: bool = False) -> GroupedGemm:
    columns = b.shape[1] if layout is Layout.NT else b.shape[-1]
    rows = (sizes.shape[0], a.shape[1]) if layout is Layout.TN else (a.shape[0],)
    out = a.new_zeros((*rows, columns), dtype=torch.float32 if main_grad else a.dtype)
    return GroupedGemm(layout, a, b, sizes, out, beta=1.0 if main_grad else None)


def under_recipe(p: GroupedGemm, recipe: Recipe) -> Function | None:
    """The product of quantised operands; None if the recipe does not quantise this product."""
    if p.layout is Layout.TN:
        return _wgrad_under(p, recipe) if recipe.quantises_wgrad else None
    back, out = p.layout is Layout.NN, p.out
    rows = tokens_for(None, recipe, p.a, p.split_sizes, rows=True, wgrad=False, is_gradient=back).rows
    of_weight = operands_of(recipe, p.b, back)
    kept = of_weight.backward
    weight = of_weight.forward if kept is None else transposed_operand(recipe, kept)
    assert rows is not None
    assert isinstance(out, Tensor)
    return lambda: product(recipe, rows, weight, p.split_sizes, out.dtype, out=out)


def _wgrad_under(p: GroupedGemm, recipe: Recipe) -> Function:
    a, b = (
        tokens_for(None, recipe, tokens, p.split_sizes, rows=False, wgrad=True, is_gradient=is_gradient).for_wgrad
        for tokens, is_gradient in ((p.a, True), (stacked(p.b), False))
    )
    assert isinstance(a, Columns)
    assert isinstance(b, Columns)
    terms = kernels.NO_TERMS if p.beta is None else kernels.ADDED
    return lambda: stacked(weight_grad(a, b, p.split_sizes, len(p.a), out=p.out, terms=terms))
