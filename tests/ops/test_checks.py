"""Checks of every tensor that a kernel reads by its address: device, dtype, layout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from emulation import harness
from models import mlp
from torch import nn

from fusible import (
    AddExtraInput,
    ArgumentError,
    Bias,
    GroupedLinear,
    Linear,
    RefusedError,
    Scale,
    Sequential,
    SwiGLU,
    config,
)
from fusible.fuser.compiler import plan
from fusible.ops.kernels.dispatch import choose
from fusible.ops.kernels.hopper import gemm as hopper
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout

E, K, N, T = 2, 8, 16, 4
F8 = torch.float8_e4m3fn
SIZES = torch.tensor([3, 1])


def experts(single=True, **how):
    return mlp(E, K, N // 2, single_grouped_weight=single, single_grouped_bias=single, **how)


def call(model, x, **keywords):
    given = {"split_sizes": SIZES, "scales": torch.ones(T)} if isinstance(model[0], GroupedLinear) else {}
    return model(x, **{**given, **keywords})


def spoiled(parameter, fault):
    """The same shape, as no kernel can read it."""
    data = parameter.detach()
    values = {
        "elsewhere": lambda: data.to("meta"),
        "whole numbers": data.int,
        "8 bits": lambda: data.to(F8),
        "complex": data.cfloat,
        "sparse": data.to_sparse,
    }[fault]()
    return nn.Parameter(values, requires_grad=not fault.startswith("whole"))


SAID = {
    "elsewhere": "expected a parameter on cpu, where x is, got one on meta; move all of the op, op.to('cpu')",
    "whole numbers": "expected a floating-point parameter of at least 16 bits, got torch.int32",
    "8 bits": "expected a floating-point parameter of at least 16 bits, got torch.float8_e4m3fn",
    "complex": "expected a floating-point parameter of at least 16 bits, got torch.complex64",
    "sparse": "expected a dense tensor, got a torch.sparse_coo one; give it as a dense tensor",
}
MODELS = {
    "experts": lambda: experts(),
    "one each": lambda: experts(single=False),
    "Linear": lambda: Sequential(Linear(K, N)),
    "Bias": lambda: Sequential(Bias(K)),
}


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_bias_that_no_kernel_can_read_is_refused_by_name(name, fused, fault):
    model, x, last = MODELS[name](), torch.randn(T, K), 3 if name in ("experts", "one each") else 0
    bias = "bias0" if name == "one each" else "bias"
    with config(disable_fusions=() if fused else ("GroupedMLP", "GroupedLinearGLU", "GLUScale")):
        call(model, x)
        for other in range(E if name == "one each" else 1):
            parameter = f"bias{other}" if name == "one each" else "bias"
            setattr(model[last], parameter, spoiled(getattr(model[last], parameter), fault))
        with pytest.raises(ArgumentError) as raised:
            call(model, x)

    assert str(raised.value) == f"op {last} ({type(model[last]).__name__}): {bias}: {SAID[fault]}"


@pytest.mark.parametrize("fault", ["whole numbers", "8 bits", "sparse"])
@pytest.mark.parametrize("name", ["experts", "one each", "Linear"])
def test_a_weight_that_no_kernel_can_read_is_refused_under_autocast_too(name, fault):
    model, x = MODELS[name](), torch.randn(T, K)
    weights = ["weight0", "weight1"] if name == "one each" else ["weight"]
    for weight in weights:
        setattr(model[0], weight, spoiled(getattr(model[0], weight), fault))

    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ArgumentError) as raised:
        call(model, x)
    assert f"{weights[0]}: {SAID[fault]}" in str(raised.value)


def test_an_op_alone_refuses_a_bias_elsewhere():
    op = GroupedLinear(E, K, N)
    op.bias = spoiled(op.bias, "elsewhere")

    with pytest.raises(ArgumentError, match=r"^GroupedLinear: bias: expected a parameter on cpu, where x is"):
        op(torch.randn(T, K), split_sizes=SIZES)


@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_shapes_that_have_passed_are_checked_again_with_another_kind_of_parameter(parameter, fault, monkeypatch):
    monkeypatch.setattr(plan, "checks_values", lambda graph, config: False)  # as where everything is on a device
    model, x = experts(), torch.randn(T, K)
    for _ in range(3):
        call(model, x)
    setattr(model[3], parameter, spoiled(getattr(model[3], parameter), fault))

    with pytest.raises(ArgumentError, match=rf"op 3 \(GroupedLinear\): ({parameter}|x): expected"):
        call(model, x)


@pytest.mark.parametrize("name", ["bias", "bias_scale", "row_scale"])
def test_our_kernels_take_no_vector_on_another_device(name):
    """Whoever calls the kernels' door, as a custom op may be: the address of another device ends the context."""
    vectors = {"bias": torch.ones(E, N), "bias_scale": torch.ones(T), "row_scale": torch.ones(T)}
    a, b, out = (torch.ones(*shape, dtype=torch.bfloat16) for shape in ((T, K), (E, N, K), (T, N)))
    with harness.installed(SimpleNamespace()), config(backend="hopper"):
        assert choose(GroupedGemm(Layout.NT, a, b, SIZES, out, **vectors), False).backend is hopper
        vectors[name] = vectors[name].to("meta")
        with pytest.raises(RefusedError, match=f"hopper needs a {name} on cpu, got meta"):
            choose(GroupedGemm(Layout.NT, a, b, SIZES, out, **vectors), False)


