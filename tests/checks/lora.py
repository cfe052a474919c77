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
    slots = []
    for slot in range(ids.shape[1]):
        up, down = (m[ids[:, slot]] for m in matrices)
        gate, value = torch.einsum("th,tfh->tf", x, up).chunk(2, -1)
        rows = torch.einsum("tf,thf->th", F.silu(gate) * value, down)
        slots.append(rows * weights[:, slot, None])
    return torch.stack(slots).sum(0)


def check_trains(device: str, ranks: tuple[int, int], strict: bool = True) -> None:
    """Output and gradients; if strict, all by our kernels."""
    torch.manual_seed(0)
    model = layer(device, ranks)
    x = torch.randn(TOKENS, HIDDEN, device=device).bfloat16().requires_grad_()
    ids = torch.rand(TOKENS, E, device=device).argsort(-1)[:, :2]
    weights = torch.rand(TOKENS, 2, device=device).requires_grad_()
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
