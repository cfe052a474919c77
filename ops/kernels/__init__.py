"""The only door from ops to kernels: allocates, chooses a backend, says why, runs it.

Every function takes split sizes as a tensor on the device of the rows, writes into ``out`` where it is given, and then
leaves the rows past the last group unchanged; in results that it allocates they are zero. Arguments have been checked.
:func:`kernel` makes each a custom op of its name, which a compiler traces in place of the call. Transposed views of
dense weights are read in place, with the matching layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...fuser.contract import tracing as trace
from ..programs.program import Program
from ..values.activation_spec import ActivationSpec
from ..values.grouped_tensor import GroupedTensor
from . import backends, dispatch, extension, products
from .hopper.ahead import compile_ahead
from .hopper.peers import send_rows
from .jit.cache import kernel_cache
from .operators import outputs
from .operators.custom_ops import kernel
from .problems.gemm import (
    ADDED,
    NO_TERMS,
    Activate,
    ActivateBackward,
    ActivationCall,
    ActivationGrads,
    FunctionOperands,
    GroupedGemm,
    Layout,
    Matrices,
    OperandPair,
    Operands,
    PointwiseGrads,
    PointwiseOperands,
    RowSlots,
    Terms,
    first,
)
from .problems.independent import Independent
from .problems.ragged import RaggedGemm
from .problems.rows import (
    ActivateRows,
    ActivateRowsBackward,
    ColumnSums,
    PointwiseBackward,
    PointwiseForward,
    RowDots,
    stated,
)
from .pytorch import wrong_sizes
from .tensor_lists import addresses_of, has_objects

__all__ = [
    "ADDED",
    "NO_TERMS",
    "ActivationCall",
    "ActivationGrads",
    "Independent",
    "Layout",
    "Matrices",
    "OperandPair",
    "Operands",
    "PointwiseGrads",
    "PointwiseOperands",
    "RowSlots",
    "Terms",
    "addresses_of",
    "backends",
    "compile_ahead",
    "grouped_gemm",
    "has_objects",
    "kernel_cache",
    "outputs",
    "raise_wrong_sizes",
    "send_rows",
]


def raise_wrong_sizes(device: int) -> None:
    """Raises the error that a CUDA device has reported for split sizes, and clears it; does not wait.

    Raises:
        RuntimeError: sizes of an earlier call were wrong.
    """
    of_pytorch = wrong_sizes.taken(torch.device("cuda", device))
    extension.raise_wrong_sizes(device)
    if of_pytorch is not None:
        raise of_pytorch


def as_split_sizes(split_sizes: Tensor | Sequence[int], device: torch.device) -> Tensor:
    """The split sizes on the device of the rows; a list or a tensor elsewhere is copied."""
    if isinstance(split_sizes, Tensor) and split_sizes.device == device:
        return split_sizes
    trace.note(f"split_sizes are copied to {device}")
    return torch.as_tensor(split_sizes, device=device)


@kernel(
    outputs.new_product,
    only_with_out=("beta",),
    only_without_out=("out_dtype",),
    eager_only=("independent", "first_group"),
    spread={"terms": ("alpha", "beta", "bias", "bias_scale", "row_scale", "second")},
)
def grouped_gemm(
    layout: Layout,
    a: Tensor,
    b: Matrices,
    split_sizes: Tensor,
    *,
    out: Matrices | None = None,
    out_dtype: torch.dtype | None = None,
    terms: Terms = NO_TERMS,
    independent: Independent | None = None,
    first_group: int | None = None,
) -> Matrices:
    """``row_scale * (alpha * A B + bias_scale * bias) + beta * out``, group by group; see :class:`GroupedGemm`.

    Args:
        layout: NT: a [T, K], b [E, N, K] -> [T, N]. NN: a [T, K], b [E, K, N] -> [T, N]. TN: a [T, M], b [T, N] -> [E,
            M, N].
        split_sizes: int32 or int64 [E].
        out: where to write; needed for ``beta``. TN with a single group also writes [M, N].
        out_dtype: the dtype of an allocated result; by default ``a``'s.
        terms: what surrounds the product; neither alpha nor beta with a second pair of operands.
        independent: of which this product is one; they may overlap.
        first_group: that of a run, of which ``b`` has the matrices; ``second`` and ``bias`` are of all groups.
    """
    fresh = out is None
    if out is None:
        out = outputs.new_product(layout, a, b, split_sizes, out_dtype)
    elif layout is Layout.TN and isinstance(out, Tensor) and out.dim() == 2:
        out = out.unsqueeze(0)
    layout, b, second = _fold_transpose(layout, b, terms.second)
    problem = GroupedGemm(layout, a, b, split_sizes, out, *terms[:5], fresh)
    problem.second, problem.tail_unspecified, problem.slots = second, terms.tail_unspecified, terms.slots
    problem.independent, problem.first_group = independent, first_group
    products.run(problem)
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
    dispatch.run(RaggedGemm(layout, a, b, out, alpha, beta, bias, fresh))


@kernel(
    outputs.new_preact_and_postact,
    eager_only=("arrived",),
    added=("vectors", "second", "matrices"),
    spread={
        "terms": ("bias", "bias_scale", "second"),
        "call": ("scales", "keep_preact", "tail_unspecified", "vectors", "matrices"),
    },
    schema_names={"keep_preact": "keep_pre", "tail_unspecified": "interior"},
)
def grouped_linear_activation(
    x: Tensor,
    weight: Matrices,
    split_sizes: Tensor,
    activation: ActivationSpec,
    terms: Terms,
    call: ActivationCall,
    *,
    arrived: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """``preact = x W^T + bias`` and ``postact = act(preact) * scales``; ``preact`` is None unless it shall be kept.

    Both are zero in the tail, unless the call leaves it unspecified.

    Args:
        terms: a bias with its scales, and a second pair of operands.
        arrived: of the rows of ``x``, which may come meanwhile: see :class:`GroupedGemm`.
    """
    scales, keep_preact, tail_unspecified, vectors, matrices = call
    preact, postact = outputs.new_preact_and_postact(x, weight, activation, keep_preact)
    layout, weight, second = _fold_transpose(Layout.NT, weight, terms.second)
    problem = GroupedGemm(layout, x, weight, split_sizes, postact, *terms[:5], fresh=True)
    problem.epilogue = Activate(activation, scales, preact, vectors, matrices, tail_unspecified)
    problem.second, problem.arrived = second, arrived
    products.run(problem)
    return preact, postact


@kernel(
    outputs.new_grads,
    added=("vectors", "want_vectors", "second"),
    spread={"wanted": ("want_scales", "want_postact", "bias_dtype", "want_vectors")},
)
def grouped_linear_activation_backward(
    dy: Tensor,
    weight: Matrices,
    preact: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    *,
    scales: Tensor | None = None,
    wanted: outputs.WantedThrough,
    vectors: Operands = None,
    second: OperandPair | None = None,
) -> ActivationGrads:
    """Through the linear after an activation, and the activation: ``dpostact = dy W``, :func:`activate_backward`.

    The tail of the scales' gradient is zero; tensors that only grouped products read have an unspecified tail. With a
    ``bias_dtype`` it also returns the sums of the pre-activation's gradient by group, in that dtype:
    :func:`column_sums`. The product of ``second`` is added to ``dy W``.
    """
    want_scales, want_postact, want_vectors, bias_dtype = wanted
    wants = want_scales, want_postact, split_sizes, bias_dtype, vectors, want_vectors
    out = outputs.new_grads(preact, activation, scales, *wants)
    layout, weight, second = _fold_transpose(Layout.NN, weight, second)
    problem = GroupedGemm(layout, dy, weight, split_sizes, out.preact, fresh=True)
    problem.epilogue, problem.second = ActivateBackward(activation, scales, preact, out, vectors), second
    products.run(problem)
    return out


@kernel(outputs.new_postact, obeys_switches=False, added=("vectors", "split_sizes"), schema_names={"preact": "pre"})
def activate(
    preact: Tensor,
    activation: ActivationSpec,
    scales: Tensor | None = None,
    vectors: Operands = None,
    split_sizes: Tensor | None = None,
) -> Tensor:
    """``act(preact) * scales[:, None]``, rounded once; ``vectors``: the numbers of columns that it reads."""
    postact, of_groups = outputs.new_postact(preact, activation), _of_groups(vectors, split_sizes)
    dispatch.run(stated(ActivateRows(preact, activation, scales, postact, of_groups)))
    return postact


@kernel(outputs.new_grads, obeys_switches=False, added=("vectors", "split_sizes", "want_vectors"))
def activate_backward(
    dpostact: Tensor,
    preact: Tensor,
    activation: ActivationSpec,
    scales: Tensor | None = None,
    *,
    want_scales: bool = False,
    want_postact: bool = False,
    vectors: Operands = None,
    split_sizes: Tensor | None = None,
    want_vectors: bool = False,
) -> ActivationGrads:
    """Gradients of ``preact`` and, if wanted, of scales and vectors; and, if wanted, what :func:`activate` gave."""
    wants = want_scales, want_postact, None, None, vectors, want_vectors
    out, of_groups = outputs.new_grads(preact, activation, scales, *wants), _of_groups(vectors, split_sizes)
    dispatch.run(stated(ActivateRowsBackward(dpostact, preact, activation, scales, out, of_groups)))
    return out


@kernel(outputs.new_value, obeys_switches=False, added=("matrices",), spread={"operands": PointwiseOperands._fields})
def pointwise(x: Tensor, program: Program, operands: PointwiseOperands) -> Tensor:
    """[rows, C]: the value of a program over dense rows, rounded once."""
    y = outputs.new_value(x, program)
    dispatch.run(PointwiseForward(program, x, operands.rows(x), y))
    return y


def pointwise_refusal(x: Tensor, program: Program, operands: PointwiseOperands) -> str | None:
    """Why no kernel of ours computes a program of such operands, so that PyTorch does, line by line; None: one does."""
    return dispatch.refusal(PointwiseForward(program, x, operands.rows(x), x))


@kernel(
    outputs.new_pointwise_grads,
    obeys_switches=False,
    eager_only=("dtypes",),
    added=("matrices", "want_matrices"),
    spread={"operands": PointwiseOperands._fields, "wanted": outputs.WantedGrads._fields},
)
def pointwise_backward(
    dy: Tensor,
    x: Tensor | None,
    program: Program,
    operands: PointwiseOperands,
    *,
    wanted: outputs.WantedGrads,
    dtypes: outputs.GradDtypes = outputs.STACKED,
) -> PointwiseGrads:
    """The wanted gradients of x, the numbers of rows, the vectors of groups and matrices, from ``dy`` [rows, C]."""
    out = outputs.new_pointwise_grads(dy, program, operands, wanted, dtypes)
    dispatch.run(PointwiseBackward(program, dy, operands.rows(x), out))
    return out


@kernel(outputs.new_sums, obeys_switches=False)
def column_sums(tokens: Tensor, split_sizes: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """[E, N]: the sum of the rows of each group, each times its ``scale`` [T]; the gradient of a bias."""
    out = outputs.new_sums(tokens, split_sizes, dtype)
    dispatch.run(ColumnSums(tokens, split_sizes, out, scale))
    return out


@kernel(outputs.new_dots, obeys_switches=False)
def row_dots(tokens: Tensor, vectors: Matrices, split_sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """[T]: each row times its group's vector, 0 past the last group; the gradient of a bias's scale."""
    out = outputs.new_dots(tokens, dtype)
    dispatch.run(RowDots(tokens, vectors, split_sizes, out))
    return out


_TRANSPOSED = {Layout.NT: Layout.NN, Layout.NN: Layout.NT}


def _fold_transpose(
    layout: Layout, b: Matrices, second: OperandPair | None
) -> tuple[Layout, Matrices, OperandPair | None]:
    """A transposed view of dense matrices as the matrices themselves, under the layout that transposes them.

    Matrices without rows that are dense one way or the other may be either: the same kernels refuse both. The second
    pair of operands follows the first; a copy where it lies otherwise.
    """
    if layout is Layout.TN or first(b).stride(-1) == 1:
        return layout, b, second and _stored(second.a, second.b)
    turned = b.mT if isinstance(b, Tensor) else tuple(part.mT for part in b)
    return _TRANSPOSED[layout], turned, second and _stored(second.a, second.b.mT)


def _stored(a: Tensor, b: Tensor) -> OperandPair:
    return OperandPair(a, b if b.stride(-1) == 1 else b.contiguous())


def _of_groups(vectors: Operands, split_sizes: Tensor | None) -> FunctionOperands | None:
    return None if vectors is None or split_sizes is None else FunctionOperands(vectors, split_sizes)
