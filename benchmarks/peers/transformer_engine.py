"""TransformerEngine: the sequence of its fusible ops that Megatron-Core builds for experts."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor, nn

from ..contestant import Contestant, leaf
from ..problem import Problem
from .peer import Peer


def contestant(problem: Problem) -> Contestant:
    """GroupedLinear, ScaledSwiGLU, GroupedLinear, with one weight parameter per expert."""
    ops = import_module("transformer_engine.pytorch.ops")
    groups, columns, features = problem.w1.shape
    form = {"bias": False, "device": problem.x.device, "dtype": problem.x.dtype}
    fc1 = ops.GroupedLinear(groups, features, columns, **form)
    fc2 = ops.GroupedLinear(groups, columns // 2, features, **form)
    for op, weights in ((fc1, problem.w1), (fc2, problem.w2)):
        for i, weight in enumerate(weights):
            setattr(op, f"weight{i}", nn.Parameter(weight))
    model = ops.Sequential(fc1, ops.ScaledSwiGLU(), fc2)
    x, scales, sizes = leaf(problem.x), leaf(problem.scales), problem.split_sizes
    parameters = [getattr(op, f"weight{i}") for op in (fc1, fc2) for i in range(groups)]

    def forward() -> Tensor:
        y: Tensor = model(x, sizes, scales, sizes)
        return y

    return Contestant(forward, (x, scales, *parameters), problem.dy)


PEER = Peer(
    "transformer_engine",
    "transformer_engine.pytorch",
    "Ampere or newer, `pip install transformer-engine[pytorch]`",
    contestant,
    experts_forward=None,  # its ops own their weights, one for each expert
    capability=(8, 0),
    dtypes=(torch.bfloat16, torch.float16, torch.float32),
)
