"""Megatron-Core's MoE layer on processes without a GPU: what stands in for the device that its code asks for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from absent import triton_if_missing
from torch import Tensor, nn

with triton_if_missing(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

HIDDEN, FFN, OWNED, TOP_K = 16, 32, 3, 2


class _Stream:
    """A stream, or an event, of a device that does everything at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record(self, *streams: Any) -> None:
        pass

    def wait(self, *streams: Any) -> None:
        pass

    def record_event(self) -> _Stream:
        return self

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *args: Any) -> None:
        pass


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's copy to the host, for tensors on a GPU."""
    return tensor.numpy() if as_numpy and isinstance(tensor, Tensor) else tensor


@contextmanager
def on_cpu() -> Iterator[None]:
    with (
        patch("torch.cuda.current_device", lambda: "cpu"),
        patch("torch.cuda.current_stream", _Stream),
        patch("torch.cuda.stream", _Stream),
        patch("torch.cuda.Stream", _Stream),
        patch("torch.cuda.Event", _Stream),
        patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_the_host),
        patch.object(moe_utils, "te_general_gemm", None, create=True),  # missing in 0.16 without TransformerEngine
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@cache
def _parallel(ranks: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=ranks)


def moe_layer(ranks: int, dispatcher: str, seed: int = 0, use_te: bool = False, **settings: Any) -> Any:
    """Their layer of ``OWNED`` experts a rank; with those of TransformerEngine, or else one after the other."""
    _parallel(ranks)
    common: dict[str, Any] = {"num_layers": 1, "num_attention_heads": 4, "hidden_size": HIDDEN}
    common |= {"ffn_hidden_size": FFN, "moe_ffn_hidden_size": FFN, "gated_linear_unit": True}
    common |= {"activation_func": nn.functional.silu, "add_bias_linear": False, "bias_activation_fusion": False}
    common |= {"num_moe_experts": OWNED * ranks, "expert_model_parallel_size": ranks, "moe_router_topk": TOP_K}
    common |= {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "use_cpu_initialization": True}
    config = TransformerConfig(**{**common, "moe_token_dispatcher_type": dispatcher, **settings})
    spec = get_moe_module_spec(use_te=use_te, num_experts=OWNED * ranks, moe_grouped_gemm=use_te)
    layer = spec(config) if callable(spec) else spec.module(config, spec.submodules)
    draw(layer, seed)
    return layer


def draw(layer: nn.Module, seed: int) -> None:
    """The same router on all ranks, experts of each rank's own."""
    for name, parameter in layer.named_parameters():
        own = torch.distributed.get_rank() if "experts" in name else -1
        generator = torch.Generator().manual_seed(100 * seed + own + 1)
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
