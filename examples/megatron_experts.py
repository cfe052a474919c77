"""The experts of Megatron-Core's grouped MLP: its calling order, buffers, ``main_grad``, and delayed weight gradients.

Run it with ``python -m fusible.examples.megatron_experts``; Megatron is not needed. For Megatron itself there is
``fusible.integrations.transformer_engine``: see docs/megatron.md. It builds the ops once, not as
children of the layer, and attaches the parameters that its optimizer knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusible
from fusible import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY


class GroupedMLP(nn.Module):
    """A grouped MLP on rows sorted by expert, with int64 sizes, float32 probabilities and the dispatcher's buffers."""

    def __init__(self, experts: int, hidden: int, ffn_hidden: int) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(experts, 2 * ffn_hidden, hidden) / hidden**0.5)
        self.weight2 = nn.Parameter(torch.randn(experts, hidden, ffn_hidden) / ffn_hidden**0.5)
        for parameter in self.parameters():  # as Megatron's distributed optimizer prepares them
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        options: dict[str, Any] = {"bias": False, "accumulate_into_main_grad": True, "delay_wgrad_compute": True}
        fc1 = fusible.GroupedLinear(experts, hidden, 2 * ffn_hidden, device="meta", **options)
        fc2 = fusible.GroupedLinear(experts, ffn_hidden, hidden, device="meta", **options)
        fc1.register_parameter("weight", self.weight1)
        fc2.register_parameter("weight", self.weight2)
        self._ops = (fusible.Sequential(fc1, fusible.ScaledSwiGLU(), fc2),)  # in a tuple: no child, no second name

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        output_buffer: Tensor | None = None,
        grad_input_buffer: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Maps rows [M, H] to [M, H], and returns no bias."""
        op_kwargs: dict[Any, dict[str, Any]] = {}
        if grad_input_buffer is not None:
            op_kwargs[0] = {GRAD_INPUT_BUFFER_KEY: grad_input_buffer}
        if output_buffer is not None:
            op_kwargs[-1] = {OUTPUT_BUFFER_KEY: output_buffer}
        extras = (tokens_per_expert, permuted_probs, tokens_per_expert)  # of fc1, of the activation, of fc2
        return self._ops[0](permuted_local_hidden_states, *extras, op_kwargs=op_kwargs), None

    def backward_dw(self) -> None:
        """Computes the weight gradients, the second linear's first; they may overlap with communication."""
        for i in (2, 0):
            self._ops[0][i].backward_dw()  # type: ignore[operator]


def reference(layer: GroupedMLP, x: Tensor, sizes: Tensor, probs: Tensor) -> Tensor:
    """The same in plain torch, expert by expert."""
    parts, start = [], 0
    for i, size in enumerate(sizes.tolist()):
        rows = slice(start, start + size)
        gate, up = (x[rows] @ layer.weight1[i].mT).chunk(2, -1)
        parts.append((F.silu(gate) * up * probs[rows].unsqueeze(1)) @ layer.weight2[i].mT)
        start += size
    return torch.cat(parts)


def main() -> None:
    """Runs one micro-batch as Megatron does, and checks it against plain torch."""
    torch.manual_seed(0)
    layer, sizes = GroupedMLP(experts=4, hidden=32, ffn_hidden=64), torch.tensor([6, 0, 9, 5])
    x, probs = torch.randn(20, 32).requires_grad_(), torch.rand(20).requires_grad_()
    output, grad_input, dy = torch.empty(20, 32), torch.empty(20, 32), torch.randn(20, 32)
    reduced: list[str] = []
    for i, name in ((0, "fc1"), (2, "fc2")):
        op: Any = layer._ops[0][i]
        assert op.weight.skip_backward_post_hook  # so that Megatron registers its hook here, not with autograd
        assert op.need_backward_dw()  # whatever asks this while it sets up takes part in delayed gradients

        def reduce(name: str = name, weight: nn.Parameter = op.weight) -> None:
            assert weight.grad is not None  # a stand-in, which says that main_grad is complete
            weight.grad = None
            reduced.append(name)

        op.register_wgrad_accumulation_and_reduce_hooks(reduce)

    y, _ = layer(x, sizes, probs, output, grad_input)
    y.backward(dy)
    assert y.data_ptr() == output.data_ptr()
    assert x.grad is not None
    assert x.grad.data_ptr() == grad_input.data_ptr()
    main_grads: list[Tensor] = [p.main_grad for p in layer.parameters()]  # type: ignore[attr-defined]
    assert not any(main_grad.any() for main_grad in main_grads)  # nothing yet: they are delayed
    assert all(layer._ops[0][i].has_delayed_wgrad() for i in (0, 2))  # type: ignore[operator]
    layer.backward_dw()

    expected = reference(layer, x, sizes, probs)
    parameters = (x, probs, layer.weight1, layer.weight2)
    gradients = torch.autograd.grad(expected, parameters, dy)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close((x.grad, probs.grad, *main_grads), gradients)
    print(layer._ops[0].explain())
    print(f"main_grad holds the weight gradients; reduced: {', '.join(reduced)}")


if __name__ == "__main__":
    main()
