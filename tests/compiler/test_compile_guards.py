"""When ``torch.compile`` compiles anew, when it must not, and what it says of what it cannot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from models import mlp
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import fusible
from fusible import (
    Activation,
    ClampedSwiGLU,
    FusedOp,
    Grads,
    Linear,
    Op,
    Pattern,
    Sequential,
)

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    *[pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")],
]
SIZES = [torch.tensor(sizes) for sizes in ([3, 4, 2], [0, 0, 16], [5, 5, 5], [1, 1, 1])]


@pytest.fixture
def counter() -> CompileCounter:
    return CompileCounter()


experts = partial(mlp, 3, 8, 8)


def call(function: Any, rows: int, sizes: Tensor) -> Tensor:
    """The outputs and gradients, of data that depends on the number of rows alone."""
    generator = torch.Generator().manual_seed(rows)
    x, scales = torch.randn(rows, 8, generator=generator), torch.rand(rows, generator=generator)
    x.requires_grad_()
    y: Tensor = function(x, split_sizes=sizes, scales=scales)
    return torch.cat([y, torch.autograd.grad(y, x, y.detach())[0]])


def test_layers_and_row_counts_share_one_compilation(counter: CompileCounter) -> None:
    for layer in [experts() for _ in range(4)]:
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for rows, sizes in zip((12, 16, 20, 32), SIZES, strict=True):
            assert torch.equal(call(compiled, rows, sizes), call(layer, rows, sizes))

    assert counter.frame_count == 2  # for 12 rows, then for any


def test_marked_rows_compile_once(counter: CompileCounter) -> None:
    model = experts()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for rows, sizes in zip((12, 16, 20), SIZES[:3], strict=True):
        x, scales = torch.randn(rows, 8), torch.rand(rows)
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(scales, 0)
        given = {"split_sizes": sizes, "scales": scales}
        assert torch.equal(compiled(x, **given), model(x, **given))

    assert counter.frame_count == 1


def test_layers_inside_one_model_are_compiled_one_by_one(counter: CompileCounter) -> None:
    layers = nn.ModuleList([experts() for _ in range(3)])
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
    for layer in layers:
        layer(torch.randn(12, 8), split_sizes=SIZES[0], scales=torch.rand(12))

    assert counter.frame_count == 1


def test_training_and_inference_compile_once_each(counter: CompileCounter) -> None:
    model = experts()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for enabled in (True, False, True, False):
        with torch.set_grad_enabled(enabled):
            compiled(torch.randn(12, 8), split_sizes=SIZES[0], scales=torch.rand(12))

    assert counter.frame_count == 2


@pytest.mark.parametrize("name", ["limit", "alpha", "linear_offset"])
def test_ops_that_differ_in_a_number_do_not_share(counter: CompileCounter, name: str) -> None:
    for value in (0.25, 0.5, 0.75, 0.5, 0.25):
        layer = experts(act=ClampedSwiGLU(**{name: value}))
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        assert torch.equal(call(compiled, 12, SIZES[0]), call(layer, 12, SIZES[0]))

    assert counter.frame_count == 3


def test_config_is_guarded_on(counter: CompileCounter) -> None:
    model = experts()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for switches in ({}, {"disable_fusions": ["GroupedMLP"]}, {"backend": "loop"}, {}, {"backend": "loop"}):
        with fusible.config(**switches):
            assert torch.equal(call(compiled, 12, SIZES[0]), call(model, 12, SIZES[0]))

    assert counter.frame_count == 3


def test_config_inside_of_the_compiled_function() -> None:
    targets = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(node.args[0] for node in graph.graph.nodes if node.op == "call_function" and node.args)
        return graph

    model = experts()

    def function(x: Tensor, **given: Tensor) -> Any:
        with fusible.config(disable_fusions=["GroupedMLP"]):
            y = model(x, **given)
        return model(y, **given)

    compiled = torch.compile(function, fullgraph=True, backend=backend)

    assert torch.equal(call(compiled, 12, SIZES[0]), call(function, 12, SIZES[0]))
    steps = [target.split(": ")[1] for target in targets if isinstance(target, str)]
    assert steps == ["GroupedLinearGLU", "GroupedLinear", "GroupedMLP"]


def test_a_new_fusion_is_seen(counter: CompileCounter) -> None:
    model, x = Sequential(Linear(8, 8), Activation("relu")), torch.randn(4, 8)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    before = compiled(x)

    class Nothing(FusedOp):
        def fwd(self, x: Tensor) -> tuple[Tensor, None]:
            return torch.zeros_like(x), None

        def bwd(self, saved: Any, dy: Tensor) -> Grads:
            return {}

    fusible.register_fusion(Pattern.path(linear=Linear, act=Activation))(Nothing)
    with torch.no_grad():
        assert torch.equal(compiled(x), torch.zeros(4, 8))
    fusible.unregister(Nothing)

    assert torch.equal(compiled(x), before)


def test_structure_and_parameters_are_seen(counter: CompileCounter) -> None:
    model, x = Sequential(Linear(8, 8)), torch.randn(4, 8)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    compiled(x)
    edits: list[Callable[[], Any]] = [
        lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(8, 8))),
        lambda: model.append(Activation("relu")),
        lambda: setattr(model[0], "bias", None),
    ]
    counts = []
    for edit in edits:
        edit()
        assert torch.equal(compiled(x), model(x))
        counts.append(counter.frame_count)

    assert counts == [1, 2, 3]


class Own(Op):
    """An op of a user's, with everything that an op may depend on."""

    class Saved(NamedTuple):
        factor: Tensor

    def __init__(self, power: int, curve: Callable[[Tensor], Tensor], table: Tensor) -> None:
        super().__init__()
        self.power, self.curve, self.table = {"power": [power]}, curve, table
        self.register_buffer("offset", torch.full((), 0.5))
        self.inner = nn.Linear(1, 1)

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        factor = self.table ** self.power["power"][0] + self.offset + self.inner.weight.detach()
        return self.curve(x) * factor, self.Saved(factor)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return {"x": dy * saved.factor, "inner.weight": None, "inner.bias": None}


