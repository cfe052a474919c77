"""The fused expert MLP and its smaller kin against the ops one by one and against float64; and when it declines."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from reference import (
    ACTIVATIONS,
    assert_as_good,
    assert_same,
    glu,
    grouped_linear,
    mlp,
    run,
    scale,
    unit,
)
from torch.utils.checkpoint import checkpoint

from fusible import (
    GLU,
    Activation,
    ArgumentError,
    ClampedSwiGLU,
    GroupedLinear,
    Identity,
    Scale,
    ScaledActivation,
    ScaledSwiGLU,
    Sequential,
    SwiGLU,
    config,
    interleaved,
)
from fusible.fuser.contract import tracing
from fusible.ops import kernels

E, K, F, N, T = 3, 16, 32, 24, 80
SIZES = [31, 0, 43]
VALID = sum(SIZES)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
PLACES = ["none", "before", "after", "both"]
FUSIONS = {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}


class Case:
    """A model, its arguments by their names in :func:`reference.mlp`, and how to call it."""

    def __init__(
        self,
        act=None,
        plain=None,
        *,
        place="before",
        bias=(True, True),
        scaled=(False, False),
        dtype=torch.float64,
        scales_dtype=None,
        sizes=SIZES,
        rows=T,
        single=True,
        frozen=(),
        shape=None,
    ):
        act, self.plain, self.sizes = act or SwiGLU(), plain or glu("silu"), sizes
        how = {"dtype": dtype, "single_grouped_weight": single, "single_grouped_bias": single}
        wide = 2 * F if act.spec.gated else F
        fc1 = GroupedLinear(len(sizes), K, wide, bias=bias[0], scale_bias=scaled[0], **how)
        self.fc2 = GroupedLinear(len(sizes), F, N, bias=bias[1], scale_bias=scaled[1], **how)
        self.before, self.after = Scale(), Scale()
        ops = [fc1, act, self.before, self.fc2, self.after]
        absent = {"none": [2, 4], "before": [4], "after": [2], "both": []}[place]
        self.model = Sequential(*(op for i, op in enumerate(ops) if i not in absent))
        self.shape = shape or (rows,)
        names = [("scales", place in ("before", "both")), ("out", place in ("after", "both"))]
        names += [("s1", scaled[0]), ("s2", scaled[1])]
        self.tensors = {"x": unit(*self.shape, K, dtype=dtype)}
        self.tensors |= {n: unit(*self.shape, dtype=scales_dtype or dtype) for n, there in names if there}
        for prefix, op in (("1", fc1), ("2", self.fc2)):
            for name in ("weight", "bias"):
                if hasattr(op, name):
                    self.tensors[name[0] + prefix] = getattr(op, name)
        for name in frozen:
            self.tensors[name].requires_grad_(False)
        self.dy = unit(*self.shape, N, dtype=dtype, grad=False)

    def call(self, x, scales=None, out=None, s1=None, s2=None, **_):
        places = [(0, "bias_scale", s1), (self.before, "scales", scales)]
        places += [(self.fc2, "bias_scale", s2), (self.after, "scales", out)]
        kwargs = {op: {name: value} for op, name, value in places if value is not None}
        return self.model(x, split_sizes=torch.tensor(self.sizes), op_kwargs=kwargs)

    def reference(self, x, **tensors):
        return mlp(x, self.sizes, self.plain, **tensors)

    def run(self, fused=True):
        with nullcontext() if fused else config(disable_fusions=FUSIONS):
            results = run(self.call, self.tensors, self.dy)
        names = [step.name for step in self.model.explain().steps]
        assert names == (["GroupedMLP"] if fused else [type(op).__name__ for op in self.model])
        return results

    def check(self, rows=-1):
        """Fused and unfused are both as good as plain torch."""
        for fused in (True, False):
            assert_as_good(self.run(fused), self.reference, self.tensors, self.dy, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_glu(name, dtype):
    Case(GLU(name), glu(name), dtype=dtype, place="both").check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation(name, dtype):
    Case(Activation(name), ACTIVATIONS[name], dtype=dtype, place="both").check()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [1, 2, 4, 8])
def test_every_layout(block, dtype):
    how = {"limit": 0.7, "alpha": 1.702, "linear_offset": 1.0}
    Case(GLU("silu", layout=interleaved(block), **how), glu("silu", block=block, **how), dtype=dtype).check()


def test_clamped_swiglu():
    how = {"limit": 7.0, "alpha": 1.702, "linear_offset": 1.0}
    Case(ClampedSwiGLU(), glu("silu", **how), dtype=torch.bfloat16).check()


@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_scales(place, dtype, scales_dtype):
    Case(place=place, dtype=dtype, scales_dtype=scales_dtype, scaled=(True, True)).check()


def test_wide_scales_are_not_rounded_first():
    how = {"bias": False, "dtype": torch.bfloat16}
    model = Sequential(GroupedLinear(1, K, 2 * F, **how), SwiGLU(), Scale(), GroupedLinear(1, F, F, **how))
    model[3].weight.data.copy_(torch.eye(F))
    x, p = unit(T, K, dtype=torch.bfloat16, grad=False), unit(T, dtype=torch.float32, grad=False)
    y = model(x, split_sizes=[T], scales=p)
    pre = model[0](x, split_sizes=[T])

    assert torch.equal(y, (SwiGLU()(pre.float()) * p[:, None]).bfloat16())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("bias", list(product([True, False], repeat=2)))
def test_biases(bias, place):
    Case(bias=bias, place=place).check()


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("frozen", [[], ["0.weight0", "3.weight2", "0.bias1", "3.bias2"]])
def test_discrete_parameters_get_the_gradients_of_stacked_ones(frozen, fused):
    one, many = Case(), Case(single=False)
    many.model.load_state_dict(one.model.state_dict())
    many.tensors, many.dy = one.tensors, one.dy
    for name in frozen:
        many.model.get_parameter(name).requires_grad_(False)
    with nullcontext() if fused else config(disable_fusions=FUSIONS):
        for case in (one, many):
            case.call(**case.tensors).backward(case.dy)

    for name, p in many.model.named_parameters():
        expected = one.model.get_parameter(name[:-1]).grad[int(name[-1])]
        assert_same(p.grad, None if name in frozen else expected)


@pytest.mark.parametrize("scaled", list(product([True, False], repeat=2)))
@pytest.mark.parametrize("place", PLACES)
def test_scaled_biases(place, scaled):
    Case(place=place, scaled=scaled).check()


@pytest.mark.parametrize(
    ("case", "asked"),
    [
        ({}, torch.float64),
        ({"single": False}, torch.float64),
        ({"frozen": ["b1"]}, None),
        ({"scaled": (True, False)}, None),
    ],
)
def test_the_first_bias_comes_with_the_gradient_of_the_pre_activation(case, asked, monkeypatch):
    """Where it is the plain sum of that, and wanted; the sums of rows that are left are then of the second linear."""
    given, backward, summed, sums = [], kernels.grouped_linear_activation_backward, [], kernels.column_sums

    def note(seen, value):
        if not tracing.active():  # explain runs the backward as well
            seen.append(value)

    monkeypatch.setattr(
        kernels,
        "grouped_linear_activation_backward",
        lambda *args, wanted, **how: note(given, wanted.bias_dtype) or backward(*args, wanted=wanted, **how),
    )
    monkeypatch.setattr(kernels, "column_sums", lambda rows, *how: note(summed, rows.shape[1]) or sums(rows, *how))
    Case(**case).run()

    assert given == [asked]
    assert sorted(summed) == ([N, 2 * F] if "scaled" in case else [N])


PARTS = ["x", "w1", "b1", "w2", "b2", "scales", "out", "s1", "s2"]


@pytest.mark.parametrize(
    "frozen", [("w1", "b1"), ("w2", "b2"), ("w1", "b1", "w2", "b2"), ("x", "scales"), ("b1", "b2")]
)
@pytest.mark.parametrize("place", ["none", "before"])
def test_frozen_parts(place, frozen):
    Case(place=place, frozen=[name for name in frozen if place != "none" or name != "scales"]).check()


@pytest.mark.parametrize("sizes", [[80, 0, 0], [0, 0, 80], [1, 1, 1], [0, 0, 0], [40, 20, 20], [80], [1] * 10])
def test_splits(sizes):
    Case(sizes=sizes).check()


@pytest.mark.parametrize("span", [1, 32, 40, 1000])
def test_activations_by_spans_of_rows(span, monkeypatch):
    monkeypatch.setattr("fusible.ops.kernels.pytorch.loop.SPAN", span)
    Case(place="both", scaled=(True, True), sizes=[20, 0, 15, 30, 1, 9]).check()


@pytest.mark.parametrize("shape", [(8, 10), (5, 4, 4)])
@pytest.mark.parametrize("place", PLACES)
def test_leading_dims(place, shape):
    case = Case(place=place, shape=shape, scaled=(True, True))

    case.check()
    assert case.run()["y"].shape == (*shape, N)


@pytest.mark.parametrize("disabled", [set(), {"GroupedMLP"}, {"GroupedMLP", "GroupedLinearGLU"}])
@pytest.mark.parametrize("count", [2, 3])
def test_result_of_leading_dims_may_be_changed_in_place(count, disabled):
    layers, grads = [*linears()], []
    model = Sequential(layers[0], SwiGLU(), layers[1])[:count]
    for inplace in (True, False):
        x = torch.full((4, T // 4, K), 0.5, dtype=torch.float64).requires_grad_()
        with config(disable_fusions=disabled):
            y = torch.nn.functional.relu(model(x, split_sizes=SIZES), inplace=inplace)
        grads += torch.autograd.grad(y.sum(), x)

    assert torch.equal(*grads)


def test_autocast_does_not_round_scales():
    case = Case(place="after", dtype=torch.float32, bias=(False, False))
    with torch.autocast("cpu", torch.bfloat16):
        y = case.call(**case.tensors)
        doubled = case.call(**{**case.tensors, "out": 2 * case.tensors["out"]})

    assert case.model.explain().steps[0].name == "GroupedMLP"
    torch.testing.assert_close(2 * y, doubled, rtol=0, atol=0)


@pytest.mark.parametrize("fused", [True, False])
def test_checkpointing(fused):
    case = Case(place="both")
    with nullcontext() if fused else config(disable_fusions=FUSIONS):
        plain = run(case.call, case.tensors, case.dy)
        again = run(lambda **t: checkpoint(case.call, **t, use_reentrant=False), case.tensors, case.dy)

    assert_same(plain, again)


def test_accumulation_over_micro_batches():
    case = Case()
    grads = run(case.call, case.tensors, case.dy)
    for _ in range(2):
        case.call(**case.tensors).backward(case.dy)

    assert_same({k: t.grad for k, t in case.tensors.items()}, {k: 2 * grads[k] for k in case.tensors})


def test_retain_graph():
    case = Case(place="both", single=True)
    y, leaves = case.call(**case.tensors), list(case.tensors.values())
    once = torch.autograd.grad(y, leaves, case.dy, retain_graph=True)

    assert_same(once, torch.autograd.grad(y, leaves, case.dy))


def test_tied_weights():
    model = Sequential(
        GroupedLinear(E, F, F, dtype=torch.float64), Activation("relu"), GroupedLinear(E, F, F, dtype=torch.float64)
    )
    model[2].weight = model[0].weight
    x = unit(T, F)
    got = torch.autograd.grad(model(x, split_sizes=SIZES).sum(), [x, model[0].weight])
    w, b1, b2 = model[0].weight, model[0].bias, model[2].bias
    expected = torch.autograd.grad(mlp(x, SIZES, torch.relu, w1=w, b1=b1, w2=w, b2=b2).sum(), [x, w])

    torch.testing.assert_close(got, expected)


COMBINATIONS = list(product(PLACES, product([True, False], repeat=2), product([True, False], repeat=2)))


@pytest.mark.parametrize(("place", "bias", "scaled"), COMBINATIONS)
def test_gradcheck(place, bias, scaled):
    scaled = tuple(s and b for s, b in zip(scaled, bias, strict=True))
    case = Case(place=place, bias=bias, scaled=scaled, sizes=[2, 0, 1], rows=4)
    names = list(case.tensors)

    assert torch.autograd.gradcheck(
        lambda *t: case.call(**dict(zip(names, t, strict=True))), tuple(case.tensors.values()), fast_mode=True
    )
    assert case.model.explain().steps[0].name == "GroupedMLP"


@pytest.mark.parametrize("frozen", PARTS)
@pytest.mark.parametrize("place", ["both"])
def test_gradcheck_with_a_frozen_part(place, frozen):
    case = Case(place=place, scaled=(True, True), frozen=[frozen], sizes=[2, 0, 1], rows=4)
    names = list(case.tensors)

    assert torch.autograd.gradcheck(
        lambda *t: case.call(**dict(zip(names, t, strict=True))), tuple(case.tensors.values()), fast_mode=True
    )


def kept_by(case):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        case.call(**case.tensors)
    return kept


def test_saves_x_pre_scales_split_sizes_and_weights_only():
    case = Case(place="both", bias=(False, False))
    given = {case.tensors[name].data_ptr(): name for name in ("x", "w1", "w2", "scales", "out")}
    kept = kept_by(case)
    others = [tuple(t.shape) for t in kept if t.data_ptr() not in given]

    assert {given[t.data_ptr()] for t in kept if t.data_ptr() in given} == set(given.values())
    assert {shape for shape in others if shape != (E,)} == {(T, 2 * F)}


def test_saved_bytes_are_x_and_pre():
    case = Case(place="none", bias=(False, False), dtype=torch.bfloat16)
    case.call(**case.tensors)

    assert case.model.explain().saved_bytes_per_row == pytest.approx(2 * K + 4 * F, rel=0.1)


FROZEN_SAVES = [
    (["w1", "b1", "x"], {"w2", "scales", "pre"}, "scales"),
    (["w2", "b2"], {"x", "w1", "w2", "scales", "pre"}, "w1"),
    (["x", "w1", "b1", "scales"], {"scales", "pre"}, "w2"),
    (["x", "w1", "b1", "scales", "w2"], {"scales"}, "b2"),
]


@pytest.mark.parametrize(("frozen", "allowed", "_wanted"), FROZEN_SAVES)
def test_saves_nothing_only_for_what_is_frozen(frozen, allowed, _wanted):
    case = Case(place="before", frozen=frozen)
    given = {case.tensors[name].data_ptr(): name for name in ("x", "w1", "w2", "scales")}
    kept = {given.get(t.data_ptr(), "pre" if t.shape == (T, 2 * F) else "sizes") for t in kept_by(case)}

    assert kept - {"sizes"} == allowed


def test_under_no_grad_nothing_is_kept_and_the_result_is_the_same():
    case = Case(place="both")
    with torch.no_grad():
        kept, y = kept_by(case), case.call(**case.tensors)

    assert kept == []
    assert torch.equal(y, case.run()["y"])


def linears(e1=E, e2=E, **how):
    how = {"dtype": torch.float64, **how}
    return GroupedLinear(e1, K, 2 * F, **how), GroupedLinear(e2, F, N, **how)


def declined(model, name, *args, **how):
    y = model(*args, **how)
    return y, {f.ops: f.reason for f in model.explain().fusions if f.name == name and not f.taken}


def unfused(model, *args, **how):
    with config(disable_fusions=FUSIONS):
        return model(*args, **how)


def test_declines_different_split_sizes():
    one, two = linears()
    model, x = Sequential(one, SwiGLU(), two), unit(T, K)
    how = {"op_kwargs": {0: {"split_sizes": torch.tensor(SIZES)}, 2: {"split_sizes": torch.tensor([1, 1, 6])}}}
    y, reasons = declined(model, "GroupedMLP", x, **how)

    assert reasons == {(0, 1, 2): "fc1 and fc2 read different split_sizes"}
    torch.testing.assert_close(y, unfused(model, x, **how))


def test_declines_different_numbers_of_groups():
    one, two = linears(2, 2 * E)
    model, x, n = Sequential(one, SwiGLU(), two), unit(T, K), torch.tensor([4, 4])
    how = {"op_kwargs": {0: {"split_sizes": n}, 2: {"split_sizes": torch.tensor([1] * 6)}}}
    _, reasons = declined(model, "GroupedMLP", x, **how)

    assert reasons[0, 1, 2] in (
        "fc1 and fc2 read different split_sizes",
        "fc1 and fc2 have different numbers of groups",
    )


def test_unequal_groups_with_one_split_sizes_are_an_error_fused_or_not():
    one, two = linears(E, E + 1)
    with pytest.raises(ArgumentError, match=r"op 2 .*expected shape \[4\], one size a group, got \[3\]"):
        Sequential(one, SwiGLU(), two)(unit(T, K), split_sizes=torch.tensor(SIZES))


class Unchecked(SwiGLU):
    """Does not say what it gives, so that nothing behind it can be checked before it has run."""

    def check(self, x):
        return None


def test_unequal_groups_behind_an_op_that_checks_nothing_are_an_error_fused_or_not():
    one, two = linears(E, E + 1)
    with pytest.raises(ArgumentError, match=r"op 2 .*expected shape \[4\], one size a group, got \[3\]"):
        Sequential(one, Unchecked(), two)(unit(T, K), split_sizes=torch.tensor(SIZES))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_declines_ops_with_hooks(at):
    one, two = linears()
    model, x, ran = Sequential(one, SwiGLU(), two), unit(T, K), []
    model[at].register_forward_hook(lambda *_: ran.append(1))
    y, reasons = declined(model, "GroupedMLP", x, split_sizes=torch.tensor(SIZES))

    assert reasons[0, 1, 2] == f"op {at} has hooks, which only run where it is called itself"
    assert ran == [1]
    torch.testing.assert_close(y, unfused(model, x, split_sizes=torch.tensor(SIZES)))


def test_declines_when_disabled():
    one, two = linears()
    model, x = Sequential(one, SwiGLU(), two), unit(T, K)
    with config(disable_fusions={"GroupedMLP"}):
        _, reasons = declined(model, "GroupedMLP", x, split_sizes=SIZES)

    assert "disable" in reasons[0, 1, 2]
    assert [s.name for s in model.explain().steps] == ["GroupedLinearGLU", "GroupedLinear"]


def test_declines_two_lists_of_split_sizes():
    one, two = linears()
    model, x = Sequential(one, SwiGLU(), two), unit(T, K)
    how = {"op_kwargs": {0: {"split_sizes": list(SIZES)}, 2: {"split_sizes": list(SIZES)}}}
    y, reasons = declined(model, "GroupedMLP", x, **how)

    assert reasons[0, 1, 2] == "fc1 and fc2 read different split_sizes"
    torch.testing.assert_close(y, model(x, split_sizes=SIZES))


def test_one_tuple_of_split_sizes_is_shared():
    one, two = linears()
    model, x = Sequential(one, SwiGLU(), two), unit(T, K)
    y = model(x, split_sizes=tuple(SIZES))

    assert [step.name for step in model.explain().steps] == ["GroupedMLP"]
    torch.testing.assert_close(y, model(x, split_sizes=SIZES))


def test_an_op_in_between_leaves_no_pattern():
    one, two = linears()
    model, x = Sequential(one, SwiGLU(), Identity(), two), unit(T, K)
    y = model(x, split_sizes=SIZES)

    assert [s.name for s in model.explain().steps] == ["GroupedLinearGLU", "Identity", "GroupedLinear"]
    torch.testing.assert_close(y, unfused(model, x, split_sizes=SIZES))


@pytest.mark.parametrize("act", [ScaledSwiGLU(), ScaledActivation("relu2")])
def test_composites_fuse(act):
    wide = 2 * F if isinstance(act, ScaledSwiGLU) else F
    model = Sequential(GroupedLinear(E, K, wide, dtype=torch.float64), act, GroupedLinear(E, F, N, dtype=torch.float64))
    x, p, s = unit(T, K), unit(T), torch.tensor(SIZES)
    y = model(x, s, p, s)

    assert [step.name for step in model.explain().steps] == ["GroupedMLP"]
    torch.testing.assert_close(y, unfused(model, x, s, p, s))


def test_two_mlps_in_a_row_fuse_twice():
    ops = [op for _ in range(2) for op in (GroupedLinear(E, K, 2 * F), SwiGLU(), GroupedLinear(E, F, K))]
    model, x = Sequential(*ops), torch.randn(T, K)
    y = model(x, split_sizes=SIZES)

    assert [step.ops for step in model.explain().steps] == [(0, 1, 2), (3, 4, 5)]
    torch.testing.assert_close(y, unfused(model, x, split_sizes=SIZES))


def test_errors_are_the_same_fused_or_not():
    one, two = linears()
    model, messages = Sequential(one, SwiGLU(), Scale(), two), []
    for disabled in (set(), FUSIONS):
        with config(disable_fusions=disabled), pytest.raises(ArgumentError, match="scales") as caught:
            model(unit(T, K), split_sizes=torch.tensor(SIZES), scales=torch.ones(T + 1))
        messages.append(str(caught.value))

    assert messages[0] == messages[1]


def test_mismatched_widths_are_an_error_before_anything_runs():
    model = Sequential(GroupedLinear(E, K, 2 * F), SwiGLU(), GroupedLinear(E, F + 1, N))

    with pytest.raises(ArgumentError, match=r"op 2 \(GroupedLinear\): x: expected 33 features .* got shape \[80, 32\]"):
        model(torch.randn(T, K), split_sizes=SIZES)


def prefix(act, scaled, shape=(T,), dtype=torch.float64, **how):
    """GroupedLinear -> activation -> [Scale], and its arguments."""
    fc1 = GroupedLinear(E, K, 2 * F, dtype=dtype, scale_bias=True)
    model = Sequential(fc1, act, *([Scale()] if scaled else []))
    tensors = {"x": unit(*shape, K, dtype=dtype), "s1": unit(*shape, dtype=dtype), "w1": fc1.weight, "b1": fc1.bias}
    return model, tensors | ({"scales": unit(*shape, dtype=dtype)} if scaled else {})


def first_half(x, w1, b1, s1, scales=None):
    return scale(glu("silu")(grouped_linear(x, SIZES, w1, b1, s1)), scales)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("frozen", [None, "x", "w1", "b1", "s1", "scales"])
def test_grouped_linear_glu(frozen, scaled, dtype):
    model, tensors = prefix(SwiGLU(), scaled, dtype=dtype)
    if frozen in tensors:
        tensors[frozen].requires_grad_(False)
    dy = unit(T, F, dtype=dtype, grad=False)

    def ours(x, s1, scales=None, **_):
        return model(x, split_sizes=SIZES, bias_scale=s1, **({} if scales is None else {"scales": scales}))

    assert_as_good(run(ours, tensors, dy), first_half, tensors, dy, rows=VALID)
    assert [step.name for step in model.explain().steps] == ["GroupedLinearGLU"]


def test_grouped_linear_glu_with_only_the_scales_wanted():
    model, tensors = prefix(SwiGLU(), True)
    for name in ("x", "w1", "b1", "s1"):
        tensors[name].requires_grad_(False)
    got = model(tensors["x"], split_sizes=SIZES, bias_scale=tensors["s1"], scales=tensors["scales"])
    got[:VALID].sum().backward()

    expected = first_half(**{**tensors, "scales": None}).sum(1)
    torch.testing.assert_close(tensors["scales"].grad[:VALID], expected[:VALID])


def test_grouped_linear_glu_of_leading_dims():
    model, tensors = prefix(SwiGLU(), True, (8, 10))
    how = {"split_sizes": SIZES, "bias_scale": tensors["s1"], "scales": tensors["scales"]}
    y = model(tensors["x"], **how)

    assert y.shape == (8, 10, F)
    torch.testing.assert_close(y, unfused(model, tensors["x"], **how))


def test_grouped_linear_glu_keeps_no_activation():
    model, tensors = prefix(SwiGLU(), False)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        model(tensors["x"], split_sizes=SIZES, bias_scale=tensors["s1"])

    assert (T, F) not in kept
    assert (T, 2 * F) in kept


def test_grouped_linear_glu_declines_an_output_buffer():
    model, tensors = prefix(SwiGLU(), False)
    out = torch.zeros(T, 2 * F, dtype=torch.float64)
    how = {"split_sizes": SIZES, "bias_scale": tensors["s1"]}
    y, reasons = declined(model, "GroupedLinearGLU", tensors["x"], op_kwargs={0: {**how, "output": out}})

    assert reasons == {(0, 1): "fc1 has 'output'"}
    torch.testing.assert_close(y, glu("silu")(out))


def test_grouped_linear_glu_gradcheck():
    model, tensors = prefix(SwiGLU(), True)

    def function(x, s1, w1, b1, scales):
        return model(x, split_sizes=SIZES, bias_scale=s1, scales=scales)[:VALID]

    assert torch.autograd.gradcheck(function, tuple(tensors.values()), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(T,), (8, 10), (0,)])
@pytest.mark.parametrize("frozen", [None, "x", "scales"])
def test_glu_scale(frozen, shape, dtype):
    model = Sequential(SwiGLU(), Scale())
    tensors = {"x": unit(*shape, 2 * F, dtype=dtype), "scales": unit(*shape, dtype=dtype)}
    if frozen:
        tensors[frozen].requires_grad_(False)
    dy = unit(*shape, F, dtype=dtype, grad=False)
    ours = run(lambda x, scales: model(x, scales=scales), tensors, dy)

    assert_as_good(ours, lambda x, scales: scale(glu("silu")(x), scales), tensors, dy)
    assert [step.name for step in model.explain().steps] == ["GLUScale"]


def test_glu_scale_keeps_no_activation():
    model, kept = Sequential(SwiGLU(), Scale()), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        model(unit(T, 2 * F), scales=unit(T))

    assert sorted(kept) == [(T,), (T, 2 * F)]


def test_glu_scale_rounds_once():
    model, x, p = Sequential(SwiGLU(), Scale()), unit(T, 2 * F, dtype=torch.bfloat16), unit(T, dtype=torch.float32)

    assert torch.equal(model(x, scales=p), model(x.float(), scales=p).bfloat16())


def test_glu_scale_gradcheck():
    model = Sequential(SwiGLU(), Scale())

    assert torch.autograd.gradcheck(lambda x, s: model(x, scales=s), (unit(3, 4), unit(3)))
