"""The container: a list of modules like ``nn.Sequential``, which sees every edit at the next call."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch
from models import mlp, steps
from torch import nn

from fusible import (
    AddExtraInput,
    ArgumentError,
    Bias,
    ConstantScale,
    FusedOp,
    GroupedLinear,
    Identity,
    Linear,
    MakeExtraOutput,
    Pattern,
    Scale,
    ScaledSwiGLU,
    Sequential,
    SwiGLU,
    config,
    register_fusion,
)

SIZES = torch.tensor([2, 1])


def call(model, x):
    return model(x, split_sizes=SIZES, scales=torch.ones(3))


def x_and_y(model, **keywords):
    x = torch.randn(3, 4, requires_grad=True)
    return x, model(x, **keywords)


# ------------------------------------------------------------------------------------------------- a list of modules


def _setitem(model):
    model[-1] = nn.Tanh()
    return model


def _delete(model):
    del model[1]
    return model


def _delete_slice(model):
    del model[1:]
    return model


def _iadd(model):
    model += type(model)(nn.Tanh())
    return model


def _imul(model):
    model *= 2
    return model


def _popped(model):
    model.pop(0)
    return model


EDITS = [
    lambda m: m.append(nn.Tanh()),
    lambda m: m.extend([nn.Tanh(), nn.ReLU()]),
    lambda m: m.insert(1, nn.Tanh()),
    lambda m: m.insert(-1, nn.Tanh()),
    lambda m: m[1:],
    lambda m: m[::2],
    lambda m: m + m,
    lambda m: m * 2,
    lambda m: 2 * m,
    _setitem,
    _delete,
    _delete_slice,
    _iadd,
    _imul,
    _popped,
]


@pytest.mark.parametrize("edit", EDITS)
def test_list_operations_are_those_of_torch(edit):
    modules = [nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid()]
    ours, torchs = edit(Sequential(*modules)), edit(nn.Sequential(*modules))

    assert type(ours) is Sequential
    assert list(ours) == list(ours.children() if len(set(ours)) == len(ours) else ours)
    assert [type(m) for m in ours] == [type(m) for m in torchs]
    assert list(ours._modules) == list(torchs._modules)
    assert list(ours.state_dict()) == list(torchs.state_dict())
    x = torch.randn(3, 4)
    assert torch.equal(ours(x), torchs(x))


class Named(Sequential):
    """A subclass that is built in another way."""

    def __init__(self, features):
        super().__init__(Bias(features), ConstantScale(2.0))


@pytest.mark.parametrize("join", [lambda m: m + nn.Sequential(Identity()), lambda m: m * 2, lambda m: 2 * m])
def test_joining_a_subclass_gives_a_plain_container_as_torch_does(join):
    ours, x = join(Named(4)), torch.randn(3, 4)

    assert type(ours) is Sequential
    assert torch.equal(ours(x), nn.Sequential(*ours)(x))


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_container_in_itself_is_refused(deep, hook, compiled):
    model = Sequential(Identity())
    model.append(Sequential(Identity(), model) if deep else model)
    if hook:
        model.register_forward_hook(lambda *_: None)
    label = "1.1" if deep else "1"
    torch.compiler.reset()

    with pytest.raises(Exception if compiled else ArgumentError, match=f"op {label} .Sequential. is a container that"):
        (torch.compile(model, backend="eager") if compiled else model)(torch.ones(2))
    if not compiled:
        with pytest.raises(ArgumentError, match=f"op {label} .Sequential. is a container that"):
            model.explain(torch.ones(2))


def test_a_container_may_stand_at_several_places():
    inner = Sequential(ConstantScale(2.0))

    assert torch.equal(Sequential(inner, Sequential(inner), inner)(torch.ones(2)), torch.full((2,), 8.0))


def test_indexing_is_that_of_a_list():
    ops = [Identity(), Scale(), Bias(4)]
    model = Sequential(*ops)

    assert (len(model), list(model), model[0], model[-1]) == (3, ops, ops[0], ops[2])
    with pytest.raises(IndexError):
        model[3]


def test_pop_returns_the_module():
    op = Bias(4)

    assert Sequential(Identity(), op).pop(1) is op


@pytest.mark.parametrize(
    "build",
    [lambda m: Sequential(OrderedDict(m)), Sequential, lambda m: Sequential(**m)],
    ids=["OrderedDict", "dict", "**"],
)
def test_children_may_be_named(build):
    model = build({"first": Bias(4), "x": ConstantScale(2.0)})

    assert list(model.state_dict()) == ["first.bias"]
    assert model.first is model[0]
    assert torch.equal(model(torch.ones(2, 4)), 2 * torch.ones(2, 4))


def test_children_beside_named_ones_raise():
    with pytest.raises(TypeError, match="give names to all modules or to none; second, third came with unnamed ones"):
        Sequential(Identity(), second=Identity(), third=Identity())


def test_adding_what_is_no_container_raises():
    with pytest.raises(ValueError, match="only objects of Sequential class"):
        Sequential() + [Identity()]


def test_empty_container_passes_x_on():
    x = torch.ones(2)

    assert Sequential()(x) is x


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_clone_has_parameters_and_plans_of_its_own(clone):
    model, x = mlp(), torch.randn(3, 4)
    y = call(model, x)
    other = clone(model)
    with torch.no_grad():
        other[0].weight.zero_()
        other[3].bias.zero_()

    assert torch.equal(call(model, x), y)
    assert torch.equal(call(other, x), torch.zeros(3, 4)) == (not other[0].bias.any().item())
    call(other, x).sum().backward()
    assert model[0].weight.grad is None
    assert other[0].weight.grad is not None


# ------------------------------------------------------------------------------------------------- edits are seen


def _replace_child(model):
    setattr(model, "1", ConstantScale(5.0))


def _edit_modules(model):
    model._modules["1"] = ConstantScale(5.0)


def _assign(model):
    model[1] = ConstantScale(5.0)


def _delete_and_append(model):
    del model[1]
    model.append(ConstantScale(5.0))


@pytest.mark.parametrize("edit", [_replace_child, _edit_modules, _assign, _delete_and_append])
def test_edit_is_seen_at_the_next_call(edit):
    model, x = Sequential(Identity(), ConstantScale(2.0)), torch.ones(2)
    model(x)
    edit(model)

    assert torch.equal(model(x), 5 * x)


def test_edit_of_a_nested_container_is_seen():
    inner = Sequential(ConstantScale(2.0))
    model, x = Sequential(inner, Identity()), torch.ones(2)
    model(x)
    inner.append(ConstantScale(5.0))

    assert torch.equal(model(x), 10 * x)


def test_edit_can_end_a_fusion():
    model, x = mlp(), torch.randn(3, 4)
    call(model, x)
    assert steps(model) == ["GroupedMLP"]
    model.insert(3, nn.Identity())
    call(model, x)

    assert steps(model) == ["GroupedLinearGLU", "Identity", "GroupedLinear"]


def test_replaced_parameter_gets_the_gradient():
    model, x = mlp(), torch.randn(3, 4)
    call(model, x)
    old, model[0].weight = model[0].weight, nn.Parameter(torch.randn(2, 8, 4))
    call(model, x).sum().backward()

    assert old.grad is None
    assert model[0].weight.grad is not None


def test_load_state_dict_with_assign_is_seen():
    model, other, x = mlp(), mlp(), torch.randn(3, 4)
    call(model, x)
    model.load_state_dict(other.state_dict(), assign=True)

    y = call(model, x)
    assert torch.equal(y, call(other, x))
    y.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_change_of_dtype_is_seen():
    model, x = mlp(), torch.randn(3, 4)
    call(model, x)

    assert call(model.to(torch.float64), x.double()).dtype == torch.float64


def test_freezing_is_seen():
    model, x = mlp(), torch.randn(3, 4)
    call(model, x)
    model[0].weight.requires_grad_(False)
    call(model, x).sum().backward()

    assert model[0].weight.grad is None
    assert model[3].weight.grad is not None


# ------------------------------------------------------------------------------------------------- nesting


def test_nested_containers_are_fused_across_the_border():
    ops = list(mlp())
    model, x = Sequential(Sequential(ops[0]), Sequential(ops[1], Sequential(ops[2])), ops[3]), torch.randn(3, 4)

    assert torch.equal(call(model, x), call(Sequential(*ops), x))
    assert steps(model) == ["GroupedMLP"]


def test_composites_are_taken_apart():
    model = Sequential(GroupedLinear(2, 4, 8), ScaledSwiGLU(), GroupedLinear(2, 4, 4))
    call(model, torch.randn(3, 4))

    assert steps(model) == ["GroupedMLP"]
    assert model.explain().steps[0].labels == ("0", "1.activation", "1.scale", "2")


def test_container_with_a_forward_of_its_own_is_run_whole():
    class Doubled(Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    model, x = Sequential(Doubled(ConstantScale(3.0))), torch.ones(2)

    assert torch.equal(model(x), 6 * x)
    assert steps(model) == ["Doubled"]


class Probe(nn.Module):
    """Notes how it is called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, *args, **kwargs):
        self.calls.append((len(args), kwargs))
        return args[0] + 1


