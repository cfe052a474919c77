"""Stand-ins that autograd and Megatron's hooks get for gradients in ``main_grad``."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from fusible import GroupedLinear

E, K, N = 3, 4, 6
SIZES = [2, 0, 3]
X = torch.randn(5, K)


def layer(single=True, columns=N, **how):
    op = GroupedLinear(E, K, columns, bias=False, accumulate_into_main_grad=True, single_grouped_weight=single, **how)
    for weight in op.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    return op


def step(op, times=1):
    for _ in range(times):
        op(X, split_sizes=SIZES).sum().backward()
        op.backward_dw()


def memory_of(tensor):
    return tensor.untyped_storage().data_ptr()


def megatron_hook(parameter, ready):
    """The hook of Megatron's data-parallel wrapper, which runs when a gradient is ready."""

    def hook(*unused):
        assert parameter.grad is not None
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        ready.append(parameter)

    return hook


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_hooks_that_overlap_communication_find_a_gradient(single, delay, zero):
    op, ready, accumulators = layer(single, delay_wgrad_compute=delay), [], []
    for weight in op.parameters():
        weight.zero_out_wgrad = zero
        hook = megatron_hook(weight, ready)
        if getattr(weight, "skip_backward_post_hook", False):
            op.register_wgrad_accumulation_and_reduce_hooks(hook)
        else:
            accumulators.append(weight.expand_as(weight).grad_fn.next_functions[0][0])
            accumulators[-1].register_hook(hook)
    step(op, times=3)

    expected = torch.stack([X[:2].sum(0), torch.zeros(K), X[2:].sum(0)])[:, None].expand(E, N, K)
    got = [weight.main_grad for weight in op.parameters()]
    torch.testing.assert_close(got[0] if single else torch.stack(got), 3 * expected)
    assert len(ready) == 3 * len(got)
    assert {weight.grad for weight in op.parameters()} == {None}


@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_weights_of_one_form_share_a_stand_in(single, delay):
    ops = [layer(single, delay_wgrad_compute=delay) for _ in range(2)]
    for op in ops:
        step(op, times=2)

    grads = [weight.grad for op in ops for weight in op.parameters()]
    assert {memory_of(grad) for grad in grads} == {memory_of(grads[0])}
    assert grads[0].untyped_storage().nbytes() == E * N * K * 4
    assert all(weight.grad.shape == weight.shape for op in ops for weight in op.parameters())


def test_stand_ins_of_other_forms_are_others():
    ops = [layer(), layer(columns=2 * N), layer().double()]
    for op in ops[:2]:
        step(op)
    ops[2].weight.main_grad = torch.zeros(E, N, K)
    ops[2](X.double(), split_sizes=SIZES).sum().backward()

    assert len({memory_of(op.weight.grad) for op in ops}) == 3
    assert ops[2].weight.grad.dtype == torch.float64


def test_sums_of_stand_ins_stay_finite():
    """As clipping and loss scaling look at every ``.grad``."""
    ops = [layer(), layer()]
    for _ in range(3):
        for op in ops:
            step(op)
    expected = [op.weight.main_grad.clone() / 3 for op in ops]
    for op, main_grad in zip(ops, expected, strict=True):
        assert op.weight.grad.eq(0).all()
        op.weight.main_grad.zero_()
        step(op)
        torch.testing.assert_close(op.weight.main_grad, main_grad)


def test_whatever_is_written_to_a_stand_in_reaches_no_main_grad():
    ops = [layer(), layer()]
    for op in ops:
        step(op)
    ops[0].weight.grad.fill_(float("nan"))
    before = [op.weight.main_grad.clone() for op in ops]
    for op in ops:
        step(op)

    torch.testing.assert_close([op.weight.main_grad for op in ops], [2 * g for g in before])


def test_zeros_are_nobody_elses():
    """Where they count: a gradient that autograd adds to one is in no other."""
    ops = [layer(), layer(), layer()]
    for op in ops[:2]:
        op.weight.zero_out_wgrad = True
    step(ops[2])
    ops[2].weight.grad.fill_(7.0)
    for op in ops[:2]:
        step(op)
    (3 * ops[0].weight).sum().backward()

    assert ops[0].weight.grad.eq(3).all()
    assert ops[1].weight.grad.eq(0).all()


def test_one_expert_that_wants_zeros_is_enough():
    op = layer(single=False)
    step(op)
    op.weight1.grad.fill_(7.0)
    op.zero_grad()
    op.weight1.zero_out_wgrad = True
    step(op)

    assert op.weight1.grad.eq(0).all()


def test_a_weight_with_another_use_gets_the_gradient_of_that():
    """As tied embeddings do, whose stand-in is zeros."""
    op = layer()
    op.weight.zero_out_wgrad = True
    ((2 * op.weight).sum() + op(X, split_sizes=SIZES).sum()).backward()

    assert op.weight.grad.eq(2).all()


@pytest.mark.usefixtures("collector_off")
def test_the_memory_goes_with_the_last_op():
    ops = [layer(columns=11), layer(columns=11)]
    for op in ops:
        step(op)
    memory = StorageWeakRef(ops[0].weight.grad.untyped_storage())
    for op in ops:
        op.zero_grad()
    del op
    ops.pop()
    kept = not memory.expired()
    ops.pop()
    assert kept
    assert memory.expired()


@pytest.mark.parametrize("change", [lambda op: op.double(), lambda op: op.to("meta")], ids=["double", "meta"])
def test_the_memory_goes_with_the_form(change):
    op = layer(columns=13)
    step(op)
    memory = StorageWeakRef(op.weight.grad.untyped_storage())
    op.zero_grad()
    change(op)

    assert memory.expired()


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))], ids=["copy", "pickle"])
def test_a_copy_has_its_own_main_grad(clone):
    op = layer(delay_wgrad_compute=True)
    step(op)
    before, other = op.weight.main_grad.clone(), clone(op)
    other.weight.main_grad, other.weight.grad_added_to_main_grad = torch.zeros(E, N, K), False
    step(other)

    assert torch.equal(op.weight.main_grad, before)
    torch.testing.assert_close(other.weight.main_grad, before)
    assert other.weight.grad is not None


def test_stand_ins_are_made_outside_of_inference_mode():
    op = layer(columns=17)
    y = op(X, split_sizes=SIZES).sum()
    with torch.inference_mode():
        op._stand_ins.memory(op.weight, tuple(op.weight.shape))
    y.backward()

    assert not op.weight.grad.is_inference()


def test_stand_ins_in_several_threads():
    ops = [layer(single) for single in (True, False) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(step, op, 10) for op in ops]:
            result.result()
    expected = layer()
    step(expected, times=10)

    for op in ops:
        got = [weight.main_grad for weight in op.parameters()]
        torch.testing.assert_close(got[0] if len(got) == 1 else torch.stack(got), expected.weight.main_grad)


def test_a_replaced_weight_gets_a_stand_in_of_its_own_form():
    op = layer()
    step(op)
    op.weight = nn.Parameter(torch.randn(E, N, K))
    op.weight.main_grad, op.weight.grad_added_to_main_grad = torch.zeros(E, N, K), False
    step(op)

    assert op.weight.grad.shape == op.weight.shape
