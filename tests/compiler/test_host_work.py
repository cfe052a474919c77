"""How many functions a hot call runs in Python: unlike times, the same on every machine. It must not creep up."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from reference import passes_gradients_at_limits

from fusible import GroupedLinear, MoE, Pointwise, Scale, Sequential, SwiGLU
from fusible.benchmarks import host_overhead
from fusible.benchmarks.problem import Problem
from fusible.benchmarks.stub_extension import launching_nothing

K = F = 8


def calls_of(function: Callable[[], Any]) -> int:
    """Python functions and those of C that it calls from Python, without those that the garbage collector calls."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(seen)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.fixture
def gpu() -> Iterator[None]:
    """The way of our kernels, without them."""
    with launching_nothing():
        yield


class Calls:
    """The calls of a forward and of its backward, once everything that can be kept is there."""

    def __init__(self, groups: int, dtype: torch.dtype = torch.float32, **how: Any) -> None:
        fc1, fc2 = (GroupedLinear(groups, K, n, bias=False, dtype=dtype, **how) for n in (2 * F, K))
        for p in (*fc1.parameters(), *fc2.parameters()) if how.get("accumulate_into_main_grad") else ():
            p.main_grad = torch.zeros_like(p)
        self.model = Sequential(fc1, SwiGLU(), Scale(), fc2)
        rows = 2 * groups
        self.x, self.scales = (
            torch.randn(rows, K, dtype=dtype, requires_grad=True),
            torch.rand(rows, requires_grad=True),
        )
        self.sizes, self.dy = torch.full((groups,), 2), torch.randn(rows, K, dtype=dtype)
        for _ in range(4):
            self.run()

    def run(self) -> tuple[int, int]:
        for tensor in (self.x, self.scales, *self.model.parameters()):
            tensor.grad = None
        outputs = []
        forward = calls_of(lambda: outputs.append(self.model(self.x, split_sizes=self.sizes, scales=self.scales)))
        return forward, calls_of(lambda: outputs[0].backward(self.dy))


@pytest.mark.parametrize("way", ["shared keywords", "op_kwargs by module", "op_kwargs by index", "positional"])
def test_calls_of_a_look_up(way):
    look_up = host_overhead.look_ups(Problem.make(2, K, F, torch.tensor([2, 2]), "cpu", torch.float32))[way]
    look_up()

    assert calls_of(look_up) <= 70


@pytest.mark.parametrize(
    ("how", "forward", "backward"), [({}, 425, 445), ({"accumulate_into_main_grad": True}, 425, 575)]
)
def test_calls_of_fused_experts(how, forward, backward):
    calls = Calls(2, **how).run()

    assert calls[0] <= forward
    assert calls[1] <= backward


def test_a_hot_call_does_the_same_work_again():
    calls = Calls(4)

    assert calls.run() == calls.run()


@pytest.mark.parametrize("groups", [8, 64])
def test_a_parameter_for_each_expert_costs_no_calls_for_each(groups):
    forward, backward = Calls(groups, single_grouped_weight=False).run()

    assert forward <= 500  # of them 10 of the extension, where it is built: each asks all parameters at once
    assert backward <= 465


@pytest.mark.parametrize(
    ("how", "forward", "backward"),
    [
        ({}, 100, 100),
        ({"accumulate_into_main_grad": True}, 100, 200),
        ({"single_grouped_weight": False}, 130, 110),
    ],
)
def test_calls_of_a_replay(gpu, how, forward, backward):
    calls = Calls(64, torch.bfloat16, **how)

    counts = calls.run()
    assert counts[0] <= forward
    assert counts[1] <= backward


def test_calls_of_a_layer(gpu):
    layer, dy = MoE(16, 16, 8, 2, dtype=torch.bfloat16), torch.randn(16, 16, dtype=torch.bfloat16)
    x, counts = torch.randn_like(dy, requires_grad=True), list[tuple[int, int]]()
    for _ in range(6):
        for tensor in (x, *layer.parameters()):
            tensor.grad = None
        outputs = []
        forward = calls_of(lambda: outputs.append(layer(x).y))  # noqa: B023
        counts.append((forward, calls_of(lambda: outputs[0].backward(dy))))  # noqa: B023

    assert counts[-1][0] <= 150, counts
    assert counts[-1][1] <= 120, counts


def test_calls_of_a_replay_without_gradients(gpu):
    calls = Calls(64, torch.bfloat16)
    with torch.no_grad():
        counts = [
            calls_of(lambda: calls.model(calls.x, split_sizes=calls.sizes, scales=calls.scales)) for _ in range(4)
        ]

    assert counts[-1] <= 90


@pytest.mark.parametrize("rows", [(8, 8), (8, 12)], ids=["the same rows", "other rows"])
def test_calls_of_a_replayed_pointwise_function(gpu, rows):
    op = Pointwise(lambda gate, up, s, limit: torch.relu(gate) * up * s, halves="concat", constants={"limit": 7.0})
    counts = list[tuple[int, int]]()
    for count in rows * 4:
        x, s = torch.randn(count, 16).bfloat16().requires_grad_(), torch.rand(count, requires_grad=True)
        dy, outputs = torch.randn(count, 8).bfloat16(), list[torch.Tensor]()
        forward = calls_of(lambda: outputs.append(op(x, s=s)))  # noqa: B023
        counts.append((forward, calls_of(lambda: outputs[0].backward(dy))))  # noqa: B023

    assert counts[-1][0] <= 100, counts
    assert counts[-1][1] <= 100, counts


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt-oss", "qwen3"])
def test_calls_of_a_layer_of_transformers_without_gradients(gpu, name):
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    if name == "gpt-oss" and not passes_gradients_at_limits():
        pytest.skip("its gate is a compiled function then, which the stand-in for the extension lacks")
    from hugging_face import experts_of, make

    import fusible.integrations.transformers  # noqa: F401

    experts = experts_of(make(name, torch.bfloat16))[0]
    experts.config._experts_implementation = "fusible"
    x, index, weights = torch.randn(1, 32, dtype=torch.bfloat16), torch.tensor([[0, 1]]), torch.rand(1, 2)
    with torch.no_grad():
        counts = [calls_of(lambda: experts(x, index, weights)) for _ in range(5)]

    assert counts[-1] <= 80, counts


@pytest.mark.filterwarnings("ignore")
def test_calls_of_a_router_of_transformers():
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from hugging_face import make

    from fusible.integrations import routers

    model = make("qwen3", torch.bfloat16)
    routers.route(model)  # tries formulas, which the stub would not compute
    router = next(module for module in model.modules() if hasattr(module, routers.ATTRIBUTE))
    x, counts = torch.randn(4, router.weight.shape[1], dtype=torch.bfloat16), list[tuple[int, int]]()
    with launching_nothing():
        for _ in range(3):
            outputs = list[torch.Tensor]()
            forward = calls_of(lambda: outputs.append(router(x)[1]))  # noqa: B023
            weights = outputs[0].sum()
            counts.append((forward, calls_of(weights.backward)))

    assert counts[-1][0] <= 190, counts
    assert counts[-1][1] <= 150, counts
