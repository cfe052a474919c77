"""The experts of a rank: EPDispatch -> the ops of a GroupedMLP -> EPCombine, from tokens to tokens.

If the transport has a buffer for rows, the second linear and the gradient of the first one's input are written there,
and neither is allocated for a call. Alternatively the second linear sends its rows to the ranks that sum them. The
backward moves that gradient while the weight gradients are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import Gradient, Grads, register_fusion
from ...fuser.contract import tracing as trace
from ...fuser.runtime.call import evaluate
from ..ep.combine import EPCombine
from ..ep.dispatch import EPDispatch, pulled, returned, start_sum
from ..quantized.linear import followed_by
from ..routed.call import RoutedCall
from .activation_role import spec_of
from .grouped_mlp import GroupedMLP, MLPCall
from .inner_mlp import InnerMLP, needs_of_experts, tokens_to_tokens

_WEIGHTS = frozenset({"fc1.weight", "fc2.weight"})


@register_fusion(
    tokens_to_tokens(EPDispatch, EPCombine, ("row_of_slot",))
    .where("dispatch and combine are of different groups", lambda m: m.dispatch.group is m.combine.group)
    .where("dispatch and combine use different lanes", lambda m: m.dispatch.lane == m.combine.lane)
    .where(
        "fc1 and fc2 do not have the experts of a rank",
        lambda m: bool(m.fc1.num_groups == m.fc2.num_groups == m.dispatch.group.num_local_experts),
    ),
    priority=40,
)
class EPGroupedMLP(InnerMLP):
    """Experts on several ranks, from dispatch to combine, as one op.

    It keeps the table of the exchange, and the state of :class:`GroupedMLP`.
    """

    dispatch: EPDispatch
    combine: EPCombine

    class Saved(NamedTuple):
        table: Any
        x_dtype: torch.dtype
        weights_dtype: torch.dtype
        mlp: GroupedMLP.Saved

    def run(self, call: RoutedCall) -> tuple[Tensor, Saved]:
        group, scaled_by = self.dispatch.group, self.scaled_by
        moved = self.dispatch.exchange(call, fill=False, beside=self._rows_may_come(), as_sent=True)
        table, rows, scales, arriving = moved
        buffer, slots = (
            (None, None) if trace.active() else (group.mover.row_buffer(table), group.mover.row_slots(table))
        )
        weights: dict[str, Any] = dict.fromkeys(scaled_by, scales)
        arguments = MLPCall(
            table.split_sizes,
            **weights,
            output=buffer,
            grad_input=buffer,
            needs_grad=needs_of_experts(call.needs_grad, scaled_by),
            autocast_dtype=call.autocast_dtype,
            x_is_inner=False,  # the tail of the buffer is not read
            arrived=None if arriving is None else arriving.counters,
            slots=slots,
        )
        mlp_rows, mlp = self.experts.run(rows, arguments)
        y = start_sum(group, mlp_rows if slots is None else None, table, "combine")()
        return y, self.Saved(table, call.x.dtype, call.top_k_weights.dtype, mlp)

    def _rows_may_come(self) -> bool:
        """Whether rows may come while the first product runs; a choice of the group's is followed if it waits."""
        group, in_bytes = self.dispatch.group, self.dispatch.recipe is not None
        if not group.mover.overlaps.dispatch or (group.settings.overlap_dispatch is not None and not in_bytes):
            return True
        why = self._not_waiting(group.settings.dtype)
        if why is not None:
            trace.note(f"rows come before the first product: {why}")
        return why is None

    def _not_waiting(self, dtype: torch.dtype) -> str | None:
        """The reason why the first product cannot start before all rows of this dtype are there, or None."""
        recipe, weight = followed_by(self.fc1), self.fc1.one_parameter("weight")
        if self.dispatch.recipe is not None:
            return "the scales of their bytes are put in order for it"
        if recipe is not None:
            return f"they are quantised for it, under {recipe}"
        if weight.dtype != dtype:
            return f"its weights are cast to {dtype} in between"
        if self.fc1.transposed_weight:
            return "products with transposed weights do not wait for rows"
        if spec_of(self.act).program is not None:
            return "only products with built-in activations wait for rows"
        return None

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        """Sends the gradients of rows first, and computes the weight gradients meanwhile."""
        group, table = self.dispatch.group, saved.table
        needs = needs_of_experts(needs_grad, self.scaled_by)
        rows = pulled(group, dy, table, "combine backward", fill=False)
        inner = dict(self.experts.bwd(saved.mlp, rows, needs_grad=needs))
        dscales = [inner.pop(keyword) for keyword in self.scaled_by if keyword in inner]
        grads: dict[str, Gradient] = {}
        dx = inner.pop("x", None)
        if "x" in needs_grad:
            drows = evaluate(dx)
            assert drows is not None
            finish = start_sum(group, drows, table, "dispatch backward", _has_products(inner, needs))
            grads["x"] = lambda: finish().to(saved.x_dtype)
        grads |= {name: evaluate(gradient) for name, gradient in inner.items() if name in needs}
        if "top_k_weights" in needs_grad:
            total = _sum_of(dscales, rows)
            grads["top_k_weights"] = lambda: returned(group, total, table, saved.weights_dtype)
        return grads


def _has_products(gradients: Grads, wanted: frozenset[str]) -> bool:
    """Whether gradients of weights are still to be computed: not where they are frozen, delayed or there already."""
    return any(callable(gradients.get(name)) for name in _WEIGHTS & wanted)


def _sum_of(gradients: Sequence[Gradient], rows: Tensor) -> Tensor:
    """The sum of the scales' gradients, for scales that are read in several places or in none."""
    parts = [gradient for gradient in map(evaluate, gradients) if gradient is not None]
    if not parts:
        return rows.new_zeros(rows.shape[0], dtype=torch.float32)
    return sum(parts[1:], parts[0])
