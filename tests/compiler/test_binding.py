"""Which argument of a call reaches which op, and what is said where one does not fit."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from models import mlp
from torch import Tensor, nn

from fusible import (
    AddExtraInput,
    ArgumentError,
    Composite,
    ConstantScale,
    GroupedLinear,
    Identity,
    MakeExtraOutput,
    Op,
    Scale,
    ScaledSwiGLU,
    Sequential,
)

ONE, TWO, THREE = (torch.full((3,), float(n)) for n in (1, 2, 3))
SIZES = torch.tensor([2, 1])
X = torch.ones(3, 4)


class Shift(Op):
    """``x + by``, where ``by`` is no tensor."""

    def check(self, x, *, by):
        return x

    def fwd(self, x: Tensor, *, by: float):
        return x + by, None

    def bwd(self, saved, dy):
        return {"x": dy}


class MustNotRun(Op):
    """The first op of a container whose call shall be refused."""

    def check(self, x):
        return x

    def fwd(self, x):
        raise AssertionError("something ran")

    def bwd(self, saved, dy): ...


def two_scales():
    return Sequential(OrderedDict(first=Scale(), between=ConstantScale(10.0), last=Scale()))


def unrunnable():
    """Addressable as 0 to 4: no Op stands at 2, a container at 3."""
    return Sequential(MustNotRun(), Scale(), nn.Tanh(), Sequential(Identity()), Scale())


def refusal(model, *args, x=X, error=ArgumentError, **kwargs):
    with pytest.raises(error) as caught:
        model(x, *args, **kwargs)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------- ways to give

KEYS = {
    "module": lambda m: (m[0], m[2]),
    "index": lambda m: (0, 2),
    "negative index": lambda m: (-3, -1),
    "name": lambda m: ("first", "last"),
    "a mix": lambda m: (m[0], "last"),
    "another mix": lambda m: ("first", -1),
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_op_kwargs_address_an_op(keys):
    model = two_scales()
    first, last = keys(model)

    assert torch.equal(model(X, op_kwargs={first: {"scales": TWO}, last: {"scales": THREE}}), 60 * X)


def test_shared_keyword_reaches_every_op_that_takes_it():
    assert torch.equal(two_scales()(X, scales=TWO), 40 * X)


def test_op_kwargs_come_before_shared_keywords():
    assert torch.equal(two_scales()(X, scales=TWO, op_kwargs={-1: {"scales": THREE}}), 60 * X)


def test_extra_inputs_fill_in_op_order():
    assert torch.equal(two_scales()(X, TWO, THREE), 60 * X)


def test_extra_inputs_come_in_the_order_of_transformer_engine():
    model = mlp()

    assert torch.equal(model(X, SIZES, TWO, SIZES), model(X, split_sizes=SIZES, scales=TWO))


def test_extra_inputs_fill_what_nothing_else_gives():
    assert torch.equal(two_scales()(X, THREE, op_kwargs={0: {"scales": TWO}}), 60 * X)


def test_extra_inputs_fill_in_signature_order():
    class Both(Shift):
        def check(self, x, **keywords): ...

        def fwd(self, x: Tensor, *, minus: Tensor, times: Tensor):
            return (x - minus) * times, None

    assert torch.equal(Sequential(Both())(X, 5 * X, 2 * X), -8 * X)


def test_metadata_is_given_by_keyword_beside_extra_inputs():
    assert torch.equal(Sequential(Scale(), Shift())(X, TWO, by=1.0), 3 * X)


def test_x_may_be_given_by_name():
    assert torch.equal(two_scales()(x=X, scales=TWO), 40 * X)


def test_none_counts_as_not_given():
    model = mlp()
    given = {"split_sizes": SIZES, "scales": ONE}

    assert torch.equal(model(X, output=None, op_kwargs={0: {"grad_input": None}}, **given), model(X, **given))


def test_op_in_a_nested_container_is_addressed_by_module_or_dotted_name():
    inner = Sequential(Scale())
    model = Sequential(inner, Scale())

    assert torch.equal(model(X, op_kwargs={inner[0]: {"scales": TWO}, 1: {"scales": THREE}}), 6 * X)
    assert torch.equal(model(X, op_kwargs={"0.0": {"scales": TWO}, 1: {"scales": THREE}}), 6 * X)


@pytest.mark.parametrize("key", [lambda m: m[0], lambda m: 0, lambda m: "0", lambda m: m[0].scale, lambda m: "0.scale"])
def test_composite_passes_a_keyword_on_to_its_part(key):
    model, x = Sequential(ScaledSwiGLU()), torch.randn(3, 8)

    assert torch.equal(model(x, op_kwargs={key(model): {"scales": TWO}}), model(x, scales=TWO))


def test_module_that_occurs_twice_is_addressed_by_index():
    op = Scale()

    assert torch.equal(Sequential(op, op)(X, op_kwargs={0: {"scales": TWO}, 1: {"scales": THREE}}), 6 * X)


def test_names_that_look_like_graph_nodes_are_fine():
    model = Sequential(OrderedDict([("x", Scale()), ("%1", Scale()), ("y", Scale())]))

    assert torch.equal(model(X, scales=TWO), 8 * X)


# ------------------------------------------------------------------------------------------------- keys not fitting

IN_IT = "op 0 (MustNotRun), op 1 (Scale), op 2 (Tanh), op 3 (Sequential), op 4 (Scale)"


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (True, "op_kwargs: True is a bool; use the op itself, its index or its name"),
        (1.0, "op_kwargs: 1.0 is a float; use the op itself, its index or its name"),
        (None, "op_kwargs: None is a NoneType; use the op itself, its index or its name"),
        (Scale, "is a ABCMeta; use the op itself, its index or its name"),
        ("middle", f"op_kwargs: no op is named 'middle'; the container has {IN_IT}"),
        (ConstantScale(1.0), f"op_kwargs: this ConstantScale is not in the container, which has {IN_IT}"),
        (2, "op_kwargs: op 2 (Tanh) is not an Op and takes no keywords"),
        (3, "op_kwargs: op 3 (Sequential) is not an Op and takes no keywords; address the ops inside it by module"),
    ],
)
def test_key_that_fits_no_op_raises(key, message):
    assert message in refusal(unrunnable(), scales=ONE, op_kwargs={key: {"scales": ONE}})


@pytest.mark.parametrize("key", [5, -6])
def test_index_out_of_range_raises(key):
    message = f"op_kwargs: index {key} is out of range; the container has 5 ops: {IN_IT}"

    assert refusal(unrunnable(), scales=ONE, op_kwargs={key: {}}, error=IndexError) == message


@pytest.mark.parametrize("key", [2, 3])
def test_target_that_is_no_op_raises_by_module_too(key):
    model = unrunnable()

    assert f"op {key}" in refusal(model, scales=ONE, op_kwargs={model[key]: {"scales": ONE}})


def test_module_that_left_the_container_raises():
    model = unrunnable()
    gone = model.pop(4)

    assert "this Scale is not in the container" in refusal(model, scales=ONE, op_kwargs={gone: {}})


def test_module_that_occurs_twice_raises_by_identity():
    op = Scale()
    model = Sequential(op, MustNotRun(), Identity(), op)

    assert refusal(model, op_kwargs={op: {"scales": ONE}}) == "op_kwargs: this Scale occurs at 0 and 3: use an index"


def test_module_that_occurs_twice_in_nested_containers_is_told_to_use_a_name():
    inner = Sequential(Scale())
    model = Sequential(MustNotRun(), inner, inner)

    assert refusal(model, op_kwargs={inner[0]: {}}) == "op_kwargs: this Scale occurs at 1.0 and 2.0: use a name"


@pytest.mark.parametrize(
    ("one", "other", "shown"),
    [
        (1, -4, "1 and -4"),
        (1, "1", "1 and '1'"),
        (lambda m: m[1], 1, "the Scale and 1"),
    ],
)
def test_op_addressed_by_two_keys_raises(one, other, shown):
    model = unrunnable()
    keys = [key(model) if callable(key) else key for key in (one, other)]

    assert (
        refusal(model, op_kwargs={key: {"scales": ONE} for key in keys}) == f"op_kwargs: {shown} are both op 1 (Scale)"
    )


@pytest.mark.parametrize("op_kwargs", [[], 3, "first"])
def test_op_kwargs_that_are_no_mapping_raise(op_kwargs):
    kind = type(op_kwargs).__name__

    assert refusal(unrunnable(), scales=ONE, op_kwargs=op_kwargs).endswith(f"to their keywords, got a {kind}")


@pytest.mark.parametrize("keywords", [ONE, None, ["scales"]])
def test_keywords_that_are_no_mapping_raise(keywords):
    message = f"op_kwargs: op 1 (Scale) got a {type(keywords).__name__}; give a mapping of keywords"

    assert refusal(unrunnable(), op_kwargs={1: keywords}) == message


# ------------------------------------------------------------------------------------------------- keywords not fitting


def test_keyword_that_the_op_does_not_take_raises():
    message = "op_kwargs: op 1 (Scale) takes no 'scale'; its keywords are: scales; did you mean 'scales'?"

    assert refusal(unrunnable(), op_kwargs={1: {"scale": ONE}}) == message


def test_keyword_that_is_no_name_raises():
    message = "op_kwargs: op 1 (Scale) takes no 1; its keywords are: scales"

    assert refusal(unrunnable(), op_kwargs={1: {1: ONE}}) == message


def test_keyword_for_an_op_without_any_raises():
    message = "op_kwargs: op 0 (MustNotRun) takes no 'scales'; its keywords are: none"

    assert refusal(unrunnable(), op_kwargs={0: {"scales": ONE}}) == message


@pytest.mark.parametrize("key", ["k" * 10_000_000, ("k" * 10_000_000,)], ids=["name", "tuple"])
def test_a_long_key_is_not_printed_whole(key):
    messages = [refusal(two_scales(), op_kwargs={key: {}})]
    if isinstance(key, str):
        messages += [refusal(two_scales(), op_kwargs={0: {key: 1}}), refusal(two_scales(), **{key: 1})]

    assert all(len(message) < 500 and "kkk..." in message for message in messages)
    assert all("characters)" in message for message in messages)


def test_shared_keyword_that_no_op_takes_raises():
    message = "no op takes the keyword 'split_size'; the keywords of the ops are: scales"

    assert refusal(unrunnable(), scales=ONE, split_size=SIZES) == message


def test_missing_keyword_raises():
    message = "missing: op 4 (Scale) needs 'scales'"

    assert refusal(unrunnable(), op_kwargs={1: {"scales": ONE}}) == message


def test_every_missing_keyword_is_named():
    message = refusal(Sequential(MustNotRun(), *mlp()))

    for op, name in [
        ("1 (GroupedLinear)", "split_sizes"),
        ("3 (Scale)", "scales"),
        ("4 (GroupedLinear)", "split_sizes"),
    ]:
        assert f"op {op} needs '{name}'" in message


@pytest.mark.parametrize("count", [1, 3])
def test_too_few_or_too_many_extra_inputs_list_the_slots(count):
    message = f"got {count} extra inputs for 2 open slots: scales of op 1 (Scale), scales of op 4 (Scale)"

    assert refusal(unrunnable(), *[ONE] * count) == message


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_or_too_many_extra_inputs_raise_after_a_good_call(count):
    model, given = Sequential(GroupedLinear(2, 4, 4), Scale(), Scale()), [torch.ones(3) for _ in range(3)]
    model(X, *given[:2], split_sizes=SIZES)

    with pytest.raises(ArgumentError, match=r"missing|got \d extra inputs for 2 open slots"):
        model(X, *given[:count], split_sizes=SIZES)


def test_extra_inputs_beside_given_ones_raise():
    assert refusal(unrunnable(), ONE, scales=ONE) == "got 1 extra inputs for 0 open slots: none"


def test_extra_inputs_do_not_fill_metadata():
    assert refusal(Sequential(MustNotRun(), Scale(), Shift()), ONE) == "missing: op 2 (Shift) needs 'by'"


def test_channel_given_as_well_raises():
    model = Sequential(MustNotRun(), MakeExtraOutput("r"), AddExtraInput("r"))
    message = "op 2 (AddExtraInput): 'r' is the extra output of op 1 (MakeExtraOutput); it cannot be given as well"

    assert refusal(model, op_kwargs={2: {"r": X}}) == message
    assert refusal(model, r=X) == message


def test_ambiguous_keyword_of_a_composite_raises():
    model = Sequential(MustNotRun(), Composite(a=Scale(), b=Scale()))
    message = "op_kwargs: 'scales' of op 1 (Composite) could be for 1.a and 1.b; address the part"

    assert refusal(model, op_kwargs={1: {"scales": ONE}}) == message


def test_keyword_given_to_a_composite_and_to_its_part_raises():
    composite = ScaledSwiGLU()
    model = Sequential(MustNotRun(), composite)
    twice = {composite: {"scales": ONE}, composite.scale: {"scales": ONE}}

    assert refusal(model, op_kwargs=twice) == "op 1.scale (Scale): 'scales' was given twice"


@pytest.mark.parametrize("x", [None, 3, [1.0]])
def test_x_that_is_no_tensor_raises(x):
    assert refusal(unrunnable(), x=x, scales=ONE) == f"x: expected a tensor, got a {type(x).__name__}"


def test_error_is_a_type_error_and_a_value_error():
    assert issubclass(ArgumentError, TypeError)
    assert issubclass(ArgumentError, ValueError)


# ------------------------------------------------------------------------------------------------- before anything runs


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scales": torch.ones(2)}, "op 3 (Scale): scales: expected shape [3], one number a row, got [2]"),
        ({"split_sizes": torch.tensor([3, 1])}, "op 1 (GroupedLinear): split_sizes: they sum to 4"),
        ({"split_sizes": torch.tensor([3])}, "op 1 (GroupedLinear): split_sizes: expected shape [2]"),
    ],
)
def test_later_op_is_checked_before_the_first_runs(wrong, message):
    arguments = {"split_sizes": SIZES, "scales": ONE} | wrong

    assert message in refusal(Sequential(MustNotRun(), *mlp()), **arguments)


def test_error_leaves_buffers_as_they_are():
    output = torch.full((3, 4), 7.0)
    refusal(mlp(), scales=torch.ones(2), split_sizes=SIZES, op_kwargs={3: {"output": output}})

    assert torch.equal(output, torch.full((3, 4), 7.0))


@pytest.mark.parametrize("fused", [True, False])
def test_same_error_whether_fused_or_not(fused):
    model = mlp() if fused else Sequential(*(m for op in mlp() for m in (op, Identity())))

    with pytest.raises(ArgumentError, match=r"\(Scale\): scales: expected shape \[3\]"):
        model(X, split_sizes=SIZES, scales=torch.ones(2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split_sizes": True}, "op 1 (GroupedLinear): split_sizes: expected an int32 or int64 tensor"),
        ({"split_sizes": [3]}, "op 1 (GroupedLinear): split_sizes: expected 2 sizes"),
        ({"split_sizes": [4, -1]}, "op 1 (GroupedLinear): split_sizes: sizes must not be negative, got -1"),
        ({"grad_input": torch.zeros(4, 3).mT}, "op 1 (GroupedLinear): grad_input: expected a contiguous buffer"),
        ({"grad_input": torch.zeros(3, 5)}, "op 1 (GroupedLinear): grad_input: expected 4 columns, got shape [3, 5]"),
        ({"grad_input": torch.zeros(3, 4).int()}, "grad_input: expected a floating-point buffer, got torch.int32"),
        ({"grad_input": torch.zeros(3, 4, requires_grad=True)}, "op 1 (GroupedLinear): grad_input: requires grad"),
        ({"scales": 1.0}, "op 2 (Scale): scales: expected a floating-point tensor with a number for every row of x"),
        ({"r": 1.0}, "op 3 (AddExtraInput): r: expected a tensor like x, got a float"),
    ],
)
def test_what_fits_no_x_is_refused_before_a_module_in_front_runs(wrong, message):
    class Runs(nn.Module):
        def forward(self, x):
            raise AssertionError("something ran")

    arguments = {"split_sizes": SIZES, "scales": ONE, "r": X} | wrong
    model = Sequential(Runs(), GroupedLinear(2, 4, 4), Scale(), AddExtraInput("r"))

    assert message in refusal(model, **arguments)


@pytest.mark.parametrize("front", [nn.Identity, nn.Tanh])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scales": torch.ones(4)}, "op 3 (Scale): scales: expected shape [3]"),
        ({"by": torch.ones(3, 5)}, "op 4 (AddExtraInput): by: expected a tensor of shape [3, 4]"),
    ],
)
def test_ops_behind_a_module_are_checked_before_the_first_of_them_runs(front, wrong, message):
    model = Sequential(front(), GroupedLinear(2, 4, 4), ConstantScale(2.0), Scale(), AddExtraInput("by"))
    buffer = torch.full((3, 4), 7.0)

    for _ in range(3):  # the plan of a refused call is kept
        assert message in refusal(model, split_sizes=SIZES, output=buffer, **{"scales": ONE, "by": X} | wrong)
        assert torch.equal(buffer, torch.full((3, 4), 7.0))


@pytest.mark.parametrize("front", [[], [nn.Tanh()]])
def test_ops_behind_a_reader_of_an_extra_output_are_checked_before_anything_is_written(front):
    branch = [MakeExtraOutput("r"), GroupedLinear(2, 4, 4), AddExtraInput("r"), Scale()]
    model, buffer = Sequential(*front, *branch), torch.full((3, 4), 7.0)

    assert "scales: expected shape [3]" in refusal(model, split_sizes=SIZES, output=buffer, scales=torch.ones(4))
    assert torch.equal(buffer, torch.full((3, 4), 7.0))


def test_a_check_that_reads_an_extra_output_is_asked_when_it_is_there():
    class Positive(AddExtraInput):
        def check(self, x, **extra):
            if not extra[self.name].gt(0).all():
                raise ArgumentError("r: expected positive numbers")
            return super().check(x, **extra)

    model = Sequential(MakeExtraOutput("r"), ConstantScale(2.0), Positive("r"), Scale())

    assert torch.equal(model(X, scales=ONE), 3 * X)
    assert "op 2 (Positive): r: expected positive numbers" in refusal(model, x=-X, scales=ONE)


def test_an_extra_output_of_another_shape_is_refused_before_anything_runs():
    class Runs(ConstantScale):
        def fwd(self, x):
            raise AssertionError("something ran")

    model = Sequential(MakeExtraOutput("r"), Runs(2.0), GroupedLinear(2, 4, 6), AddExtraInput("r"))

    assert "op 3 (AddExtraInput): r: expected a tensor of shape [3, 6]" in refusal(model, split_sizes=SIZES)


# ------------------------------------------------------------------------------------------------- layouts

LAYOUTS = {
    "torch.sparse_coo": lambda t: t.to_sparse(),
    "torch.sparse_csr": lambda t: t.reshape(-1, t.shape[-1]).to_sparse_csr(),
    "torch._mkldnn": lambda t: t.to_mkldnn(),
    "nested": lambda t: torch.nested.nested_tensor(list(t)) if t.dim() > 1 else torch.nested.nested_tensor([t]),
    "nested (jagged)": lambda t: torch.nested.nested_tensor([t], layout=torch.jagged),
}
WRONG_LAYOUTS = pytest.mark.parametrize("layout", LAYOUTS)


def other_layout(name, tensor):
    try:
        return LAYOUTS[name](tensor)
    except RuntimeError as error:
        pytest.skip(f"torch makes none: {error}")


@pytest.mark.filterwarnings("ignore")
@WRONG_LAYOUTS
@pytest.mark.parametrize("front", [[], [nn.Identity()]], ids=["first", "behind a module"])
@pytest.mark.parametrize(
    ("name", "at"),
    [("x", None), ("scales", 1), ("output", 0), ("grad_input", 0), ("split_sizes", 0), ("r", 2)],
)
def test_a_tensor_that_is_not_dense_is_refused(name, at, front, layout):
    good = {"scales": ONE, "output": torch.zeros(3, 4), "grad_input": torch.zeros(3, 4), "split_sizes": SIZES, "r": X}
    given = {"x": X, **good}
    given[name] = other_layout(layout, given[name].clone())
    model = Sequential(*front, GroupedLinear(2, 4, 4), Scale(), AddExtraInput("r"))
    label = f"op {len(front) + (at or 0)} "
    expected = f": {name}: expected a dense tensor, got a {layout.split()[0]} one; give it as a dense tensor"

    for _ in range(3):
        message = refusal(model, **given)
        assert message.startswith(label)
        assert message.endswith(expected)
    if not (front and name == "x"):
        with pytest.raises(ArgumentError, match="expected a dense tensor"):
            model.explain(**given)


@pytest.mark.filterwarnings("ignore")
@WRONG_LAYOUTS
@pytest.mark.parametrize("name", ["x", "scales"])
def test_an_op_alone_refuses_what_is_not_dense(name, layout):
    given = {"x": X, "scales": ONE}
    given[name] = other_layout(layout, given[name])

    assert f"Scale: {name}: expected a dense tensor, got a" in refusal(Scale(), **given)


@pytest.mark.filterwarnings("ignore")
@WRONG_LAYOUTS
def test_a_module_in_front_may_take_what_is_not_dense(layout):
    class Sums(nn.Module):
        def forward(self, x):
            return torch.ones(3, 4)

    model = Sequential(Sums(), ConstantScale(2.0))

    assert torch.equal(model(other_layout(layout, X)), 2 * X)
    assert [step.name for step in model.explain().steps] == ["Sums", "ConstantScale"]


def test_an_op_may_say_that_it_takes_another_layout():
    class Multiplies(Op):
        layouts = frozenset({torch.strided, torch.sparse_coo})

        def fwd(self, x: Tensor, *, by: Tensor):
            return by @ x, by

        def bwd(self, saved, dy):
            return {"x": saved.mT @ dy, "by": None}

    x = X.clone().requires_grad_()
    y = Sequential(Multiplies())(x, by=(2 * torch.eye(3)).to_sparse())
    y.sum().backward()

    torch.testing.assert_close([y.detach(), x.grad], [2 * X, 2 * X])


# ------------------------------------------------------------------------------------------------- buffers overlap


def overlapping():
    both = torch.zeros(4, 4)
    return {
        "x": lambda m, x: {"output": x},
        "part of x": lambda m, x: {"output": x[:]},
        "a parameter": lambda m, x: {"output": m[1].weight.detach().view(-1, 4)[:3]},
        "op 1 (GroupedLinear): 'output'": lambda m, x: {"output": both[:3], "grad_input": both[1:]},
        "op 1 (GroupedLinear): 'output' twice": lambda m, x: {"output": both[:3], "grad_input": both[:3]},
    }


@pytest.mark.parametrize("name", overlapping())
def test_buffer_that_overlaps_something_raises(name):
    model, x = Sequential(MustNotRun(), GroupedLinear(2, 4, 4)), torch.ones(3, 4)
    message = refusal(model, x=x, op_kwargs={1: {"split_sizes": SIZES, **overlapping()[name](model, x)}})

    assert f"overlaps {name.removeprefix('part of ').removesuffix(' twice')} in memory" in message


def test_buffer_that_another_op_reads_raises():
    model, buffer = Sequential(MustNotRun(), GroupedLinear(2, 4, 4), AddExtraInput("r")), torch.zeros(3, 4)

    message = refusal(model, split_sizes=SIZES, output=buffer, r=buffer)
    assert "op 1 (GroupedLinear): 'output' overlaps op 2 (AddExtraInput): 'r' in memory" in message


def test_buffer_that_overlaps_a_parameter_of_another_module_raises():
    linear = nn.Linear(4, 4)
    model, buffer = Sequential(MustNotRun(), GroupedLinear(2, 4, 4), linear), linear.weight.detach()[:3]

    assert "overlaps a parameter" in refusal(model, split_sizes=SIZES, output=buffer)


def test_buffer_beside_the_others_is_fine():
    both, model = torch.zeros(7, 4), Sequential(GroupedLinear(2, 4, 4))

    y = model(X, split_sizes=SIZES, output=both[:3], grad_input=both[3:6])
    assert y.data_ptr() == both.data_ptr()


def test_buffer_beside_a_channel_is_fine():
    model, buffer = Sequential(MakeExtraOutput("r"), GroupedLinear(2, 4, 4), AddExtraInput("r")), torch.empty(3, 4)

    assert torch.equal(model(X, split_sizes=SIZES, output=buffer), X + buffer)


@pytest.mark.parametrize("others", [{}, {"grad_input": torch.empty(3, 4)}])
def test_buffer_that_is_no_tensor_raises_as_such(others):
    message = refusal(Sequential(MustNotRun(), GroupedLinear(2, 4, 4)), split_sizes=SIZES, output=3, **others)

    assert message == "op 1 (GroupedLinear): output: expected a tensor to write into, got a int"


def test_buffers_without_elements_overlap_nothing():
    model, none = Sequential(GroupedLinear(2, 4, 4)), torch.empty(0, 4)

    assert model(none, split_sizes=SIZES * 0, output=none[:]).shape == (0, 4)


def test_buffers_of_an_op_alone_are_checked():
    x = torch.ones(3, 4)

    with pytest.raises(ArgumentError, match="GroupedLinear: 'output' overlaps x in memory"):
        GroupedLinear(2, 4, 4)(x, split_sizes=SIZES, output=x)
