"""Checks of linears and experts under a recipe on our kernels, on a GPU or its emulation, against the definition."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fusible
from fusible import GroupedLinear
from fusible.fuser import replay
from fusible.ops.formats.recipe import Recipe

MULTIPLIED: dict[str, Recipe] = {  # by our own kernels, as bytes or exactly in 16 bits
    "block": fusible.Float8Block(),
    "block float32": fusible.Float8Block(scales="float32"),
    "block bfloat16 wgrad": fusible.Float8Block(wgrad="bfloat16"),
    "row": fusible.Float8Row(),
    "row float32": fusible.Float8Row(scales="float32"),
    "row fast": fusible.Float8Row(fast_accumulation=True),
    "row bfloat16 wgrad": fusible.Float8Row(wgrad="bfloat16"),
    "tensor": fusible.Float8Tensor(),
    "tensor bfloat16 wgrad": fusible.Float8Tensor(wgrad="bfloat16"),
    "delayed": fusible.Float8Tensor(delayed=fusible.Delayed(history=4)),
    "MXFP8": fusible.MXFP8(),
    "MXFP8 fast": fusible.MXFP8(compute="fast"),
    "NVFP4": fusible.NVFP4(stochastic_rounding=False),
}
DEQUANTISED: dict[str, Recipe] = {
    "block e5m2": fusible.Float8Block(gradient="e5m2"),
    "row e5m2": fusible.Float8Row(gradient="e5m2"),
    "tensor e5m2": fusible.Float8Tensor(gradient="e5m2"),
}
ALL = MULTIPLIED | DEQUANTISED
STAY_QUANTISED = [name for name in ALL if name != "delayed"]
WEIGHTS: list[dict[str, bool]] = [{}, {"transposed_weight": True}, {"single_grouped_weight": False}]

Results = dict[str, Tensor]


class Kernels(NamedTuple):
    """Where they run: a GPU, or a CPU while the emulation is installed."""

    device: str
    installed: Callable[[], AbstractContextManager[Any]] = nullcontext


class Layers(NamedTuple):
    """The sizes of a linear, of experts, and of a call of either."""

    groups: int
    features: int
    hidden: int
    rows: int
    split_sizes: tuple[int, ...]

    def linear(self, recipe: Recipe, **options: Any) -> GroupedLinear:
        """From ``features`` to ``hidden``."""
        torch.manual_seed(1)
        return GroupedLinear(self.groups, self.features, self.hidden, dtype=torch.bfloat16, recipe=recipe, **options)

    def experts(self, recipe: Recipe, **options: Any) -> fusible.Sequential:
        """Experts with SwiGLU."""
        torch.manual_seed(1)
        options = {"bias": False, "dtype": torch.bfloat16, "recipe": recipe, **options}
        first = GroupedLinear(self.groups, self.features, 2 * self.hidden, **options)
        return fusible.Sequential(
            first, fusible.SwiGLU(), GroupedLinear(self.groups, self.hidden, self.features, **options)
        )

    def routed(self, recipe: Recipe) -> fusible.Sequential:
        """The experts behind a dispatch."""
        dispatch, experts = fusible.Dispatch(self.groups), self.experts(recipe)
        return fusible.Sequential(dispatch, *experts, fusible.Scale(), fusible.Combine())

    def call(self, device: str, columns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, the gradient of rows with so many columns, and split sizes."""
        x, dy = tensor(self.rows, self.features), tensor(self.rows, columns, seed=2)
        return x.to(device).requires_grad_(), dy.to(device), torch.tensor(self.split_sizes, device=device)


def tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random numbers, the same on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def far(ours: Tensor, theirs: Tensor) -> float:
    """The distance, relative to theirs unless that is zero."""
    norm = theirs.double().norm()
    return float((ours.double() - theirs.double()).norm() / (norm if norm else 1))


