"""Experts put together at random, called again and again at random: against float64, step by step.

What other tests vary one at a time is combined here: shapes, splits, activations, scales, biases, frozen parameters,
buffers, main_grad, delayed weight gradients, the layout of the rows; and calls that alternate between training and
inference, with the same rows, with others, and with other ones of the same shape, so that calls are also replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from reference import ACTIVATIONS, Act, glu, leaves, mlp, run
from torch import Tensor, nn

from fusible import GLU, Activation, GroupedLinear, Scale, ScaledSwiGLU, Sequential, interleaved

HALVES = [torch.bfloat16, torch.float16]
WIDTHS = [8, 16, 24, 64, 72, 136, 200, 264]
CLAMPED = {"limit": 7.0, "alpha": 1.702, "linear_offset": 1.0}


class Experts:
    """A model, its plain counterpart, and its arguments."""

    def __init__(self, seed: int, device: str) -> None:
        self.random, self.device = random.Random(seed), device
        pick = self.random.choice
        torch.manual_seed(seed)
        self.dtype = pick(HALVES) if device == "cuda" else pick([*HALVES, torch.float32, torch.float64])
        self.groups = pick([1, 2, 3, 5, 8, 17, 65])
        self.features, self.hidden, self.out = (pick([*WIDTHS, 20] if device == "cpu" else WIDTHS) for _ in range(3))
        self.main_grad = self.dtype in HALVES and pick(
            [False, False, True]
        )  # float32, so that sums there are exact enough
        self.delayed = pick([False, False, True])
        act, self.plain = self._activation()
        self.scaled = isinstance(act, ScaledSwiGLU) or pick([True, False])
        self.after, self.scales_dtype = pick([True, False]), pick([torch.float32, self.dtype])
        wide = self.hidden if isinstance(act, Activation) else 2 * self.hidden
        self.fc1, self.fc2 = self._linear(self.features, wide), self._linear(self.hidden, self.out)
        scale = [Scale()] if self.scaled and not isinstance(act, ScaledSwiGLU) else []
        self.final = [Scale()] if self.after else []
        self.model = Sequential(self.fc1, act, *scale, self.fc2, *self.final)
        self.scale = [op for op in self.model if isinstance(op, Scale) and op not in self.final]
        for parameter in self.model.parameters():
            parameter.requires_grad_(self.random.random() > 0.2)

    def _activation(self) -> tuple[nn.Module, Act]:
        kind = self.random.choice(["scaled", "clamped", "plain", "blocks", "gated", "gated"])
        name = self.random.choice([*ACTIVATIONS])
        if kind == "scaled":
            return ScaledSwiGLU(), glu("silu")
        if kind == "clamped":
            return GLU("silu", **CLAMPED), glu("silu", **CLAMPED)
        if kind == "plain":
            return Activation(name), ACTIVATIONS[name]
        block = self.random.choice([1, 2, 4, 8]) if kind == "blocks" and self.hidden % 8 == 0 else None
        return GLU(name, layout=interleaved(block) if block else "concat"), glu(name, block=block)

    def _linear(self, k: int, n: int) -> GroupedLinear:
        pick = self.random.choice
        single = self.main_grad or pick([True, False])
        linear = GroupedLinear(
            self.groups,
            k,
            n,
            bias=pick([True, False]),
            scale_bias=pick([True, False]),
            single_grouped_weight=single,
            single_grouped_bias=pick([True, False]),
            accumulate_into_main_grad=self.main_grad,
            delay_wgrad_compute=self.delayed,
            device=self.device,
            dtype=self.dtype,
        )
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.normal_().mul_(k**-0.5 if parameter.shape[-1] == k else 1.0)
        return linear

    def splits(self) -> list[int]:
        """How many rows each expert gets: often none, sometimes all."""
        if self.random.random() < 0.1:
            return [0] * self.groups
        most = self.random.choice([1, 5, 70, 150])
        sizes = [self.random.randint(0, most) if self.random.random() < 0.8 else 0 for _ in range(self.groups)]
        return sizes if self.groups < 20 else [min(size, 9) for size in sizes]

    def tensors(self, rows: int, valid: int) -> dict[str, Tensor]:
        """Fresh arguments, by their names in :func:`reference.mlp`; NaN in the tail where nothing may read it."""

        def draw(*shape: int, dtype: torch.dtype) -> Tensor:
            tensor = torch.randn(shape, device=self.device).to(dtype)
            if self.random.random() < 0.5:
                tensor[valid:] = torch.nan
            return tensor

        given = {"x": self._laid_out(draw(rows, self.features, dtype=self.dtype))}
        vectors = [("scales", self.scaled), ("out", self.after), ("s1", self._scales_bias(self.fc1))]
        vectors += [("s2", self._scales_bias(self.fc2))]
        given |= {name: draw(rows, dtype=self.scales_dtype) for name, there in vectors if there}
        return {name: t.requires_grad_(self.random.random() > 0.2) for name, t in given.items()}

    def _laid_out(self, x: Tensor) -> Tensor:
        layout = self.random.choice(["dense", "dense", "pitch", "transposed"])
        if layout == "pitch":
            wider = x.new_full((x.shape[0], x.shape[1] + 8), torch.nan)
            wider[:, : x.shape[1]] = x
            return wider[:, : x.shape[1]]
        return x.T.contiguous().T if layout == "transposed" else x

    def _scales_bias(self, linear: GroupedLinear) -> bool:
        return linear.scale_bias and "bias_scale" in linear.keywords

    def call(self, sizes: Tensor, given: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Tensor:
        """The model, every argument to the op that takes it."""
        to: dict[Any, dict[str, Tensor]] = {self.fc1: {"split_sizes": sizes}, self.fc2: {"split_sizes": sizes}}
        for name, op, keyword in [("s1", self.fc1, "bias_scale"), ("s2", self.fc2, "bias_scale")]:
            to[op] |= {keyword: given[name]} if name in given else {}
        if "scales" in given:
            to[self.scale[0] if self.scale else self.model[1]] = {"scales": given["scales"]}
        for op in self.final:
            to[op] = {"scales": given["out"]}
        to[self.fc1] |= {k: v for k, v in buffers.items() if k == "grad_input"}
        to[self.fc2] |= {k: v for k, v in buffers.items() if k == "output"}
        y = self.model(given["x"], op_kwargs=to)
        assert isinstance(y, Tensor)
        return y

    def named(self) -> Iterator[tuple[str, GroupedLinear, str, list[nn.Parameter]]]:
        """The names of :func:`reference.mlp`, each with its linear and its parameters: one, or one for each expert."""
        for number, linear in (("1", self.fc1), ("2", self.fc2)):
            for name in ("weight", "bias"):
                parts = [p for of, p in linear.named_parameters() if of.rstrip("0123456789") == name]
                if parts:
                    yield name[0] + number, linear, name, parts

    def parameters(self) -> dict[str, Tensor]:
        """Stacked copies of weights and biases, by their names in :func:`reference.mlp`."""
        return {
            key: stacked(parts, name).clone().requires_grad_(any(p.requires_grad for p in parts))
            for key, _, name, parts in self.named()
        }


def stacked(parts: Sequence[Tensor], name: str) -> Tensor:
    """One tensor with a dimension for the experts."""
    whole = parts[0].dim() == {"weight": 3, "bias": 2}[name]
    return (parts[0] if whole else torch.stack([*parts])).detach()


def step(e: Experts, sizes: list[int], rows: int, train: bool) -> None:
    """One call, compared with float64: values, gradients, what must stay as it was."""
    given = e.tensors(rows, sum(sizes))
    counts = torch.tensor(sizes, device=e.device, dtype=e.random.choice([torch.int32, torch.int64]))
    buffers = make_buffers(e, rows, train)
    dy = torch.randn(rows, e.out, device=e.device).to(e.dtype)
    before = prepare_gradients(e)
    with torch.set_grad_enabled(train):
        y = e.call(counts, given, buffers)
    if y.requires_grad:
        y.backward(dy)
        for linear in (e.fc1, e.fc2) if e.delayed else ():
            linear.backward_dw()
        check_gradients(e, given, sizes, dy, gradients(e, given, sum(sizes), before) | {"y": y.detach()[: sum(sizes)]})
    else:
        check_values(e, given, sizes, y)
    check_tails(e, buffers, y, sum(sizes))


def make_buffers(e: Experts, rows: int, train: bool) -> dict[str, Tensor]:
    """Sometimes memory for the results, full of sevens."""
    buffers = {}
    if e.random.random() < 0.4 and not e.after:
        buffers["output"] = torch.full((rows, e.out), 7.0, device=e.device, dtype=e.dtype)
    if train and e.random.random() < 0.4:
        buffers["grad_input"] = torch.full((rows, e.features), 7.0, device=e.device, dtype=e.dtype)
    return buffers


def prepare_gradients(e: Experts) -> dict[str, Tensor]:
    """No gradients, and something to add to in every main_grad; returned by the names of :func:`reference.mlp`."""
    before = {}
    for p in e.model.parameters():
        p.grad = None
    for number, linear in (("1", e.fc1), ("2", e.fc2)):
        if e.main_grad:
            linear.weight.main_grad = torch.randn(linear.weight.shape, device=e.device)
            before["w" + number] = linear.weight.main_grad.clone()
    return before


def gradients(e: Experts, given: Mapping[str, Tensor], valid: int, before: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients of arguments and parameters, by the names of :func:`reference.mlp`."""
    found = {name: t.grad[:valid] for name, t in given.items() if t.grad is not None}
    for key, linear, name, parts in e.named():
        if key in before and linear.weight.requires_grad:
            found[key] = linear.weight.main_grad - before[key]
            continue
        assert all((p.grad is None) != p.requires_grad for p in parts)
        if any(p.requires_grad for p in parts):
            found[key] = stacked([torch.zeros_like(p) if p.grad is None else p.grad for p in parts], name)
    return found


