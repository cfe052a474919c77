"""Tiles of rows in memory, which end where a group does; and tiles in registers, in halves and parts."""

from __future__ import annotations

import triton
import triton.language as tl

MANY = tl.constexpr(2**30)


@triton.jit
def load_tokens(tokens, at, pitch, LIMIT: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TMA: tl.constexpr):
    """[TILE_M, TILE_N] of [T, ...]; zeros past the group's end, and from column LIMIT on.

    Args:
        at: the first row, the end of the group's rows, and the first column.
    """
    row, end, n = at
    if TMA:
        x = tl.reshape(tokens.load([MANY, end, MANY - end + row, n]), (TILE_M, TILE_N))
    else:
        m, ns = tl.arange(0, TILE_M), n + tl.arange(0, TILE_N)
        to = tokens + row.to(tl.int64) * pitch + m[:, None] * pitch + ns[None, :]
        x = tl.load(to, mask=(m < end - row)[:, None] & (ns < LIMIT)[None, :], other=0.0)
    return x


@triton.jit
def store_tokens(tokens, x, at, pitch, LIMIT: tl.constexpr):
    """The inverse of :func:`load_tokens`."""
    row, end, n = at
    m, ns = tl.arange(0, x.shape[0]), n + tl.arange(0, x.shape[1])
    to = tokens + row.to(tl.int64) * pitch + m[:, None] * pitch + ns[None, :]
    tl.store(to, x.to(tokens.dtype.element_ty), mask=(m < end - row)[:, None] & (ns < LIMIT)[None, :])


@triton.jit
def gate_column(feature, N: tl.constexpr, BLOCK: tl.constexpr):
    """Where the gate of a feature is; its up is BLOCK columns further."""
    return feature if BLOCK * 2 == N else feature // BLOCK * (2 * BLOCK) + feature % BLOCK


@triton.jit
def load_gate_up(tokens, at, FEATURES: tl.constexpr, BLOCK: tl.constexpr, TILE_M: tl.constexpr, WIDTH: tl.constexpr):
    """Gate and up [TILE_M, WIDTH] of the features from ``first`` on; the same twice where there is one of them."""
    row, end, first = at
    C: tl.constexpr = 2 * FEATURES if BLOCK else FEATURES
    if BLOCK == 0:
        x = load_tokens(tokens, at, C, FEATURES, TILE_M, WIDTH, False)
        u = x
    elif BLOCK == FEATURES:
        x = load_tokens(tokens, at, C, FEATURES, TILE_M, WIDTH, False)
        u = load_tokens(tokens, (row, end, first + FEATURES), C, C, TILE_M, WIDTH, False)
    elif BLOCK == 1:
        x, u = split_columns(load_tokens(tokens, (row, end, 2 * first), C, C, TILE_M, 2 * WIDTH, False), True)
    else:
        m, f = tl.arange(0, TILE_M), first + tl.arange(0, WIDTH)
        inside = (m < end - row)[:, None] & (f < FEATURES)[None, :]
        to = tokens + row.to(tl.int64) * C + m[:, None] * C + gate_column(f, C, BLOCK)[None, :]
        x, u = tl.load(to, mask=inside, other=0.0), tl.load(to + BLOCK, mask=inside, other=0.0)
    return x, u


@triton.jit
def store_gate_up(tokens, x, u, at, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of :func:`load_gate_up`."""
    row, end, first = at
    C: tl.constexpr = 2 * FEATURES if BLOCK else FEATURES
    if BLOCK == 0:
        store_tokens(tokens, x, at, C, FEATURES)
    elif BLOCK == FEATURES:
        store_tokens(tokens, x, at, C, FEATURES)
        store_tokens(tokens, u, (row, end, first + FEATURES), C, C)
    elif BLOCK == 1:
        both = tl.reshape(tl.join(x, u), (x.shape[0], 2 * x.shape[1]))
        store_tokens(tokens, both, (row, end, 2 * first), C, C)
    else:
        m, f = tl.arange(0, x.shape[0]), first + tl.arange(0, x.shape[1])
        inside = (m < end - row)[:, None] & (f < FEATURES)[None, :]
        to = tokens + row.to(tl.int64) * C + m[:, None] * C + gate_column(f, C, BLOCK)[None, :]
        tl.store(to, x.to(tokens.dtype.element_ty), mask=inside)
        tl.store(to + BLOCK, u.to(tokens.dtype.element_ty), mask=inside)


@triton.jit
def matrix_of(matrices, group, like, pitch, UNIT: tl.constexpr, LISTED: tl.constexpr):
    """Where the matrix of a group begins: in a stack, or at an address of a table, which says nothing of its type.

    Args:
        pitch: from matrix to matrix in units of so many elements; 32 bits may not hold all elements.
    """
    if LISTED:
        first = tl.multiple_of(tl.load(matrices + group).to(like), LISTED)
    else:
        first = matrices + group.to(tl.int64) * pitch * UNIT
    return first


@triton.jit
def split_columns(acc, PAIRS: tl.constexpr):
    """[M, N / 2] each: every second column (PAIRS), or the left ones and the right ones."""
    M: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1] // 2
    return tl.split(tl.reshape(acc, (M, WIDTH, 2)) if PAIRS else tl.permute(tl.reshape(acc, (M, 2, WIDTH)), (0, 2, 1)))


@triton.jit
def parts_of(acc, LARGEST: tl.constexpr):
    """A tuple of the parts [M, at most LARGEST] of a tile's columns, from left to right."""
    if acc.shape[1] <= LARGEST:
        return (acc,)
    else:
        left, right = split_columns(acc, False)
        return parts_of(left, LARGEST) + parts_of(right, LARGEST)
