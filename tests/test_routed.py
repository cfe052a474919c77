"""The routed layer as one function of autograd, on the CPU: what it keeps, what it takes, and when it stands aside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulation import harness
from torch import Tensor

from fusible import ArgumentError
from fusible.benchmarks.timing import kept_bytes, peak_bytes
from fusible.integrations import routed
from fusible.ops import inference, routed_backward
from fusible.ops.activation_spec import ActivationSpec
from fusible.ops.kernels.hopper.extension import TYPE_CODES
from fusible.ops.routed_mlp import Experts

E, K, F, T, SLOTS = 16, 512, 128, 512, 4
ROWS = T * SLOTS
FLOAT = 4
SMALL = 600_000  # orders, weights of the rows, and one group's rows between the loop's products
SPEC = ActivationSpec("silu", gated=True)


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.fixture
def layer() -> tuple[Experts, Tensor, Tensor, Tensor]:
    """Experts, tokens, ids, weights."""
    experts = Experts(tensor(E, 2 * F, K), tensor(E, K, F), None, None, SPEC, False)
    ids = torch.randint(E, (T, SLOTS), generator=torch.Generator().manual_seed(0))
    return experts, tensor(T, K), ids, torch.rand(T, SLOTS).requires_grad_()


def step(layer: Any) -> tuple[Tensor, ...]:
    experts, x, _, weights = layer
    y = routed.run(*layer)
    return torch.autograd.grad(y, [x, weights, *experts[:2]], torch.ones_like(y))


def test_keeps_the_pre_activation_and_not_the_rows(layer: Any) -> None:
    step(layer)
    kept = kept_bytes(lambda: routed.run(*layer))

    assert 0 <= kept - FLOAT * (2 * F * ROWS + K * T) <= SMALL  # and the output


def test_slices_of_rows_live_one_at_a_time(layer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak is at the second weights' gradient: all gradients, the output and that of it, hidden rows, a slice."""
    monkeypatch.setattr(routed_backward, "SLICED_FROM", 1)
    step(layer)
    experts, x, *_ = layer
    weights = sum(p.nbytes for p in experts[:2])
    last = weights + 3 * x.nbytes + FLOAT * ROWS * (F + K // 4)

    assert 0 <= peak_bytes(lambda: step(layer)) - last <= SMALL < FLOAT * ROWS * K // 4


def test_kept_tensors_are_let_go_of_unless_the_graph_stays(layer: Any) -> None:
    y = routed.run(*layer)
    node = y.grad_fn
    torch.autograd.grad(y, layer[1], torch.ones_like(y), retain_graph=True)
    assert node.saved_tensors
    torch.autograd.grad(y, layer[1], torch.ones_like(y))

    with pytest.raises(RuntimeError, match="already been freed"):
        node.saved_tensors  # noqa: B018


def test_differentiating_twice_is_an_error(layer: Any) -> None:
    y = routed.run(*layer)
    (dx,) = torch.autograd.grad(y.square().sum(), layer[1], create_graph=True)

    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_nothing_is_recorded_where_nothing_is_wanted(layer: Any) -> None:
    experts, x, ids, weights = layer
    plain = Experts(experts.up.detach(), experts.down.detach(), None, None, SPEC, False)

    assert routed.run(plain, x.detach(), ids, weights.detach()).grad_fn is None


def biased(layer: Any) -> tuple[Any, ...]:
    experts, *tokens = layer
    up_bias, down_bias = tensor(E, 2 * F).detach(), tensor(E, K).detach()
    return experts._replace(up_bias=up_bias, down_bias=down_bias), *tokens


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", ["up_bias", "down_bias", "up", "down", "top_k_index", "top_k_weights"])
def test_a_tensor_on_another_device_is_refused_by_name(name: str, grad: bool, layer: Any) -> None:
    """Its address would go to a kernel: a model may have been moved in part since its last call."""
    experts, x, index, weights = biased(layer)
    given = {"top_k_index": index, "top_k_weights": weights, **experts._asdict()}
    given[name] = given[name].to("meta")
    moved = given.pop("top_k_index"), given.pop("top_k_weights")

    with torch.set_grad_enabled(grad), pytest.raises(ArgumentError) as raised:
        routed.run(Experts(**given), x, *moved)
    assert str(raised.value) == f"{name}: expected a tensor on cpu, where x is, got one on meta"


@pytest.mark.parametrize(("name", "columns"), [("up_bias", 2 * F), ("down_bias", K)])
def test_biases_of_another_shape_are_refused(name: str, columns: int, layer: Any) -> None:
    experts, *tokens = biased(layer)

    with pytest.raises(ArgumentError, match=rf"{name}: expected shape \[16, {columns}\], got \[16, 8\]"):
        routed.run(experts._replace(**{name: torch.ones(E, 8)}), *tokens)


class Extension:
    """In place of the extension: makes calls and never runs one."""

    def RoutedMlp(self, *how: Any) -> tuple[Any, ...]:
        return how


@pytest.fixture
def weights_on_a_gpu() -> Iterator[Experts]:
    torch.manual_seed(0)
    up, down = torch.randn(E, 2 * F, K).bfloat16(), torch.randn(E, K, F).bfloat16()
    with harness.installed(Extension()):  # type: ignore[arg-type]
        yield Experts(up, down, torch.zeros(E, 4 * F).bfloat16()[:, : 2 * F], torch.zeros(E, K).bfloat16(), SPEC, False)


@pytest.mark.parametrize(
    "other",
    [
        lambda up, down: (up.view(torch.float16), down.view(torch.float16)),  # the dtype
        lambda up, down: (up.as_strided(up.shape, (2 * F, 1)), down),  # the pitch
        lambda up, down: (up, down.as_strided(down.shape, (0, 1))),
    ],
)
def test_one_call_of_a_layer_is_made_again_for_other_biases_at_the_same_addresses(
    other: Callable[..., tuple[Tensor, Tensor]], weights_on_a_gpu: Experts
) -> None:
    e = weights_on_a_gpu
    assert e.up_bias is not None
    up_bias, down_bias = other(e.up_bias, e.down_bias)
    made, remade = (inference.one_call(some) for some in (e, e._replace(up_bias=up_bias, down_bias=down_bias)))

    assert inference.one_call(e._replace(up_bias=up_bias, down_bias=down_bias)) is remade
    assert made is not None
    assert remade is not None
    assert made._run != remade._run


def test_biases_of_two_dtypes_are_not_read_as_one(weights_on_a_gpu: Experts) -> None:
    e = weights_on_a_gpu
    assert e.down_bias is not None
    alone = inference.one_call(e._replace(up_bias=None))

    assert inference.one_call(e._replace(down_bias=e.down_bias.float())) is None
    assert alone is not None
    assert alone._run[-1] == TYPE_CODES[torch.bfloat16]
