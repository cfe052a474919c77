"""Checks of the grouped GEMMs that end in an activation or its backward, on a GPU or its emulation.

Against float64. Everything that must not be read is NaN, and everything that must not be written is checked: rows of no
group, and the rows before and after each output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible import Pointwise, config
from fusible.ops import kernels
from fusible.ops.fused.activation_role import reads_a_row
from fusible.ops.fused.pointwise_chain import PointwiseChain
from fusible.ops.kernels import extension
from fusible.ops.kernels.hopper import epilogue
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.operators.outputs import WantedThrough
from fusible.ops.kernels.problems.gemm import (
    Activate,
    ActivateBackward,
    ActivationGrads,
    GroupedGemm,
    Layout,
    OperandPair,
    Operands,
)
from fusible.ops.kernels.problems.rows import ActivationKernels
from fusible.ops.kernels.pytorch import activation as pointwise
from fusible.ops.kernels.triton import gemm as triton
from fusible.ops.programs.halves import join, split
from fusible.ops.values.activation_spec import ActivationSpec, gated, interleaved

NAMES = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid")
SPECS = {
    **{name: ActivationSpec(name) for name in NAMES},
    **{f"{name} glu": gated(name, None, 1.0, 0.0, "concat") for name in NAMES},
    "clamped": gated("silu", 0.7, 1.702, 1.0, "concat"),
    "gpt-oss": gated("silu", 0.7, 1.702, 1.0, interleaved(1)),
    **{f"blocks of {n}": gated("gelu_tanh", 1.0, 1.0, 0.5, interleaved(n)) for n in (1, 2, 4, 8, 32, 64)},
}
SOME = ("silu glu", "gpt-oss", "blocks of 8", "relu2")
STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}
RAGGED = (131, 0, 77, 304, 1, 512)
GUARD, POISON = 16, -77.0


@dataclass(frozen=True)
class Case:
    """One problem. ``features`` K, ``columns`` F of the hidden rows, and what is asked for."""

    spec: ActivationSpec
    sizes: tuple[int, ...] = RAGGED
    features: int = 136
    columns: int = 192
    tail: int = 37
    dtype: torch.dtype = torch.bfloat16
    scales: torch.dtype | None = torch.float32
    bias: torch.dtype | None = None
    bias_scale: bool = False
    index: torch.dtype = torch.int64
    transposed: bool = False  # both weights, as the kernels read them
    rank: int = 0  # depth of a second pair of operands
    backend: str = hopper.NAME
    variant: int = -1
    function: Callable[..., Tensor] | None = None  # of gate, up, the scale and columns, where the spec is a user's
    vectors: torch.dtype = torch.float32  # of what the function reads of columns; every second one is of ``dtype``
    matrices: torch.dtype | None = None  # of what it reads of elements; None: ``dtype``

    @property
    def width(self) -> int:
        return self.columns * (2 if self.spec.gated else 1)

    @property
    def operands(self) -> list[tuple[int, int, torch.dtype]]:
        """The column operands of the function: number of groups, number of columns, dtype."""
        operands = {} if self.spec.program is None else self.spec.program.column_operands
        return [
            (len(self.sizes) if name[0] == "b" else 1, len(inputs) * self.columns, (self.vectors, self.dtype)[i % 2])
            for i, (name, inputs) in enumerate(operands.items())
        ]

    @property
    def widths_of_matrices(self) -> list[int]:
        """How many numbers of a row the function reads of each matrix."""
        operands = {} if self.spec.program is None else self.spec.program.matrix_operands
        return [len(inputs) * self.columns for inputs in operands.values()]


def case_of(op: Pointwise | PointwiseChain, function: Callable[..., Tensor], **asked: Any) -> Case:
    """A case whose activation is a user's function, times the scale unless the function reads it."""
    assert op.link is not None
    spec = op.link.forward_spec
    assert spec is not None
    count = spec.gated + 1

    def scaled(*inputs: Tensor) -> Tensor:
        return function(*inputs[:count], *inputs[count + 1 :]) * inputs[count]

    return Case(spec, function=function if reads_a_row(op) else scaled, **asked)


