"""``EPDispatch``: sends tokens to the ranks that own their experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import ArgumentError, Gradient, Grads, Op, Outputs, Promises, TensorSpec
from ...fuser.contract import tracing as trace
from ..formats.per_block import Float8Block
from ..routed.call import RoutedCall
from ..routed.moe import check_choices, index_dtype
from ..values.checks import check_floats, product_dtype
from . import float8_rows
from .group import Group, Moving
from .messages import EIGHT_BITS, GRADIENTS, WIDE_WEIGHTS
from .transport import DispatchedRows, Exchange, Table


class EPDispatch(Op):
    """Dispatches tokens [T, H] of all ranks: each rank gets the rows [Q, H] of the experts that it owns.

    Rows are sorted by expert, then rank, token and slot. Rows past the last expert, the tail, are zero. Later ops read
    its extra outputs by name:

    ===============  ============================  ========================================================
    name             shape, dtype                  contents
    ===============  ============================  ========================================================
    ``split_sizes``  [E / R], int32                the number of rows of each expert of this rank
    ``scales``       [Q], at least float32         the routing weight of each row, differentiable
    ``row_of_slot``  [T, k], int32 or int64        for the :class:`EPCombine` of the same group and lane
    ===============  ============================  ========================================================

    All ranks must call it, including those without tokens.

    Args:
        group: the group of ranks.
        lane: the index of the group's lane.
        recipe: ``Float8Block()``: tokens are quantised before they are sent, which halves the traffic. Rows are then
            the dequantised values in bfloat16; a linear under that recipe gives the same output as for the tokens. A
            fused op whose linears follow the recipe reads the bytes. It quantises the operands of weight gradients from
            them, with one more rounding. None: tokens are sent unchanged.

    Keyword Args:
        top_k_index: int32 or int64 [T, k], the experts of each token, on all ranks. An id below 0, or of
            ``num_experts`` or more, belongs to no expert.
        top_k_weights: floating-point [T, k], the routing weights.

    Raises:
        TypeError: ``group`` is not a :class:`Group`.
        ValueError: the group has no such lane, or its tokens cannot be sent under that recipe.
        ArgumentError: in a call, tokens, ids or weights do not fit the group.
        CapacityError: a rank would own more rows than ``capacity``.
        PeerError: a rank did not take part, or made another call.
        RuntimeError: the lane's last exchange was not ended by an :class:`EPCombine`, or the group is closed.
    """

    extra_outputs = ("split_sizes", "scales", "row_of_slot")
    output_to_caller = dict.fromkeys(extra_outputs, False)
    promises = Promises(values_checked=frozenset(), eager_only="it waits for other ranks")

    class Saved(NamedTuple):
        table: Any
        x_dtype: torch.dtype
        weights_dtype: torch.dtype

    def __init__(self, group: Group, lane: int = 0, recipe: Float8Block | None = None) -> None:
        super().__init__()
        self.group, self.lane, self.recipe = group, check_lane("EPDispatch", group, lane), recipe
        if recipe is not None and (why := float8_rows.refusal(recipe, group.settings)) is not None:
            raise ValueError(f"EPDispatch: {why}")

    def check(
        self,
        x: TensorSpec,
        *,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        autocast_dtype: torch.dtype | None = None,
    ) -> Mapping[str, TensorSpec]:
        settings = self.group.settings
        x = x._replace(dtype=product_dtype(x.dtype, autocast_dtype))
        check_rows_of(self.group, x, "tokens [T, H]")
        check_choices(top_k_index, top_k_weights, x)
        for name, slots in (("top_k_index", top_k_index), ("top_k_weights", top_k_weights)):
            if slots.shape[1] != settings.top_k:
                raise ArgumentError(
                    f"{name} must be [T, {settings.top_k}], as the group has top_k={settings.top_k}, "
                    f"got {list(slots.shape)}"
                )
        if x.shape[0] > settings.max_tokens:
            raise ArgumentError(
                f"x has {x.shape[0]} tokens, the group has max_tokens={settings.max_tokens}; make a group for more"
            )
        return self._outputs(x, top_k_index, top_k_weights)

    def _outputs(self, x: TensorSpec, top_k_index: Tensor, top_k_weights: Tensor) -> dict[str, TensorSpec]:
        """The specs of the outputs that are known before the exchange."""
        rows = self.group.local_capacity
        index = index_dtype(top_k_index, self.group.settings.num_experts, x)
        specs = {
            "split_sizes": TensorSpec((self.group.num_local_experts,), torch.int32, x.device),
            "row_of_slot": TensorSpec(tuple(top_k_index.shape), index, x.device),
        }
        if rows is not None:
            scales = torch.promote_types(top_k_weights.dtype, torch.float32)
            specs["y"] = TensorSpec((rows, x.shape[1]), x.dtype, x.device)
            specs["scales"] = TensorSpec((rows,), scales, x.device)
        return specs

    def fwd(
        self,
        x: Tensor,
        *,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        needs_grad: frozenset[str],
        autocast_dtype: torch.dtype | None,
    ) -> tuple[Outputs, Saved]:
        call = RoutedCall(x, top_k_index, top_k_weights, needs_grad, autocast_dtype)
        table, rows, scales, _ = self.exchange(call, fill=True)
        self.group.lanes[self.lane].opened(table)
        outputs = {"y": rows, "split_sizes": table.split_sizes, "scales": scales, "row_of_slot": table.row_of_slot}
        return outputs, self.Saved(table, x.dtype, top_k_weights.dtype)

    def exchange(self, call: RoutedCall, fill: bool, beside: bool = False, as_sent: bool = False) -> DispatchedRows:
        """Returns the table of a new exchange, and the rows and scales of this rank's experts.

        Args:
            fill: whether the tail of the rows must be zero; otherwise it is arbitrary.
            beside: whether rows may arrive while the next launched kernel runs.
            as_sent: whether rows sent in 8 bits are returned as :class:`QuantizedTokens`; otherwise as values.
        """
        x, needs = call.x.to(self.group.settings.dtype), call.needs_grad & GRADIENTS
        if trace.active():
            return self._decoded(self._foreseen(x, call.top_k_index, call.top_k_weights), as_sent)
        with Moving(self.group) as transport:
            exchange = self.group.lanes[self.lane].begin()
            if self.recipe is not None:
                x, needs = float8_rows.packed(x), needs | {EIGHT_BITS}
            if call.top_k_weights.dtype == torch.float64:  # others travel in 32 bits
                needs |= {WIDE_WEIGHTS}
            sent = RoutedCall(x, call.top_k_index, call.top_k_weights, needs)
            return self._decoded(transport.dispatch(exchange, sent, fill, beside), as_sent)

    def _decoded(self, dispatched: DispatchedRows, as_sent: bool) -> DispatchedRows:
        """The rows as they are read, from those that travelled."""
        if self.recipe is None:
            return dispatched
        rows = float8_rows.arrived(dispatched.rows, self.group.settings.hidden)
        return dispatched._replace(rows=rows if as_sent else rows.values())

    def _foreseen(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> DispatchedRows:
        """The result of a run without data; assumes as many rows as slots if only the data could tell."""
        count = self.group.local_capacity or top_k_index.numel()
        table = TableForeseen(
            Exchange(self.lane, 0),
            x.new_empty(self.group.num_local_experts, dtype=torch.int32),
            torch.empty_like(top_k_index, dtype=torch.int64),
            count,
        )
        rows = x.new_empty(count, x.shape[1] if self.recipe is None else float8_rows.width(x.shape[1]))
        scales = x.new_empty(count, dtype=torch.promote_types(top_k_weights.dtype, torch.float32))
        self.group.mover.foresee("dispatch", rows, scales)
        if self.recipe is not None:
            trace.note("tokens are quantised before they travel, and their rows have the values of the bytes")
        if self.group.local_capacity is None:
            trace.note(f"how many rows there are depends on data; {count} are assumed, one for each slot of this rank")
        trace.note(f"transport {self.group.transport}: {self.group.transport_reason}")
        for said in (self.group.settings.rounding(self.group.size), self.group.mover.overlaps.reason):
            if said is not None:
                trace.note(said)
        if self.group.settings.float8_gradients:
            trace.note("gradients of combined tokens are quantised before they travel")
        return DispatchedRows(table, rows, scales)

    def bwd(self, saved: Saved, dy: Tensor, *, scales: Tensor, **indices: Tensor) -> Grads:
        grads: dict[str, Gradient] = {
            "x": lambda: start_sum(self.group, dy, saved.table, "dispatch backward")().to(saved.x_dtype),
            "top_k_weights": lambda: returned(self.group, scales, saved.table, saved.weights_dtype),
        }
        return grads

    def extra_repr(self) -> str:
        recipe = "" if self.recipe is None else f", recipe={self.recipe}"
        return f"{self.group!r}, lane={self.lane}{recipe}"


class TableForeseen(NamedTuple):
    """The table of a run without data."""

    exchange: Exchange
    split_sizes: Tensor
    row_of_slot: Tensor
    num_rows: int


def start_sum(
    group: Group, rows: Tensor | None, table: Table, kind: str, products_follow: bool = False
) -> Callable[[], Tensor]:
    """Starts the sums of the rows [Q, H] of all ranks; returns a function that gives the sums [T, H] of this rank's
    tokens.

    Args:
        rows: None: they were sent to slots (:meth:`Transport.row_slots`).
        products_follow: whether products are launched before the function is called.
    """
    if rows is not None and trace.active():
        group.mover.foresee(kind, rows)
        return lambda: rows.new_empty(table.row_of_slot.shape[0], rows.shape[1])
    with Moving(group) as transport:
        finish = transport.start_sum(rows, table, kind, products_follow)

    def finished() -> Tensor:
        with Moving(group):
            return finish()

    return finished


def pulled(group: Group, tokens: Tensor, table: Table, kind: str, fill: bool) -> Tensor:
    """Pulls gradients [Q, H] of this rank's rows from those of all ranks' tokens, by the table of a dispatch.

    Args:
        fill: whether the tail must be zero; else it is arbitrary.
    """
    in_8_bits, hidden = group.settings.float8_gradients, tokens.shape[1]
    if trace.active():
        rows = tokens.new_empty(table.num_rows, float8_rows.width(hidden) if in_8_bits else hidden)
        group.mover.foresee(kind, rows)
        return tokens.new_empty(table.num_rows, hidden)
    with Moving(group) as transport:
        rows = transport.pull(float8_rows.packed(tokens) if in_8_bits else tokens, table, kind, fill)
    return float8_rows.arrived(rows, hidden).values() if in_8_bits else rows


def returned(group: Group, dscales: Tensor, table: Table, dtype: torch.dtype) -> Tensor:
    """Returns the gradients [T, k] of routing weights, from those of the scales [Q] of all ranks."""
    kind = "dispatch backward"
    if trace.active():
        group.mover.foresee(kind, dscales)
        return torch.empty_like(table.row_of_slot, dtype=dtype)
    with Moving(group) as transport:
        return transport.return_numbers(dscales, table, dtype, kind)


def check_lane(op: str, group: Group, lane: int) -> int:
    """Checks the lane of an op's group."""
    if not isinstance(group, Group):
        raise TypeError(f"{op}: group must be a fusible.ep.Group, got a {type(group).__name__}")
    lanes = group.settings.lanes
    if type(lane) is not int or not 0 <= lane < lanes:
        raise ValueError(f"{op}: lane must be one of the {lanes} lanes of the group, counted from 0, got {lane!r}")
    return lane


def check_rows_of(group: Group, x: TensorSpec, form: str) -> None:
    """Checks that tokens or rows have the group's columns and dtype."""
    check_floats(x)
    if len(x.shape) != 2:
        raise ArgumentError(f"x must be {form}, got shape {list(x.shape)}; flatten the leading dimensions")
    settings = group.settings
    if x.shape[1] != settings.hidden:
        raise ArgumentError(f"x must have {settings.hidden} columns, as the group, got shape {list(x.shape)}")
    if x.device.type not in group.devices:
        raise ArgumentError(
            f"x must be on {' or '.join(sorted(group.devices))}, which the process group supports, got {x.device}; "
            "move it there"
        )
    if group.device is not None and x.device != group.device:
        raise ArgumentError(f"x must be on {group.device}, as the group's memory, got {x.device}; move it there")
    if x.dtype != settings.dtype:
        raise ArgumentError(
            f"x must be of {settings.dtype}, as the group, got {x.dtype}; cast it, or make another group"
        )
