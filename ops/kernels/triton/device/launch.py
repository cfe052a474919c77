"""Problems in, launches out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
from operator import or_
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ....programs.columns import tensors_of
from ....programs.program import Program
from ....values.activation_spec import ActivationSpec
from ...problems.gemm import (
    Activate,
    ActivateBackward,
    ActivationGrads,
    GroupedGemm,
    Layout,
    Matrices,
    Operands,
    first,
    stacked,
)
from ...pytorch.float32 import allows_tf32
from .. import tiles, tuned
from ..shape import ProgramTile, RowsShape, WeightShape
from .call import call
from .epilogues import activate, activate_backward, store_product
from .foreign import NextAddress
from .function import function
from .passes import column_sums, sum_dots, sum_tiles
from .plan import TilePlan, plan_of
from .rows import epilogue_kernel, rows_kernel
from .weights import weights_kernel

_KINDS = {Activate: "activate", ActivateBackward: "activate_backward"}


def run(problem: GroupedGemm, tile: ProgramTile | None = None) -> None:
    """Computes ``problem.out``, and what its epilogue gives; with a tile other than the chosen one, if there is one."""
    p, tile = problem, tile or tile_of(problem)
    plan = plan_of(p.split_sizes, p.rows, tile.m)
    if p.layout is Layout.TN:
        _run_weights(p, tile, plan)
    elif p.epilogue is None:
        _run_product(p, tile, plan)
    elif isinstance(p.epilogue, Activate):
        _run_activate(p, p.epilogue, tile, plan)
    else:
        _run_backward(p, p.epilogue, tile, plan)


def tile_of(problem: GroupedGemm) -> ProgramTile:
    """The tile measured on this card, if there is one that fits; else the table's."""
    p, dtype = problem, problem.a.dtype
    kind = _KINDS.get(type(p.epilogue), p.layout.value.lower())
    strict = dtype == torch.float32 and precision_of(p.a) == "ieee"
    architecture, of_card = architecture_of(p.a.device), tuned.tiles_of(p.a.device)
    if not (isinstance(p.b, Tensor) and is_aligned(p.a) and is_aligned(p.b)):
        architecture, of_card = tiles.WITHOUT_BULK_COPIES.get(architecture, architecture), {}
    odd = min(_unit(p.a), _unit(first(p.b))) * dtype.itemsize < 16
    return tiles.choose(architecture, kind, p.rows / p.groups, dtype.itemsize, strict, of_card, odd)


@lru_cache(maxsize=64)
def architecture_of(device: torch.device) -> str:
    """``sm_90``, ``gfx942`` and the like."""
    if device.type != "cuda":
        return "sm_80"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def precision_of(a: Tensor) -> str:
    """How operands of float32 are multiplied: as PyTorch's are, which has TF32 on GPUs of NVIDIA. No word on others."""
    has_tf32 = a.dtype == torch.float32 and architecture_of(a.device).startswith("sm_")
    return "tf32" if has_tf32 and allows_tf32() else "ieee"


def _run_product(p: GroupedGemm, tile: ProgramTile, plan: TilePlan) -> None:
    out = first(p.out)
    factors = _factor(p.alpha, p.groups), _factor(p.beta, p.groups, zero=None)
    operands = (out, *factors, _bias(p.bias), _dense(p.bias_scale), _dense(p.row_scale), out.stride(0))
    _launch_rows(p, tile, plan, 0, operands, store_product, None)


def _run_activate(p: GroupedGemm, epilogue: Activate, tile: ProgramTile, plan: TilePlan) -> None:
    spec, out, program = epilogue.spec, first(p.out), epilogue.spec.function
    features = out.shape[1]
    block = _block(spec, features)
    vectors = _numbers(program.column_operands, epilogue.vectors, features, block)
    matrices = _numbers(program.matrix_operands, epilogue.matrices, features, block)
    operands = (out, epilogue.preact, epilogue.scales, _bias(p.bias), _dense(p.bias_scale), vectors, matrices)
    _launch_rows(p, tile, plan, block, operands, activate, function(program, ("y",)))


