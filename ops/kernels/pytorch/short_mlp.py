"""Experts on a CPU, rows to rows, for calls that are so short that the host decides: operations, and nothing between.

They are those of one kernel after the other, on the same numbers. Rows of no expert come last; what is computed for
them may be anything, and nothing reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...values.activation_spec import ActivationSpec
from ..hopper.routed_mlp import Experts
from ..problems.gemm import ActivationGrads, GroupedGemm, Layout
from . import activation, few_rows, grouped_mm_cpu, loop


@dataclass(slots=True, eq=False)
class Groups:
    """Which rows are of which expert; a backward reads what its forward has made, and nobody changes it.

    Attributes:
        ends: int32 [E]: where the rows of each expert end; ``end``: where those of the last do.
        sizes: of the experts that have rows, where products are taken one by one; None: ``grouped_mm`` takes all.
        expert_of_row: [S], any for rows of no expert; None where no bias reads it.
    """

    ends: Tensor
    end: int
    sizes: dict[int, int] | None
    expert_of_row: Tensor | None

    @classmethod
    def of_rows(cls, ends: Tensor, end: int, expert_of_row: Tensor, experts: Experts) -> Groups:
        """From the expert of each row."""
        if not _one_by_one(expert_of_row.shape[0], experts):
            return cls(ends, end, None, expert_of_row)
        sizes: dict[int, int] = {}
        for expert in expert_of_row.tolist()[:end]:
            sizes[expert] = sizes.get(expert, 0) + 1
        return cls(ends, end, sizes, expert_of_row)

    @classmethod
    def of_sizes(cls, split_sizes: Tensor, rows: int, experts: Experts) -> Groups | None:
        """From the rows of each expert; None where there are not so many rows."""
        every = split_sizes.tolist()
        end = sum(every)
        if end > rows or min(every) < 0:
            return None
        ends = split_sizes.cumsum(0, dtype=torch.int32)
        sizes = {g: size for g, size in enumerate(every) if size} if _one_by_one(rows, experts) else None
        biased = experts.up_bias is not None or experts.down_bias is not None
        return cls(ends, end, sizes, _expert_of_row(every, rows - end) if biased else None)


class Kept(NamedTuple):
    """What a backward reads of a forward: None is what no gradient that is wanted reads.

    Attributes:
        rows: those that the experts were given, or what they were gathered from.
        scales: a number a row, in float32 at least: ``after`` the second linear, or before it.
    """

    rows: Tensor | None
    up: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    preact: Tensor
    scales: Tensor | None
    groups: Groups
    form: MLPForm
    caller: Any = None
    """What the caller knows besides, and keeps with it: one tuple is taken apart and put together faster than two."""


@dataclass(slots=True, eq=False)
class MLPForm:
    """What a backward has to know besides tensors."""

    spec: ActivationSpec
    transposed: bool
    after: bool


class WantedGradients(NamedTuple):
    """Which gradients are."""

    rows: bool
    scales: bool
    up: bool
    down: bool
    up_bias: bool
    down_bias: bool


class Gradients(NamedTuple):
    """The wanted ones; of biases and scales in float32 at least."""

    rows: Tensor | None
    scales: Tensor | None
    up: Tensor | None
    down: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


def refusal(x: Tensor, rows: int, up: Tensor, down: Tensor) -> str | None:
    """Why so many rows, which are those of ``x`` or gathered from it, run kernel by kernel; None: they do not."""
    if x.device.type != "cpu" or x.is_cuda:
        return f"needs a CPU, got {x.device.type}"
    if not few_rows.are_few(rows, max(up.shape[1:]), x.dtype):
        return f"takes few rows, got {rows}"
    if x.stride(-1) != 1 or up.stride(-1) != 1 or down.stride(-1) != 1:
        return "needs dense rows"
    return None


def forward(
    rows: Tensor, experts: Experts, groups: Groups, scales: Tensor | None, after: bool
) -> tuple[Tensor, Tensor]:
    """What experts make of dense rows [S, H], scaled before or ``after`` the second linear; and the pre-activation."""
    loop.keep_freed_memory()
    up, down, up_bias, down_bias, spec, transposed = experts
    preact = _through(rows, up, groups, transposed, up_bias)
    hidden = activation.postact(preact, spec, None if after else scales)
    return _through(hidden, down, groups, transposed, down_bias, scales if after else None), preact


def run(
    x: Tensor, experts: Experts, split_sizes: Tensor, scales: Tensor | None, after: bool
) -> tuple[Tensor, Kept] | None:
    """:func:`forward` of [..., H], sorted by expert, and what a backward reads; None: they run kernel by kernel."""
    if not x.is_contiguous():
        return None
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    count = rows.shape[0]
    if not count or refusal(x, count, experts.up, experts.down) is not None:
        return None
    groups = Groups.of_sizes(split_sizes, count, experts)
    if groups is None:
        return None
    if scales is not None:
        scales = scales.reshape(-1)
        if scales.dtype.itemsize < 4:
            scales = scales.float()
    y, preact = forward(rows, experts, groups, scales, after)
    zero_tail(y, groups)
    form = MLPForm(experts.spec, experts.transposed, after)
    kept = Kept(rows, experts.up, experts.down, experts.down_bias, preact, scales, groups, form)
    return y, kept


def backward(kept: Kept, dy: Tensor, wanted: WantedGradients) -> Gradients:
    """The gradients, from that of dense rows [S, H].

    Those of weights come late, as they take the caches. That of the rows is last: it reads the weight that a forward
    reads first.
    """
    rows, up, down, down_bias, preact, scales, groups, form, _ = kept
    transposed, after = form.transposed, form.after
    dhidden = _through(dy, down, groups, not transposed)
    dpreact, dots = torch.empty_like(preact), None
    if wanted.scales and scales is not None:
        dots = scales.new_empty(scales.shape)
    hidden = torch.empty_like(dhidden) if wanted.down else None
    activation.backward(dhidden, preact, form.spec, scales, ActivationGrads(dpreact, dots, hidden))
    if dots is not None:
        if after and down_bias is not None:
            assert groups.expert_of_row is not None
            dots += few_rows.row_dots(dy, down_bias, groups.expert_of_row)
        zero_tail(dots, groups)
    dup_bias = _sums(dpreact, groups) if wanted.up_bias else None
    ddown_bias = _sums(dy, groups, scales if after else None) if wanted.down_bias else None
    ddown = None if hidden is None else _weight(hidden, dy, groups, transposed)
    dup = _weight(rows, dpreact, groups, transposed) if wanted.up and rows is not None else None
    drows = None
    if wanted.rows and up is not None:
        drows = _through(dpreact, up, groups, not transposed)
        zero_tail(drows, groups)
    return Gradients(drows, dots, dup, ddown, dup_bias, ddown_bias)


def zero_tail(rows: Tensor, groups: Groups) -> None:
    """Of what is read by others."""
    if groups.end < rows.shape[0]:
        rows[groups.end :].zero_()


def _one_by_one(rows: int, experts: Experts) -> bool:
    """Whether products are taken expert by expert: where few have rows, or ``grouped_mm`` cannot read these."""
    up, down = experts.up, experts.down
    groups, *of_up = up.shape
    if few_rows.leave_most_groups_empty(rows, groups) or not grouped_mm_cpu.is_there_for(up.dtype):
        return True
    pitches = of_up[0] | of_up[1] | down.shape[1] | down.shape[2] | up.stride(1) | down.stride(1)
    return pitches * up.itemsize % grouped_mm_cpu.ALIGNED != 0


def _expert_of_row(sizes: list[int], tail: int) -> Tensor:
    ids = few_rows.groups_of(sizes)
    return F.pad(ids, (0, tail)) if tail else ids


def _through(
    rows: Tensor,
    weight: Tensor,
    groups: Groups,
    transposed: bool,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> Tensor:
    """The rows through a weight that is stored as [E, out, in], or as [E, in, out] if ``transposed``."""
    if bias is not None and rows.dtype.itemsize < 4:  # which is not rounded before the bias is added
        return _rounded_once(rows, weight, groups, transposed, bias, scales)
    sizes = groups.sizes
    if sizes is None:
        out = F.grouped_mm(rows, weight if transposed else weight.mT, offs=groups.ends)
    else:
        out = rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])
        if scales is None:
            loop.multiply_runs(rows, weight, transposed, sizes, out, bias)
            return out
        loop.multiply_runs(rows, weight, transposed, sizes, out)
    if bias is not None:
        assert groups.expert_of_row is not None
        few_rows.add_vectors(out, bias, groups.expert_of_row)
    return out if scales is None else out.mul_(scales.unsqueeze(-1))


def _rounded_once(
    rows: Tensor, weight: Tensor, groups: Groups, transposed: bool, bias: Tensor, scales: Tensor | None
) -> Tensor:
    out = rows.new_empty(rows.shape[0], weight.shape[2 if transposed else 1])
    layout = Layout.NN if transposed else Layout.NT
    problem = GroupedGemm(layout, rows, weight, groups.ends, out, bias=bias, row_scale=scales, fresh=True)
    loop.multiply_until(problem, groups.ends.tolist())
    return out


def _weight(inputs: Tensor, outputs: Tensor, groups: Groups, transposed: bool) -> Tensor:
    """The gradient of a weight as it is stored, from what its linear read and the gradient of what it gave."""
    left, right = (inputs, outputs) if transposed else (outputs, inputs)
    if groups.sizes is None:
        return F.grouped_mm(left.mT, right, offs=groups.ends)
    out = left.new_empty(groups.ends.shape[0], left.shape[1], right.shape[1])
    loop.multiply_weights_of_runs(left, right, groups.sizes, out)
    return out


def _sums(rows: Tensor, groups: Groups, scales: Tensor | None = None) -> Tensor:
    """By expert, [E, C]."""
    end, experts = groups.end, groups.expert_of_row
    assert experts is not None
    if end < rows.shape[0]:
        rows, experts, scales = rows[:end], experts[:end], None if scales is None else scales[:end]
    return few_rows.column_sums(rows, experts, groups.ends.shape[0], scales)
