"""Grouped linears with low-rank adapters: against merged weights in float64, alone, in containers, and fused."""

from __future__ import annotations

import pytest
import torch
from models import steps

from fusible import (
    Activation,
    ArgumentError,
    Combine,
    Dispatch,
    GroupedLinear,
    GroupedLoRA,
    Scale,
    Sequential,
    SwiGLU,
    config,
)

T, SLOTS, E, H, F, R = 11, 2, 5, 8, 12, 3
D = torch.float64
SIZES = torch.tensor([3, 0, 4, 2, 1])  # of 11 rows: the last is of no group


def linear(inputs: int = H, outputs: int = F, rank: int = R, **how) -> GroupedLoRA:
    op = GroupedLoRA(E, inputs, outputs, rank, **{"dtype": D, **how})
    for parameter in op.parameters():
        torch.nn.init.normal_(parameter)  # also of lora_b, which would start as zeros
    return op


def merged(op: GroupedLoRA) -> GroupedLinear:
    """A grouped linear of the sum, on tensors that autograd knows."""
    low = op.lora_b @ op.lora_a if op.rank else 0
    sum_of = op.weight + (low.mT if op.transposed_weight and op.rank else low)
    how = {"bias": op.has_bias, "transposed_weight": op.transposed_weight, "dtype": D}
    plain = GroupedLinear(E, op.in_features, op.out_features, **how)
    plain._parameters["weight"] = sum_of
    if op.has_bias:
        plain._parameters["bias"] = op.bias
    return plain


def gradients(y, *wanted):
    torch.manual_seed(1)
    return torch.autograd.grad(y, [t for t in wanted if t.requires_grad], torch.randn_like(y))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("rank", [0, R])
def test_it_is_the_linear_of_the_sum(rank: int, transposed: bool, bias: bool) -> None:
    op = linear(rank=rank, transposed_weight=transposed, bias=bias)
    x = torch.randn(T, H, dtype=D, requires_grad=True)
    y, expected = op(x, split_sizes=SIZES), merged(op)(x, split_sizes=SIZES)

    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, x, *op.parameters()), gradients(expected, x, *op.parameters()))


def test_leading_dimensions_and_lists() -> None:
    op, x = linear(), torch.randn(2, 5, H, dtype=D, requires_grad=True)
    y = op(x, split_sizes=SIZES.tolist())

    assert y.shape == (2, 5, F)
    flat = op(x.view(10, H), split_sizes=SIZES)
    torch.testing.assert_close(y.view(10, F), flat)
    torch.testing.assert_close(gradients(y, x), gradients(flat.view(2, 5, F), x))


def test_adapters_of_another_dtype_get_gradients_of_it() -> None:
    op = linear().to(torch.bfloat16)
    op.lora_a, op.lora_b = (torch.nn.Parameter(t.float()) for t in (op.lora_a, op.lora_b))
    op(torch.randn(T, H, dtype=torch.bfloat16), split_sizes=SIZES).sum().backward()

    assert {name: p.grad.dtype for name, p in op.named_parameters() if name != "bias"} == {
        "weight": torch.bfloat16,
        "lora_a": torch.float32,
        "lora_b": torch.float32,
    }
    assert not torch.equal(op.lora_a.grad, op.lora_a.grad.bfloat16().float())  # nor are they rounded in between


def test_lora_b_starts_as_zeros() -> None:
    op = GroupedLoRA(E, H, F, R)

    assert not op.lora_b.any()
    assert op.lora_a.any()


@pytest.mark.parametrize("rank", [-1, 2.5, True, "4"])
def test_a_rank_that_is_none_raises(rank) -> None:
    with pytest.raises(ArgumentError, match="rank must be an int from 0 on, 0 for no adapter, got"):
        GroupedLoRA(E, H, F, rank)


def test_a_parameter_of_another_shape_raises() -> None:
    op = linear()
    op.lora_a = torch.nn.Parameter(torch.randn(E, R + 1, H, dtype=D))

    with pytest.raises(ArgumentError, match="lora_a: expected a parameter of shape"):
        op(torch.randn(T, H, dtype=D), split_sizes=SIZES)


# --------------------------------------------------------------------------------------------------- a whole layer


def layer(ranks=(R, R), act=None, **how) -> Sequential:
    act = SwiGLU() if act is None else act
    fc1 = linear(H, F if isinstance(act, Activation) else 2 * F, ranks[0], **how)
    fc2 = linear(F, H, ranks[1], **how)
    return Sequential(Dispatch(E), fc1, act, fc2, Scale(), Combine())


def of_sums(model: Sequential) -> Sequential:
    dispatch, fc1, act, fc2, scale, combine = model
    return Sequential(dispatch, merged(fc1), act, merged(fc2), scale, combine)


def inputs(outside: bool = False):
    g = torch.Generator().manual_seed(3)
    index = torch.randint(0, E - 1, (T, SLOTS), generator=g)  # the last expert has no token
    if outside:
        index[::3, 1] = E + 2
    x = torch.randn(T, H, dtype=D, generator=g).requires_grad_()
    return x, index, torch.rand(T, SLOTS, dtype=D, generator=g).requires_grad_()


