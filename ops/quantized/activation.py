"""The activation between two grouped linears: behind a product of the first, and through the second in a backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import kernels
from ..formats.copies import Columns, Scaling, Weight
from ..formats.recipe import Recipe
from ..kernels import ActivationCall, Matrices, Operands, Terms
from ..kernels.doors.quantized import WantedCopies, quantize_activation, quantize_activation_backward, zero_tail
from ..kernels.doors.scaled_activation import QuantizedActivation, scaled_gemm_activation
from ..kernels.operators.outputs import WantedThrough
from ..values.activation_spec import ActivationSpec
from .linear import multiplied, multiplied_back
from .operands import Tokens, tokens_for


def _in_blocks(recipe: Recipe, is_gradient: bool) -> bool:
    """Whether a kernel may quantise the result of an activation, or of its backward: each scale needs only a block."""
    return recipe.kernels(is_gradient) is Scaling.BLOCKS


class Hidden(NamedTuple):
    """The hidden rows of a pre-activation, ``act(preact) * scales``; the activation may read numbers of columns.

    Attributes:
        scales: [T]; None for ones.
        vectors: the numbers of columns: see :class:`fusible.ops.kernels.problems.gemm.Activate`.
        encode: the scales of the forward, if they came from earlier steps.
    """

    preact: Tensor
    split_sizes: Tensor
    spec: ActivationSpec
    scales: Tensor | None = None
    vectors: Operands = None
    encode: Tensor | None = None

    @property
    def of_groups(self) -> tuple[Operands, Tensor | None]:
        """The numbers of columns, and the rows of each group, which nothing reads without them."""
        return self.vectors, None if self.vectors is None else self.split_sizes

    def values(self) -> Tensor:
        """Rounded."""
        return kernels.activate(self.preact, self.spec, self.scales, *self.of_groups)

    def for_wgrad(self, recipe: Recipe | None) -> Tensor | Columns | None:
        """As the gradient of the weight behind reads them."""
        if recipe is None:
            return self.values()
        if not _in_blocks(recipe, False) or not recipe.quantises_wgrad:
            return self._columns(recipe, self.values())
        return quantize_activation(
            *(self.preact, self.split_sizes, self.spec),
            scales=self.scales,
            power_of_two=recipe.is_power_of_two,
            want_rows=False,
            want_columns=True,
            vectors=self.vectors,
        ).columns

    def _columns(self, recipe: Recipe, values: Tensor) -> Tensor | Columns | None:
        on = recipe.with_scales(self.encode)
        read = tokens_for(None, on, values, self.split_sizes, rows=False, wgrad=True).for_wgrad
        assert isinstance(read, Tensor | Columns | None)
        return read


@dataclass(slots=True)
class ActivatedProduct:
    """A product followed by an activation, in place of :func:`multiplied`.

    It returns the product, if it is kept, and the hidden rows: in the form that the linear ``reader`` reads, or as
    values.

    Attributes:
        arrived: as for :func:`kernels.grouped_linear_activation`.
    """

    spec: ActivationSpec
    call: ActivationCall
    reader: nn.Module | None = None
    arrived: Tensor | None = None

    def __call__(
        self, x: Tokens, weight: Matrices | Weight, split_sizes: Tensor, terms: Terms
    ) -> tuple[Tensor | None, Tokens]:
        if x.recipe is not None:
            assert isinstance(weight, Weight)
            return self._quantised(x.recipe, x, weight, split_sizes, terms)
        preact, postact = kernels.grouped_linear_activation(
            x.values,  # type: ignore[arg-type]
            weight,  # type: ignore[arg-type]
            split_sizes,
            self.spec,
            terms,
            self.call,
            arrived=self.arrived,
        )
        return preact, Tokens(postact.dtype, postact, None)

    def _quantised(
        self, recipe: Recipe, x: Tokens, weight: Weight, split_sizes: Tensor, terms: Terms
    ) -> tuple[Tensor | None, Tokens]:
        call = self.call
        if self.reader is not None and _in_blocks(recipe, False):
            assert x.rows is not None
            out = scaled_gemm_activation(
                *(x.rows.data, x.rows.scales, weight.data, weight.scales, split_sizes, self.spec),  # type: ignore[arg-type]
                terms,
                QuantizedActivation(call.scales, recipe.is_power_of_two, call.keep_preact, x.dtype, call.vectors),
            )
            return out.preact, Tokens(x.dtype, None, None, out.rows, recipe, out.row_data.shape[0])
        preact = multiplied(x, weight, split_sizes, terms)
        postact = Hidden(preact, split_sizes, self.spec, call.scales, call.vectors).values()
        zero_tail(postact, split_sizes)
        read_by = None if self.reader is None else recipe
        hidden = tokens_for(self.reader, read_by, postact, split_sizes, rows=True, wgrad=False)
        return preact if call.keep_preact else None, hidden


class Wanted(NamedTuple):
    """The gradients that a backward through an activation gives.

    Attributes:
        scales: those of the scales; ``vectors``: of the numbers of columns.
        postact: the hidden rows, which the gradient of the weight behind reads.
        rows, wgrad: the gradient of the pre-activation as the linear in front reads it.
        values: the gradient of the pre-activation, not quantised, which a bias reads.
        bias_dtype: of the bias's gradient, if that is the column sum of the pre-activation's.
    """

    scales: bool
    vectors: bool
    postact: bool
    rows: bool
    wgrad: bool
    values: bool
    bias_dtype: torch.dtype | None


class Through(NamedTuple):
    """The gradients of a linear that follows an activation, and of the activation; None if not wanted.

    Attributes:
        preact: the gradient of the pre-activation.
        scales: the gradient of the scales, by row.
        postact: the activation times the scales, in the form that the gradient of the weight reads.
        bias: the gradient of the bias before the activation.
        vectors: the gradients of the numbers of columns.
    """

    preact: Tokens | None = None
    scales: Tensor | None = None
    postact: Tensor | Columns | None = None
    bias: Tensor | None = None
    vectors: Operands = None


def through_activation(
    dy: Tokens, weight: Matrices | Weight, hidden: Hidden, wanted: Wanted, front: nn.Module
) -> Through:
    """Through the linear after an activation, and the activation: in one pass unless something reads its values.

    Args:
        weight: as the forward has saved it.
        front: the linear before the activation, which reads the gradient of the pre-activation.
    """
    recipe, sizes = dy.recipe, hidden.split_sizes
    if recipe is None:
        grads = kernels.grouped_linear_activation_backward(
            *(dy.values, weight, hidden.preact, sizes, hidden.spec),  # type: ignore[arg-type]
            scales=hidden.scales,
            wanted=WantedThrough(wanted.scales, wanted.postact, wanted.vectors, wanted.bias_dtype),
            vectors=hidden.vectors,
        )
        dpreact = Tokens(grads.preact.dtype, grads.preact, grads.preact)
        return Through(dpreact, grads.scales, grads.postact, grads.bias, grads.vectors)
    dpostact = multiplied_back(dy, weight, sizes)
    if wanted.values or not _in_blocks(recipe, True) or not recipe.quantises_wgrad:
        return _by_two_passes(recipe, dpostact, hidden, wanted, front)
    out = quantize_activation_backward(
        *(dpostact, hidden.preact, sizes, hidden.spec),
        scales=hidden.scales,
        power_of_two=recipe.is_power_of_two,
        wanted=WantedCopies(wanted.rows, wanted.wgrad, wanted.postact, wanted.scales),
        vectors=hidden.vectors,
        want_vectors=wanted.vectors,
    )
    rows, columns = out.preact.rows, out.preact.columns
    dpreact = Tokens(hidden.preact.dtype, None, columns, rows, recipe, hidden.preact.shape[0])
    return Through(dpreact, out.dscales, out.postact, None, out.dvectors)


def _by_two_passes(recipe: Recipe, dpostact: Tensor, hidden: Hidden, wanted: Wanted, front: nn.Module) -> Through:
    vectors, of_groups = hidden.of_groups
    grads = kernels.activate_backward(
        *(dpostact, hidden.preact, hidden.spec, hidden.scales),
        want_scales=wanted.scales,
        want_postact=wanted.postact,
        vectors=vectors,
        split_sizes=of_groups,
        want_vectors=wanted.vectors,
    )
    is_read = wanted.rows or wanted.wgrad or wanted.values
    dpreact = tokens_for(
        *(front if is_read else None, recipe, grads.preact, hidden.split_sizes),
        rows=wanted.rows,
        wgrad=wanted.wgrad,
        values=wanted.values,
        is_gradient=True,
    )
    if grads.scales is not None:
        zero_tail(grads.scales.unsqueeze(-1), hidden.split_sizes)
    postact = None if grads.postact is None else hidden._columns(recipe, grads.postact)
    return Through(dpreact, grads.scales, postact, None, grads.vectors)
