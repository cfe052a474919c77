"""The only door from ops to kernels: allocates, chooses a backend, says why, runs it.

Every function takes split sizes as a tensor on the device of the rows, writes into ``out`` where it is given, and then
leaves the rows past the last group as they are; in what it allocates they are zero. Arguments have been checked.
Weights that are the transposed view of dense ones are read as they lie, by the layout that says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..fuser import ArgumentError, trace
from .activations import ActivationSpec
from .backends import elementwise, grouped_mm, hopper, loop, rows
from .backends.choice import choose
from .backends.interface import Backend, RowKernels
from .backends.pointwise import ActivationGrads
from .backends.problem import GroupedGemm, Layout, Matrices, first, nbytes, stacked

__all__ = ["ActivationGrads", "Layout", "Matrices", "grouped_gemm"]


def as_split_sizes(split_sizes: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """The split sizes on the device of the rows; a list or a tensor elsewhere is copied."""
    if isinstance(split_sizes, Tensor) and split_sizes.device == device:
        return split_sizes
    trace.note(f"split_sizes are copied to {device}")
    return torch.as_tensor(split_sizes, device=device)


def grouped_gemm(
    layout: Layout,
    a: Tensor,
    b: Matrices,
    split_sizes: Tensor,
    *,
    out: Matrices | None = None,
    out_dtype: torch.dtype | None = None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    bias: Matrices | None = None,
    bias_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> Matrices:
    """``row_scale * (alpha * A B + bias_scale * bias) + beta * out``, group by group; see :class:`GroupedGemm`.

    Args:
        layout: NT: a [T, K], b [E, N, K] -> [T, N]. NN: a [T, K], b [E, K, N] -> [T, N].
            TN: a [T, M], b [T, N] -> [E, M, N].
        split_sizes: int32 or int64 [E].
        out: where to write; needed for ``beta``.
        out_dtype: of what is allocated here; that of ``a`` by default.
    """
    own = out is None
    if out is None:
        out = a.new_empty(_out_shape(layout, a, b, split_sizes.shape[0]), dtype=out_dtype or a.dtype)
    layout, b = _as_it_lies(layout, b)
    problem = GroupedGemm(layout, a, b, split_sizes, out, alpha, beta, bias, bias_scale, row_scale, own)
    backend = _ready(problem)
    if backend is not None:
        backend.run(problem)
        if own and isinstance(out, Tensor) and layout is not Layout.TN:
            _zero_tail(out, split_sizes, backend)
    elif not problem.rows:
        _no_rows(problem)
    return out


def ragged_gemm(
    layout: Layout,
    a: list[Tensor],
    b: list[Tensor],
    out: list[Tensor],
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Products of matrices of any shapes, one by one; ``layout`` says which operand of each is transposed.

    Raises:
        ArgumentError: the depths of a group's operands differ.
    """
    for g, (left, right, result) in enumerate(zip(a, b, out, strict=True)):
        left = left.mT if layout is Layout.TN else left
        right = right.mT if layout is Layout.NT else right
        if left.shape[1] != right.shape[0]:
            raise ArgumentError(f"group {g}: the depths {left.shape[1]} and {right.shape[0]} of a and b must be equal")
        loop.multiply(left, right, result, loop.of(alpha, g), loop.of(beta, g), None if bias is None else bias[g])


