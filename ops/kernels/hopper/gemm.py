"""Our own Hopper kernels (``csrc/``): one launch for all groups, split sizes on the device, no copies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architecture import assumed
from ..extension import TYPE_CODES, address, compiled, device_refusal, stream, workspace_bytes
from ..problems.gemm import Activate, GroupedGemm, Layout, Matrices, OperandPair, RowSlots, addresses, first
from ..problems.independent import Independent
from . import epilogue
from .epilogue import Addressing

NAME = "hopper"
MAX_GROUPS = 4096
MAX_ROWS = 2**30 - 1

epilogue_refusal, slower_epilogue = epilogue.refusal, epilogue.slower

LAYOUTS = {Layout.NT: 0, Layout.NN: 1, Layout.TN: 2}


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    p, a, out = problem, problem.a, first(problem.out)
    if (why := operands_refusal(a, first(p.b), out, p.groups)) is not None:
        return why
    if p.rows > MAX_ROWS:
        return f"takes at most {MAX_ROWS} rows, got {p.rows}"
    if a.shape[-1] % 8 or out.shape[-1] % 8:
        return f"needs features that are multiples of 8, got {a.shape[-1]} and {out.shape[-1]}"
    if p.split_sizes.dtype not in (torch.int32, torch.int64) or not p.split_sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    return _factor_refusal(p) or _alignment_refusal(p)


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
    if not a.is_cuda:
        return f"needs a CUDA device, got {a.device.type}"
    if (why := device_refusal(a.get_device())) is not None:
        return why
    if a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype:
        return f"needs bfloat16 or float16 operands, got {a.dtype} and {b.dtype}"
    if out.dtype not in (a.dtype, torch.float32):
        return f"gives {a.dtype} or float32, not {out.dtype}"
    if not 1 <= groups <= MAX_GROUPS:
        return f"takes 1 to {MAX_GROUPS} groups, got {groups}"
    return None


def configuration(problem: GroupedGemm) -> str:
    """The product, and what is chosen for it, in words: tile, cluster, stages, blocks, order of the tasks.

    Empty for a device that is only assumed: the choice depends on what the device says of itself.
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
        LAYOUTS[p.layout], *types, p.a.get_device(), p.groups, p.rows, *sizes, affine, epilogue.second_depth(p)
    )
    return f"{p}: {chosen}"


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``, and what its epilogue gives."""
    ending = problem.epilogue
    if ending is None:
        _run_product(problem)
    elif type(ending) is Activate:
        epilogue.forward(
            problem,
            ending,
            addressing(problem.b),
            NO_MATRICES if problem.bias is None else bias_addressing(problem.bias),
        )
    else:
        epilogue.backward(problem, ending, addressing(problem.b))


def stores_to_slots(problem: GroupedGemm) -> bool:
    """Whether the product has a kernel whose rows go to slots, so that ``out`` stays as it is."""
    p = problem
    without_more = p.epilogue is None and p.second is None and p.alpha is None and p.beta is None
    return without_more and p.layout is Layout.NT and p.a.dtype == first(p.out).dtype == torch.bfloat16


def _run_to_slots(p: GroupedGemm, slots: RowSlots) -> None:
    bias_scale, row_scale = as_float32(p.bias_scale), as_float32(p.row_scale)
    workspace = p.a.new_empty(workspace_bytes(p.groups), dtype=torch.uint8)
    compiled().gemm_to_slots(
        **epilogue.product_fields(p, p.mnk[1], addressing(p.b)),
        **slots.arguments(),
        **bias_fields(p.bias, bias_scale),
        row_scale=address(row_scale),
        workspace=workspace.data_ptr(),
    )


def _run_product(p: GroupedGemm) -> None:
    if p.slots is not None and stores_to_slots(p):
        return _run_to_slots(p, p.slots)
    alpha, alphas = (1.0, None) if p.alpha is None else one_or_each(p.alpha, p.groups)
    beta, betas = (1.0, None) if p.beta is None else one_or_each(p.beta, p.groups)
    launch(
        p.layout,
        p.a,
        p.b,
        p.out,
        p.split_sizes,
        accumulate=p.beta is not None and (betas is not None or beta != 0),
        beta=beta,
        betas=betas,
        bias=p.bias,
        bias_scale=p.bias_scale,
        row_scale=p.row_scale,
        alpha=alpha,
        alphas=alphas,
        fresh=p.fresh,
        second=p.second,
        tail_unspecified=p.tail_unspecified,
        independent=p.independent,
    )


def launch(
    layout: Layout,
    a: Tensor,
    b: Matrices,
    out: Matrices,
    sizes: Tensor,
    *,
    accumulate: bool = False,
    beta: float = 1.0,
    betas: Tensor | None = None,
    bias: Matrices | None = None,
    bias_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    alpha: float = 1.0,
    alphas: Tensor | None = None,
    variant: int = -1,
    dynamic: bool = True,
    fresh: bool = False,
    second: OperandPair | None = None,
    tail_unspecified: bool = False,
    independent: Independent | None = None,
) -> None:
    """One launch on the current stream: ``out = row_scale * (alpha * a b + bias_scale * bias)``.

    Args:
        accumulate: add ``beta`` times what stands in ``out``.
        alphas, betas: fp32 [E], instead of ``alpha`` and ``beta``.
        variant: a tile variant instead of the cost model's, for tests and tuning.
        dynamic: whether tasks are handed out on demand; a static schedule gives the same bits, slower.
        fresh: nobody has seen ``out``, so its version stays; a tail becomes zero, unless it is ``tail_unspecified``.
        second: operands whose product is added to that of ``a`` and ``b``.
        independent: products of which this is one; it takes its workspace from them.
    """
    addressings = addressing(b), addressing(out), NO_MATRICES if bias is None else bias_addressing(bias)
    zero_tail = fresh and not tail_unspecified and layout is not Layout.TN
    workspace, others = NO_WORKSPACE, {"variant": variant, "zero_tail": zero_tail, **epilogue.second_fields(second)}
    if dynamic or any(anywhere for _, anywhere in addressings):
        workspace = _workspace(layout, a, first(out), sizes.shape[0], variant, independent)
        others |= workspace.fields
    _launch(
        layout,
        a,
        first(out),
        sizes,
        weights=addressings[0],
        outputs=addressings[1],
        biases=addressings[2],
        bias_type=0 if bias is None else TYPE_CODES[first(bias).dtype],
        bias_scale=as_float32(bias_scale),
        row_scale=as_float32(row_scale),
        alphas=alphas,
        betas=betas,
        workspace=workspace,
        alpha=alpha,
        beta=beta,
        accumulate=accumulate,
        others=others,
    )
    if not fresh:
        torch.autograd.graph.increment_version(out)


class Workspace(NamedTuple):
    """What a product needs for itself, and what the launch is told of those beside it."""

    memory: Tensor | None
    address: int
    nbytes: int
    fields: dict[str, Any]


NO_WORKSPACE = Workspace(None, 0, 0, {})


def _workspace(
    layout: Layout, a: Tensor, out: Tensor, groups: int, variant: int, independent: Independent | None
) -> Workspace:
    nbytes = least = workspace_bytes(groups)
    if layout is Layout.TN:
        (tokens, m), codes = a.shape, (LAYOUTS[layout], TYPE_CODES[out.dtype])
        nbytes = compiled().gemm_workspace_bytes(*codes, groups, tokens, m, out.shape[-1], variant)
    turn = None if independent is None or nbytes > least else independent.next_turn(a, nbytes)
    if turn is not None:
        return Workspace(None, turn.workspace, nbytes, turn.fields)
    memory = a.new_empty(nbytes, dtype=torch.uint8)
    return Workspace(memory, memory.data_ptr(), nbytes, {})


def _launch(
    layout: Layout,
    a: Tensor,
    product: Tensor,
    sizes: Tensor,
    *,
    weights: Addressing,
    outputs: Addressing,
    biases: Addressing,
    bias_type: int,
    bias_scale: Tensor | None,
    row_scale: Tensor | None,
    alphas: Tensor | None,
    betas: Tensor | None,
    workspace: Workspace,
    alpha: float,
    beta: float,
    accumulate: bool,
    others: dict[str, Any],
) -> None:
    (tokens, features), device, is_wgrad = a.shape, a.get_device(), layout is Layout.TN
    compiled().grouped_gemm(
        layout=LAYOUTS[layout],
        operand=TYPE_CODES[a.dtype],
        device=device,
        stream=stream(device),
        groups=sizes.shape[0],
        tokens=tokens,
        n=product.shape[-1],
        k=0 if is_wgrad else features,
        a=a.data_ptr(),
        a_pitch=a.stride(0),
        b=weights[0][0],
        b_pitch=weights[0][1],
        b_group=weights[0][2],
        b_addresses=weights[1],
        sizes=sizes.data_ptr(),
        int64_sizes=sizes.dtype == torch.int64,
        output=TYPE_CODES[product.dtype],
        m=features if is_wgrad else 0,
        out=outputs[0][0],
        out_pitch=outputs[0][1],
        out_group=outputs[0][2],
        out_addresses=outputs[1],
        accumulate=accumulate,
        bias=biases[0][0],
        bias_type=bias_type,
        bias_pitch=biases[0][1],
        bias_addresses=biases[1],
        bias_scale=0 if bias_scale is None else bias_scale.data_ptr(),
        row_scale=0 if row_scale is None else row_scale.data_ptr(),
        alphas=0 if alphas is None else alphas.data_ptr(),
        alpha=alpha,
        betas=0 if betas is None else betas.data_ptr(),
        beta=beta,
        workspace=workspace.address,
        workspace_bytes=workspace.nbytes,
        **others,
    )


NO_MATRICES: Addressing = (0, 0, 0), []


def addressing(matrices: Matrices) -> Addressing:
    """Where they lie."""
    if isinstance(matrices, Tensor):
        strides = matrices.stride()
        return (matrices.data_ptr(), strides[-2], strides[0] if len(strides) == 3 else 0), []
    return (0, matrices[0].stride(0), 0), [matrix.data_ptr() for matrix in matrices]


def bias_addressing(bias: Matrices) -> Addressing:
    return ((bias.data_ptr(), bias.stride(0), 0), []) if isinstance(bias, Tensor) else addressing(bias)


def bias_fields(bias: Matrices | None, bias_scale: Tensor | None) -> dict[str, Any]:
    """The fields of a bias, whose scales are float32."""
    (data, pitch, _), listed = NO_MATRICES if bias is None else bias_addressing(bias)
    return {
        "bias": data,
        "bias_type": 0 if bias is None else TYPE_CODES[first(bias).dtype],
        "bias_pitch": pitch,
        "bias_addresses": listed,
        "bias_scale": address(bias_scale),
    }


def as_float32(factors: Tensor | None) -> Tensor | None:
    """Factors of rows or groups as kernels read them."""
    return None if factors is None else factors.to(torch.float32)


def one_or_each(factor: float | Tensor | None, groups: int) -> tuple[float, Tensor | None]:
    """A number for all groups, or one for each; 1 for None."""
    if isinstance(factor, Tensor) and (factor.is_cuda or factor.dim()):
        return 1.0, factor.to(torch.float32).expand(groups).contiguous()
    return 1.0 if factor is None else float(factor), None


def _factor_refusal(p: GroupedGemm) -> str | None:
    """Factors and biases that the kernels do not take."""
    for name, factor in (("an alpha", p.alpha), ("a beta", p.beta)):
        if isinstance(factor, Tensor) and factor.shape not in ((p.groups,), ()):
            return f"needs {name} for each group or one for all, got shape {list(factor.shape)}"
        if isinstance(factor, Tensor) and factor.dim() and factor.device != p.a.device:
            return f"needs {name} on {p.a.device}, got {factor.device}"
    if p.layout is Layout.TN and (p.row_scale is not None or p.bias_scale is not None):
        return "has no rows to scale in a weight gradient"
    if p.bias is not None and first(p.bias).dtype not in TYPE_CODES:
        return f"needs a bias of 16 or 32 bits, got {first(p.bias).dtype}"
    return None


def _alignment_refusal(p: GroupedGemm) -> str | None:
    """Rows must be dense and begin at multiples of 16 bytes; the matrices of several groups have the same strides."""
    for name, matrices in (("a", p.a), ("b", p.b), ("out", p.out)):
        tensor = first(matrices)
        strides, step = tensor.stride(), 16 // tensor.element_size()
        if strides[-1] != 1 or any(stride % step for stride in strides[:-1]) or reduce(or_, addresses(matrices)) % 16:
            return f"needs rows of {name} that are dense and aligned to 16 bytes, got strides {list(strides)}"
        if not isinstance(matrices, Tensor) and any(matrix.stride() != strides for matrix in matrices):
            return f"needs matrices of {name} with the same strides"
    for name, vectors in (("bias", p.bias), ("bias_scale", p.bias_scale), ("row_scale", p.row_scale)):
        if vectors is not None and any(vector.stride(-1) != 1 for vector in _listed(vectors)):
            return f"needs a dense {name}"
        if vectors is not None and first(vectors).device != p.a.device:
            return f"needs a {name} on {p.a.device}, got {first(vectors).device}"
    return None


def _listed(matrices: Matrices) -> Sequence[Tensor]:
    return (matrices,) if isinstance(matrices, Tensor) else matrices