def test_other_modules_are_given_x_only():
    probe = Probe()
    x, y = x_and_y(Sequential(ConstantScale(2.0), probe, Scale()), scales=torch.full((3,), 3.0))

    assert probe.calls == [(1, {})]
    torch.testing.assert_close(y, 3 * (2 * x + 1))


def test_other_modules_may_pass_on_what_is_no_tensor():
    class First(nn.Module):
        def forward(self, pair):
            return pair[0]

    _, y = x_and_y(Sequential(nn.LSTM(4, 4), First(), Identity()))

    assert y.shape == (3, 4)


@pytest.mark.parametrize("fused", [True, False])
def test_vmap_over_what_a_check_reads_raises(fused):
    model = Sequential(GroupedLinear(2, 4, 8), SwiGLU(), GroupedLinear(2, 4, 4))
    x, sizes = torch.ones(3, 3, 4), torch.tensor([[2, 1]] * 3)

    with config(disable_fusions=set() if fused else {"GroupedMLP", "GroupedLinearGLU"}):
        with pytest.raises(RuntimeError, match=r"Grouped\w+: torch\.func transforms and vmap are not supported"):
            torch.vmap(lambda x, sizes: model(x, split_sizes=sizes))(x, sizes)
        with pytest.raises(RuntimeError, match=r"Grouped\w+: torch\.func transforms and vmap are not supported"):
            torch.vmap(lambda x, sizes: model[0](x, split_sizes=sizes))(x, sizes)


