"""Checks of products of runs of groups: of weights too large to be decoded whole, on a GPU or its emulation."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import fusible
from fusible import Combine, Dispatch, GroupedLinear, GroupedLoRA, Scale, Sequential, SwiGLU, config
from fusible.fuser.contract import tracing
from fusible.ops import kernels
from fusible.ops.formats.weight_only import WeightOnly
from fusible.ops.kernels import Layout, OperandPair
from fusible.ops.kernels.doors import decoding
from fusible.ops.kernels.problems.gemm import GroupedGemm

TAIL = 5


def check_product(device: str, layout: Layout, sizes: list[int], step: int, n: int = 72, k: int = 64) -> None:
    """Runs write their own rows alone, and together the bits of one product; bias and adapters are of all groups."""
    torch.manual_seed(0)
    rows, groups, split_sizes = sum(sizes), len(sizes), torch.tensor(sizes, device=device)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def transposed(*shape: int) -> Tensor:
        return random(*shape) if layout is Layout.NT else random(*shape).mT.contiguous()

    a, b = random(rows + TAIL, k), transposed(groups, n, k)
    second = OperandPair(random(rows + TAIL, 16), transposed(groups, n, 16))
    scale = torch.rand(rows + TAIL, device=device)
    terms = kernels.Terms(bias=random(groups, n), row_scale=scale, second=second)
    out = torch.full((rows + TAIL, n), torch.nan, dtype=torch.bfloat16, device=device)
    with config(backend="hopper"):
        want = kernels.grouped_gemm(layout, a, b, split_sizes, terms=terms)
        assert isinstance(want, Tensor)
        for first in reversed(range(0, groups, step)):
            before = out.clone()
            of_run = b[first : first + step].clone()
            kernels.grouped_gemm(layout, a, of_run, split_sizes, out=out, terms=terms, first_group=first)
            start, end = sum(sizes[:first]), sum(sizes[: first + step])
            assert torch.equal(out[start:end], want[start:end])
            out[start:end] = before[start:end]
            assert torch.equal(out.isnan(), before.isnan())
            out[start:end] = want[start:end]
        fresh = kernels.grouped_gemm(layout, a, b[:step].clone(), split_sizes, terms=terms, first_group=0)
    assert isinstance(fresh, Tensor)
    assert not fresh[rows:].any()
    assert torch.equal(out[:rows], want[:rows])


def check_layer(device: str, format: WeightOnly, experts: int, ids: Tensor, bytes_of_run: int) -> None:
    """Output and gradients of a layer whose weights are decoded in runs: the bits of one run.

    But those of the routing weights, which an activation apart sums in another order, in float32.
    """
    torch.manual_seed(0)
    up, down = (GroupedLoRA(experts, *each, 8, device=device, dtype=torch.bfloat16) for each in ((64, 256), (128, 64)))
    for linear in (up, down):
        linear.weight.requires_grad_(False)
        torch.nn.init.normal_(linear.lora_b, std=0.1)
    model = fusible.quantize_(Sequential(Dispatch(experts), up, SwiGLU(), down, Scale(), Combine()), format)
    x, dy = torch.randn(2, ids.shape[0], 64, device=device).bfloat16()
    weights = torch.rand(ids.shape, device=device)

    def results() -> tuple[list[Tensor], int]:
        leaves = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        with config(backend="hopper", strict=True):
            y = model(leaves[0], top_k_index=ids, top_k_weights=leaves[1])
            trained = [p for p in model.parameters() if p.requires_grad]
            grads = torch.autograd.grad(y, [*leaves, *trained], dy)
            with tracing.recording() as seen:
                model(leaves[0], top_k_index=ids, top_k_weights=leaves[1])
        return [y, *grads], sum("decode" in call.kernel for call in seen.calls)

    one, decoded_once = results()
    with patch.object(decoding, "RUN_BYTES", bytes_of_run):
        runs, decoded_in_runs = results()
    assert decoded_once == 2 < decoded_in_runs
    torch.testing.assert_close(runs.pop(2), one.pop(2), rtol=1e-5, atol=1e-5)
    for a, b in zip(one, runs, strict=True):
        assert torch.equal(a, b)


def check_linears(device: str, format: WeightOnly, sizes: list[int], bytes_of_run: int) -> None:
    """Output and gradient of x of experts without adapters: the bits of one run."""
    torch.manual_seed(0)
    experts = len(sizes)
    model = Sequential(GroupedLinear(experts, 64, 256), SwiGLU(), GroupedLinear(experts, 128, 64))
    model = fusible.quantize_(model.to(device, torch.bfloat16), format)
    x, dy = torch.randn(2, sum(sizes), 64, device=device).bfloat16()
    split_sizes = torch.tensor(sizes, device=device)

    def results() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        with config(backend="hopper", strict=True):
            y = model(leaf, split_sizes=split_sizes)
            return y.detach(), torch.autograd.grad(y, leaf, dy)[0]

    one, seen = results(), []
    with patch.object(decoding, "RUN_BYTES", bytes_of_run), patch.object(kernels.products, "run", noted(seen)):
        runs = results()
    assert {problem.first_group for problem in seen} > {0}
    for a, b in zip(one, runs, strict=True):
        assert torch.equal(a, b)


def noted(seen: list[GroupedGemm]) -> Any:
    """The function that runs products, which also notes them."""
    run = kernels.products.run

    def noting(problem: GroupedGemm, finish: bool = True) -> Any:
        seen.append(problem)
        return run(problem, finish)

    return noting
