"""The routed experts of a layer in code that is being compiled.

Everything is read off the module by value, and no container is built or asked, so that nothing in the code belongs to
one layer: layers of one structure share it, compiled one by one or all at once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..fuser.config import thread_config, use_config
from ..fuser.dynamo.frontend import active_flags, constant_value
from ..fuser.overrides import is_hooked
from ..ops import grouped_gemm
from ..ops.activation_spec import ActivationSpec
from ..ops.checks import product_dtype
from ..ops.kernels.custom_ops import config
from ..ops.routed_mlp import Experts
from . import routed
from .experts import CONSTANTS, Parameters
from .gates import spec_of
from .routed_layer import DEFAULT
from .routing import combine, dispatch, route


def experts_forward(
    experts: Any, parameters: Parameters, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """The experts implementation where a compiler traces; see the one of :mod:`transformers`."""
    dtype, kind = parameters.up.dtype, x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = product_dtype(x.dtype, torch.get_autocast_dtype(kind))
    parameters = parameters._replace(up=parameters.up.to(dtype), down=parameters.down.to(dtype))
    obeyed, arguments = _obeyed(), (x.to(dtype), top_k_index, top_k_weights)
    spec = None if obeyed is None else _spec(experts)
    if spec is None:
        return _in_steps(experts, *arguments, parameters).to(x.dtype)
    y: Tensor = _in_graph(obeyed, spec, experts.is_transposed, *arguments, *parameters)
    return y.to(x.dtype)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(obeyed: str, spec: tuple[Any, ...], transposed: bool, *tensors: Any) -> Tensor:
    """What Dynamo puts into its graph: AOTAutograd traces through it, down to the custom ops of the doors."""
    x, index, weights, up, down, up_bias, down_bias = tensors
    experts = Experts(up, down, up_bias, down_bias, ActivationSpec(*spec), transposed)
    with use_config(config(obeyed)):
        return routed.run(experts, x, index, weights)


def _obeyed() -> str | None:
    """The switches in force that kernels obey; None: the experts shall not run as one."""
    if thread_config.config is DEFAULT:  # one guard
        return "auto"
    flags = dict(active_flags())
    if "GroupedMLP" in flags["disable_fusions"]:
        return None
    return f"{flags['backend']} strict" if flags["strict"] else str(flags["backend"])


def _spec(experts: Any) -> tuple[Any, ...] | None:
    """What is between the linears, as plain values; None if that, or what is behind them, is the model's own code."""
    attributes = experts.__dict__  # to guard on what is not in it is cheap, on a missing attribute it is not
    if attributes.get("has_post_expert_norm") or "_apply_gate" in attributes:
        return None
    held = [(name, constant_value(attributes.get(name))) for name in CONSTANTS]
    act, approximate = attributes["_modules"].get("act_fn"), None
    if act is None:
        act = attributes.get("act_fn")
    elif is_hooked(act):
        return None
    else:
        approximate, act = act.__dict__.get("approximate"), type(act)
    kind = type(experts)
    return spec_of(kind, getattr(kind, "_apply_gate", None), attributes["has_gate"], tuple(held), act, approximate)


def _in_steps(experts: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, parameters: Parameters) -> Tensor:
    """With the model's own code between and behind the linears."""
    up, down, up_bias, down_bias = parameters
    if experts.is_transposed:
        up, down = up.mT, down.mT
    routing = route(top_k_index, up.shape[0], x.dtype)
    rows, scales = dispatch(x, top_k_weights, routing)
    pre = grouped_gemm(rows, up, routing.split_sizes, bias=up_bias)
    hidden = experts._apply_gate(pre) if experts.has_gate else experts.act_fn(pre)
    y: Any = grouped_gemm(hidden, down, routing.split_sizes, bias=down_bias)
    if experts.__dict__.get("has_post_expert_norm"):
        y = experts.post_expert_norm(y)
    return combine((y * scales.unsqueeze(-1)).to(y.dtype), routing)