def test_op_behind_what_is_no_tensor_raises():
    with pytest.raises(ArgumentError, match=r"op 1 \(Identity\): x: expected a tensor, got a tuple"):
        Sequential(nn.LSTM(4, 4), Identity())(torch.ones(3, 4))


def test_op_behind_another_module_is_checked_when_its_input_is_there():
    with pytest.raises(ArgumentError, match=r"op 1 \(Scale\): scales: expected shape \[3\]"):
        Sequential(nn.ReLU(), Scale())(torch.ones(3, 4), scales=torch.ones(7))


def test_gradients_pass_through_other_modules():
    linear = nn.Linear(4, 4)
    x, y = x_and_y(Sequential(ConstantScale(2.0), linear, ConstantScale(3.0)))
    y.sum().backward()

    torch.testing.assert_close(x.grad, (6 * linear.weight.sum(0)).expand(3, 4))


def test_module_that_occurs_twice_runs_twice_and_its_gradients_add_up():
    op, once = Bias(4), Bias(4)
    x_and_y(Sequential(op, ConstantScale(2.0), op))[1].sum().backward()
    x_and_y(Sequential(once))[1].sum().backward()

    assert torch.equal(op.bias.grad, 3 * once.bias.grad)


# ------------------------------------------------------------------------------------------------- hooks


