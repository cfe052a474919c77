"""The kernel of products whose depth is grouped: TN, the gradient of weights."""

from __future__ import annotations

import triton
import triton.language as tl

from .epilogues import counted, factor
from .plan import position
from .rows_io import load_tokens, matrix_of, parts_of


@triton.jit(do_not_specialize=["groups"])
def weights_kernel(a, b, out, starts, groups, factors, pitches, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """``out[g] = alpha * a[rows of g]^T b[rows of g] + bias[g] + beta * out[g]``; a [T, M], b [T, N], out [E, M, N].

    Rows of no group are multiplied with nothing, whatever they hold.

    Args:
        out: a pointer to the first, and to the table of all where there is one.
        factors: alpha, beta and bias.
        pitches: from row to row of a, of b and of out, and from group to group, in units.
    """
    M: tl.constexpr = SHAPE.m
    N: tl.constexpr = SHAPE.n
    TILE_M: tl.constexpr = TILE.m
    TILE_N: tl.constexpr = TILE.n
    TILE_K: tl.constexpr = TILE.k
    STRIP: tl.constexpr = TILE.strip
    FLATTEN: tl.constexpr = TILE.flatten
    PRECISION: tl.constexpr = SHAPE.precision
    ROW_TILES: tl.constexpr = (M + TILE_M - 1) // TILE_M
    COLUMN_TILES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    TILES: tl.constexpr = ROW_TILES * COLUMN_TILES
    PART: tl.constexpr = TILE.part
    BITS: tl.constexpr = out[0].dtype.element_ty.primitive_bitwidth
    WHOLE: tl.constexpr = factors[1] is None and factors[2] is None and BITS == 16
    pitch_a, pitch_b = pitches[0] * SHAPE.unit_a, pitches[1] * SHAPE.unit_b
    stored = tl.program_id(0)
    for tile in tl.range(tl.program_id(0), groups * TILES, tl.num_programs(0), flatten=FLATTEN):
        i, j = position(tile % TILES, ROW_TILES, COLUMN_TILES, STRIP)
        start, end = tl.load(starts + tile // TILES), tl.load(starts + tile // TILES + 1)
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        steps = tl.maximum(tl.cdiv(end - start, TILE_K), 1)  # past the end all are zeros; loops are flattened only if
        tl.assume(steps > 0)  # the inner one is known to run
        for step in range(0, steps):
            row = start + step * TILE_K
            x = load_tokens(a, (row, end, i * TILE_M), pitch_a, M, TILE.k, TILE.m, SHAPE.tma)
            y = load_tokens(b, (row, end, j * TILE_N), pitch_b, N, TILE.k, TILE.n, SHAPE.tma)
            acc = tl.dot(x.T, y, acc, input_precision=PRECISION)
        i, j = position(stored % TILES, ROW_TILES, COLUMN_TILES, STRIP)
        parts = parts_of(acc, TILE_N if WHOLE else 2 * PART)
        WIDTH: tl.constexpr = TILE_N // len(parts)
        for part in tl.static_range(len(parts)):
            to = stored // TILES, i * TILE_M, j * TILE_N + part * WIDTH
            store_weights(parts[part], out, to, factors, pitches, SHAPE)
        stored += tl.num_programs(0)


@triton.jit
def store_weights(acc, out, to, factors, pitches, SHAPE: tl.constexpr):
    """Stores a part of a group's tile, at the place ``to``."""
    group, m, n = to
    alpha, beta, bias = factors
    ms, ns = m + tl.arange(0, acc.shape[0]), n + tl.arange(0, acc.shape[1])
    if alpha is not None:
        acc = acc * factor(alpha, group)
    if bias is not None:
        acc = (
            acc
            + tl.load(bias + group.to(tl.int64) * SHAPE.n + ns, mask=ns < SHAPE.n, other=0.0).to(tl.float32)[None, :]
        )
    first, table = out
    if SHAPE.listed:
        first = matrix_of(table, group, first.dtype, 0, 1, SHAPE.listed)
    else:
        first = matrix_of(first, group, first.dtype, pitches[3], SHAPE.unit_out, 0)
    at = first + ms[:, None] * (pitches[2] * SHAPE.unit_out) + ns[None, :]
    inside = (ms < SHAPE.m)[:, None] & (ns < SHAPE.n)[None, :]
    if beta is not None:
        acc = acc + counted(tl.load(at, mask=inside, other=0.0), factor(beta, group))
    tl.store(at, acc.to(at.dtype.element_ty), mask=inside)
