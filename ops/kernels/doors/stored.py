"""The door to products of rows and MXFP4 weights as they are stored: our own kernel decodes the bytes within them.

Nothing else reads the values then, and no memory holds them. Where the kernel does not take a problem, the weight is
decoded first (``decoding.py``). Both are the same product, up to the order of sums.
"""

from __future__ import annotations

from torch import Tensor

from ....fuser.contract import tracing as trace
from ...formats.copies import PackedFormat, Transposition, Weight
from ...formats.recipe import Recipe
from .. import dispatch
from ..hopper import stored_gemm as hopper
from ..operators.custom_ops import kernel
from ..problems.gemm import NO_TERMS, GroupedGemm, Layout, Terms
from ..problems.quantized import StoredGemm
from .decoding import multiply_unpacked

MOST_ROWS = 512
"""Rows a group on average, up to which a step is faster if products decode, although the activation is a kernel of its
own there. On an H200 a step of adapters on gpt-oss-20b's experts is 1.83 × as fast with 64 rows, 1.40 × with 256, 1.10
× with 512, 0.99 × with 768 and 0.91 × with 1024 (docs/lab/experiments.md, "Adapters over stored weights")."""


def decodes_within(rows: Tensor, weight: Weight, recipe: Recipe | None, rank: int = 0) -> bool:
    """Whether products of such rows, and of a second pair of this depth, read the bytes of a weight as they are."""
    is_mxfp4 = recipe is not None and recipe.packed is PackedFormat.MXFP4
    if not is_mxfp4 or weight.scales is None or not dispatch.allows(hopper.NAME):
        return False
    why = rows_refusal(rows, weight.data) or hopper.weight_refusal(rows, weight.data, weight.scales, rank)
    if why is not None and rows.is_cuda:
        trace.note(f"the weight is decoded before the product: {hopper.NAME} {why}")
    return why is None


def rows_refusal(rows: Tensor, data: Tensor) -> str | None:
    """Why decoding within a product of so many rows is not faster than before it; None: it is."""
    groups = data.shape[0]
    if rows.shape[0] <= MOST_ROWS * groups:
        return None
    return f"decodes within products of at most {MOST_ROWS} rows per group, got {rows.shape[0] / groups:.0f} on average"


def new_stored_product(layout: Layout, a: Tensor, data: Tensor) -> Tensor:
    """Memory for a product."""
    return a.new_empty((a.shape[0], data.shape[1] if layout is Layout.NT else data.shape[2] * 2))


@kernel(new_stored_product, spread={"terms": ("bias", "bias_scale", "row_scale", "second", "tail_unspecified")})
def stored_gemm(
    layout: Layout,
    a: Tensor,
    data: Tensor,
    scales: Tensor,
    split_sizes: Tensor,
    *,
    out: Tensor | None = None,
    terms: Terms = NO_TERMS,
) -> Tensor:
    """``row_scale * (A W + bias_scale * bias)`` by group, for bfloat16 rows; see :class:`StoredGemm`.

    Args:
        layout: NT: ``x W^T``, or NN, its gradient by ``x``.
        data, scales: the bytes and scales of the weight [E, N, K], as MXFP4 stores them.
        out: where to write; rows past the last group stay as they are.
        terms: a second pair of operands; under NT also the bias and the factors of rows.
    """
    fresh = out is None
    if out is None:
        out = new_stored_product(layout, a, data)
    product = GroupedGemm(layout, a, data, split_sizes, out, *terms[:5], fresh)
    product.second, product.tail_unspecified = terms.second, terms.tail_unspecified
    if dispatch.is_solved(StoredGemm(product, scales)):
        return out
    into = {} if fresh else {"out": out}
    return multiply_unpacked(layout, a, data, scales, split_sizes, PackedFormat.MXFP4, terms=terms, **into)


def stored_product(
    layout: Layout,
    rows: Tensor,
    weight: Weight,
    split_sizes: Tensor,
    terms: Terms = NO_TERMS,
    out: Tensor | None = None,
) -> Tensor:
    """The product with a weight that :func:`decodes_within` takes, or with its transpose if it is turned."""
    assert weight.scales is not None
    if weight.turn is not Transposition.NOTHING:
        layout = Layout.NN
    return stored_gemm(layout, rows, weight.data, weight.scales, split_sizes, out=out, terms=terms)
