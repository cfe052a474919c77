"""The kernel of products whose rows are grouped: NT and NN, with any epilogue; and that of an epilogue alone."""

from __future__ import annotations

import triton
import triton.language as tl

from .plan import position, row_tile
from .rows_io import gate_column, load_tokens, matrix_of


@triton.jit
def rows_kernel(
    a,
    b,
    tiles,
    operands,
    pitches,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    FUNCTION: tl.constexpr,
):
    """``EPILOGUE(a[rows of g] B[g])``: a [T, K]; b [E, N, K], or [E, K, N].

    No two dots of the loop share an accumulator: that is compiled wrongly for sm_100 (triton #10821).

    Args:
        a, b: pointers, or descriptors.
        tiles: those of a :class:`TilePlan`.
        operands: of the epilogue.
        pitches: from row to row of a and of b, and from group to group, in units.
        SHAPE, TILE: see :class:`RowsShape` and :class:`ProgramTile`.
    """
    N: tl.constexpr = SHAPE.n
    K: tl.constexpr = SHAPE.k
    TILE_M: tl.constexpr = TILE.m
    TILE_N: tl.constexpr = TILE.n
    TILE_K: tl.constexpr = TILE.k
    STRIP: tl.constexpr = TILE.strip
    FLATTEN: tl.constexpr = TILE.flatten
    PRECISION: tl.constexpr = SHAPE.precision
    COLUMN_TILES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    row_tiles = tl.load(tiles)
    stored = tl.program_id(0)
    for tile in tl.range(tl.program_id(0), row_tiles * COLUMN_TILES, tl.num_programs(0), flatten=FLATTEN):
        t, j = position(tile, row_tiles, COLUMN_TILES, STRIP)
        group, row, end = row_tile(tiles, t)
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        for i in range(0, (K + TILE_K - 1) // TILE_K):
            x = load_rows(a, row, end, i * TILE_K, pitches, SHAPE, TILE)
            if SHAPE.transposed:
                w = load_kn(b, a, group, j * TILE_N, i * TILE_K, pitches, SHAPE, TILE)
                acc = tl.dot(x, w, acc, input_precision=PRECISION)
            else:
                w = load_nk(b, a, group, j * TILE_N, i * TILE_K, pitches, SHAPE, TILE)
                acc = tl.dot(x, w.T, acc, input_precision=PRECISION)
        # a counter of its own: pipelined loops of sm_100 cannot share one between loads and epilogue
        t, j = position(stored, row_tiles, COLUMN_TILES, STRIP)
        group, row, end = row_tile(tiles, t)
        stored += tl.num_programs(0)
        EPILOGUE(acc, (group, row, end, t, j), operands, SHAPE, TILE, FUNCTION)


@triton.jit
def epilogue_kernel(
    product,
    tiles,
    operands,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    EPILOGUE: tl.constexpr,
    FUNCTION: tl.constexpr,
):
    """``EPILOGUE(product)``: the operations of :func:`rows_kernel` on a product [T, N] in memory, a program a tile.

    An operand may be where the product is: a program reads its tile before it writes it.
    """
    N: tl.constexpr = SHAPE.n
    COLUMN_TILES: tl.constexpr = (N + TILE.n - 1) // TILE.n
    t, j = tl.program_id(0) // COLUMN_TILES, tl.program_id(0) % COLUMN_TILES
    if t < tl.load(tiles):
        group, row, end = row_tile(tiles, t)
        acc = load_tokens(product, (row, end, j * TILE.n), N, N, TILE.m, TILE.n, False).to(tl.float32)
        EPILOGUE(acc, (group, row, end, t, j), operands, SHAPE, TILE, FUNCTION)


@triton.jit
def load_rows(a, row, end, k, pitches, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Loads [TILE.m, TILE.k] of a. Rows past the group's end belong to another group, and are never stored."""
    K: tl.constexpr = SHAPE.k
    TILE_K: tl.constexpr = TILE.k
    if SHAPE.tma:
        x = a.load([row, k])
    else:
        pitch = pitches[0] * SHAPE.unit_a
        m, ks = tl.minimum(tl.arange(0, TILE.m), end - 1 - row), k + tl.arange(0, TILE.k)
        at = a + row.to(tl.int64) * pitch + m[:, None] * pitch + ks[None, :]
        x = tl.load(at) if K % TILE_K == 0 else tl.load(at, mask=ks[None, :] < K, other=0.0)
    return x


@triton.jit
def load_nk(b, a, group, n, k, pitches, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """[TILE.n, TILE.k] of b [E, N, K], whose rows of gate and of up are brought together."""
    N: tl.constexpr = SHAPE.n
    K: tl.constexpr = SHAPE.k
    TILE_N: tl.constexpr = TILE.n
    TILE_K: tl.constexpr = TILE.k
    if SHAPE.tma:
        if SHAPE.gated:
            w = tl.reshape(b.load([group, n // 2, 0, k]), (TILE_N, TILE_K))
        else:
            w = tl.reshape(b.load([group, n, k]), (TILE_N, TILE_K))
    else:
        ks, column = k + tl.arange(0, TILE.k), tl.minimum(columns_of(n, SHAPE, TILE), N - 1)
        first = matrix_of(b, group, a.dtype, pitches[2], SHAPE.unit_b, SHAPE.listed)
        at = first + column[:, None] * (pitches[1] * SHAPE.unit_b) + ks[None, :]
        w = tl.load(at) if K % TILE_K == 0 else tl.load(at, mask=ks[None, :] < K, other=0.0)
    return w


@triton.jit
def load_kn(b, a, group, n, k, pitches, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """[TILE.k, TILE.n] of b [E, K, N], likewise."""
    TILE_N: tl.constexpr = TILE.n
    TILE_K: tl.constexpr = TILE.k
    GATED: tl.constexpr = SHAPE.gated
    PAIRS: tl.constexpr = SHAPE.pairs
    if SHAPE.tma:
        if PAIRS or not GATED:
            w = tl.reshape(b.load([group, k, n]), (TILE_K, TILE_N))
        else:
            w = tl.reshape(b.load([group, k, 0, n // 2]), (TILE_K, TILE_N))
    else:
        ks, column = k + tl.arange(0, TILE.k), columns_of(n, SHAPE, TILE)
        first = matrix_of(b, group, a.dtype, pitches[2], SHAPE.unit_b, SHAPE.listed)
        at = first + ks[:, None] * (pitches[1] * SHAPE.unit_b) + column[None, :]
        w = tl.load(at, mask=(ks[:, None] < SHAPE.k) & (column[None, :] < SHAPE.n), other=0.0)
    return w


@triton.jit
def columns_of(n, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Which columns of the product a tile's are, N or more for those that it has not.

    A tile that begins at n has gate and up of the features from n / 2 on.
    """
    N: tl.constexpr = SHAPE.n
    BLOCK: tl.constexpr = SHAPE.block
    TILE_N: tl.constexpr = TILE.n
    GATED: tl.constexpr = SHAPE.gated
    PAIRS: tl.constexpr = SHAPE.pairs
    j = tl.arange(0, TILE_N)
    if not GATED or (PAIRS and BLOCK == 1):
        columns = n + j
    else:
        feature = n // 2 + (j // 2 if PAIRS else j % (TILE_N // 2))
        is_up = j % 2 if PAIRS else j // (TILE_N // 2)
        columns = gate_column(feature, N, BLOCK) + is_up * BLOCK
        if (N // 2) % (TILE_N // 2):
            columns = tl.where(feature < N // 2, columns, N)
    return columns
