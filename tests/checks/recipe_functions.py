"""Experts with functions of users under every recipe, fused and op by op, on a GPU, its emulation, or a CPU."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fusible
from fusible import GroupedLinear, Pointwise
from fusible.ops.values.activation_spec import Interleaved

from .recipes import MULTIPLIED, Results, assert_close, assert_equal, tensor

__all__ = ["Results", "assert_close", "assert_equal"]

RECIPES = {
    "Float8Block": MULTIPLIED["block"],
    "Float8Block bfloat16 wgrad": MULTIPLIED["block bfloat16 wgrad"],
    "Float8Row": MULTIPLIED["row"],
    "Float8Tensor": MULTIPLIED["tensor"],
    "MXFP8": MULTIPLIED["MXFP8"],
    "NVFP4": MULTIPLIED["NVFP4"],
}
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], int]] = {
    "plain": (lambda x: x * torch.tanh(x) + 0.25, 1),
    "glu": (lambda g, u: g.clamp(max=1.5) * torch.sigmoid(1.702 * g) * (u + 1), 2),
    "plain of a row": (lambda x, scales: torch.tanh(x * scales) + 0.25, 1),
    "glu of a row": (lambda g, u, scales: torch.tanh(g * scales) * u, 2),
    "plain of a column": (lambda x, beta: torch.tanh(x * beta) + 0.5 * beta, 1),
    "glu of a column": (lambda g, u, beta: g * torch.sigmoid(g * beta) * u, 2),
    "glu of a row and a column": (lambda g, u, scales, beta: torch.tanh(g * scales) * u * beta, 2),
    "glu with a constant": (lambda g, u, cap: g.clamp(max=cap) * u, 2),
}
"""With the number of halves; ``scales`` are numbers of the row, ``beta`` one of a column, ``cap`` a constant."""
WIDE: dict[str, Any] = {"hidden": 256}
"""Of a size that all kernels take: gate and up have whole blocks of scales."""
MODES = ["train", "frozen", "checkpoint"]
FUSIONS = {"GroupedMLP", "GroupedLinearGLU", "RoutedMLP", "PointwiseChain"}


def swiglu(g: Tensor, u: Tensor) -> Tensor:
    """The built-in SwiGLU, as a user would write it."""
    return F.silu(g) * u


def op_of(name: str, groups: int, columns: int, halves: str | Interleaved = "concat", dtype: Any = None) -> Pointwise:
    """A function of :data:`FUNCTIONS` as an op."""
    function, count = FUNCTIONS[name]
    start = {"beta": tensor(groups, columns, seed=7, dtype=dtype or torch.float32).abs() + 0.5}
    return Pointwise(
        function,
        halves=halves if count == 2 else None,
        columns=start if name.endswith("a column") else {},
        constants={"cap": 0.75} if "constant" in name else {},
    )


class Experts:
    """GroupedLinear, a function, GroupedLinear; the last rows are of no expert, and NaN."""

    groups, features = 3, 160

    def __init__(
        self,
        device: str,
        function: str,
        recipe: str,
        *,
        sizes: tuple[int, ...] = (70, 0, 200),
        rows: int = 300,
        second: nn.Module | None = None,
        halves: str | Interleaved = "concat",
        scale: bool = False,
        bias: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        hidden: int = 144,
    ) -> None:
        torch.manual_seed(1)
        self.device, self.rows, self.dtype, self.hidden = device, rows, dtype, hidden
        self.act = op_of(function, self.groups, self.hidden, halves)
        options: dict[str, Any] = {"recipe": RECIPES[recipe], "bias": bias, "dtype": dtype}
        width = self.hidden * FUNCTIONS[function][1]
        self.fc1 = GroupedLinear(self.groups, self.features, width, **options)
        self.fc2 = GroupedLinear(self.groups, self.hidden, self.features, **options)
        has_row = "of a row" in function or second is not None or scale
        self.by_row = {"scales": self._number(5)} if has_row else {}
        self.sizes = torch.tensor(sizes)
        self.model = self.build(second, scale).to(device)

    def build(self, second: nn.Module | None, scale: bool) -> fusible.Sequential:
        before, after = [fusible.Scale()] if scale else [], [] if second is None else [second]
        return fusible.Sequential(self.fc1, self.act, *before, self.fc2, *after)

    def _number(self, seed: int) -> Tensor:
        return tensor(self.rows, seed=seed, dtype=torch.float32).abs() + 0.5

    def inputs(self) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """The rows; what has a gradient, and what has none, by keyword."""
        x = tensor(self.rows, self.features, dtype=self.dtype)
        if self.device == "cpu":
            x[int(self.sizes.sum()) :] = torch.nan
        leaves = {name: each.to(self.device).requires_grad_() for name, each in self.by_row.items()}
        return x.to(self.device), leaves, {"split_sizes": self.sizes.to(self.device)}

    def explained(self) -> fusible.Explanation:
        x, leaves, others = self.inputs()
        return self.model.explain(x.requires_grad_(), **leaves, **others)

    def steps(self) -> list[str]:
        return [step.name for step in self.explained().steps]

    def explanation(self) -> str:
        """In words, of both directions."""
        return str(self.explained())

    def parts(self) -> dict[str, nn.Module]:
        return {"fc1": self.fc1, "act": self.act, "fc2": self.fc2}

    def results(
        self,
        mode: str,
        *,
        fused: bool = True,
        without: Collection[str] = (),
        frozen: tuple[str, ...] = (),
        compiled: bool = False,
    ) -> Results:
        """The output and the gradients, on the host; of rows of experts, those that exist.

        Args:
            mode: one of :data:`MODES`; frozen weights leave those of what a call is given.
            fused: without it all fusions are disabled, with it those of ``without``.
            frozen: how the names of what is frozen begin.
        """
        parameters = {f"{p}.{n}": value for p, part in self.parts().items() for n, value in part.named_parameters()}
        frozen = ("fc1", "fc2") if mode == "frozen" else frozen
        for name, parameter in parameters.items():
            parameter.grad = None
            parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
        x, leaves, others = self.inputs()
        x.requires_grad_("x" not in frozen)
        apart = set(without) if fused else FUSIONS
        model = torch.compile(self.model, backend="aot_eager", fullgraph=True) if compiled else self.model
        with fusible.config(disable_fusions=apart) if apart else nullcontext():
            if mode == "checkpoint":
                y = checkpoint(lambda rows: model(rows, **leaves, **others), x, use_reentrant=False)
            else:
                y = model(x, **leaves, **others)
            y.backward(self.dy(y))
        found = {"x": x.grad, **{name: leaf.grad for name, leaf in leaves.items()}}
        found |= {name: parameter.grad for name, parameter in parameters.items()}
        return {"y": self.used(y.detach()), **{n: self.used(g) for n, g in found.items() if g is not None}}

    def dy(self, y: Tensor) -> Tensor:
        dy = tensor(*y.shape, seed=2, dtype=self.dtype)
        dy[int(self.sizes.sum()) :] = 0
        return dy.to(self.device)

    def used(self, result: Tensor) -> Tensor:
        of_rows = result.shape[0] == self.rows and result.dim() < 3
        return (result[: int(self.sizes.sum())] if of_rows else result).cpu()


class FirstHalf(Experts):
    """Without the second linear."""

    def build(self, second: nn.Module | None, scale: bool) -> fusible.Sequential:
        return fusible.Sequential(self.fc1, self.act, *([fusible.Scale()] if scale else []))


class Chain(Experts):
    """With a bias of all rows in front of the function, and another behind it."""

    def build(self, second: nn.Module | None, scale: bool) -> fusible.Sequential:
        self.bias, self.other = fusible.Bias(2 * self.hidden), fusible.Bias(self.hidden)
        return fusible.Sequential(self.fc1, self.bias, self.act, self.other, self.fc2)

    def parts(self) -> dict[str, nn.Module]:
        return {**super().parts(), "bias": self.bias, "other": self.other}


class Routed(Experts):
    """From tokens to tokens, each of which goes to two experts."""

    def __init__(self, device: str, function: str, recipe: str, **options: Any) -> None:
        super().__init__(device, function, recipe, rows=110, **options)
        generator = torch.Generator().manual_seed(3)
        self.index = torch.randint(0, self.groups, (self.rows, 2), generator=generator)
        self.weights = tensor(self.rows, 2, seed=4, dtype=torch.float32).abs()

    def build(self, second: nn.Module | None, scale: bool) -> fusible.Sequential:
        after = [] if self.by_row else [fusible.Scale()]  # the dispatch gives the function its number of the row
        return fusible.Sequential(
            fusible.Dispatch(self.groups), self.fc1, self.act, self.fc2, *after, fusible.Combine()
        )

    def inputs(self) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        x = tensor(self.rows, self.features, dtype=self.dtype).to(self.device)
        leaves = {"top_k_weights": self.weights.to(self.device).requires_grad_()}
        return x, leaves, {"top_k_index": self.index.to(self.device)}

    def dy(self, y: Tensor) -> Tensor:
        return tensor(*y.shape, seed=2, dtype=self.dtype).to(self.device)

    def used(self, result: Tensor) -> Tensor:
        return result.cpu()


def check_in_kernels_that_quantise(layer: Experts) -> None:
    """The function is the epilogue of the first product, and its backward quantises what it computes."""
    (step,) = layer.explained().steps
    assert step.backward is not None
    assert "hopper (e4m3, activation in the epilogue)" in step.kernel, step.kernel
    assert any("activation backward rows+columns+hidden columns" in line for line in step.backward.configurations)


def check_against_ops(layer: Experts, mode: str) -> None:
    """All that is no sum over rows or columns has the same bits, where rounding is the same."""
    fused, apart = layer.results(mode), layer.results(mode, fused=False)
    assert fused.keys() == apart.keys()
    same_rounding = not isinstance(layer, Chain) and not (isinstance(layer, Routed) and not layer.by_row)
    for name in fused:
        if same_rounding and not name.startswith(("scales", "act", "top_k")):
            assert torch.equal(fused[name], apart[name]), name
    assert_close(fused, apart, 5e-3 if same_rounding else 0.08)
