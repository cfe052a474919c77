"""Slices of published language models: transformers' own classes with random weights and fewer layers."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import nn


class Slice(NamedTuple):
    """The configuration of a published model, and how many of its layers train on one GPU.

    Attributes:
        layers: on a GPU of :data:`LARGE` bytes (one H200) with 8192 tokens a step, without activation checkpointing.
        fewer: on a GPU of 80 GB.
        attention: the attention implementation of training on CUDA; None for transformers' choice. Generation has that
        always: flex_attention compiles anew for each shape of a decode, and after eight times runs without a kernel.
    """

    config: str
    layers: int
    fewer: int
    sizes: dict[str, Any]
    attention: str | None = None


LARGE = 120 * 10**9
SLICES = {
    "qwen3": Slice(
        "Qwen3MoeConfig",
        8,
        4,
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "intermediate_size": 6144,
            "vocab_size": 151936,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss-20b": Slice(
        "GptOssConfig",
        6,
        2,
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "vocab_size": 201088,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
        },
        attention="flex_attention",  # its sinks have no kernel in scaled_dot_product_attention
    ),
    "mixtral": Slice(
        "MixtralConfig",
        4,
        2,
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "deepseek-v3-ep8": Slice(  # a rank of 8: an eighth of the experts, with as many rows
        "DeepseekV3Config",
        3,
        1,
        {
            "hidden_size": 7168,
            "moe_intermediate_size": 2048,
            "intermediate_size": 18432,
            "vocab_size": 129280,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "n_routed_experts": 32,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
        },
    ),
}


def layers_here(preset: str, device: str) -> int:
    """The layers that train on a GPU of the memory that is here; on a CPU, those of a large GPU."""
    is_small = device == "cuda" and torch.cuda.get_device_properties(0).total_memory < LARGE
    return SLICES[preset].fewer if is_small else SLICES[preset].layers


_WIDTHS = ("_size", "_lora_rank")


def config_of(preset: str, layers: int, shrink: int, positions: int) -> Any:
    """The configuration of a slice; ``shrink`` divides widths down to 16, heads to 1, and experts to top-k."""
    kind, sizes = SLICES[preset].config, SLICES[preset].sizes
    top_k = sizes["num_experts_per_tok"]
    small = {name: _shrunk(name, size, shrink, top_k) for name, size in sizes.items()}
    options = {"num_hidden_layers": layers, "max_position_embeddings": positions, "pad_token_id": None}
    return getattr(import_module("transformers"), kind)(**small, **options)


def _shrunk(name: str, size: Any, shrink: int, top_k: int) -> Any:
    if name.endswith("_heads"):
        return max(1, size // shrink)
    if name.endswith("_experts"):
        return max(top_k, size // shrink)
    return max(16, size // shrink & -16) if name.endswith(_WIDTHS) else size


def model_of(
    config: Any, implementation: str, dtype: torch.dtype, device: torch.device, attention: str | None = None
) -> Any:
    """A model for causal language modelling with random weights, drawn from torch's generator."""
    options = {"dtype": dtype, "experts_implementation": implementation, "attn_implementation": attention}
    with device:
        return import_module("transformers").AutoModelForCausalLM.from_config(config, **options)


class Work(NamedTuple):
    """The arithmetic of a token.

    Attributes:
        parameters: all of them.
        dense: those that every token meets in a product, so without the embedding and the experts.
        experts: the parameters of all experts.
        chosen: the part of the experts that a token meets, top_k / experts.
        attention: operations of the scores and the weighted sums, forward and backward, causal.
    """

    parameters: int
    dense: int
    experts: int
    chosen: float
    attention: int

    @property
    def active(self) -> int:
        """The parameters that a token meets in a product."""
        return round(self.dense + self.experts * self.chosen)

    @property
    def flops(self) -> int:
        """Operations a token: 6 x active + attention."""
        return 6 * self.active + self.attention

    def read(self, tokens: int) -> float:
        """The parameters that a step of so many tokens reads, if experts are equally likely."""
        return self.dense + self.experts * (1 - (1 - self.chosen) ** tokens)


FORMULA = (
    "FLOP a token = 6 x active parameters + 6 x layers x heads x (width of a key + width of a value) x span; active: "
    "without the embedding, top-k experts of a layer; span: half of the sequence, at most the window; what is "
    "recomputed does not count"
)


def work_of(preset: str, layers: int, shrink: int, sequence: int) -> Work:
    """The arithmetic of a slice, from a model without memory."""
    config = config_of(preset, layers, shrink, sequence)
    model = model_of(config, "eager", torch.bfloat16, torch.device("meta"))
    experts, total = sum(map(size_of, experts_of(model))), size_of(model)
    dense = total - size_of(model.get_input_embeddings()) - experts
    chosen = config.num_experts_per_tok / number_of_experts(model)
    return Work(total, dense, experts, chosen, 6 * widths_of(config) * sum(spans(config, sequence)))


def experts_of(model: nn.Module) -> list[nn.Module]:
    """The experts modules of a model."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


def number_of_experts(model: nn.Module) -> int:
    """The number of experts of the first layer."""
    return int(next(experts_of(model)[0].parameters()).shape[0])


def size_of(module: nn.Module) -> int:
    """The number of its parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def widths_of(config: Any) -> int:
    """Heads times the widths of key and value."""
    key = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    key = key or config.hidden_size // config.num_attention_heads
    return int(config.num_attention_heads * (key + (getattr(config, "v_head_dim", None) or key)))


def spans(config: Any, sequence: int) -> list[int]:
    """The mean number of keys that a query of each layer sees."""
    window = getattr(config, "sliding_window", None) or sequence
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [min(sequence // 2, window) if kind == "sliding_attention" else sequence // 2 for kind in kinds]
