"""``fusible.functional.routed_experts``: a loop over experts in float64, on weights that the caller owns."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from typing import Any

import pytest
import torch
from reference import ACTIVATIONS, assert_same, glu
from torch import Tensor, nn

from fusible import ArgumentError, ClampedSwiGLU, SwiGLU, config, interleaved
from fusible.functional import routed_experts
from fusible.ops.routed import routed_experts as implementation

pytestmark = pytest.mark.usefixtures("fresh_compiler")
T, H, F, E, K = 9, 6, 4, 5, 2
D = torch.float64
NAMES = ("x", "top_k_weights", "w_up", "w_down", "up_bias", "down_bias")


def problem(tokens: int = T, rows: int = 2 * F, bias: bool = True, dtype: torch.dtype = D) -> dict[str, Tensor]:
    """The arguments of a call; the last expert has no token."""
    g = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=D).to(dtype).requires_grad_()

    call = {"x": draw(tokens, H), "top_k_weights": draw(tokens, K), "w_up": draw(E, rows, H), "w_down": draw(E, H, F)}
    call |= {"up_bias": draw(E, rows), "down_bias": draw(E, H)} if bias else {}
    return {**call, "top_k_index": torch.randint(0, E - 1, (tokens, K), generator=g)}


def by_loop(call: dict[str, Tensor], act: Any) -> Tensor:
    """Expert by expert, in plain torch."""
    x, index, weights = call["x"], call["top_k_index"], call["top_k_weights"]
    y = torch.zeros_like(x)
    for e in range(E):
        tokens, slots = (index == e).nonzero(as_tuple=True)
        pre = x[tokens] @ call["w_up"][e].T + (call["up_bias"][e] if "up_bias" in call else 0)
        out = act(pre) @ call["w_down"][e].T + (call["down_bias"][e] if "down_bias" in call else 0)
        y = y.index_add(0, tokens, out * weights[tokens, slots].unsqueeze(-1))
    return y


def results(y: Tensor, call: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """The output, and the gradients of what requires one."""
    leaves = {name: call[name] for name in NAMES if name in call and call[name].requires_grad}
    dy = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True) if leaves else ()
    return {"y": y.detach(), **dict(zip(leaves, grads, strict=True))}


def assert_close(ours: dict[str, Any], truth: dict[str, Any]) -> None:
    assert ours.keys() == truth.keys()
    for name in truth:
        torch.testing.assert_close(ours[name], truth[name], msg=lambda text, name=name: f"{name}: {text}")


SWIGLU = glu("silu")
CHOSEN: dict[str, tuple[Any, Any, Any]] = {
    "swiglu": ("swiglu", "concat", SWIGLU),
    "geglu, interleaved": ("geglu", interleaved(2), glu("gelu", block=2)),
    "geglu_tanh": ("geglu_tanh", "concat", glu("gelu_tanh")),
    "qgeglu": ("qgeglu", "concat", glu("quick_gelu")),
    "reglu": ("reglu", "concat", glu("relu")),
    "sreglu": ("sreglu", "concat", glu("relu2")),
    "clamped_swiglu": ("clamped_swiglu", "concat", glu("silu", limit=7.0, alpha=1.702, linear_offset=1.0)),
    "an op": (ClampedSwiGLU(limit=0.5), "concat", glu("silu", limit=0.5, alpha=1.702, linear_offset=1.0)),
    "relu2": ("relu2", "concat", ACTIVATIONS["relu2"]),
    "gelu": ("gelu", "concat", ACTIVATIONS["gelu"]),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_gives_what_a_loop_over_experts_gives(name: str) -> None:
    activation, layout, act = CHOSEN[name]
    call = problem(rows=F if name in ("relu2", "gelu") else 2 * F)
    ours = results(routed_experts(**call, activation=activation, layout=layout), call)

    assert_close(ours, results(by_loop(call, act), call))


@pytest.mark.parametrize("bias", [True, False])
def test_transposed_weights_give_the_same(bias: bool) -> None:
    call = problem(bias=bias)
    truth = results(by_loop(call, SWIGLU), call)
    stored = {**call, **{n: call[n].detach().mT.contiguous().requires_grad_() for n in ("w_up", "w_down")}}
    ours = results(routed_experts(**stored, transposed=True), stored)

    assert_close({**ours, "w_up": ours["w_up"].mT, "w_down": ours["w_down"].mT}, truth)


def test_gradients_reach_what_the_weights_were_computed_from() -> None:
    call = problem()
    base, low, high = call["w_up"].detach(), torch.randn(E, 2 * F, 1, dtype=D), torch.randn(E, 1, H, dtype=D)
    grads = []
    for function in (lambda c: routed_experts(**c), lambda c: by_loop(c, SWIGLU)):
        adapters = low.clone().requires_grad_(), high.clone().requires_grad_()
        function({**call, "w_up": base + adapters[0] @ adapters[1]}).square().sum().backward()
        grads.append([t.grad for t in adapters])

    torch.testing.assert_close(*grads)


def test_parameters_get_their_gradients() -> None:
    call = problem()
    truth = results(by_loop(call, SWIGLU), call)
    owned = {n: nn.Parameter(call[n].detach()) for n in ("w_up", "w_down")}
    y = routed_experts(**{**call, **owned})
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y))

    assert_close({n: p.grad for n, p in owned.items()}, {n: truth[n] for n in owned})


@pytest.mark.parametrize("frozen", [*NAMES, "everything"])
def test_frozen_parts_get_no_gradient_and_change_no_other(frozen: str) -> None:
    call = problem()
    truth = results(by_loop(call, SWIGLU), call)
    for name in NAMES if frozen == "everything" else [frozen]:
        call[name].requires_grad_(False)
        del truth[name]

    assert_close(results(routed_experts(**call), call), truth)


def test_it_keeps_tokens_rather_than_the_rows_of_the_experts() -> None:
    call, kept = problem(), list[Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        routed_experts(**call)

    assert [t for t in kept if t.shape == (T, H)]
    assert not [t for t in kept if t.shape == (T * K, H)]
    for name in ("w_up", "w_down"):
        assert any(t.data_ptr() == call[name].data_ptr() for t in kept), name


def test_layers_of_one_form_do_not_mix_up_their_weights() -> None:
    """Both run in one container before either backward runs."""
    calls = [problem(), {**problem(), "w_up": torch.randn(E, 2 * F, H, dtype=D, requires_grad=True)}]
    outputs = [routed_experts(**call) for call in calls]

    for y, call in zip(outputs, calls, strict=True):
        assert_close(results(y, call), results(by_loop(call, SWIGLU), call))


def test_threads_do_not_mix_up_their_weights() -> None:
    calls = [{**problem(), "w_down": torch.randn(E, H, F, dtype=D)} for _ in range(4)]
    wrong: list[int] = []

    def many(i: int) -> None:
        truth = by_loop(calls[i], SWIGLU)
        wrong.extend(i for _ in range(20) if not torch.allclose(routed_experts(**calls[i]), truth))

    threads = [threading.Thread(target=many, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []


def test_a_call_inside_of_a_call_has_a_container_of_its_own() -> None:
    call, inner = problem(), list[Tensor]()
    routed_experts(**call)  # so that a container waits in the pool

    def pack(tensor: Tensor) -> Tensor:
        if not inner:
            inner.append(tensor)
            with torch.no_grad():
                inner.append(routed_experts(**{**call, "w_up": torch.zeros_like(call["w_up"])}))
        return tensor

    steps = config(disable_fusions={"RoutedMLP", "GroupedMLP", "GroupedLinearGLU", "GLUScale"})
    with steps, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):  # called between one step and the next
        y = routed_experts(**call)

    assert len(inner) == 2
    assert_close(results(y, call), results(by_loop(call, SWIGLU), call))


@pytest.mark.parametrize("fits", [True, False])
def test_nothing_of_the_caller_is_kept(fits: bool) -> None:
    call = problem()
    held = [weakref.ref(tensor) for tensor in call.values()]
    if fits:
        routed_experts(**call)
    else:
        with pytest.raises(ArgumentError):
            routed_experts(**{**call, "top_k_index": call["top_k_index"][1:]})
    del call
    gc.collect()

    assert [ref() for ref in held if ref() is not None] == []


def test_the_pool_is_bounded() -> None:
    pool = implementation._Pool(2)
    forms = [_form(rows) for rows in (2, 4, 6)]
    for form in forms:
        pool.give_back(form, pool.take(form))

    assert list(pool._idle) == forms[2:]
    assert pool.take(forms[2]) is not pool.take(forms[2])


def _form(rows: int) -> Any:
    experts = implementation._Experts(torch.empty(E, rows, H), torch.empty(E, H, rows // 2), None, None)
    return implementation._PoolKey.of(experts, SwiGLU().spec, False)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens: int) -> None:
    call = problem(tokens)

    assert_close(results(routed_experts(**call), call), results(by_loop(call, SWIGLU), call))


def test_ids_of_no_expert_add_nothing() -> None:
    call = problem()
    call["top_k_index"][::2, 0] = E + 3

    assert_close(results(routed_experts(**call), call), results(by_loop(call, SWIGLU), call))


def test_gradients_are_those_of_finite_differences() -> None:
    call = problem(3)
    index = call.pop("top_k_index")
    names = list(call)

    assert torch.autograd.gradcheck(
        lambda *tensors: routed_experts(**dict(zip(names, tensors, strict=True)), top_k_index=index),
        tuple(call.values()),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_as_good_as_plain_torch_in_fewer_bits(dtype: torch.dtype) -> None:
    call = problem(dtype=dtype)
    exact = {
        n: t.detach().to(D).requires_grad_(t.requires_grad) if t.is_floating_point() else t for n, t in call.items()
    }
    truth, plain = results(by_loop(exact, SWIGLU), exact), results(by_loop(call, SWIGLU), call)
    ours = results(routed_experts(**call), call)

    for name, right in truth.items():
        error, allowed = ((t[name].double() - right).norm() for t in (ours, plain))
        assert ours[name].dtype == dtype
        assert error <= 2 * allowed + torch.finfo(dtype).eps * right.norm(), name


def test_autocast_computes_in_its_dtype() -> None:
    call = problem(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = routed_experts(**call)
    ours, truth = results(y, call), results(by_loop(call, SWIGLU), call)

    assert y.dtype == torch.bfloat16
    assert all(ours[n].dtype == torch.float32 for n in NAMES)
    for name, right in truth.items():
        torch.testing.assert_close(ours[name].float(), right, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("activation", ["swiglu", "relu2", ClampedSwiGLU(limit=0.5)], ids=str)
def test_compiled_as_one_graph_it_gives_the_bits_of_eager(activation: Any) -> None:
    call = problem(rows=F if activation == "relu2" else 2 * F)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(call: dict[str, Tensor]) -> Tensor:
        return routed_experts(**call, activation=activation)

    assert_same(results(compiled(call), call), results(routed_experts(**call, activation=activation), call))


def test_compiled_code_follows_the_switches() -> None:
    call, seen = problem(), list[list[str]]()

    def backend(graph: Any, example_inputs: Any) -> Any:
        def inner(graph: Any, inputs: Any) -> Any:
            seen.append([str(node.target) for node in graph.graph.nodes if "fusible" in str(node.target)])
            return graph

        from torch._dynamo.backends.common import aot_autograd

        return aot_autograd(fw_compiler=inner)(graph, example_inputs)

    compiled = torch.compile(lambda: routed_experts(**call), backend=backend, fullgraph=True)
    with torch.no_grad():
        compiled()
        with config(backend="loop"):
            compiled()
        with config(disable_fusions={"RoutedMLP", "GroupedMLP", "GroupedLinearGLU", "GLUScale"}):
            compiled()
        compiled()

    assert len(seen) == 3
    assert seen[0] != seen[2]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"w_up": torch.zeros(2 * F, H)}, "w_up must be [E, N, H], got shape [8, 6]"),
        ({"w_up": torch.zeros(2 * F, H), "transposed": True}, "w_up must be [E, H, N], got shape [8, 6]"),
        ({"w_up": [[1.0]]}, "w_up must be a tensor, got a list"),
        ({"up_bias": 0.0}, "up_bias must be a tensor, got a float"),
        ({"w_up": torch.zeros(E, 7, H, dtype=D)}, "w_up must have gate and up for silu, got shape [5, 7, 6]"),
        (
            {"w_up": torch.zeros(E, 8, H, dtype=D), "layout": interleaved(3)},
            "w_up must have blocks of 3 rows of gate and up for silu, got shape [5, 8, 6]",
        ),
        (
            {"w_down": torch.zeros(E, F, H, dtype=D)},
            "w_down must be [5, 6, 4], torch.float64, to fit w_up [5, 8, 6], got",
        ),
        ({"w_down": torch.zeros(E, H, F)}, "got [5, 6, 4], torch.float32"),
        ({"up_bias": torch.zeros(E, F, dtype=D)}, "up_bias must be [5, 8]"),
        ({"down_bias": torch.zeros(H, dtype=D)}, "down_bias must be [5, 6]"),
        ({"x": torch.zeros(T, H + 1, dtype=D)}, "x: expected 6 features"),
        ({"x": torch.zeros(T, H)}, "x: expected torch.float64"),
        ({"top_k_index": torch.zeros(T, K)}, "top_k_index must be int32 or int64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(words)) as raised:
        routed_experts(**{**problem(), **changes})
    assert str(raised.value).startswith("routed_experts: ")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": "swish"}, "activation must be one of swiglu, geglu,"),
        ({"layout": "blocked"}, "layout must be 'concat' or interleaved(n); got 'blocked'"),
        ({"activation": "relu2", "layout": interleaved(2)}, "layout: 'relu2' has no gate"),
        ({"activation": SwiGLU(), "layout": interleaved(2)}, "layout: SwiGLU has a layout of its own"),
    ],
)
def test_activations_that_are_none(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        routed_experts(**problem(), **changes)
