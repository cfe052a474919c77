"""Checks of routed experts with low-rank adapters on our kernels, on a GPU or its emulation: against float64."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import Combine, Dispatch, GroupedLoRA, Scale, Sequential, SwiGLU, config

E, HIDDEN, FFN, TOKENS = 5, 64, 72, 40


def layer(device: str, ranks: tuple[int, int]) -> Sequential:
    """In bfloat16, its weights frozen."""
    sizes = (HIDDEN, 2 * FFN, ranks[0]), (FFN, HIDDEN, ranks[1])
    fc1, fc2 = (GroupedLoRA(E, *each, bias=False, device=device, dtype=torch.bfloat16) for each in sizes)
    for name, parameter in [*fc1.named_parameters(), *fc2.named_parameters()]:
        torch.nn.init.normal_(parameter, std=0.15)
        parameter.requires_grad_("lora" in name)
    return Sequential(Dispatch(E), fc1, SwiGLU(), fc2, Scale(), Combine())


def exact(parameters: list[dict[str, Tensor]], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Slot by slot, in plain torch."""
    matrices = [p["weight"] + (p["lora_b"] @ p["lora_a"] if "lora_a" in p else 0) for p in parameters]
    biases = [p.get("bias", p["weight"].new_zeros(p["weight"].shape[:2])) for p in parameters]
    slots = []
    for of_slot, weight in zip(ids.mT, weights.mT, strict=True):
        up, down = (m[of_slot] for m in matrices)
        gate, value = (torch.einsum("th,tfh->tf", x, up) + biases[0][of_slot]).chunk(2, -1)
        rows = torch.einsum("tf,thf->th", F.silu(gate) * value, down) + biases[1][of_slot]
        slots.append(rows * weight[:, None])
    return torch.stack(slots).sum(0)


def check_trains(
    device: str, ranks: tuple[int, int], strict: bool = True, weights_dtype: torch.dtype = torch.float32
) -> None:
    """Output and gradients; if strict, all by our kernels."""
    torch.manual_seed(0)
    model = layer(device, ranks)
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16().requires_grad_()
    ids = torch.rand(TOKENS, E, device=device).argsort(-1)[:, :2]
    weights = torch.rand(TOKENS, 2, device=device, dtype=weights_dtype).requires_grad_()
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with config(backend="hopper" if strict else "auto", strict=strict):
        y = model(x, top_k_index=ids, top_k_weights=weights)
        found = torch.autograd.grad(y.float().square().sum(), [x, weights, *adapters])
    assert [step.name for step in model.explain().steps] == ["RoutedLoRA"]

    wide = {t: t.detach().double().requires_grad_() for t in (x, weights, *model.parameters())}
    parameters = [{name: wide[p] for name, p in model[i].named_parameters()} for i in (1, 3)]
    expected = exact(parameters, wide[x], ids, wide[weights])
    truth = torch.autograd.grad(expected.square().sum(), [wide[t] for t in (x, weights, *adapters)])
    for result, true in zip([y, *found], [expected, *truth], strict=True):
        assert (result.double() - true).norm() < 0.02 * true.norm()


def linear(device: str, factors: torch.dtype) -> GroupedLoRA:
    """In bfloat16 but for its factors, its weight frozen."""
    op = GroupedLoRA(E, HIDDEN, FFN, 8, bias=False, device=device, dtype=torch.bfloat16)
    for name, parameter in op.named_parameters():
        torch.nn.init.normal_(parameter, std=0.15)
        parameter.requires_grad_("lora" in name)
        if "lora" in name:
            parameter.data = parameter.data.to(factors)
    return op


def check_linear(device: str, factors: torch.dtype, frozen: str = "none") -> None:
    """A linear alone, with a tail: output and gradients."""
    torch.manual_seed(0)
    op, sizes = linear(device, factors), torch.tensor([3, 0, 17, 1, 40], device=device)
    adapters = [parameter.requires_grad_(name != frozen) for name, parameter in op.named_parameters() if "lora" in name]
    x, groups = torch.randn(70, HIDDEN, device=device).bfloat16().requires_grad_(), torch.arange(E, device=device)
    wanted = [t for t in (x, *adapters) if t.requires_grad]
    dy = torch.randn(70, FFN, device=device).bfloat16()
    with config(backend="hopper"):
        y = op(x, split_sizes=sizes)
        found = torch.autograd.grad(y, wanted, dy)

    wide = {t: t.detach().double().requires_grad_() for t in (x, *op.parameters())}
    matrices = wide[op.weight] + wide[op.lora_b] @ wide[op.lora_a]
    of_rows = matrices[groups.repeat_interleave(sizes)]
    expected = F.pad(torch.einsum("th,tfh->tf", wide[x][:61], of_rows), (0, 0, 0, 9))
    truth = torch.autograd.grad(expected, [wide[t] for t in wanted], dy.double())
    for result, true in zip([y, *found], [expected, *truth], strict=True):
        assert result.dtype == (factors if result.dim() == 3 else torch.bfloat16)
        assert (result.double() - true).norm() < 0.02 * true.norm()