def _forward_hook(op, seen):
    return op.register_forward_hook(lambda *_: seen.append(1))


def _pre_hook(op, seen):
    return op.register_forward_pre_hook(lambda *_: seen.append(1))


def _backward_hook(op, seen):
    return op.register_full_backward_hook(lambda *_: seen.append(1))


def _backward_pre_hook(op, seen):
    return op.register_full_backward_pre_hook(lambda *_: seen.append(1))


@pytest.mark.parametrize("register", [_forward_hook, _pre_hook, _backward_hook, _backward_pre_hook])
def test_hooks_of_an_op_run_once_and_decline_its_fusion(register):
    model, x, seen = mlp(), torch.randn(3, 4, requires_grad=True), []
    call(model, x)
    handle = register(model[1], seen)
    call(model, x).sum().backward()

    assert seen == [1]
    assert "GroupedMLP" not in steps(model)
    assert model.explain().fusions[0].reason == "op 1 has hooks, which only run where it is called itself"
    handle.remove()
    call(model, x)
    assert steps(model) == ["GroupedMLP"]


def test_patched_forward_is_called_and_declines_the_fusion():
    model, x = mlp(), torch.randn(3, 4)
    y = call(model, x)
    original = model[3].forward
    model[3].forward = lambda *args, **kwargs: 2 * original(*args, **kwargs)

    torch.testing.assert_close(call(model, x), 2 * y)
    assert "GroupedMLP" not in steps(model)


def test_forward_hook_may_replace_the_output():
    op = ConstantScale(2.0)
    op.register_forward_hook(lambda module, args, y: y + 1)
    x, y = x_and_y(Sequential(op, ConstantScale(3.0)))

    torch.testing.assert_close(y, 3 * (2 * x + 1))


def test_hooks_of_an_op_with_extra_outputs_see_all_of_them():
    op, seen = MakeExtraOutput("r"), []
    op.register_forward_hook(lambda module, args, outputs: seen.append(len(outputs)))
    x, y = x_and_y(Sequential(op, AddExtraInput("r")))

    assert seen == [2]
    torch.testing.assert_close(y, 2 * x)


@pytest.mark.parametrize("build", [Sequential, lambda op: ScaledSwiGLU()], ids=["container", "composite"])
def test_hooks_of_a_nested_container_or_composite_run(build):
    inner, seen = build(ConstantScale(2.0)), []
    inner.register_forward_hook(lambda *_: seen.append(1))
    keywords = {"scales": torch.ones(3)} if isinstance(inner, ScaledSwiGLU) else {}
    x_and_y(Sequential(inner, Identity()), **keywords)

    assert seen == [1]


def test_hooks_of_a_nested_container_may_come_and_go_after_a_call():
    inner, seen = Sequential(ConstantScale(2.0)), []
    model, x = Sequential(inner, Identity()), torch.ones(3, 4)
    model(x)
    handle = inner.register_forward_hook(lambda *_: seen.append(1))
    model(x)
    assert seen == [1]
    handle.remove()
    model(x)
    assert seen == [1]
    assert steps(model) == ["ConstantScale", "Identity"]


def test_hooked_container_whose_ops_need_keywords_raises():
    inner = Sequential(Identity(), Scale())
    inner.register_forward_hook(lambda *_: None)

    with pytest.raises(
        ArgumentError, match=r"op 1 \(Sequential\) has hooks, .* its op 1 \(Scale\) needs 'scales'; hook"
    ):
        Sequential(Identity(), inner)(torch.ones(3, 4), scales=torch.ones(3))


def test_hooks_of_the_container_run():
    model, seen = Sequential(Identity()), []
    model.register_forward_hook(lambda *_: seen.append(1))
    x_and_y(model)

    assert seen == [1]


