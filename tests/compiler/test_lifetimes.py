"""State of calls is freed with its owner, by reference counting: memory of a device does not wait for a sweep."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from models import mlp
from torch import Tensor, nn

from fusible import (
    AddExtraInput,
    GroupedLinear,
    Linear,
    MakeExtraOutput,
    Pattern,
    Scale,
    ScaledSwiGLU,
    Sequential,
    SwiGLU,
    config,
    explain,
    register_fusion,
)
from fusible.fuser import FusedOp
from fusible.fuser.dynamo import steps as program

SIZES, X = [2, 1], torch.randn(3, 4)
KEYWORDS: dict[str, Any] = {"split_sizes": SIZES, "scales": torch.ones(3)}


pytestmark = pytest.mark.usefixtures("collector_off")


def fc1(**how: Any) -> GroupedLinear:
    return GroupedLinear(2, 4, 8, **how)


def fc2(**how: Any) -> GroupedLinear:
    return GroupedLinear(2, 4, 4, **how)


def watched(module: nn.Module) -> list[Any]:
    """Weak references to the module's parameters."""
    return [weakref.ref(p) for p in module.parameters()]


def alive(seen: list[Any]) -> int:
    return sum(ref() is not None for ref in seen)


def forward(model: nn.Module, x: Tensor = X) -> None:
    with torch.no_grad():
        model(x, **KEYWORDS)


def step(model: nn.Module) -> None:
    for _ in range(2):
        model(X, **KEYWORDS).sum().backward()


def explained(model: Any) -> Any:
    forward(model)
    found = model.explain()
    found.to_mermaid(), found.to_dot(), found.to_text(), str(found)
    return found


def with_main_grads(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)  # type: ignore[assignment]
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "fused": mlp,
    "one parameter an expert": lambda: mlp(single_grouped_weight=False, single_grouped_bias=False),
    "main_grad": lambda: with_main_grads(mlp(accumulate_into_main_grad=True)),
    "nested": lambda: Sequential(Sequential(fc1(), SwiGLU()), nn.Identity(), Sequential(Scale(), fc2())),
    "composite": lambda: Sequential(fc1(), ScaledSwiGLU(), fc2()),
    "other modules": lambda: Sequential(nn.Linear(4, 4), fc1(), SwiGLU(), Scale(), fc2(), nn.Linear(4, 4)),
    "channels": lambda: Sequential(MakeExtraOutput("r"), fc1(), SwiGLU(), Scale(), fc2(), AddExtraInput("r")),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> list[nn.Module]:
    """A model in a list, from which the test takes it, so that nothing else holds it."""
    return [MODELS[request.param]()]


@pytest.mark.parametrize("use", [forward, step, explained])
@pytest.mark.parametrize("disabled", [set(), {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}])
def test_a_container_is_freed_with_its_last_reference(model: list[Any], use: Any, disabled: set[str]) -> None:
    seen = watched(model[0])
    with config(disable_fusions=disabled):
        use(model[0])
    model.clear()

    assert alive(seen) == 0


def test_an_explanation_keeps_no_weights() -> None:
    model = mlp()
    seen, found = watched(model), explained(model)
    del model

    assert alive(seen) == 0
    assert "GroupedLinear" in found.to_mermaid()
    assert "GroupedLinear" in pickle.loads(pickle.dumps(found)).to_text()


def test_a_condition_that_looks_at_the_edges_keeps_nothing() -> None:
    @register_fusion(Pattern.path(a=Linear, b=Linear).where("edges", lambda m: bool(m.graph.nx.edges)))
    class Both(FusedOp):
        def bwd(self, saved: Any, dy: Tensor, **keywords: Any) -> Any:
            return super().bwd(saved, dy, **keywords)

    model = Sequential(Linear(4, 4), Linear(4, 4))
    seen = watched(model)
    model(X)
    assert [s.name for s in model.explain().steps] == ["Both"]
    del model

    assert alive(seen) == 0


@pytest.mark.parametrize(
    "clone", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "deepcopy", "pickle"]
)
def test_original_and_clone_are_freed(model: list[Any], clone: Any) -> None:
    seen = watched(model[0])
    step(model[0])
    other = with_main_grads(clone(model[0]))
    step(other)
    seen += watched(other)
    del other
    model.clear()

    assert alive(seen) == 0


