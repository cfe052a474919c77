"""One parameter per expert is one input of autograd, kept between calls without visible effects."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import numpy
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fusible import ArgumentError, GroupedLinear, Scale, Sequential, SwiGLU
from fusible.ops.parameters.group import as_one

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


@pytest.mark.usefixtures("collector_off")
def test_replaced_parameters_are_freed_before_the_next_call():
    op = layer()
    step(op)
    gone = weakref.ref(op.weight1)
    op.weight1 = nn.Parameter(torch.zeros(F, K).double())
    assert gone() is None
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_reaches_the_parameters_themselves(dtype):
    """Torch casts what it stacks under autocast: the gradients of its copies would not be those of parameters."""
    op = layer(dtype=dtype)
    for _ in range(2):
        with torch.autocast("cpu", torch.float16):
            y = op(X.to(dtype), split_sizes=SIZES)
        y.float().square().sum().backward()
    whole = op._groups["weight"].whole(False)
    leaves = [getattr(node, "variable", None) for node, _ in whole.grad_fn.next_functions]

    assert [p.grad.dtype for p in op.parameters()] == [dtype] * 2 * E
    assert all(a is b for a, b in zip(leaves, op.expert_parameters("weight"), strict=True))
    assert whole.untyped_storage().nbytes() == whole.element_size()


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


@pytest.mark.usefixtures("collector_off")
def test_an_op_that_is_dropped_is_freed():
    op = layer()
    step(op)
    gone = weakref.ref(op.weight0)
    del op
    assert gone() is None


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


def loaded(op):
    file = io.BytesIO()
    torch.save(op, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def assigned(op):
    other = copy.deepcopy(op)
    other.load_state_dict({name: p.clone() for name, p in op.state_dict().items()}, assign=True)
    return other.to(torch.float64)


MOVES = {"built": lambda op: op, "deepcopy": copy.deepcopy, "load": loaded, "assign": assigned, "to": nn.Module.double}


@pytest.mark.parametrize("expert", range(E))
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_step_of_any_expert_between_two_backwards_is_noticed(move, transposed, expert):
    op = MOVES[move](layer(bias=False, transposed_weight=transposed, dtype=torch.float32 if move == "to" else X.dtype))
    weight, x = getattr(op, f"weight{expert}"), X.clone().requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    first, second = (op(x, split_sizes=SIZES).square().sum() for _ in range(2))
    first.backward()
    optimizer.step()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


@pytest.mark.parametrize("expert", range(E))
def test_a_change_of_any_bias_that_scales_want_is_noticed(expert):
    op = copy.deepcopy(layer(scale_bias=True))
    y = op(X, split_sizes=SIZES, bias_scale=ONES.clone().requires_grad_())
    with torch.no_grad():
        getattr(op, f"bias{expert}").add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("expert", range(E))
def test_a_change_of_any_expert_of_a_fused_layer_is_noticed(expert):
    model = copy.deepcopy(Sequential(layer(), SwiGLU(), GroupedLinear(E, F // 2, K, single_grouped_weight=False)))
    model.double()
    y = model(X, split_sizes=SIZES)
    with torch.no_grad():
        getattr(model[2], f"weight{expert}").add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("single", [False, True])
def test_hooks_on_saved_tensors_see_parameters_not_views(single, transposed):
    """Offloading that leaves parameters where they are must know them."""
    op = layer(single_grouped_weight=single, transposed_weight=transposed, scale_bias=True)
    packed, expected = [], copy.deepcopy(op)
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        x, scale = X.clone().requires_grad_(), ONES.clone().requires_grad_()
        op(x, split_sizes=SIZES, bias_scale=scale).square().sum().backward()
    storages = {p.untyped_storage().data_ptr() for p in op.parameters()}
    views = [t for t in packed if t.untyped_storage().data_ptr() in storages and not isinstance(t, nn.Parameter)]

    assert not views
    assert {id(p) for p in op.parameters()} <= {id(t) for t in packed}
    other, scale = X.clone().requires_grad_(), ONES.clone().requires_grad_()
    expected(other, split_sizes=SIZES, bias_scale=scale).square().sum().backward()
    torch.testing.assert_close((x.grad, *grads(op).values()), (other.grad, *grads(expected).values()))


def test_a_backward_reads_what_hooks_on_saved_tensors_give():
    op, x = layer(), X.clone().requires_grad_()
    with saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 2 if t.shape == (F, K) else t):
        op(x, split_sizes=SIZES).sum().backward()
    other = X.clone().requires_grad_()
    op(other, split_sizes=SIZES).sum().backward()

    torch.testing.assert_close(x.grad, 2 * other.grad)


WIDE = torch.randn(5, F, dtype=torch.float64)


def looped(op, x):
    """Each group on its own, in plain torch."""
    parts = x.split(SIZES.tolist())
    return torch.cat([part @ op.get_parameter(f"weight{i}").t() for i, part in enumerate(parts)])


def assert_as_looped(op, x=WIDE):
    y = op(x, split_sizes=SIZES)
    torch.testing.assert_close(y, looped(op, x))
    weights, dy = list(op.parameters()), torch.randn_like(y)
    expected = torch.autograd.grad(looped(op, x), weights, dy)
    torch.testing.assert_close(torch.autograd.grad(y, weights, dy), expected)


def square():
    return GroupedLinear(E, F, F, single_grouped_weight=False, bias=False, dtype=torch.float64)


def test_an_expert_that_is_a_transposed_view_is_read_so():
    op, memory = square(), torch.randn(E, F, F, dtype=torch.float64)
    for i, part in enumerate(memory):
        setattr(op, f"weight{i}", nn.Parameter(part.t() if i == 2 else part))

    assert_as_looped(op)


@pytest.mark.parametrize("experts", [[0], [2], [0, 1, 2]])
def test_another_form_of_the_same_memory_is_seen_after_a_call(experts):
    op = square()
    for _ in range(2):
        assert_as_looped(op)
        for i in experts:
            weight = op.get_parameter(f"weight{i}")
            weight.data = weight.data.t()
    assert_as_looped(op)


def test_another_shape_of_the_same_memory_is_an_error_after_a_call():
    op = layer(bias=False)
    step(op)
    op.weight1.data = op.weight1.data.view(K, F)

    with pytest.raises(ArgumentError, match=r"weight1: expected shape \[6, 4\]"):
        step(op)


@pytest.mark.parametrize("form", ["transposed", "shape"])
def test_data_that_is_replaced_before_the_backward_is_read_there(form):
    op, x = square(), WIDE.clone().requires_grad_()
    y = op(x, split_sizes=SIZES)
    for p in op.parameters():
        p.data = p.data.t() if form == "transposed" else p.data.view(F // 2, 2 * F)
    if form == "shape":
        with pytest.raises(RuntimeError, match=r"weight of a group was \[6, 6\].*is \[3, 12\].*in the backward"):
            y.sum().backward()
        return
    y.sum().backward()
    (expected,) = torch.autograd.grad(looped(op, (other := WIDE.clone().requires_grad_())).sum(), other)

    torch.testing.assert_close(x.grad, expected)


def test_a_main_grad_that_is_a_transposed_view_is_written_so():
    op = GroupedLinear(
        E, F, F, bias=False, single_grouped_weight=False, accumulate_into_main_grad=True, dtype=torch.float64
    )
    memory = torch.zeros(E, F, F, dtype=torch.float64)
    for i, p in enumerate(op.parameters()):
        p.main_grad = memory[i].t() if i == 2 else memory[i]
    op(WIDE, split_sizes=SIZES).square().sum().backward()
    expected = torch.autograd.grad(looped(op, WIDE).square().sum(), list(op.parameters()))

    torch.testing.assert_close([p.main_grad for p in op.parameters()], list(expected))


def test_data_of_another_dtype_gets_gradients_of_it():
    op = layer(dtype=torch.float32)
    step(op, X.float())
    for p in op.parameters():
        p.grad = None
        p.data = p.data.double()
    step(op)

    assert {p.grad.dtype for p in op.parameters()} == {torch.float64}
    torch.testing.assert_close(grads(op), expected(op))


def test_an_expert_that_is_thawed_gets_its_first_gradient():
    op = layer()
    op.weight1.requires_grad_(False)
    step(op)
    op.weight1.requires_grad_(True)
    op.zero_grad()
    step(op)

    torch.testing.assert_close(grads(op), expected(op))


def test_memory_that_experts_have_left_is_freed():
    op, memory = layer(bias=False), numpy.zeros((E, F, K))
    for i, p in enumerate(op.parameters()):
        p.data = torch.from_numpy(memory)[i]
    with torch.no_grad():
        op(X, split_sizes=SIZES)
    step(op)
    old = weakref.ref(memory)
    del memory
    for p in op.parameters():
        p.data = p.data.clone()
    step(op)

    assert old() is None


def test_a_tensor_that_is_swapped_gets_its_gradient():
    op = layer(bias=False)
    for _ in range(2):
        step(op)
        op.zero_grad()
        torch.utils.swap_tensors(op.weight0, nn.Parameter(torch.randn_like(op.weight0)))
        step(op)
        torch.testing.assert_close(grads(op), expected(op))


MEMORY = torch.randn(4, 6, dtype=torch.float64)
BESIDE = numpy.zeros((2, 2, 3))


@pytest.mark.parametrize(
    ("tensors", "lie_so"),
    [
        ([*MEMORY.view(4, 2, 3)], True),
        ([MEMORY[0], MEMORY[2]], False),
        ([MEMORY.view(4, 6)[0].view(2, 3), MEMORY[1].view(3, 2)], False),
        ([MEMORY[0].view(2, 3), MEMORY[1].view(3, 2).t()], False),
        ([MEMORY[0].view(3, 2).t(), MEMORY[1].view(3, 2).t()], False),
        ([MEMORY[0].view(2, 3), MEMORY[1].view(torch.int64).view(2, 3)], False),
        ([torch.from_numpy(BESIDE[0]), torch.from_numpy(BESIDE[1])], False),
        ([torch.empty(2, 3, device="meta")] * 2, False),
    ],
    ids=["stacked", "gap", "shape", "transposed", "all transposed", "dtype", "storages", "meta"],
)
def test_tensors_that_are_one_stacked_tensor(tensors, lie_so):
    one = as_one(tensors)

    assert (one is not None) == lie_so
    if one is not None:
        assert torch.equal(one, torch.stack(tensors))
        assert one.data_ptr() == tensors[0].data_ptr()
