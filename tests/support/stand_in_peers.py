"""Stand-ins for other libraries where they cannot run: the same modules, names and arguments, computed by PyTorch.

Signatures are those of quack-kernels 0.6.5, sonic-moe 0.1.2.post1, DeepGEMM 2.6.1, ScatterMoE 0.3.0 and
TransformerEngine 2.20. The requirements of their kernels on shapes, strides and dtypes are asserted here.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

ALIGNMENT = 4  # of DeepGEMM's rows; 128 on a GPU, where problems are larger


def rows_of(starts: Tensor) -> Iterator[slice]:
    bounds = starts.tolist()
    yield from (slice(a, b) for a, b in itertools.pairwise(bounds))


def concat_dim(tensor: Tensor) -> int:
    """The dimension that QuACK's ``concat_layout`` is about: the one that is not contiguous."""
    return -2 if tensor.stride(-1) == 1 else -1


def interleave(tensor: Tensor) -> Tensor:
    dim, half = concat_dim(tensor), tensor.shape[concat_dim(tensor)] // 2
    order = torch.arange(2 * half).view(2, half).mT.reshape(-1)
    return tensor.index_select(dim, order)


@dataclass(frozen=True)
class GemmConfig:
    tile_m: int = 128
    tile_n: int = 192
    tile_k: int | None = None
    num_warps: int | None = None
    pingpong: bool = True
    is_dynamic_persistent: bool = True
    cluster_m: int = 2
    cluster_n: int = 1
    cluster_k: int = 1
    split_k: int = 1
    swap_ab: bool = False
    max_swizzle_size: int = 8
    device_capacity: int = 9
    use_tma_gather: bool = False


def quack_gemm(
    A: Tensor,
    B: Tensor,
    out: Tensor,
    C: Tensor | None = None,
    bias: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    A_idx: Tensor | None = None,
    batch_idx_permute: Tensor | None = None,
    add_to_output: bool = False,
    dynamic_scheduler: bool = False,
    config: GemmConfig | None = None,
    rounding_mode: int = 0,
    sr_seed: int = 0,
    concat_layout: tuple[str, ...] | None = None,
) -> tuple[GemmConfig | None, int, bool, object]:
    B = interleave(B) if concat_layout and "B" in concat_layout else B
    if cu_seqlens_m is not None:
        assert cu_seqlens_m.dtype == torch.int32
        for group, rows in enumerate(rows_of(cu_seqlens_m)):
            out[rows] = A[rows] @ B[group]
    else:
        assert cu_seqlens_k is not None
        assert cu_seqlens_k.dtype == torch.int32
        assert out.shape == (len(cu_seqlens_k) - 1, A.shape[0], B.shape[1])
        for group, rows in enumerate(rows_of(cu_seqlens_k)):
            product, target = A[:, rows] @ B[rows], out[group]
            if concat_layout and "out" in concat_layout:
                assert concat_dim(target) == -1
                product = torch.cat([product[:, ::2], product[:, 1::2]], 1)
            target.copy_(product)
    return config, 1, dynamic_scheduler, None


def quack_gated(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
    alpha: float = 1.0,
    preact_out: Tensor | None = None,
    postact_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    postact_dtype: torch.dtype | None = None,
    cu_seqlens_m: Tensor | None = None,
    A_idx: Tensor | None = None,
    store_preact: bool = True,
    dynamic_scheduler: bool = False,
    tuned: bool = True,
    config: GemmConfig | None = None,
    concat_layout: tuple[str, ...] | None = None,
    split_k: int | None = 1,
    split_k_mode: int = 0,
) -> tuple[Tensor | None, Tensor]:
    assert activation == "swiglu"
    assert preact_out is not None
    assert postact_out is not None
    quack_gemm(A, B, preact_out, cu_seqlens_m=cu_seqlens_m, concat_layout=concat_layout)
    postact_out.copy_(F.silu(preact_out[:, ::2]) * preact_out[:, 1::2])
    return preact_out, postact_out


