"""Functions of users inside the emulated kernels (tests/emulation): g++ compiles what NVRTC would; and their replays.

The checks are those of a GPU: tests/gpu/test_function_epilogue_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from checks import fused
from checks.functions import (
    ACTS_OF_COLUMNS,
    ACTS_OF_MATRICES,
    OF_COLUMNS,
    PUBLISHED,
    learned_slope,
    op_of,
    op_of_columns,
    random_function,
)
from emulation import build
from test_pointwise import FUNCTIONS
from test_replay import Runs, runs, same
from torch import Tensor

from fusible import (
    AddExtraInput,
    Bias,
    Combine,
    ConstantScale,
    Dispatch,
    GroupedLinear,
    Pointwise,
    RefusedError,
    Scale,
    Sequential,
    SwiGLU,
    config,
    interleaved,
)
from fusible.ops.kernels.jit import epilogue
from fusible.ops.kernels.jit.nvrtc import SpillError

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]
__all__ = ["runs"]

SIZES = (70, 0, 33)
ALL = {**FUNCTIONS, **PUBLISHED}


def check(function: Any, count: int, halves: Any = "concat", **asked: Any) -> None:
    """Both directions, each in all tiles that it is built for."""
    case = fused.case_of(op_of(function, count, halves), function, sizes=SIZES, **{"features": 40, **asked})
    fused.check_forward_in_all_tiles("cpu", case)
    fused.check_backward("cpu", case)


def in_tiles(halves: Any) -> Callable[[str, fused.Case], None]:
    """A check of the forward: in all tiles, or in one where only the order of gate and up differs."""
    return fused.check_forward_in_all_tiles if halves == "concat" else fused.check_forward


@pytest.mark.parametrize("name", ["gpt-oss", "relu2 of a row", "mish", "gate alone", "xielu"])
def test_functions(name: str) -> None:
    check(*ALL[name], columns=136)


@pytest.mark.parametrize("block", [1, 2, 8])
def test_blocks_of_gate_and_up(block: int) -> None:
    check(*ALL["gpt-oss"], interleaved(block), columns=136, bias=torch.float32, bias_scale=True)


def test_types_and_weights_stored_transposed() -> None:
    check(*ALL["gpt-oss"], dtype=torch.float16, scales=torch.float16, transposed=True, bias=torch.float16)
    check(*ALL["telu"], dtype=torch.float16, scales=None)


@pytest.mark.parametrize("seed", range(3))
def test_random_functions(seed: int) -> None:
    check(*random_function(seed), columns=72)


@pytest.mark.parametrize("name", OF_COLUMNS)
def test_numbers_of_columns(name: str) -> None:
    op, function = op_of_columns(name), OF_COLUMNS[name][0]
    case = fused.case_of(op, function, sizes=(70, 0, 1, 33), features=40, columns=136)
    fused.check_forward_in_all_tiles("cpu", case)
    fused.check_forward_in_all_tiles("cpu", replace(case, bias=torch.bfloat16, scales=None))
    fused.check_backward("cpu", case)
    fused.check_backward("cpu", case, want_vectors=False, bias_dtype=None)
    fused.check_backward("cpu", replace(case, sizes=(0, 0)))


def test_kernels_without_scales_are_those_of_calls_without() -> None:
    case = fused.case_of(op_of_columns("shift"), OF_COLUMNS["shift"][0], sizes=SIZES, features=40, columns=72)
    for scales in (None, torch.float32):
        fused.check_forward("cpu", replace(case, scales=scales))
        fused.check_backward("cpu", replace(case, scales=scales))


@pytest.mark.parametrize("block", [1, 4, 8])
def test_numbers_of_columns_of_blocks_of_gate_and_up(block: int) -> None:
    op = op_of_columns("slope", interleaved(block))
    case = fused.case_of(op, learned_slope, sizes=SIZES, features=40, columns=136, vectors=torch.bfloat16)
    fused.check_forward_in_all_tiles("cpu", replace(case, transposed=True))
    fused.check_backward("cpu", replace(case, dtype=torch.float16, vectors=torch.float16))


@pytest.mark.parametrize("name", ACTS_OF_COLUMNS)
@pytest.mark.parametrize("halves", ["concat", interleaved(1), interleaved(4), interleaved(8)], ids=str)
def test_numbers_of_columns_of_all_rows_and_of_gate_and_up(name: str, halves: Any) -> None:
    build_act, function = ACTS_OF_COLUMNS[name]
    case = fused.case_of(build_act(halves), function, sizes=(70, 0, 1, 33), features=40, columns=136)
    in_tiles(halves)("cpu", case)
    fused.check_backward("cpu", case)
    fused.check_backward("cpu", replace(case, sizes=(0, 0)), bias_dtype=None)


@pytest.mark.parametrize("name", ACTS_OF_MATRICES)
@pytest.mark.parametrize("halves", ["concat", interleaved(8)], ids=str)
def test_matrices(name: str, halves: Any) -> None:
    build_act, function = ACTS_OF_MATRICES[name]
    case = fused.case_of(build_act(halves), function, sizes=(70, 0, 1, 33, 16), features=40, columns=136)
    in_tiles(halves)("cpu", replace(case, scales=None))
    fused.check_forward("cpu", replace(case, matrices=torch.float32, bias=torch.bfloat16))
    fused.check_forward("cpu", replace(case, sizes=(0, 0), dtype=torch.float16))


@pytest.mark.parametrize("block", [1, 4])
def test_matrices_beside_narrow_blocks_of_gate_and_up(block: int) -> None:
    build_act, function = ACTS_OF_MATRICES["residual"]
    case = fused.case_of(build_act(interleaved(block)), function, sizes=SIZES, features=40, columns=136)
    fused.check_forward("cpu", replace(case, dtype=torch.float16))


def test_sums_over_more_groups_and_blocks_than_threads_take_at_a_time() -> None:
    build_act, function = ACTS_OF_COLUMNS["biases"]
    case = fused.case_of(build_act("concat"), function, sizes=(*[1, 0, 2] * 12, 330), features=40, columns=136)
    fused.check_backward("cpu", case)


def test_two_vectors_at_a_time_with_numbers_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where registers suffice for them: the first source, not the last."""
    load = epilogue.load
    monkeypatch.setattr(epilogue, "load", lambda texts: load(texts[:1]))
    epilogue.handles.cache_clear()
    case = fused.case_of(op_of_columns("slope"), learned_slope, sizes=(70, 0, 1, 33), features=40, columns=136)
    fused.check_backward("cpu", case)
    epilogue.handles.cache_clear()


