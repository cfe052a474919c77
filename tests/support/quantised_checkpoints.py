"""Folders of tiny models of transformers' own classes, as publishers store them in 8 or 4 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusible import MXFP4, Float8Weight, Int4, NVFP4Weight

TOKENS = 128
WEIGHTS = {
    "int4": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32},
    "int4-zero": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 64},
    "nvfp4": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
    "mxfp4": {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
    "fp8-channel": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    "fp8-tensor": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"},
}
FORMATS = {
    **dict.fromkeys(("int4", "int4-zero"), "pack-quantized"),
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    **dict.fromkeys(("fp8-channel", "fp8-tensor"), "float-quantized"),
}


def gpt_oss(features: int = 96) -> Any:
    config = transformers.GptOssConfig(
        vocab_size=TOKENS,
        hidden_size=64,
        intermediate_size=features,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )
    return transformers.GptOssForCausalLM(config)


def qwen3(features: int = 128) -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=TOKENS,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=features,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def deepseek_v3() -> Any:
    config = transformers.DeepseekV3Config(
        vocab_size=TOKENS,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=32,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith("_proj.weight")


def _write(folder: Path, model: Any, state: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"quantization_config": quantization}
    config["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    return folder


def _published(folder: Path, model: Any) -> dict[str, Tensor]:
    """The weights as they are published: one tensor for each expert."""
    model.save_pretrained(folder / "plain")
    return load_file(folder / "plain" / "model.safetensors")


def mxfp4_of_gpt_oss(folder: Path) -> Path:
    torch.manual_seed(0)
    model, state = gpt_oss().bfloat16(), {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            e, k, n = tensor.shape
            parts = MXFP4().weight(tensor.mT)
            assert parts.scales is not None
            state[f"{name}_blocks"] = parts.data.view(e, n, k // 32, 16)
            state[f"{name}_scales"] = parts.scales.view(torch.uint8)
        else:
            state[name] = tensor
    return _write(folder, model, state, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def compressed(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model, state = qwen3().bfloat16(), {}
    for name, tensor in _published(folder, model).items():
        state |= _compressed(kind, name, tensor) if _is_expert(name) else {name: tensor}
    group = {"targets": ["re:.*mlp.experts.*"], "weights": WEIGHTS[kind]}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": FORMATS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return _write(folder, model, state, quantization)


def _compressed(kind: str, name: str, weight: Tensor) -> dict[str, Tensor]:
    one = weight.unsqueeze(0)
    if kind.startswith("int4"):
        parts = Int4(WEIGHTS[kind]["group_size"], not WEIGHTS[kind]["symmetric"]).weight(one)
        named = {"_packed": parts.data.view(torch.int32), "_scale": parts.scales, "_zero_point": parts.amax}
        named["_shape"] = torch.tensor([weight.shape])
    elif kind == "nvfp4":
        parts = NVFP4Weight(divides=True).weight(one)
        named = {"_packed": parts.data, "_scale": parts.scales, "_global_scale": parts.amax}
    elif kind == "mxfp4":
        parts = MXFP4().weight(one)
        named = {"_packed": parts.data, "_scale": parts.scales.view(torch.uint8)}  # type: ignore[union-attr]
    else:
        by_row = kind == "fp8-channel"
        parts = Float8Weight("rows" if by_row else "tensor").weight(one)
        named = {"": parts.data, "_scale": parts.scales.unsqueeze(-1).bfloat16() if by_row else parts.scales}  # type: ignore[union-attr]
    return {f"{name}{suffix}": part[0] for suffix, part in named.items() if part is not None}


def modelopt(folder: Path) -> Path:
    """Experts and attention in NVFP4."""
    torch.manual_seed(0)
    model, state = qwen3().bfloat16(), {}
    for name, tensor in _published(folder, model).items():
        if not _is_expert(name) and not name.endswith("q_proj.weight"):
            state[name] = tensor
            continue
        parts = NVFP4Weight().weight(tensor.unsqueeze(0))
        assert parts.scales is not None
        assert parts.amax is not None
        state |= {name: parts.data[0], f"{name}_scale": parts.scales[0], f"{name}_scale_2": parts.amax.view(())}
    return _write(folder, model, state, {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]})


def bitsandbytes_experts(folder: Path, nested: bool, dtype: torch.dtype = torch.float32) -> Path:
    """All linears in NF4, with experts and routers as transformers 4 had them: a ``Linear4bit`` each.

    Tensors besides these have the dtype, and are loaded in it.
    """
    torch.manual_seed(0)
    nf4_of_qwen3().to(dtype).save_pretrained(folder / "plain")
    options = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "plain", quantization_config=options, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    state = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        was_linear = _is_expert(name) or name.endswith("mlp.gate.weight")
        state |= _linear4bit(name, tensor, nested) if was_linear else {name: tensor}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def nf4_of_qwen3() -> Any:
    """Experts whose scales do not fill the last block of double quantisation."""
    return qwen3(192)


def _linear4bit(name: str, weight: Tensor, nested: bool) -> dict[str, Tensor]:
    from bitsandbytes.nn import Linear4bit, Params4bit

    linear = Linear4bit(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = Params4bit(weight, compress_statistics=nested, quant_type="nf4")
    return {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in linear.to("cpu").state_dict().items()}


def plain(folder: Path) -> Path:
    torch.manual_seed(0)
    qwen3().bfloat16().save_pretrained(folder)
    return folder


def float8(folder: Path, model: Any, scales: torch.dtype = torch.float32) -> Path:
    """DeepSeek's blocks of 128 x 128, in all linears but the last; Qwen3 has scales in bfloat16."""
    state = {}
    for name, tensor in _published(folder, model).items():
        if "_proj" in name and name.endswith(".weight"):
            parts = Float8Weight().weight(tensor.unsqueeze(0))
            assert parts.scales is not None
            state |= {name: parts.data[0], f"{name}_scale_inv": parts.scales[0].to(scales)}
        else:
            state[name] = tensor
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return _write(folder, model, state, blocks)
