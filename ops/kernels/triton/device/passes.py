"""The kernels of passes over rows that know groups, and of sums that a product's epilogue leaves."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .call import call
from .plan import TilePlan, plan_of, row_range, row_tile


def column_sums(rows: Tensor, split_sizes: Tensor, out: Tensor, scale: Tensor | None) -> None:
    """``out[g]`` [E, N] = the sum of the rows of group g, each times its scale, in a fixed order."""
    groups, columns = out.shape
    call(
        column_sums_kernel,
        (groups, triton.cdiv(columns, 128)),
        rows,
        scale,
        split_sizes,
        out,
        rows.shape[0],
        groups,
        rows.stride(0),
        N=columns,
        GROUPS=triton.next_power_of_2(groups),
        num_warps=4,
    )


def row_dots(rows: Tensor, vectors: Tensor, split_sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = rows[t] · vectors[group of t]; 0 past the last group."""
    plan = plan_of(split_sizes, rows.shape[0], 16)
    call(row_dots_kernel, (plan.most,), rows, vectors, plan.tiles, out, rows.stride(0), N=rows.shape[1])
    zero_tail(out.unsqueeze(-1), split_sizes)


def zero_tail(out: Tensor, split_sizes: Tensor) -> None:
    """Zeros the rows past the last group. Most buffers have none, for which few programs look."""
    (rows, columns), groups = out.shape, split_sizes.shape[0]
    width, sizes = min(1024, triton.next_power_of_2(columns)), triton.next_power_of_2(groups)
    call(
        zero_tail_kernel,
        (min(triton.cdiv(rows, 16), 512),),
        out,
        split_sizes,
        rows,
        groups,
        out.stride(0),
        N=columns,
        GROUPS=sizes,
        TILE_N=width,
        num_warps=4,
    )


def sum_dots(dots: Tensor, split_sizes: Tensor, out: Tensor) -> None:
    """``out`` [T] = the sums of ``dots`` [T, parts]; 0 past the last group."""
    (rows, parts), groups = dots.shape, split_sizes.shape[0]
    call(
        sum_dots_kernel,
        (triton.cdiv(rows, 128),),
        dots,
        split_sizes,
        out,
        rows,
        groups,
        PARTS=parts,
        GROUPS=triton.next_power_of_2(groups),
        num_warps=4,
    )


def sum_tiles(sums: Tensor, plan: TilePlan, groups: int, of_groups: bool, number: int) -> Tensor:
    """[E, N]: sums of one of the numbers of ``sums`` [row tiles, numbers, N] over the tiles of each group, or all."""
    _, numbers, columns = sums.shape
    out = sums.new_empty((groups if of_groups else 1, columns))
    call(
        sum_tiles_kernel,
        (out.shape[0], triton.cdiv(columns, 128)),
        sums,
        plan.starts[1],
        out,
        groups,
        number,
        NUMBERS=numbers,
        N=columns,
        OF_GROUPS=of_groups,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["count", "groups"])
def column_sums_kernel(rows, scale, split_sizes, out, count, groups, pitch, N: tl.constexpr, GROUPS: tl.constexpr):
    group, n = tl.program_id(0), tl.program_id(1) * 128 + tl.arange(0, 128)
    start, end, _, _ = row_range(split_sizes, group, count, groups, GROUPS)
    sums = tl.zeros([32, 128], tl.float32)
    for row in range(start, end, 32):
        m = row + tl.arange(0, 32)
        inside = (m < end)[:, None] & (n < N)[None, :]
        x = tl.load(rows + m[:, None].to(tl.int64) * pitch + n[None, :], mask=inside, other=0.0).to(tl.float32)
        if scale is not None:
            x = x * tl.load(scale + m, mask=m < end, other=0.0).to(tl.float32)[:, None]
        sums += x
    tl.store(out + group.to(tl.int64) * N + n, tl.sum(sums, 0).to(out.dtype.element_ty), mask=n < N)


@triton.jit
def row_dots_kernel(rows, vectors, tiles, out, pitch, N: tl.constexpr):
    if tl.program_id(0) < tl.load(tiles):
        group, row, end = row_tile(tiles, tl.program_id(0))
        m = row + tl.arange(0, 16)
        dots = tl.zeros([16, 128], tl.float32)
        for start in range(0, N, 128):
            n = start + tl.arange(0, 128)
            inside = (m < end)[:, None] & (n < N)[None, :]
            x = tl.load(rows + m[:, None].to(tl.int64) * pitch + n[None, :], mask=inside, other=0.0).to(tl.float32)
            v = tl.load(vectors + group.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)
            dots += x * v[None, :]
        tl.store(out + m, tl.sum(dots, 1).to(out.dtype.element_ty), mask=m < end)


@triton.jit(do_not_specialize=["rows", "groups"])
def zero_tail_kernel(
    out, split_sizes, rows, groups, pitch, N: tl.constexpr, GROUPS: tl.constexpr, TILE_N: tl.constexpr
):
    _, end, _, _ = row_range(split_sizes, groups - 1, rows, groups, GROUPS)
    zeros = tl.zeros([16, TILE_N], out.dtype.element_ty)
    for first in range(end + tl.program_id(0) * 16, rows, tl.num_programs(0) * 16):
        m = first + tl.arange(0, 16)
        for column in range(0, N, TILE_N):
            n = column + tl.arange(0, TILE_N)
            is_tail = (m < rows)[:, None] & (n < N)[None, :]
            tl.store(out + m[:, None].to(tl.int64) * pitch + n[None, :], zeros, mask=is_tail)


@triton.jit(do_not_specialize=["rows", "groups"])
def sum_dots_kernel(dots, split_sizes, out, rows, groups, PARTS: tl.constexpr, GROUPS: tl.constexpr):
    _, end, _, _ = row_range(split_sizes, groups - 1, rows, groups, GROUPS)
    m = tl.program_id(0) * 128 + tl.arange(0, 128)
    total = tl.zeros([128], tl.float32)
    for i in range(0, PARTS):
        total += tl.load(dots + m.to(tl.int64) * PARTS + i, mask=m < end, other=0.0)
    tl.store(out + m, total.to(out.dtype.element_ty), mask=m < rows)


@triton.jit(do_not_specialize=["groups", "number"])
def sum_tiles_kernel(
    sums, first_tiles, out, groups, number, NUMBERS: tl.constexpr, N: tl.constexpr, OF_GROUPS: tl.constexpr
):
    group, n = tl.program_id(0), tl.program_id(1) * 128 + tl.arange(0, 128)
    start = tl.load(first_tiles + group)
    end = tl.load(first_tiles + (group + 1 if OF_GROUPS else groups))
    total = tl.zeros([128], tl.float32)
    sums += (start.to(tl.int64) * NUMBERS + number) * N + n
    for _ in range(start, end):
        total += tl.load(sums, mask=n < N, other=0.0)
        sums += NUMBERS * N
    tl.store(out + group.to(tl.int64) * N + n, total, mask=n < N)
