"""Tiny models of real classes, drawn at random, and their results, for the tests of the transformers integration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ROPE = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, F = K": ("Mixtral", {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3": (
        "Qwen3Moe",
        {
            "intermediate_size": 64,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "qwen3, 2F = K": (
        "Qwen3Moe",
        {"intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "gpt-oss": ("GptOss", {"intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss, F = K": ("GptOss", {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "nemotron-h": (
        "NemotronH",
        {
            "layers_block_type": ["attention", "moe"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
            "intermediate_size": 48,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            **ROPE,
        },
    ),
    "gemma-4": (
        "Gemma4",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "top_k_experts": 2,
            "enable_moe_block": True,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
            "sliding_window": 16,
        },
    ),
}


def make(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The tiny model of that name, with weights large enough for gates to saturate now and then."""
    import transformers

    family, sizes = MODELS[name]
    text = "Text" if family == "Gemma4" else ""
    config = getattr(transformers, f"{family}{text}Config")(**{**COMMON, **sizes})
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if ".experts." in parameter_name:
                parameter.normal_(std=0.5 if parameter.dim() == 3 else 1.0)
    return model


def experts_of(model: nn.Module) -> list[Any]:
    """The experts modules of a model."""
    return [module for module in model.modules() if hasattr(module, "is_transposed") and hasattr(module, "down_proj")]


def relative(a: Tensor, b: Tensor) -> float:
    """The difference of ``a`` from ``b``, relative to ``b`` (Frobenius norm)."""
    a, b = a.detach(), b.detach()
    return float((a - b).double().norm() / b.double().norm().clamp_min(1e-12))


def results(experts: Any, implementation: str, x: Tensor, index: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of everything."""
    experts.config._experts_implementation = implementation
    y = experts(x, index, weights)
    leaves = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=y.dtype)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}


def inputs(experts: Any, tokens: int, top_k: int = 2, hidden: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, indices without repetition in a token, and weights that do not sum to one."""
    generator = torch.Generator().manual_seed(4)
    dtype = experts.down_proj.dtype
    x = torch.randn(tokens, hidden, generator=generator, dtype=dtype).requires_grad_()
    index = torch.rand(tokens, experts.down_proj.shape[0], generator=generator).argsort(-1)[:, :top_k]
    return x, index, torch.rand(tokens, top_k, generator=generator, dtype=dtype).requires_grad_()


def assert_same(experts: Any, arguments: tuple[Tensor, Tensor, Tensor], tolerance: float = 1e-12) -> dict[str, Tensor]:
    """The results of eager, after a comparison with ours."""
    eager, ours = results(experts, "eager", *arguments), results(experts, "fusible", *arguments)
    assert {n for n, t in eager.items() if relative(ours[n], t) > tolerance} == set()
    assert all(ours[n].shape == t.shape and ours[n].dtype == t.dtype for n, t in eager.items())
    return eager
