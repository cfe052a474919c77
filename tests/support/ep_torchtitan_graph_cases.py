"""torchtitan's CUDA graphs of a step with our dispatcher, on GPUs that read one another's memory; see ``ep_world``."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from absent import triton_if_missing
from ep_torchtitan_cases import OUR_EXPERTS, OWNED, SYMMETRIC, TOKENS, TOP_K, D, layer_on
from ep_world import World
from torch import Tensor

with triton_if_missing(), warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchtitan.distributed.cudagraph import CUDAGraphWrapper, cudagraph_teardown


def batch(world: World, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens of this rank with scores and experts, and how many of them each expert has."""
    generator = torch.Generator("cpu").manual_seed(10 * seed + world.rank)
    experts = OWNED * world.size
    x = torch.randn(1, TOKENS, D, generator=generator, device="cpu")
    scores, ids = torch.rand(1, TOKENS, experts, generator=generator, device="cpu").topk(TOP_K)
    counts = torch.bincount(ids.flatten(), minlength=experts)
    return x.bfloat16().cuda(), scores.cuda(), ids.cuda(), counts.cuda()


def steps_are_captured(world: World) -> None:
    """A replay with other tokens and other experts gives what an eager step of the same layer gives."""
    layer = layer_on(world, [OUR_EXPERTS, SYMMETRIC]).bfloat16()

    def step(x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        x = x.detach().requires_grad_()
        y = layer(x, scores, ids, counts)
        y.square().sum().backward()
        return torch.cat([y.detach().flatten(), x.grad.flatten(), *[p.grad.flatten() for p in layer.parameters()]])

    captured = CUDAGraphWrapper(step, batch(world, 0))
    for seed in range(6):
        came = captured(*batch(world, seed)).clone()
        assert torch.equal(came, step(*batch(world, seed))), seed
    assert captured._graph is not None
    layer.token_dispatcher._ops(torch.empty(TOKENS, D, dtype=torch.bfloat16)).group.check(synchronize=True)
    cudagraph_teardown()


CASES: list[Callable[[World], None]] = [steps_are_captured]
