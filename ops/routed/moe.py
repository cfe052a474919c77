"""A mixture-of-experts layer around its experts: rows of tokens to their experts, and their weighted sums back.

    Sequential(Dispatch(E), GroupedLinear(E, ...), SwiGLU(), GroupedLinear(E, ...), Scale(), Combine())

T tokens choose k experts each. A token's choices are its slots, S = T k in all; each slot is a row of its expert. Rows
are sorted by expert, stably, and everything stays on the device. An id below 0, or of E or more, is of no expert: its
row comes after all others, adds nothing, and gets no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import ArgumentError, Gradient, Grads, Op, Outputs, Promises, TensorSpec
from ..kernels.doors import routing as permutation
from ..kernels.doors.routing import Routing
from ..values.checks import check_floats

ROUTING = ("num_rows", "slot_of_row", "row_of_slot")
"""The extra outputs of :class:`Dispatch` that :class:`Combine` reads."""


class Dispatch(Op):
    """Dispatches tokens [T, H] to the rows of their experts [T k, H].

    Later ops read its extra outputs by name. A container does not return them to its caller:

    ================  ==========================  ==========================================================
    name              shape, dtype                contents
    ================  ==========================  ==========================================================
    ``split_sizes``   [E], int32                  the number of rows of each expert
    ``scales``        [T k], at least float32     the routing weight of each row, differentiable
    ``num_rows``      [1], int32                  the number of rows of all experts
    ``slot_of_row``   [T k], int32 or int64       the slot, token * k + j, of each row
    ``row_of_slot``   [T, k], int32 or int64      the row of each slot
    ================  ==========================  ==========================================================

    Args:
        num_experts: E.

    Keyword Args:
        top_k_index: int32 or int64 [T, k], k at least 1: the experts of each token. An id below 0, or of E or more,
            belongs to no expert.
        top_k_weights: floating-point [T, k]: the routing weights.

    Raises:
        ValueError: ``num_experts`` is not a positive integer.
        ArgumentError: in a call, tokens, ids or weights have another shape, dtype or device.
    """

    extra_outputs = ("split_sizes", "scales", *ROUTING)
    output_to_caller = dict.fromkeys(extra_outputs, False)
    promises = Promises(replayable=True, values_checked=frozenset())

    class Saved(NamedTuple):
        routing: Routing
        weights_dtype: torch.dtype

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        if type(num_experts) is not int or num_experts < 1:
            raise ValueError(f"Dispatch: num_experts must be a positive int, got {num_experts!r}")
        self.num_experts = num_experts

    def check(self, x: TensorSpec, *, top_k_index: Tensor, top_k_weights: Tensor) -> Mapping[str, TensorSpec]:
        check_floats(x)
        if len(x.shape) != 2:
            raise ArgumentError(f"x must be tokens [T, H], got shape {list(x.shape)}; flatten the leading dimensions")
        check_choices(top_k_index, top_k_weights, x)
        if top_k_index.shape != top_k_weights.shape:
            raise ArgumentError(
                f"top_k_index and top_k_weights must have one shape [T, k], "
                f"got {list(top_k_index.shape)} and {list(top_k_weights.shape)}"
            )
        rows, index = top_k_index.numel(), index_dtype(top_k_index, self.num_experts, x)
        scales = torch.promote_types(top_k_weights.dtype, torch.float32)
        return {
            "y": TensorSpec((rows, x.shape[1]), x.dtype, x.device),
            "split_sizes": TensorSpec((self.num_experts,), torch.int32, x.device),
            "scales": TensorSpec((rows,), scales, x.device),
            "num_rows": TensorSpec((1,), torch.int32, x.device),
            "slot_of_row": TensorSpec((rows,), index, x.device),
            "row_of_slot": TensorSpec(tuple(top_k_index.shape), index, x.device),
        }

    def fwd(self, x: Tensor, *, top_k_index: Tensor, top_k_weights: Tensor) -> tuple[Outputs, Saved]:
        routing = permutation.route(top_k_index, self.num_experts, x.dtype, top_k_weights.contiguous())
        outputs = {
            "y": permutation.permute(x, routing),
            "split_sizes": routing.split_sizes,
            "scales": permutation.scales_of(routing, top_k_weights),
            "num_rows": routing.num_rows,
            "slot_of_row": routing.slot_of_row,
            "row_of_slot": routing.row_of_slot,
        }
        return outputs, self.Saved(routing._replace(scales=None), top_k_weights.dtype)

    def bwd(self, saved: Saved, dy: Tensor, *, scales: Tensor, **indices: Tensor) -> Grads:
        grads: dict[str, Gradient] = {
            "x": lambda: permutation.unpermute(dy, saved.routing),
            "top_k_weights": lambda: permutation.by_slot(scales, saved.routing, saved.weights_dtype),
        }
        return grads

    def extra_repr(self) -> str:
        return str(self.num_experts)


class Combine(Op):
    """Combines rows of experts [T k, H] to tokens [T, H]: the sum of each token's rows, in at least float32, rounded
    once.

    Each sum is in the order of the slots, so the same input gives the same bits. The permutation comes from the
    :class:`Dispatch` before it. Combine does not apply the routing weights; put ``Scale()`` before it for that.

    Raises:
        ArgumentError: in a call, the rows do not fit the :class:`Dispatch`.
    """

    promises = Promises(replayable=True, values_checked=frozenset())

    class Saved(NamedTuple):
        routing: Routing

    def check(self, x: TensorSpec, *, num_rows: Tensor, slot_of_row: Tensor, row_of_slot: Tensor) -> TensorSpec:
        check_floats(x)
        rows = math.prod(row_of_slot.shape)
        if len(x.shape) != 2 or x.shape[0] != rows:
            raise ArgumentError(
                f"x must be the {rows} rows of the Dispatch before it, [{rows}, H], got {list(x.shape)}"
            )
        return TensorSpec((row_of_slot.shape[0], x.shape[1]), x.dtype, x.device)

    def fwd(self, x: Tensor, *, num_rows: Tensor, slot_of_row: Tensor, row_of_slot: Tensor) -> tuple[Tensor, Saved]:
        routing = permutation.of_indices(num_rows, slot_of_row, row_of_slot, x.dtype)
        return permutation.unpermute(permutation.valid_rows(x, routing), routing), self.Saved(routing)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return {"x": lambda: permutation.valid_rows(permutation.permute(dy, saved.routing), saved.routing)}


def check_choices(top_k_index: Any, top_k_weights: Any, x: TensorSpec) -> None:
    """Checks the experts and weights of each token, except for their values."""
    _check_slots("top_k_index", top_k_index, x, "int32 or int64", (torch.int32, torch.int64).__contains__)
    _check_slots("top_k_weights", top_k_weights, x, "floating-point, of at least 16 bits", _is_weight)


def _is_weight(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _check_slots(name: str, tensor: Any, x: TensorSpec, kind: str, fits: Callable[[torch.dtype], bool]) -> None:
    if not isinstance(tensor, Tensor) or tensor.dim() != 2 or tensor.shape[0] != x.shape[0]:
        came = f"shape {list(tensor.shape)}" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise ArgumentError(f"{name} must be [T, k], T={x.shape[0]} as x has tokens, got {came}")
    if not tensor.shape[1]:
        raise ArgumentError(f"{name} must be [T, k] with k at least 1, got shape {list(tensor.shape)}")
    if not fits(tensor.dtype):
        raise ArgumentError(f"{name} must be {kind}, got {tensor.dtype}")
    if tensor.device != x.device:
        raise ArgumentError(f"{name} must be on {x.device}, as x, got {tensor.device}; move it there")


def index_dtype(top_k_index: Tensor, num_experts: int, x: TensorSpec) -> torch.dtype:
    native = permutation.refusal(top_k_index, num_experts, x.dtype) is None
    return torch.int32 if native else torch.int64
