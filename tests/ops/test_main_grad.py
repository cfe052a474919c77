"""Weight gradients that go to ``main_grad``, and those that wait for ``backward_dw()``."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor

import models
import pytest
import reference
import torch
from reference import assert_close_to, assert_same, leaves, named_grads, unit
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fusible import Activation, GroupedLinear, Linear, Sequential, config

E, K, F, T = 3, 4, 6, 10
SIZES = torch.tensor([3, 0, 5])
FIRST = 0.5
FUSED = [True, False]


def mlp(single=True, **how):
    options = {"single_grouped_weight": single, "dtype": torch.float64, **how}
    return models.mlp(E, K, F, scaled=False, **options)


def weights(model):
    return {name: p for name, p in model.named_parameters() if "weight" in name}


def with_main_grad(model, fill=FIRST, dtype=None):
    for p in weights(model).values():
        p.main_grad = torch.full_like(p, fill, dtype=dtype)
    return model


def main_grads(model):
    return {name: p.main_grad for name, p in weights(model).items()}


def step(model, x, fused=True):
    with config(disable_fusions=set() if fused else {"GroupedMLP", "GroupedLinearGLU"}):
        y = model(x, split_sizes=SIZES)
    y[:8].square().sum().backward()
    return y


def expected_grads(model, x):
    """The weight gradients of plain autograd, by name."""
    plain = mlp(single=hasattr(model[0], "weight"), dtype=next(model.parameters()).dtype)
    plain.load_state_dict(model.state_dict())
    step(plain, x.detach().clone(), fused=False)
    return {name: p.grad for name, p in weights(plain).items()}


def plain_grads(model, x, dtype):
    """The gradients of plain torch in a dtype."""
    tensors = leaves({"x": x, **dict(model.named_parameters())}, dtype)
    names = {"w1": "0.weight", "b1": "0.bias", "w2": "2.weight", "b2": "2.bias"}
    how = {short: tensors[name] for short, name in names.items()}
    y = reference.mlp(tensors["x"], SIZES.tolist(), reference.glu("silu"), **how)
    named = [name for name in tensors if "weight" in name]
    return dict(zip(named, torch.autograd.grad(y[:8].square().sum(), [tensors[name] for name in named]), strict=True))


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("single", [True, False])
def test_main_grad_accumulates(single, fused):
    model, x = with_main_grad(mlp(single, accumulate_into_main_grad=True)), unit(T, K)
    step(model, x, fused)
    expected = {name: g + FIRST for name, g in expected_grads(model, x).items()}

    torch.testing.assert_close(main_grads(model), expected)
    assert {p.grad for p in weights(model).values()} == {None}


@pytest.mark.parametrize("single", [True, False])
def test_main_grad_accumulates_over_micro_batches(single):
    model, xs = with_main_grad(mlp(single, accumulate_into_main_grad=True)), [unit(T, K), unit(T, K)]
    for x in xs:
        step(model, x)
    one, two = (expected_grads(model, x) for x in xs)

    torch.testing.assert_close(main_grads(model), {name: FIRST + one[name] + two[name] for name in one})


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("single", [True, False])
def test_overwrite_main_grad_overwrites_nan(single, fused):
    model, x = with_main_grad(mlp(single, accumulate_into_main_grad=True), fill=float("nan")), unit(T, K)
    for p in weights(model).values():
        p.overwrite_main_grad = True
    step(model, x, fused)

    torch.testing.assert_close(main_grads(model), expected_grads(model, x))


def test_some_overwrite_and_some_accumulate():
    model, x = with_main_grad(mlp(False, accumulate_into_main_grad=True)), unit(T, K)
    model[0].weight0.overwrite_main_grad = True
    model[0].weight0.main_grad.fill_(float("nan"))
    step(model, x)
    expected = {name: g + (0 if name == "0.weight0" else FIRST) for name, g in expected_grads(model, x).items()}

    torch.testing.assert_close(main_grads(model), expected)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("single", [True, False])
def test_main_grad_of_another_dtype(single, main_dtype):
    model = with_main_grad(mlp(single, accumulate_into_main_grad=True, dtype=torch.bfloat16), dtype=main_dtype)
    wide = mlp(single).to(torch.float64)
    wide.load_state_dict(model.state_dict())
    x = unit(T, K, dtype=torch.bfloat16)
    step(model, x)
    expected = {name: (g + FIRST).to(main_dtype) for name, g in expected_grads(wide, x.double()).items()}

    torch.testing.assert_close(main_grads(model), expected, rtol=0.03, atol=0.1)


def test_float32_main_grad_is_not_rounded_to_the_weight():
    op = GroupedLinear(1, 1, 1, bias=False, dtype=torch.bfloat16, accumulate_into_main_grad=True)
    op.weight.main_grad = torch.zeros(1, 1, 1)
    x = torch.tensor([[1.0], [2.0**-10]], dtype=torch.bfloat16)
    op(x, split_sizes=[2]).sum().backward()

    assert op.weight.main_grad.item() == 1 + 2.0**-10


@pytest.mark.parametrize("shape", [(E * 2 * F, K), (E * 2 * F * K,), (E, 2 * F, K)])
def test_main_grad_of_a_viewable_shape(shape):
    model, x = with_main_grad(mlp(accumulate_into_main_grad=True)), unit(T, K)
    model[0].weight.main_grad = torch.zeros(shape, dtype=torch.float64)
    step(model, x)

    torch.testing.assert_close(model[0].weight.main_grad.view(E, 2 * F, K), expected_grads(model, x)["0.weight"])


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (torch.zeros(12, 12).mT, r"of shape \[12, 12\] and strides \[1, 12\], cannot be viewed as \[3, 12, 4\]"),
        (
            torch.zeros(E, K),
            r"must be floating-point, on cpu, of shape \[3, 12, 4\]; got torch.float32 on cpu, shape \[3, 4\]",
        ),
        (torch.zeros(E, 2 * F, K, dtype=torch.int32), "must be floating-point.* got torch.int32 on cpu"),
        (torch.zeros(E, 2 * F, K, device="meta"), "must be floating-point, on cpu.* got torch.float32 on meta"),
        (None, "which is not set; set it to a tensor of the parameter's shape before the backward"),
    ],
)
def test_unfit_main_grad_is_an_error_in_the_backward(main_grad, message):
    model = with_main_grad(mlp(accumulate_into_main_grad=True))
    model[0].weight.main_grad = main_grad

    with pytest.raises(RuntimeError, match="GroupedLinear: .*weight.main_grad.*" + message):
        step(model, unit(T, K))


def unfit(kind, weight):
    """A ``main_grad`` of the right shape that cannot be written."""
    if kind == "expanded":
        return torch.zeros(1, *weight.shape[1:], dtype=weight.dtype).expand(weight.shape)
    if kind == "the weight itself":
        return weight.detach()
    if kind == "sparse":
        return torch.zeros(weight.shape, dtype=weight.dtype).to_sparse()
    if kind == "float8":
        return torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
    with torch.inference_mode():
        return torch.zeros(weight.shape, dtype=weight.dtype)


UNFIT = {
    "expanded": r"strides \[0, 4, 1\], has elements that share memory",
    "the weight itself": "overlaps a parameter of the op in memory",
    "sparse": r"must be a plain dense tensor, got torch\.sparse_coo",
    "inference": r"was made under torch\.inference_mode\(\)",
    "float8": "must have at least 16 bits",
}


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("kind", UNFIT)
def test_main_grad_that_cannot_be_written_is_refused_in_words(kind, delay):
    model = with_main_grad(mlp(accumulate_into_main_grad=True, delay_wgrad_compute=delay))
    before = model[0].weight.detach().clone()
    model[0].weight.main_grad = unfit(kind, model[0].weight)

    if delay:
        step(model, unit(T, K))
    with pytest.raises(RuntimeError, match=r"GroupedLinear: weight\.main_grad.*" + UNFIT[kind]):
        model[0].backward_dw() if delay else step(model, unit(T, K))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("other", [0, 1])
def test_main_grad_in_the_memory_of_another_tensor_of_the_op_is_refused(other):
    model = with_main_grad(mlp(False, accumulate_into_main_grad=True))
    fc1 = model[0]
    fc1.weight2.main_grad = [fc1.weight1.detach(), fc1.weight0.main_grad][other]

    with pytest.raises(RuntimeError, match=r"weight\d\.main_grad overlaps (a parameter|weight\d\.main_grad)"):
        step(model, unit(T, K))
    assert fc1.weight0.main_grad.eq(FIRST).all()


@pytest.mark.parametrize("fused", FUSED)
def test_main_grad_in_a_buffer_of_the_backward_is_refused(fused):
    model, x = with_main_grad(mlp(accumulate_into_main_grad=True)), unit(T, K)
    memory = torch.zeros(E * 2 * F * K, dtype=torch.float64)
    model[0].weight.main_grad = memory.view(E, 2 * F, K)
    with config(disable_fusions=set() if fused else {"GroupedMLP", "GroupedLinearGLU"}):
        y = model(x, split_sizes=SIZES, op_kwargs={0: {"grad_input": memory[: T * K].view(T, K)}})

    with pytest.raises(RuntimeError, match=r"a buffer for a gradient overlaps in memory what that of .*weight is"):
        y.sum().backward()
    assert memory.eq(0).all()


def test_interleaved_main_grads_are_written():
    """They share no memory, though each begins before the other ends."""
    op, x = GroupedLinear(2, K, F, bias=False, accumulate_into_main_grad=True, single_grouped_weight=False), unit(T, K)
    memory = torch.zeros(F, 2 * K)
    for i, weight in enumerate(op.parameters()):
        weight.main_grad = memory[:, i * K : (i + 1) * K]
    op(x.float(), split_sizes=[4, 6]).sum().backward()

    torch.testing.assert_close(memory[0], torch.cat([x[:4].sum(0), x[4:].sum(0)]).detach().float())


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("delay", [True, False])
def test_main_grads_of_several_dtypes(overwrite, delay):
    model = with_main_grad(mlp(False, accumulate_into_main_grad=True, delay_wgrad_compute=delay, dtype=torch.float32))
    x = unit(T, K, dtype=torch.float32)
    for weight in weights(model).values():
        weight.overwrite_main_grad = overwrite
    model[0].weight2.main_grad = torch.full_like(model[0].weight2, FIRST, dtype=torch.float64)
    model[2].weight0.main_grad = torch.full_like(model[2].weight0, FIRST, dtype=torch.bfloat16)
    step(model, x)
    model[0].backward_dw()
    model[2].backward_dw()
    expected = {name: g + (0 if overwrite else FIRST) for name, g in expected_grads(model, x).items()}

    dtypes = {name: g.dtype for name, g in main_grads(model).items()}
    assert set(dtypes.values()) == {torch.float32, torch.float64, torch.bfloat16}
    for name, gradient in main_grads(model).items():
        torch.testing.assert_close(gradient, expected[name].to(dtypes[name]))


@pytest.mark.parametrize("single", [True, False])
def test_writing_main_grad_counts_as_a_change_in_place(single):
    model = with_main_grad(mlp(single, accumulate_into_main_grad=True))
    before = {name: g._version for name, g in main_grads(model).items()}
    step(model, unit(T, K))

    assert all(g._version > before[name] for name, g in main_grads(model).items())


def test_each_main_grad_in_one_buffer_counts_its_changes():
    model = with_main_grad(mlp(False, accumulate_into_main_grad=True))
    buffer = torch.zeros(E, 2 * F, K, dtype=torch.float64)
    for i, part in enumerate(buffer):
        getattr(model[0], f"weight{i}").main_grad = part.data  # which counts for itself
    step(model, unit(T, K))

    assert all(getattr(model[0], f"weight{i}").main_grad._version for i in range(E))


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_a_deleted_main_grad_is_freed(single, delay):
    model = with_main_grad(mlp(single, accumulate_into_main_grad=True, delay_wgrad_compute=delay))
    step(model, unit(T, K))
    model[0].backward_dw()
    model[2].backward_dw()
    memory = [StorageWeakRef(g.untyped_storage()) for g in main_grads(model).values()]
    for weight in weights(model).values():
        del weight.main_grad

    assert all(storage.expired() for storage in memory)


def test_new_memory_behind_a_main_grad_is_judged_again():
    model = with_main_grad(mlp(accumulate_into_main_grad=True))
    step(model, unit(T, K))
    model[0].weight.main_grad.data = model[0].weight.detach()

    with pytest.raises(RuntimeError, match="overlaps a parameter of the op"):
        step(model, unit(T, K))


@pytest.mark.parametrize("single", [True, False])
def test_another_form_of_the_memory_of_a_main_grad_is_seen(single):
    options = {"bias": False, "dtype": torch.float64, "single_grouped_weight": single}
    op, x = GroupedLinear(E, K, K, accumulate_into_main_grad=True, **options), unit(T, K)
    for weight in op.parameters():
        weight.main_grad = torch.zeros_like(weight)
    op(x, split_sizes=SIZES).square().sum().backward()
    before = [weight.main_grad.clone() for weight in op.parameters()]
    for weight in op.parameters():
        weight.main_grad.zero_().transpose_(-1, -2)
    op(x, split_sizes=SIZES).square().sum().backward()

    for weight, expected in zip(op.parameters(), before, strict=True):
        torch.testing.assert_close(weight.main_grad, expected)
        weight.main_grad.as_strided_((1, K), (K, 1))
    with pytest.raises(RuntimeError, match=r"main_grad must be floating-point.*shape \[1, 4\]"):
        op(x, split_sizes=SIZES).square().sum().backward()


WAYS = [{"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}]
WAYS.append(WAYS[0] | WAYS[1])


def untouched(model):
    return (
        all(g.eq(FIRST).all() for g in main_grads(model).values())
        and not any(op.has_delayed_wgrad() for op in (model[0], model[2]))
        and not any(getattr(p, "grad_added_to_main_grad", False) for p in weights(model).values())
    )


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("single", [True, False])
def test_a_gradient_of_x_alone_leaves_the_weights_gradients_alone(single, fused, how):
    model, x = with_main_grad(mlp(single, **how)), unit(T, K)
    for p in weights(model).values():
        p.grad_added_to_main_grad = False
    expected = mlp(single)
    expected.load_state_dict(model.state_dict())
    with config(disable_fusions=set() if fused else {"GroupedMLP", "GroupedLinearGLU"}):
        (gradient,) = torch.autograd.grad(model(x, split_sizes=SIZES)[:8].square().sum(), [x])
        model(x, split_sizes=SIZES)[:8].square().sum().backward(inputs=[x])

    torch.testing.assert_close(gradient, torch.autograd.grad(step_loss(expected, x), [x])[0])
    assert untouched(model)


def step_loss(model, x):
    return model(x, split_sizes=SIZES)[:8].square().sum()


@pytest.mark.parametrize("how", WAYS)
def test_a_gradient_of_one_weight_leaves_the_others_alone(how):
    model, x = with_main_grad(mlp(**how)), unit(T, K)
    step_loss(model, x).backward(inputs=[model[2].weight])
    model[0].backward_dw()
    model[2].backward_dw()
    expected = expected_grads(model, x)["2.weight"]
    got = model[2].weight.main_grad - FIRST if "accumulate_into_main_grad" in how else model[2].weight.grad

    assert model[0].weight.main_grad.eq(FIRST).all()
    assert model[0].weight.grad is None
    torch.testing.assert_close(got, expected)


def test_a_gradient_of_x_needs_no_main_grad():
    model, x = mlp(accumulate_into_main_grad=True), unit(T, K)

    assert torch.autograd.grad(step_loss(model, x), [x])[0].shape == x.shape


@pytest.mark.parametrize("how", WAYS[:2])
def test_a_gradient_of_x_under_checkpointing_leaves_the_weights_gradients_alone(how):
    model, x = with_main_grad(mlp(**how)), unit(T, K)
    loss = checkpoint(lambda x: step_loss(model, x), x, use_reentrant=False)
    torch.autograd.grad(loss, [x])

    assert untouched(model)


@pytest.mark.parametrize("fused", FUSED)
def test_missing_main_grad_is_no_error_in_the_forward(fused):
    model = mlp(accumulate_into_main_grad=True)
    with torch.no_grad():
        model(unit(T, K), split_sizes=SIZES)
    y = model.eval()(unit(T, K), split_sizes=SIZES)

    assert y.requires_grad


def test_missing_main_grad_of_a_frozen_weight_is_no_error():
    model, x = mlp(accumulate_into_main_grad=True), unit(T, K)
    for p in weights(model).values():
        p.requires_grad_(False)
    step(model, x)

    assert x.grad is not None


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_grad_added_to_main_grad_is_set_and_a_dummy_returned(single, zero):
    model = with_main_grad(mlp(single, accumulate_into_main_grad=True))
    for p in weights(model).values():
        p.grad_added_to_main_grad, p.zero_out_wgrad = False, zero
    step(model, unit(T, K))

    for p in weights(model).values():
        assert p.grad_added_to_main_grad is True
        assert p.grad.shape == p.shape
        assert not zero or p.grad.eq(0).all()


def test_get_main_grad_is_asked_at_every_backward():
    model, x, asked = mlp(accumulate_into_main_grad=True), unit(T, K), []
    for name, p in weights(model).items():
        p.main_grad = torch.zeros_like(p)
        p.get_main_grad = lambda p=p, name=name: asked.append(name) or p.main_grad
    step(model, x)
    step(model, x)

    assert sorted(asked) == ["0.weight"] * 2 + ["2.weight"] * 2


def test_some_frozen_experts_get_nothing():
    model, x = with_main_grad(mlp(False, accumulate_into_main_grad=True)), unit(T, K)
    model[0].weight0.requires_grad_(False)
    model[2].weight2.requires_grad_(False)
    step(model, x)
    expected = {name: g + FIRST for name, g in expected_grads(model, x).items()}
    for name in ("0.weight0", "2.weight2"):
        expected[name].fill_(FIRST)

    torch.testing.assert_close(main_grads(model), expected)


def test_empty_group_leaves_main_grad_unchanged():
    model = with_main_grad(mlp(accumulate_into_main_grad=True))
    step(model, unit(T, K))

    assert model[0].weight.main_grad[1].eq(FIRST).all()


def test_without_rows_main_grad_stays_or_is_zeroed():
    model = with_main_grad(mlp(accumulate_into_main_grad=True))
    model[2].weight.overwrite_main_grad = True
    model(unit(0, K), split_sizes=[0, 0, 0]).sum().backward()

    assert model[0].weight.main_grad.eq(FIRST).all()
    assert model[2].weight.main_grad.eq(0).all()


def test_main_grad_under_autocast():
    model = with_main_grad(mlp(dtype=torch.float32, accumulate_into_main_grad=True))
    with torch.autocast("cpu", torch.bfloat16):
        step(model, x := unit(T, K, dtype=torch.float32))
        plain = plain_grads(model, x, torch.float32)
    truth = plain_grads(model, x, torch.float64)

    for name, got in main_grads(model).items():
        assert_close_to(got, FIRST + plain[name], FIRST + truth[name], name)


def test_main_grad_under_checkpointing():
    model, x = with_main_grad(mlp(accumulate_into_main_grad=True)), unit(T, K)
    checkpoint(lambda x: model(x, split_sizes=SIZES), x, use_reentrant=False)[:8].square().sum().backward()
    expected = {name: g + FIRST for name, g in expected_grads(model, x).items()}

    torch.testing.assert_close(main_grads(model), expected)


@pytest.mark.parametrize("fused", FUSED)
@pytest.mark.parametrize("single", [True, False])
def test_delayed_weight_gradients_come_with_backward_dw(single, fused):
    model, x = mlp(single, delay_wgrad_compute=True), unit(T, K)
    step(model, x, fused)
    before = {p.grad for p in weights(model).values()}
    model[0].backward_dw()
    model[2].backward_dw()

    assert before == {None}
    torch.testing.assert_close({n: p.grad for n, p in weights(model).items()}, expected_grads(model, x))


@pytest.mark.parametrize("single", [True, False])
def test_backward_dw_adds_to_what_is_there(single):
    model, xs = mlp(single, delay_wgrad_compute=True), [unit(T, K), unit(T, K)]
    for x in xs:
        step(model, x)
    for _ in range(2):
        model[0].backward_dw()
        model[2].backward_dw()
    one, two = (expected_grads(model, x) for x in xs)

    torch.testing.assert_close(
        {n: p.grad for n, p in weights(model).items()}, {name: one[name] + two[name] for name in one}
    )


def test_backward_dw_after_each_backward_accumulates():
    model, xs = mlp(delay_wgrad_compute=True), [unit(T, K), unit(T, K)]
    for x in xs:
        step(model, x)
        model[0].backward_dw()
    one, two = (expected_grads(model, x)["0.weight"] for x in xs)

    torch.testing.assert_close(model[0].weight.grad, one + two)


def test_delayed_gradients_are_computed_first_in_first_out(monkeypatch):
    op, seen = GroupedLinear(1, K, F, bias=False, delay_wgrad_compute=True), []
    xs = [torch.full((1, K), float(i)) for i in range(3)]
    for x in xs:
        op(x, split_sizes=[1]).sum().backward()
    monkeypatch.setattr(op, "_write", lambda wgrad, *_: seen.append(wgrad()[0, 0, 0].item()))
    op.backward_dw()

    assert seen == [0.0, 1.0, 2.0]


def test_backward_dw_without_anything_delayed_does_nothing():
    op, ran = GroupedLinear(E, K, F, delay_wgrad_compute=True), []
    op.register_wgrad_accumulation_and_reduce_hooks(lambda: ran.append(1))
    op.backward_dw()

    assert op.weight.grad is None
    assert ran == []


@pytest.mark.parametrize("fused", FUSED)
def test_overwriting_x_before_backward_dw_is_detected(fused):
    model, x = mlp(delay_wgrad_compute=True), unit(T, K)
    step(model, x, fused)
    x.detach().zero_()

    with pytest.raises(RuntimeError, match="x or the gradient of y was modified in place since the backward"):
        model[0].backward_dw()


def test_has_delayed_wgrad_between_a_backward_and_backward_dw():
    model = mlp(delay_wgrad_compute=True)
    states = [model[0].has_delayed_wgrad()]
    step(model, unit(T, K))
    states.append(model[0].has_delayed_wgrad())
    model[0].backward_dw()

    assert [*states, model[0].has_delayed_wgrad()] == [False, True, False]


@pytest.mark.parametrize("delay", [True, False])
def test_need_backward_dw_says_whether_delay_is_configured(delay):
    """Megatron asks while it sets up, when nothing can wait yet."""
    assert mlp(delay_wgrad_compute=delay)[0].need_backward_dw() is delay


def test_hooks_run_after_the_gradients_are_there():
    model, seen = mlp(delay_wgrad_compute=True), []
    for i in range(2):
        model[0].register_wgrad_accumulation_and_reduce_hooks(
            lambda i=i: seen.append((i, model[0].weight.grad is None))
        )
    step(model, unit(T, K))
    model[0].backward_dw()

    assert seen == [(0, False), (1, False)]


@pytest.mark.parametrize("single", [True, False])
def test_delayed_into_main_grad(single):
    how = {"delay_wgrad_compute": True, "accumulate_into_main_grad": True}
    model, x = with_main_grad(mlp(single, **how)), unit(T, K)
    for p in weights(model).values():
        p.grad_added_to_main_grad = False
    step(model, x)
    untouched = all(g.eq(FIRST).all() for g in main_grads(model).values())
    model[0].backward_dw()
    model[2].backward_dw()

    assert untouched
    torch.testing.assert_close(main_grads(model), {n: g + FIRST for n, g in expected_grads(model, x).items()})
    assert all(p.grad_added_to_main_grad and p.grad.shape == p.shape for p in weights(model).values())


def test_delayed_without_main_grad_is_an_error_in_backward_dw():
    """Which loses nothing: once there is one, the next ``backward_dw()`` adds what waited."""
    model, x = mlp(delay_wgrad_compute=True, accumulate_into_main_grad=True), unit(T, K)
    step(model, x)

    with pytest.raises(RuntimeError, match=r"weight.main_grad, which is not set"):
        model[0].backward_dw()
    assert model[0].has_delayed_wgrad()
    with_main_grad(model)
    model[0].backward_dw()
    torch.testing.assert_close(model[0].weight.main_grad, expected_grads(model, x)["0.weight"] + FIRST)
    assert not model[0].has_delayed_wgrad()


@pytest.mark.parametrize("fused", FUSED)
def test_bias_gradients_come_in_the_backward(fused):
    model, plain, x = mlp(delay_wgrad_compute=True), mlp(), unit(T, K)
    plain.load_state_dict(model.state_dict())
    step(model, x, fused)
    step(plain, x, fused)

    for name in ("0.bias", "2.bias"):
        torch.testing.assert_close(named_grads(model)[name], named_grads(plain)[name])


def test_delayed_under_checkpointing_and_retain_graph():
    model, x = mlp(delay_wgrad_compute=True), unit(T, K)
    y = checkpoint(lambda x: model(x, split_sizes=SIZES), x, use_reentrant=False)
    y[:8].square().sum().backward(retain_graph=True)
    model[0].backward_dw()

    torch.testing.assert_close(model[0].weight.grad, expected_grads(model, x)["0.weight"])


def test_delayed_with_some_frozen_experts():
    model, x = mlp(False, delay_wgrad_compute=True), unit(T, K)
    model[0].weight0.requires_grad_(False)
    step(model, x)
    model[0].backward_dw()

    assert model[0].weight0.grad is None
    torch.testing.assert_close(model[0].weight2.grad, expected_grads(model, x)["0.weight2"])


def test_frozen_weight_delays_nothing():
    model = mlp(delay_wgrad_compute=True)
    model[0].weight.requires_grad_(False)
    step(model, unit(T, K))

    assert not model[0].has_delayed_wgrad()


def test_a_copy_has_no_delayed_gradients():
    model, x = mlp(delay_wgrad_compute=True), unit(T, K)
    step(model, x)
    other = copy.deepcopy(model)
    model[0].backward_dw()

    assert not other[0].has_delayed_wgrad()
    assert other[0].weight.grad is None


@pytest.mark.parametrize("how", WAYS[1:])
def test_backward_dw_refuses_a_weight_of_another_shape(how):
    model, x = with_main_grad(mlp(**how)), unit(T, K)
    step(model, x)
    weight = model[0].weight
    model[0].weight = torch.nn.Parameter(torch.zeros(E, F, K, dtype=torch.float64))

    with pytest.raises(RuntimeError, match=r"backward_dw: weight was a parameter of shape \[3, 12, 4\].*\[3, 6, 4\]"):
        model[0].backward_dw()
    assert model[0].weight.grad is None
    model[0].weight = weight
    model[0].backward_dw()
    got = weight.main_grad - FIRST if "accumulate_into_main_grad" in how else weight.grad
    torch.testing.assert_close(got, expected_grads(model, x)["0.weight"])


def test_a_gradient_that_cannot_be_computed_leaves_no_grad():
    model, x = mlp(delay_wgrad_compute=True), unit(T, K)
    step(model, x)
    x.detach().zero_()

    with pytest.raises(RuntimeError, match="modified in place"):
        model[0].backward_dw()
    assert model[0].weight.grad is None


@pytest.mark.parametrize("how", WAYS[1:])
@pytest.mark.parametrize("single", [True, False])
def test_a_weight_frozen_before_backward_dw_gets_nothing(single, how):
    model, x = with_main_grad(mlp(single, **how)), unit(T, K)
    step(model, x)
    frozen = model[0].weight if single else model[0].weight1
    frozen.requires_grad_(False)
    model[0].backward_dw()

    assert frozen.grad is None
    assert frozen.main_grad.eq(FIRST).all()
    assert not model[0].has_delayed_wgrad()
    if not single:
        last = model[0].weight2
        got = last.main_grad - FIRST if "accumulate_into_main_grad" in how else last.grad
        torch.testing.assert_close(got, expected_grads(model, x)["0.weight2"])


def test_backward_dw_of_several_threads_adds_each_gradient_once():
    op, count = GroupedLinear(1, 1, 1, bias=False, delay_wgrad_compute=True), 400
    for _ in range(count):
        op(torch.ones(1, 1), split_sizes=[1]).sum().backward()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for result in [pool.submit(op.backward_dw) for _ in range(4)]:
                result.result()
    finally:
        sys.setswitchinterval(before)

    assert op.weight.grad.item() == count


def assigned(model):
    model.load_state_dict({name: p.detach().clone() for name, p in model.state_dict().items()}, assign=True)
    return model


def attached(model):
    """As Megatron builds ops without memory, and attaches the parameters that its optimizer knows."""
    for name, p in weights(model).items():
        model.get_submodule(name[0]).register_parameter(name[2:], torch.nn.Parameter(p.detach().clone()))
    return model


def replaced(model):
    for name, parameter in list(model.named_parameters()):
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, torch.nn.Parameter(parameter.detach()))
    return model


def registered(model):
    for name, parameter in list(model.named_parameters()):
        path, _, last = name.rpartition(".")
        model.get_submodule(path).register_parameter(last, torch.nn.Parameter(parameter.detach()))
    return model


def converted(model):
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.to(torch.float32)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


CHANGES = {
    "built": lambda model: model,
    "copied": copy.deepcopy,
    "assigned": assigned,
    "attached": attached,
    "replaced": replaced,
    "registered": registered,
    "converted": converted,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("single", [True, False])
def test_delayed_weights_ask_for_no_post_hook(single, change):
    model = change(mlp(single, delay_wgrad_compute=True))

    assert all(getattr(p, "skip_backward_post_hook", False) for p in weights(model).values())


@pytest.mark.parametrize("how", [{"accumulate_into_main_grad": True}, {"delay_wgrad_compute": True}])
@pytest.mark.parametrize("single", [True, False])
def test_fused_and_unfused_write_the_same(single, how):
    x, results = unit(T, K), []
    model = mlp(single, **how)
    for fused in FUSED:
        with_main_grad(model, 0.0)
        model.zero_grad()
        step(model, x, fused)
        model[0].backward_dw()
        model[2].backward_dw()
        results.append({n: p.main_grad if p.grad is None else p.grad.clone() for n, p in weights(model).items()})

    torch.testing.assert_close(*results)
    assert_same(*results)


# ------------------------------------------------------------------------------------------------- without groups


def linears(accumulate, dtype=torch.float64, bias=True):
    how = {"dtype": dtype, "bias": bias}
    model = Sequential(
        Linear(K, F, accumulate_into_main_grad=accumulate, **how), Activation("silu"), Linear(F, K, **how)
    )
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter)
    return model


def backward(model, x):
    model(x).square().sum().backward()
    return model


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("shape", [(T, K), (2, T // 2, K), (0, K), (K,)])
def test_linear_accumulates_into_main_grad(shape, overwrite):
    ours, plain, x = linears(True), linears(False), unit(*shape)
    weight = ours[0].weight
    weight.main_grad, weight.overwrite_main_grad = torch.full_like(weight, FIRST), overwrite
    weight.grad_added_to_main_grad = False
    for times in (1, 2):
        backward(ours, x)
        backward(plain, x)
        added = plain[0].weight.grad / times if overwrite else plain[0].weight.grad + FIRST
        torch.testing.assert_close(weight.main_grad, added)

    assert weight.grad_added_to_main_grad
    torch.testing.assert_close([p.grad for p in ours[2].parameters()], [p.grad for p in plain[2].parameters()])
    torch.testing.assert_close(ours[0].bias.grad, plain[0].bias.grad)


def test_linear_rounds_nothing_on_the_way_to_a_wide_main_grad():
    ours, x = linears(True, torch.bfloat16), unit(T, K, dtype=torch.bfloat16)
    ours[0].weight.main_grad = torch.zeros(F, K)
    seen = []
    ours[0].register_full_backward_hook(lambda module, dx, dy: seen.append(dy[0]))
    backward(ours, x)

    expected = seen[0].double().mT @ x.detach().double()
    assert (ours[0].weight.main_grad - expected).norm() <= 1e-5 * expected.norm()


def test_linear_without_main_grad_raises_in_the_backward_alone():
    model, x = linears(True), unit(T, K)
    y = model(x)

    with pytest.raises(RuntimeError, match=r"Linear: accumulate_into_main_grad needs weight.main_grad"):
        y.sum().backward()
    with torch.no_grad():
        model(x)


def test_a_frozen_linear_needs_no_main_grad():
    model = linears(True)
    model[0].weight.requires_grad_(False)

    assert backward(model, unit(T, K))[0].weight.grad is None


def test_linear_with_main_grad_is_copied_saved_and_loaded():
    model, x = linears(True), unit(T, K)
    clone, other = copy.deepcopy(model), linears(False)
    other.load_state_dict(model.state_dict())

    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    torch.testing.assert_close([clone(x), other(x)], [model(x)] * 2)


def test_linear_with_main_grad_runs_eagerly_under_compile():
    model, x = linears(True), unit(T, K)
    model[0].weight.main_grad = torch.zeros_like(model[0].weight)
    torch.compiler.reset()
    torch.compile(model, backend="eager")(x).square().sum().backward()

    torch.testing.assert_close(model[0].weight.main_grad, backward(linears(False), x)[0].weight.grad)