def quack_dgated(
    A: Tensor,
    B: Tensor,
    PreAct: Tensor,
    activation: str | None = None,
    dx_out: Tensor | None = None,
    postact_out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    postact_dtype: torch.dtype | None = None,
    colvec_scale: Tensor | None = None,
    colvec_reduce: bool = False,
    cu_seqlens_m: Tensor | None = None,
    A_idx: Tensor | None = None,
    dynamic_scheduler: bool = True,
    tuned: bool = True,
    config: GemmConfig | None = None,
    split_k: int | None = 1,
    split_k_mode: int = 0,
) -> tuple[Tensor, ...]:
    assert activation == "swiglu"
    assert colvec_reduce
    assert colvec_scale is not None
    dhidden = A.new_empty(A.shape[0], B.shape[2])
    quack_gemm(A, B, dhidden, cu_seqlens_m=cu_seqlens_m)
    with torch.enable_grad():
        pre = PreAct.detach().requires_grad_()
        hidden = F.silu(pre[:, ::2]) * pre[:, 1::2]
        (dpre,) = torch.autograd.grad(hidden, pre, dhidden * colvec_scale.unsqueeze(-1).to(A.dtype))
    hidden = hidden.detach()
    return dpre, (hidden * colvec_scale.unsqueeze(-1)).to(A.dtype), (hidden * dhidden).sum(1).float()


class ActivationType(Enum):
    SWIGLU = "swiglu"


