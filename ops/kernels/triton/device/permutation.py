"""The kernels that sort slots by expert, and move rows between tokens and experts. Each element has one writer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problems.routing import SlotOrder
from .call import call

_BLOCK, _PART, _BINS = 512, 64, 32  # slots that are counted together, slots and experts of a comparison
ELEMENTS = tl.constexpr(4096)  # of a tile of rows


def route(ids: Tensor, experts: int, weights: Tensor | None) -> SlotOrder:
    """Sorts ids [T, k] by expert, stably: a counting sort by blocks of slots, whose counts are whole numbers."""
    ids, slots = ids.contiguous(), ids.numel()
    blocks = triton.cdiv(slots, _BLOCK)
    sizes = ids.new_empty(experts + 1, dtype=torch.int32)
    call(zero_kernel, (triton.cdiv(experts + 1, 1024),), sizes, experts + 1, BLOCK=1024, num_warps=4)
    counts, slot_of_row, row_of_slot = (sizes.new_empty(s) for s in ((experts + 1, blocks), (slots,), ids.shape))
    scales = None if weights is None else sizes.new_empty(slots, dtype=torch.float32)
    shape, parts = (slots, experts, blocks), {"BLOCK": _BLOCK, "PART": _PART, "num_warps": 4}
    call(count_kernel, (blocks, triton.cdiv(experts + 1, _BINS)), ids, sizes, counts, *shape, BINS=_BINS, **parts)
    groups = triton.next_power_of_2(experts)
    call(starts_kernel, (experts + 1,), sizes, counts, experts, blocks, GROUPS=groups, CHUNK=1024, num_warps=4)
    weights = None if weights is None else weights.contiguous()
    outputs = slot_of_row, row_of_slot, scales
    call(order_kernel, (triton.cdiv(slots, _PART),), ids, counts, weights, outputs, *shape, **parts)
    return SlotOrder(sizes, *outputs)


def permute(x: Tensor, row_of_slot: Tensor, sizes: Tensor, out: Tensor, fill: bool) -> None:
    """``out[row_of_slot[t, j]] = x[t]``; rows of no expert become zero with ``fill``."""
    _move(spread_kernel, x, row_of_slot, sizes, out, FILL=fill)


def unpermute(rows: Tensor, row_of_slot: Tensor, sizes: Tensor, out: Tensor) -> None:
    """``out[t]`` = the sum over j of ``rows[row_of_slot[t, j]]``, of those that an expert has."""
    _move(sum_kernel, rows, row_of_slot, sizes, out)


def of_slots(numbers: Tensor, row_of_slot: Tensor, sizes: Tensor, out: Tensor) -> None:
    """``out[t, j] = numbers[row_of_slot[t, j]]``, 0 for slots of no expert."""
    slots = row_of_slot.numel()
    rows = row_of_slot, sizes[-1:]
    call(gather_kernel, (triton.cdiv(slots, 1024),), numbers, rows, out, slots, BLOCK=1024, num_warps=4)


def _move(kernel: object, source: Tensor, row_of_slot: Tensor, sizes: Tensor, out: Tensor, **flags: bool) -> None:
    (tokens, slots), columns = row_of_slot.shape, out.shape[1]
    width = min(1024, triton.next_power_of_2(max(1, columns)))
    grid = triton.cdiv(tokens, ELEMENTS.value // width), triton.cdiv(columns, width)
    pitches, form = (source.stride(0), out.stride(0)), {"SLOTS": slots, "N": columns, "TILE_N": width}
    call(kernel, grid, source, (row_of_slot, sizes[-1:]), out, tokens, pitches, num_warps=4, **form, **flags)


@triton.jit(do_not_specialize=["count"])
def zero_kernel(out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.zeros([BLOCK], out.dtype.element_ty), mask=at < count)


@triton.jit
def bins_of(ids, slot, slots, experts):
    """The expert of each slot; the last one of all for slots of none, and none where there is no slot."""
    id = tl.load(ids + slot, mask=slot < slots, other=-1)
    return tl.where(slot < slots, tl.where((id >= 0) & (id < experts), id, experts).to(tl.int32), -1)


@triton.jit(do_not_specialize=["slots", "experts", "blocks"])
def count_kernel(
    ids, sizes, counts, slots, experts, blocks, BLOCK: tl.constexpr, PART: tl.constexpr, BINS: tl.constexpr
):
    """``counts`` [E + 1, blocks] and ``sizes`` [E]: slots of each expert. Additions of integers have no order."""
    block, bins = tl.program_id(0), tl.program_id(1) * BINS + tl.arange(0, BINS)
    count = tl.zeros([BINS], tl.int32)
    for part in range(0, BLOCK, PART):
        mine = bins_of(ids, block * BLOCK + part + tl.arange(0, PART), slots, experts)
        count += tl.sum((mine[:, None] == bins[None, :]).to(tl.int32), 0)
    tl.store(counts + bins.to(tl.int64) * blocks + block, count, mask=bins <= experts)
    tl.atomic_add(sizes + bins, count, mask=bins < experts, sem="relaxed")


@triton.jit(do_not_specialize=["experts", "blocks"])
def starts_kernel(sizes, counts, experts, blocks, GROUPS: tl.constexpr, CHUNK: tl.constexpr):
    """A program per expert, and one for none: ``counts`` become the first rows of its blocks."""
    expert, every = tl.program_id(0), tl.arange(0, GROUPS)
    start = tl.sum(tl.load(sizes + every, mask=every < tl.minimum(expert, experts), other=0), 0)
    if expert == experts:
        tl.store(sizes + experts, start)
    counts += expert.to(tl.int64) * blocks
    for first in range(0, blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        count = tl.load(counts + block, mask=block < blocks, other=0)
        tl.store(counts + block, start + tl.cumsum(count, 0) - count, mask=block < blocks)
        start += tl.sum(count, 0)


@triton.jit(do_not_specialize=["slots", "experts", "blocks"])
def order_kernel(ids, starts, weights, outputs, slots, experts, blocks, BLOCK: tl.constexpr, PART: tl.constexpr):
    """The row of each slot: the first of its expert in its block, and one more for each such slot before it."""
    slot_of_row, row_of_slot, scales = outputs
    first = tl.program_id(0) * PART
    block, slot = first // BLOCK, first + tl.arange(0, PART)
    mine = bins_of(ids, slot, slots, experts)
    before = tl.zeros([PART], tl.int32)
    for part in range(block * BLOCK, first + PART, PART):
        other = part + tl.arange(0, PART)
        same = mine[:, None] == bins_of(ids, other, slots, experts)[None, :]
        before += tl.sum((same & (other[None, :] < slot[:, None])).to(tl.int32), 1)
    inside = slot < slots
    row = before + tl.load(starts + mine.to(tl.int64) * blocks + block, mask=inside, other=0)
    tl.store(slot_of_row + row, slot, mask=inside)
    tl.store(row_of_slot + slot, row, mask=inside)
    if weights is not None:
        tl.store(scales + row, tl.load(weights + slot, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def spread_kernel(
    x, rows, out, tokens, pitches, SLOTS: tl.constexpr, N: tl.constexpr, TILE_N: tl.constexpr, FILL: tl.constexpr
):
    """Some columns of some tokens, to all their rows; ``rows``: that of each slot, and how many have an expert."""
    m, n, inside = tile_of(tokens, N, TILE_N)
    token = tl.load(x + m[:, None] * pitches[0] + n[None, :], mask=inside, other=0.0)
    for j in range(0, SLOTS):
        row, is_row = row_of(rows, m * SLOTS + j, m < tokens)
        to = out + row[:, None] * pitches[1] + n[None, :]
        if FILL:
            tl.store(to, tl.where(is_row[:, None], token, 0.0), mask=inside)
        else:
            tl.store(to, token, mask=inside & is_row[:, None])


@triton.jit(do_not_specialize=["tokens"])
def sum_kernel(source, rows, out, tokens, pitches, SLOTS: tl.constexpr, N: tl.constexpr, TILE_N: tl.constexpr):
    """Some columns of some tokens, from all their rows in the order of the slots."""
    m, n, inside = tile_of(tokens, N, TILE_N)
    total = tl.zeros(inside.shape, tl.float32)
    for j in range(0, SLOTS):
        row, is_row = row_of(rows, m * SLOTS + j, m < tokens)
        at = source + row[:, None] * pitches[0] + n[None, :]
        total += tl.load(at, mask=inside & is_row[:, None], other=0.0).to(tl.float32)
    tl.store(out + m[:, None] * pitches[1] + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tile_of(tokens, N: tl.constexpr, TILE_N: tl.constexpr):
    """The tokens and columns of a program, and which of these there are."""
    TILE_M: tl.constexpr = ELEMENTS // TILE_N
    m = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    return m, n, (m < tokens)[:, None] & (n < N)[None, :]


@triton.jit
def row_of(rows, slot, is_slot):
    """The row of each slot, and whether it has an expert."""
    row_of_slot, num_rows = rows
    row = tl.load(row_of_slot + slot, mask=is_slot, other=0)
    return row.to(tl.int64), row < tl.load(num_rows)


@triton.jit(do_not_specialize=["slots"])
def gather_kernel(numbers, rows, out, slots, BLOCK: tl.constexpr):
    """The number of each slot's row."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, is_row = row_of(rows, slot, slot < slots)
    number = tl.load(numbers + row, mask=(slot < slots) & is_row, other=0.0)
    tl.store(out + slot, number.to(out.dtype.element_ty), mask=slot < slots)
