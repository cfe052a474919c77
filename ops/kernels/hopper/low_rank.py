"""Our own CUDA kernel that computes all results of a low-rank adapter in one pass over rows."""

from __future__ import annotations

import torch

from ..extension import TYPE_CODES, address, compiled, hardware_refusal, stream
from ..problems.gemm import Layout, addresses
from ..problems.low_rank import LowRankPass
from .gemm import MAX_GROUPS, MAX_ROWS

NAME = "fusible (low rank)"
MAX_RANK = 64


def refusal(p: LowRankPass) -> str | None:
    """Why the kernel does not take the pass; None: it does."""
    x, sizes = p.x, p.split_sizes
    if (why := hardware_refusal(x)) is not None:
        return why
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16 rows, got {x.dtype}"
    if p.rank % 8 or not 8 <= p.rank <= MAX_RANK:
        return f"takes ranks that are multiples of 8, up to {MAX_RANK}, got {p.rank}"
    if not 1 <= sizes.shape[0] <= MAX_GROUPS or p.tokens > MAX_ROWS:
        return f"takes 1 to {MAX_GROUPS} groups and at most {MAX_ROWS} rows, got {sizes.shape[0]} and {p.tokens}"
    if sizes.dtype not in (torch.int32, torch.int64) or not sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    if p.slot_of_row is not None and p.slot_of_row.dtype != torch.int32:
        return f"gathers by int32 slots, got {p.slot_of_row.dtype}"
    return _dtype_refusal(p) or _alignment_refusal(p)


def _dtype_refusal(p: LowRankPass) -> str | None:
    for tensor in (p.factor, p.low):
        if tensor is not None and tensor.dtype != p.x.dtype:
            return f"needs operands of one dtype, got {p.x.dtype} and {tensor.dtype}"
    if p.low is not None and p.gradient_dtype not in (None, p.x.dtype, torch.float32):
        return f"gives gradients of {p.x.dtype} or float32, not {p.gradient_dtype}"
    return None


def _alignment_refusal(p: LowRankPass) -> str | None:
    """Factors are dense; the rows may have a pitch."""
    if p.x.shape[1] % 8 or p.x.stride(1) != 1 or p.x.stride(0) % 8:
        return f"needs dense rows of multiples of 8 features, got {p.x.shape[1]} with strides {list(p.x.stride())}"
    for tensor in (p.x, p.factor, p.low):
        if tensor is not None and (addresses(tensor)[0] % 16 or not (tensor is p.x or tensor.is_contiguous())):
            return f"needs dense operands aligned to 16 bytes, got strides {list(tensor.stride())}"
    return None


def run(p: LowRankPass) -> None:
    """Computes what ``p.out`` holds tensors for."""
    device, (rows, columns) = p.x.get_device(), (p.tokens, p.x.shape[1])
    size = compiled().low_rank_workspace(
        tokens=rows, columns=columns, rank=p.rank, gradient=p.out.gradient is not None, device=device
    )
    workspace = p.x.new_empty(size, dtype=torch.uint8)
    compiled().low_rank_pass(
        device=device,
        stream=stream(device),
        rows=p.x.data_ptr(),
        type=TYPE_CODES[p.x.dtype],
        tokens=rows,
        columns=columns,
        pitch=p.x.stride(0),
        groups=p.split_sizes.shape[0],
        sizes=p.split_sizes.data_ptr(),
        int64_sizes=p.split_sizes.dtype == torch.int64,
        rank=p.rank,
        by_columns=p.layout is Layout.NN,
        slot_of_row=address(p.slot_of_row),
        top_k=p.top_k,
        gathered=address(p.out.rows),
        factor=address(p.factor),
        product=address(p.out.product),
        low=address(p.low),
        gradient=address(p.out.gradient),
        gradient_type=TYPE_CODES[p.gradient_dtype or p.x.dtype],
        workspace=workspace.data_ptr(),
    )