def sonicmoe_layer(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    E: int,
    stream_id: int,
    activation_type: ActivationType,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    assert activation_type is ActivationType.SWIGLU
    assert router_scores.dtype == torch.float32
    assert token_indices.dtype == expert_indices.dtype == torch.int32
    assert bool((token_indices.diff() >= 0).all())
    assert w1.shape[1:] == (x.shape[1], E)
    assert w1.permute(2, 0, 1).is_contiguous()
    assert w2.permute(2, 0, 1).is_contiguous()
    assert is_inference_mode_enabled != torch.is_grad_enabled()
    pre = torch.einsum("rh,rfh->rf", x[token_indices], w1.permute(2, 0, 1)[expert_indices])
    gate, up = pre.chunk(2, 1) if concat_layout else (pre[:, ::2], pre[:, 1::2])
    y = torch.einsum("rf,rhf->rh", F.silu(gate) * up, w2.permute(2, 0, 1)[expert_indices])
    output = torch.zeros_like(x).index_add(0, token_indices, (y * router_scores.unsqueeze(-1)).to(x.dtype))
    return output, torch.bincount(expert_indices, minlength=E)


def scattermoe_linear(
    inputs: Tensor,
    expert_weights: Tensor,
    k: int,
    sorted_expert_idxs: Tensor,
    sorted_scattered_idxs: Tensor,
    expert_offsets: Tensor,
    expert_biases: Tensor | None = None,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> Tensor:
    assert len(sorted_scattered_idxs) == len(sorted_expert_idxs) == len(inputs) * k
    assert torch.equal(expert_offsets, torch.bincount(sorted_expert_idxs, minlength=len(expert_weights)).cumsum(0))
    rows = inputs if grouped_in else inputs[sorted_scattered_idxs // k]
    y = torch.einsum("rk,rkn->rn", rows, expert_weights[sorted_expert_idxs])
    y = y if expert_biases is None else y + expert_biases[sorted_expert_idxs]
    if grouped_out:
        return y
    y = torch.zeros_like(y).index_copy(0, sorted_scattered_idxs, y)
    return y if gates is None else (gates.unsqueeze(1) @ y.view(*gates.shape, -1)).squeeze(1)


class LigerFusedMoEFunction:
    @staticmethod
    def apply(x: Tensor, w1: Tensor, w2: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        assert top_k_index.dtype == torch.int32
        pre = torch.einsum("th,tkfh->tkf", x, w1[top_k_index])
        gate, up = pre.chunk(2, -1)
        y = torch.einsum("tkf,tkhf->tkh", F.silu(gate) * up, w2[top_k_index])
        return (y * top_k_weights.unsqueeze(-1)).sum(1).to(x.dtype)


def flatten_sort_count(expert_idxs: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    ordered, slots = torch.sort(expert_idxs.flatten())
    return ordered, slots, torch.bincount(ordered, minlength=num_experts).cumsum(-1)


def blocks_of(grouped_layout: Tensor) -> Iterator[tuple[slice, int]]:
    """DeepGEMM looks up the group of a whole block of rows."""
    assert grouped_layout.dtype == torch.int32
    assert len(grouped_layout) % ALIGNMENT == 0
    for start in range(0, len(grouped_layout), ALIGNMENT):
        groups = grouped_layout[start : start + ALIGNMENT]
        assert set(groups.tolist()) <= {int(groups[0]), -1}
        yield slice(start, start + ALIGNMENT), int(groups[0])


def deepgemm_nt(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    assert a.stride(-1) == d.stride(-1) == 1
    for rows, group in blocks_of(grouped_layout):
        d[rows] = a[rows] @ b[group].mT


def deepgemm_nn(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    grouped_layout: Tensor,
    compiled_dims: str = "nk",
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
) -> None:
    deepgemm_nt(a, b.mT, d, grouped_layout)


def deepgemm_tn(
    a: Tensor,
    b: Tensor,
    d: Tensor,
    ks_cpu: list[int],
    grouped_layout: Tensor,
    c: Tensor | None = None,
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    assert a.is_contiguous()
    assert b.is_contiguous()
    assert c is d
    assert d.dtype == torch.float32
    assert grouped_layout.dtype == torch.int32
    assert grouped_layout.tolist() == ks_cpu
    assert all(k % ALIGNMENT == 0 for k in ks_cpu)
    for group, (left, right) in enumerate(zip(a.split(ks_cpu), b.split(ks_cpu), strict=True)):
        d[group] += left.mT @ right


def decoded_rows(operand: tuple[Tensor, Tensor]) -> Tensor:
    """Blocks of 128 bytes of a row have a scale each; the scales of a block of features lie one after the other."""
    data, scales = operand
    assert data.dtype == torch.float8_e4m3fn
    assert data.is_contiguous()
    assert scales.shape == (data.shape[0], -(-data.shape[1] // 128))
    assert scales.stride() == (1, data.shape[0])
    return data.float() * scales.repeat_interleave(128, 1)[:, : data.shape[1]]


def deepgemm_float8_nt(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    grouped_layout: Tensor,
    recipe: tuple[int, int, int] | None = None,
    recipe_a: tuple[int, int] | None = None,
    recipe_b: tuple[int, int] | None = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
    use_psum_layout: bool = False,
    ensure_zero_padding: bool = True,
    expected_m_for_psum_layout: int | None = None,
) -> None:
    weight, scales = b
    assert weight.is_contiguous()
    assert scales.is_contiguous()
    assert d.dtype == torch.bfloat16
    n, k = weight.shape[1:]
    wide = scales.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :k]
    deepgemm_nt(decoded_rows(a), weight.float() * wide, d, grouped_layout)


def deepgemm_float8_columns(
    a: tuple[Tensor, Tensor],
    b: tuple[Tensor, Tensor],
    d: Tensor,
    ks_cpu: list[int],
    grouped_layout: Tensor,
    c: Tensor | None = None,
    recipe: tuple[int, int, int] = (1, 1, 128),
    compiled_dims: str = "mn",
    use_psum_layout: bool = False,
) -> None:
    assert c is d
    assert d.dtype == torch.float32
    assert grouped_layout.dtype == torch.int32
    assert grouped_layout.tolist() == ks_cpu
    assert all(k % 128 == 0 for k in ks_cpu)
    left, right = (decoded_columns(operand, size, ks_cpu) for operand, size in ((a, d.shape[1]), (b, d.shape[2])))
    for group, (one, other) in enumerate(zip(left, right, strict=True)):
        d[group] += one @ other.mT


def decoded_columns(operand: tuple[Tensor, Tensor], features: int, ks_cpu: list[int]) -> Iterator[Tensor]:
    """The features of each group in rows of its tokens; all bytes are in one dimension, group after group."""
    data, scales = operand
    assert data.shape == (features * sum(ks_cpu),)
    assert scales.shape == (features, sum(ks_cpu) // 128)
    assert scales.stride() == (1, features)
    first = start = 0
    for k in ks_cpu:
        bytes_ = data[start : start + features * k].view(features, k)
        yield bytes_.float() * scales[:, first : first + k // 128].repeat_interleave(128, 1)
        first, start = first + k // 128, start + features * k


class TransformerEngineGroupedLinear(nn.Module):
    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        assert not bias
        self.num_groups = num_groups
        for i in range(num_groups):
            weight = torch.empty(out_features, in_features, device=device, dtype=dtype)
            self.register_parameter(f"weight{i}", nn.Parameter(weight))

    def forward(self, x: Tensor, split_sizes: Tensor) -> Tensor:
        parts = x.split(split_sizes.tolist())
        return torch.cat([part @ getattr(self, f"weight{i}").mT for i, part in enumerate(parts)])


class ScaledSwiGLU(nn.Module):
    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__()
        assert glu_interleave_size is None

    def forward(self, x: Tensor, scales: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up * scales.unsqueeze(-1).to(x.dtype)


class TransformerEngineSequential(nn.Module):
    """Each op takes one of the extra inputs, in order."""

    def __init__(self, *args: nn.Module) -> None:
        super().__init__()
        self.ops = nn.ModuleList(args)

    def forward(
        self, input: Tensor, *extra_inputs: Tensor, op_kwargs: dict[Any, dict[str, Any]] | None = None
    ) -> Tensor:
        for op, extra in zip(self.ops, extra_inputs, strict=True):
            input = op(input, extra)
        return input


def modules() -> dict[str, dict[str, Any]]:
    """The names of each module that the adapters import."""
    quack: dict[str, Any] = {"gemm_gated": quack_gated, "gemm_dgated": quack_dgated}
    ops = {"GroupedLinear": TransformerEngineGroupedLinear, "ScaledSwiGLU": ScaledSwiGLU}
    deepgemm: dict[str, Callable[..., Any]] = {
        "m_grouped_bf16_gemm_nt_contiguous": deepgemm_nt,
        "m_grouped_bf16_gemm_nn_contiguous": deepgemm_nn,
        "k_grouped_bf16_gemm_tn_contiguous": deepgemm_tn,
        "m_grouped_fp8_gemm_nt_contiguous": deepgemm_float8_nt,
        "k_grouped_fp8_gemm_nt_contiguous": deepgemm_float8_columns,
        "get_mk_alignment_for_contiguous_layout": lambda: ALIGNMENT,
    }
    return {
        "quack": {},
        "quack.gemm_config": {"GemmConfig": GemmConfig},
        "quack.gemm_interface": {**quack, "gemm_tuned": SimpleNamespace(fn=quack_gemm)},
        "sonicmoe": {},
        "sonicmoe.enums": {"ActivationType": ActivationType},
        "sonicmoe.functional": {"moe_general_routing_inputs": sonicmoe_layer},
        "deep_gemm": deepgemm,
        "scattermoe": {"parallel_linear": scattermoe_linear, "flatten_sort_count": flatten_sort_count},
        "liger_kernel": {},
        "liger_kernel.ops": {},
        "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": LigerFusedMoEFunction},
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.ops": {**ops, "Sequential": TransformerEngineSequential},
    }


def install(patch: pytest.MonkeyPatch) -> None:
    """Makes them importable for the time of a test."""
    for name, members in modules().items():
        module = ModuleType(name)
        vars(module).update(members)
        patch.setitem(sys.modules, name, module)