E, K, H, T, SLOTS = 3, 16, 24, 9, 2


class Experts:
    """A fused layer with a function that reads a number of the row, and what it is called with."""

    fusion = "GroupedMLP"

    def __init__(self) -> None:
        torch.manual_seed(0)
        options = {"bias": False, "dtype": torch.bfloat16}
        self.fc1, self.fc2 = GroupedLinear(E, K, 2 * H, **options), GroupedLinear(E, H, K, **options)
        self.model = self.build()
        self.give()

    def build(self) -> Sequential:
        return Sequential(self.fc1, Pointwise(lambda g, u, p: torch.tanh(g * p) * u, halves="concat"), self.fc2)

    def give(self, rows: int = T) -> None:
        """Other inputs."""
        self.x = torch.randn(rows, K, dtype=torch.bfloat16).requires_grad_()
        self.numbers = torch.rand(rows).requires_grad_()
        self.sizes, self.dy = torch.tensor([rows - 5, 0, 4]), torch.randn(rows, K, dtype=torch.bfloat16)

    def forward(self, model: Sequential) -> Tensor:
        y: Tensor = model(self.x, split_sizes=self.sizes, p=self.numbers)
        return y

    def step(self, model: Sequential | None = None) -> list[Tensor]:
        """The output and all gradients."""
        model = model or self.model
        leaves = [self.x, self.numbers, *model.parameters()]
        for leaf in leaves:
            leaf.grad = None
        y = self.forward(model)
        y.backward(self.dy)
        return [y.detach(), *[leaf.grad for leaf in leaves if leaf.grad is not None]]


