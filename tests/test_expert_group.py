"""One parameter an expert is one input of autograd, kept between calls: nobody must notice."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fusible import ArgumentError, GroupedLinear, Scale, Sequential, SwiGLU

E, K, F = 3, 4, 6
SIZES = torch.tensor([2, 0, 3])
X = torch.randn(5, K, dtype=torch.float64)
ONES = torch.ones(5, dtype=torch.float64)


def layer(**how):
    how = {"single_grouped_weight": False, "single_grouped_bias": False, "dtype": torch.float64, **how}
    return GroupedLinear(E, K, F, **how)


def grads(op):
    return {name: None if p.grad is None else p.grad.clone() for name, p in op.named_parameters()}


def step(op, x=X):
    op(x, split_sizes=SIZES).square().sum().backward()


def expected(op):
    """The gradients of a copy that has never been called."""
    fresh = copy.deepcopy(op)
    fresh.zero_grad()
    for own, other in zip(op.parameters(), fresh.parameters(), strict=True):
        other.requires_grad_(own.requires_grad)
    step(fresh)
    return grads(fresh)


def test_gradients_of_every_call_add_up():
    op = layer()
    one = expected(op)
    step(op)
    step(op)

    torch.testing.assert_close(grads(op), {name: 2 * g for name, g in one.items()})


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("in_container", [False, True])
def test_a_call_without_gradients_before_one_with(mode, in_container):
    op = layer()
    one = expected(op)
    called = Sequential(op) if in_container else op
    with mode():
        called(X, split_sizes=SIZES)
        op._groups["weight"].whole(False)
    step(called)

    torch.testing.assert_close(grads(op), one)


def test_two_calls_in_one_graph_add_up():
    op = layer()
    one = expected(op)
    (op(X, split_sizes=SIZES).square().sum() + op(X, split_sizes=SIZES).square().sum()).backward()

    torch.testing.assert_close(grads(op), {name: 2 * g for name, g in one.items()})


def test_a_graph_that_is_retained_runs_again():
    op = layer()
    one, loss = expected(op), op(X, split_sizes=SIZES).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()

    torch.testing.assert_close(grads(op), {name: 2 * g for name, g in one.items()})


def test_freezing_and_thawing_is_seen():
    op = layer()
    step(op)
    for frozen in (True, False):
        op.zero_grad()
        op.weight1.requires_grad_(not frozen)
        op.bias2.requires_grad_(not frozen)
        step(op)
        assert (op.weight1.grad is None) == (op.bias2.grad is None) == frozen
        torch.testing.assert_close(grads(op), expected(op))


def test_a_replaced_parameter_gets_the_gradient():
    op = layer()
    step(op)
    old, op.weight1 = op.weight1, nn.Parameter(op.weight1.detach())  # the same memory
    old.grad = None
    op.zero_grad()
    step(op)

    assert old.grad is None
    torch.testing.assert_close(grads(op), expected(op))


def test_replaced_parameters_are_freed_before_the_next_call():
    op = layer()
    step(op)
    gone = weakref.ref(op.weight1)
    gc.collect()
    gc.disable()
    try:
        op.weight1 = nn.Parameter(torch.zeros(F, K).double())
        assert gone() is None
    finally:
        gc.enable()
    step(op)


def test_new_data_of_a_parameter_is_read():
    op = layer(bias=False)
    before = op(X, split_sizes=SIZES)
    op.weight0.data = torch.zeros_like(op.weight0)
    after = op(X, split_sizes=SIZES)

    assert after[:2].eq(0).all()
    assert torch.equal(after[2:], before[2:])


def test_an_optimizer_in_place_is_seen():
    op = layer()
    optimizer = torch.optim.SGD(op.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        step(op)
        torch.testing.assert_close(grads(op), expected(op))
        optimizer.step()


def test_overwritten_weights_are_noticed_by_the_backward():
    op = layer()
    x = X.clone().requires_grad_()
    op(x, split_sizes=SIZES).sum().backward()
    y = op(x, split_sizes=SIZES)
    with torch.no_grad():
        op.weight0.add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_hooks_of_parameters_run():
    op, seen = layer(), []
    step(op)
    op.weight0.register_hook(lambda g: seen.append("hook"))
    op.weight0.register_post_accumulate_grad_hook(lambda p: seen.append("post"))
    step(op)

    assert seen == ["hook", "post"]


def test_gradients_of_some_parameters_only():
    op = layer()
    one = expected(op)
    for _ in range(2):
        loss = op(X, split_sizes=SIZES).square().sum()
        weight2, bias0 = torch.autograd.grad(loss, [op.weight2, op.bias0])
        torch.testing.assert_close((weight2, bias0), (one["weight2"], one["bias0"]))
    assert all(p.grad is None for p in op.parameters())


def test_gradients_are_kept_without_a_copy():
    op = layer()
    step(op)
    storages = {p.grad.untyped_storage().data_ptr() for name, p in op.named_parameters() if name.startswith("weight")}

    assert len(storages) == 1


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))], ids=["copy", "pickle"])
def test_a_copy_of_a_called_op_is_independent(clone):
    op = layer()
    step(op)
    other = clone(op)
    op.zero_grad()
    other.zero_grad()
    step(other)

    assert all(p.grad is None for p in op.parameters())
    torch.testing.assert_close(grads(other), expected(op))


def test_another_dtype_after_a_call():
    op = layer()
    step(op)
    op.zero_grad()
    op.float()
    op(X.float(), split_sizes=SIZES).square().sum().backward()

    assert {p.grad.dtype for p in op.parameters()} == {torch.float32}


def test_under_checkpointing():
    op = layer()
    one, x = expected(op), X.clone().requires_grad_()
    step(op)
    op.zero_grad()
    checkpoint(lambda x: op(x, split_sizes=SIZES), x, use_reentrant=False).square().sum().backward()

    torch.testing.assert_close(grads(op), one)


def test_inference_mode_leaves_nothing_behind():
    op = layer()
    with torch.inference_mode():
        op(X, split_sizes=SIZES)
    step(op)

    torch.testing.assert_close(grads(op), expected(op))


def test_an_op_that_is_dropped_is_freed():
    op = layer()
    step(op)
    gone = weakref.ref(op.weight0)
    gc.collect()
    gc.disable()
    try:
        del op
        assert gone() is None
    finally:
        gc.enable()


def test_only_flagged_parameters_get_a_sign_for_main_grad():
    fc1, fc2 = (
        GroupedLinear(E, K, n, bias=False, accumulate_into_main_grad=True, single_grouped_weight=False) for n in (8, 4)
    )
    model = Sequential(fc1, SwiGLU(), Scale(), fc2)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p)
    fc1.weight1.grad_added_to_main_grad = False
    fc1.weight1.zero_out_wgrad = True
    for _ in range(2):
        fc1.weight1.grad = None
        model(X.float(), split_sizes=SIZES, scales=ONES.float()).sum().backward()

    assert fc1.weight1.grad_added_to_main_grad
    assert fc1.weight1.grad.eq(0).all()
    assert {p.grad for p in model.parameters() if p is not fc1.weight1} == {None}
    assert fc1.weight0.main_grad.ne(0).any()


def test_another_main_grad_is_written():
    op = layer(bias=False, accumulate_into_main_grad=True)
    results = []
    for _ in range(2):
        for p in op.parameters():
            p.main_grad = torch.zeros_like(p)
        step(op)
        results.append([p.main_grad for p in op.parameters()])

    torch.testing.assert_close(*results)
    assert results[0][0] is not results[1][0]
    assert results[1][0].ne(0).any()


@pytest.mark.parametrize("data", [torch.zeros(F - 1, K).double(), torch.zeros(F, K), torch.zeros(K, F).double()])
@pytest.mark.parametrize("fused", [False, True])
def test_memory_of_another_form_behind_a_parameter_is_refused(data, fused):
    op = layer()
    model = Sequential(op, SwiGLU()) if fused else Sequential(op)
    model(X, split_sizes=SIZES)
    before, op.weight2.data = op.weight2.data, data

    for _ in range(2):
        with pytest.raises(
            ArgumentError, match=r"weight2: expected shape \[6, 4\], torch.float64 on cpu, like weight0"
        ):
            model(X, split_sizes=SIZES)
    op.weight2.data = before
    model(X, split_sizes=SIZES)