def grouped_linear_activation(
    x: Tensor,
    weight: Matrices,
    split_sizes: Tensor,
    activation: ActivationSpec,
    *,
    bias: Matrices | None = None,
    bias_scale: Tensor | None = None,
    scales: Tensor | None = None,
    keep_pre: bool,
    interior: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """``pre = x W^T + bias`` and ``hidden = act(pre) * scales``; ``pre`` is None unless it shall be kept.

    The tail of ``pre`` is unspecified; so is that of ``hidden`` if it is ``interior``, read by grouped products only.
    """
    columns = first(weight).shape[-2]
    pre = x.new_empty((x.shape[0], columns)) if keep_pre else None
    hidden = x.new_empty((x.shape[0], activation.out_features(columns)))
    layout, weight = _as_it_lies(Layout.NT, weight)
    problem = GroupedGemm(layout, x, weight, split_sizes, hidden, bias=bias, bias_scale=bias_scale, fresh=True)
    backend = _ready(problem, pre, scales)
    if backend is not None:
        backend.linear_activation(problem, activation, scales, pre, hidden)
        if not interior:
            _zero_tail(hidden, split_sizes, backend)
    return pre, hidden


def grouped_linear_activation_backward(
    dy: Tensor,
    weight: Matrices,
    pre: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    *,
    scales: Tensor | None = None,
    want_scales: bool,
    want_hidden: bool,
) -> ActivationGrads:
    """Through the linear after an activation, and the activation: ``dhidden = dy W``, :func:`activate_backward`.

    The tail of the scales' gradient is zero; what only grouped products read has an unspecified one.
    """
    out = _activation_grads(pre, activation, scales, want_scales, want_hidden)
    layout, weight = _as_it_lies(Layout.NN, weight)
    problem = GroupedGemm(layout, dy, weight, split_sizes, out.pre, fresh=True)
    backend = _ready(problem, pre, *out[1:])
    if backend is not None:
        backend.linear_activation_backward(problem, pre, activation, scales, out)
        if out.scales is not None:
            _zero_tail(out.scales.unsqueeze(-1), split_sizes, backend)
    return out


def activate(pre: Tensor, activation: ActivationSpec, scales: Tensor | None = None) -> Tensor:
    """``act(pre) * scales[:, None]``, rounded once."""
    hidden = pre.new_empty((*pre.shape[:-1], activation.out_features(pre.shape[-1])))
    if _activation_ready(pre, scales, hidden):
        elementwise.forward(pre, activation, scales, hidden)
    return hidden


def activate_backward(
    dhidden: Tensor,
    pre: Tensor,
    activation: ActivationSpec,
    scales: Tensor | None = None,
    *,
    want_scales: bool = False,
    want_hidden: bool = False,
) -> ActivationGrads:
    """Gradients of ``pre`` and, if wanted, of ``scales``; and, if wanted, what :func:`activate` gave."""
    out = _activation_grads(pre, activation, scales, want_scales, want_hidden)
    if _activation_ready(pre, scales, dhidden, *out):
        elementwise.backward(dhidden, pre, activation, scales, out)
    return out


def column_sums(tokens: Tensor, split_sizes: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """[E, N]: the sum of the rows of each group, each times its ``scale`` [T]; the gradient of a bias."""
    out = tokens.new_empty((split_sizes.shape[0], tokens.shape[1]), dtype=dtype)
    if not trace.active() and not tokens.is_meta:
        _row_kernels(tokens, split_sizes, out).column_sums(tokens, split_sizes, out, scale)
    return out


def row_dots(tokens: Tensor, vectors: Matrices, split_sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """[T]: each row times its group's vector, 0 past the last group; the gradient of a bias's scale."""
    out = tokens.new_empty((tokens.shape[0],), dtype=dtype)
    if not trace.active() and not tokens.is_meta:
        _row_kernels(tokens, split_sizes, out).row_dots(tokens, vectors, split_sizes, out)
    return out


def _row_kernels(tokens: Tensor, split_sizes: Tensor, out: Tensor) -> RowKernels:
    """Our own where they can; else what keeps split sizes on the device on CUDA, and makes no indices on CPU."""
    if rows.takes_groups(tokens, split_sizes, out):
        return rows
    return grouped_mm if tokens.is_cuda else loop


def _zero_tail(out: Tensor, split_sizes: Tensor, backend: Backend) -> None:
    """Of rows that are allocated here; our own kernel, which is there where our backend is, touches nothing else."""
    kernels = rows if backend is hopper else _row_kernels(out, split_sizes, out)
    kernels.zero_tail(out, split_sizes)


_FLIPPED = {Layout.NT: Layout.NN, Layout.NN: Layout.NT}


def _as_it_lies(layout: Layout, b: Matrices) -> tuple[Layout, Matrices]:
    """A transposed view of dense matrices as the matrices themselves, under the layout that transposes them."""
    matrix = first(b)
    if layout is Layout.TN or matrix.stride(-1) == 1 or matrix.stride(-2) != 1:
        return layout, b
    return _FLIPPED[layout], b.mT if isinstance(b, Tensor) else tuple(part.mT for part in b)


def _out_shape(layout: Layout, a: Tensor, b: Matrices, groups: int) -> tuple[int, ...]:
    if layout is Layout.TN:
        assert isinstance(b, Tensor)
        return groups, a.shape[1], b.shape[1]
    return a.shape[0], first(b).shape[-2 if layout is Layout.NT else -1]


def _activation_grads(
    pre: Tensor, activation: ActivationSpec, scales: Tensor | None, want_scales: bool, want_hidden: bool
) -> ActivationGrads:
    """Room for the gradients that are wanted."""
    dscales = scales.new_empty(pre.shape[:-1]) if want_scales and scales is not None else None
    hidden = pre.new_empty((*pre.shape[:-1], activation.out_features(pre.shape[-1]))) if want_hidden else None
    return ActivationGrads(torch.empty_like(pre), dscales, hidden)


def _activation_ready(pre: Tensor, scales: Tensor | None, *also: Tensor | None) -> bool:
    """Whether to run an activation; a trace is told instead."""
    if trace.active():
        trace.record(trace.KernelCall(elementwise.name(pre, scales), "", 0, nbytes(pre, scales, *also)))
    return not (trace.active() or pre.is_meta)


def _no_rows(problem: GroupedGemm) -> None:
    """Without rows a product is zero: nothing to write for NT and NN, a weight gradient of zeros for TN."""
    for g, out in enumerate([problem.out] if isinstance(problem.out, Tensor) else problem.out):
        if problem.beta is None:
            out.zero_()
        elif problem.layout is Layout.TN:
            beta = problem.beta
            out.mul_(beta.view(-1, 1, 1) if isinstance(beta, Tensor) and beta.dim() else beta)
        if problem.bias is not None and problem.layout is Layout.TN:
            out.add_(problem.bias[g] if out.dim() == 2 else stacked(problem.bias).unsqueeze(1))


def _ready(problem: GroupedGemm, *also: Tensor | None) -> Backend | None:
    """The backend to run; None if nothing shall run: no rows, a meta device, or a trace, which is told instead.

    ``also`` are the tensors that the kernel reads or writes besides those of the problem.
    """
    tracing = trace.active()
    choice = choose(problem, tracing)
    if tracing:
        moved = problem.bytes + nbytes(*also)
        trace.record(trace.KernelCall(choice.backend.NAME, choice.reason, problem.flops, moved))
        return None
    return choice.backend if problem.rows and not problem.a.is_meta else None
