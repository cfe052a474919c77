"""Our experts between other engines' exchanges, which stand-ins make: the recipes in ``examples``; see ``ep_world``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import other_engines
import torch
from ep_cases import batch_for, counts_of
from ep_shared_memory import sum_of_slots
from ep_world import H, World, part, same, trained, whole
from torch import distributed as dist

from fusible import Sequential, ep
from fusible.examples import deepep_experts, nccl_ep_experts
from fusible.ops.kernels.doors import routing


def experts_of(group: ep.Group) -> Sequential:
    """The layer of this rank without the ends."""
    return Sequential(*list(part(group))[1:-1])


def check(world: World, made: Callable[[ep.Group], Any]) -> None:
    """Steps with other ids have the bits of one process, which sums as GPUs do."""
    group = world.group(dtype=torch.bfloat16)
    layer = made(group)
    for seed, counts in enumerate((counts_of(world), (0,) * world.size, (13,) * world.size)):
        batch = batch_for(group, counts, seed)
        layer.zero_grad()
        came = trained(layer, batch.of(world.rank))
        with patch.object(routing, "_sum_of_slots", sum_of_slots):
            expected = trained(whole(group), batch).of(batch.counts, group)
        same(came, expected)


def deepep(world: World) -> None:
    def layer(group: ep.Group) -> Any:
        s = group.settings
        buffer = deepep_experts.buffer_for(dist.group.WORLD, s.max_tokens, H, s.top_k)
        return deepep_experts.DeepEPExperts(buffer, s.num_experts, experts_of(group))

    with patch.dict(sys.modules, {"deep_ep": other_engines.deep_ep()}):
        check(world, layer)


def nccl_ep(world: World) -> None:
    def layer(group: ep.Group) -> Any:
        s = group.settings
        sizes = s.num_experts, s.max_tokens, H, s.top_k, s.worst(world.size)
        return nccl_ep_experts.NCCLExperts(nccl_ep_experts.buffer_for(dist.group.WORLD, *sizes), experts_of(group))

    engine: Any = type(sys)("transformer_engine.pytorch")
    engine.ep = other_engines.transformer_engine_ep()
    names = {"transformer_engine": type(sys)("transformer_engine"), engine.__name__: engine}
    with patch.dict(sys.modules, names):
        check(world, layer)


CASES: list[Callable[[World], None]] = [deepep, nccl_ep]
