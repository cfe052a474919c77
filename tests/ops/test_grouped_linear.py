"""GroupedLinear: values and gradients, ragged splits, tails, parameters in either form, every error."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from reference import assert_as_good, assert_same, grouped_linear, run, unit
from torch import nn

from fusible import ArgumentError, GroupedLinear, Identity, Sequential, config
from fusible.ops.grouped.grouped_linear import as_rows

E, K, N = 4, 8, 6
SIZES = [3, 0, 1, 5]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
FORMS = [(single_weight, single_bias) for single_weight in (True, False) for single_bias in (True, False)]
SPLITS = {
    "even": [4, 4, 4, 4],
    "empty groups": [0, 5, 0, 3],
    "one-row groups": [1, 1, 1, 1],
    "all in one": [0, 0, 16, 0],
    "all empty": [0, 0, 0, 0],
    "tail": [3, 0, 1, 5],
}


def layer(groups=E, k=K, n=N, *, single=True, dtype=torch.float64, **how):
    return GroupedLinear(groups, k, n, dtype=dtype, single_grouped_weight=single, single_grouped_bias=single, **how)


def stacked(parameters, prefix):
    found = [p for name, p in parameters.items() if name.startswith(prefix)]
    return found[0] if len(found) == 1 and found[0].dim() > (2 if prefix == "weight" else 1) else found


def assert_layer(op, x, sizes, dy=None, rows=-1, **keywords):
    """The op against a loop over groups, for everything that requires a gradient."""
    tensors = {"x": x, **dict(op.named_parameters()), **keywords}
    dy = unit(*x.shape[:-1], op.out_features, dtype=x.dtype) if dy is None else dy

    def ours(x, bias_scale=None, **_):
        return op(x, split_sizes=torch.tensor(sizes), bias_scale=bias_scale)

    def plain(x, bias_scale=None, **parameters):
        bias = stacked(parameters, "bias") if op.has_bias else None
        return grouped_linear(x, sizes, stacked(parameters, "weight"), bias, bias_scale)

    assert_as_good(run(ours, tensors, dy), plain, tensors, dy, rows)


def kept_by(function):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function()
    return {t.data_ptr() for t in kept}


def in_one_storage(op):
    pointers = [getattr(op, f"weight{i}").data_ptr() for i in range(op.num_groups)]
    step = op.weight0.numel() * op.weight0.element_size()
    return pointers == [pointers[0] + i * step for i in range(op.num_groups)] and isinstance(
        op.matrices("weight"), torch.Tensor
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("bias", [None, "plain", "scaled"])
def test_values_and_gradients(bias, forms, dtype):
    how = {"single_grouped_weight": forms[0], "single_grouped_bias": forms[1]}
    op = GroupedLinear(E, K, N, bias=bias is not None, scale_bias=bias == "scaled", dtype=dtype, **how)
    scales = {"bias_scale": unit(9, dtype=dtype)} if bias == "scaled" else {}

    assert_layer(op, unit(9, K, dtype=dtype), SIZES, **scales)


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("sizes", SPLITS.values(), ids=SPLITS.keys())
def test_splits(sizes, single):
    assert_layer(layer(single=single), unit(16, K), sizes)


@pytest.mark.parametrize("single", [True, False])
def test_one_group(single):
    assert_layer(layer(1, single=single), unit(5, K), [5])


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_no_rows_of_leading_dims(shape):
    op, x = layer(), unit(*shape, K)
    y = op(x, split_sizes=torch.zeros(E, dtype=torch.int64))
    y.sum().backward()

    assert y.shape == (*shape, N)
    assert op.weight.grad.eq(0).all()
    assert op.bias.grad.eq(0).all()


@pytest.mark.parametrize("shape", [(3, 3), (1, 3, 3), (9, 1)])
def test_leading_dims_are_rows(shape):
    assert_layer(layer(scale_bias=True), unit(*shape, K), SIZES, bias_scale=unit(*shape))


@pytest.mark.parametrize("sizes", [torch.tensor(SIZES, dtype=torch.int32), torch.tensor(SIZES), SIZES, tuple(SIZES)])
def test_forms_of_split_sizes(sizes):
    op, x = layer(), unit(9, K)

    assert torch.equal(op(x, split_sizes=sizes), op(x, split_sizes=torch.tensor(SIZES)))


@pytest.mark.parametrize("sizes", [[3, 0, 1, 5], [0, 0, 0, 0]])
def test_tail_of_buffers_is_not_touched(sizes):
    op, x = layer(), unit(12, K)
    out, dx = torch.full((12, N), -7.0).double(), torch.full((12, K), -7.0).double()
    y = op(x, split_sizes=sizes, output=out, grad_input=dx)
    y.sum().backward()

    assert out[sum(sizes) :].eq(-7).all()
    assert dx[sum(sizes) :].eq(-7).all()


WANTED = [{"x"}, {"weight"}, {"bias"}, {"x", "weight"}, {"x", "bias"}, {"weight", "bias"}, {"bias_scale"}]


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("wanted", WANTED, ids=lambda w: " ".join(sorted(w)))
def test_only_wanted_gradients(wanted, single):
    op, x, scale = layer(single=single, scale_bias=True), unit(9, K), unit(9)
    for name, t in [("x", x), ("bias_scale", scale), *op.named_parameters()]:
        t.requires_grad_(name.rstrip("0123456789") in wanted)

    assert_layer(op, x, SIZES, bias_scale=scale)


def test_some_frozen_experts():
    op = layer(single=False)
    op.weight1.requires_grad_(False)
    op.weight2.requires_grad_(False)
    op.bias0.requires_grad_(False)

    assert_layer(op, unit(9, K), SIZES)


@pytest.mark.parametrize(
    ("wanted", "calls"), [({"x"}, ["NN"]), ({"weight"}, ["TN"]), ({"bias"}, []), ({"x", "weight"}, ["NN", "TN"])]
)
def test_no_product_for_what_is_frozen(wanted, calls, monkeypatch):
    op, x, seen = layer(), unit(9, K, grad="x" in wanted), []
    for name, p in op.named_parameters():
        p.requires_grad_(name in wanted)
    y = op(x, split_sizes=SIZES)
    gemm = GroupedLinear.fwd.__globals__["kernels"].grouped_gemm
    monkeypatch.setattr(
        "fusible.ops.kernels.grouped_gemm", lambda how, *a, **k: seen.append(how.value) or gemm(how, *a, **k)
    )
    y.sum().backward()

    assert sorted(seen) == calls


@pytest.mark.parametrize(
    "wanted", [{"x"}, {"weight"}, {"bias"}, {"x", "weight"}], ids=lambda names: " ".join(sorted(names))
)
def test_saves_nothing_for_what_is_frozen(wanted):
    op, x = layer(), unit(9, K, grad="x" in wanted)
    for name, p in op.named_parameters():
        p.requires_grad_(name in wanted)
    sizes = torch.tensor(SIZES)
    kept = kept_by(lambda: op(x, split_sizes=sizes))

    assert kept == {sizes.data_ptr()} | ({x.data_ptr()} if "weight" in wanted else set()) | (
        {op.weight.data_ptr()} if "x" in wanted else set()
    )


def test_saves_nothing_under_no_grad():
    op, x = layer(), unit(9, K)
    with torch.no_grad():
        kept = kept_by(lambda: op(x, split_sizes=SIZES))

    assert kept == set()


@pytest.mark.parametrize("kind", ["transposed", "every other column", "expanded", "every other row"])
def test_strided_x_and_dy(kind):
    make = {
        "transposed": lambda c: unit(c, 9, grad=False).mT,
        "every other column": lambda c: unit(9, 2 * c, grad=False)[:, ::2],
        "expanded": lambda c: unit(c, grad=False).expand(9, c),
        "every other row": lambda c: unit(18, c, grad=False)[::2],
    }[kind]

    assert_layer(layer(), make(K).requires_grad_(), SIZES, dy=make(N))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_gradcheck(single, bias):
    op = layer(3, 3, 2, single=single, bias=bias)

    assert torch.autograd.gradcheck(lambda x, *_: op(x, split_sizes=[2, 0, 3]), (unit(6, 3), *op.parameters()))


def test_gradcheck_with_scaled_bias():
    op = layer(3, 3, 2, scale_bias=True)
    inputs = (unit(5, 3), unit(5), *op.parameters())

    assert torch.autograd.gradcheck(lambda x, s, *_: op(x, split_sizes=[2, 0, 3], bias_scale=s), inputs)


def test_wide_bias_scale_is_not_rounded_first():
    op, x = layer(scale_bias=True, dtype=torch.bfloat16), torch.zeros(9, K, dtype=torch.bfloat16)
    scale = unit(9, dtype=torch.float32, grad=False)
    bias = op.bias.float().repeat_interleave(torch.tensor(SIZES), 0)

    assert torch.equal(op(x, split_sizes=SIZES, bias_scale=scale), (scale[:, None] * bias).bfloat16())


def test_scale_bias_without_bias_takes_no_scale():
    op = layer(bias=False, scale_bias=True)

    assert "bias_scale" not in op.keywords


def test_autocast_does_not_round_the_bias():
    op = layer(dtype=torch.float32, k=1)
    x = torch.zeros(9, 1)
    with torch.autocast("cpu", torch.bfloat16):
        kept = kept_by(lambda: op(x, split_sizes=SIZES))
        y = op(x, split_sizes=SIZES)

    assert op.bias.data_ptr() not in kept
    assert torch.equal(y, op.bias.repeat_interleave(torch.tensor(SIZES), 0).bfloat16())


def test_autocast_leaves_float64_alone():
    op, x = layer(), unit(9, K)
    with torch.autocast("cpu", torch.bfloat16):
        y = op(x, split_sizes=SIZES)

    assert torch.equal(y, op(x, split_sizes=SIZES))


def test_retain_graph():
    op, x = layer(single=False), unit(9, K)
    y = op(x, split_sizes=SIZES)
    y.sum().backward(retain_graph=True)
    once = [p.grad.clone() for p in (x, *op.parameters())]
    y.sum().backward()

    assert_same(tuple(p.grad for p in (x, *op.parameters())), tuple(2 * g for g in once))


def test_accumulation_over_micro_batches():
    op, x = layer(single=False), unit(18, K, grad=False)
    for half in (x[:9], x[9:]):
        op(half, split_sizes=SIZES).sum().backward()
    grads = {name: p.grad for name, p in op.named_parameters()}
    expected = [
        sum(torch.autograd.grad(op(h, split_sizes=SIZES).sum(), p)[0] for h in (x[:9], x[9:])) for p in op.parameters()
    ]

    torch.testing.assert_close(list(grads.values()), expected)


def test_one_parameter_in_two_ops():
    one, two = layer(k=K, n=K), layer(k=K, n=K)
    two.weight = one.weight
    x = unit(9, K)
    two(one(x, split_sizes=SIZES), split_sizes=SIZES).sum().backward()
    once = grouped_linear(x, SIZES, one.weight, one.bias)
    expected = torch.autograd.grad(grouped_linear(once, SIZES, one.weight, two.bias).sum(), one.weight)[0]

    torch.testing.assert_close(one.weight.grad, expected)


def test_a_replaced_parameter_is_seen():
    op, x = layer(), unit(9, K)
    op.weight = nn.Parameter(torch.zeros_like(op.weight))
    op.bias = nn.Parameter(torch.ones_like(op.bias))

    assert op(x, split_sizes=SIZES).eq(1).all()


@pytest.mark.parametrize("target", FORMS)
@pytest.mark.parametrize("source", FORMS)
def test_state_dict_of_either_form_loads_into_either(source, target):
    a, b = (GroupedLinear(E, K, N, single_grouped_weight=w, single_grouped_bias=s) for w, s in (source, target))
    b.load_state_dict(a.state_dict())
    x = torch.randn(9, K)

    assert torch.equal(a(x, split_sizes=SIZES), b(x, split_sizes=SIZES))


@pytest.mark.parametrize("single", [True, False])
def test_state_dict_loads_inside_a_model(single):
    a, b = Sequential(nn.Identity(), layer(single=single)), Sequential(nn.Identity(), layer(single=not single))
    state = a.state_dict()
    names = list(state)
    b.load_state_dict(state)

    assert list(state) == names
    assert torch.equal(
        torch.stack(list(stacked(dict(b[1].named_parameters()), "weight"))),
        torch.stack(list(stacked(dict(a[1].named_parameters()), "weight"))),
    )


@pytest.mark.parametrize("single", [True, False])
def test_state_dict_loads_by_assignment(single):
    a, b = layer(single=not single), layer(single=single)
    b.load_state_dict(a.state_dict(), assign=True)
    x = unit(9, K)

    assert torch.equal(a(x, split_sizes=SIZES), b(x, split_sizes=SIZES))


@pytest.mark.parametrize(
    ("single", "gone", "message"), [(True, "weight0", "weight"), (False, "weight", "weight0"), (False, "bias", "bias3")]
)
def test_missing_state_is_an_error(single, gone, message):
    state = layer(single=not single).state_dict()
    del state[gone]

    with pytest.raises(RuntimeError, match=f'Missing key.*"{message}"'):
        layer(single=single).load_state_dict(state)


def test_missing_state_is_reported_when_not_strict():
    state = layer(single=True).state_dict()
    del state["weight"]
    result = layer(single=False).load_state_dict(state, strict=False)

    assert result.missing_keys == [f"weight{i}" for i in range(E)]


@pytest.mark.parametrize("single", [True, False])
def test_state_of_another_number_of_groups_is_an_error(single):
    with pytest.raises(RuntimeError, match="loading state_dict"):
        layer(single=single).load_state_dict(layer(E + 1, single=True).state_dict())


@pytest.mark.parametrize(
    "move",
    [
        lambda op: op,
        lambda op: op.to(torch.float32),
        lambda op: op.half(),
        lambda op: op.to("meta").to_empty(device="cpu"),
        copy.deepcopy,
        lambda op: pickle.loads(pickle.dumps(op)),
    ],
    ids=["new", "float32", "half", "to_empty", "deepcopy", "pickle"],
)
def test_discrete_weights_stay_in_one_storage(move):
    assert in_one_storage(move(layer(single=False)))


def test_saved_and_loaded_weights_stay_in_one_storage():
    file = io.BytesIO()
    torch.save(layer(single=False), file)
    file.seek(0)

    assert in_one_storage(torch.load(file, weights_only=False))


@pytest.mark.parametrize(
    "move", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op)), lambda op: copy.deepcopy(op).float().double()]
)
def test_a_copy_computes_the_same_and_is_independent(move):
    op, x = layer(single=False, dtype=torch.float32).double(), unit(9, K)
    other = move(op)
    before = op(x, split_sizes=SIZES)

    assert torch.equal(before, other(x, split_sizes=SIZES))
    other.weight0.data.zero_()
    assert torch.equal(before, op(x, split_sizes=SIZES))


def test_weights_that_lie_apart_work_too():
    op, x = layer(single=False), unit(9, K)
    op.weight2 = nn.Parameter(unit(N, K).detach())

    assert isinstance(op.matrices("weight"), tuple)
    assert_layer(op, x, SIZES)


def test_weights_that_lie_apart_are_cast_under_autocast():
    op, x = layer(single=False, dtype=torch.float32), unit(9, K, dtype=torch.float32)
    expected = copy.deepcopy(op)
    op.weight2 = nn.Parameter(op.weight2.detach().clone())
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(op(x, split_sizes=SIZES), expected(x, split_sizes=SIZES))


def test_meta_device():
    op = layer(single=False, device="meta")
    y = op(
        torch.empty(9, K, device="meta", dtype=torch.float64),
        split_sizes=torch.empty(E, dtype=torch.int64, device="meta"),
    )

    assert y.is_meta
    assert y.shape == (9, N)


def test_meta_backward():
    op = layer(device="meta")
    x = torch.empty(9, K, device="meta", dtype=torch.float64, requires_grad=True)
    op(x, split_sizes=torch.empty(E, dtype=torch.int64, device="meta")).sum().backward()

    assert (x.grad.shape, op.weight.grad.shape, op.bias.grad.shape) == ((9, K), (E, N, K), (E, N))


def test_meta_then_real():
    op = layer(single=False, device="meta").to_empty(device="cpu")
    op.reset_parameters()

    assert_layer(op, unit(9, K), SIZES)


@pytest.mark.parametrize("single", [True, False])
def test_reset_parameters_draws_within_bounds(single):
    op = layer(8, 64, 32, single=single)

    for p in op.parameters():
        assert p.abs().max() <= 1 / 8
        assert p.std() > 0.04


def test_split_sizes_are_checked_on_the_host_only_where_that_is_free():
    sizes = torch.empty(E, dtype=torch.int64, device="meta")

    with config(debug=True):
        assert layer(device="meta")(torch.empty(9, K, device="meta", dtype=torch.float64), split_sizes=sizes).is_meta


X = torch.ones(9, K)


@pytest.mark.parametrize(
    ("x", "keywords", "message"),
    [
        (X[0], {}, r"x: expected at least 2 dimensions, rows and features, got shape \[8\]"),
        (torch.ones(9, 7), {}, r"x: expected 8 features in the last dimension, got shape \[9, 7\]"),
        (
            X.double(),
            {},
            "x: expected torch.float32, the dtype of the weight, got torch.float64; cast one, or use autocast",
        ),
        (X.to("meta"), {}, "x: expected a tensor on cpu, where the weight is, got one on meta"),
        (X, {"split_sizes": torch.tensor([1.0] * 4)}, "split_sizes: expected int32 or int64, got torch.float32"),
        (X, {"split_sizes": torch.tensor([1] * 4, dtype=torch.int16)}, "expected int32 or int64, got torch.int16"),
        (X, {"split_sizes": torch.tensor([3, 3])}, r"expected shape \[4\], one size a group, got \[2\]"),
        (X, {"split_sizes": torch.tensor([[1] * 4])}, r"expected shape \[4\], one size a group, got \[1, 4\]"),
        (
            X,
            {"split_sizes": torch.ones(4, dtype=torch.int64, device="meta")},
            "expected a tensor on cpu, where x is, got one on meta",
        ),
        (X, {"split_sizes": [3, 3]}, "split_sizes: expected 4 sizes, one a group, got 2"),
        (X, {"split_sizes": [1.0] * 4}, "expected an int32 or int64 tensor or a list of ints, got a list"),
        (X, {"split_sizes": 9}, "expected an int32 or int64 tensor or a list of ints, got a int"),
        (X, {"split_sizes": torch.tensor([5, 5, 5, 5])}, "they sum to 20, but x has only 9 rows"),
        (X, {"split_sizes": [5, 5, 5, 5]}, "they sum to 20, but x has only 9 rows"),
        (X, {"split_sizes": [4, 4, 1, 1]}, "they sum to 10, but x has only 9 rows"),
        (X, {"split_sizes": torch.tensor([4, 4, 1, 1])}, "they sum to 10, but x has only 9 rows"),
        (X, {"split_sizes": torch.tensor([5, -1, 5, 0])}, "sizes must not be negative, got -1"),
        (X, {"bias_scale": torch.ones(8)}, r"bias_scale: expected shape \[9\], one number a row, got \[8\]"),
        (
            X,
            {"bias_scale": torch.ones(9, dtype=torch.int32)},
            r"bias_scale: expected a floating-point tensor of shape \[9\]",
        ),
        (X, {"bias_scale": None}, "missing: GroupedLinear needs 'bias_scale'"),
        (X, {"split_sizes": None}, "missing: GroupedLinear needs 'split_sizes'"),
        (X, {"scales": torch.ones(9)}, "GroupedLinear takes no 'scales'; its keywords are: .*split_sizes"),
    ],
)
def test_call_error(x, keywords, message):
    op = layer(scale_bias=True, dtype=torch.float32)

    with pytest.raises(ArgumentError, match=message):
        op(x, **{"split_sizes": SIZES, "bias_scale": torch.ones(9), **keywords})


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_constructor_error(sizes):
    name = ("num_groups", "in_features", "out_features")[sizes.index(0)]

    with pytest.raises(ValueError, match=f"GroupedLinear: {name} must be at least 1, got 0"):
        GroupedLinear(*sizes)


REPLACED = {
    "weight": (nn.Parameter(torch.ones(4, N, K + 1)), r"weight: expected a parameter of shape \[4, \d+, 8\], got"),
    "bias": (nn.Parameter(torch.ones(N)), r"bias: expected a parameter of shape \[4, \d+\], got"),
    "weight0": (nn.Parameter(torch.ones(K, N + 1)), r"weight0: expected a parameter of shape \[\d+, 8\], got"),
    "weight2": (nn.Parameter(torch.ones(N, K + 1)), r"weight2: expected shape .*, like weight0, got"),
    "weight3": (nn.Parameter(torch.ones(N, K).half()), r"weight3: expected .* torch.float32 .* got .* torch.float16"),
    "bias1": (nn.Parameter(torch.ones(N, device="meta")), r"bias1: expected .* on cpu, like bias0, got .* on meta"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_parameter_of_another_kind_is_an_error(name):
    op = layer(single=name in ("weight", "bias"), dtype=torch.float32)
    op(X, split_sizes=SIZES)
    setattr(op, name, REPLACED[name][0])

    with pytest.raises(ArgumentError, match=REPLACED[name][1]):
        op(X, split_sizes=SIZES)


def test_bias_that_was_removed_is_an_error():
    op = layer(dtype=torch.float32)
    op.bias = None

    with pytest.raises(ArgumentError, match="GroupedLinear: bias is None"):
        op(X, split_sizes=SIZES)


def test_error_names_the_op():
    with pytest.raises(ArgumentError, match=r"^op 1 \(GroupedLinear\): split_sizes: "):
        Sequential(nn.Identity(), layer())(unit(9, K), split_sizes=[9])


def test_repr():
    assert repr(layer(bias=False)) == "GroupedLinear(4, 8, 6, bias=False)"


@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_transposed_weight_is_read_as_it_lies(single: bool, bias: bool) -> None:
    plain = GroupedLinear(3, 6, 10, bias=bias, single_grouped_weight=single).double()
    turned = GroupedLinear(3, 6, 10, bias=bias, single_grouped_weight=single, transposed_weight=True).double()
    with torch.no_grad():
        for mine, other in zip(turned.expert_parameters("weight"), plain.expert_parameters("weight"), strict=True):
            mine.copy_(other.mT)
        for mine, other in zip(*(op.expert_parameters("bias") if bias else [] for op in (turned, plain)), strict=True):
            mine.copy_(other)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    results = []
    for op in (plain, turned):
        y = op(x, split_sizes=[2, 0, 4])
        results.append((y, *torch.autograd.grad(y.square().sum(), [x, *op.expert_parameters("weight")])))

    torch.testing.assert_close(results[0][:2], results[1][:2])
    for mine, other in zip(results[1][2:], results[0][2:], strict=True):
        torch.testing.assert_close(mine, other.mT)


def test_transposed_weight_accumulates_into_main_grad_in_its_own_shape() -> None:
    op = GroupedLinear(2, 6, 10, bias=False, accumulate_into_main_grad=True, transposed_weight=True)
    op.weight.main_grad = torch.ones(2, 6, 10)
    x = torch.randn(5, 6)
    op(x, split_sizes=[3, 2]).sum().backward()

    torch.testing.assert_close(op.weight.main_grad[0] - 1, x[:3].sum(0)[:, None].expand(6, 10))


def test_weight_of_a_subclass_is_refused() -> None:
    class Quantised(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return super().__torch_function__(func, types, args, kwargs or {})

    op = GroupedLinear(2, 6, 10, bias=False)
    op._parameters["weight"] = op.weight.detach().as_subclass(Quantised)

    with pytest.raises(ArgumentError, match="expected a plain tensor, got a Quantised"):
        op(torch.randn(5, 6), split_sizes=[3, 2])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_dtypes_that_have_no_right_gradients_are_refused(dtype):
    op = GroupedLinear(2, 4, 4, bias=False)
    op.weight = nn.Parameter(op.weight.detach().to(dtype), requires_grad=False)

    with pytest.raises(ArgumentError, match=f"x: expected a floating-point tensor of at least 16 bits, got {dtype}"):
        op(torch.ones(5, 4).to(dtype), split_sizes=[2, 3])


@pytest.mark.parametrize(
    ("x", "copied"),
    [
        (torch.arange(12.0).as_strided((3, 4), (2, 1)), True),
        (torch.arange(4.0).expand(3, 4), True),
        (torch.arange(24.0).view(3, 8)[:, :4], False),
        (torch.arange(4.0).as_strided((1, 4), (0, 1)), False),
        (torch.arange(12.0).view(4, 3).t(), True),
    ],
    ids=["overlapping", "repeated", "pitched", "one row", "columns"],
)
def test_rows_that_share_memory_are_copied(x, copied):
    """Kernels read rows by their pitch, which the driver takes no shorter than a row."""
    rows = as_rows(x)

    assert torch.equal(rows, x)
    assert (rows.data_ptr() != x.data_ptr()) == copied


@pytest.mark.parametrize("data", [torch.zeros(N, K), torch.zeros(N - 1, K, dtype=torch.float64)])
def test_an_expert_that_another_op_changes_after_the_checks_is_refused(data):
    op, x = layer(single=False), unit(9, K)

    class Changes(Identity):
        def fwd(self, x):
            op.weight1.data = data
            return super().fwd(x)

    with pytest.raises(ArgumentError, match="weight1: expected shape"):
        Sequential(Changes(), op)(x, split_sizes=SIZES)
