"""Megatron-Core's MoE layer over memory that ranks share, where its experts write; see ``ep_world``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from ep_megatron_cases import LENGTHS, near, trained, trained_with_our_experts
from ep_world import World
from megatron_on_cpu import moe_layer, on_cpu

with on_cpu():
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

from fusible.ops.kernels.hopper import peers


def experts_write_where_other_ranks_read(world: World) -> None:
    """Where Megatron asks for such memory; the gradients of their input are copied there."""
    options: dict[str, Any] = {"max_tokens": 2 * max(LENGTHS), "capacity": "worst", "transport": world.transport}
    asks = hasattr(MoETokenDispatcher, "get_expert_zero_copy_buffers")
    with on_cpu(), patch.object(peers, "stage_rows", side_effect=peers.stage_rows) as copies:
        came, layer = trained_with_our_experts(world, options)
        near(came, trained(moe_layer(world.size, "alltoall"), world))
    ((output, grad_input),) = layer.experts.buffers_given
    assert copies.call_count == (1 if asks else 2)
    assert (output is not None) == asks
    assert grad_input is None


CASES: list[Callable[[World], None]] = [experts_write_where_other_ranks_read]
