"""Our own Hopper kernels (``csrc/``): one launch for all groups, split sizes on the device, no copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..activations import ActivationSpec
from . import separate
from .extension import TYPE_CODES, device_refusal
from .pointwise import ActivationGrads
from .problem import GroupedGemm, Layout, Matrices, address, first

NAME = "hopper"
MAX_GROUPS = 512

_LAYOUTS = {Layout.NT: 0, Layout.NN: 1, Layout.TN: 2}


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    p, a, b, out = problem, problem.a, first(problem.b), first(problem.out)
    if not a.is_cuda:
        return f"needs a CUDA device, got {a.device.type}"
    if (why := device_refusal(a.get_device())) is not None:
        return why
    if a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype:
        return f"needs bfloat16 or float16 operands, got {a.dtype} and {b.dtype}"
    if out.dtype not in (a.dtype, torch.float32):
        return f"gives {a.dtype} or float32, not {out.dtype}"
    if not 1 <= p.groups <= MAX_GROUPS:
        return f"takes 1 to {MAX_GROUPS} groups, got {p.groups}"
    if a.shape[-1] % 8 or out.shape[-1] % 8:
        return f"needs features that are multiples of 8, got {a.shape[-1]} and {out.shape[-1]}"
    if p.split_sizes.dtype not in (torch.int32, torch.int64) or not p.split_sizes.is_contiguous():
        return "needs contiguous int32 or int64 split sizes"
    return _factor_refusal(p) or _place_refusal(p)


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``."""
    p = problem
    alphas = p.alpha.float() if isinstance(p.alpha, Tensor) else None
    launch(
        p.layout,
        p.a,
        p.b,
        p.out,
        p.split_sizes,
        accumulate=p.beta is not None,
        bias=p.bias,
        bias_scale=p.bias_scale,
        row_scale=p.row_scale,
        alpha=p.alpha if isinstance(p.alpha, (int, float)) else 1.0,
        alphas=alphas,
    )


def linear_activation(
    problem: GroupedGemm, spec: ActivationSpec, scales: Tensor | None, pre: Tensor | None, hidden: Tensor
) -> None:
    """The product, then the activation."""
    separate.forward(run, problem, spec, scales, pre, hidden)


def linear_activation_backward(
    problem: GroupedGemm, pre: Tensor, spec: ActivationSpec, scales: Tensor | None, out: ActivationGrads
) -> None:
    """The product, then the activation's backward."""
    separate.backward(run, problem, pre, spec, scales, out)


def launch(
    layout: Layout,
    a: Tensor,
    b: Matrices,
    out: Matrices,
    sizes: Tensor | None,
    *,
    starts: Tensor | None = None,
    accumulate: bool = False,
    bias: Matrices | None = None,
    bias_scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    alpha: float = 1.0,
    alphas: Tensor | None = None,
    variant: int = -1,
    dynamic: bool = True,
) -> None:
    """One launch on the current stream: ``out = row_scale * (alpha * a b + bias_scale * bias)``, or ``out +=`` that.

    Args:
        sizes: [E], of groups that follow one another; with ``starts`` [E], of groups anywhere in the rows.
        starts: alone, [E + 1] offsets.
        alphas: fp32 [E], instead of ``alpha``.
        variant: a tile variant instead of the cost model's, for tests and tuning.
        dynamic: whether tasks are handed out on demand; a static schedule gives the same bits, slower.
    """
    from .. import _C

    index = sizes if sizes is not None else starts
    assert index is not None
    device = a.get_device()
    bias_scale = None if bias_scale is None else bias_scale.to(torch.float32)
    row_scale = None if row_scale is None else row_scale.to(torch.float32)
    workspace = a.new_empty(_C.WORKSPACE_BYTES, dtype=torch.uint8) if dynamic else None
    _C.grouped_gemm(
        *(_LAYOUTS[layout], TYPE_CODES[a.dtype], TYPE_CODES[first(out).dtype]),
        *(device, torch.cuda.current_stream(device).cuda_stream),
        *_extents(layout, a, b, out),
        *(a.data_ptr(), a.stride(0)),
        *_place(b),
        *_place(out),
        sizes=_address(sizes),
        starts=_address(starts),
        wide=index.dtype == torch.int64,
        accumulate=accumulate,
        bias=0 if bias is None else first(bias).data_ptr(),
        bias_type=0 if bias is None else TYPE_CODES[first(bias).dtype],
        bias_pitch=0 if bias is None else _place(bias).pitch,
        row_scale=_address(row_scale),
        bias_scale=_address(bias_scale),
        alphas=_address(alphas),
        alpha=alpha,
        workspace=_address(workspace),
        variant=variant,
    )
    for tensor in [out] if isinstance(out, Tensor) else out:
        torch.autograd.graph.increment_version(tensor)


