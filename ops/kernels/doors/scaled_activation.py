"""The door to a product of quantised operands with an activation behind it, whose rows are quantised."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....fuser.contract import tracing as trace
from ...formats.copies import Rows, ceil_blocks
from ...values.activation_spec import ActivationSpec
from ..dispatch import choose, solve
from ..operators.custom_ops import kernel
from ..problems.gemm import Operands, Terms
from ..problems.quantized import ActivatedScaledGemm, ScaledGemm
from .quantized import E4M3, quantize_activation, scaled_gemm


class ActivatedRows(NamedTuple):
    """The rows of an activation, quantised, and the pre-activation if it is kept; flat, as a custom op returns them."""

    preact: Tensor | None
    row_data: Tensor
    row_scales: Tensor

    @property
    def rows(self) -> Rows:
        return Rows(self.row_data, self.row_scales)


def new_activated_rows(
    a: Tensor, weight: Tensor, activation: ActivationSpec, keep_preact: bool, dtype: torch.dtype
) -> ActivatedRows:
    """Memory for the rows of an activation, and for the product in front if it is kept."""
    tokens, columns = a.shape[0], weight.shape[1]
    features = activation.out_features(columns)
    scales = a.new_empty((ceil_blocks(features), (tokens + 3) // 4 * 4), dtype=torch.float32)
    preact = a.new_empty((tokens, columns), dtype=dtype) if keep_preact else None
    return ActivatedRows(preact, a.new_empty((tokens, features), dtype=E4M3), scales)


class QuantizedActivation(NamedTuple):
    """The arguments of an activation whose rows are quantised.

    Attributes:
        scales: [T]; None for ones.
        power_of_two: whether scales of blocks are powers of two.
        keep_preact: whether the product itself is wanted, too.
        dtype: of the product, to which the activation is rounded before it is quantised.
        vectors: the numbers of columns that the activation reads: see :class:`Activate`.
    """

    scales: Tensor | None
    power_of_two: bool
    keep_preact: bool
    dtype: torch.dtype
    vectors: Operands = None


@kernel(
    new_activated_rows,
    added=("vectors",),
    spread={"terms": ("bias", "bias_scale"), "call": QuantizedActivation._fields},
)
def scaled_gemm_activation(
    a: Tensor,
    a_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    split_sizes: Tensor,
    activation: ActivationSpec,
    terms: Terms,
    call: QuantizedActivation,
) -> ActivatedRows:
    """``preact = A W^T + bias_scale * bias``, zero in the tail, and the quantised rows of ``act(preact) * scales``.

    Args:
        a: e4m3 [T, K], with ``a_scales``: the fields of :class:`Rows`.
        weight: e4m3 [E, N, K].
        terms: a bias with its scales.
    """
    scales, power_of_two, keep_preact, dtype, vectors = call
    out = new_activated_rows(a, weight, activation, keep_preact, dtype)
    preact = a.new_empty((0, weight.shape[1]), dtype=dtype) if out.preact is None else out.preact
    rows = Rows(a, a_scales)
    bias = {"bias": terms.bias, "bias_scale": terms.bias_scale}
    product = ScaledGemm(rows, weight, weight_scales, 1, split_sizes, preact, **bias, fresh=True)  # type: ignore[arg-type]
    problem = ActivatedScaledGemm(product, activation, scales, power_of_two, out.rows, vectors)
    of_product = choose(product, trace.active())
    choice = of_product if of_product.is_fallback else choose(problem, trace.active())
    if not choice.is_fallback:
        solve(problem, choice)
        return out
    if a.is_cuda:
        why = of_product.reason or choice.words
        trace.note(f"the hidden rows are quantised by a kernel of its own: the epilogue {why}")
    del out, preact, product, problem  # whose memory the results of these kernels may have
    values = scaled_gemm(a, a_scales, weight, weight_scales, split_sizes, out_dtype=dtype, terms=terms)
    read: dict[str, Any] = {"scales": scales, "vectors": vectors}
    hidden = quantize_activation(values, split_sizes, activation, power_of_two=power_of_two, **read).rows
    assert hidden is not None
    return ActivatedRows(values if keep_preact else None, hidden.data, hidden.scales)  # type: ignore[arg-type]
