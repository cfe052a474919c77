"""FSDP2 gathers weights in e4m3: the bits of a gather in 16 bits, from half of its bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fusible import (
    MXFP8,
    ArgumentError,
    Combine,
    Delayed,
    Dispatch,
    Float8Block,
    Float8Row,
    Float8Tensor,
    GroupedLinear,
    Scale,
    Sequential,
    SwiGLU,
    gather_quantized,
    quantize_,
    same_weights,
)

E, K, N = 2, 160, 136  # blocks that end before 128 x 128
SIZES = torch.tensor([2, 3])
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One process that shards over itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def experts(dtype: torch.dtype = torch.bfloat16, recipe: Any = Float8Block(), **options: Any) -> Sequential:
    torch.manual_seed(0)
    options = {"dtype": dtype, "recipe": recipe, **options}
    return Sequential(GroupedLinear(E, K, 2 * N, **options), SwiGLU(), GroupedLinear(E, N, K, **options))


def pair(mesh: DeviceMesh, dtype: torch.dtype = torch.bfloat16, frozen: bool = False, **how: Any) -> list[Sequential]:
    """The same experts, gathered in 16 bits and in e4m3."""
    both = experts(dtype), gather_quantized(experts(dtype))
    for model in both:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (frozen and "weight" in name))
    return [fully_shard(model, mesh=mesh, **how) for model in both]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("frozen", [False, True])
def test_training_has_the_bits_of_a_gather_in_16_bits(
    mesh: DeviceMesh, dtype: torch.dtype, reshard: bool, frozen: bool
) -> None:
    both = pair(mesh, dtype, frozen, mp_policy=BF16, reshard_after_forward=reshard)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in both]
    for step in range(3):
        for microbatch in range(2):
            torch.manual_seed(10 * step + microbatch)
            rows = torch.randn(5, K).bfloat16()
            x = [rows.clone().requires_grad_() for _ in both]
            results = [model(each, split_sizes=SIZES) for model, each in zip(both, x, strict=True)]
            for y in results:
                y.float().square().sum().backward()
            assert torch.equal(*results)
            assert torch.equal(x[0].grad, x[1].grad)
        for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
            if expected.requires_grad:
                assert torch.equal(parameter.grad.full_tensor(), expected.grad.full_tensor())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for expected, parameter in zip(*(model.parameters() for model in both), strict=True):
        assert torch.equal(parameter.full_tensor(), expected.full_tensor())
        assert parameter.dtype == dtype
    with torch.no_grad():
        assert torch.equal(*(model(rows, split_sizes=SIZES) for model in both))
