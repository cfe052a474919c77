"""The routed experts of a layer on a CPU, for calls without gradients that are so short that the host decides.

The same operations on the same numbers as one kernel after the other, with nothing in between.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...activation_spec import ActivationSpec
from ..problem import GroupedGemm, Layout
from . import activation, grouped_mm_cpu, loop


def refusal(x: Tensor, top_k_index: Tensor, up: Tensor, down: Tensor) -> str | None:
    """Why the layer runs kernel by kernel; None: it does not."""
    rows = top_k_index.numel()
    if x.device.type != "cpu" or x.is_cuda:
        return f"needs a CPU, got {x.device.type}"
    if not 0 < rows <= loop.SPAN:
        return f"takes 1 to {loop.SPAN} rows, got {rows}"
    if x.stride(-1) != 1 or up.stride(-1) != 1 or down.stride(-1) != 1:
        return "needs dense rows"
    return None


def run(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up: Tensor,
    down: Tensor,
    spec: ActivationSpec,
    transposed: bool,
) -> Tensor:
    """[T, H]: the weighted sum of what its experts make of each token."""
    slots, groups = top_k_index.shape[1], up.shape[0]
    ids, slot_of_row = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(groups, dtype=ids.dtype), right=True, out_int32=True)
    rows = x.index_select(0, slot_of_row if slots == 1 else slot_of_row // slots)
    loop.keep_freed_memory()
    preact = _product(rows, up, ends, transposed)
    postact = preact.new_empty(preact.shape[0], spec.out_features(preact.shape[1]))
    activation.forward(preact, spec, None, postact)
    y = _product(postact, down, ends, transposed)
    scales = top_k_weights.reshape(-1).index_select(0, slot_of_row)
    y.mul_(scales.to(torch.promote_types(scales.dtype, torch.float32)).unsqueeze(-1))
    end = int(ends[-1])
    if end < y.shape[0]:
        y[end:].zero_()
    return torch.nn.functional.embedding_bag(slot_of_row.argsort().view(-1, slots), y, mode="sum")


def _product(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """By group; rows past the last may be anything."""
    layout = Layout.NN if transposed else Layout.NT
    out = rows.new_empty(rows.shape[0], weight.shape[-1 if transposed else -2])
    problem = GroupedGemm(layout, rows, weight, ends, out, fresh=True)
    if grouped_mm_cpu.refusal(problem) is None:
        return grouped_mm_cpu.product(problem, ends)
    loop.multiply_until(problem, ends.tolist())
    return out