# ------------------------------------------------------------------------------------------------- channels


def test_extra_output_is_read_by_the_keyword_of_its_name():
    x, y = x_and_y(Sequential(MakeExtraOutput("r"), ConstantScale(2.0), AddExtraInput("r")))
    y.sum().backward()

    torch.testing.assert_close(y, 3 * x)
    torch.testing.assert_close(x.grad, torch.full((3, 4), 3.0))


def test_extra_output_may_be_read_twice():
    ops = [MakeExtraOutput("r"), ConstantScale(2.0), AddExtraInput("r"), ConstantScale(2.0), AddExtraInput("r")]
    x, y = x_and_y(Sequential(*ops))
    y.sum().backward()

    torch.testing.assert_close(y, 7 * x)
    torch.testing.assert_close(x.grad, torch.full((3, 4), 7.0))


def test_unread_extra_outputs_are_returned_in_op_order():
    ops = [MakeExtraOutput("b"), ConstantScale(2.0), MakeExtraOutput("a"), ConstantScale(2.0)]
    x, (y, b, a) = x_and_y(Sequential(*ops))
    (y + 10 * a + 100 * b).sum().backward()

    for got, factor in [(y, 4), (b, 1), (a, 2)]:
        torch.testing.assert_close(got, factor * x)
    torch.testing.assert_close(x.grad, torch.full((3, 4), 4.0 + 20 + 100))


def test_only_unread_extra_outputs_are_returned():
    x, (y, a) = x_and_y(Sequential(MakeExtraOutput("r"), MakeExtraOutput("a"), AddExtraInput("r")))

    torch.testing.assert_close(y, 2 * x)
    torch.testing.assert_close(a, x)


def test_unused_extra_output_costs_nothing_in_the_backward():
    x, (y, _) = x_and_y(Sequential(MakeExtraOutput("a"), ConstantScale(2.0)))
    y.sum().backward()

    torch.testing.assert_close(x.grad, torch.full((3, 4), 2.0))


def test_channels_cross_nested_containers_and_other_modules():
    x, y = x_and_y(Sequential(Sequential(MakeExtraOutput("r")), nn.Identity(), Sequential(AddExtraInput("r"))))

    torch.testing.assert_close(y, 2 * x)


def test_reader_before_the_maker_reads_the_caller():
    extra = torch.ones(3, 4)
    x, (y, r) = x_and_y(Sequential(AddExtraInput("r"), MakeExtraOutput("r")), r=extra)

    torch.testing.assert_close(y, x + 1)
    torch.testing.assert_close(r, x + 1)


def test_extra_output_of_one_name_made_twice_raises():
    with pytest.raises(ArgumentError, match=r"op 1 \(MakeExtraOutput\): extra output 'r' is made by op 0"):
        Sequential(MakeExtraOutput("r"), MakeExtraOutput("r"))(torch.ones(2))


@pytest.mark.parametrize("op", [MakeExtraOutput, AddExtraInput])
@pytest.mark.parametrize(
    "name", ["x", "y", "dy", "self", "saved", "op_kwargs", "needs_grad", "autocast_dtype", "a b", 3]
)
def test_channel_names_that_the_contract_uses_are_refused(op, name):
    with pytest.raises(ValueError, match=f"{op.__name__}: the name must be an identifier other than x, y"):
        op(name)


def test_buffer_is_never_fed_by_an_extra_output():
    x, (y, output) = x_and_y(Sequential(MakeExtraOutput("output"), GroupedLinear(2, 4, 4)), split_sizes=SIZES)

    assert torch.equal(output, x)
    assert y.data_ptr() != output.data_ptr()


def test_op_alone_returns_its_extra_outputs():
    x = torch.ones(2)
    y, extra = MakeExtraOutput()(x)

    assert torch.equal(y, x)
    assert torch.equal(extra, x)


