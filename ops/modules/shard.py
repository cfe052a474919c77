"""Modules whose weights FSDP2 gathers in 8 bits."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from ...fuser import ArgumentError
from ...fuser.contract.stored_values import stores_values
from ...fuser.contract.torch_private import dispatch_disabled
from ..formats.recipe import gives_blocks
from ..grouped.grouped_linear import GroupedLinear
from ..quantized.gathered_weights import MasterWeight
from ..quantized.linear import refusal


def gather_quantized(module: nn.Module) -> nn.Module:
    """Makes FSDP2 gather the weight of each :class:`GroupedLinear` in e4m3; changes the module in place and returns it.

    Call it before ``fully_shard``. Each rank quantises its experts and sends bytes and scales, about half as much as 16
    bits. Results and gradients are bit-identical to a gather in 16 bits. Parameters, their gradients and state dicts do
    not change.

    Raises:
        ArgumentError: a module without such linears; a linear whose recipe is not a ``Float8Block`` of its own; one
            parameter per expert; a weight that is stored transposed, is sharded, computed or quantised already, or
            whose gradient does not go through autograd. In the first call: shards that are not whole experts, as many
            on each rank; values of another dtype than bfloat16 or float16, after a cast by the policy.
    """
    linears = [each for each in module.modules() if isinstance(each, GroupedLinear)]
    if not linears:
        raise ArgumentError(f"gather_quantized: expected a module with a GroupedLinear, got a {type(module).__name__}")
    for linear in linears:
        if (why := _refusal(linear)) is not None:
            raise ArgumentError(f"gather_quantized: {why}")
    masters: dict[int, nn.Parameter] = {}  # those that linears share stay shared
    for linear in linears:
        weight = linear.one_parameter("weight")
        if not isinstance(weight, MasterWeight):
            master = nn.Parameter(MasterWeight(weight), requires_grad=weight.requires_grad)
            linear.register_parameter("weight", masters.setdefault(id(weight), master))
        linear.gathers_bytes = True
        linear.promises = replace(linear.promises, replayable=False)  # a replay cannot see into the parameter
    return module


def _refusal(linear: GroupedLinear) -> str | None:
    """The reason why the bytes of a linear's weight cannot be gathered, or None."""
    if dispatch_disabled is None:
        return "this torch does not have torch._C._DisableTorchDispatch; gather 16 bits"
    if linear.is_quantized:
        return "the weight has been quantised, so its bytes are gathered already; leave the call out"
    if linear.recipe is None or not gives_blocks(linear.recipe):
        return f"only blocks of whole experts are gathered; build the op with recipe=Float8Block(), not {linear.recipe}"
    if linear.per_group["weight"]:
        return "shards of one parameter an expert cut its blocks; build the op with single_grouped_weight=True"
    if linear.transposed_weight:
        return "the weight is stored transposed; build the op with transposed_weight=False"
    if linear.accumulate_into_main_grad or linear.delay_wgrad_compute:
        return "FSDP2 reduces gradients of autograd; build the op without main_grad and delay_wgrad_compute"
    weight = linear._parameters.get("weight")
    if weight is None:
        return "the weight is computed by a parametrization; remove that"
    if not stores_values(type(weight)) and not isinstance(weight, MasterWeight):
        return f"weight: expected a plain tensor, got a {type(weight).__name__}; call it before fully_shard"
    return refusal(linear, linear.recipe)
