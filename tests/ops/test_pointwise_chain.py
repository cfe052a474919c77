"""Chains of pointwise ops: one program computes what the ops one by one do, and chains that are none say why.

Where no kernel is there, the parts of a chain run one by one. Both ways are tried: ``as_program`` has PyTorch run the
program, as kernels would.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import steps
from reference import assert_close_to

import fusible
from fusible import (
    GLU,
    Activation,
    AddExtraInput,
    Bias,
    ClampedSwiGLU,
    ConstantScale,
    GroupedLinear,
    MakeExtraOutput,
    Pointwise,
    Scale,
    Sequential,
    SwiGLU,
    config,
    interleaved,
)
from fusible.ops import kernels
from fusible.ops.fused import pointwise_chain

D, BF16 = torch.float64, torch.bfloat16
ROWS, WIDTH, GROUPS, SIZES = 36, 32, 3, [16, 0, 12]
UNFUSED = {"PointwiseChain", "GLUScale"}


def bias(width):
    op = Bias(width)
    torch.nn.init.normal_(op.bias)
    return op


LINKS = {
    "bias": (bias, 1),
    "scale": (lambda width: Scale(), 1),
    "constant": (lambda width: ConstantScale(0.75), 1),
    "silu": (lambda width: Activation("silu"), 1),
    "gelu": (lambda width: Activation("gelu"), 1),
    "relu2": (lambda width: Activation("relu2"), 1),
    "swiglu": (lambda width: SwiGLU(), 2),
    "interleaved": (lambda width: GLU("gelu", layout=interleaved(2)), 2),
    "clamped": (lambda width: ClampedSwiGLU(limit=2.0), 2),
    "tanh": (lambda width: Pointwise(lambda x: 3 * torch.tanh(x / 3)), 1),
    "row": (lambda width: Pointwise(lambda x, s: torch.tanh(x * s) + s), 1),
    "rows": (lambda width: Pointwise(lambda x, a, b: x * a + torch.sin(b)), 1),
    "number": (lambda width: Pointwise(lambda x, c: F.softplus(c * x) / c, constants={"c": 1.5}), 1),
    "column": (lambda width: Pointwise(lambda x, b: x * torch.sigmoid(b * x), columns={"b": torch.randn(width)}), 1),
    "groups": (
        lambda width: Pointwise(lambda x, b: x * torch.cos(b), columns={"b": torch.randn(GROUPS, width)}),
        1,
    ),
    "mish": (lambda width: Pointwise(lambda g, u, s: F.mish(g) * u * s, halves="concat"), 2),
    "residual": (lambda width: AddExtraInput("residual"), 1),
}


@pytest.fixture
def as_program(monkeypatch):
    """The program runs, though no kernel is there."""
    monkeypatch.setattr(kernels, "pointwise_refusal", lambda *arguments: None)


class Chain:
    """A container of ops by name, what a call passes them, and its results in each way."""

    def __init__(self, names, dtype=D, frozen=(), by_module=False, shape=(ROWS,), op_dtype=None):
        torch.manual_seed(len(names))
        ops, widths = [], [WIDTH]
        for name in names:
            build, divisor = LINKS[name]
            widths.append(widths[-1] // divisor)
            ops.append(build(widths[-1]))
        width = widths[-1]
        self.model, self.by_module = Sequential(*ops).to(op_dtype or dtype), by_module
        sizes = torch.tensor(SIZES)
        self.rows, self.keywords = {}, {}
        for i, op in enumerate(ops):
            of_op = (*shape, widths[i]) if isinstance(op, AddExtraInput) else shape
            rows = {k: torch.rand(of_op, dtype=dtype) + 0.5 for k in op.keywords if k != "split_sizes"}
            self.rows |= {f"{i}.{k}": row for k, row in rows.items()}
            self.keywords[i] = {**rows, **({"split_sizes": sizes} if "split_sizes" in op.keywords else {})}
        self.tensors = {
            "x": torch.randn(*shape, WIDTH, dtype=dtype),
            **self.rows,
            **dict(self.model.named_parameters()),
        }
        for i, name in enumerate(self.tensors):
            self.tensors[name].requires_grad_(i not in frozen)
        self.dy = torch.randn(*shape, width, dtype=dtype)

    def run(self, fused=True, model=None):
        model = self.model if model is None else model
        keys = {i: model[i] if self.by_module else i for i in self.keywords}
        of_ops = {keys[i]: keywords for i, keywords in self.keywords.items() if keywords}
        wanted = {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}
        with nullcontext() if fused else config(disable_fusions=UNFUSED):
            y = model(self.tensors["x"], op_kwargs=of_ops)
            grads = torch.autograd.grad(y, list(wanted.values()), self.dy) if wanted else ()
        return {"y": y.detach(), **dict(zip(wanted, grads, strict=True))}

    def in_double(self):
        """The same numbers in float64."""
        other = copy.copy(self)
        other.model = copy.deepcopy(self.model).double()
        other.keywords = {
            i: {k: t if k == "split_sizes" else t.detach().double() for k, t in keywords.items()}
            for i, keywords in self.keywords.items()
        }
        rows = {f"{i}.{k}": t for i, keywords in other.keywords.items() for k, t in keywords.items()}
        tensors = {"x": self.tensors["x"].detach().double(), **rows, **dict(other.model.named_parameters())}
        other.tensors = {n: tensors[n].requires_grad_(t.requires_grad) for n, t in self.tensors.items()}
        other.dy = self.dy.double()
        return other

    def check(self):
        """Fused is as good as unfused, and in the form of that."""
        fused, apart, truth = self.run(), self.run(fused=False), self.in_double().run(fused=False)
        assert fused.keys() == apart.keys() == truth.keys()
        for name, tensor in apart.items():
            assert fused[name].dtype == tensor.dtype, name
            assert_close_to(fused[name], tensor, truth[name], name)


CHAINS = st.tuples(
    st.lists(st.sampled_from([*LINKS]), min_size=2, max_size=6).filter(
        lambda names: sum(LINKS[name][1] == 2 for name in names) < 3
    ),
    st.sets(st.integers(0, 9), max_size=3),
    st.booleans(),
    st.sampled_from([(ROWS,), (3, ROWS // 3)]),
)
THOROUGHLY = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@THOROUGHLY
@given(CHAINS)
def test_random_chains_as_programs_in_double_precision(as_program, drawn):
    names, *how = drawn
    Chain(names, D, *how).check()


@THOROUGHLY
@given(CHAINS)
def test_random_chains_as_programs_in_bf16(as_program, drawn):
    names, *how = drawn
    Chain(names, BF16, *how).check()


LINEAR = ["bias", "scale", "constant", "residual"]
LINEAR_CHAINS = st.tuples(
    st.lists(st.sampled_from(LINEAR), min_size=2, max_size=6),
    st.sets(st.integers(0, 6), max_size=3),
    st.booleans(),
    st.sampled_from([(ROWS,), (3, ROWS // 3), (0,), (1,)]),
)


@pytest.mark.parametrize("dtype", [D, torch.float32, BF16], ids=str)
def test_random_chains_that_only_add_and_multiply(as_program, dtype):
    @THOROUGHLY
    @given(LINEAR_CHAINS)
    def agree(drawn):
        names, *how = drawn
        Chain(names, dtype, *how).check()

    agree()


def test_sums_of_products_have_the_bits_of_the_ops_in_float32(as_program):
    """Where each rounds once, in the same order."""
    chain = Chain(["bias", "scale", "residual", "constant"], torch.float32)
    fused, apart = chain.run(), chain.run(fused=False)
    for name in apart.keys() - {"0.bias", "1.scales"}:  # sums, in another order
        assert torch.equal(fused[name], apart[name]), name


def test_what_is_only_added_costs_no_backward(as_program, monkeypatch):
    """The gradients of x and of what is added to it are that of the result, and no kernel copies it."""
    model, x, h, dy = Sequential(AddExtraInput("h"), bias(16)), *torch.randn(3, 6, 16)
    x.requires_grad_()
    h.requires_grad_()
    model[1].bias.requires_grad_(False)
    y, above = model(x, h=h), []
    y.register_hook(lambda grad: above.append(grad))
    ran = []
    backward = kernels.pointwise_backward
    monkeypatch.setattr(kernels, "pointwise_backward", lambda *a, **k: ran.append(k) or backward(*a, **k))
    dx, dh = torch.autograd.grad(y, [x, h], dy)
    assert dx.data_ptr() == dh.data_ptr() == above[0].data_ptr()
    assert not ran
    torch.testing.assert_close(dx, dy)


def test_what_has_no_columns_runs_part_by_part(as_program):
    model = Sequential(ConstantScale(2.0), AddExtraInput("h"), ConstantScale(0.5))
    torch.testing.assert_close(model(torch.tensor(3.0), h=torch.tensor(1.0)), torch.tensor(3.5))
    assert steps(model) == ["PointwiseChain"]


@pytest.mark.parametrize("dtype", [D, BF16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("names", [["bias", "gelu"], ["scale", "mish", "rows", "constant"], ["groups", "row"]], ids=str)
def test_parts_run_one_by_one_where_there_is_no_kernel(names, dtype):
    chain = Chain(names, dtype)
    fused, apart = chain.run(), chain.run(fused=False)
    assert steps(chain.model) == [type(op).__name__ for op in chain.model]
    chain.run()
    assert steps(chain.model) == ["PointwiseChain"]
    assert "the ops run one by one: hopper needs a CUDA device, got cpu" in str(chain.model.explain())
    for name, tensor in apart.items():
        torch.testing.assert_close(fused[name], tensor, rtol=0, atol=0)


WHOLE = ["bias", "scale", "residual", "mish", "column", "row", "residual", "rows", "groups", "number", "constant"]


@pytest.mark.parametrize("alone", range(16))
def test_each_gradient_alone(as_program, alone):
    count = len(Chain(WHOLE).tensors)
    if alone < count:
        Chain(WHOLE, frozen=set(range(count)) - {alone}).check()
    chain = Chain(WHOLE)
    chain.run()
    assert steps(chain.model) == ["PointwiseChain"]


def test_nothing_is_kept_that_no_gradient_reads(as_program):
    model, kept = Sequential(Pointwise(lambda x: 2 * x), ConstantScale(3.0), bias(4)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(torch.randn(5, 4, requires_grad=True))
    assert not kept


def test_the_gradient_of_what_is_added_last_is_that_of_the_result(as_program):
    """Not a copy of it; and that of what is added first is that of x."""
    model, x, h = Sequential(AddExtraInput("h"), Activation("silu"), AddExtraInput("k")), *torch.randn(2, 6, 16)
    x, h, k = (t.requires_grad_() for t in (x, h, torch.randn(6, 16)))
    dy, given = torch.randn(6, 16), []
    y = model(x, h=h, k=k)
    y.register_hook(lambda grad: given.append(grad))
    dx, dh, dk = torch.autograd.grad(y, [x, h, k], dy)
    assert steps(model) == ["PointwiseChain"]
    assert dk.data_ptr() == given[0].data_ptr()
    assert dh.data_ptr() == dx.data_ptr()
    torch.testing.assert_close(dx, torch.autograd.grad(F.silu(x + h), x, dy)[0])


@pytest.mark.parametrize(
    "ops",
    [
        lambda: [AddExtraInput("h"), bias(16)],
        lambda: [bias(16), AddExtraInput("h")],
        lambda: [Scale(), AddExtraInput("h")],
        lambda: [Activation("silu"), AddExtraInput("h")],
        lambda: [AddExtraInput("h"), Activation("silu"), AddExtraInput("k")],
        lambda: [GroupedLinear(2, 16, 16), Activation("silu"), AddExtraInput("h")],
    ],
)
def test_gradients_that_are_equal_are_accumulated_apart(as_program, ops):
    """autograd adds in place to what a leaf was given, unless it sees that another one has the same tensor."""
    model, x, dy = Sequential(*ops()), torch.randn(6, 16), torch.randn(6, 16)
    before, extras = dy.clone(), {"scales": torch.rand(6), "h": torch.randn(6, 16), "k": torch.randn(6, 16)}
    named = {name for op in model for name in op.keywords}
    given = {"x": x} | {name: tensor for name, tensor in extras.items() if name in named}
    for tensor in given.values():
        tensor.requires_grad_()
    sizes = {"split_sizes": torch.tensor([4, 2])} if "split_sizes" in named else {}
    y = model(**given, **sizes)
    once = torch.autograd.grad(y, [*given.values()], dy)
    for _ in range(4):
        model(**given, **sizes).backward(dy)
    assert torch.equal(dy, before)
    for (name, tensor), gradient in zip(given.items(), once, strict=True):
        torch.testing.assert_close(tensor.grad, 4 * gradient, msg=name)


def test_a_residual_of_a_branch():
    """An earlier op of the same container makes it; and one that cannot be in a kernel is added by itself."""
    torch.manual_seed(0)
    ops = [MakeExtraOutput("h"), Activation("silu"), AddExtraInput("h"), ConstantScale(2.0)]
    model, x = Sequential(*ops), torch.randn(6, 16, requires_grad=True)
    y, expected = model(x), 2 * (F.silu(x) + x)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(*(torch.autograd.grad(t.sum(), x)[0] for t in (y, expected)))
    assert steps(model) == ["MakeExtraOutput", "PointwiseChain"]
    whole = torch.ones(6, 16, dtype=torch.int64)
    added = Sequential(Activation("silu"), AddExtraInput("h"))
    torch.testing.assert_close(added(x, h=whole), F.silu(x) + whole)


def reasons(model, *arguments, **keywords):
    return [f.reason for f in model.explain(*arguments, **keywords).fusions if f.name == "PointwiseChain"]


X = torch.randn(6, 16)


def test_what_is_no_chain_says_why():
    unknown = Pointwise(lambda x: torch.special.i0(x))
    taken = "every condition holds"
    assert reasons(Sequential(Activation("silu"), unknown), X) == ["an op has operations that kernels do not know"]
    assert reasons(Sequential(SwiGLU(), SwiGLU()), X) == ["more than one op has gate and up"]
    hooked = Sequential(bias(16), Activation("silu"))
    hooked[0].register_forward_hook(lambda *arguments: None)
    assert reasons(hooked, X) == ["op 0 has hooks, which only run where it is called itself"]
    patched = Sequential(bias(16), Activation("silu"))
    patched[0].fwd = patched[0].fwd
    assert reasons(patched, X) == ["op0 has a fwd of its own, set on the object"]
    groups = [Pointwise(lambda x, b: x + b, columns={"b": (g, 16)}) for g in (2, 3)]
    sizes = {i: {"split_sizes": torch.tensor([6] + [0] * (i + 1))} for i in range(2)}
    reason = "numbers of columns are of different groups"
    assert reasons(Sequential(*groups), X, op_kwargs=sizes) == [reason]
    gate = Sequential(bias(16), Pointwise(lambda x, b: x + b, columns={"b": (2, 16)}), SwiGLU())
    assert reasons(gate, X, split_sizes=torch.tensor([2, 4])) == [taken]
    assert reasons(Sequential(bias(16), SwiGLU()), X) == [taken]


def test_columns_of_groups_have_one_tensor_of_sizes():
    ops = [Pointwise(lambda x, b: x + b, columns={"b": torch.randn(2, 16)}) for _ in range(2)]
    one, other = torch.tensor([2, 4]), torch.tensor([2, 4])
    assert reasons(Sequential(*ops), X, split_sizes=one) == ["every condition holds"]
    each = {0: {"split_sizes": one}, 1: {"split_sizes": other}}
    assert reasons(Sequential(*ops), X, op_kwargs=each) == ["op0 and op1 read different split_sizes"]


def test_what_is_left_of_a_chain_is_one():
    unknown = Pointwise(lambda x: torch.special.i0(x))
    ops = [bias(16), Activation("silu"), unknown, Activation("gelu"), ConstantScale(2.0), SwiGLU(), SwiGLU()]
    model = Sequential(*ops)
    assert steps(model, X) == ["PointwiseChain", "Pointwise", "PointwiseChain", "SwiGLU"]
    assert [f.taken for f in model.explain(X).fusions if f.name == "PointwiseChain"] == [False, True, True]


def test_what_needs_no_chain_is_none():
    assert steps(Sequential(ConstantScale(2.0)), X) == ["ConstantScale"]
    assert steps(Sequential(SwiGLU(), Scale()), X, scales=torch.rand(6)) == ["GLUScale"]
    assert steps(Sequential(SwiGLU()), X) == ["SwiGLU"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_numbers_that_programs_do_not_compute(as_program, dtype):
    x = torch.ones(2, 4).to(dtype)
    model = Sequential(ConstantScale(0.5), Pointwise(torch.tanh))
    if dtype.is_complex:
        with pytest.raises(fusible.ArgumentError, match="complex"):
            model(x)
    else:
        torch.testing.assert_close(model(x), torch.full((2, 4), 0.5).tanh())
        assert steps(model) == ["PointwiseChain"]


def test_a_constant_is_read_at_each_call(as_program):
    model, x = Sequential(Activation("silu"), ConstantScale(2.0)), torch.randn(3, 4)
    first = model(x)
    model[1].scale = 4.0
    torch.testing.assert_close(model(x), 2 * first)


def test_shared_keywords(as_program):
    model, s = Sequential(Scale(), Activation("silu"), Scale()), torch.rand(6, requires_grad=True)
    y = model(X, scales=s)
    expected = F.silu(X * s[:, None]) * s[:, None]
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    torch.testing.assert_close(*(torch.autograd.grad(t, s, dy)[0] for t in (y, expected)))
    assert steps(model) == ["PointwiseChain"]


def test_errors_name_the_op(as_program):
    model = Sequential(bias(16), Scale(), Activation("silu"))
    with pytest.raises(fusible.ArgumentError, match=r"1 \(Scale\).*scales"):
        model(X, scales=torch.rand(5))
    with pytest.raises(fusible.ArgumentError, match=r"0 \(Bias\)"):
        model(torch.randn(6, 8), scales=torch.rand(6))


def test_the_state_dict_is_that_of_the_ops(as_program):
    chain = Chain(["bias", "tanh", "column"])
    before = {name: tensor.clone() for name, tensor in chain.model.state_dict().items()}
    chain.run()
    assert list(before) == ["0.bias", "2.b"]
    other = Chain(["bias", "tanh", "column"])
    other.model.load_state_dict({name: 2 * tensor for name, tensor in before.items()})
    with torch.no_grad():
        for parameter in chain.model.parameters():
            parameter.mul_(2)
    assert torch.equal(chain.run()["y"], other.run()["y"])


@pytest.mark.parametrize(
    "names",
    [
        ["bias", "gelu", "scale"],
        ["groups", "tanh"],
        ["scale", "mish", "rows", "constant"],
        ["bias", "residual", "swiglu", "groups", "column", "residual", "tanh", "residual"],
    ],
    ids=str,
)
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "program"])
def test_compiled_code(names, whole, monkeypatch):
    if whole:
        monkeypatch.setattr(kernels, "pointwise_refusal", lambda *arguments: None)
    torch._dynamo.reset()
    chain = Chain(names, torch.float32)
    expected = chain.run()
    compiled = torch.compile(chain.model, backend="aot_eager", fullgraph=True)
    y = compiled(chain.tensors["x"], op_kwargs={i: kw for i, kw in chain.keywords.items() if kw})
    wanted = list(chain.tensors.values())
    got = dict(zip(chain.tensors, torch.autograd.grad(y, wanted, chain.dy), strict=True))
    for name, tensor in {"y": y.detach(), **got}.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-6)
    torch._dynamo.reset()


def test_the_fusion_keeps_its_promises(as_program):
    model = Sequential(bias(16), Pointwise(lambda x, s: torch.tanh(x) * s), ConstantScale(2.0))
    fusible.testing.check_fusion("PointwiseChain", model, X, s=torch.rand(6))
    assert pointwise_chain.RUN.op is pointwise_chain.PointwiseChain