@pytest.mark.parametrize("op", [lambda: Linear(4, 4), lambda: fc1(single_grouped_weight=False), fc1, ScaledSwiGLU])
@pytest.mark.parametrize("explains", [False, True])
def test_an_op_alone_is_freed(op: Callable[[], Any], explains: bool) -> None:
    made = op()
    given = {k: v for k, v in KEYWORDS.items() if k in made.keywords}
    seen = [weakref.ref(made), *watched(made)]
    y = made(X.clone().requires_grad_(), **given)
    y.sum().backward()
    if explains:
        explain(made, X, **given)
    del y, made

    assert seen[0]() is None
    assert alive(seen[1:]) == 0


def test_a_graph_that_waits_for_its_backward_outlives_the_container() -> None:
    model, x = mlp(), X.clone().requires_grad_()
    seen, y = watched(model), model(x, **KEYWORDS)
    del model
    y.sum().backward()
    assert x.grad is not None
    del y

    assert alive(seen) == 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", [Sequential, nn.Sequential])
def test_a_compiled_container_is_freed_as_torchs_is(backend: str, kind: Any) -> None:
    model = kind(Linear(4, 4), Linear(4, 4)) if kind is Sequential else kind(nn.Linear(4, 4), nn.Linear(4, 4))
    seen, x = watched(model), X.clone()
    torch.compile(model, backend=backend)(x).sum().backward()
    model(x)
    torch._dynamo.reset()
    del model
    gc.collect()  # Dynamo's own cycles

    assert alive(seen) == 0


def test_steps_that_were_compiled_go_with_their_code() -> None:
    model, others = Sequential(Linear(4, 4), SwiGLU()), set(program._lowered)  # what other tests have compiled
    for backend in ("eager", "aot_eager") * 3:
        function = torch.compile(model, backend=backend)
        assert torch.equal(function(X), model(X))
        assert 0 < len(set(program._lowered) - others) <= 2
        del function
        torch._dynamo.reset()
        gc.collect()

    assert set(program._lowered) <= others


# ------------------------------------------------------------------------------------------------- edits


def _set(model: Any) -> None:
    model[0] = Linear(4, 4)


def _delete(model: Any) -> None:
    del model[0]


def _assign(model: Any) -> None:
    setattr(model, "0", Linear(4, 4))


def _pop(model: Any) -> None:
    model.pop(0)


def _slice(model: Any) -> None:
    del model[:1]


def _add(model: Any) -> None:
    model.add_module("0", Linear(4, 4))


EDITS = [_set, _delete, _assign, _pop, _slice, _add]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("use", [forward, step, explained])
def test_an_op_that_leaves_is_freed_at_once(edit: Any, nested: bool, use: Any) -> None:
    inner = mlp()
    outer = Sequential(nn.Identity(), inner) if nested else inner
    seen = watched(inner[0])
    use(outer)
    edit(inner)

    assert alive(seen) == 0


def test_a_part_of_a_composite_that_leaves_is_freed_at_once() -> None:
    composite = ScaledSwiGLU()
    model = Sequential(fc1(), composite, fc2())
    step(model)
    roles = list(composite._modules)
    seen = weakref.ref(composite._modules[roles[-1]])
    setattr(composite, roles[-1], Scale())

    assert seen() is None
    step(model)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("change", ["set", "register"])
def test_a_parameter_that_is_replaced_is_freed_at_once(single: bool, change: str) -> None:
    model = mlp(single_grouped_weight=single, single_grouped_bias=single)
    step(model)
    for name in list(model[0]._parameters):
        seen, other = weakref.ref(getattr(model[0], name)), nn.Parameter(getattr(model[0], name).detach().clone())
        if change == "set":
            setattr(model[0], name, other)
        else:
            model[0].register_parameter(name, other)
        assert seen() is None, name
    step(model)


def test_an_edit_of_many_does_not_forget_the_others() -> None:
    one, other = mlp(), mlp()
    forward(one)
    forward(other)
    _set(one)

    assert other.was_called
    assert not one.was_called


# ------------------------------------------------------------------------------------------------- transformers


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("switches", [{}, {"backend": "loop"}], ids=["routed", "container"])
def test_a_layer_of_transformers_is_freed(name: str, trains: bool, switches: dict[str, Any]) -> None:
    from hugging_face import experts_of, inputs, make

    import fusible.integrations.transformers  # noqa: F401

    whole = make(name)
    layer = experts_of(whole)[0]
    layer.config._experts_implementation = "fusible"
    arguments = inputs(layer, 5)
    seen = watched(layer)
    del whole
    gc.collect()  # cycles of the model that transformers builds
    with config(**switches), torch.set_grad_enabled(trains):
        for _ in range(2):
            y = layer(*arguments)
            if trains:
                y.sum().backward()
    explain(layer)
    del y, layer

    assert alive(seen) == 0