def test_an_op_of_ones_own_is_compiled_by_value() -> None:
    counter = CompileCounter()
    curves = [lambda x, k=k: x + k for k in (0.0, 1.0)]
    made = [Own(2, curves[0], torch.rand(8)), Own(2, curves[1], torch.rand(8)), Own(3, curves[0], torch.rand(8))]
    for op in made:
        model, x = Sequential(op, Linear(8, 8)), torch.randn(4, 8)
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        assert torch.equal(compiled(x), model(x))
        op.offset.fill_(2.0)
        op.table = torch.rand(8)
        assert torch.equal(compiled(x), model(x))

    assert counter.frame_count == 3  # an attribute that is a function is compared by the op that has it


class Times(Op):
    """An op with a number that its class sets."""

    factor = 2.0

    class Saved(NamedTuple):
        factor: float

    def fwd(self, x: Tensor) -> tuple[Tensor, Saved]:
        return x * self.factor, self.Saved(self.factor)

    def bwd(self, saved: Saved, dy: Tensor) -> Grads:
        return {"x": dy * saved.factor}


EDITS: dict[str, Callable[[Op], None]] = {
    "a number": lambda op: setattr(op, "factor", 3.0),
    "the class's number": lambda op: setattr(type(op), "factor", 3.0),
    "forward": lambda op: setattr(op, "forward", lambda x: x - 1),
    "fwd": lambda op: setattr(op, "fwd", lambda x: (x - 1, None)),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("alone", [False, True])
def test_what_an_op_is_given_in_place_of_its_class_s_is_seen(
    monkeypatch: pytest.MonkeyPatch, edit: str, alone: bool
) -> None:
    monkeypatch.setattr(Times, "factor", 2.0)
    op, x = Times(), torch.randn(4, 8)
    model: Any = op if alone else Sequential(op, Activation("relu"))
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    EDITS[edit](op)

    assert torch.equal(compiled(x), model(x))


GIVEN = {"split_sizes": SIZES[0], "scales": torch.rand(12)}
MISUSES: list[tuple[dict[str, Any], str]] = [
    ({"scales": None}, "needs 'scales'"),
    ({"foo": 1}, "no op takes the keyword 'foo'"),
    ({"op_kwargs": {9: {}}}, "index 9 is out of range"),
    ({"op_kwargs": {nn.Identity(): {}}}, "this Identity is not in the container"),
    ({"op_kwargs": [1]}, "op_kwargs must map ops to their keywords"),
    ({"split_sizes": torch.tensor([1, 2])}, "expected shape [3], one size a group"),
    ({"x": torch.randn(12, 9)}, "op 0 (GroupedLinear): x: expected 8 features"),
    ({"op_kwargs": {3: {"output": torch.zeros(12, 8, requires_grad=True)}}}, "output: requires grad"),
]


@pytest.mark.parametrize(("change", "message"), MISUSES, ids=[message for _, message in MISUSES])
def test_errors_say_what_eager_says(change: dict[str, Any], message: str) -> None:
    compiled = torch.compile(experts(), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError) as error:
        compiled(**{"x": torch.randn(12, 8), **GIVEN, **change})

    assert message in str(error.value)


def test_a_refused_fusion_is_an_error_under_strict() -> None:
    compiled = torch.compile(experts(), fullgraph=True, backend="eager")
    own = {1: {}, 0: {"output": torch.zeros(12, 16)}}
    with fusible.config(strict=True), pytest.raises(RuntimeError, match="strict: a fusion was refused"):
        compiled(torch.randn(12, 8), **GIVEN, op_kwargs=own)


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "accumulate_into_main_grad"])
def test_weight_gradients_that_bypass_autograd_are_refused(option: str) -> None:
    compiled = torch.compile(experts(**{option: True}), fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=rf"op 0 \(GroupedLinear\): {option} .* which compiled code cannot"):
        compiled(torch.randn(12, 8), **GIVEN)


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "accumulate_into_main_grad"])
def test_without_a_gradient_they_compile(option: str) -> None:
    model, x = experts(**{option: True}), torch.randn(12, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.equal(compiled(x, **GIVEN), model(x, **GIVEN))


def test_without_fullgraph_they_run_eagerly() -> None:
    model, x = experts(delay_wgrad_compute=True), torch.randn(12, 8)
    model(x, **GIVEN).sum().backward()
    model[0].backward_dw()
    expected, model[0].weight.grad = model[0].weight.grad, None
    torch.compile(model, backend="aot_eager")(x, **GIVEN).sum().backward()
    model[0].backward_dw()

    assert torch.equal(model[0].weight.grad, expected)


def test_explain_is_unaffected() -> None:
    model, x = experts(), torch.randn(12, 8)
    model(x, **GIVEN)
    before = str(model.explain())
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(torch.randn(20, 8), split_sizes=SIZES[2], scales=torch.rand(20))

    assert str(model.explain()) == before
    assert str(compiled.explain(x, **GIVEN)) == before
