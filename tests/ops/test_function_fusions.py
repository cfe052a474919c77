"""Functions of users inside every fusion that takes an activation: what the ops one by one give; and when they decline.

Truth is the function itself in float64, with the gradients of autograd.
"""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from checks.functions import PUBLISHED, telu
from models import steps
from reference import assert_as_good, grouped_linear, run, scale, split_glu, unit
from test_pointwise import FUNCTIONS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fusible import (
    Bias,
    Combine,
    ConstantScale,
    Dispatch,
    GroupedLinear,
    GroupedLoRA,
    Pointwise,
    Scale,
    Sequential,
    config,
    interleaved,
)
from fusible.ops.kernels import extension

E, K, H, T, SLOTS = 3, 16, 24, 40, 2
SIZES = [17, 0, 20]
D, BF16 = torch.float64, torch.bfloat16
FUSIONS = {"RoutedMLP", "RoutedLoRA", "GroupedMLP", "GroupedLinearGLU", "PointwiseChain"}


def cut(gate, up, prob):
    """Not linear in its number of the row."""
    return torch.tanh(gate * prob).clamp(-0.8, 0.9) * (up + 1)


def weighted(gate, up, prob):
    return F.mish(gate) * up * prob


ALL = {
    **{name: function for name, function in FUNCTIONS.items() if name != "not linear in two rows"},
    **PUBLISHED,
    "cut": (cut, 2),
    "silu glu": (lambda gate, up: F.silu(gate) * up, 2),
    "weighted": (weighted, 2),
}
BY_OTHER_MEANS = {
    "hardsigmoid": lambda x: F.relu6(x + 3) / 6,  # whose gradient in float64 PyTorch multiplies by 1 / 6 of float32
    "constant": lambda x: 0 * x + 1,  # of which autograd knows no gradient
}
JUMPS = {"straight through", "rounding trick", "piecewise"}
"""Where an input that is rounded otherwise gives quite another value."""


def rows_of(function):
    """The names of the row's numbers: all parameters except gate, up and x."""
    return list(Pointwise(function[0], halves="concat" if function[1] == 2 else None).keywords)


WITH_ROW = [name for name, function in ALL.items() if rows_of(function)]
WITHOUT_ROW = [name for name in ALL if name not in WITH_ROW]


class Experts:
    """Two linears and a function between them, scaled before and after the second or not; and a call of them.

    Args:
        scaled: the roles of scales that are there: "before", "after".
        frozen: names of ``tensors`` that require no gradient.
    """

    def __init__(self, name, *scaled, dtype=D, halves="concat", frozen=(), bias=True, op=None, **options):
        function, gated = ALL[name]
        self.function, self.gated, self.halves = BY_OTHER_MEANS.get(name, function), gated == 2, halves
        self.act = op or Pointwise(function, halves=halves if self.gated else None)
        options = {"dtype": dtype, "bias": bias, **options}
        self.fc1, self.fc2 = GroupedLinear(E, K, gated * H, **options), GroupedLinear(E, H, K, **options)
        self.before, self.after = Scale(), Scale()
        ops = [self.fc1, self.act, self.before, self.fc2, self.after]
        self.model = Sequential(*[op for op in ops if type(op) is not Scale])
        if scaled:
            absent = {self.before: "before" not in scaled, self.after: "after" not in scaled}
            self.model = Sequential(*[op for op in ops if not absent.get(op, False)])
        self.scaled = scaled
        self.tensors = {"x": unit(T, K, dtype=dtype)}
        self.tensors |= {n: torch.rand(T, dtype=dtype).requires_grad_() for n in (*self.act.keywords, *scaled)}
        for prefix, op in (("1", self.fc1), ("2", self.fc2)):
            for parameter in ("weight", "bias"):
                if hasattr(op, parameter):
                    self.tensors[parameter[0] + prefix] = getattr(op, parameter)
        for tensor in frozen:
            self.tensors[tensor].requires_grad_(False)
        self.dy = unit(T, K, dtype=dtype, grad=False)

    def call(self, x, before=None, after=None, model=None, w1=None, b1=None, w2=None, b2=None, **rows):
        sizes = torch.tensor(SIZES)
        of_ops = {self.fc1: {"split_sizes": sizes}, self.fc2: {"split_sizes": sizes}}
        scales = ((self.act, rows), (self.before, {"scales": before}), (self.after, {"scales": after}))
        of_ops |= {op: {k: v for k, v in keywords.items() if v is not None} for op, keywords in scales}
        model = self.model if model is None else model
        there = {i: of_ops[op] for i, op in enumerate(self.model) if of_ops[op]}
        return model(x, op_kwargs=self._shared(there, sizes))

    def _shared(self, keywords, sizes):
        return {i: {k: sizes if k == "split_sizes" else v for k, v in each.items()} for i, each in keywords.items()}

    def truth(self, x, w1, w2, b1=None, b2=None, before=None, after=None, **rows):
        block = self.halves.block if self.halves != "concat" else None
        preact = grouped_linear(x, SIZES, w1, b1)
        halves = split_glu(preact, block) if self.gated else (preact,)
        hidden = self.function(*[half * 1.0 for half in halves], *[row[:, None] for row in rows.values()])
        return scale(grouped_linear(scale(hidden.to(x.dtype), before), SIZES, w2, b2), after)

    def run(self, fused=True):
        with nullcontext() if fused else config(disable_fusions=FUSIONS):
            return run(self.call, self.tensors, self.dy)

    def check(self, *names):
        """Fused is unfused, up to rounding, and both are as good as the function by PyTorch."""
        fused = self.run()
        assert steps(self.model) == list(names or ("GroupedMLP",))
        apart = self.run(fused=False)
        assert steps(self.model) == [type(op).__name__ for op in self.model]
        assert_close(fused, apart)
        for results in (fused, apart):
            assert_as_good(results, self.truth, self.tensors, self.dy)