def test_plain_linear_follows_a_channel_of_another_shape():
    model = Sequential(MakeExtraOutput("r"), Linear(4, 6), AddExtraInput("r"))

    with pytest.raises(ArgumentError, match=r"op 2 \(AddExtraInput\): r: expected a tensor of shape \[3, 6\]"):
        model(torch.ones(3, 4))


# ------------------------------------------------------------------------------------------------- what is returned


def residual(output_to_caller, read=True):
    make = MakeExtraOutput("r", output_to_caller=output_to_caller)
    return Sequential(make, ConstantScale(2.0), *([AddExtraInput("r")] if read else []))


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("output_to_caller", [None, True, False])
def test_an_extra_output_is_returned_where_the_op_says_so(output_to_caller, read):
    returned = not read if output_to_caller is None else output_to_caller
    for _ in range(3):
        x, result = x_and_y(residual(output_to_caller, read))
        y, extras = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
        (10 * y + sum(extras)).sum().backward()

        assert len(extras) == returned
        assert all(torch.equal(r, x) for r in extras)
        torch.testing.assert_close(y, (3 if read else 2) * x)
        torch.testing.assert_close(x.grad, torch.full((3, 4), (30.0 if read else 20.0) + returned))


class Tripled(FusedOp):
    """A residual over ``ConstantScale(2)``, without its extra output."""

    def fwd(self, x):
        return 3 * x, None

    def bwd(self, saved, dy):
        return {"x": 3 * dy}


class TripledWithOutput(FusedOp):
    extra_outputs = ("r",)

    def fwd(self, x):
        return {"y": 3 * x, "r": x.clone()}, None

    def bwd(self, saved, dy, r):
        return {"x": 3 * dy + r}


class TripledForward(FusedOp):
    extra_outputs = ("r",)

    def fwd(self, x):
        return {"y": 3 * x, "r": x.clone()}, dict.fromkeys(self.parts)


class TripledBackward(FusedOp):
    def bwd(self, saved, dy, **extra):
        return {"x": 3 * dy + extra.get("r", 0)}


@pytest.mark.parametrize("fused", [Tripled, TripledWithOutput, TripledForward, TripledBackward])
@pytest.mark.parametrize("output_to_caller", [None, True, False])
def test_a_fusion_over_a_residual_returns_what_the_ops_return(output_to_caller, fused):
    pattern = Pattern.path(make=MakeExtraOutput, scale=ConstantScale, add=AddExtraInput).edge("make", "add", "r")
    returned = output_to_caller is True
    register_fusion(pattern)(fused)
    model = residual(output_to_caller)
    for _ in range(3):
        x, result = x_and_y(model)
        results = result if isinstance(result, tuple) else (result,)
        sum(r.sum() for r in results).backward()

        assert len(results) == 1 + returned
        torch.testing.assert_close(results[0], 3 * x)
        torch.testing.assert_close(x.grad, torch.full((3, 4), 3.0 + returned))
    assert (steps(model) == [fused.__name__]) == (fused is not Tripled or not returned)


def test_a_change_of_what_is_returned_is_seen():
    model = residual(None)
    counts = []
    for value in (None, True, False, None):
        model[0].output_to_caller = {} if value is None else {"r": value}
        result = x_and_y(model)[1]
        counts.append(len(result) if isinstance(result, tuple) else 1)

    assert counts == [1, 2, 1, 1]


@pytest.mark.parametrize("output_to_caller", [None, True, False])
def test_compiled_code_returns_what_the_ops_return(output_to_caller):
    torch.compiler.reset()
    model = residual(output_to_caller)
    compiled, x = torch.compile(model, backend="aot_eager", fullgraph=True), torch.randn(3, 4)

    torch.testing.assert_close(compiled(x), model(x))


def test_clones_return_what_the_op_returns():
    for clone in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        assert len(x_and_y(clone(residual(True)))[1]) == 2