def nested():
    return torch.nested.nested_tensor([torch.ones(1, K), torch.ones(3, K)])


def sparse(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype).to_sparse()


def one_linear(x, **keywords):
    return GroupedLinear(E, K, K, scale_bias=True)(x, **{"split_sizes": SIZES, "bias_scale": torch.ones(T), **keywords})


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: one_linear(x, bias_scale=sparse(T)), "bias_scale: expected a dense tensor, got a torch.sparse"),
        (lambda x: one_linear(x, bias_scale=nested()), "bias_scale: expected a dense tensor, got a nested one"),
        (
            lambda x: one_linear(x, split_sizes=sparse(E, dtype=torch.int64)),
            "split_sizes: expected a dense tensor",
        ),
        (lambda x: one_linear(x, split_sizes=nested()), "split_sizes: expected a dense tensor, got a nested one"),
        (lambda x: one_linear(x, output=sparse(T, K)), "output: expected a dense tensor, got a torch.sparse_coo"),
        (
            lambda x: one_linear(x, split_sizes=b"\x03\x01"),
            "expected an int32 or int64 tensor or a list of ints",
        ),
        (lambda x: one_linear(x, split_sizes=bytearray(2)), "tensor or a list of ints, got a bytearray"),
        (lambda x: Scale()(x, scales=sparse(T)), "scales: expected a dense tensor, got a torch.sparse_coo"),
        (lambda x: AddExtraInput("r")(x, r=sparse(T, K)), "r: expected a dense tensor, got a torch.sparse_coo"),
        (lambda x: AddExtraInput("r")(x, r=nested()), "r: expected a dense tensor, got a nested one"),
        (lambda x: AddExtraInput("r")(x, r=x.to(F8)), "r: torch.float8_e4m3fn cannot be added to x"),
        (lambda x: AddExtraInput("r")(x.to(F8), r=x), "x: expected numbers that can be added, got torch.float8_e4m3fn"),
        (lambda x: SwiGLU()(x.to(F8)), "x: expected a floating-point tensor of at least 16 bits, got torch.float8"),
        (lambda x: Scale()(x.to(F8), scales=torch.ones(T)), "x: expected a floating-point tensor of at least 16 bits"),
        (
            lambda x: Bias(K)(x.to(F8)),
            "x: expected a floating-point tensor of at least 16 bits, got torch.float8_e4m3fn",
        ),
    ],
)
def test_what_no_kernel_can_read_is_refused_in_words(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(torch.randn(T, K))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GroupedLinear("2", K, N), "GroupedLinear: num_groups must be an int, got '2'"),
        (lambda: GroupedLinear(2.0, K, N), "GroupedLinear: num_groups must be an int, got 2.0"),
        (lambda: GroupedLinear(E, K, True), "GroupedLinear: out_features must be an int, got True"),
        (lambda: GroupedLinear(E, K, None), "GroupedLinear: out_features must be an int, got None"),
        (lambda: Linear("2", N), "Linear: in_features must be an int, got '2'"),
        (lambda: Linear(K, 0), "Linear: out_features must be at least 1, got 0"),
        (lambda: Bias(2.5), "Bias: features must be an int, got 2.5"),
        *[
            (
                lambda op=op, sizes=sizes, dtype=dtype: op(*sizes, dtype=dtype),
                f"{op.__name__}: dtype must be a floating",
            )
            for op, sizes in ((GroupedLinear, (E, K, N)), (Linear, (K, N)), (Bias, (K,)))
            for dtype in (torch.complex64, torch.int32, F8, "float32")
        ],
    ],
)
def test_what_an_op_cannot_be_built_with_is_refused_in_words(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


def test_sizes_may_be_of_other_whole_types():
    assert GroupedLinear(torch.tensor(E), K, torch.tensor(N)).weight.shape == (E, N, K)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("value", [torch.tensor(1.0), 3, None, "weights"], ids=str)
@pytest.mark.parametrize("single", [True, False])
def test_a_state_that_is_no_tensor_is_a_line_among_the_errors(single, value, strict):
    op = GroupedLinear(E, K, N, single_grouped_weight=single)
    state = GroupedLinear(E, K, N, single_grouped_weight=not single).state_dict()
    key = "weight1" if single else "weight"
    state[key] = value

    if isinstance(value, torch.Tensor):  # a tensor, of another shape: whole keys are missing, as torch has it
        found = op.load_state_dict(state, strict=False)
        assert key in found.unexpected_keys
        return
    with pytest.raises(RuntimeError, match=rf"(?s)loading state_dict .*\n\t{key}: expected a tensor, got a "):
        op.load_state_dict(state, strict=strict)
