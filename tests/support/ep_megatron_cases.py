"""Megatron-Core's MoE layer on several ranks: its dispatchers against ours; see ``ep_world``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from ep_world import World
from megatron_on_cpu import FFN, HIDDEN, OWNED, moe_layer, on_cpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

with on_cpu():
    from megatron.core.transformer.moe import moe_layer as their_module
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

    from fusible.integrations import megatron_dispatcher as integration
    from fusible.integrations import transformer_engine as te_ops
    from fusible.integrations.exchanges.shared_exchange import ExchangeOptions, exchange_ops

CASES: list[Callable[[World], None]] = []
LENGTHS = (5, 3)  # of a sequence, by rank


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    @wraps(function)
    def on_a_rank(world: World) -> None:
        with on_cpu():
            function(world)

    CASES.append(on_a_rank)
    return on_a_rank


class Step(NamedTuple):
    """The results of a training step."""

    y: Tensor
    dx: Tensor
    parameters: dict[str, Tensor]


def ours_on(world: World, options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Their layer with our dispatcher."""
    integration.install(their_module, **(options or {}))
    try:
        layer = moe_layer(world.size, "flex", **settings)
    finally:
        integration.uninstall(their_module)
    assert type(layer.token_dispatcher) is integration.FusibleFlexTokenDispatcher
    return layer


def trained(layer: Any, world: World, run: Callable[..., Any] | None = None) -> Step:
    generator = torch.Generator().manual_seed(7 + world.rank)
    x, dy = (torch.randn(LENGTHS[world.rank], 2, HIDDEN, generator=generator) for _ in range(2))
    dtype = next(layer.experts.parameters()).dtype
    x = x.to(dtype).requires_grad_()
    y, _ = (layer if run is None else run)(x)
    y.backward(dy.to(dtype))
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    assert x.grad is not None
    return Step(y.detach(), x.grad, gradients)


def near(came: Step, expected: Step, **tolerance: float) -> None:
    """Rows are the same; sums of them are in another order."""
    torch.testing.assert_close(came, expected, **tolerance)
    assert any(grad.any() for name, grad in came.parameters.items() if "experts" in name)


@case
def a_step_is_that_of_their_all_to_all_dispatcher(world: World) -> None:
    near(trained(ours_on(world), world), trained(moe_layer(world.size, "alltoall"), world))


@case
def a_step_is_as_exact_as_theirs_in_bfloat16(world: World) -> None:
    settings: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}
    ours, stock = (layer(**settings) for layer in (partial(ours_on, world), partial(moe_layer, world.size, "alltoall")))
    wide = moe_layer(world.size, "alltoall")
    wide.load_state_dict(stock.state_dict())
    exact = trained(wide, world)
    for a, b, c in zip(trained(ours, world)[:2], trained(stock, world)[:2], exact[:2], strict=True):
        error, theirs = ((t.float() - c).norm() / c.norm() for t in (a, b))
        assert error < 1.2 * theirs < 0.02


@case
def tokens_that_the_router_drops_are_of_no_expert(world: World) -> None:
    dropping = {"moe_expert_capacity_factor": 0.5}
    stock = trained(moe_layer(world.size, "alltoall", **dropping), world)
    whole = trained(moe_layer(world.size, "alltoall"), world)
    assert not torch.allclose(stock.y, whole.y)
    near(trained(ours_on(world, **dropping), world), stock)


@case
def all_layers_share_a_group(world: World) -> None:
    exchange_ops.cache_clear()
    first, second = (ours_on(world, seed=seed) for seed in (0, 1))
    for layer, seed in ((first, 0), (second, 1)):
        near(trained(layer, world), trained(moe_layer(world.size, "alltoall", seed), world))
    (group,) = {layer.token_dispatcher._comm_manager._ops.group for layer in (first, second)}
    assert group.statistics().exchanges == 2


@case
def checkpointing_exchanges_again(world: World) -> None:
    layer = ours_on(world)
    expected = trained(layer, world)
    layer.zero_grad()
    again = trained(layer, world, lambda x: checkpoint(layer, x, use_reentrant=False))
    torch.testing.assert_close(again, expected, rtol=0, atol=0)


