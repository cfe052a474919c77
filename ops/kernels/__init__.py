"""The only door from ops to kernels: allocates, chooses a backend, says why, runs it.

Every function takes split sizes as a tensor on the device of the rows, writes into ``out`` where it is given, and then
leaves the rows past the last group as they are; in what it allocates they are zero. Arguments have been checked.
Weights that are the transposed view of dense ones are read as they lie, by the layout that says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...fuser import tracing as trace
from ..activation_spec import ActivationSpec
from ..grouped_tensor import GroupedTensor
from . import elementwise, outputs, traced
from . import ragged_dispatch as ragged_choice
from .dispatch import Choice, choose
from .hopper import epilogue as hopper_activation
from .hopper import gemm as hopper
from .hopper import rows
from .interface import Backend, RowKernels
from .problem import GroupedGemm, Layout, Matrices, first, nbytes
from .pytorch import grouped_mm, loop
from .pytorch.activation import ActivationGrads
from .ragged import RaggedGemm

__all__ = ["ActivationGrads", "Layout", "Matrices", "grouped_gemm", "outputs"]


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
        out: where to write; needed for ``beta``. TN with a single group also writes [M, N].
        out_dtype: of what is allocated here; that of ``a`` by default.
    """
    if type(a) is not Tensor and trace.is_traced(a):
        how = {"alpha": alpha, "beta": beta, "bias": bias, "bias_scale": bias_scale, "row_scale": row_scale}
        return traced.grouped_gemm(layout, a, b, split_sizes, out=out, out_dtype=out_dtype, **how)  # type: ignore[arg-type]
    own = out is None
    if out is None:
        out = outputs.new_output(layout, a, b, split_sizes, out_dtype)
    elif layout is Layout.TN and isinstance(out, Tensor) and out.dim() == 2:
        out = out.unsqueeze(0)
    layout, b = _as_it_lies(layout, b)
    problem = GroupedGemm(layout, a, b, split_sizes, out, alpha, beta, bias, bias_scale, row_scale, own)
    backend = _ready(problem)
    if backend is not None:
        backend.run(problem)
        if own and isinstance(out, Tensor) and layout is not Layout.TN and backend is not hopper:
            _zero_tail(out, split_sizes, backend)
    elif not problem.rows:
        outputs.fill_without_rows(problem)
    return out