def plain(e: Experts, given: Mapping[str, Tensor], sizes: list[int]) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    """The same in plain torch, and its arguments: rows that belong to a group, and the parameters."""
    rows = {name: t.detach()[: sum(sizes)].requires_grad_(t.requires_grad) for name, t in given.items()}
    return lambda x, **t: mlp(x, sizes, e.plain, **t), rows | e.parameters()


def check_values(e: Experts, given: Mapping[str, Tensor], sizes: list[int], y: Tensor) -> None:
    """Without gradients."""
    function, tensors = plain(e, given, sizes)
    with torch.no_grad():
        truth, theirs = function(**leaves(tensors, torch.float64)), function(**leaves(tensors))
    assert_near(y[: sum(sizes)].cpu(), theirs, truth, e.dtype, "y")
    assert all(t.grad is None for t in [*given.values(), *e.model.parameters()] if t.is_leaf)


def check_gradients(
    e: Experts, given: Mapping[str, Tensor], sizes: list[int], dy: Tensor, ours: Mapping[str, Tensor]
) -> None:
    """Against plain torch in float64 and in the dtype."""
    function, tensors = plain(e, given, sizes)
    truth = run(function, leaves(tensors, torch.float64), dy[: sum(sizes)].to("cpu", torch.float64))
    theirs = run(function, leaves(tensors), dy[: sum(sizes)].cpu())
    for key, _, _, parts in e.named():
        frozen = [g for g, p in enumerate(parts) if not p.requires_grad]
        for results in (truth, theirs):
            if key in results:
                results[key][frozen] = 0  # plain torch has all experts in one tensor
    assert ours.keys() == truth.keys()
    for name, exact in truth.items():
        assert bool(ours[name].isfinite().all()), name
        if exact.dim() > 1 or sum(sizes) >= 4:  # what sums products may cancel: of few rows, all of it
            assert_near(ours[name].cpu(), theirs[name], exact, e.dtype, name)


