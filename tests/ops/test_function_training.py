"""Experts with a function of a user's are trained for 200 steps: inside the kernels as well as beside them."""

from __future__ import annotations

import pytest
import torch
from checks.device import needs_hopper
from checks.functions import telu
from models import steps
from torch import Tensor

from fusible import GroupedLinear, Pointwise, Scale, Sequential, config

E, K, H, T, STEPS = 4, 64, 96, 320, 200
SIZES = [120, 0, 71, 117]
FUSIONS = frozenset({"GroupedMLP", "GroupedLinearGLU"})
TINY = torch.finfo(torch.bfloat16).eps / 16


def clamped_telu(gate: Tensor, up: Tensor) -> Tensor:
    return telu(gate.clamp(max=7.0)) * (up + 1)


def experts(device: str, dtype: torch.dtype) -> Sequential:
    """The same numbers in every dtype."""
    torch.manual_seed(0)
    linears = [GroupedLinear(E, *shape, dtype=torch.bfloat16) for shape in ((K, 2 * H), (H, K))]
    return Sequential(linears[0], Pointwise(clamped_telu, halves="concat"), Scale(), linears[1]).to(device, dtype)


def losses(device: str, dtype: torch.dtype, fused: bool) -> Tensor:
    """The losses of each step, with momentum on master copies in float32 or wider."""
    model, wide = experts(device, dtype), torch.promote_types(dtype, torch.float32)
    x, target = torch.randn(2, T, K).bfloat16().to(device, dtype)
    scales, sizes = torch.rand(T).to(device, wide), torch.tensor(SIZES, device=device)
    masters = [parameter.detach().to(wide, copy=True) for parameter in model.parameters()]
    optimizer, results = torch.optim.SGD(masters, lr=0.5, momentum=0.9), []
    with config(disable_fusions=frozenset() if fused else FUSIONS):
        for _ in range(STEPS):
            valid = model(x, split_sizes=sizes, scales=scales)[: sum(SIZES)].to(wide)
            loss = (valid - target[: sum(SIZES)].to(wide)).square().mean()
            grads = torch.autograd.grad(loss, [*model.parameters()])
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.to(wide)
            optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(model.parameters(), masters, strict=True):
                    parameter.copy_(master)
            results.append(loss.detach().double())
        assert ("GroupedMLP" in steps(model)) is fused
    return torch.stack(results).cpu()


def check(device: str) -> None:
    truth = losses(device, torch.float64, fused=False)
    fused, apart = (losses(device, torch.bfloat16, fused) for fused in (True, False))
    assert truth[-1] < 0.5 * truth[0]
    of_fused, of_apart = ((each / truth - 1).abs().max() for each in (fused, apart))
    assert of_fused <= 2 * of_apart + TINY, f"{of_fused} inside the kernels, {of_apart} beside them"


def test_training_on_a_cpu() -> None:
    check("cpu")


@pytest.mark.cuda
@needs_hopper
def test_training_inside_the_kernels() -> None:
    check("cuda")
