"""The operations on a product's tile before it is stored.

All have one signature: ``(acc, at, operands, SHAPE, TILE, FUNCTION)``. ``at`` is the position of the tile: its group,
its first row, the end of the group's rows, and the numbers of its row tile and column tile. Rows past the end are never
touched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .rows_io import gate_column, load_gate_up, load_tokens, parts_of, split_columns, store_gate_up, store_tokens


@triton.jit
def store_product(acc, at, operands, SHAPE: tl.constexpr, TILE: tl.constexpr, FUNCTION: tl.constexpr):
    """``out = row_scale * (alpha * acc + bias_scale * bias) + beta * out``."""
    group, row, end, _, j = at
    out, alpha, beta, bias, bias_scale, row_scale, pitch = operands
    N: tl.constexpr = SHAPE.n
    TILE_N: tl.constexpr = TILE.n
    PART: tl.constexpr = TILE.part
    BITS: tl.constexpr = out.dtype.element_ty.primitive_bitwidth
    WHOLE: tl.constexpr = bias is None and beta is None and BITS == 16
    parts = parts_of(acc, TILE_N if WHOLE else 2 * PART)
    WIDTH: tl.constexpr = TILE_N // len(parts)
    is_row = tl.arange(0, TILE.m) < end - row
    for i in tl.static_range(len(parts)):
        part, first = parts[i], j * TILE_N + i * WIDTH
        if alpha is not None:
            part = part * factor(alpha, group)
        if bias is not None:
            n = first + tl.arange(0, WIDTH)
            term = tl.load(bias + group.to(tl.int64) * N + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
            part = part + numbers_of_rows(bias_scale, row, is_row) * term
        if row_scale is not None:
            part = part * numbers_of_rows(row_scale, row, is_row)
        if beta is not None:
            before = load_tokens(out, (row, end, first), pitch, N, TILE.m, WIDTH, False)
            part = part + counted(before, factor(beta, group))
        store_tokens(out, part, (row, end, first), pitch, N)


@triton.jit
def activate(acc, at, operands, SHAPE: tl.constexpr, TILE: tl.constexpr, FUNCTION: tl.constexpr):
    """``preact = acc + bias_scale * bias`` if it is kept, and ``out = FUNCTION(preact, ...)``."""
    BLOCK: tl.constexpr = SHAPE.block
    PART: tl.constexpr = TILE.part
    TILE_F: tl.constexpr = acc.shape[1] // 2 if BLOCK else acc.shape[1]
    if BLOCK == 0:
        gates, ups = parts_of(acc, PART), ()
    elif SHAPE.pairs:
        gates, ups = parts_of(acc, 2 * PART), ()
    else:
        gate, up = split_columns(acc, False)
        gates, ups = parts_of(gate, PART), parts_of(up, PART)
    WIDTH: tl.constexpr = TILE_F // len(gates)
    for i in tl.static_range(len(gates)):
        if len(ups):
            x, u = gates[i], ups[i]
        elif BLOCK:
            x, u = split_columns(gates[i], True)
        else:
            x, u = gates[i], gates[i]
        activate_part(x, u, at[4] * TILE_F + i * WIDTH, at, operands, SHAPE, FUNCTION)


@triton.jit
def activate_part(x, u, first, at, operands, SHAPE: tl.constexpr, FUNCTION: tl.constexpr):
    """The features from ``first`` on."""
    group, row, end, _, _ = at
    out, preact, scales, bias, bias_scale, vectors, matrices = operands
    N: tl.constexpr = SHAPE.n
    BLOCK: tl.constexpr = SHAPE.block
    FEATURES: tl.constexpr = N // 2 if BLOCK else N
    m, f = tl.arange(0, x.shape[0]), first + tl.arange(0, x.shape[1])
    is_row, is_column = m < end - row, f < FEATURES
    if bias is not None:
        scale = numbers_of_rows(bias_scale, row, is_row)
        to = bias + group.to(tl.int64) * N + (gate_column(f, N, BLOCK) if BLOCK else f)
        x += scale * tl.load(to, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if BLOCK:
            u += scale * tl.load(to + BLOCK, mask=is_column, other=0.0).to(tl.float32)[None, :]
    x, u = rounded(x, out), rounded(u, out)
    if preact is not None:
        store_gate_up(preact, x, u, (row, end, first), FEATURES, BLOCK)
    of_columns = numbers_of_columns(vectors, group, f, SHAPE.columns, FEATURES, BLOCK)
    of_elements = numbers_of_elements(matrices, (row, is_row, f), SHAPE.elements, FEATURES, BLOCK)
    y = FUNCTION(x, u, None, (numbers_of_rows(scales, row, is_row),), of_columns, of_elements)[0]
    store_tokens(out, y, (row, end, first), FEATURES, FEATURES)


@triton.jit
def activate_backward(acc, at, operands, SHAPE: tl.constexpr, TILE: tl.constexpr, FUNCTION: tl.constexpr):
    """acc is the gradient of ``FUNCTION(preact, ...)`` [T, N]; what is wanted of its gradients, and the value again.

    ``dots`` [T, column tiles] get the sums of the gradients of the rows' scales over the tile's columns: each is
    written once, so a sum over them has the same bits in every run.
    """
    _, row, end, _, j = at
    dots = operands[3]
    N: tl.constexpr = SHAPE.n
    TILE_M: tl.constexpr = TILE.m
    TILE_N: tl.constexpr = TILE.n
    COLUMN_TILES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    parts = parts_of(acc, TILE.part)
    WIDTH: tl.constexpr = TILE_N // len(parts)
    scales = (numbers_of_rows(operands[5], row, tl.arange(0, TILE_M) < end - row),)
    dot = tl.zeros([TILE_M], tl.float32)
    for i in tl.static_range(len(parts)):
        first = j * TILE_N + i * WIDTH
        hidden = load_gate_up(operands[2], (row, end, first), N, SHAPE.block, TILE_M, WIDTH)
        dot += backward_of_part(parts[i], hidden, scales, first, at, operands, SHAPE, FUNCTION)
    if dots is not None:
        m = tl.arange(0, TILE.m)
        tl.store(dots + (row + m).to(tl.int64) * COLUMN_TILES + j, dot, mask=m < end - row)


@triton.jit
def backward_of_part(dy, hidden, scales, first, at, operands, SHAPE: tl.constexpr, FUNCTION: tl.constexpr):
    """The features from ``first`` on; gives the sums of the gradients of the rows' scales over them.

    ``sums`` [row tiles, numbers of columns, N] get those of the gradients of numbers of columns over the tile's rows.
    """
    group, row, end, t, _ = at
    dpreact, postact, _, _, sums, _, vectors = operands
    N: tl.constexpr = SHAPE.n
    BLOCK: tl.constexpr = SHAPE.block
    x, u = hidden
    f = first + tl.arange(0, dy.shape[1])
    is_row, is_column = tl.arange(0, dy.shape[0]) < end - row, f < N
    of_columns = numbers_of_columns(vectors, group, f, SHAPE.columns, N, BLOCK)
    values = FUNCTION(x.to(tl.float32), u.to(tl.float32), rounded(dy, dpreact), scales, of_columns, ())
    store_gate_up(dpreact, values[1], values[2], (row, end, first), N, BLOCK)
    if postact is not None:
        store_tokens(postact, values[0], (row, end, first), N, N)
    if sums is not None:
        COUNT: tl.constexpr = SHAPE.columns
        for i in tl.static_range(COUNT):
            column = tl.sum(tl.where(is_row[:, None], values[4 + i], 0.0), 0)
            tl.store(sums + (t.to(tl.int64) * COUNT + i) * N + f, column, mask=is_column)
    return tl.sum(tl.where(is_column[None, :], values[3], 0.0), 1)


@triton.jit
def rounded(x, like):
    """Rounds to the stored dtype, so that a fused activation reads the values that a separate one would read."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def factor(value, group):
    """A number, or one of each group."""
    each = value  # the interpreter makes a tensor of what is assigned
    return tl.load(each + group).to(tl.float32) if each.dtype.is_ptr() else each