def assert_close(got, expected):
    """Up to roundings to the dtype of ``y``."""
    assert got.keys() == expected.keys()
    wide = {torch.float64: 1e-11, BF16: 2.0**-5}[expected["y"].dtype]
    for name, tensor in expected.items():
        size = max(1.0, tensor.abs().max().item())
        torch.testing.assert_close(got[name], tensor, rtol=wide, atol=wide * size, msg=lambda m, n=name: f"{n}: {m}")


def declined(model, name):
    return [fusion.reason for fusion in model.explain().fusions if fusion.name == name and not fusion.taken]


@pytest.mark.parametrize("name", ALL)
def test_every_function(name):
    Experts(name).check()


@pytest.mark.parametrize("name", [name for name in ALL if name not in JUMPS])
def test_every_function_in_bf16(name):
    Experts(name, dtype=BF16).check()


SOME = ["relu2 glu", "mish", "constant", "xielu", "log sum"]
SCALED = [("before",), ("after",), ("before", "after")]


@pytest.mark.parametrize(("name", "scaled"), [*product(SOME, SCALED), *product(WITHOUT_ROW, SCALED[:1])], ids=str)
def test_scales_beside_the_second_linear(name, scaled):
    Experts(name, *scaled).check()


LINEAR = [name for name in WITH_ROW if name not in ("cut", "constants")]


@pytest.mark.parametrize(
    ("function", "linear"),
    [
        (lambda x, r: torch.ones_like(x) * r, True),
        (lambda x, r: -torch.tanh(x) * r * 0.5, True),
        (lambda x, r: r / (1 + x.abs()), True),
        (lambda x, r: torch.where(x > 0, x * r, 0.0), True),
        (lambda x, r: x * r - torch.relu(x) * r, True),
        (lambda x, r: torch.where(r > 0, x * r, -x * r), False),
        (lambda x, r: x / (r + 2), False),
        (lambda x, r: torch.sin(r * x) / (1 + x.abs()), False),
        (lambda x, r: x * r * r, False),
        (lambda x, r: torch.where(x > 0, x * r, 1.0), False),
        (lambda x, r: x + r, False),
        (lambda x, r: torch.relu(x * r), False),
    ],
)
def test_whether_a_function_is_linear_in_its_number(function, linear):
    assert Pointwise(function).spec.is_linear_in_scale is linear


@pytest.mark.parametrize("name", WITH_ROW)
def test_a_scale_after_fc2_joins_a_number_of_the_row_in_which_the_function_is_linear(name):
    experts = Experts(name, "after")
    experts.check(*(["GroupedMLP"] if name in LINEAR else ["GroupedMLP", "Scale"]))
    if name not in LINEAR:
        experts.run()
        reason = "act is not linear in its number of the row, and a scale follows fc2"
        assert declined(experts.model, "GroupedMLP") == [reason]


def test_a_scale_before_fc2_beside_a_number_of_the_row_is_declined():
    experts = Experts("weighted", "before")
    experts.check("GroupedLinearGLU", "Scale", "GroupedLinear")
    experts.run()
    reason = "act reads a number of the row, and so does the scale after it"
    assert declined(experts.model, "GroupedMLP") == declined(experts.model, "GroupedLinearGLU") == [reason]


FROZEN = ["x", "w1", "b1", "w2", "b2", "prob"]


@pytest.mark.parametrize("frozen", [(n,) for n in FROZEN] + [("w1", "b1"), ("w2", "b2"), ("x", "w1", "b1")], ids=str)
@pytest.mark.parametrize("name", ["weighted", "cut"])
def test_frozen_parts(name, frozen):
    Experts(name, frozen=frozen).check()


@pytest.mark.parametrize("wanted", FROZEN)
def test_each_gradient_alone(wanted):
    Experts("cut", frozen=[name for name in FROZEN if name != wanted]).check()


