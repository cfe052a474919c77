"""Our Hopper kernels that end in an activation or its backward: one launch instead of a product and a pass over it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...activation_spec import ActivationSpec
from ..problem import Activate, ActivateBackward, GroupedGemm, Layout, first
from .extension import TYPE_CODES, address, compiled, stream, workspace_bytes
from .rows import curve_arguments, scale_arguments

NAME = "hopper (activation in the epilogue)"
_TILE = 256  # columns of the widest tile: a block of gate and as much of up must fit in
_NARROW = (1, 2, 4)  # blocks that are told apart within sixteen columns

Addressing = tuple[tuple[int, int, int], list[int]]
"""Where matrices lie: address, row pitch and distance of one tensor, in elements; or each at an address of its own."""


def configuration(problem: GroupedGemm, epilogue: Activate | ActivateBackward) -> str:
    """The product with its epilogue, and what is chosen for it, in words."""
    p, (_, n, k), spec = problem, problem.mnk, epilogue.spec
    backward = isinstance(epilogue, ActivateBackward)
    columns = n // 2 if spec.gated and not backward else n
    shape = backward, spec.gated, spec.block or columns, TYPE_CODES[p.a.dtype]
    chosen = compiled().linear_activation_config(*shape, p.a.get_device(), p.groups, p.rows, n, k, p.bias is not None)
    return f"{p}: {chosen}"


def refusal(problem: GroupedGemm) -> str | None:
    """Why a product that this backend takes cannot have its epilogue; None: it can."""
    epilogue = problem.epilogue
    if epilogue is None:
        return None
    if type(epilogue) is Activate:
        return _forward_refusal(problem, epilogue)
    return _backward_refusal(problem, epilogue)


def _forward_refusal(problem: GroupedGemm, epilogue: Activate) -> str | None:
    postact, block, preact = first(problem.out), epilogue.spec.block, epilogue.preact
    if block is not None and block not in (*_NARROW, postact.shape[-1]) and (block % 8 or _TILE % (2 * block)):
        return f"has no tile for blocks of {block} columns"
    if problem.alpha is not None or problem.row_scale is not None or problem.beta is not None:
        return "takes no factor but the scales of the bias"
    rows = (postact,) if preact is None else (postact, preact)
    return _scales_refusal(epilogue.scales) or _rows_refusal(problem, rows)


def _backward_refusal(problem: GroupedGemm, epilogue: ActivateBackward) -> str | None:
    block, grads = epilogue.spec.block, epilogue.grads
    if block is not None and block not in _NARROW and block % 8:
        return f"has no loads for blocks of {block} columns"
    if any(extra is not None for extra in (problem.alpha, problem.beta, problem.bias, problem.row_scale)):
        return "takes no factors"
    if grads.bias is not None and grads.bias.dtype not in TYPE_CODES:
        return "needs biases of 16 or 32 bits"
    rows = (epilogue.preact, grads.preact) if grads.postact is None else (epilogue.preact, grads.preact, grads.postact)
    return _scales_refusal(epilogue.scales) or _rows_refusal(problem, rows)


def _scales_refusal(scales: Tensor | None) -> str | None:
    if scales is None or (scales.dtype in TYPE_CODES and scales.is_contiguous()):
        return None
    return "needs dense scales of 16 or 32 bits"


def _rows_refusal(problem: GroupedGemm, buffers: tuple[Tensor, ...]) -> str | None:
    """Rows are read and written in pieces of 16 bytes."""
    dtype = problem.a.dtype
    for rows in buffers:
        if rows.dtype != dtype or rows.shape[-1] % 8:
            return "needs hidden rows of a multiple of 8 columns, in the dtype of the operands"
        if not rows.is_contiguous() or rows.storage_offset() % 8:
            return "needs rows that are dense and aligned to 16 bytes"
    return None


def forward(
    problem: GroupedGemm, epilogue: Activate, weights: Addressing, biases: Addressing, variant: int = -1
) -> None:
    """``out`` = activation of the product, times the scales; the product itself into ``preact``, if there is one.

    Args:
        weights: where ``problem.b`` lies.
        biases: where ``problem.bias`` lies.
        variant: a tile variant instead of the cost model's, for tests and tuning.
    """
    p, bias, ((bias_address, pitch, _), bias_addresses), postact = problem, problem.bias, biases, first(problem.out)
    bias_scale = None if bias is None or p.bias_scale is None else p.bias_scale.to(torch.float32)
    bias_type = 0 if bias is None else TYPE_CODES[first(bias).dtype]
    workspace = p.a.new_empty(workspace_bytes(p.groups), dtype=torch.uint8)
    compiled().linear_activation(
        *_head(p, epilogue.spec, postact.shape[-1], p.mnk[1], weights),
        *(bias_address, bias_type, pitch, bias_addresses, address(bias_scale), *scale_arguments(epilogue.scales)),
        *(address(epilogue.preact), postact.data_ptr(), workspace.data_ptr(), variant),
    )


def backward(problem: GroupedGemm, epilogue: ActivateBackward, weights: Addressing, variant: int = -1) -> None:
    """From the product, the gradient of the hidden rows, and ``preact``: what ``grads`` holds tensors for."""
    p, columns, library, grads = problem, problem.mnk[1], compiled(), epilogue.grads
    bias_columns, bias_type = (0, 0) if grads.bias is None else (grads.bias.shape[1], TYPE_CODES[grads.bias.dtype])
    size = library.backward_workspace_bytes(p.groups, p.rows, columns, grads.scales is not None, bias_columns)
    workspace = p.a.new_empty(size, dtype=torch.uint8)
    library.linear_activation_backward(
        *_head(p, epilogue.spec, columns, columns, weights),
        *(*scale_arguments(epilogue.scales), epilogue.preact.data_ptr()),
        *(grads.preact.data_ptr(), address(grads.scales), address(grads.postact)),
        *(address(grads.bias), bias_type, workspace.data_ptr(), variant),
    )


def _head(p: GroupedGemm, spec: ActivationSpec, columns: int, n: int, weights: Addressing) -> tuple[Any, ...]:
    """What both directions begin with: the activation, the stream, the product, its operands and groups."""
    device, sizes = p.a.get_device(), p.split_sizes
    where = device, stream(device), int(p.layout is Layout.NN)
    product = TYPE_CODES[p.a.dtype], p.groups, p.rows, n, p.a.shape[1], p.a.data_ptr(), p.a.stride(0)
    groups = sizes.data_ptr(), sizes.dtype == torch.int64
    return *curve_arguments(spec, columns), *where, *product, *weights[0], weights[1], *groups