def assert_near(ours: Tensor, theirs: Tensor, truth: Tensor, dtype: torch.dtype, name: str) -> None:
    """In the Frobenius norm; a few roundings are allowed, as of one or two rows plain torch may by chance be exact."""
    assert theirs.dtype == ours.dtype or name[0] == "w", name  # main_grad is float32
    norm = truth.norm().clamp(min=1e-300)
    error, yardstick = ((t.double() - truth).norm() / norm for t in (ours, theirs))
    rounding = 3 * torch.finfo(dtype).eps if dtype in HALVES else 24 * torch.finfo(ours.dtype).eps
    assert error <= 2 * yardstick + rounding, f"{name}: {error:.2e}, plain torch {yardstick:.2e}"


def check_tails(e: Experts, buffers: Mapping[str, Tensor], y: Tensor, valid: int) -> None:
    """Results are in their buffers, whose tails are as they were; the tail of what a linear allocates is zero."""
    if "output" in buffers:
        assert y.data_ptr() == buffers["output"].data_ptr()
    elif not e.after:
        assert bool((y[valid:] == 0).all())
    for buffer in buffers.values():
        assert bool((buffer[valid:] == 7).all())


def check(seed: int, device: str, steps: int = 6) -> None:
    """Several steps of one model."""
    e = Experts(seed, device)
    sizes, rows = e.splits(), 0
    for number in range(steps):
        if number == 0 or e.random.random() < 0.3:
            sizes = e.splits()
            rows = sum(sizes) + e.random.choice([0, 0, 3, 40])
        elif e.random.random() < 0.4:  # as many rows, split in another way
            e.random.shuffle(sizes)
        step(e, sizes, rows, train=e.random.random() < 0.75)


@pytest.mark.parametrize("seed", range(24))
def test_on_the_cpu(seed: int) -> None:
    check(seed, "cpu")


@pytest.mark.cuda
@pytest.mark.parametrize("seed", range(400))
def test_on_a_gpu(seed: int) -> None:
    check(1000 + seed, "cuda")