def assert_equal(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], bound: float) -> None:
    """Each within a relative distance."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert (apart := far(ours[name], theirs[name])) <= bound, (name, apart)


def activation_bound(recipe: Recipe) -> float:
    """The distance of experts: an activation that is rounded otherwise becomes another byte now and then."""
    if isinstance(recipe, fusible.NVFP4):
        return 0.08
    return 0.04 if getattr(recipe, "gradient", "") == "e5m2" else 0.02


def run(model: nn.Module, device: str, x: Tensor, dy: Tensor, **keywords: Tensor) -> Results:
    """The output and all gradients of a copy of the model, on the host.

    Everything is copied: the emulation knows only the memory of tensors that are younger than itself.
    """
    model = copy.deepcopy(model).to(device)
    x, dy = x.detach().clone().to(device).requires_grad_(), dy.clone().to(device)
    y = model(x, **{name: value.clone().to(device) for name, value in keywords.items()})
    y.backward(dy)
    grads = {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach().cpu(), "x": x.grad.cpu(), **grads}


def outcomes(kernels: Kernels, model: nn.Module, *arguments: Tensor, **keywords: Tensor) -> tuple[Results, Results]:
    """The results of the kernels, and of the definition on the host."""
    expected = run(model, "cpu", *arguments, **keywords)
    with kernels.installed():
        return run(model, kernels.device, *arguments, **keywords), expected


def check_linear(kernels: Kernels, layers: Layers, name: str, options: Mapping[str, bool]) -> None:
    """Results and gradients, and zeros in the tail."""
    x, dy, sizes = layers.call("cpu", layers.hidden)
    ours, expected = outcomes(kernels, layers.linear(ALL[name], **options), x, dy, split_sizes=sizes)

    assert_close(ours, expected, 4e-3)
    end = sum(layers.split_sizes)
    assert not ours["y"][end:].any()
    assert not ours["x"][end:].any()


def check_experts(kernels: Kernels, layers: Layers, name: str, bias: bool) -> None:
    """Results and gradients."""
    x, dy, sizes = layers.call("cpu", layers.features)
    model = layers.experts(ALL[name], bias=bias)

    assert_close(*outcomes(kernels, model, x, dy, split_sizes=sizes), activation_bound(ALL[name]))


def check_routed(kernels: Kernels, layers: Layers, name: str) -> None:
    """Results and gradients of a whole layer, each of whose tokens goes to two experts."""
    tokens = layers.rows * 3 // 4
    x, dy = tensor(tokens, layers.features), tensor(tokens, layers.features, seed=2)
    ids = torch.randint(0, layers.groups, (tokens, 2), generator=torch.Generator().manual_seed(3))
    routing = {"top_k_index": ids, "top_k_weights": tensor(tokens, 2, seed=4).float().abs()}

    assert_close(*outcomes(kernels, layers.routed(ALL[name]), x, dy, **routing), activation_bound(ALL[name]))


def check_strict(kernels: Kernels, layers: Layers, name: str) -> None:
    """The kernels do all of it."""
    with kernels.installed(), fusible.config(strict=True):
        model = layers.linear(MULTIPLIED[name]).to(kernels.device)
        x, dy, sizes = layers.call(kernels.device, layers.hidden)
        model(x, split_sizes=sizes).backward(dy)

    assert x.grad is not None
    assert bool(x.grad[: layers.split_sizes[0]].any())


def check_refused(kernels: Kernels, layers: Layers, name: str) -> None:
    """Operations that are not computed in their format say so, and are an error under ``strict``."""
    with kernels.installed():
        model = layers.linear(DEQUANTISED[name]).to(kernels.device)
        x, dy, sizes = layers.call(kernels.device, layers.hidden)
        explanation = str(fusible.explain(model, x, split_sizes=sizes))
        with fusible.config(strict=True), pytest.raises(fusible.RefusedError, match="e4m3fn operands"):
            model(x, split_sizes=sizes).backward(dy)

    assert "multiplied in 16 bits: hopper" in explanation


def check_main_grads(kernels: Kernels, layers: Layers, name: str, dtype: torch.dtype, single: bool) -> None:
    """Two backwards add to them."""
    expected = _main_grads(layers, name, "cpu", torch.float32, True)
    with kernels.installed():
        ours = _main_grads(layers, name, kernels.device, dtype, single)

    assert_close({"weight": ours}, {"weight": expected}, 5e-3)


def _main_grads(layers: Layers, name: str, device: str, dtype: torch.dtype, single: bool) -> Tensor:
    options = {"bias": False, "accumulate_into_main_grad": True, "single_grouped_weight": single}
    op, (x, dy, sizes) = layers.linear(ALL[name], **options).to(device), layers.call(device, layers.hidden)
    for parameter in op.parameters():
        parameter.main_grad = torch.ones_like(parameter, dtype=dtype)
    for _ in range(2):
        op(x, split_sizes=sizes).backward(dy)
    grads = [parameter.main_grad.cpu() for parameter in op.parameters()]
    return grads[0] if single else torch.stack(grads)


def check_quantised_weights(kernels: Kernels, layers: Layers, name: str) -> None:
    """Bytes that stay give the numbers of weights that are quantised at every forward."""
    with kernels.installed(), torch.no_grad():
        model = layers.experts(ALL[name], single_grouped_weight=False).to(kernels.device)
        x, _, sizes = layers.call(kernels.device, layers.features)
        expected = model(x, split_sizes=sizes)
        y = fusible.quantize_(model, ALL[name])(x, split_sizes=sizes)

    assert torch.equal(y, expected)


def check_replays_of_quantised_weights(kernels: Kernels, layers: Layers, name: str) -> None:
    """Bytes that a backward transposes give the bits of weights that are quantised at every forward."""
    with kernels.installed(), fusible.config(strict=True):
        op = layers.linear(ALL[name], bias=False).to(kernels.device)
        arguments = layers.call(kernels.device, layers.hidden)
        expected = steps(op, *arguments, count=1)[0]
        op, before = fusible.quantize_(op, ALL[name]), replay.stats()
        results = steps(op, *arguments)
    after = replay.stats()

    assert_same_bits([expected[:2], *results])
    assert after.unsupported == before.unsupported
    assert after.replayed - before.replayed == 4  # the last two forwards and backwards


def steps(op: nn.Module, x: Tensor, dy: Tensor, sizes: Tensor, count: int = 4) -> list[tuple[Tensor, ...]]:
    """Output and gradients of as many steps on the same numbers."""
    results: list[tuple[Tensor, ...]] = []
    for _ in range(count):
        op.zero_grad()
        leaf = x.detach().clone().requires_grad_()
        y = op(leaf, split_sizes=sizes)
        y.backward(dy)
        results.append((y.detach(), leaf.grad, *[p.grad for p in op.parameters() if p.requires_grad]))  # type: ignore[arg-type]
    return results


def assert_same_bits(results: list[tuple[Tensor, ...]]) -> None:
    """Every step gave what the first gave."""
    for later in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], later, strict=True))


def check_not_finite(kernels: Kernels, layers: Layers, name: str, value: float) -> None:
    """A value that is not finite leaves no finite number in its row, of the output and of the gradient of x."""
    with kernels.installed():
        op = layers.linear(ALL[name], bias=False).to(kernels.device)
        x, dy, sizes = layers.call(kernels.device, layers.hidden)
        with torch.no_grad():
            op.weight.mul_(2.0**-12)  # small enough for a finite product with what an infinite value is rounded to
            x[3, 5] = dy[4, 6] = value
        y = op(x, split_sizes=sizes)
        (dx,) = torch.autograd.grad(y, x, dy)
    assert not y[3].isfinite().any()
    assert not dx[4].isfinite().any()