# ----------------------------------------------------------------------------------- experts that count on the device


class OurExperts(nn.Module):
    """Called as ``TEGroupedMLP`` is, with the container that it builds, on the weights of their unfused experts."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        weights = [
            torch.stack([getattr(e, name).weight.detach() for e in theirs.local_experts])
            for name in ("linear_fc1", "linear_fc2")
        ]
        sizes = ((HIDDEN, 2 * FFN), (FFN, HIDDEN))
        self.linears = nn.ModuleList(
            te_ops.GroupedLinear(OWNED, *size, bias=False, dtype=w.dtype, single_grouped_weight=True)
            for size, w in zip(sizes, weights, strict=True)
        )
        for linear, weight in zip(self.linears, weights, strict=True):
            linear.weight = nn.Parameter(weight)
        self.container = (te_ops.Sequential(self.linears[0], te_ops.ScaledSwiGLU(), self.linears[1]),)
        self.buffers_given: list[Any] = []

    def forward(
        self, rows: Tensor, sizes: Tensor, probs: Tensor, output_buffer: Any = None, grad_input_buffer: Any = None
    ) -> tuple[Tensor, None]:
        self.buffers_given.append((output_buffer, grad_input_buffer))
        buffers: dict[int, dict[str, Tensor]] = {}
        if output_buffer is not None:
            buffers[2] = {te_ops.OUTPUT_BUFFER_KEY: output_buffer}
        if grad_input_buffer is not None:
            buffers[0] = {te_ops.GRAD_INPUT_BUFFER_KEY: grad_input_buffer}
        return self.container[0](rows, sizes, probs, sizes, op_kwargs=buffers), None

    def gradients(self) -> dict[str, Tensor]:
        """By the names of theirs."""
        return {
            f"experts.local_experts.{e}.{name}.weight": linear.weight.grad[e]
            for linear, name in zip(self.linears, ("linear_fc1", "linear_fc2"), strict=True)
            for e in range(OWNED)
        }


def trained_with_our_experts(world: World, options: dict[str, Any]) -> tuple[Step, Any]:
    """A step with our dispatcher and our experts, and the layer."""
    layer = ours_on(world, options)
    layer.experts = OurExperts(layer.experts)
    step = trained(layer, world)
    router = {name: grad for name, grad in step.parameters.items() if "experts" not in name}
    return step._replace(parameters={**router, **layer.experts.gradients()}), layer


@case
def rows_behind_the_last_expert_change_nothing(world: World) -> None:
    options = {"max_tokens": 2 * max(LENGTHS), "capacity": "worst"}
    came, layer = trained_with_our_experts(world, options)
    near(came, trained(moe_layer(world.size, "alltoall"), world))
    assert layer.experts.buffers_given == [(None, None)]
    assert layer.token_dispatcher._comm_manager._ops.group.local_capacity == 2 * max(LENGTHS) * 2 * world.size


# --------------------------------------------------------------------------------------------------- configurations


@case
def the_capacity_is_megatrons_where_it_has_one(world: World) -> None:
    capped = SimpleNamespace(moe_expert_rank_capacity_factor=2)
    assert integration._with_capacity(ExchangeOptions(), capped).capacity == 2.0
    assert integration._with_capacity(ExchangeOptions(capacity=7), capped).capacity == 7
    assert integration._with_capacity(ExchangeOptions(), SimpleNamespace()).capacity == "exact"


@case
def padding_of_experts_is_refused(world: World) -> None:
    for name in ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization"):
        config = SimpleNamespace(**{name: True})
        with pytest.raises(ValueError, match=f"fusible's flex dispatcher pads no expert's tokens: {name} must be off"):
            integration.FusibleFlexTokenDispatcher(OWNED, list(range(OWNED)), config)


@case
def uninstalled_layers_take_theirs(world: World) -> None:
    integration.install(their_module)
    integration.uninstall(their_module)
    assert their_module.MoEFlexTokenDispatcher is MoEFlexTokenDispatcher