def ragged_gemm(
    layout: Layout,
    a: GroupedTensor,
    b: GroupedTensor,
    out: GroupedTensor,
    *,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    bias: Tensor | None = None,
    fresh: bool = False,
) -> None:
    """``alpha * A B + bias + beta * out`` of groups of any shapes; see :class:`RaggedGemm`.

    Args:
        fresh: ``out`` has just been allocated; its elements of no group become zero.

    Raises:
        ArgumentError: the depths of a group's operands differ, where the host knows them.
    """
    problem = RaggedGemm(layout, a, b, out, alpha, beta, bias, fresh)
    backend, reason = ragged_choice.choose(problem)
    if trace.active():
        moved = nbytes(a.data, b.data, out.data, bias)
        trace.record(trace.KernelCall(backend.NAME, reason, 0, moved))
    elif not a.data.is_meta:
        backend.run(problem)


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

    Both are zero in the tail, or unspecified there if they are ``interior``: read by what knows of the tail only.
    """
    if type(x) is not Tensor and trace.is_traced(x):
        how = {"bias": bias, "bias_scale": bias_scale, "scales": scales, "keep_pre": keep_pre, "interior": interior}
        return traced.grouped_linear_activation(x, weight, split_sizes, activation, **how)  # type: ignore[arg-type]
    pre, hidden = outputs.new_hidden(x, weight, activation, keep_pre)
    layout, weight = _as_it_lies(Layout.NT, weight)
    problem = GroupedGemm(layout, x, weight, split_sizes, hidden, bias=bias, bias_scale=bias_scale, fresh=True)
    refusal = partial(hopper_activation.forward_refusal, problem, activation, scales, pre, hidden)
    backend = _ready(problem, pre, scales, ending=hopper_activation.Ending(activation, False, refusal))
    if backend is not None:
        backend.linear_activation(problem, activation, scales, pre, hidden)
        for tokens in (pre, hidden):
            if tokens is not None and not interior:
                _zero_tail(tokens, split_sizes, backend)
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
    bias_dtype: torch.dtype | None = None,
) -> ActivationGrads:
    """Through the linear after an activation, and the activation: ``dhidden = dy W``, :func:`activate_backward`.

    The tail of the scales' gradient is zero; what only grouped products read has an unspecified one. With a
    ``bias_dtype`` come the sums of the pre-activation's gradient by group, of that dtype: :func:`column_sums`.
    """
    if type(dy) is not Tensor and trace.is_traced(dy):
        how = {"scales": scales, "want_scales": want_scales, "want_hidden": want_hidden, "bias_dtype": bias_dtype}
        return traced.grouped_linear_activation_backward(dy, weight, pre, split_sizes, activation, **how)  # type: ignore[arg-type]
    out = outputs.new_grads(pre, activation, scales, want_scales, want_hidden)
    if bias_dtype is not None:
        out = out._replace(bias=outputs.new_sums(pre, split_sizes, bias_dtype))
    layout, weight = _as_it_lies(Layout.NN, weight)
    problem = GroupedGemm(layout, dy, weight, split_sizes, out.pre, fresh=True)
    refusal = partial(hopper_activation.backward_refusal, problem, pre, activation, scales, out)
    backend = _ready(problem, pre, *out[1:], ending=hopper_activation.Ending(activation, True, refusal))
    if backend is not None:
        backend.linear_activation_backward(problem, pre, activation, scales, out)
        if backend is not hopper:  # which has done both
            _finish_by_rows(out, split_sizes, backend)
    elif out.bias is not None and not problem.rows:
        out.bias.zero_()
    return out


def activate(pre: Tensor, activation: ActivationSpec, scales: Tensor | None = None) -> Tensor:
    """``act(pre) * scales[:, None]``, rounded once."""
    if type(pre) is not Tensor and trace.is_traced(pre):
        return traced.activate(pre, activation, scales)
    hidden = outputs.new_activated(pre, activation)
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
    if type(pre) is not Tensor and trace.is_traced(pre):
        wanted = {"want_scales": want_scales, "want_hidden": want_hidden}
        return traced.activate_backward(dhidden, pre, activation, scales, **wanted)
    out = outputs.new_grads(pre, activation, scales, want_scales, want_hidden)
    if _activation_ready(pre, scales, dhidden, *out):
        elementwise.backward(dhidden, pre, activation, scales, out)
    return out


def column_sums(tokens: Tensor, split_sizes: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """[E, N]: the sum of the rows of each group, each times its ``scale`` [T]; the gradient of a bias."""
    if type(tokens) is not Tensor and trace.is_traced(tokens):
        return traced.column_sums(tokens, split_sizes, dtype, scale)
    out = outputs.new_sums(tokens, split_sizes, dtype)
    if not trace.active() and not tokens.is_meta:
        _row_kernels(tokens, split_sizes, out).column_sums(tokens, split_sizes, out, scale)
    return out


def row_dots(tokens: Tensor, vectors: Matrices, split_sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """[T]: each row times its group's vector, 0 past the last group; the gradient of a bias's scale."""
    if type(tokens) is not Tensor and trace.is_traced(tokens):
        return traced.row_dots(tokens, vectors, split_sizes, dtype)
    out = tokens.new_empty((tokens.shape[0],), dtype=dtype)
    if not trace.active() and not tokens.is_meta:
        _row_kernels(tokens, split_sizes, out).row_dots(tokens, vectors, split_sizes, out)
    return out


def _row_kernels(tokens: Tensor, split_sizes: Tensor, out: Tensor) -> RowKernels:
    """Our own where they can; else what keeps split sizes on the device on CUDA, and makes no indices on CPU."""
    if rows.takes_groups(tokens, split_sizes, out):
        return rows
    return grouped_mm if tokens.is_cuda else loop


def _finish_by_rows(out: ActivationGrads, split_sizes: Tensor, backend: Backend) -> None:
    """What of a backward through an activation knows groups: the tail of the scales' gradient, the bias's gradient."""
    if out.scales is not None:
        _zero_tail(out.scales.unsqueeze(-1), split_sizes, backend)
    if out.bias is not None:
        _row_kernels(out.pre, split_sizes, out.bias).column_sums(out.pre, split_sizes, out.bias, None)


def _zero_tail(out: Tensor, split_sizes: Tensor, backend: Backend) -> None:
    """Of rows that are allocated here; our own kernel, which is there where our backend is, touches nothing else."""
    kernels = rows if backend is hopper else _row_kernels(out, split_sizes, out)
    kernels.zero_tail(out, split_sizes)


_FLIPPED = {Layout.NT: Layout.NN, Layout.NN: Layout.NT}


def _as_it_lies(layout: Layout, b: Matrices) -> tuple[Layout, Matrices]:
    """A transposed view of dense matrices as the matrices themselves, under the layout that transposes them.

    Matrices without rows that are dense one way or the other may be either: the same kernels refuse both.
    """
    if layout is Layout.TN or first(b).stride(-1) == 1:
        return layout, b
    return _FLIPPED[layout], b.mT if isinstance(b, Tensor) else tuple(part.mT for part in b)


def _activation_ready(pre: Tensor, scales: Tensor | None, *also: Tensor | None) -> bool:
    """Whether to run an activation; a trace is told instead."""
    if trace.active():
        trace.record(trace.KernelCall(elementwise.name(pre, scales), "", 0, nbytes(pre, scales, *also)))
    return not (trace.active() or pre.is_meta)


def _ready(
    problem: GroupedGemm, *also: Tensor | None, ending: hopper_activation.Ending | None = None
) -> Backend | None:
    """The backend to run; None if nothing shall run: no rows, a meta device, or a trace, which is told instead.

    Args:
        also: the tensors that the kernel reads or writes besides those of the problem.
        ending: the activation that our own kernel may end in.
    """
    tracing = trace.active()
    choice = choose(problem, tracing)
    if tracing:
        trace.record(_call_of(problem, choice, ending, problem.bytes + nbytes(*also)))
        return None
    return choice.backend if problem.rows and not problem.a.is_meta else None


def _call_of(
    problem: GroupedGemm, choice: Choice, ending: hopper_activation.Ending | None, moved: int
) -> trace.KernelCall:
    """What a trace is told."""
    call = trace.KernelCall(choice.backend.NAME, choice.reason, problem.flops, moved)
    if choice.backend is not hopper:
        return call
    if ending is None:
        return call._replace(configuration=hopper.configuration(problem))
    why = ending.refusal()
    if why is None:
        configuration = hopper_activation.configuration(problem, ending)
        return call._replace(kernel=hopper_activation.NAME, reason="", configuration=configuration)
    name = f"{hopper.NAME} + {rows.NAME}"
    return call._replace(kernel=name, reason=f"its epilogue {why}", configuration=hopper.configuration(problem))
