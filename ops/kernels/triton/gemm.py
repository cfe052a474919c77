"""Grouped GEMMs in Triton: one launch for all groups, split sizes on the device, epilogues of any program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....fuser.replay.capture import Capture, refuse
from ...values.switches import active_switches
from ..problems.gemm import ALL_GROUPS, Activate, GroupedGemm, Layout, factor_refusal, first
from ..pytorch import wrong_sizes
from ..pytorch.float32 import allows_tf32
from .installed import DTYPES, NAME, groups_refusal, launches_on, report_word, triton_refusal

MOST_ROWS_OF_FLOAT32 = 64
"""The rows of a group, on average, up to which a product NT in float32 is faster than PyTorch's."""

__all__ = ["NAME", "epilogue_refusal", "name_of", "refusal", "run"]


def refusal(problem: GroupedGemm) -> str | None:
    """Why the problem cannot be run here; None: it can."""
    if problem.first_group is not None:
        return ALL_GROUPS
    p, a, b, out = problem, problem.a, first(problem.b), first(problem.out)
    if (why := triton_refusal(a)) is not None:
        return why
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        return f"needs operands of one of bfloat16, float16 and float32, got {a.dtype} and {b.dtype}"
    if out.dtype not in (a.dtype, torch.float32):
        return f"gives {a.dtype} or float32, not {out.dtype}"
    why = groups_refusal(p.split_sizes, p.rows) or _factor_refusal(p) or _matrices_refusal(p)
    return why or _far_rows_refusal(p) or _slower(p)


def _slower(p: GroupedGemm) -> str | None:
    """Why PyTorch's product is faster; None: it is not, or this backend is asked for by name.

    Without tensor cores, an NT product transposes each tile of the weights.
    """
    is_slow = p.layout is Layout.NT and p.a.dtype == torch.float32 and not allows_tf32()
    if is_slow and p.rows > MOST_ROWS_OF_FLOAT32 * p.groups and active_switches().backend != NAME:
        return f"is slower than PyTorch for more than {MOST_ROWS_OF_FLOAT32} float32 rows a group without TF32"
    return None


def _factor_refusal(p: GroupedGemm) -> str | None:
    """Factors and biases that the kernels do not take."""
    if (why := factor_refusal(p)) is not None:
        return why
    for name, vectors in (("bias", p.bias), ("bias_scale", p.bias_scale), ("row_scale", p.row_scale)):
        if vectors is not None and (first(vectors).dtype not in DTYPES or first(vectors).device != p.a.device):
            return f"needs a {name} of 16 or 32 bits on {p.a.device}, got {first(vectors).dtype}"
    return None


def _matrices_refusal(p: GroupedGemm) -> str | None:
    """Rows must be dense; the matrices of several groups have the same strides."""
    of_groups = "out" if p.layout is Layout.TN else "b"
    for name, matrices in (("a", p.a), ("b", p.b), ("out", p.out)):
        tensor = first(matrices)
        if tensor.stride(-1) != 1 or 0 in tensor.shape[1:]:
            return f"needs rows of {name} that are dense and not empty, got strides {list(tensor.stride())}"
        if name == of_groups and tensor.shape[-2] * tensor.stride(-2) >= 2**31:
            return f"needs matrices of {name} of fewer than 2^31 elements, got shape {list(tensor.shape)}"
        if not isinstance(matrices, Tensor) and any(matrix.stride() != tensor.stride() for matrix in matrices):
            return f"needs matrices of {name} with the same strides"
    return None


def _far_rows_refusal(p: GroupedGemm) -> str | None:
    """Offsets of rows inside a tile, of up to 256, have 32 bits."""
    of_groups = "out" if p.layout is Layout.TN else "b"
    for name, matrices in (("a", p.a), ("b", p.b), ("out", p.out)):
        strides = first(matrices).stride()
        if name != of_groups and strides[-2] >= 2**23:
            return f"needs rows of {name} that are fewer than 2^23 elements apart, got strides {list(strides)}"
    return None


def epilogue_refusal(problem: GroupedGemm) -> str | None:
    """Why the epilogue follows as a kernel of its own; None: it need not."""
    epilogue = problem.epilogue
    if epilogue is None:
        return None
    if any(extra is not None for extra in (problem.alpha, problem.beta, problem.row_scale)):
        return "takes no factor but the scales of the bias"
    program, block = epilogue.spec.function, epilogue.spec.block
    if len(program.rows) > 1 or program.constants:
        return "takes one number of a row, and no constants"
    buffers: Sequence[Tensor | None] = (first(problem.out), epilogue.scales)
    if isinstance(epilogue, Activate):
        features = first(problem.out).shape[-1]
        buffers = (*buffers, epilogue.preact)
    else:
        features = problem.mnk[1]
        buffers = (*buffers, epilogue.preact, *epilogue.grads[:3])
    if any(each is not None and not (each.is_contiguous() and each.dtype in DTYPES) for each in buffers):
        return "needs dense rows and scales of 16 or 32 bits"
    if epilogue.spec.gated and features % (block or features):
        return f"needs whole blocks of {block} columns, got {features}"
    return None


def name_of(problem: GroupedGemm) -> str:
    """The name of the kernel in ``explain``."""
    epilogue = problem.epilogue
    if epilogue is None:
        return NAME
    return f"{NAME} ({'activation' if epilogue.spec.program is None else epilogue.spec.name} in the epilogue)"


def look_at_sizes(split_sizes: Tensor, rows: int) -> None:
    """Raises the error that an earlier call has reported, and checks these sizes if no kernel of this call does."""
    if report_word(split_sizes):
        Capture.find_library().raise_wrong_sizes(split_sizes.get_device())
    else:
        wrong_sizes.look_at(split_sizes, rows)


def run(problem: GroupedGemm) -> None:
    """Computes ``problem.out``, and what its epilogue gives."""
    from .device import launch

    look_at_sizes(problem.split_sizes, problem.rows)
    if problem.a.dtype == torch.float32:
        refuse("PyTorch's setting of TF32 is asked at every call")
    with launches_on(problem.a):
        launch.run(problem)
    if not problem.fresh:
        torch.autograd.graph.increment_version(problem.out)