class _Extents(NamedTuple):
    """Of the products of all groups; ``m`` for TN only, where ``k`` is the group's own."""

    groups: int
    tokens: int
    m: int
    n: int
    k: int


class _Place(NamedTuple):
    """Where matrices lie, in elements; ``group_stride`` is from one group's to the next's."""

    address: int
    pitch: int
    group_stride: int


def _extents(layout: Layout, a: Tensor, b: Matrices, out: Matrices) -> _Extents:
    if layout is Layout.TN:
        return _Extents(len(out), a.shape[0], a.shape[1], first(b).shape[1], 0)
    return _Extents(len(b), a.shape[0], 0, first(out).shape[1], a.shape[1])


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _place(matrices: Matrices) -> _Place:
    """Of one tensor, or of several at equal distances."""
    if isinstance(matrices, Tensor):
        return _Place(matrices.data_ptr(), matrices.stride(-2), matrices.stride(0) if matrices.dim() == 3 else 0)
    head, distance = matrices[0], _distance(matrices)
    assert distance is not None
    return _Place(head.data_ptr(), head.stride(0) if head.dim() == 2 else distance, distance)


def _distance(matrices: Sequence[Tensor]) -> int | None:
    """From one matrix to the next, in elements; None if not always the same, or backwards."""
    addresses = [address(matrix) for matrix in matrices]
    head = matrices[0]
    step = addresses[1] - addresses[0] if len(addresses) > 1 else head.numel() * head.element_size()
    if step <= 0 or any(addresses[0] + i * step != there for i, there in enumerate(addresses)):
        return None
    return step // head.element_size()


def _factor_refusal(p: GroupedGemm) -> str | None:
    """Factors and biases that the kernels do not take."""
    if p.beta is not None and not (isinstance(p.beta, (int, float)) and p.beta == 1):
        return "adds to what stands in the result once or not at all, got another beta"
    if p.layout is Layout.TN and not (p.alpha is None or (isinstance(p.alpha, (int, float)) and p.alpha == 1)):
        return "has no alpha for weight gradients"
    if isinstance(p.alpha, Tensor) and p.alpha.shape != (p.groups,):
        return f"needs an alpha for each group, got shape {list(p.alpha.shape)}"
    if p.bias is not None and first(p.bias).dtype not in TYPE_CODES:
        return f"needs a bias of 16 or 32 bits, got {first(p.bias).dtype}"
    return None


def _place_refusal(p: GroupedGemm) -> str | None:
    """Rows must be dense and begin at multiples of 16 bytes; matrices of several groups, at equal distances."""
    for name, matrices in (("a", p.a), ("b", p.b), ("out", p.out)):
        tensor = first(matrices)
        step = 16 // tensor.element_size()
        if tensor.stride(-1) != 1 or any(stride % step for stride in tensor.stride()[:-1]) or address(tensor) % 16:
            return f"needs rows of {name} that are dense and aligned to 16 bytes, got strides {list(tensor.stride())}"
        if not isinstance(matrices, Tensor):
            distance = _distance(matrices)
            if distance is None or distance % step:
                return f"needs the matrices of {name} at equal distances in memory"
    for name, vectors in (("bias", p.bias), ("bias_scale", p.bias_scale), ("row_scale", p.row_scale)):
        if vectors is not None and first(vectors).stride(-1) != 1:
            return f"needs a dense {name}"
    if p.bias is not None and not isinstance(p.bias, Tensor) and _distance(p.bias) is None:
        return "needs the biases at equal distances in memory"
    return None
