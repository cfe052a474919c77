"""Which rows each tile has: made on the device from the split sizes, so that the host waits for nothing."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..installed import report_word
from .call import call

_CHUNK = 128


class TilePlan(NamedTuple):
    """A token buffer whose groups are cut into tiles of some rows.

    Attributes:
        starts: int32 [2, E + 1]: the first row of each group, and the end of the last; inside the buffer. Then the
            first tile of each, and how many there are.
        tiles: int32 [1 + 3 n]: how many row tiles there are; then of each its group, its first row, and the end of its
            group's rows. n is at least as many as there can be.
        most: n.
    """

    starts: Tensor
    tiles: Tensor
    most: int


def plan_of(split_sizes: Tensor, rows: int, tile_m: int) -> TilePlan:
    """One launch of a program per group."""
    groups = split_sizes.shape[0]
    most = rows // tile_m + min(groups, rows)
    starts = split_sizes.new_empty((2, groups + 1), dtype=torch.int32)
    tiles = split_sizes.new_empty(1 + 3 * most, dtype=torch.int32)
    sizes = triton.next_power_of_2(groups)
    call(
        plan_kernel,
        (groups,),
        split_sizes,
        starts,
        tiles,
        rows,
        groups,
        report_word(split_sizes),
        TILE_M=tile_m,
        GROUPS=sizes,
        CHUNK=_CHUNK,
        num_warps=4,
    )
    return TilePlan(starts, tiles, most)


@triton.jit
def row_range(split_sizes, group, rows, groups, GROUPS: tl.constexpr):
    """The rows [start, end) of a group and of every group, whatever the sizes say inside the buffer.

    Sums are of int64, so those of sizes that were clamped do not wrap.
    """
    every = tl.arange(0, GROUPS)
    size = tl.load(split_sizes + every, mask=every < groups, other=0).to(tl.int64)
    size = tl.minimum(tl.maximum(size, 0), rows)
    sums = tl.cumsum(size, 0)
    start, end = tl.minimum(sums - size, rows).to(tl.int32), tl.minimum(sums, rows).to(tl.int32)
    mine = every == group
    return tl.sum(tl.where(mine, start, 0), 0), tl.sum(tl.where(mine, end, 0), 0), start, end


@triton.jit
def report_cut(split_sizes, word, group, groups, kept, GROUPS: tl.constexpr):
    """Reports this group if it is the first of which not all rows are kept, as ``csrc/device/gemm/groups.cuh`` does."""
    every = tl.arange(0, GROUPS)
    size = tl.load(split_sizes + every, mask=every < groups, other=0).to(tl.int64)
    first = tl.min(tl.where(size != kept, every, GROUPS), 0)
    if first == group:
        to = word.to(tl.int64).to(tl.pointer_type(tl.int64))
        mine = tl.sum(tl.where(every == group, size, 0), 0)
        most = tl.full([], 2**47 - 1, tl.int64)
        mine = tl.minimum(tl.maximum(mine, -most), most)
        if tl.load(to, volatile=True) == 0:
            tl.store(to, (mine & (2**48 - 1)) | (group.to(tl.int64) << 48) | tl.full([], -(2**63), tl.int64))


@triton.jit(do_not_specialize=["rows", "groups", "word"])
def plan_kernel(
    split_sizes, starts, tiles, rows, groups, word, TILE_M: tl.constexpr, GROUPS: tl.constexpr, CHUNK: tl.constexpr
):
    """A program per group: where its rows and its tiles begin, and what its tiles are."""
    group = tl.program_id(0)
    start, end, all_starts, all_ends = row_range(split_sizes, group, rows, groups, GROUPS)
    if word != 0:
        report_cut(split_sizes, word, group, groups, all_ends - all_starts, GROUPS)
    counts = tl.cdiv(all_ends - all_starts, TILE_M)
    first = tl.sum(tl.where(tl.arange(0, GROUPS) < group, counts, 0), 0)
    tl.store(starts + group, start)
    tl.store(starts + groups + 1 + group, first)
    if group == groups - 1:
        count = tl.sum(counts, 0)
        tl.store(starts + groups, end)
        tl.store(starts + 2 * groups + 1, count)
        tl.store(tiles, count)
    mine = tl.cdiv(end - start, TILE_M)
    for i in range(0, mine, CHUNK):
        tile = i + tl.arange(0, CHUNK)
        at = tiles + 1 + 3 * (first + tile)
        tl.store(at, tl.zeros([CHUNK], tl.int32) + group, mask=tile < mine)
        tl.store(at + 1, start + tile * TILE_M, mask=tile < mine)
        tl.store(at + 2, tl.zeros([CHUNK], tl.int32) + end, mask=tile < mine)


@triton.jit
def position(tile, row_tiles, COLUMN_TILES: tl.constexpr, STRIP: tl.constexpr):
    """Which row tile and column tile: strips of some row tiles are swept across the columns.

    Tiles that are computed at the same time then share rows and weights in the L2 cache.
    """
    first = tile // (STRIP * COLUMN_TILES) * STRIP
    height = tl.minimum(row_tiles - first, STRIP)
    inside = tile - first * COLUMN_TILES
    return first + inside % height, inside // height


@triton.jit
def row_tile(tiles, t):
    """Group, first row and end of the group's rows of a row tile."""
    at = tiles + 1 + 3 * t
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)