class Routed(Experts):
    """From tokens to tokens."""

    fusion = "RoutedMLP"

    def build(self) -> Sequential:
        act = Pointwise(lambda gate, up: torch.tanh(gate) * up, halves="concat")
        return Sequential(Dispatch(E), self.fc1, act, self.fc2, Scale(), Combine())

    def give(self, rows: int = T) -> None:
        super().give(rows)
        self.index = torch.randint(E + 1, (rows, SLOTS))  # some are of no expert
        self.numbers = torch.rand(rows, SLOTS).requires_grad_()

    def forward(self, model: Sequential) -> Tensor:
        y: Tensor = model(self.x, top_k_index=self.index, top_k_weights=self.numbers)
        return y


class OfColumns(Experts):
    """A function that reads a number of each group's columns."""

    def build(self) -> Sequential:
        start = {"beta": torch.rand(E, H, dtype=torch.bfloat16) + 0.5}
        return Sequential(self.fc1, Pointwise(learned_slope, halves="concat", columns=start), self.fc2)

    def forward(self, model: Sequential) -> Tensor:
        y: Tensor = model(self.x, split_sizes=self.sizes)
        return y


class RoutedOfColumns(Routed):
    """From tokens to tokens, with a function that reads columns and the routing weights."""

    def build(self) -> Sequential:
        start = {"beta": torch.rand(E, H) + 0.5}
        act = Pointwise(lambda g, u, scales, beta: torch.tanh(g * beta) * u * scales, halves="concat", columns=start)
        return Sequential(Dispatch(E), self.fc1, act, self.fc2, Combine())


class ChainOfColumns(OfColumns):
    """A chain with a function that reads a number of each group's columns."""

    def build(self) -> Sequential:
        sloped = Pointwise(lambda x, beta: torch.tanh(x * beta), columns={"beta": torch.rand(E, H) + 0.5})
        return Sequential(self.fc1, SwiGLU(), sloped, ConstantScale(0.75), self.fc2)


class OfMatrices(Experts):
    """A linear alone, and a chain that reads another matrix in each call."""

    fusion = "GroupedLinearResidual"

    def build(self) -> Sequential:
        return Sequential(self.fc1, SwiGLU(), AddExtraInput(), Pointwise(torch.tanh))

    def give(self, rows: int = T) -> None:
        super().give(rows)
        self.numbers, self.dy = torch.randn(2, rows, H, dtype=torch.bfloat16)
        self.numbers.requires_grad_()

    def forward(self, model: Sequential) -> Tensor:
        y: Tensor = model(self.x, split_sizes=self.sizes, extra=self.numbers)
        return y


class OfProducts(Experts):
    """A linear alone, and a chain that only multiplies."""

    fusion = "GroupedLinearChain"

    def build(self) -> Sequential:
        return Sequential(self.fc1, ConstantScale(0.5), Scale())

    def give(self, rows: int = T) -> None:
        super().give(rows)
        self.dy = torch.randn(rows, 2 * H, dtype=torch.bfloat16)

    def forward(self, model: Sequential) -> Tensor:
        y: Tensor = model(self.x, split_sizes=self.sizes, scales=self.numbers)
        return y


class BetweenLinears(Experts):
    """A chain that only adds and multiplies in the place of an activation."""

    def build(self) -> Sequential:
        wide = GroupedLinear(E, 2 * H, K, bias=False, dtype=torch.bfloat16)
        return Sequential(self.fc1, Bias(2 * H, dtype=torch.bfloat16), Scale(), wide)

    def forward(self, model: Sequential) -> Tensor:
        y: Tensor = model(self.x, split_sizes=self.sizes, scales=self.numbers)
        return y


KINDS = [Experts, Routed, OfColumns, RoutedOfColumns, ChainOfColumns, OfMatrices, OfProducts, BetweenLinears]


@pytest.mark.parametrize("kind", KINDS)
def test_a_third_step_is_replayed_bit_by_bit(runs: Runs, kind: type[Experts]) -> None:
    layer = kind()
    first = layer.step()
    assert [step.name for step in layer.model.explain().steps] == [layer.fusion]
    layer.step()
    layer.step()

    again: list[Tensor] = []
    assert runs.of(lambda: again.extend(layer.step())) == (0, 2)
    assert same(again, first)