@pytest.mark.parametrize("halves", ["concat", *map(interleaved, (1, 2, 8, 12))], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_halves_and_transposed_weights(halves, transposed):
    experts = Experts("cut", halves=halves)
    expected = experts.run()
    experts.check()
    if transposed:
        other = Experts("cut", halves=halves, transposed_weight=True)
        with torch.no_grad():
            for mine, its in ((other.fc1, experts.fc1), (other.fc2, experts.fc2)):
                mine.weight.copy_(its.weight.mT)
                mine.bias.copy_(its.bias)
        other.tensors |= {name: experts.tensors[name] for name in ("x", "prob")}
        other.dy = experts.dy
        got = other.run()
        assert steps(other.model) == ["GroupedMLP"]
        assert_close({n: t.mT if n[0] == "w" else t for n, t in got.items()}, expected)


def test_parameters_per_expert():
    one, many = Experts("cut"), Experts("cut", single_grouped_weight=False, single_grouped_bias=False)
    many.model.load_state_dict(one.model.state_dict())
    for experts in (one, many):
        experts.call(one.tensors["x"], prob=one.tensors["prob"]).backward(one.dy)
        assert steps(experts.model) == ["GroupedMLP"]
    for name, parameter in many.model.named_parameters():
        assert torch.equal(parameter.grad, one.model.get_parameter(name[:-1]).grad[int(name[-1])])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("how", ["index", "module", "name"])
def test_a_number_of_the_row_is_given_as_the_user_named_it(how, fused):
    experts = Experts("cut")
    x, prob, sizes = experts.tensors["x"], experts.tensors["prob"], torch.tensor(SIZES)
    expected = experts.truth(**experts.tensors)
    with nullcontext() if fused else config(disable_fusions=FUSIONS):
        if how == "name":
            y = experts.model(x, split_sizes=sizes, prob=prob)
        else:
            key = 1 if how == "index" else experts.act
            y = experts.model(x, split_sizes=sizes, op_kwargs={key: {"prob": prob}})
    assert steps(experts.model) == (["GroupedMLP"] if fused else ["GroupedLinear", "Pointwise", "GroupedLinear"])
    torch.testing.assert_close(y, expected)


def with_row_called(name):
    """A function whose number of the row has a name that fused ops use themselves."""
    functions = {
        "scales": lambda g, u, scales: torch.tanh(g * scales) * u,
        "out_scale_scales": lambda g, u, out_scale_scales: torch.tanh(g * out_scale_scales) * u,
        "fc1_bias_scale": lambda g, u, fc1_bias_scale: torch.tanh(g * fc1_bias_scale) * u,
        "output": lambda g, u, output: torch.tanh(g * output) * u,
        "grad_input": lambda g, u, grad_input: torch.tanh(g * grad_input) * u,
    }
    return Pointwise(functions[name], halves="concat")


@pytest.mark.parametrize("dtype", [D, BF16], ids=str)
@pytest.mark.parametrize("name", ["scales", "out_scale_scales", "fc1_bias_scale", "output", "grad_input"])
def test_names_that_fused_ops_use_themselves(name, dtype):
    linears = (GroupedLinear(E, *shape, dtype=dtype) for shape in ((K, 2 * H), (H, K)))
    model = Sequential(next(linears), with_row_called(name), next(linears))
    x, row, sizes = unit(2, T // 2, K, dtype=dtype), torch.rand(2, T // 2, requires_grad=True), torch.tensor(SIZES)
    of_ops = {0: {"split_sizes": sizes}, 1: {name: row}, 2: {"split_sizes": sizes}}
    got = compare(model, "GroupedMLP", {"x": x, "row": row}, x, op_kwargs=of_ops)
    assert got["row"].any()
    assert got["row"].dtype == torch.float32


def test_one_tensor_is_the_number_of_the_row_and_the_scale_after_fc2():
    op = Pointwise(lambda g, u, scales: torch.tanh(g) * u * scales, halves="concat")
    model = Sequential(GroupedLinear(E, K, 2 * H, dtype=D), op, GroupedLinear(E, H, K, dtype=D), Scale())
    x, scales = unit(T, K), torch.rand(T, dtype=D).requires_grad_()
    tensors = {"x": x, "scales": scales}
    compare(model, "GroupedMLP", tensors, x, split_sizes=torch.tensor(SIZES), scales=scales)


@pytest.mark.parametrize("fused", [True, False])
def test_errors_name_the_number_of_the_row(fused):
    experts, sizes = Experts("cut"), torch.tensor(SIZES)
    messages = []
    for prob in (torch.ones(T + 1), torch.ones(T, dtype=torch.int64), None):
        with nullcontext() if fused else config(disable_fusions=FUSIONS), pytest.raises((TypeError, ValueError)) as e:
            experts.model(experts.tensors["x"], split_sizes=sizes, **({} if prob is None else {"prob": prob}))
        messages.append(str(e.value))
    assert all("prob" in message and "Pointwise" in message for message in messages)


@pytest.mark.parametrize("fused", [True, False])
def test_buffers_of_the_caller(fused):
    experts = Experts("cut")
    x, prob, sizes = experts.tensors["x"], experts.tensors["prob"], torch.tensor(SIZES)
    expected, valid = experts.run(), sum(SIZES)
    y, dx = torch.full((T, K), 7.0, dtype=D), torch.full((T, K), 7.0, dtype=D)
    of_ops = {0: {"split_sizes": sizes, "grad_input": dx}, 1: {"prob": prob}, 2: {"split_sizes": sizes, "output": y}}
    with nullcontext() if fused else config(disable_fusions=FUSIONS):
        result = experts.model(x, op_kwargs=of_ops)
        grads = torch.autograd.grad(result, [x, prob], experts.dy)
    assert steps(experts.model) == (["GroupedMLP"] if fused else ["GroupedLinear", "Pointwise", "GroupedLinear"])
    assert (result.data_ptr(), grads[0].data_ptr()) == (y.data_ptr(), dx.data_ptr())
    for name, got in (("y", y), ("x", dx), ("prob", grads[1])):
        torch.testing.assert_close(got[:valid], expected[name][:valid])
    assert (y[valid:] == 7).all()
    assert (dx[valid:] == 7).all()


@pytest.mark.parametrize("option", ["accumulate_into_main_grad", "delay_wgrad_compute"])
def test_main_grad_and_delayed_weight_gradients(option):
    experts, other = Experts("cut", bias=False), Experts("cut", bias=False, **{option: True})
    other.model.load_state_dict(experts.model.state_dict())
    x, prob, expected = experts.tensors["x"], experts.tensors["prob"], experts.run()
    for parameter in other.model.parameters():
        parameter.main_grad = torch.ones_like(parameter)
    other.call(x, prob=prob).backward(experts.dy)
    assert steps(other.model) == ["GroupedMLP"]
    if option == "delay_wgrad_compute":
        assert other.fc1.weight.grad is None
        other.fc1.backward_dw()
        other.fc2.backward_dw()
    for name, weight in (("w1", other.fc1.weight), ("w2", other.fc2.weight)):
        got = weight.grad if option == "delay_wgrad_compute" else weight.main_grad - 1
        torch.testing.assert_close(got, expected[name])
    assert_near([x.grad, prob.grad], [expected["x"], expected["prob"]])


def test_constants_are_read_at_every_call():
    op = Pointwise(lambda g, u, cap: torch.tanh(g).clamp(max=cap) * u, halves="concat", constants={"cap": 0.25})
    experts = Experts("silu glu", op=op)
    for cap in (0.25, 0.5):
        op.constants = {"cap": cap}
        experts.function = lambda g, u, cap=cap: torch.tanh(g).clamp(max=cap) * u
        experts.check()
    assert op.constants == {"cap": 0.5}


COLUMNS = torch.ones(H, dtype=D)
DECLINED = {
    "act reads more than one number of a row": [Pointwise(lambda g, u, a, b: g * a + u * b, halves="concat")],
    "act has operations that kernels do not know": [
        Pointwise(lambda g, u: torch.special.i0(g) * u, halves="concat"),
        Pointwise(lambda g, u, beta: torch.special.i0(g) * beta, halves="concat", columns={"beta": COLUMNS}),
    ],
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_the_fusions_decline_in_the_words_of_explain(reason):
    for op in DECLINED[reason]:
        experts = Experts("silu glu", op=op)
        rows = {name: torch.rand(T, dtype=D) for name in op.keywords if name != "split_sizes"}
        experts.model(experts.tensors["x"], split_sizes=torch.tensor(SIZES), **rows)
        assert steps(experts.model) == ["GroupedLinear", "Pointwise", "GroupedLinear"]
        assert declined(experts.model, "GroupedMLP") == declined(experts.model, "GroupedLinearGLU") == [reason]
        assert reason in str(experts.model.explain())


@pytest.mark.parametrize("reason", DECLINED)
def test_what_the_other_fusions_decline(reason):
    op = DECLINED[reason][0]
    rows = {name: torch.rand(T, dtype=D) for name in op.keywords}
    if not rows:
        for kind, name in ((GroupedLinear, "RoutedMLP"), (GroupedLoRA, "RoutedLoRA")):
            layer = routed(op, kind=kind)
            layer(unit(T, K, grad=False), **routing())
            assert declined(layer, name) == [reason]


def test_which_fusions_take_numbers_of_columns_that_all_groups_share():
    op = Pointwise(lambda g, u, beta: g.sigmoid() * u * beta, halves="concat", columns={"beta": COLUMNS})
    x, weights = unit(T, K), torch.rand(T, 2, dtype=D).requires_grad_()
    layer, index = routed(op), torch.randint(E, (T, 2))
    compare(layer, "RoutedMLP", {"x": x, "w": weights}, x, top_k_index=index, top_k_weights=weights)
    adapted, call = routed(op, kind=GroupedLoRA), routing()
    compare(adapted, "RoutedLoRA", {"x": x, "w": call["top_k_weights"]}, x, **call)


def test_disabled_fusions_are_not_taken():
    experts = Experts("weighted")
    for names in ({"GroupedMLP"}, {"GroupedMLP", "GroupedLinearGLU"}):
        with config(disable_fusions=names):
            experts.run()
        expected = ["GroupedLinearGLU", "GroupedLinear"] if len(names) == 1 else ["GroupedLinear", "Pointwise"]
        assert steps(experts.model)[:2] == expected


# ------------------------------------------------------------------------------------------- the other fusions


def compare(model, name, tensors, *args, valid=None, **keywords):
    """Fused, unfused, and equal up to rounding, in so many rows."""

    def call(**_):
        return model(*args, **keywords)[:valid]

    tensors = {**tensors, **dict(model.named_parameters())}
    dy = torch.linspace(-1, 1, call().numel(), dtype=D).view_as(call()).to(call().dtype)
    fused = run(call, tensors, dy)
    assert name in steps(model)
    with config(disable_fusions=FUSIONS):
        apart = run(call, tensors, dy)
    assert steps(model) == [type(op).__name__ for op in model]
    assert_close(fused, apart)
    return fused


def op_of(name):
    function, gated = ALL[name]
    return Pointwise(function, halves="concat" if gated == 2 else None), gated


@pytest.mark.parametrize("dtype", [D, BF16], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_the_first_half_alone(name, dtype):
    op, gated = op_of(name)
    rows = {row: torch.rand(T, dtype=dtype).requires_grad_() for row in op.keywords}
    x, scales = unit(T, K, dtype=dtype), torch.rand(T, dtype=dtype).requires_grad_()
    sizes = torch.tensor(SIZES)
    linear = GroupedLinear(E, K, gated * H, dtype=dtype)
    model, valid = Sequential(linear, op), sum(SIZES)
    compare(model, "GroupedLinearGLU", {"x": x, **rows}, x, valid=valid, split_sizes=sizes, **rows)
    assert not model(x, split_sizes=sizes, **rows)[valid:].any()
    if not rows:
        model = Sequential(linear, op, Scale())
        compare(model, "GroupedLinearGLU", {"x": x, "s": scales}, x, valid=valid, split_sizes=sizes, scales=scales)


@pytest.mark.parametrize("dtype", [D, BF16], ids=str)
@pytest.mark.parametrize("name", WITHOUT_ROW)
def test_a_function_and_a_scale(name, dtype):
    op, gated = op_of(name)
    x, scales = unit(2, T, gated * H, dtype=dtype), torch.rand(2, T, dtype=dtype).requires_grad_()
    compare(Sequential(op, Scale()), "PointwiseChain", {"x": x, "s": scales}, x, scales=scales)


def routed(op, scaled=("after",), kind=GroupedLinear, dtype=D, **options):
    gated = len(op._x_inputs)
    options = {"dtype": dtype, **options}
    adapters = (3,) if kind is GroupedLoRA else ()
    fc1, fc2 = kind(E, K, gated * H, *adapters, **options), kind(E, H, K, *adapters, **options)
    for parameter in (*fc1.parameters(), *fc2.parameters()):
        torch.nn.init.normal_(parameter, std=K**-0.5)
    before, after = ([Scale()] if role in scaled else [] for role in ("before", "after"))
    return Sequential(Dispatch(E), fc1, op, *before, fc2, *after, Combine())


def routing():
    generator = torch.Generator().manual_seed(5)
    index = torch.randint(0, E + 1, (T, SLOTS), generator=generator)  # some are of no expert
    return {"top_k_index": index, "top_k_weights": torch.rand(T, SLOTS, dtype=D, generator=generator).requires_grad_()}


@pytest.mark.parametrize(("name", "scaled"), [*product(SOME, SCALED), *product(WITHOUT_ROW, SCALED[1:2])], ids=str)
def test_a_routed_layer(name, scaled):
    model, x, call = routed(op_of(name)[0], scaled), unit(T, K), routing()
    compare(model, "RoutedMLP", {"x": x, "weights": call["top_k_weights"]}, x, **call)


@pytest.mark.parametrize("name", WITHOUT_ROW)
def test_a_routed_layer_with_adapters(name):
    model, x, call = routed(op_of(name)[0], kind=GroupedLoRA), unit(T, K), routing()
    compare(model, "RoutedLoRA", {"x": x, "weights": call["top_k_weights"]}, x, **call)


@pytest.mark.parametrize("kind", [GroupedLinear, GroupedLoRA])
@pytest.mark.parametrize("option", [{"transposed_weight": True}, {"bias": False}, {"dtype": BF16}], ids=str)
def test_options_of_routed_layers(option, kind):
    dtype = option.get("dtype", D)
    model, x, call = routed(op_of("silu glu")[0], kind=kind, **option), unit(T, K, dtype=dtype), routing()
    name = "RoutedMLP" if kind is GroupedLinear else "RoutedLoRA"
    compare(model, name, {"x": x, "weights": call["top_k_weights"]}, x, **call)


@pytest.mark.parametrize(
    "frozen", [("x",), ("weights",), ("1.",), ("3.",), ("1.", "3."), ("x", "weights", "1.")], ids=str
)
@pytest.mark.parametrize("kind", [GroupedLinear, GroupedLoRA])
def test_frozen_parts_of_routed_layers(kind, frozen):
    model, x, call = routed(op_of("telu glu")[0], kind=kind), unit(T, K), routing()
    tensors = {"x": x, "weights": call["top_k_weights"]}
    for name, tensor in (*tensors.items(), *model.named_parameters()):
        tensor.requires_grad_(not name.startswith(frozen))
    compare(model, "RoutedMLP" if kind is GroupedLinear else "RoutedLoRA", tensors, x, **call)


def test_a_routed_layer_whose_function_reads_the_routing_weights():
    op = Pointwise(lambda gate, up, scales: torch.tanh(gate) * up * scales, halves="concat")
    model, x, call = routed(op, ()), unit(T, K), routing()
    tensors = {"x": x, "weights": call["top_k_weights"]}
    got = compare(model, "RoutedMLP", tensors, x, **call)
    assert steps(model, x, **call) == ["RoutedMLP"]
    plain = Pointwise(lambda gate, up: torch.tanh(gate) * up, halves="concat")
    other = Sequential(*[plain if each is op else each for each in model[:3]], Scale(), *model[3:])
    expected = compare(other, "RoutedMLP", tensors, x, **call)
    for one, two in zip(got.values(), expected.values(), strict=True):
        torch.testing.assert_close(one, two)


def test_a_number_of_the_row_in_a_routed_layer_is_declined():
    model, x, call = routed(op_of("weighted")[0]), unit(T, K), routing()
    prob = torch.rand(T * SLOTS, dtype=D).requires_grad_()
    compare(model, "GroupedMLP", {"x": x, "prob": prob}, x, prob=prob, **call)
    model(x, prob=prob, **call)
    assert declined(model, "RoutedMLP") == ["act has 'prob', which RoutedMLP does not take"]
    adapted = routed(op_of("weighted")[0], kind=GroupedLoRA)
    adapted(x, prob=prob, **call)
    assert declined(adapted, "RoutedLoRA") == ["act reads a number of the row, and so does the scale after it"]


# ------------------------------------------------------------------------------------- numbers of groups' columns


def sloped(gate, up, beta):
    return gate * torch.sigmoid(gate * beta) * up


def shifted(x, beta, shift):
    return torch.tanh(x * beta) + shift


def sloped_of_a_row(gate, up, prob, beta):
    return torch.tanh(gate * beta * prob) * up


WITH_COLUMNS = {"sloped": (sloped, 2, ["beta"]), "shifted": (shifted, 1, ["beta", "shift"])}
OF_A_ROW = {"of a row": (sloped_of_a_row, 2, ["beta"])}


def with_columns(name, dtype=D, halves="concat", frozen=()):
    """A function with numbers of each group's columns."""
    function, gated, columns = {**WITH_COLUMNS, **OF_A_ROW}[name]
    start = {column: torch.rand(E, H, dtype=dtype) + 0.5 for column in columns}
    op = Pointwise(function, halves=halves if gated == 2 else None, columns=start)
    for column in frozen:
        getattr(op, column).requires_grad_(False)
    return op, gated


def mlp_with(op, gated, scaled=(), dtype=D, **options):
    shapes = (K, gated * H), (H, K)
    fc1, fc2 = (GroupedLinear(E, *shape, dtype=dtype, **options) for shape in shapes)
    before, after = ([Scale()] if role in scaled else [] for role in ("before", "after"))
    return Sequential(fc1, op, *before, fc2, *after)


@pytest.mark.parametrize("dtype", [D, BF16], ids=str)
@pytest.mark.parametrize("scaled", [(), *SCALED], ids=str)
@pytest.mark.parametrize("name", WITH_COLUMNS)
def test_columns_of_groups_in_experts(name, scaled, dtype):
    op, gated = with_columns(name, dtype)
    model, x, scales = (
        mlp_with(op, gated, scaled, dtype),
        unit(T, K, dtype=dtype),
        torch.rand(T, dtype=dtype).requires_grad_(),
    )
    tensors, keywords = {"x": x}, {"split_sizes": torch.tensor(SIZES)}
    if scaled:
        tensors, keywords = {**tensors, "s": scales}, {**keywords, "scales": scales}
    got = compare(model, "GroupedMLP", tensors, x, **keywords)
    assert steps(model, x, **keywords) == ["GroupedMLP"]
    for parameter in op._parameters:
        grad = got[f"1.{parameter}"]
        assert grad.dtype == dtype
        assert grad[[0, 2]].any(1).all()
        assert not grad[1].any()  # of a group without rows


def test_columns_of_groups_beside_a_number_of_the_row():
    op, gated = with_columns("of a row")
    model, x, prob = mlp_with(op, gated), unit(T, K), torch.rand(T, dtype=D).requires_grad_()
    compare(model, "GroupedMLP", {"x": x, "prob": prob}, x, prob=prob, split_sizes=torch.tensor(SIZES))
    pair = Sequential(model[0], op)
    keywords = {"prob": prob, "split_sizes": torch.tensor(SIZES)}
    compare(pair, "GroupedLinearGLU", {"x": x, "prob": prob}, x, valid=sum(SIZES), **keywords)


@pytest.mark.parametrize("frozen", [("1.beta",), ("0.",), ("2.",), ("0.", "2."), ("x",), ("x", "0.", "2.")], ids=str)
def test_frozen_parts_beside_columns_of_groups(frozen):
    op, gated = with_columns("sloped")
    model, x = mlp_with(op, gated), unit(T, K)
    for name, tensor in (("x", x), *model.named_parameters()):
        tensor.requires_grad_(not name.startswith(frozen))
    got = compare(model, "GroupedMLP", {"x": x}, x, split_sizes=torch.tensor(SIZES))
    assert ("1.beta" in got) is ("1.beta" not in frozen)


def test_all_is_frozen_but_the_columns_of_an_expert_that_is_frozen_before_and_behind():
    op, gated = with_columns("shifted", frozen=["beta"])
    model, x = mlp_with(op, gated), unit(T, K, grad=False)
    for linear in (model[0], model[2]):
        linear.requires_grad_(False)
    compare(model, "GroupedMLP", {}, x, split_sizes=torch.tensor(SIZES))


@pytest.mark.parametrize("halves", ["concat", *map(interleaved, (1, 2, 8, 12))], ids=str)
def test_columns_of_groups_where_gate_and_up_alternate(halves):
    op, gated = with_columns("sloped", halves=halves)
    x = unit(T, K)
    compare(mlp_with(op, gated), "GroupedMLP", {"x": x}, x, split_sizes=torch.tensor(SIZES))


def test_columns_of_groups_without_rows():
    op, gated = with_columns("sloped")
    model, x = mlp_with(op, gated), unit(0, K)
    sizes = torch.tensor([0, 0, 0])
    for fused in (True, False):
        with nullcontext() if fused else config(disable_fusions=FUSIONS):
            y = model(x, split_sizes=sizes)
            (grad,) = torch.autograd.grad(y.sum(), [op.beta])
        assert y.shape == (0, K)
        assert grad.eq(0).all()


@pytest.mark.parametrize("name", WITH_COLUMNS)
def test_columns_of_groups_in_the_first_half_alone(name):
    op, gated = with_columns(name)
    model, x, sizes = Sequential(GroupedLinear(E, K, gated * H, dtype=D), op), unit(T, K), torch.tensor(SIZES)
    compare(model, "GroupedLinearGLU", {"x": x}, x, valid=sum(SIZES), split_sizes=sizes)


@pytest.mark.parametrize("scaled", SCALED, ids=str)
@pytest.mark.parametrize("name", WITH_COLUMNS)
def test_columns_of_groups_in_a_routed_layer(name, scaled):
    model, x, call = routed(with_columns(name)[0], scaled), unit(T, K), routing()
    compare(model, "RoutedMLP", {"x": x, "weights": call["top_k_weights"]}, x, **call)
    assert steps(model, x, **call) == ["RoutedMLP"]
    with torch.no_grad():
        torch.testing.assert_close(model(x, **call), model(x, **call))
        expected = model(x, **call)
    with config(disable_fusions=FUSIONS):
        torch.testing.assert_close(model(x, **call), expected)


def test_a_routed_layer_whose_function_reads_the_routing_weights_and_columns():
    op = Pointwise(
        lambda gate, up, scales, beta: torch.tanh(gate * beta) * up * scales,
        halves="concat",
        columns={"beta": torch.rand(E, H, dtype=D)},
    )
    for scaled in ((), ("after",)):
        model, x, call = routed(op, scaled), unit(T, K), routing()
        compare(model, "RoutedMLP", {"x": x, "weights": call["top_k_weights"]}, x, **call)


@pytest.mark.parametrize(
    "frozen", [(), ("x",), ("weights",), ("2.",), ("1.", "3."), ("x", "weights", "1."), ("x", "weights", "1.", "3.")]
)
@pytest.mark.parametrize("name", WITH_COLUMNS)
def test_columns_of_groups_between_adapters(name, frozen):
    model, x, call = routed(with_columns(name)[0], kind=GroupedLoRA), unit(T, K), routing()
    tensors = {"x": x, "weights": call["top_k_weights"]}
    for part, tensor in (*tensors.items(), *model.named_parameters()):
        tensor.requires_grad_(not part.startswith(frozen or ("-",)))
    got = compare(model, "RoutedLoRA", tensors, x, **call)
    assert ("2.beta" in got) is ("2." not in frozen)


@pytest.mark.parametrize("dtype", [D, BF16], ids=str)
def test_a_chain_between_adapters(dtype):
    model, x, call = (
        routed(with_columns("sloped", dtype)[0], kind=GroupedLoRA, dtype=dtype),
        unit(T, K, dtype=dtype),
        routing(),
    )
    chain = Bias(2 * H, dtype=dtype), model[2], Pointwise(torch.tanh), ConstantScale(0.5)
    torch.nn.init.normal_(chain[0].bias)
    model = Sequential(*model[:2], *chain, *model[3:])
    compare(model, "RoutedLoRA", {"x": x, "weights": call["top_k_weights"]}, x, **call)
    assert steps(model, x, **call) == ["RoutedLoRA"]


def test_columns_of_other_groups_than_those_of_the_linear_are_declined():
    op, gated = with_columns("sloped")
    model, x = mlp_with(op, gated), unit(T, K)
    sizes = [torch.tensor(SIZES), torch.tensor([20, 10, 7])]
    of_ops = {i: {"split_sizes": sizes[i == 1]} for i in range(3)}
    compare(model, "GroupedLinear", {"x": x}, x, op_kwargs=of_ops)
    model(x, op_kwargs=of_ops)
    assert declined(model, "GroupedMLP") == ["act and fc1 read different split_sizes"]


# ---------------------------------------------------------------------------------- what surrounds a call of a model


def training():
    """A layer of every kind with a call: experts with a number of the row, a routed layer."""
    experts, model, x, call = Experts("cut"), routed(op_of("silu glu")[0]), unit(T, K), routing()
    sizes = torch.tensor(SIZES)
    prob = experts.tensors["prob"]
    yield experts.model, "GroupedMLP", (x, prob), lambda m, x, prob: m(x, split_sizes=sizes, prob=prob)
    index, weights = call["top_k_index"], call["top_k_weights"]
    yield model, "RoutedMLP", (x, weights), lambda m, x, w: m(x, top_k_index=index, top_k_weights=w)
    model = routed(with_columns("sloped")[0])
    yield model, "RoutedMLP", (x, weights), lambda m, x, w: m(x, top_k_index=index, top_k_weights=w)


def step_of(model, call, tensors):
    """The output, and the gradients of tensors and parameters."""
    y = call(model, *tensors)
    dy = torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [*tensors, *model.parameters()], dy)]


def assert_near(got, expected, tolerance=1e-12):
    for one, two in zip(got, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    for model, name, tensors, call in training():
        expected = step_of(model, call, tensors)
        assert steps(model) == [name]

        def again(m, *t, call=call):
            return checkpoint(lambda *t: call(m, *t), *t, use_reentrant=reentrant)

        y = again(model, *tensors)
        dy = torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y)
        leaves = [*tensors, *model.parameters()]
        y.backward(dy)
        assert_near([y.detach(), *[leaf.grad for leaf in leaves]], expected)
        for leaf in leaves:
            leaf.grad = None


def test_without_gradients():
    for model, name, tensors, call in training():
        expected = step_of(model, call, tensors)[0]
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(call(model, *tensors), expected)
                assert steps(model) == [name]


def test_autocast():
    for model, name, tensors, call in training():
        model.float()
        tensors = [t.detach().float().requires_grad_() for t in tensors]
        with torch.autocast("cpu", BF16):
            fused = step_of(model, call, tensors)
            assert steps(model) == [name]
            with config(disable_fusions=FUSIONS):
                apart = step_of(model, call, tensors)
        exact = step_of(model, call, tensors)
        assert [t.dtype for t in fused] == [t.dtype for t in apart]
        for one, two, truth in zip(fused, apart, exact, strict=True):
            error, allowed = ((t.double() - truth.double()).norm() for t in (one, two))
            assert error <= 1.5 * allowed + 1e-6 * truth.norm()


@pytest.mark.parametrize("fused", [True, False])
def test_compiled_whole(fused):
    for model, name, tensors, call in training():
        with nullcontext() if fused else config(disable_fusions=FUSIONS):
            expected = step_of(model, call, tensors)
            assert (name in steps(model)) is fused
            torch._dynamo.reset()
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            y = call(compiled, *tensors)
            dy = torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y)
            got = [y.detach(), *torch.autograd.grad(y, [*tensors, *model.parameters()], dy)]
            assert_near(got, expected)


def test_exported():
    """An exported program has the function as text: it runs where the function is not."""
    for model, name, tensors, call in training():
        expected = call(model, *tensors).detach()
        assert steps(model) == [name]
        keyword = "prob" if name == "GroupedMLP" else "top_k_weights"
        rest = {"split_sizes": torch.tensor(SIZES)} if keyword == "prob" else {"top_k_index": routing()["top_k_index"]}
        inputs = [t.detach() for t in tensors]
        with torch.no_grad():
            program = torch.export.export(model, (inputs[0],), {keyword: inputs[1], **rest})
        del model
        y = program.module()(inputs[0], **{keyword: inputs[1], **rest})
        torch.testing.assert_close(y, expected)


def test_copies_and_files():
    for model, name, tensors, call in training():
        expected = step_of(model, call, tensors)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_near(step_of(other, call, tensors), expected)
            assert steps(other) == [name]
            assert not any("program" in key or "function" in key for key in other.state_dict())
        other.load_state_dict({key: torch.zeros_like(tensor) for key, tensor in model.state_dict().items()})
        assert not call(other, *tensors).any()


def test_accumulation_and_retained_graphs():
    for model, _, tensors, call in training():
        expected = step_of(model, call, tensors)[1:]
        y = call(model, *tensors)
        dy = torch.linspace(-1, 1, y.numel(), dtype=D).view_as(y)
        for _ in range(2):
            y.backward(dy, retain_graph=True)
        leaves = [*tensors, *model.parameters()]
        assert_near([leaf.grad for leaf in leaves], [2 * grad for grad in expected])
        for leaf in leaves:
            leaf.grad = None


def test_200_steps_of_training_lose_as_much_fused_as_unfused():
    def losses(disabled):
        torch.manual_seed(7)
        model = routed(Pointwise(lambda g, u: telu(g.clamp(max=7.0)) * (u + 1), halves="concat"), dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        x, target = torch.randn(T, K), torch.randn(T, K)
        call, found = {**routing()}, []
        call["top_k_weights"] = call["top_k_weights"].detach().float()
        with config(disable_fusions=disabled):
            for _ in range(200):
                loss = F.mse_loss(model(x, **call), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            assert ("RoutedMLP" in steps(model)) is not disabled
        return torch.tensor(found)

    fused, apart = losses(set()), losses(FUSIONS)
    assert fused[-1] < 0.7 * fused[0]
    torch.testing.assert_close(fused, apart, rtol=2e-5, atol=0)


def test_explain_names_the_function_in_the_epilogue():
    act = Pointwise(lambda gate, up: torch.tanh(gate) * up, halves="concat")
    kwargs = {"bias": False, "device": "meta", "dtype": torch.bfloat16}
    model = Sequential(GroupedLinear(4, 64, 128, **kwargs), act, GroupedLinear(4, 64, 64, **kwargs))
    with FakeTensorMode():  # a GPU that is not there
        for linear in (model[0], model[2]):
            linear.weight = torch.nn.Parameter(torch.empty(linear.weight.shape, device="cuda", dtype=torch.bfloat16))
        x = torch.empty(32, 64, device="cuda", dtype=torch.bfloat16)
        sizes = torch.empty(4, device="cuda", dtype=torch.int64)
    with extension.assume(extension.HOPPER):
        explanation = model.explain(x, split_sizes=sizes)
    assert f"hopper ({act.spec.program.name} in the epilogue)" in str(explanation)


def trained(fused, dtype):
    """The losses of 200 steps of experts with a function that learns a number for each column, then its parameters."""
    torch.manual_seed(0)
    act = Pointwise(lambda g, u, slope: g * torch.sigmoid(slope * g) * u, halves="concat", columns={"slope": COLUMNS})
    options = {"dtype": D}
    model = Sequential(
        GroupedLinear(E, K, 2 * H, **options), Bias(2 * H, **options), act, GroupedLinear(E, H, K, **options)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=K**-0.5)
    model.to(dtype)
    x, target = torch.randn(2, T, K, dtype=D).to(dtype)
    optimizer, sizes, valid, losses = (
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        torch.tensor(SIZES),
        sum(SIZES),
        [],
    )
    with config(disable_fusions=set() if fused else FUSIONS | {"PointwiseChain"}):
        for _ in range(200):
            loss = (model(x, split_sizes=sizes) - target)[:valid].square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    assert ("GroupedMLP" in steps(model)) is fused
    return [torch.stack(losses), *[parameter.detach() for parameter in model.parameters()]]


def test_200_steps_of_training_are_those_without_fusions():
    fused, apart = trained(True, D), trained(False, D)
    for computed, expected in zip(fused, apart, strict=True):
        torch.testing.assert_close(computed, expected, rtol=1e-7, atol=1e-9)
    assert fused[0][-1] < 0.5 * fused[0][0]
