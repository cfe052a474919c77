"""Our own Hopper kernels (``csrc/``): one launch for all groups, split sizes on the device, no copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architecture import assumed
from ..extension import TYPE_CODES, address, compiled, hardware_refusal, workspace_bytes
from ..problems.gemm import Activate, GroupedGemm, Layout, Matrices, RowSlots, addresses, factor_refusal, first
from . import epilogue
from .operands import (
    LAYOUTS,
    addressing,
    as_float32,
    bias_fields,
    one_or_each,
    product_fields,
    second_depth,
    second_fields,
)

NAME = "hopper"
MAX_GROUPS = 4096
MAX_ROWS = 2**30 - 1


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    p, a, out = problem, problem.a, first(problem.out)
    if (why := operands_refusal(a, first(p.b), out, p.groups)) is not None:
        return why
    if p.rows > MAX_ROWS:
        return f"takes at most {MAX_ROWS} rows, got {p.rows}"
    if (why := features_refusal(a.shape[-1], out.shape[-1])) is not None:
        return why
    if p.split_sizes.dtype not in (torch.int32, torch.int64) or not p.split_sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    why = _factor_refusal(p) or layout_refusal(a=p.a, b=p.b, out=p.out)
    return why or vectors_refusal(a.device, bias=p.bias, bias_scale=p.bias_scale, row_scale=p.row_scale)


def second_refusal(problem: GroupedGemm) -> str | None:
    """Why a product that this backend takes cannot go on with its second pair of operands; None: it can."""
    if problem.second is None:
        return None
    a, b = problem.second
    if not a.dtype == b.dtype == problem.a.dtype == first(problem.out).dtype:
        return "needs one dtype of both pairs of operands and the result"
    if a.shape[1] % 8:
        return f"needs a depth of the second pair that is a multiple of 8, got {a.shape[1]}"
    for name, tensor in (("second a", a), ("second b", b)):
        strides = tensor.stride()
        if strides[-1] != 1 or any(stride % 8 for stride in strides[:-1]) or addresses(tensor)[0] % 16:
            return f"needs rows of {name} that are dense and aligned to 16 bytes, got strides {list(strides)}"
    return None


def operands_refusal(a: Tensor, b: Tensor, out: Tensor, groups: int) -> str | None:
    """Why no kernel multiplies on this device, from and to these dtypes, or as many groups; None: some do."""
    if (why := hardware_refusal(a)) is not None:
        return why
    if a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype:
        return f"needs bfloat16 or float16 operands, got {a.dtype} and {b.dtype}"
    if out.dtype not in (a.dtype, torch.float32):
        return f"gives {a.dtype} or float32, not {out.dtype}"
    if not 1 <= groups <= MAX_GROUPS:
        return f"takes 1 to {MAX_GROUPS} groups, got {groups}"
    return None


def features_refusal(of_a: int, of_out: int) -> str | None:
    """Why no kernel multiplies rows with so many features to rows with so many others; None: one does."""
    return f"needs features that are multiples of 8, got {of_a} and {of_out}" if of_a % 8 or of_out % 8 else None


def configuration(problem: GroupedGemm) -> str:
    """A text of the product and its configuration: tile, cluster, stages, blocks, order of the tasks.

    Empty for an assumed device, as the choice depends on the device's properties.
    """
    if assumed() is not None:
        return ""
    if problem.epilogue is not None and epilogue.refusal(problem) is None:
        return epilogue.configuration(problem, problem.epilogue)
    p, (m, n, k) = problem, problem.mnk
    types = TYPE_CODES[p.a.dtype], TYPE_CODES[first(p.out).dtype]
    sizes = (m, n, 0) if p.layout is Layout.TN else (0, n, k)
    affine = any(extra is not None for extra in (p.alpha, p.bias, p.bias_scale, p.row_scale))
    chosen = compiled().grouped_gemm_config(
        LAYOUTS[p.layout], *types, p.a.get_device(), p.groups, p.rows, *sizes, affine, second_depth(p)
    )
    return f"{p}: {chosen}"


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``, and the results of its epilogue."""
    ending = problem.epilogue
    if problem.slots is not None and stores_to_slots(problem):
        _run_to_slots(problem, problem.slots)
    elif ending is None:
        launch(problem)
    elif type(ending) is Activate:
        epilogue.forward(problem, ending)
    else:
        epilogue.backward(problem, ending)


def stores_to_slots(problem: GroupedGemm) -> bool:
    """Whether the product has a kernel whose rows go to slots, so that ``out`` stays unchanged."""
    p = problem
    without_more = p.epilogue is None and p.second is None and p.alpha is None and p.beta is None
    return without_more and p.layout is Layout.NT and p.a.dtype == first(p.out).dtype == torch.bfloat16


