"""Dispatch, experts, Combine: one RoutedMLP where it fits, the same steps one by one where not, and what it keeps."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from checks.routing import check_ids_that_lie_stay_inside
from models import steps
from torch.utils.checkpoint import checkpoint

from fusible import (
    Activation,
    ArgumentError,
    Combine,
    Dispatch,
    GroupedLinear,
    Identity,
    Scale,
    Sequential,
    SwiGLU,
    config,
    interleaved,
)
from fusible.ops.kernels.doors.routing import by_torch

T, K_SLOTS, E, H, F = 11, 2, 5, 8, 12
D = torch.float64
UNFUSED = {"RoutedMLP", "GroupedMLP", "GroupedLinearGLU", "GLUScale"}


def layer(scale="after", bias=True, act=None, **how):
    act = SwiGLU() if act is None else act
    fc1 = GroupedLinear(E, H, F if isinstance(act, Activation) else 2 * F, bias=bias, dtype=D, **how)
    fc2 = GroupedLinear(E, F, H, bias=bias, dtype=D, **how)
    before, after = ([Scale()] if scale in (place, "both") else [] for place in ("before", "after"))
    return Sequential(Dispatch(E), fc1, act, *before, fc2, *after, Combine())


def inputs(tokens=T, outside=False, dtype=D):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, H, dtype=dtype, generator=g).requires_grad_()
    index = torch.randint(0, E - 1, (tokens, K_SLOTS), generator=g)  # the last expert has no token
    if outside:
        index[::3, 1] = E + 2
        index[1::3, 0] = -1
    weights = torch.rand(tokens, K_SLOTS, dtype=dtype, generator=g).requires_grad_()
    return x, index, weights


def by_hand(model, x, index, weights, scale="after"):
    """Slot by slot, in plain torch."""
    ops = {type(op).__name__: op for op in model}
    fc1, fc2 = (op for op in model if isinstance(op, GroupedLinear))
    y = torch.zeros(x.shape, dtype=x.dtype)
    for slot in range(index.shape[1]):
        for e in range(E):
            chosen = (index[:, slot] == e).nonzero().view(-1)
            pre = x[chosen] @ fc1.weight[e].T + (fc1.bias[e] if fc1.has_bias else 0)
            if "Activation" in ops:
                hidden = torch.relu(pre).square()
            else:
                gate, up = pre.chunk(2, -1)
                hidden = torch.nn.functional.silu(gate) * up
            w = weights[chosen, slot].unsqueeze(-1)
            hidden = hidden * w if scale in ("before", "both") else hidden
            out = hidden @ fc2.weight[e].T + (fc2.bias[e] if fc2.has_bias else 0)
            out = out * w if scale in ("after", "both") else out
            y = y.index_add(0, chosen, out)
    return y


def run(model, x, index, weights):
    for tensor in (x, weights, *model.parameters()):
        tensor.grad = None
    y = model(x, top_k_index=index, top_k_weights=weights)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y))
    return [y.detach(), *[t.grad for t in (x, weights, *model.parameters())]]


def assert_close(a, b):
    for left, right in zip(a, b, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("scale", ["before", "after", "both", "nowhere"])
def test_one_step_gives_what_the_loop_gives(scale, bias, outside):
    model, (x, index, weights) = layer(scale, bias), inputs(outside=outside)
    fused = run(model, x, index, weights)
    assert steps(model) == ["RoutedMLP"]

    with config(disable_fusions=UNFUSED):
        unfused = run(model, x, index, weights)
        assert len(steps(model)) == len(model)
    assert_close(fused, unfused)

    for tensor in (x, weights, *model.parameters()):
        tensor.grad = None
    y = by_hand(model, x, index, weights, scale)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y))
    zeros = torch.zeros_like(weights)
    grads = [zeros if t.grad is None and t is weights else t.grad for t in (x, weights, *model.parameters())]
    assert_close(fused, [y.detach(), *grads])


def test_an_activation_without_a_gate():
    model, call = layer(act=Activation("relu2")), inputs()
    fused = run(model, *call)
    assert steps(model) == ["RoutedMLP"]
    torch.testing.assert_close(fused[0], by_hand(model, *call))


def test_the_experts_fuse_where_the_layer_does_not():
    model, call = layer(), inputs()
    expected = run(model, *call)
    with config(disable_fusions={"RoutedMLP"}):
        assert_close(run(model, *call), expected)
        assert steps(model) == ["Dispatch", "GroupedMLP", "Combine"]


def test_it_keeps_tokens_rather_than_rows():
    model, (x, index, weights) = layer(), inputs()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x, top_k_index=index, top_k_weights=weights)

    assert not [t for t in kept if t.shape == (T * K_SLOTS, H)]
    assert [t for t in kept if t.shape == (T, H)]


@pytest.mark.parametrize("frozen", ["x", "weights", "fc1.weight", "fc2.weight", "fc1.bias", "fc2.bias", "parameters"])
def test_frozen_parts(frozen):
    model, (x, index, weights) = layer(), inputs()
    named = {"x": x, "weights": weights}
    named |= {f"{fc}.{n}": getattr(model[i], n) for fc, i in (("fc1", 1), ("fc2", 3)) for n in ("weight", "bias")}
    whole = run(model, x, index, weights)
    cold = list(model.parameters()) if frozen == "parameters" else [named[frozen]]
    for tensor in cold:
        tensor.requires_grad_(False)
    part = run(model, x, index, weights)
    assert steps(model) == ["RoutedMLP"]
    leaves = [None, x, weights, *model.parameters()]
    for leaf, expected, got in zip(leaves, whole, part, strict=True):
        if leaf is not None and not leaf.requires_grad:
            assert got is None
        else:
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    model, call = layer(), inputs(tokens)
    fused = run(model, *call)
    assert fused[0].shape == (tokens, H)
    with config(disable_fusions=UNFUSED):
        assert_close(run(model, *call), fused)


def test_ids_that_lie_stay_inside():
    check_ids_that_lie_stay_inside("cpu")


def test_ids_of_no_expert_add_nothing_even_where_rows_hold_anything():
    """Between the two, elementwise ops know no experts: what they leave in rows of no expert must not count."""
    model = Sequential(Dispatch(E), Identity(), Combine())
    x, index, weights = inputs()
    index[:] = E
    index[0, 0] = 1
    y = model(x, top_k_index=index, top_k_weights=weights)
    expected = torch.zeros_like(x)
    expected[0] = x[0]
    assert torch.equal(y, expected)
    y.sum().backward()
    assert torch.equal(x.grad, (expected != 0).to(D))


@pytest.mark.parametrize("outside", [-1, -(2**31), E, 2**16, 2**16 + 1])
@pytest.mark.parametrize("path", ["one call", "kernel by kernel", "unfused"])
def test_ids_below_and_beyond_those_of_experts_are_of_none(path, outside):
    model, (x, index, weights) = layer(single_grouped_weight=path == "one call"), inputs(outside=True)
    index = index.int()
    with config(disable_fusions=UNFUSED if path == "unfused" else set()):
        expected = run(model, x, index, weights)
        index[::3, 1] = outside
        assert_close(run(model, x, index, weights), expected)
        index[:] = outside
        assert not any(gradient.any() for gradient in run(model, x, index, weights))


def test_ids_on_a_gpu_are_narrowed_only_within_those_of_experts(monkeypatch):
    ids = torch.tensor([[-1, 0, 2**16], [2, 2**15, E]])
    expected = by_torch(ids, E)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)  # many, so that they are sorted in 16 bits there
    many = by_torch(ids.repeat(1000, 1), E)
    assert many.tokens_per_expert.tolist() == [1000 * n for n in expected.tokens_per_expert.tolist()]


def test_main_grad_and_delayed_weight_gradients():
    model, call = layer(bias=False), inputs()
    expected = run(model, *call)
    for name, build in (("main_grad", {"accumulate_into_main_grad": True}), ("delay", {"delay_wgrad_compute": True})):
        other = layer(bias=False, **build)
        other.load_state_dict(model.state_dict())
        for p in other.parameters():
            p.main_grad = torch.zeros_like(p)
        got = run(other, *call)
        assert steps(other) == ["RoutedMLP"]
        assert_close(got[:3], expected[:3])
        if name == "delay":
            for i in (1, 3):
                other[i].backward_dw()
        for p, grad in zip(other.parameters(), expected[3:], strict=True):
            torch.testing.assert_close(p.main_grad if name == "main_grad" else p.grad, grad)


def test_one_parameter_an_expert():
    model, call = layer(), inputs()
    split = layer(single_grouped_weight=False, single_grouped_bias=False)
    split.load_state_dict(model.state_dict())
    got = split(call[0], top_k_index=call[1], top_k_weights=call[2])
    torch.testing.assert_close(got, model(call[0], top_k_index=call[1], top_k_weights=call[2]))
    assert steps(split) == ["RoutedMLP"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    model, (x, index, weights) = layer(), inputs()
    expected = run(model, x, index, weights)
    for tensor in (x, weights, *model.parameters()):
        tensor.grad = None
    y = checkpoint(lambda x, w: model(x, top_k_index=index, top_k_weights=w), x, weights, use_reentrant=reentrant)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y))
    assert_close([y.detach(), *[t.grad for t in (x, weights, *model.parameters())]], expected)


@pytest.mark.parametrize("fused", [True, False])
def test_compiled(fused):
    model, call = layer(), inputs()
    with config(disable_fusions=set() if fused else UNFUSED):
        expected = run(model, *call)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        y = compiled(call[0], top_k_index=call[1], top_k_weights=call[2])
        torch.testing.assert_close(y.detach(), expected[0])
        for tensor in (call[0], call[2], *model.parameters()):
            tensor.grad = None
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y))
        assert_close([t.grad for t in (call[0], call[2], *model.parameters())], expected[1:])


def test_autocast_matches_the_unfused_layer():
    model = layer().float()
    x, index, weights = inputs(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        fused = run(model, x, index, weights)
        with config(disable_fusions=UNFUSED):
            unfused = run(model, x, index, weights)
    assert [t.dtype for t in fused] == [t.dtype for t in unfused]
    for a, b in zip(fused, unfused, strict=True):
        torch.testing.assert_close(a.float(), b.float(), rtol=2**-6, atol=2**-6)


def test_gradients_are_those_of_finite_differences():
    model, (x, index, weights) = layer(), inputs(4)
    assert torch.autograd.gradcheck(lambda x, w: model(x, top_k_index=index, top_k_weights=w), (x, weights))


def test_copies_and_files():
    model, call = layer(), inputs()
    expected = run(model, *call)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_close(run(other, *call), expected)


def test_without_gradients():
    model, call = layer(), inputs()
    expected = run(model, *call)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(model(call[0], top_k_index=call[1], top_k_weights=call[2]), expected)


def test_why_a_layer_is_not_fused():
    call = inputs()
    model = Sequential(
        Dispatch(E), GroupedLinear(E + 1, H, 2 * F), SwiGLU(), GroupedLinear(E + 1, F, H), Scale(), Combine()
    ).to(D)
    with pytest.raises(ArgumentError, match="split_sizes"):
        model(call[0], top_k_index=call[1], top_k_weights=call[2])
    model = layer()
    model[1].register_forward_hook(lambda *_: None)
    run(model, *call)
    reasons = [f.reason for f in model.explain().fusions if f.name == "RoutedMLP"]
    assert len(reasons) == 1
    assert "hook" in reasons[0]


def test_interleaved_gates():
    model, call = layer(act=SwiGLU(layout=interleaved(3))), inputs()
    fused = run(model, *call)
    assert steps(model) == ["RoutedMLP"]
    with config(disable_fusions=UNFUSED):
        assert_close(run(model, *call), fused)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"top_k_index": torch.zeros(T + 1, K_SLOTS, dtype=torch.int64)}, r"top_k_index must be \[T, k\], T=11"),
        ({"top_k_index": [[0, 1]] * T}, r"top_k_index must be \[T, k\], T=11 as x has tokens, got a list"),
        ({"top_k_weights": [[0.5, 0.5]] * T}, r"top_k_weights must be \[T, k\], T=11 as x has tokens, got a list"),
        ({"top_k_index": torch.zeros(T, K_SLOTS)}, "top_k_index must be int32 or int64, got torch.float32"),
        ({"top_k_index": torch.zeros(T, 3, dtype=torch.int64)}, "must have one shape"),
        ({"top_k_weights": torch.zeros(T, K_SLOTS, dtype=torch.int64)}, "top_k_weights must be floating-point"),
        (
            {"top_k_weights": torch.zeros(T, K_SLOTS, dtype=torch.float8_e4m3fn)},
            "top_k_weights must be floating-point, of at least 16 bits, got torch.float8_e4m3fn",
        ),
        ({"top_k_index": torch.zeros(T, 0, dtype=torch.int64)}, r"top_k_index must be \[T, k\] with k at least 1, got"),
        ({"top_k_weights": torch.zeros(T, K_SLOTS, device="meta")}, "top_k_weights must be on cpu, as x, got meta"),
        ({"x": torch.zeros(2, T, H, dtype=D)}, r"x must be tokens \[T, H\], got shape \[2, 11, 8\]"),
    ],
)
@pytest.mark.parametrize("fused", [True, False])
def test_what_does_not_fit_is_refused_by_name(changes, words, fused):
    model, (x, index, weights) = layer(), inputs()
    call = {"x": x, "top_k_index": index, "top_k_weights": weights} | changes
    with (
        config(disable_fusions=set() if fused else UNFUSED),
        pytest.raises(ArgumentError, match=rf"op 0 \(Dispatch\).*{words}"),
    ):
        model(call.pop("x"), **call)


def test_rows_of_another_layer_are_refused():
    model = Sequential(Dispatch(E), Combine())
    call = inputs()
    with pytest.raises(ArgumentError, match=r"x must be the 22 rows of the Dispatch before it"):
        Combine()(
            call[0],
            num_rows=torch.zeros(1, dtype=torch.int32),
            slot_of_row=torch.arange(22),
            row_of_slot=torch.arange(22).view(11, 2),
        )
    assert torch.equal(model(call[0], top_k_index=call[1], top_k_weights=call[2]), 2 * call[0])


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "2"])
def test_a_number_of_experts_that_is_none(count):
    with pytest.raises(ValueError, match="Dispatch: num_experts must be a positive int"):
        Dispatch(count)