class ByAutograd(NamedTuple):
    """The function itself, and its gradients by autograd.

    Attributes:
        columns: [rows, F] each, 2 F of gate and up: what each row reads of columns and of elements.
    """

    function: Callable[..., Tensor]
    columns: list[Tensor]
    NAME: str = "autograd"

    def forward(self, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: Tensor) -> None:
        """As of any activation."""
        with torch.no_grad():
            out.copy_(self.function(*self._leaves(preact, spec, scales)).reshape(out.shape))

    def backward(
        self, dpostact: Tensor, preact: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads
    ) -> None:
        """As of any activation."""
        leaves = [leaf.clone().requires_grad_() for leaf in self._leaves(preact, spec, scales)]
        y = self.function(*[leaf * 1 for leaf in leaves])
        grads = torch.autograd.grad(y, leaves, dpostact.reshape(y.shape), materialize_grads=True)
        dx, (dscales, *dcolumns) = grads[: spec.gated + 1], grads[spec.gated + 1 :]
        join(dx, out.preact)
        if out.vectors is not None:
            for vector in out.vectors:
                count = vector.shape[1] // dpostact.shape[1]  # type: ignore[union-attr]
                join(tuple(dcolumns[:count]), vector)  # type: ignore[arg-type]
                del dcolumns[:count]
        if out.postact is not None:
            out.postact.copy_(y.detach().reshape(out.postact.shape))
        if out.scales is not None:
            out.scales.copy_(dscales.flatten())

    def _leaves(self, preact: Tensor, spec: ActivationSpec, scales: Tensor | None) -> list[Tensor]:
        scales = preact.new_ones(preact.shape[0]) if scales is None else scales
        width = preact.shape[1] // (1 + spec.gated)
        columns = [part for each in self.columns for part in split(each, each.shape[1] // width, spec.block)]
        return [*split(preact, 2 if spec.gated else 1, spec.block), scales.view(-1, 1, 1), *columns]


class Tensors:
    """Inputs of both directions, NaN around them and in rows of no group."""

    def __init__(self, device: str, case: Case) -> None:
        self.device, self.case = device, case
        self.generator = torch.Generator(device).manual_seed(len(case.sizes) * 1000 + case.columns)
        self.valid, experts = sum(case.sizes), len(case.sizes)
        self.tokens = self.valid + case.tail
        self.x, self.dy = self.rows(case.features), self.rows(case.features)
        self.w1 = self.random(experts, case.width, case.features) * case.features**-0.5
        self.w2 = self.random(experts, case.features, case.columns) * case.features**-0.5
        self.low, rank = self.rows(case.rank), case.rank
        self.b1 = self.random(experts, case.width, rank) * max(rank, 1) ** -0.5  # of a second pair, beside w1
        self.a2 = self.random(experts, rank, case.columns) * max(rank, 1) ** -0.5  # and beside w2
        self.scales = None if case.scales is None else (self.rows(1).float().abs() + 0.1).to(case.scales).flatten()
        self.bias = None if case.bias is None else self.random(experts, case.width).to(case.bias)
        self.bias_scale = self.rows(1).float().flatten() if case.bias_scale else None
        self.sizes = torch.tensor(case.sizes, dtype=case.index, device=device)
        self.vectors = [self.random(groups, columns).to(dtype) for groups, columns, dtype in case.operands] or None
        for vector in self.vectors or ():
            if vector.shape[0] > 1:
                vector[self.sizes == 0] = math.nan
        matrices = [self.rows(columns).to(case.matrices or case.dtype) for columns in case.widths_of_matrices]
        self.matrices = matrices or None

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.case.dtype)

    def rows(self, columns: int) -> Tensor:
        """[T, columns]; NaN in the tail, before and after."""
        buffer = torch.full((self.tokens + 2 * GUARD, columns), math.nan, dtype=self.case.dtype, device=self.device)
        buffer[GUARD : GUARD + self.valid] = self.random(self.valid, columns)
        return buffer[GUARD : GUARD + self.tokens]

    @property
    def exact(self) -> ActivationKernels:
        """The kernels that give the truth in float64, for the valid rows."""
        if self.case.function is None:
            return pointwise
        elements = [matrix[: self.valid].double() for matrix in self.matrices or ()]
        return ByAutograd(self.case.function, [self.of_rows(vector) for vector in self.vectors or ()] + elements)

    def of_rows(self, vector: Tensor) -> Tensor:
        """The value of a vector for each valid row, in float64."""
        if vector.shape[0] == 1:
            return vector.double().expand(self.valid, -1)
        return vector.double().repeat_interleave(self.sizes, dim=0, output_size=self.valid)

    def by_group(self, rows: Tensor, weights: Tensor) -> Tensor:
        """``rows @ weights[g].T`` of the valid rows, in float64."""
        parts = torch.split(rows[: self.valid].double(), list(self.case.sizes))
        return torch.cat([part @ w.double().T for part, w in zip(parts, weights, strict=True)])

    def exact_preact(self) -> Tensor:
        preact = self.by_group(self.x, self.w1) + self.by_group(self.low, self.b1)
        if self.bias is not None:
            added = self.bias.double().repeat_interleave(self.sizes, dim=0, output_size=self.valid)
            preact += added if self.bias_scale is None else added * self.bias_scale[: self.valid, None].double()
        return preact


def as_stored(t: Tensors, weights: Tensor, layout: Layout) -> tuple[Layout, Tensor]:
    """The weights, transposed in memory if the case says so, and the layout that reads them."""
    if not t.case.transposed:
        return layout, weights
    return Layout.NN if layout is Layout.NT else Layout.NT, weights.mT.contiguous()


def second_pair(t: Tensors, factor: Tensor) -> OperandPair | None:
    """``low`` and what it is multiplied with, which lies as the weights do."""
    if not t.case.rank:
        return None
    return OperandPair(t.low, factor.mT.contiguous() if t.case.transposed else factor)


def poisoned(t: Tensors, *shape: int, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    """Room for a result inside a buffer of poison; as many rows as tokens if nothing else is said."""
    rows = t.tokens if rows is None else rows
    return torch.full((rows + 2 * GUARD, *shape), POISON, dtype=dtype, device=t.device)[GUARD:-GUARD]


def room_for_vectors(t: Tensors) -> list[Tensor]:
    """Poison for the gradients of each, in the middle of more."""
    return [poisoned(t, columns, dtype=dtype, rows=groups) for groups, columns, dtype in t.case.operands]


def assert_only_valid_rows_written(t: Tensors, *results: Tensor | None) -> None:
    for result in results:
        if result is not None:
            assert result._base is not None
            assert result._base[:GUARD].eq(POISON).all(), "wrote before the rows"
            assert result._base[GUARD + t.valid :].eq(POISON).all(), "wrote into rows of no group, or after them"


def forward(t: Tensors, keep: bool = True) -> tuple[Tensor | None, Tensor]:
    case = t.case
    preact = poisoned(t, case.width, dtype=case.dtype) if keep else None
    postact = poisoned(t, case.columns, dtype=case.dtype)
    layout, weights = as_stored(t, t.w1, Layout.NT)
    problem = GroupedGemm(layout, t.x, weights, t.sizes, postact, bias=t.bias, bias_scale=t.bias_scale)
    problem.epilogue = Activate(case.spec, t.scales, preact, t.vectors, t.matrices)
    problem.second = second_pair(t, t.b1)
    run(problem, case)
    return preact, postact


def backward(
    t: Tensors,
    preact: Tensor,
    want_scales: bool = True,
    want_postact: bool = True,
    bias_dtype: torch.dtype | None = torch.float32,
    want_vectors: bool = True,
) -> ActivationGrads:
    case, experts = t.case, len(t.case.sizes)
    wanted = want_scales and t.scales is not None
    out = ActivationGrads(
        poisoned(t, case.width, dtype=case.dtype),
        torch.full_like(t.scales, POISON) if wanted else None,  # type: ignore[arg-type]
        poisoned(t, case.columns, dtype=case.dtype) if want_postact else None,
        None if bias_dtype is None else poisoned(t, case.width, dtype=bias_dtype, rows=experts),
        room_for_vectors(t) if want_vectors and case.operands else None,
    )
    layout, weights = as_stored(t, t.w2, Layout.NN)
    problem = GroupedGemm(layout, t.dy, weights, t.sizes, out.preact)
    problem.epilogue = ActivateBackward(case.spec, t.scales, preact, out, t.vectors)
    problem.second = second_pair(t, t.a2)
    run(problem, case)
    return out


def run(p: GroupedGemm, case: Case) -> None:
    """Runs the problem on the case's backend, which takes it."""
    refusals = triton if case.backend == triton.NAME else hopper
    with config(backend=case.backend):
        assert refusals.refusal(p) is None, refusals.refusal(p)
    if case.backend == triton.NAME:
        assert triton.epilogue_refusal(p) is None, triton.epilogue_refusal(p)
        triton.run(p)
    elif p.epilogue is None:
        hopper.launch(p)
    else:
        assert epilogue.refusal(p) is None, epilogue.refusal(p)
        launch = epilogue.forward if isinstance(p.epilogue, Activate) else epilogue.backward
        launch(p, p.epilogue, case.variant)


def assert_near(got: Tensor, expected: Tensor, steps: float = 1.0, absolute: float = 0.0) -> None:
    step = STEP[got.dtype] * steps * 1.02
    wrong = ~((got.double() - expected).abs() <= expected.abs() * step + absolute)
    if wrong.any():
        worst = (got.double() - expected).abs()[wrong].max()
        raise AssertionError(f"{int(wrong.sum())} wrong, the worst off by {worst:.3g}, first at {wrong.nonzero()[0]}")


def check_forward(device: str, case: Case, alone: bool = True) -> None:
    """``alone``: whether to compute the hidden rows without the pre-activation, too."""
    t = Tensors(device, case)
    preact, postact = forward(t)
    assert preact is not None
    assert_only_valid_rows_written(t, preact, postact)
    n, spec, exact = t.valid, case.spec, t.exact
    assert_near(preact[:n], t.exact_preact(), absolute=2e-4)
    expected = postact[:n].double().clone()
    exact.forward(preact[:n].double(), spec, None if t.scales is None else t.scales[:n].double(), expected)
    assert_near(postact[:n], expected, absolute=1e-5)
    if alone:
        _, again = forward(t, keep=False)
        assert torch.equal(again, postact), "without the pre-activation the hidden rows differ"


def assert_sums_of_groups(t: Tensors, rows: Tensor, sums: Tensor) -> None:
    """``sums`` [E, C] are those of the rows of each group, in fp32 or a dtype to which that is rounded once."""
    parts = torch.split(rows[: t.valid].double(), list(t.case.sizes))
    expected = torch.stack([part.sum(0) for part in parts])
    size = torch.stack([part.abs().sum(0) for part in parts])
    step = STEP.get(sums.dtype, 0.0) * 1.02
    assert ((sums.double() - expected).abs() <= expected.abs() * step + size * 1e-6).all()
    assert sums._base is not None
    assert torch.cat([sums._base[:GUARD], sums._base[-GUARD:]]).eq(POISON).all(), "wrote beside the sums"


def check_backward(device: str, case: Case, **wants: Any) -> None:
    t, n = Tensors(device, case), sum(case.sizes)
    preact = t.rows(case.width)
    out = backward(t, preact, **wants)
    assert_only_valid_rows_written(t, out.preact, out.postact)
    dpostact = t.by_group(t.dy, t.w2.mT) + t.by_group(t.low, t.a2.mT)
    rounded = t.dy.new_empty(t.tokens, case.columns)
    second = OperandPair(t.low, t.a2) if case.rank else None
    product = GroupedGemm(Layout.NN, t.dy, t.w2, t.sizes, rounded, second=second)
    run(product, case)  # what the unfused backward would start from
    assert_near(rounded[:n], dpostact, absolute=2e-4)
    scales = None if t.scales is None else t.scales[:n].double()
    if out.bias is not None:
        assert_sums_of_groups(t, out.preact, out.bias)
    truth = ActivationGrads(*(None if r is None else torch.empty_like(r[:n], dtype=torch.float64) for r in out[:3]))
    if out.vectors is not None:
        truth = truth._replace(vectors=[dpostact.new_empty(n, columns) for _, columns, _ in case.operands])
    t.exact.backward(rounded[:n].double(), preact[:n].double(), case.spec, scales, truth)
    assert_near(out.preact[:n], truth.preact, absolute=4e-5)
    if out.postact is not None:
        assert_near(out.postact[:n], truth.postact, absolute=1e-5)
    assert_vectors(t, out, truth.vectors)
    if out.scales is not None and n:
        size = (rounded[:n].double().norm(dim=1) * preact[:n].double().norm(dim=1)).clamp(min=1)
        step = STEP.get(out.scales.dtype, 1e-5) * 1.02
        error = (out.scales[:n].double() - truth.scales).abs()
        assert (error <= truth.scales.abs() * step + 2e-6 * size).all(), error.max()


def assert_vectors(t: Tensors, out: ActivationGrads, by_row: Operands) -> None:
    """The gradients of column operands are the sums of those ``by_row`` [rows, F] each."""
    if out.vectors is None:
        return
    assert by_row is not None
    for got, rows in zip(out.vectors, by_row, strict=True):
        assert got is not None
        assert rows is not None
        parts = torch.split(rows, list(t.case.sizes)) if got.shape[0] > 1 else (rows,)
        expected = torch.stack([part.sum(0) for part in parts])
        size = torch.stack([part.abs().sum(0) for part in parts])
        step = STEP.get(got.dtype, 0.0) * 1.02
        assert ((got.double() - expected).abs() <= expected.abs() * step + size * 4e-5 + 4e-5).all()
        around = got._base
        assert around is not None
        assert torch.cat([around[:GUARD], around[-GUARD:]]).eq(POISON).all(), "wrote beside the gradients of columns"


def fits(spec: ActivationSpec, variant: int) -> bool:
    """Whether a tile takes blocks of so many columns: a consumer of swap_ab ones (6) stores 128."""
    return spec.block != 128 or variant not in (6, 9)


def variants(case: Case) -> list[int]:
    """The tiles that a forward is built for."""
    built = extension.library()
    deep = [] if case.bias or case.rank else [built.DEEP_ACTIVATION_VARIANT]
    return [each for each in (*built.ACTIVATION_VARIANTS, *deep) if fits(case.spec, each)]


def check_forward_in_all_tiles(device: str, case: Case) -> None:
    """:func:`check_forward` in each of them."""
    for variant in variants(case):
        check_forward(device, replace(case, variant=variant))


def check_the_bias_changes_nothing_else(device: str, name: str) -> None:
    for variant in (-1, *extension.library().BACKWARD_VARIANTS):
        t = Tensors(device, Case(SPECS[name], columns=320, variant=variant))
        preact = t.rows(t.case.width)
        once, again = backward(t, preact, bias_dtype=None), backward(t, preact)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(once[:3], again[:3], strict=True))


def check_nothing(device: str) -> None:
    for tail in (0, 50):
        for name in SOME:
            check_forward(device, Case(SPECS[name], (0, 0, 0), tail=tail))
            check_backward(device, Case(SPECS[name], (0, 0, 0), tail=tail))


def check_nan_of_a_group_stays_in_it(device: str) -> None:
    t = Tensors(device, Case(SPECS["silu glu"], (70, 130, 60), tail=0))
    clean, preact = forward(t), t.rows(t.case.width)
    grads = backward(t, preact)
    t.x[70:200], t.dy[70:200], t.w1[1], t.w2[1] = (math.nan,) * 4
    dirty, after = forward(t), backward(t, preact)
    others = [*range(70), *range(200, 260)]
    for one, other in [*zip(clean, dirty, strict=True), *zip(grads[:3], after[:3], strict=True)]:
        assert torch.equal(one[others], other[others])
    assert torch.equal(grads.bias[[0, 2]], after.bias[[0, 2]])
    assert after.bias[1].isnan().all()
    assert dirty[0][70:200].isnan().all()
    assert dirty[1][70:200].isnan().all()


def scattered(whole: Tensor) -> list[Tensor]:
    """The parts of a tensor as tensors of their own, at different distances."""
    copies = {g: whole[g].clone() for g in (3, 0, 5, 1, 4, 2)}
    return [copies[g] for g in range(len(whole))]


def check_weights_and_biases_anywhere_in_memory(device: str) -> None:
    t = Tensors(device, Case(SPECS["silu glu"], columns=320, bias=torch.bfloat16))
    assert t.bias is not None
    w1, w2, bias = scattered(t.w1), scattered(t.w2), scattered(t.bias)
    for spec in (t.case.spec, gated("silu", None, 1.0, 0.0, interleaved(8))):
        call = kernels.ActivationCall(t.scales, keep_preact=True)
        terms, apart = kernels.Terms(bias=t.bias), kernels.Terms(bias=bias)
        one = kernels.grouped_linear_activation(t.x, t.w1, t.sizes, spec, terms, call)
        many = kernels.grouped_linear_activation(t.x, w1, t.sizes, spec, apart, call)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(one, many, strict=True))
        preact = one[0]
        wants = {"scales": t.scales, "wanted": WantedThrough(True, True, bias_dtype=torch.float32)}
        first = kernels.grouped_linear_activation_backward(t.dy, t.w2, preact, t.sizes, spec, **wants)
        second = kernels.grouped_linear_activation_backward(t.dy, w2, preact, t.sizes, spec, **wants)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(first[:4], second[:4], strict=True))
        turned = [w.mT.contiguous().mT for w in w1]
        other = kernels.grouped_linear_activation(t.x, turned, t.sizes, spec, apart, call)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(one, other, strict=True))
        turned = [w.mT.contiguous().mT for w in w2]
        third = kernels.grouped_linear_activation_backward(t.dy, turned, preact, t.sizes, spec, **wants)
        assert all(torch.equal(a[: t.valid], b[: t.valid]) for a, b in zip(first[:4], third[:4], strict=True))