@pytest.mark.parametrize("kind", KINDS)
def test_each_number_of_rows_is_replayed(runs: Runs, kind: type[Experts]) -> None:
    layer = kind()
    for rows in (T, T + 3, 6, 40, T + 3, T, 40, 6) * 2:
        layer.give(rows)
        expected, got = layer.step(deepcopy(layer.model)), list[Tensor]()
        count = runs.of(lambda got=got: got.extend(layer.step()))
        assert same(got, expected)

    assert count == (0, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_without_gradients_gives_the_bits_of_training_and_is_replayed(runs: Runs, kind: type[Experts]) -> None:
    layer = kind()
    expected, outputs = layer.forward(layer.model).detach(), list[Tensor]()
    with torch.no_grad():
        counts = [runs.of(lambda: outputs.append(layer.forward(layer.model))) for _ in range(3)]

    assert counts[-1] == (0, 1)
    assert same(outputs, [expected] * 3)


def test_changed_numbers_of_columns_are_read_by_a_replay(runs: Runs) -> None:
    layer = OfColumns()
    for _ in range(3):
        layer.step()
    with torch.no_grad():
        layer.model[1].beta.mul_(2)
    expected, again = layer.step(deepcopy(layer.model)), list[Tensor]()

    assert runs.of(lambda: again.extend(layer.step())) == (0, 2)
    assert same(again, expected)


def test_frozen_numbers_of_columns(runs: Runs) -> None:
    layer = OfColumns()
    expected = layer.step()
    layer.model[1].beta.requires_grad_(False)
    got = layer.step()

    assert len(got) == len(expected) - 1
    assert same(got, [tensor for tensor in expected if tensor.shape != (E, H)])


OTHERS = {
    Experts: (1, Pointwise(lambda g, u, p: torch.sigmoid(g) * u * p, halves="concat")),
    Routed: (2, Pointwise(lambda gate, up: torch.sigmoid(gate) * up, halves="concat")),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_function_in_the_same_place_is_not_replayed_as_the_first(runs: Runs, kind: type[Experts]) -> None:
    layer, (place, other) = kind(), OTHERS[kind]
    for _ in range(3):
        layer.step()
        with torch.no_grad():
            layer.forward(layer.model)
    layer.model[place] = other
    expected, got = layer.step(deepcopy(layer.model)), layer.step()
    with torch.no_grad():
        outputs = [layer.forward(layer.model), layer.forward(layer.model)]

    assert same(got, expected)
    assert same(outputs, [expected[0]] * 2)


def capped(cap: float) -> Pointwise:
    return Pointwise(lambda g, u, p, cap: g.clamp(max=cap) * u * p, halves="concat", constants={"cap": cap})


def test_another_constant_is_another_result(runs: Runs) -> None:
    layer = Experts()
    layer.model[1] = capped(0.25)
    for _ in range(3):
        layer.step()
    layer.model[1].constants = {"cap": 0.5}
    other = deepcopy(layer.model)
    other[1] = capped(0.5)

    assert same(layer.step(), layer.step(other))


def test_a_call_looks_for_its_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forms, form_of = list[epilogue.EpilogueForm](), epilogue.EpilogueForm
    monkeypatch.setattr(epilogue, "EpilogueForm", lambda *asked: forms.append(form_of(*asked)) or forms[-1])
    layer = Experts()
    layer.sizes = layer.sizes.tolist()  # type: ignore[assignment]  # which no replay takes
    layer.step()
    forms.clear()
    layer.step()

    assert [form.backward for form in forms] == [False, True]


def test_a_function_that_does_not_compile_follows_the_product_as_a_kernel_of_its_own(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(text: str) -> int:
        raise SpillError("ptxas: 12 bytes spill")

    layer = Experts()
    expected = layer.step()
    monkeypatch.setattr(epilogue, "load", load)
    epilogue.handles.cache_clear()
    layer.model = deepcopy(layer.model)
    got = layer.step()

    assert [step.name for step in layer.model.explain().steps] == ["GroupedMLP"]
    assert "ptxas: 12 bytes spill" in str(layer.model.explain())
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-6)
    with config(strict=True), pytest.raises(RefusedError, match="ptxas: 12 bytes spill"):
        layer.forward(layer.model)
    epilogue.handles.cache_clear()