def run(model, x, index, weights):
    return model(x, top_k_index=index, top_k_weights=weights)


def freeze(model: Sequential, frozen: str) -> None:
    """``base``: all but the adapters; or a regular name of parameters; or nothing."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name if frozen == "base" else frozen not in name if frozen else True)


@pytest.mark.parametrize("frozen", ["", "base", "lora_a", "lora_b", "1.", "3.", "weight"])
@pytest.mark.parametrize("ranks", [(R, R), (R, 0), (0, R)])
def test_the_layer_is_that_of_the_sums(ranks, frozen: str) -> None:
    model, (x, index, weights) = layer(ranks), inputs(outside=True)
    freeze(model, frozen)
    y, expected = run(model, x, index, weights), run(of_sums(model), x, index, weights)
    wanted = x, weights, *model.parameters()

    assert steps(model) == ["RoutedLoRA"]
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients(y, *wanted), gradients(expected, *wanted))


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("act", [None, Activation("relu2")])
def test_the_layer_fused_is_the_layer_unfused(act, bias: bool, transposed: bool) -> None:
    model, (x, index, weights) = layer(act=act, bias=bias, transposed_weight=transposed), inputs(outside=True)
    wanted = x, weights, *model.parameters()
    y = run(model, x, index, weights)
    with config(disable_fusions={"RoutedLoRA"}):
        apart = run(model, x, index, weights)
        assert len(steps(model)) == 6

    torch.testing.assert_close(y, apart)
    torch.testing.assert_close(gradients(y, *wanted), gradients(apart, *wanted))


@pytest.mark.parametrize("needs", ["x", "weights", "adapters"])
def test_each_gradient_alone(needs: str) -> None:
    model, (x, index, weights) = layer(), inputs()
    freeze(model, "base")
    wanted = {"x": [x], "weights": [weights], "adapters": [p for p in model.parameters() if p.requires_grad]}[needs]
    for tensor in (x, weights, *model.parameters()):
        tensor.requires_grad_(any(tensor is one for one in wanted))
    y, expected = run(model, x, index, weights), run(of_sums(model), x, index, weights)

    torch.testing.assert_close(gradients(y, *wanted), gradients(expected, *wanted))


def test_frozen_weights_have_no_gradient_products(monkeypatch) -> None:
    from fusible.ops import kernels

    model, (x, index, weights) = layer(bias=False), inputs()
    freeze(model, "base")
    y = run(model, x, index, weights)
    shapes, product = [], kernels.grouped_gemm

    def seen(layout, a, b, *args, **how):
        out = product(layout, a, b, *args, **how)
        shapes.append((layout.value, tuple(out.shape)))
        return out

    monkeypatch.setattr(kernels, "grouped_gemm", seen)
    y.sum().backward()

    by_weight = [shape for layout, shape in shapes if layout == "TN"]
    assert sorted(by_weight) == sorted([(E, R, F), (E, H, R), (E, R, H), (E, 2 * F, R)])
    assert model[1].weight.grad is None
    assert model[1].lora_a.grad is not None


def test_it_keeps_tokens_preactivations_and_ranks() -> None:
    model, (x, index, weights) = layer(bias=False), inputs()
    freeze(model, "base")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        run(model, x, index, weights)
    parameters = {p.data_ptr() for p in model.parameters()}
    wide = sorted(tuple(t.shape) for t in kept if t.data_ptr() not in parameters and t.is_floating_point())

    assert wide == sorted([(T * SLOTS,), (T, H), (T * SLOTS, 2 * F), (T * SLOTS, R), (T * SLOTS, R)])


def test_autocast_computes_in_its_dtype() -> None:
    model, (x, index, weights) = layer().float(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        y = run(model, x.float(), index, weights.float())
    y.sum().backward()

    assert y.dtype == torch.bfloat16
    assert model[1].lora_a.grad.dtype == torch.float32


def test_without_gradients_nothing_is_kept() -> None:
    model, (x, index, weights) = layer(), inputs()
    with torch.no_grad():
        y = run(model, x, index, weights)

    assert y.grad_fn is None
    torch.testing.assert_close(y, run(model, x, index, weights).detach())


def test_explain_runs_it_without_data() -> None:
    model, (x, index, weights) = layer(), inputs()
    freeze(model, "base")
    (step,) = model.explain(x, top_k_index=index, top_k_weights=weights).steps

    assert (step.name, step.kernel) == ("RoutedLoRA", "torch + loop")
    assert step.backward is not None
    assert not step.backward_reason


def test_compiled_whole() -> None:
    model, (x, index, weights) = layer(), inputs(outside=True)
    freeze(model, "base")
    y, compiled = run(model, x, index, weights), torch.compile(model, backend="aot_eager", fullgraph=True)
    traced, wanted = run(compiled, x, index, weights), [x, weights, *model.parameters()]

    torch.testing.assert_close(traced, y)
    torch.testing.assert_close(gradients(traced, *wanted), gradients(y, *wanted))
