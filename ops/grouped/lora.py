"""A grouped linear layer with a low-rank adapter (LoRA) for each group. Arxiv 2106.09685."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from ...fuser import ArgumentError, Gradient, Grads, Promises, TensorSpec
from .. import kernels
from ..formats.copies import Transposition, Weight
from ..formats.forms import check_decoders
from ..formats.recipe import Recipe
from ..kernels import Layout, Matrices, OperandPair, Terms
from ..kernels.doors.low_rank import LowRank, low_rank_pass
from ..kernels.doors.routing import Routing
from ..kernels.problems.gemm import stacked
from ..parameters.grouped import ExpertParameters
from ..quantized.linear import multiplied, multiplied_back, multiplies_apart, values_of, weight_product
from ..quantized.operands import Tokens, tokens_for
from ..quantized.weights import match_state
from ..values.checks import (
    check_decoded_input,
    check_matrix_input,
    check_quantized_input,
    check_sizes,
    check_split_sizes,
    product_dtype,
)
from .grouped_linear import as_rows, with_rows_of


class GroupedLoRA(ExpertParameters):
    """``y[rows of g] = x[rows of g] @ (weight[g] + lora_b[g] @ lora_a[g]).T + bias[g]``; rows are sorted by group.

    The sum of the matrices is never formed. The rows are multiplied by ``lora_a`` first; the kernel of the weight's
    product then multiplies the result, of width ``rank``, by ``lora_b``. A frozen weight costs no product in the
    backward. Rows past the last group, the tail, are zero in the output.

    :func:`fusible.quantize_` replaces the weight by bytes. Under a weight-only format, such as ``fusible.MXFP4()``,
    each product of forward and backward decodes them. Under ``fusible.Float8Block()`` they are multiplied by quantised
    rows, and the adapter by the unquantised rows.

    Keyword Args:
        split_sizes: the number of rows of each group: int32 or int64 [E]; copied to the device of ``x`` if needed.

    Args:
        num_groups: E.
        in_features: K.
        out_features: N.
        rank: R, the rank of the adapters ``lora_a`` [E, R, K] and ``lora_b`` [E, N, R], whose dtype may differ from the
            weight's; 0 for no adapter. Multiply ``lora_b`` by the factor of the product, if there is one.
        bias: whether there is a bias [E, N].
        transposed_weight: whether the weight is stored as [E, K, N], and read in that layout.

    Raises:
        ArgumentError: a size is not a positive int, the rank is negative, or the dtype is not floating-point with at
            least 16 bits; in a call, arguments do not fit.
    """

    promises = Promises(replayable=True, values_checked=frozenset({"split_sizes"}))
    recipe: Recipe | None = None  # the format in which the weight stays

    class Saved(NamedTuple):
        x: Tensor | None
        low: Tensor | None
        weight: Matrices | Weight | None
        lora_a: Tensor | None
        lora_b: Tensor | None
        split_sizes: Tensor
        x_shape: tuple[int, ...]
        recipe: Recipe | None = None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        rank: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        transposed_weight: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        check_sizes("GroupedLoRA", dtype, **sizes)
        if isinstance(rank, bool) or not isinstance(rank, SupportsIndex) or int(rank) < 0:
            raise ArgumentError(f"GroupedLoRA: rank must be an int from 0 on, 0 for no adapter, got {rank!r}")
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.rank, self.has_bias, self.transposed_weight = int(rank), bias, transposed_weight
        self.init_expert_parameters()
        for name, shape in self._shapes().items():
            self.add_expert_parameter(name, torch.empty((num_groups, *shape), device=device, dtype=dtype), True)
        self.reset_parameters()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of one group's parameters, by name."""
        inputs, outputs = self.in_features, self.out_features
        in_byte = 1 if self.recipe is None else self.recipe.values_in_byte
        matrix = (inputs, outputs) if self.transposed_weight else (outputs, inputs // in_byte)
        shapes: dict[str, tuple[int, ...]] = {"weight": matrix}
        if self.has_bias:
            shapes["bias"] = (outputs,)
        return shapes | ({"lora_a": (self.rank, inputs), "lora_b": (outputs, self.rank)} if self.rank else {})

    def reset_parameters(self) -> None:
        """Draws weight, bias and ``lora_a`` uniformly from ±1/sqrt(in_features); ``lora_b`` is zero."""
        bound = 1 / math.sqrt(self.in_features)
        for name, parameter in self.named_parameters():
            if name == "lora_b":
                nn.init.zeros_(parameter)
            elif name != "weight" or not self.is_quantized:
                nn.init.uniform_(parameter, -bound, bound)

    def decision_key(self) -> tuple[Any, ...]:
        return (type(self), self.recipe, *self.forms())

    def check_without_x(self, *, split_sizes: Any = None) -> None:
        self._check_parameters(None)
        if split_sizes is not None:
            check_split_sizes(split_sizes, self.num_groups, None)

    def check(
        self, x: TensorSpec, *, split_sizes: Tensor | Sequence[int], autocast_dtype: torch.dtype | None = None
    ) -> TensorSpec:
        described = x, self.one_parameter("weight"), self.in_features, autocast_dtype
        if self.quantises_rows:
            dtype = check_quantized_input(*described, self.recipe.dtype_refusal)  # type: ignore[union-attr]
        else:
            dtype = (check_decoded_input if self.is_quantized else check_matrix_input)(*described)
        self._check_parameters(x.device)
        check_split_sizes(split_sizes, self.num_groups, x)
        return TensorSpec((*x.shape[:-1], self.out_features), dtype, x.device)

    def _check_parameters(self, device: torch.device | None) -> None:
        self.check_parameters(device, **self._shapes())
        if self.recipe is not None:
            check_decoders(self.recipe, self.weight_shape, self.quantized_buffers())

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """The shape [E, N, K] of the values, in any storage layout."""
        return self.num_groups, self.out_features, self.in_features

    def base(self, like: Tensor) -> Matrices:
        """The weight [E, N, K] as a product of rows like these reads it; decoded for this product if it is stored."""
        return values_of(self._kept(like.dtype), self.recipe, like)

    def _kept(self, dtype: torch.dtype) -> Matrices | Weight:
        return self._stored() if self.is_quantized else self.matrices("weight", dtype)

    def multiplies_apart(self, rows: Tensor) -> bool:
        """Whether the product with such rows ends without an epilogue."""
        return self.is_quantized and multiplies_apart(self._stored(), self.recipe, rows, self.rank)

    def _stored(self) -> Weight:
        return Weight(stacked(self.matrices("weight")), *self.quantized_buffers())  # type: ignore[arg-type]

    def fwd(
        self,
        x: Tensor,
        *,
        split_sizes: Tensor | Sequence[int],
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
    ) -> tuple[Tensor, Saved]:
        sizes = kernels.as_split_sizes(split_sizes, x.device)
        rows = as_rows(x, product_dtype(x.dtype, autocast_dtype))
        low = self.project(rows, sizes).product
        y = self.product(rows, low, sizes)
        return with_rows_of(x, y), self.saved(rows.dtype, rows, low, sizes, needs_grad, tuple(x.shape))

    def saved(
        self,
        dtype: torch.dtype,
        rows: Tensor | None,
        low: Tensor | None,
        sizes: Tensor,
        needs_grad: frozenset[str],
        shape: tuple[int, ...] = (),
    ) -> Saved:
        """Saves exactly the tensors that the wanted gradients need.

        Args:
            dtype: the dtype of the products.
            rows, low: the input, and the result of :meth:`project`.
            shape: the shape of the input and of its gradient.
        """
        through = "x" in needs_grad
        weight: Matrices | Weight | None = None
        if through and self.is_quantized:
            weight = self._stored()
        elif through:
            weight = self.matrices("weight", dtype)
            if type(weight) is not nn.Parameter:
                weight = self.to_save("weight", weight)
        keeps_rows = not needs_grad.isdisjoint(("weight", "lora_a"))
        return self.Saved(
            rows if keeps_rows else None,
            low if "lora_b" in needs_grad else None,
            weight,
            self.factor("lora_a", dtype) if through else None,
            self.factor("lora_b", dtype) if through or "lora_a" in needs_grad else None,
            sizes,
            shape,
            self.recipe,
        )

    def product(
        self,
        rows: Tensor,
        low: Tensor | None,
        sizes: Tensor,
        *,
        bias_scale: Tensor | None = None,
        tail_unspecified: bool = False,
    ) -> Tensor:
        """``rows`` times the weight, plus ``low`` times ``lora_b``, plus the bias times its scale for each row."""
        bias = self.matrices("bias") if self.has_bias else None
        terms = Terms(None, None, bias, bias_scale, second=self.second(low), tail_unspecified=tail_unspecified)
        read = _read(self.recipe, rows, sizes)
        if read.recipe is None:
            return weight_product(Layout.NT, rows, self._kept(rows.dtype), self.recipe, sizes, terms)
        return multiplied(read, read.recipe.stored_operand(self._stored()), sizes, terms)

    @property
    def quantises_rows(self) -> bool:
        """Whether the weight's bytes are multiplied by quantised rows; the adapter reads the rows as they are."""
        return self.recipe is not None and self.recipe.quantises_tokens

    def second(self, low: Tensor | None) -> OperandPair | None:
        """``low`` and ``lora_b``, whose product is added to the weight's; None without an adapter."""
        return None if low is None else _pair(low, self.factor("lora_b", low.dtype))

    def factor(self, name: str, dtype: torch.dtype | None) -> Tensor | None:
        """``lora_a`` or ``lora_b`` in the dtype of the products; None without an adapter."""
        return _tensor(self.matrices(name, dtype)) if self.rank else None

    def project(self, x: Tensor, sizes: Tensor, routing: Routing | None = None) -> LowRank:
        """The rows if they are gathered, and their product with ``lora_a`` [T, R], None without an adapter.

        Args:
            routing: the routing by which rows are gathered from ``x``.
        """
        factor = self.factor("lora_a", x.dtype)
        return low_rank_pass(x, Layout.NT, sizes, routing=routing, factor=factor, want_rows=routing is not None)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        rows, sizes = as_rows(dy), saved.split_sizes
        through = self.through_lora_b(rows, saved)
        dlow, grads = through.product, lora_b_grad(through)
        if "x" in needs_grad:
            grads["x"] = lambda: input_grad(rows, dlow, saved).view(saved.x_shape)
        grads |= self.parameter_grads(rows, dlow, saved.x, sizes, needs_grad)
        if "bias" in needs_grad:
            grads["bias"] = lambda: kernels.column_sums(rows, sizes, self.one_parameter("bias").dtype)
        return grads

    def parameter_grads(
        self,
        dy: Tensor,
        dlow: Tensor | None,
        x: Tensor | None,
        sizes: Tensor,
        needs_grad: frozenset[str],
    ) -> dict[str, Gradient]:
        """The wanted gradients of the matrices that the input [T, K] is multiplied by, by name.

        Args:
            dy, dlow: the gradients of the output [T, N] and of the result of :meth:`project` [T, R].
        """
        grads: dict[str, Gradient] = {}
        if "weight" in needs_grad:
            left, right = (x, dy) if self.transposed_weight else (dy, x)
            grads["weight"] = self._weight_grad(left, right, sizes)
        if "lora_a" in needs_grad:
            grads["lora_a"] = self.lora_a_grad(dlow, x, sizes)
        return grads

    def _weight_grad(self, left: Tensor | None, right: Tensor | None, sizes: Tensor) -> Gradient:
        assert left is not None
        assert right is not None
        dtype = self.one_parameter("weight").dtype
        return lambda: _tensor(kernels.grouped_gemm(Layout.TN, left, right, sizes, out_dtype=dtype))

    def lora_a_grad(
        self, dlow: Tensor | None, x: Tensor | None, sizes: Tensor, routing: Routing | None = None
    ) -> Gradient:
        """The gradient of ``lora_a``, from the input or from the tokens that its rows are gathered from."""
        assert dlow is not None
        assert x is not None
        dtype = self.one_parameter("lora_a").dtype

        def gradient() -> Tensor:
            through = low_rank_pass(x, Layout.NT, sizes, routing=routing, low=dlow, gradient_dtype=dtype)
            return _tensor(through.gradient)

        return gradient

    def through_lora_b(self, dy: Tensor, saved: Saved, routing: Routing | None = None) -> LowRank:
        """From the gradient of the output: its rows if they are gathered, ``dlow``, and the gradient of ``lora_b``.

        Args:
            routing: the routing by which rows are gathered from ``dy``.
        """
        return low_rank_pass(
            dy,
            Layout.NN,
            saved.split_sizes,
            routing=routing,
            factor=saved.lora_b,
            low=saved.low,
            gradient_dtype=None if saved.low is None else self.one_parameter("lora_b").dtype,
            want_rows=routing is not None,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        if (why := match_state(self, state_dict, prefix)) is not None:  # nothing of the linear is loaded
            args[-1].append(why)
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        sizes = f"{self.num_groups}, {self.in_features}, {self.out_features}"
        recipe = "" if self.recipe is None else f", recipe={self.recipe}"
        return f"{sizes}, rank={self.rank}, bias={self.has_bias}{recipe}"


def lora_b_grad(through: LowRank) -> dict[str, Gradient]:
    """The gradient of ``lora_b`` by name, if it is wanted."""
    return {} if through.gradient is None else {"lora_b": through.gradient}


def input_grad(dy: Tensor, dlow: Tensor | None, saved: GroupedLoRA.Saved, *, tail_unspecified: bool = False) -> Tensor:
    """The gradient [T, K] of the input, through weight and adapter."""
    terms = Terms(second=back_through(dlow, saved), tail_unspecified=tail_unspecified)
    read, weight = _read(saved.recipe, dy, saved.split_sizes, is_gradient=True), saved.weight
    if read.recipe is None:
        return weight_product(Layout.NN, dy, weight, saved.recipe, saved.split_sizes, terms)
    assert isinstance(weight, Weight)
    return multiplied_back(read, weight._replace(turn=Transposition.COPY), saved.split_sizes, terms=terms)


def _read(recipe: Recipe | None, rows: Tensor, sizes: Tensor, is_gradient: bool = False) -> Tokens:
    """Rows in the form that a product with the weight reads; unchanged under weight-only formats."""
    followed = recipe if recipe is not None and recipe.quantises_tokens else None
    return tokens_for(None, followed, rows, sizes, rows=True, wgrad=False, is_gradient=is_gradient)


def back_through(dlow: Tensor | None, saved: GroupedLoRA.Saved) -> OperandPair | None:
    """``dlow`` and ``lora_a``, whose product is added to the gradient of the input; None without an adapter."""
    return None if dlow is None else _pair(dlow, saved.lora_a)


def _pair(a: Tensor, b: Tensor | None) -> OperandPair | None:
    return None if b is None else OperandPair(a, b)


def _tensor(matrices: Matrices | None) -> Tensor:
    assert isinstance(matrices, Tensor)
    return matrices
