"""One linear layer per group of rows (expert)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...fuser import ArgumentError, Buffer, Gradient, Grads, Promises, TensorSpec
from ...fuser.contract import tracing as trace
from ...fuser.runtime.buffers import CallerBuffer
from .. import kernels
from ..formats.copies import AMAX, SCALES, Columns, Transposition, Weight
from ..formats.forms import check_decoders
from ..formats.quantized_tokens import QuantizedTokens
from ..formats.recipe import Recipe
from ..kernels import NO_TERMS, Independent, Matrices, Terms
from ..kernels.problems.gemm import stacked
from ..parameters.weight_grads import WeightGrads
from ..parameters.wide_buffers import WideBuffers
from ..quantized import linear as quantized
from ..quantized.gathered_weights import expected_operands, is_gathered
from ..quantized.operands import GatheredTokens, Tokens, quantized_tokens_for, tokens_for, weight_operands
from ..quantized.weights import match_state, operands_of
from ..values.checks import (
    check_buffer,
    check_buffer_columns,
    check_matrix_input,
    check_quantized_input,
    check_rows,
    check_sizes,
    check_split_sizes,
    product_dtype,
)

OUTPUT_BUFFER_KEY = "output"
GRAD_INPUT_BUFFER_KEY = "grad_input"


@dataclass(slots=True)
class LinearCall:
    """The arguments of a call of a grouped linear beside the rows of x.

    Attributes:
        needs_grad: the wanted gradients, by the names of the linear.
        shape: of x.
        x_is_inner: whether something in front of the linear, in the same call, has made x.
    """

    split_sizes: Tensor
    needs_grad: frozenset[str]
    bias_scale: Tensor | None = None
    grad_input: Tensor | None = None
    shape: tuple[int, ...] = (0, 0)
    x_is_inner: bool = True


class GroupedLinear(WideBuffers, WeightGrads):
    """``y[rows of g] = x[rows of g] @ weight[g].T + bias[g]``; rows are sorted by group.

    Rows past ``sum(split_sizes)``, the tail, are ignored: an ``output`` buffer keeps its values there, an output that
    the op allocates is zero there. A group without rows has a weight gradient of zeros.

    Keyword Args:
        split_sizes: the number of rows of each group: int32 or int64 [E], on the device of ``x``. A list, or a tensor
            on the host, is copied to that device.
        output: a buffer for y: shape [..., N], dtype of the product, contiguous, without grad. The result is a view of
            the buffer.
        grad_input: a buffer for the gradient of x: shape and dtype of x, contiguous, without grad. The gradient is that
            memory; the tail keeps its values. If ``x`` is a contiguous leaf without a ``.grad``, the buffer becomes its
            ``.grad`` (with other strides, torch copies it): to accumulate over several backwards, give each its own
            buffer. If another op or module of the container made ``x``, it gets a copy with a zero tail, so that the
            buffer's tail reaches no earlier weight gradient.
        bias_scale: with ``scale_bias``, the factor of the bias in each row: [...], any floating-point dtype.

    Args:
        num_groups: E.
        in_features: K.
        out_features: N.
        bias: whether there is a bias.
        single_grouped_weight: whether there is one parameter ``weight`` [E, N, K]; else ``weight0``, ``weight1``, … [N,
            K].
        single_grouped_bias: whether there is one parameter ``bias`` [E, N]; else ``bias0``, ``bias1``, … [N].
        scale_bias: whether the bias, if there is one, is multiplied by ``bias_scale``, which is then a required
            keyword.
        accumulate_into_main_grad: whether the weight gradient is added to ``weight.main_grad`` (or replaces it, if
            ``weight.overwrite_main_grad`` is set) instead of going through autograd. If the weight has
            ``grad_added_to_main_grad``, that is set to True, and the weight gets a ``.grad`` with meaningless values. A
            16-bit ``main_grad`` is rounded like an ``out`` of :func:`grouped_gemm`.
        delay_wgrad_compute: whether the weight gradient is computed by :meth:`backward_dw`, not in the backward.
        transposed_weight: whether the weight is stored as [E, K, N] (``weight0``, … as [K, N]), and read in that
            layout.
        recipe: the recipe that quantises the operands of the products. None: the recipe of ``config(recipe=...)``;
            ``NoRecipe()``: no quantisation.

    Raises:
        ArgumentError: a size is not a positive int, or the dtype is not floating-point with at least 16 bits; in a
            call, arguments do not fit.
        RuntimeError: in a backward that accumulates into ``main_grad``, ``main_grad`` is missing or does not fit.
    """

    promises = Promises(replayable=True, values_checked=frozenset({"split_sizes"}))
    recipe: Recipe | None = None
    gathers_bytes = False  # whether FSDP2 gathers the weight in e4m3

    class Saved(NamedTuple):
        x: Tensor | GatheredTokens | Columns | None
        weight: Matrices | Weight | None
        split_sizes: Tensor
        bias: Matrices | None
        bias_scale: Tensor | None
        grad_input: CallerBuffer | None
        x_shape: tuple[int, ...] | None  # the same for any number of rows
        zero_tail: bool
        recipe: Recipe | None = None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        single_grouped_weight: bool = True,
        single_grouped_bias: bool = True,
        scale_bias: bool = False,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
        transposed_weight: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        super().__init__()
        quantized.check_recipe("GroupedLinear", recipe)
        sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        check_sizes("GroupedLinear", dtype, **sizes)
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.has_bias, self.scale_bias, self.recipe = bias, scale_bias and bias, recipe
        self.init_expert_parameters()
        self.transposed_weight = transposed_weight
        weight = torch.empty((num_groups, *self._matrix_shape()), device=device, dtype=dtype)
        self.add_expert_parameter("weight", weight, single_grouped_weight)
        if bias:
            data = torch.empty((num_groups, out_features), device=device, dtype=dtype)
            self.add_expert_parameter("bias", data, single_grouped_bias)
        self.init_weight_grads(accumulate_into_main_grad, delay_wgrad_compute)
        self._register_scales(device)
        required = type(self).keywords["bias_scale"]._replace(required=True)
        others = {name: keyword for name, keyword in type(self).keywords.items() if name != "bias_scale"}
        self.keywords = {**others, "bias_scale": required} if self.scale_bias else others
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws every parameter uniformly from ±1/sqrt(in_features), as ``torch.nn.Linear`` does."""
        bound = 1 / math.sqrt(self.in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def _register_scales(self, device: torch.device | str | None) -> None:
        """Registers the buffers that the recipe carries from step to step, which stay float32."""
        if self.recipe is None or self.recipe.steps is None:
            return
        buffers = self.recipe.steps.buffers(self.num_groups, None if device is None else torch.device(device))
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)
        self.wide_buffers = tuple(buffers)

    def _matrix_shape(self) -> tuple[int, int]:
        packed = self.recipe.values_in_byte if self.is_quantized and self.recipe is not None else 1
        shape = self.out_features, self.in_features // packed
        return shape[::-1] if self.transposed_weight else shape

    @property
    def weight_shape(self) -> tuple[int, int, int]:
        """The shape [E, N, K] of the values, in any storage layout."""
        return self.num_groups, self.out_features, self.in_features

    def decision_key(self) -> tuple[Any, ...]:
        return (type(self), self.recipe, *self.forms())  # a parametrization changes the type

    def check_without_x(
        self,
        *,
        split_sizes: Any = None,
        output: Tensor | None = None,
        grad_input: Tensor | None = None,
        bias_scale: Tensor | None = None,
    ) -> None:
        self._check_weights(None)
        if split_sizes is not None:
            check_split_sizes(split_sizes, self.num_groups, None)
        for name, buffer, columns in (
            ("output", output, self.out_features),
            ("grad_input", grad_input, self.in_features),
        ):
            if buffer is not None:
                check_buffer_columns(name, buffer, columns)
        if bias_scale is not None:
            check_rows("bias_scale", bias_scale, None)

    def check(
        self,
        x: TensorSpec,
        *,
        split_sizes: Tensor | Sequence[int],
        output: Tensor | None = None,
        grad_input: Tensor | None = None,
        bias_scale: Tensor | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> TensorSpec:
        weight = self.one_parameter("weight")
        described = x, weight, self.in_features, autocast_dtype
        if self.is_quantized:
            dtype = check_quantized_input(*described, self.recipe.dtype_refusal)  # type: ignore[union-attr]
        else:
            dtype = check_matrix_input(*described)
        self._check_weights(x.device)
        if type(weight) is not nn.Parameter and is_gathered(weight):
            weight.check_reader(self.recipe)
        check_split_sizes(split_sizes, self.num_groups, x)
        y = TensorSpec((*x.shape[:-1], self.out_features), dtype, x.device)
        if output is not None:
            check_buffer("output", output, *y[:3])
        if grad_input is not None:
            check_buffer("grad_input", grad_input, *x[:3])
        if bias_scale is not None:
            check_rows("bias_scale", bias_scale, x)
        return y

    def _check_weights(self, device: torch.device | None) -> None:
        """Checks the parameters, and the scales of weights that stay quantised."""
        shapes = {"weight": self._matrix_shape(), "bias": (self.out_features,)}
        weight = self._parameters.get("weight")
        if weight is not None and type(weight) is not nn.Parameter and is_gathered(weight):
            del shapes["weight"]  # it has the shape of its shards
        self.check_parameters(device, **shapes)
        if not self.is_quantized:
            return
        decoders: Any = [self._buffers.get(name) for name in (SCALES, AMAX)]
        check_decoders(self.recipe, self.weight_shape, decoders)  # type: ignore[arg-type]

    def fwd(
        self,
        x: Tensor,
        *,
        split_sizes: Tensor | Sequence[int],
        output: Buffer | None = None,
        grad_input: Buffer | None = None,
        bias_scale: Tensor | None = None,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
        x_is_inner: bool = False,
    ) -> tuple[Tensor, Saved]:
        sizes = kernels.as_split_sizes(split_sizes, x.device)
        call = LinearCall(sizes, needs_grad, bias_scale, grad_input, x.shape, x_is_inner)
        out = None if output is None else output.view(-1, self.out_features)
        y, saved = self.multiply(self.reads(x, call, autocast_dtype), call, out=out)
        return with_rows_of(x, y) if output is None else output.detach(), saved

    def reads(
        self, x: Tensor | GatheredTokens | QuantizedTokens, call: LinearCall, autocast_dtype: torch.dtype | None
    ) -> Tokens:
        """``x`` as the products read it: rows of the dtype of the product, or what its recipe makes of them."""
        if isinstance(x, Tensor):
            x = as_rows(x, product_dtype(x.dtype, autocast_dtype))
        recipe, wgrad = quantized.applied(self, x.dtype), "weight" in call.needs_grad
        if isinstance(x, QuantizedTokens):
            return quantized_tokens_for(self, recipe, x, call.split_sizes, wgrad)
        return tokens_for(self, recipe, x, call.split_sizes, rows=True, wgrad=wgrad)

    def multiply(
        self,
        x: Tokens,
        call: LinearCall,
        product: Callable[..., Any] = quantized.multiplied,
        *,
        row_scale: Tensor | None = None,
        slots: kernels.RowSlots | None = None,
        **options: Any,
    ) -> tuple[Any, Saved]:
        """``row_scale * (x W^T + bias)`` and the saved state.

        Args:
            product: may do more than multiply.
            slots: where the rows of the product go.
            options: further arguments of the product.
        """
        weight, back = self._weight_operands(x, "x" in call.needs_grad)
        terms = NO_TERMS
        if self.has_bias or row_scale is not None or slots is not None:
            bias = self.matrices("bias") if self.has_bias else None
            scale = None if call.bias_scale is None else flat(call.bias_scale)  # spares a call
            terms = Terms(None, None, bias, scale, row_scale, slots=slots)
        y = product(x, weight, call.split_sizes, terms, **options)
        return y, self._saved(x, back, call)

    def _weight_operands(self, x: Tokens, back: bool) -> tuple[Matrices | Weight, Matrices | Weight | None]:
        """The weight operand of the product and, if ``back``, that of the gradient of ``x``."""
        recipe = x.recipe
        if recipe is None:
            values = self.matrices("weight", x.dtype)
            if not back or type(values) is nn.Parameter:
                return values, values if back else None
            return values, self.to_save("weight", values)
        if self.is_quantized:
            stored = Weight(stacked(self.matrices("weight")), *self.quantized_buffers())  # type: ignore[arg-type]
            return recipe.stored_operand(stored), stored._replace(turn=Transposition.COPY) if back else None
        quantized.note_few_rows(x, self.num_groups, self.one_parameter("weight").device)
        matrices = self.matrices("weight")
        if recipe.steps is not None:
            weight = stacked(matrices)
            return weight_operands(recipe.on(self, "weight", weight), weight, back)
        if self.gathers_bytes and trace.active():
            trace.note("FSDP2 gathers the weight in e4m3: each rank quantises its shard, and calls are not replayed")
            return expected_operands(self.one_parameter("weight"), back)
        return operands_of(recipe, matrices, back)

    def _saved(self, x: Tokens, weight: Matrices | Weight | None, call: LinearCall) -> Saved:
        """Saves exactly the tensors that the wanted gradients need."""
        needs_grad, grad_input, shape = call.needs_grad, call.grad_input, call.shape
        copies = call.x_is_inner and grad_input is not None and "x" in needs_grad
        if copies:
            trace.note("the gradient of x is copied from grad_input, whose tail must reach nothing in front")
        bias = self.matrices("bias") if "bias_scale" in needs_grad else None
        if bias is not None and type(bias) is not nn.Parameter:
            bias = self.to_save("bias", bias)
        return self.Saved(
            x.for_wgrad if "weight" in needs_grad else None,
            weight,
            call.split_sizes,
            bias,
            call.bias_scale,
            None if grad_input is None else CallerBuffer(grad_input),
            None if len(shape) == 2 else (-1, *shape[1:]) if 0 not in shape else tuple(shape),
            copies,
            x.recipe,
        )

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        reads = {"rows": "x" in needs_grad, "wgrad": "weight" in needs_grad, "is_gradient": True}
        biased = not needs_grad.isdisjoint(("bias", "bias_scale"))
        read = tokens_for(self, saved.recipe, as_rows(dy), saved.split_sizes, **reads, values=biased)
        products = 0 if saved.recipe is not None else len(needs_grad & {"x", "weight"})
        return self.grads_of(saved, read, needs_grad, Independent.of(products))

    def grads_of(
        self,
        saved: Saved,
        dy: Tokens,
        needs_grad: frozenset[str],
        independent: Independent | None = None,
        dbias: Tensor | None = None,
    ) -> dict[str, Gradient]:
        """Returns the wanted gradients, from the gradient of the output in the form that products read.

        Args:
            independent: the independent products that the products of these gradients belong to.
            dbias: the gradient of the bias, if it was computed together with ``dy``.
        """
        grads: dict[str, Gradient] = {}
        if "x" in needs_grad:
            grads["x"] = lambda: input_grad(dy, saved, independent)
        grads |= self.weight_grads(dy.for_wgrad, saved.x, saved.split_sizes, needs_grad, dy.number, independent)
        values, bias, scale = dy.values, saved.bias, saved.bias_scale
        if dbias is not None:
            grads["bias"] = dbias
        elif "bias" in needs_grad and values is not None:
            grads |= self.bias_grads(values, saved.split_sizes, scale)
        if "bias_scale" in needs_grad and values is not None and bias is not None and scale is not None:
            grads["bias_scale"] = lambda: kernels.row_dots(values, bias, saved.split_sizes, scale.dtype).view_as(scale)
        return grads

    def bias_grads(self, dy: Tensor, split_sizes: Tensor, row_scale: Tensor | None) -> Grads:
        """The gradient of the biases, stacked: sums of the rows of ``dy`` [T, N], scaled by ``row_scale`` if given."""

        def gradient() -> Tensor:
            scale = None if row_scale is None else row_scale.reshape(-1)
            return kernels.column_sums(dy, split_sizes, self.one_parameter("bias").dtype, scale)

        return {"bias": gradient}

    @property
    def keeps_scales(self) -> bool:
        """Whether the linear keeps delayed scales of earlier steps."""
        return bool(self.wide_buffers)

    def trace_refusal(self) -> str | None:
        if (recipe := quantized.followed_by(self)) is not None and recipe.steps is not None:
            return "delayed scales are kept in buffers, which compiled code does not write"
        if self.gathers_bytes:
            return "FSDP2 gathers the weight in e4m3, a parameter that compilers do not trace"
        return super().trace_refusal()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        why: str | None
        if self.gathers_bytes and args[0].get("assign_to_params_buffers", False):
            cure = "load without it, or call gather_quantized after"
            why = f"{prefix}weight is gathered in e4m3, and assign=True would replace what does so; {cure}"
        else:
            why = match_state(self, state_dict, prefix)
        if why is not None:  # nothing of the linear is loaded
            args[-1].append(why)
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={self.recipe}"
        return f"{self.num_groups}, {self.in_features}, {self.out_features}, bias={self.has_bias}{recipe}"


def as_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Reshapes [..., C] to rows [T, C] that a kernel can read; copies only if columns are strided or rows repeat."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])  # itself: autograd then names an overwritten one well
    (count, columns), (pitch, step) = rows.shape, rows.stride()
    dense = (step == 1 or columns == 1) and (pitch >= columns or count <= 1)
    rows = rows if dense else rows.contiguous()
    return rows if dtype is None or rows.dtype == dtype else rows.to(dtype)


def with_rows_of(x: Tensor, y: Tensor) -> Tensor:
    """Reshapes [T, C] to [..., C] with the leading dimensions of ``x``; autograd lets others write to the view."""
    return y if x.dim() == 2 else y.view(*x.shape[:-1], y.shape[-1]).detach()


def flat(column: Tensor | None) -> Tensor | None:
    """One number per row, as [T]."""
    return column if column is None or column.dim() == 1 else column.reshape(-1)


def input_grad(dy: Tokens, saved: GroupedLinear.Saved, independent: Independent | None = None) -> Tensor:
    """``dy W`` by group, written to the caller's buffer if there is one."""
    lent, weight = saved.grad_input, saved.weight
    if weight is None:
        raise ArgumentError("the gradient of x was not wanted in the forward")
    if lent is None:
        dx = quantized.multiplied_back(dy, weight, saved.split_sizes, None, independent)
        return dx if saved.x_shape is None else dx.view(saved.x_shape)
    out, independent = lent.tensor.view(-1, lent.tensor.shape[-1]), None if saved.zero_tail else independent
    quantized.multiplied_back(dy, weight, saved.split_sizes, out, independent)
    return without_tail(lent.tensor, saved.split_sizes) if saved.zero_tail else lent.tensor.detach()


def without_tail(x: Tensor, split_sizes: Tensor) -> Tensor:
    """Copies rows, with zeros past the last group; does not synchronise."""
    rows = x.view(-1, x.shape[-1])
    inside = torch.arange(rows.shape[0], device=x.device) < split_sizes.sum()
    return torch.where(inside.unsqueeze(-1), rows, 0).view_as(x)