@triton.jit
def counted(before, beta):
    """The old values of a result times their factor; a factor of 0 reads nothing, not even NaN."""
    return tl.where(beta == 0.0, 0.0, beta * before.to(tl.float32))


@triton.jit
def numbers_of_rows(numbers, row, is_row):
    """[M, 1], of the rows of a tile; 1 without any."""
    if numbers is None:
        return 1.0
    else:
        at = numbers + row + tl.arange(0, is_row.shape[0])
        return tl.load(at, mask=is_row, other=0.0).to(tl.float32)[:, None]


@triton.jit
def numbers_of_columns(vectors, group, f, COUNT: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """[1, F] of each of (pointer, pitch from group to group, pitch from block to block): the numbers of columns.

    COUNT: their number, which Triton cannot determine for tuples with constants.
    """
    values = ()
    for i in tl.static_range(COUNT):
        pointer, pitch, block_pitch = vectors[i]
        at = pointer + group.to(tl.int64) * pitch + column_of(f, block_pitch, FEATURES, BLOCK)
        values = values + (tl.load(at, mask=f < FEATURES, other=0.0).to(tl.float32)[None, :],)
    return values


@triton.jit
def numbers_of_elements(matrices, at, COUNT: tl.constexpr, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """[M, F] of each of (pointer, pitch from row to row, from block to block): the numbers of elements.

    Args:
        at: the first row, which rows there are, and the features.
    """
    row, is_row, f = at
    values = ()
    inside = is_row[:, None] & (f < FEATURES)[None, :]
    for i in tl.static_range(COUNT):
        pointer, pitch, block_pitch = matrices[i]
        m = row.to(tl.int64) + tl.arange(0, is_row.shape[0])
        to = pointer + m[:, None] * pitch + column_of(f, block_pitch, FEATURES, BLOCK)[None, :]
        values = values + (tl.load(to, mask=inside, other=0.0).to(tl.float32),)
    return values


@triton.jit
def column_of(f, block_pitch, FEATURES: tl.constexpr, BLOCK: tl.constexpr):
    """The position of a feature's number in a row."""
    if BLOCK == 0 or BLOCK == FEATURES:
        return f
    else:
        return f // BLOCK * block_pitch + f % BLOCK