def _run_backward(p: GroupedGemm, epilogue: ActivateBackward, tile: ProgramTile, plan: TilePlan) -> None:
    n, spec, grads, program = p.mnk[1], epilogue.spec, epilogue.grads, epilogue.spec.function
    product = None
    if tile.apart and grads.vectors is None:  # else small tiles would leave many sums of columns
        product, tile = _product_apart(p, grads, tile, plan), tiles.EPILOGUE
        plan = plan_of(p.split_sizes, p.rows, tile.m)
    dots = None if grads.scales is None else p.a.new_empty((p.rows, -(-n // tile.n)), dtype=torch.float32)
    columns = () if grads.vectors is None else program.columns
    sums = p.a.new_empty((plan.most, len(columns), n), dtype=torch.float32) if columns else None
    vectors = _numbers(program.column_operands, epilogue.vectors, n, _block(spec, n))
    operands = grads.preact, grads.postact, epilogue.preact, dots, sums, epilogue.scales, vectors
    called = function(program, ("y", "dx", "du", "dr0", *(f"d{name}" for name in columns)))
    if product is None:
        _launch_rows(p, tile, plan, _block(spec, n), operands, activate_backward, called)
    else:
        _launch_backward(p, product, plan, _block(spec, n), operands, called)
    if dots is not None and grads.scales is not None:
        sum_dots(dots, p.split_sizes, grads.scales)
    if grads.bias is not None:
        column_sums(grads.preact, p.split_sizes, grads.bias, None)
    if sums is not None:
        _sum_columns(sums, plan, program, grads.vectors, spec)


def _product_apart(p: GroupedGemm, grads: ActivationGrads, tile: ProgramTile, plan: TilePlan) -> Tensor:
    """The product without its epilogue: where the activation will be, if it is wanted, which needs no more memory."""
    out, dtype = grads.postact, grads.preact.dtype
    if out is None or out.dtype != dtype:
        out = p.a.new_empty((p.rows, p.mnk[1]), dtype=dtype)
    _run_product(replace(p, out=out, epilogue=None), tile, plan)
    return out


def _sum_columns(sums: Tensor, plan: TilePlan, program: Program, out: Operands, spec: ActivationSpec) -> None:
    """The gradients of numbers of columns, from their sums [row tiles, numbers, N] over the rows of each tile."""
    features, groups = sums.shape[2], plan.starts.shape[1] - 1
    of_operands = zip(program.column_operands.items(), tensors_of(program.column_operands, out, features), strict=False)
    for (operand, names), gradient in of_operands:
        if gradient is None:
            continue
        for side, name in enumerate(names):
            total = sum_tiles(sums, plan, groups, operand[0] == "b", program.columns.index(name))
            if len(names) == 1:
                gradient.copy_(total)
            else:
                block = spec.block or features
                gradient.unflatten(1, (-1, 2, block))[:, :, side].copy_(total.unflatten(1, (-1, block)))


def _launch_rows(
    p: GroupedGemm,
    tile: ProgramTile,
    plan: TilePlan,
    block: int,
    operands: tuple[object, ...],
    epilogue: object,
    called: object,
) -> None:
    """One launch; ``block``: columns of gate before as many of up in the epilogue's operands, 0 for no such."""
    (_, n, k), a, b, transposed = p.mnk, p.a, p.b, p.layout is Layout.NN
    gated = block > 0 and epilogue is activate
    pairs = not transposed or (gated and block == 1)
    of_weights = block if gated else 0
    tma = (
        tile.tma
        and isinstance(b, Tensor)
        and is_aligned(a)
        and is_aligned(b)
        and _has_box(of_weights, n, transposed, b)
    )
    unit_a, unit_b, listed = _unit(a), _unit(first(b)), 0 if isinstance(b, Tensor) else _alignment(b)
    numbers = _counts(p)
    shape = RowsShape(n, k, block, gated, transposed, pairs, unit_a, unit_b, precision_of(a), tma, listed, *numbers)
    row_pitch, group_pitch = _pitches(b)
    call(
        rows_kernel,
        (_programs(plan.most * -(-n // tile.n), tile, a),),
        _descriptor(a, (tile.m, tile.k)) if tma else a,
        _weights_descriptor(first(b), of_weights, shape, tile) if tma else _table(b),
        plan.tiles,
        operands,
        (a.stride(0) // unit_a, row_pitch // unit_b, group_pitch // unit_b),
        SHAPE=shape,
        TILE=tile,
        EPILOGUE=epilogue,
        FUNCTION=called,
        # else a product and a sum may be rounded once or twice by whether the pre-activation is stored
        enable_fp_fusion=epilogue is not activate,
        **tile.options,
    )


def _launch_backward(
    p: GroupedGemm, product: Tensor, plan: TilePlan, block: int, operands: tuple[object, ...], called: object
) -> None:
    """One launch of an activation's backward that follows its product; as :func:`_launch_rows`."""
    (_, n, k), tile = p.mnk, tiles.EPILOGUE
    shape = RowsShape(n, k, block, False, True, False, 1, 1, "ieee", False, 0, *_counts(p))
    call(
        epilogue_kernel,
        (plan.most * -(-n // tile.n),),
        product,
        plan.tiles,
        operands,
        SHAPE=shape,
        TILE=tile,
        EPILOGUE=activate_backward,
        FUNCTION=called,
        **tile.options,
    )


def _counts(p: GroupedGemm) -> tuple[int, int]:
    """How many numbers of columns and of elements the epilogue reads."""
    program = None if p.epilogue is None else p.epilogue.spec.function
    return (0, 0) if program is None else (len(program.columns), len(program.matrices))


def _run_weights(p: GroupedGemm, tile: ProgramTile, plan: TilePlan) -> None:
    a, b, out, (m, n, _) = p.a, first(p.b), first(p.out), p.mnk
    tma, unit_a, unit_b, unit_out = tile.tma and is_aligned(a) and is_aligned(b), _unit(a), _unit(b), _unit(out)
    listed = 0 if isinstance(p.out, Tensor) else _alignment(p.out)
    shape = WeightShape(m, n, unit_a, unit_b, unit_out, precision_of(a), tma, listed)
    row_pitch, group_pitch = _pitches(p.out)
    call(
        weights_kernel,
        (_programs(p.groups * -(-m // tile.m) * -(-n // tile.n), tile, a),),
        descriptor_of_groups(a, (tile.k, tile.m)) if tma else a,
        descriptor_of_groups(b, (tile.k, tile.n)) if tma else b,
        (out, _table(p.out) if listed else None),
        plan.starts,
        p.groups,
        (_factor(p.alpha, p.groups), _factor(p.beta, p.groups, zero=None), _bias(p.bias)),
        (a.stride(0) // unit_a, b.stride(0) // unit_b, row_pitch // unit_out, group_pitch // unit_out),
        SHAPE=shape,
        TILE=tile,
        **tile.options,
    )


def _programs(tiles: int, tile: ProgramTile, a: Tensor) -> int:
    """How many are launched for so many tiles."""
    return min(tiles, tile.per_sm * _multiprocessors(a.device)) if tile.per_sm and a.is_cuda else tiles


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _block(spec: ActivationSpec, features: int) -> int:
    """Columns of gate before as many of up; 0: there is no up."""
    return (spec.block or features) if spec.gated else 0


def _numbers(
    operands: Mapping[str, tuple[str, ...]], tensors: Operands, features: int, block: int
) -> tuple[tuple[Tensor, int, int], ...]:
    """Where each number of columns or elements begins, and its pitches from row to row and from block to block."""
    numbers = []
    for (name, inputs), tensor in zip(operands.items(), tensors_of(operands, tensors, features), strict=False):
        dense = cast(Tensor, tensor).contiguous()
        pitch = 0 if name[0] == "a" else dense.shape[1]
        numbers += [(dense[:, i * block :], pitch, len(inputs) * block) for i in range(len(inputs))]
    return tuple(numbers)


def _factor(value: float | Tensor | None, groups: int, zero: float | None = 0.0) -> float | Tensor | None:
    """A factor as one number for all groups, or one per group; ``zero`` in place of the number 0."""
    if isinstance(value, Tensor) and (value.is_cuda or value.dim()):
        return value.to(torch.float32).expand(groups).contiguous()
    return value if value is None else float(value) or zero


def _bias(bias: Matrices | None) -> Tensor | None:
    return None if bias is None else stacked(bias).contiguous()


def _dense(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.contiguous()


def _table(matrices: Matrices) -> Tensor:
    """A stack as it is; of E matrices a table of their addresses, which launches write: a CUDA graph captures them."""
    if isinstance(matrices, Tensor):
        return matrices
    addresses = [NextAddress(matrix.data_ptr() + 1) for matrix in matrices]
    table = matrices[0].new_empty(-(-len(addresses) // _MOST) * _MOST, dtype=torch.int64)
    for i in range(0, len(addresses), _MOST):
        some = addresses[i : i + _MOST]
        size = triton.next_power_of_2(len(some))
        call(table_kernel, (1,), table[i:], tuple(some + some[-1:] * (size - len(some))), num_warps=1)
    return table


_MOST = 256  # addresses of a launch, whose parameters are limited to 4 KB


@triton.jit
def table_kernel(out, addresses):
    """One store for each address, which comes as a :class:`NextAddress`."""
    for i in tl.static_range(len(addresses)):
        tl.store(out + i, addresses[i].to(tl.int64) - 1)


def _pitches(matrices: Matrices) -> tuple[int, int]:
    """From row to row, and from group to group."""
    tensor = first(matrices)
    return tensor.stride(-2), tensor.stride(0) if isinstance(matrices, Tensor) else 0


def _alignment(matrices: Sequence[Tensor]) -> int:
    """The largest number of bytes that divides all addresses: 16, or the size of an element."""
    addresses = reduce(or_, [matrix.data_ptr() for matrix in matrices])
    return 16 if addresses % 16 == 0 else matrices[0].element_size()


def is_aligned(tensor: Tensor) -> bool:
    """Whether bulk copies take the tensor: its rows begin at different multiples of 16 bytes."""
    pitches = tensor.stride()[:-1]
    return tensor.data_ptr() % 16 == 0 and all(pitch and pitch * tensor.element_size() % 16 == 0 for pitch in pitches)


def _has_box(block: int, columns: int, transposed: bool, b: Tensor) -> bool:
    """Whether gate and up of a tile are one box of a bulk copy."""
    if not block or block == 1:
        return True
    return 2 * block == columns and (not transposed or block * b.element_size() % 16 == 0)


def _unit(tensor: Tensor) -> int:
    """Elements of which all pitches are multiples, so that the compiler knows how wide loads may be."""
    unit = 16 // tensor.element_size()
    while any(pitch % unit for pitch in tensor.stride()[:-1]):
        unit //= 2
    return unit


def _descriptor(tensor: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box))


def _weights_descriptor(b: Tensor, block: int, shape: RowsShape, tile: ProgramTile) -> TensorDescriptor:
    """The descriptor of a weight [E, N, K] or [E, K, N]; gate and up are a separate dimension, so one
    copy loads both.
    """
    groups, group_pitch = b.shape[0], b.stride(0)
    rows, pitch = b.shape[1], b.stride(1)
    if shape.transposed:
        if shape.pairs or not block:
            return _descriptor(b, (1, tile.k, tile.n))
        sizes, strides = [groups, rows, 2, block], [group_pitch, pitch, block, 1]
        return TensorDescriptor(b, sizes, strides, [1, tile.k, 2, tile.n // 2])
    if not block:
        return _descriptor(b, (1, tile.n, tile.k))
    of_feature, of_half = (2 * pitch, pitch) if block == 1 else (pitch, block * pitch)
    sizes, strides = [groups, rows // 2, 2, b.shape[2]], [group_pitch, of_feature, of_half, 1]
    return TensorDescriptor(b, sizes, strides, [1, tile.n // 2, 2, tile.k])


def descriptor_of_groups(rows: Tensor, box: Sequence[int]) -> TensorDescriptor:
    """A descriptor of rows [T, N] in which the buffer seems to end after the rows of a group: see
    :func:`rows_io.load_tokens`.

    The strides of the first two coordinates add up to 2^34 elements, and 2^30 of these are 2^64 bytes or a multiple.
    """
    pitch, many = rows.stride(0), 2**31 - 2**16
    shape, strides = [many, many, 2**30, rows.shape[1]], [2**34 - pitch, pitch, pitch, 1]
    return TensorDescriptor(rows, shape, strides, [1, 1, *box])
