"""DeepGEMM: grouped GEMMs of rows that are padded, so that every group starts at a multiple of 128."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.ops.formats.copies import BLOCK, BlockedColumns
from fusible.ops.kernels.problems.quantized import ScaledGemm, ScaledWgrad

from ..contestant import Contestant, leaf, swiglu
from ..problem import Problem
from .peer import Peer
from .routed import SortedRows, routed


class Padding(NamedTuple):
    """The positions of the rows among the padding."""

    padded_index: Tensor  # int64 [T]
    group_of_padded_row: Tensor  # int32 [padded rows], -1 for padding
    sizes: list[int]  # with padding: the gradients of the weights need them on the host
    device_sizes: Tensor  # the same, int32


def padding_of(split_sizes: Tensor, alignment: int) -> Padding:
    """Computes the padding. Waits for the device, as the library does for weight gradients on Hopper."""
    sizes, device = split_sizes.tolist(), split_sizes.device
    padded = [-(-size // alignment) * alignment for size in sizes]
    groups = torch.full((sum(padded),), -1, dtype=torch.int32)
    start, indices = 0, []
    for group, (size, wide) in enumerate(zip(sizes, padded, strict=True)):
        groups[start : start + size] = group
        indices.append(torch.arange(start, start + size))
        start += wide
    sizes_there = torch.tensor(padded, dtype=torch.int32, device=device)
    return Padding(torch.cat(indices).to(device), groups.to(device), padded, sizes_there)


class _Pad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return _padded(x, padding)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.index_select(0, ctx.padding.padded_index), None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.padded_index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _padded(dy, ctx.padding), None


def _padded(x: Tensor, padding: Padding) -> Tensor:
    rows = (len(padding.group_of_padded_row), *x.shape[1:])
    return x.new_zeros(rows).index_copy_(0, padding.padded_index, x)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        ctx.save_for_backward(x, weight)
        y = x.new_empty(x.shape[0], weight.shape[1])
        _library().m_grouped_bf16_gemm_nt_contiguous(x, weight, y, padding.group_of_padded_row)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        padding, dy, dx = ctx.padding, dy.contiguous(), torch.empty_like(x)
        _library().m_grouped_bf16_gemm_nn_contiguous(dy, weight, dx, padding.group_of_padded_row)
        # The library adds to float32: it is made for the main gradients of a training.
        dweight = torch.zeros_like(weight, dtype=torch.float32)
        _library().k_grouped_bf16_gemm_tn_contiguous(
            dy, x, dweight, ks_cpu=padding.sizes, grouped_layout=padding.device_sizes, c=dweight
        )
        return dx, dweight.to(weight.dtype), None


def _library() -> Any:
    return import_module("deep_gemm")


def experts(rows: SortedRows, w1: Tensor, w2: Tensor, padding: Padding | None = None) -> Tensor:
    """Pads the rows, computes, and removes the padding; the activation is PyTorch's, op by op."""
    if padding is None:
        padding = padding_of(rows.split_sizes, _library().get_mk_alignment_for_contiguous_layout())
    x: Tensor = _Pad.apply(rows.x, padding)  # type: ignore[no-untyped-call]
    scales: Tensor = _Pad.apply(rows.scales, padding)  # type: ignore[no-untyped-call]
    linear = _GroupedLinear.apply
    hidden = swiglu(linear(x, w1, padding), scales)  # type: ignore[no-untyped-call]
    y: Tensor = _Unpad.apply(linear(hidden, w2, padding), padding)  # type: ignore[no-untyped-call]
    return y


def contestant(problem: Problem) -> Contestant:
    """DeepGEMM as a contestant. Padding is timed; the positions are known beforehand, as the loop knows the sizes."""
    padding = padding_of(problem.split_sizes, _library().get_mk_alignment_for_contiguous_layout())
    x, scales, w1, w2 = map(leaf, (problem.x, problem.scales, problem.w1, problem.w2))
    rows = SortedRows(x, scales, problem.split_sizes)
    return Contestant(partial(experts, rows, w1, w2, padding), (x, scales, w1, w2), problem.dy)


@dataclass(frozen=True)
class Float8Product:
    """A product of e4m3 operands. Only the library's call is timed, on operands in its own layout.

    Attributes:
        launch: returns the result in the library's layout.
        result: launches it and returns the result in the common layout.
    """

    launch: Callable[[], Tensor]
    result: Callable[[], Tensor]

    def __call__(self) -> Tensor:
        return self.launch()


def float8_product(p: ScaledGemm) -> Float8Product:
    """A product of rows and weights with block scales. Every group is padded beforehand to a multiple of 128 rows."""
    library = _library()
    padding = padding_of(p.split_sizes, library.get_mk_alignment_for_contiguous_layout())
    data = _padded(p.a.data.view(torch.uint8), padding).view(p.a.data.dtype)
    scales = p.a.scales.new_zeros(len(p.a.scales), len(data))
    scales.index_copy_(1, padding.padded_index, p.a.scales[:, : p.rows])
    y = p.out.new_empty(len(data), p.out.shape[1])

    def launch() -> Tensor:
        library.m_grouped_fp8_gemm_nt_contiguous(
            (data, scales.mT), (p.weight, p.weight_scales), y, padding.group_of_padded_row
        )
        return y

    return Float8Product(launch, lambda: launch().index_select(0, padding.padded_index))


def float8_wgrad(p: ScaledWgrad) -> Float8Product:
    """A weight gradient on blocks of tokens, group after group. The library only accumulates into float32."""
    library = _library()
    padding = padding_of(p.split_sizes, BLOCK)
    a, b = _columns(p.a, padding), _columns(p.b, padding)
    sums = torch.zeros(p.groups, *p.mnk[:2], device=p.split_sizes.device)

    def launch() -> Tensor:
        library.k_grouped_fp8_gemm_nt_contiguous(
            a, b, sums, ks_cpu=padding.sizes, grouped_layout=padding.device_sizes, c=sums
        )
        return sums

    def result() -> Tensor:
        sums.zero_()
        return launch().clone()

    return Float8Product(launch, result)


def _columns(columns: BlockedColumns, padding: Padding) -> tuple[Tensor, Tensor]:
    """Each group's features as rows of its tokens, concatenated in one dimension, and their scales."""
    blocks = [size // BLOCK for size in padding.sizes]
    used = sum(blocks)
    groups = torch.split(columns.data[:used].view(torch.uint8), blocks)
    data = torch.cat([group.transpose(0, 1).flatten() for group in groups])
    return data.view(columns.data.dtype), columns.scales[:used].mT


PEER = Peer(
    "deepgemm",
    "deep_gemm",
    "Hopper or Blackwell, bfloat16, built from its sources with nvcc and CUTLASS",
    contestant,
    routed(experts),
)
