"""Our own Hopper kernel for groups of any shapes: nothing waits for the device, which alone knows them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...values.grouped_tensor import GroupedTensor
from ..extension import TYPE_CODES, address, compiled, stream
from ..problems.ragged import RaggedGemm
from .gemm import operands_refusal
from .operands import LAYOUTS, one_or_each


def refusal(problem: RaggedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    p = problem
    if (why := operands_refusal(p.a.data, p.b.data, p.out.data, p.groups)) is not None:
        return why
    if p.bias is not None and p.bias.dtype not in TYPE_CODES:
        return f"needs a bias of 16 or 32 bits, got {p.bias.dtype}"
    return _factor_refusal(p)


def run(problem: RaggedGemm) -> None:
    """Computes ``problem.out``."""
    p, out, device = problem, problem.out.data, problem.a.data.get_device()
    alpha, alphas = one_or_each(p.alpha, p.groups)
    beta, betas = one_or_each(p.beta, p.groups)
    accumulate = p.beta is not None and (betas is not None or beta != 0)
    bias = None if p.bias is None else p.bias.contiguous()
    workspace = out.new_empty(_workspace_bytes(p.groups), dtype=torch.uint8)
    (of_a, dims_of_a), (of_b, dims_of_b) = _packed("a", p.a), _packed("b", p.b)  # the dims live until the launch
    compiled().ragged_gemm(
        layout=LAYOUTS[p.layout],
        operand=TYPE_CODES[p.a.dtype],
        output=TYPE_CODES[out.dtype],
        device=device,
        stream=stream(device),
        groups=p.groups,
        **of_a,
        **of_b,
        out=out.data_ptr(),
        out_elements=out.numel(),
        zero_tail=p.fresh,
        accumulate=accumulate,
        bias=address(bias),
        bias_type=0 if bias is None else TYPE_CODES[bias.dtype],
        bias_pitch=0 if bias is None else bias.shape[1],
        alphas=address(alphas),
        alpha=alpha,
        betas=address(betas),
        beta=beta,
        workspace=workspace.data_ptr(),
    )
    del dims_of_a, dims_of_b
    if not p.fresh:
        torch.autograd.graph.increment_version(out)


@cache
def _workspace_bytes(groups: int) -> int:
    return int(compiled().ragged_workspace_bytes(groups))


def _packed(name: str, t: GroupedTensor) -> tuple[dict[str, int], tuple[Tensor | None, Tensor | None]]:
    """The matrices as the extension wants them, and the tensors of dims to which that points."""
    rows, columns = _dims(f"{name}_rows", t.rows), _dims(f"{name}_columns", t.columns)
    data = {name: t.data.data_ptr(), f"{name}_elements": t.data.numel()}
    return {**data, **rows[0], **columns[0]}, (rows[1], columns[1])


def _dims(name: str, dims: Tensor | int) -> tuple[dict[str, int], Tensor | None]:
    """A number for all groups, or one for each on the device, and the tensor that holds these."""
    if isinstance(dims, int):
        return {name: 0, f"{name}_int64": 0, f"{name}_uniform": dims}, None
    dims = dims.contiguous()
    return {name: dims.data_ptr(), f"{name}_int64": dims.dtype == torch.int64, f"{name}_uniform": 0}, dims


def _factor_refusal(p: RaggedGemm) -> str | None:
    for name, factor in (("an alpha", p.alpha), ("a beta", p.beta)):
        if isinstance(factor, Tensor) and factor.dim() and factor.device != p.a.device:
            return f"needs {name} on {p.a.device}, got {factor.device}"
    return None