def test_explain_shows_where_an_extra_output_goes():
    notes = [residual(value).explain(torch.ones(3, 4)).steps[0].notes for value in (None, True)]
    hidden = residual(False, read=False).explain(torch.ones(3, 4)).steps[0].notes

    assert notes == [("extra output 'r': read by op 2",), ("extra output 'r': read by op 2, returned",)]
    assert hidden == ("extra output 'r': neither read nor returned",)


@pytest.mark.parametrize("value", [1, "yes"])
def test_output_to_caller_must_be_a_bool(value):
    with pytest.raises(TypeError, match=r"output_to_caller must be True, False or None, got a (int|str)"):
        MakeExtraOutput("r", output_to_caller=value)


class _Low(nn.Module):
    """A parametrization with parameters of its own, such as an adapter of low rank."""

    def __init__(self, like):
        super().__init__()
        self.column = nn.Parameter(torch.randn_like(like[..., :1]))

    def forward(self, weight):
        return weight + self.column


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["fused", "apart", "compiled"])
def test_parametrized_parameters_get_their_gradients(kind, frozen):
    def gradients(model, params, plain):
        model = torch.compile(model, fullgraph=True, backend="aot_eager") if kind == "compiled" and not plain else model
        y = call(model, torch.ones(3, 4, dtype=torch.float64))
        return torch.autograd.grad(y.square().sum(), params)

    torch._dynamo.reset()
    plain = mlp(dtype=torch.float64)
    plain.append(Identity() if kind != "apart" else Linear(4, 4, dtype=torch.float64))
    model = copy.deepcopy(plain).requires_grad_(not frozen)
    places = [(0, "weight"), (3, "bias")] + [(4, "weight")] * (kind == "apart")
    for index, name in places:
        nn.utils.parametrize.register_parametrization(model[index], name, _Low(getattr(model[index], name)))
        with torch.no_grad():
            getattr(plain[index], name).copy_(getattr(model[index], name))
    columns = [getattr(model[index].parametrizations, name)[0].column for index, name in places]
    originals = [getattr(model[index].parametrizations, name).original for index, name in places]
    expected = gradients(plain, [getattr(plain[index], name) for index, name in places], plain=True)

    for found, whole in zip(gradients(model, columns, plain=False), expected, strict=True):
        torch.testing.assert_close(found, whole.sum(-1, keepdim=True))
    if not frozen:
        torch.testing.assert_close(gradients(model, originals, plain=False), expected)
    torch._dynamo.reset()


def test_a_replica_runs_its_own_ops():
    model, x = Sequential(Identity(), ConstantScale(2.0)), torch.ones(2, 4)
    model(x)
    replica = model._replicate_for_data_parallel()
    replica[1] = ConstantScale(3.0)
    for _ in range(2):
        assert torch.equal(model(x), 2 * x)
        assert torch.equal(replica(x), 3 * x)
    assert replica._compiled is not model._compiled


def replica_of(model):
    """A replica as ``nn.DataParallel`` makes it on another device, and its parameters by the original's."""
    modules, values = [*model.modules()], {p: p.detach().clone().requires_grad_() for p in model.parameters()}
    replicas = {module: module._replicate_for_data_parallel() for module in modules}
    for module, replica in replicas.items():
        for name, child in module._modules.items():
            replica._modules[name] = replicas[child]
        for name, parameter in module._parameters.items():
            setattr(replica, name, values[parameter])
    return replicas[model], [*values.values()]


@pytest.mark.parametrize("disabled", [set(), {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}])
@pytest.mark.parametrize("single", [True, False])
def test_a_replica_trains_its_own_parameters(single, disabled):
    model = mlp(single_grouped_weight=single, single_grouped_bias=single)
    x, given = torch.randn(3, 4), {"split_sizes": torch.tensor([1, 2]), "scales": torch.rand(3)}
    model(x, **given).sum().backward()
    replica, parameters = replica_of(model)
    with config(disable_fusions=disabled):
        replica(x, **given).sum().backward()

    torch.testing.assert_close([p.grad for p in parameters], [p.grad for p in model.parameters()])