def _run_to_slots(p: GroupedGemm, slots: RowSlots) -> None:
    bias_scale, row_scale = as_float32(p.bias_scale), as_float32(p.row_scale)
    workspace = p.a.new_empty(workspace_bytes(p.groups), dtype=torch.uint8)
    compiled().gemm_to_slots(
        **product_fields(p, p.mnk[1]),
        **slots.arguments(),
        **bias_fields(p.bias, bias_scale),
        row_scale=address(row_scale),
        workspace=workspace.data_ptr(),
    )


def launch(problem: GroupedGemm, variant: int = -1, dynamic: bool = True) -> None:
    """One launch on the current stream, of a product without an epilogue.

    A fresh ``out`` was just allocated, so its version stays, and its tail becomes zero unless it is unspecified.

    Args:
        variant: a tile variant instead of the cost model's, for tests and tuning.
        dynamic: whether tasks are handed out on demand; a static schedule gives the same bits, slower.
    """
    p, out, is_wgrad = problem, first(problem.out), problem.layout is Layout.TN
    (address_of_out, pitch, distance), outs = addressing(p.out)
    bias_scale, row_scale = as_float32(p.bias_scale), as_float32(p.row_scale)
    alpha, alphas = (1.0, None) if p.alpha is None else one_or_each(p.alpha, p.groups)
    beta, betas = (1.0, None) if p.beta is None else one_or_each(p.beta, p.groups)
    at_one_address = not dynamic and all([isinstance(each, Tensor | None) for each in (p.b, p.out, p.bias)])
    workspace = NO_WORKSPACE if at_one_address else _workspace(p, out, variant)
    compiled().grouped_gemm(
        **product_fields(p, out.shape[-1]),
        output=TYPE_CODES[out.dtype],
        m=p.a.shape[1] if is_wgrad else 0,
        out=address_of_out,
        out_pitch=pitch,
        out_group=distance,
        out_addresses=outs,
        accumulate=p.beta is not None and (betas is not None or beta != 0),
        **bias_fields(p.bias, bias_scale),
        row_scale=address(row_scale),
        alphas=address(alphas),
        alpha=alpha,
        betas=address(betas),
        beta=beta,
        workspace=workspace.address,
        variant=variant,
        workspace_bytes=workspace.nbytes,
        zero_tail=p.fresh and not p.tail_unspecified and not is_wgrad,
        **second_fields(p.second),
        **workspace.fields,
        **({} if p.first_group is None else {"first_group": p.first_group, "run_groups": len(p.b)}),
    )
    if not p.fresh:
        torch.autograd.graph.increment_version(p.out)


class Workspace(NamedTuple):
    """The workspace of a product, and the launch fields about the products beside it."""

    memory: Tensor | None
    address: int
    nbytes: int
    fields: dict[str, Any]


NO_WORKSPACE = Workspace(None, 0, 0, {})


def _workspace(p: GroupedGemm, out: Tensor, variant: int) -> Workspace:
    nbytes = least = workspace_bytes(p.groups)
    if p.layout is Layout.TN:
        (tokens, m), codes = p.a.shape, (LAYOUTS[p.layout], TYPE_CODES[out.dtype])
        nbytes = compiled().gemm_workspace_bytes(*codes, p.groups, tokens, m, out.shape[-1], variant)
    turn = None if p.independent is None or nbytes > least else p.independent.next_turn(p.a, nbytes)
    if turn is not None:
        return Workspace(None, turn.workspace, nbytes, turn.fields)
    memory = p.a.new_empty(nbytes, dtype=torch.uint8)
    return Workspace(memory, memory.data_ptr(), nbytes, {})


def _factor_refusal(p: GroupedGemm) -> str | None:
    """Factors and biases that the kernels do not take."""
    if (why := factor_refusal(p)) is not None:
        return why
    if p.bias is not None and first(p.bias).dtype not in TYPE_CODES:
        return f"needs a bias of 16 or 32 bits, got {first(p.bias).dtype}"
    return None


def layout_refusal(**operands: Matrices) -> str | None:
    """Rows must be dense and begin at multiples of 16 bytes; the matrices of several groups have the same strides."""
    for name, matrices in operands.items():
        tensor = first(matrices)
        strides, step = tensor.stride(), 16 // tensor.element_size()
        if strides[-1] != 1 or any(stride % step for stride in strides[:-1]) or reduce(or_, addresses(matrices)) % 16:
            return f"needs rows of {name} that are dense and aligned to 16 bytes, got strides {list(strides)}"
        if not isinstance(matrices, Tensor) and any(matrix.stride() != strides for matrix in matrices):
            return f"needs matrices of {name} with the same strides"
    return None


def vectors_refusal(device: torch.device, **factors: Matrices | None) -> str | None:
    """Biases and factors must be dense, and on this device."""
    for name, vectors in factors.items():
        if vectors is not None and any(vector.stride(-1) != 1 for vector in _listed(vectors)):
            return f"needs a dense {name}"
        if vectors is not None and first(vectors).device != device:
            return f"needs a {name} on {device}, got {first(vectors).device}"
    return None


def _listed(matrices: Matrices) -> Sequence[Tensor]:
    return (matrices,) if isinstance(matrices, Tensor) else matrices
