"""Functions of users as ops: read with their gradients, run as programs, or refused with the line that is at fault."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import fusible
from fusible import Pointwise, interleaved
from fusible.ops.programs.program import OPERATIONS, parse
from fusible.ops.programs.tracing import trace

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 7.0, -7.0, 25.0, -25.0, 1e-6, -1e-6, 80.0, -80.0]


class RoundThrough(torch.autograd.Function):
    """Rounds to quarters; the gradient passes within two units."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, dy):
        return dy * (ctx.saved_tensors[0].abs() <= 2)


def gpt_oss(x, u, r):
    x, u = x.clamp(max=7.0), u.clamp(-7.0, 7.0)
    return x * torch.sigmoid(1.702 * x) * (u + 1) * r


def piecewise(x):
    return torch.where(x > 1, x - 0.5, torch.where(x >= -1, 0.5 * x.square(), -x - 0.5)) * (x.abs() <= 4)


def in_place(x):
    x = x.clone()
    x.mul_(2).add_(1)
    return x.sigmoid_()


FUNCTIONS = {
    "relu2 of a row": (lambda x, r: torch.relu(x).square() * r, 1),
    "silu": (F.silu, 1),
    "gelu": (F.gelu, 1),
    "gelu by tanh": (lambda x: F.gelu(x, approximate="tanh"), 1),
    "gpt-oss": (gpt_oss, 2),
    "quick gelu": (lambda x: x * torch.sigmoid(1.702 * x), 1),
    "softplus": (F.softplus, 1),
    "mish": (F.mish, 1),
    "relu2 glu": (lambda x, u: torch.relu(x) ** 2 * u, 2),
    "soft cap": (lambda x: 30 * torch.tanh(x / 30), 1),
    "hardswish": (F.hardswish, 1),
    "arctan": (torch.atan, 1),
    "constants": (lambda x, r: (0.3 * x + 1.25 / (1 + torch.exp(-0.5 * x))) * r - 0.125 * x**3, 1),
    "piecewise": (piecewise, 1),
    "not linear in two rows": (lambda x, r, s: torch.tanh(x * r) + torch.sin(s * x) ** 2, 1),
    "elu": (F.elu, 1),
    "celu": (lambda x: F.celu(x, 1.3), 1),
    "selu": (F.selu, 1),
    "leaky relu": (lambda x: F.leaky_relu(x, 0.2), 1),
    "hardsigmoid": (F.hardsigmoid, 1),
    "hardtanh": (F.hardtanh, 1),
    "relu6": (F.relu6, 1),
    "logsigmoid": (F.logsigmoid, 1),
    "tanhshrink": (F.tanhshrink, 1),
    "softsign": (F.softsign, 1),
    "straight through": (lambda x, u: RoundThrough.apply(x) * torch.sigmoid(u), 2),
    "log sum": (torch.logaddexp, 2),
    "in place": (in_place, 1),
    "module": (torch.nn.GELU(), 1),
    "constant": (lambda x: torch.ones_like(x), 1),
    "gate alone": (lambda x, u: F.silu(x), 2),
    "rounding trick": (lambda x: (x + 12582912.0) - 12582912.0, 1),
}


def inputs_of(function, gated, columns=24, dtype=torch.float32):
    op = Pointwise(function, halves="concat" if gated == 2 else None)
    generator = torch.Generator().manual_seed(3)
    special = torch.tensor(SPECIAL * 4)[:columns].expand(3, columns)
    x = torch.cat([special, 2 * torch.randn(5, columns, generator=generator)]).to(dtype).requires_grad_()
    rows = {name: torch.randn(8, generator=generator).requires_grad_() for name in op.keywords}
    return op, x, rows


def by_autograd(function, gated, x, rows):
    """The function in float64, with its gradients for a gradient of ones."""
    leaves = [t.detach().double().requires_grad_() for t in (x, *rows.values())]
    halves = leaves[0].chunk(2, -1) if gated == 2 else leaves[:1]
    y = function(*[half * 1.0 for half in halves], *[row.unsqueeze(-1) for row in leaves[1:]])
    grads = [None] * len(leaves)
    if y.requires_grad:
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)
    return y, [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_and_gradients_are_those_of_autograd(name):
    function, gated = FUNCTIONS[name]
    op, x, rows = inputs_of(function, gated)
    assert op.program is not None
    y = op(x, **rows)
    y.backward(torch.ones_like(y))
    expected, grads = by_autograd(function, gated, x, rows)
    if name != "rounding trick":  # whose value is one of float32 alone
        torch.testing.assert_close(y.double(), expected, rtol=2e-6, atol=2e-6)
    else:
        assert torch.equal(y, torch.round(x))
    for leaf, grad in zip((x, *rows.values()), grads, strict=True):
        torch.testing.assert_close(leaf.grad.double(), grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_text_of_a_program_is_the_program(name):
    function, gated = FUNCTIONS[name]
    op, _, _ = inputs_of(function, gated)
    assert parse(op.program.text) == op.program
    assert "lambda" not in op.program.text


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype):
    op, x, rows = inputs_of(gpt_oss, 2, dtype=dtype)
    y = op(x, **rows)
    wide = op(x.detach().float(), **{name: row.detach() for name, row in rows.items()})
    assert y.dtype == dtype
    assert torch.equal(y, wide.to(dtype))


def test_nan_and_infinity_are_those_of_pytorch():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")]).requires_grad_()
    for function in (F.silu, F.relu, lambda x: x.clamp(-1, 1), lambda x: torch.where(x > 0, x, -x), torch.sigmoid):
        y = Pointwise(function)(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        leaf = x.detach().requires_grad_()
        expected = function(leaf)
        (expected_grad,) = torch.autograd.grad(expected, leaf, torch.ones_like(expected))
        torch.testing.assert_close(y, expected, equal_nan=True)
        torch.testing.assert_close(grad, expected_grad, equal_nan=True)


@pytest.mark.parametrize("halves", ["concat", interleaved(1), interleaved(4)])
def test_halves_are_gate_and_up(halves):
    op = Pointwise(lambda gate, up: F.silu(gate) * up, halves=halves)
    x = torch.randn(2, 3, 16, requires_grad=True)
    y = op(x)
    y.sum().backward()
    layout = fusible.SwiGLU(layout=halves)
    other = x.detach().requires_grad_()
    layout(other).sum().backward()
    torch.testing.assert_close(y, layout(other))
    torch.testing.assert_close(x.grad, other.grad)


def test_functions_that_compute_the_same_are_one_program():
    first, second = Pointwise(F.silu), Pointwise(lambda t: t * torch.sigmoid(t))
    assert first.program.only(["y"]) == second.program.only(["y"])
    assert Pointwise(lambda x: 2.0 * x).program != Pointwise(lambda x: x * x).program


def test_what_is_not_read_is_not_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        Pointwise(lambda x: 3 * x)(torch.randn(4, 4, requires_grad=True))
        assert not kept
        Pointwise(lambda x, s: x * s)(torch.randn(4, 4, requires_grad=True), s=torch.ones(4))
        assert [t.shape for t in kept] == [(4,)]


def test_the_program_stays_what_it_was():
    limit = 1.0
    op = Pointwise(lambda x: x.clamp(max=limit))
    limit = 5.0
    assert op(torch.tensor([3.0])) == 1.0


def test_lambdas_are_copied_and_pickled():
    op = Pointwise(lambda x, s: x.exp() * s)
    x, s = torch.randn(3, 4), torch.randn(3)
    for other in (copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        assert torch.equal(other(x, s=s), op(x, s=s))
    assert not op.state_dict()


def test_rows_are_keywords_of_a_container():
    model = fusible.Sequential(fusible.Linear(4, 6), Pointwise(lambda x, s: torch.tanh(x) * s), fusible.Linear(6, 4))
    x, s = torch.randn(5, 4, requires_grad=True), torch.rand(5, requires_grad=True)
    y = model(x, s=s)
    torch.testing.assert_close(y, model[2](torch.tanh(model[0](x)) * s[:, None]))
    y.sum().backward()
    assert s.grad is not None
    assert "Pointwise" in str(model.explain())


def test_checkpointing_and_compiled_code_agree():
    model = fusible.Sequential(fusible.Linear(4, 8), Pointwise(lambda g, u: torch.relu(g) ** 2 * u, halves="concat"))
    x = torch.randn(5, 4, requires_grad=True)
    results = []
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for run in (model, compiled, lambda x: checkpoint(model, x, use_reentrant=False)):
        y = run(x)
        results.append((y, *torch.autograd.grad(y.sum(), [x, model[0].weight])))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, results[0], strict=True))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: torch.softmax(x, -1), "depends on more than its own inputs"),
        (lambda x: x - x.mean(), "depends on more than its own inputs"),
        (lambda x: x.flip(0), "depends on more than its own inputs"),
        (lambda x: x if x.sum() < 0 else -x, "depends on more than its own inputs"),
        (lambda x: F.dropout(x, 0.5), "depends on more than its own inputs"),
        (lambda x: x * torch.rand_like(x), "depends on more than its own inputs"),
        (lambda x: x + torch.ones(7), r"shape \[7\].*test_pointwise.py:\d+"),
        (lambda x: x.view(5, 7) * 2, "depends on more|invalid for input"),
        (lambda x: x > 0, "must return a float32 tensor"),
        (lambda x: (x, x), "must return one tensor"),
        (lambda x, needs_grad: x * needs_grad, "'needs_grad', which is reserved"),
    ],
)
def test_what_is_no_function_of_an_element_is_refused(function, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        Pointwise(function)


def test_a_tensor_that_is_no_argument_is_refused():
    table = torch.randn(7)
    with pytest.raises(
        ValueError, match=r"reads a tensor of shape \[7\] that is not one of its arguments.*test_pointwise"
    ):
        Pointwise(lambda x: x * table)


def test_other_halves_are_refused():
    with pytest.raises(ValueError, match="halves must be None, 'concat' or interleaved"):
        Pointwise(F.silu, halves="split")


def test_a_function_that_kernels_do_not_know_runs_by_pytorch():
    op = Pointwise(lambda x, s: torch.special.i0(x) * s)
    assert op.program is None
    assert "kernels do not know i0" in op.refusal
    assert "test_pointwise.py" in op.refusal
    x, s = torch.randn(3, 4, requires_grad=True), torch.rand(3, requires_grad=True)
    op(x, s=s).sum().backward()
    torch.testing.assert_close(x.grad, torch.special.i1(x) * s[:, None])
    torch.testing.assert_close(s.grad, torch.special.i0(x).sum(-1))


def test_reading_leaves_the_random_numbers_of_the_user():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Pointwise(F.mish)
    with pytest.raises(ValueError, match="random numbers"):
        Pointwise(lambda x: F.dropout(x, 0.5))
    assert torch.equal(torch.rand(3), expected)


def test_reading_is_done_under_no_mode_of_the_caller():
    with torch.inference_mode(), torch.device("meta"):
        op = Pointwise(F.silu)
    torch.set_default_dtype(torch.float64)
    try:
        assert Pointwise(lambda x: x * 0.1 + torch.tensor(0.5)).program.only(["y"]).lines[0].arguments == ("x", 0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert op.program == Pointwise(F.silu).program


def test_wrong_rows_are_named():
    op = Pointwise(lambda x, s: x * s)
    with pytest.raises(fusible.ArgumentError, match=r"s: expected shape \[3\]"):
        op(torch.randn(3, 4), s=torch.ones(4))
    with pytest.raises(fusible.ArgumentError, match="halves"):
        Pointwise(lambda g, u: g * u, halves="concat")(torch.randn(3, 5))


UNARY = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "relu": torch.relu,
    "silu": F.silu,
    "half": lambda t: t * 0.5,
    "plus": lambda t: t + 0.3,
    "minus": lambda t: 1.5 - t,
    "clamp": lambda t: t.clamp(-1.3, 2.1),
    "quotient": lambda t: t / 3,
    "soft": lambda t: torch.log1p(t.abs()),
    "inverse": lambda t: 1 / (1 + t * t),
}
BINARY = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
    "where": lambda a, b: torch.where(a < b, a, b * 0.5),
}
EXPRESSIONS = st.lists(
    st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=10
)


def function_of(steps, arguments):
    """A function of random operations on earlier values."""

    def function(*inputs):
        values = list(inputs)
        for name, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(torch.tanh(UNARY[name](a)) if name in UNARY else BINARY[name](a, b) * 0.7)
        return values[-1] + 0 * values[0]

    return function


@settings(max_examples=200, deadline=None, derandomize=True)
@given(EXPRESSIONS, st.sampled_from([("x",), ("x", "u"), ("x", "r0"), ("x", "u", "r0")]))
def test_random_functions_agree_with_autograd(steps, inputs):
    function = function_of(steps, inputs)
    program = trace(function, inputs)
    generator = torch.Generator().manual_seed(11)
    leaves = [torch.randn(6, 9, generator=generator, dtype=torch.float64).requires_grad_() for _ in inputs]
    dy = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    y = function(*leaves)
    grads = torch.autograd.grad(y, leaves, dy, materialize_grads=True)
    computed = program.run({**{n: t.detach() for n, t in zip(inputs, leaves, strict=True)}, "dy": dy})
    torch.testing.assert_close(computed["y"].expand(6, 9), y.detach(), rtol=1e-9, atol=1e-9)
    for name, grad in zip(inputs, grads, strict=True):
        torch.testing.assert_close(computed[f"d{name}"].expand(6, 9), grad, rtol=1e-8, atol=1e-8)
    assert parse(program.text) == program


def test_texts_that_no_program_has_are_refused():
    text = Pointwise(F.silu).program.text
    for wrong in (
        "",
        "in x\ny = import x",
        "in x\nt0 = exp x\nt0 = exp x\ny = t0",
        text + "\n",
        "in x\ny = z",
        f"{text} ",
    ):
        with pytest.raises(ValueError, match=r"program|could not convert"):
            parse(wrong)


def test_every_operation_says_itself_in_both_languages():
    for name, operation in OPERATIONS.items():
        arguments = operation.code.count("{")
        tensors = [torch.tensor([0.5]), torch.tensor([0.25]), torch.tensor([2.0])][:arguments]
        if name in ("and", "or", "not", "where"):
            tensors[0] = tensors[0] > 0
        assert operation.run(*tensors).shape == (1,)
        if operation.with_constant is not None:
            assert torch.equal(operation.with_constant(tensors[0], 0.25), operation.run(*tensors))


def limited(gate, limit, up, s, *, slope):
    return torch.where(gate > limit, slope * gate, gate.clamp(-limit, limit)) * up.clamp(max=limit) * s


def limited_op(limit=1.5, slope=0.25):
    return Pointwise(
        lambda gate, up, limit, s, *, slope: limited(gate, limit, up, s, slope=slope),
        halves="concat",
        constants={"limit": limit, "slope": slope},
    )


def test_constants_are_parameters_of_one_program():
    x, s = (3 * torch.randn(6, 16)).requires_grad_(), torch.rand(6, requires_grad=True)
    op, texts = limited_op(), set()
    for limit, slope in ((1.5, 0.25), (0.5, -2.0), (7, 0.3)):
        op.constants = {"slope": slope, "limit": limit}
        for each in (op, limited_op(limit, slope), copy.deepcopy(op)):
            y = each(x, s=s)
            gate, up = x.chunk(2, -1)
            expected = limited(gate, limit, up, s.unsqueeze(-1), slope=slope)
            torch.testing.assert_close(y, expected)
            dy = torch.randn_like(y)
            grads = (torch.autograd.grad(t, [x, s], dy) for t in (y, expected))
            for computed, right in zip(*grads, strict=True):
                torch.testing.assert_close(computed, right)
            texts.add(each.program.text)
    (text,) = texts
    assert parse(text) == op.program
    assert op.program.constants == ("c0", "c1")
    assert op.constants == {"limit": 7.0, "slope": 0.3}
    assert list(op.keywords) == ["s"]
    assert not op.state_dict()


def test_constants_are_exact_in_double_precision():
    op = Pointwise(lambda x, c: x * c, constants={"c": 0.1})
    assert op(torch.ones(1, dtype=torch.float64)) == 0.1


def test_constants_are_printed_and_pickled():
    op = Pointwise(gpt_like, halves="concat", constants={"alpha": 1.702})
    other = pickle.loads(pickle.dumps(op))
    assert "alpha=1.702" in repr(other)
    x = torch.randn(2, 8)
    torch.testing.assert_close(other(x), gpt_like(*x.chunk(2, -1), alpha=1.702))


def gpt_like(x, u, alpha):
    return x * torch.sigmoid(alpha * x) * (u + 1)


def test_another_constant_is_seen_by_compiled_code():
    model = fusible.Sequential(Pointwise(gpt_like, halves="concat", constants={"alpha": 1.0}))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(3, 8, requires_grad=True)
    for alpha in (1.0, 2.5, 1.0):
        model[0].constants = {"alpha": alpha}
        y, expected = compiled(x), gpt_like(*x.chunk(2, -1), alpha=alpha)
        torch.testing.assert_close(y, expected)
        grads = [torch.autograd.grad(t.sum(), x)[0] for t in (y, expected)]
        torch.testing.assert_close(*grads)


def test_constants_cannot_be_changed_in_place():
    op = Pointwise(gpt_like, halves="concat", constants={"alpha": 1.0})
    op.constants["alpha"] = 3.0
    assert op.constants == {"alpha": 1.0}


def test_wrong_constants_are_named():
    with pytest.raises(ValueError, match=r"gpt_like has no parameter 'beta', .*test_pointwise.py:\d+"):
        Pointwise(gpt_like, halves="concat", constants={"alpha": 1.0, "beta": 2.0})
    with pytest.raises(ValueError, match="has no parameter 'x'"):
        Pointwise(gpt_like, halves="concat", constants={"x": 1.0})
    for wrong in ("7", None, True, torch.tensor(1.0)):
        with pytest.raises(ValueError, match="the constant alpha must be a number"):
            Pointwise(gpt_like, halves="concat", constants={"alpha": wrong})
    op = Pointwise(gpt_like, halves="concat", constants={"alpha": 1.0})
    with pytest.raises(ValueError, match=r"the constants are \['alpha'\], got \[\]"):
        op.constants = {}
    assert op.constants == {"alpha": 1.0}


@pytest.mark.parametrize(
    "function",
    [
        lambda x, c: x * math.exp(c),
        lambda x, c: x * c if c > 2 else x,
        lambda x, c: F.softplus(x, beta=c),
    ],
)
def test_a_constant_that_python_reads_is_no_part_of_a_program(function):
    op = Pointwise(function, constants={"c": 1.5})
    assert op.program is None
    assert "kernels do not know numbers that Python reads from a tensor or a constant" in op.refusal
    assert "test_pointwise.py" in op.refusal
    x = torch.randn(3, 4)
    for c in (1.5, 2.5):
        op.constants = {"c": c}
        torch.testing.assert_close(op(x), function(x, c))


def swish(x, beta):
    return x * torch.sigmoid(beta * x)


def gated_swish(gate, up, s, beta, alpha, limit):
    return swish(gate.clamp(max=limit), beta) * (up + alpha) * s


SIZES = torch.tensor([3, 0, 4])


def by_groups(tensor, rows):
    """The values of [E, C] or [C] for each row; zeros past the last group."""
    if tensor.dim() == 1:
        return tensor.expand(rows, -1)
    spread = tensor.repeat_interleave(SIZES, 0)
    return torch.cat([spread, tensor.new_zeros(rows - len(spread), tensor.shape[1])])


@pytest.mark.parametrize("shape", [(3, 8), (8,)], ids=str)
@pytest.mark.parametrize("halves", ["concat", interleaved(2)], ids=str)
@pytest.mark.parametrize("in_program", [True, False])
def test_columns_have_numbers_of_their_own(shape, halves, in_program):
    function = (
        gated_swish
        if in_program
        else lambda gate, up, s, beta, alpha, limit: torch.special.i0(gated_swish(gate, up, s, beta, alpha, limit))
    )
    start = {name: torch.randn(shape) for name in ("beta", "alpha")}
    op = Pointwise(function, halves=halves, columns=start, constants={"limit": 1.5})
    assert (op.program is not None) == in_program
    x, s = torch.randn(9, 16, requires_grad=True), torch.rand(9, requires_grad=True)
    sizes = {"split_sizes": SIZES} if len(shape) == 2 else {}
    y = op(x, s=s, **sizes)
    width = 8 if halves == "concat" else 2
    gate, up = (part.flatten(-2) for part in x.view(9, -1, 2, width).unbind(-2))
    rows = {name: by_groups(parameter, 9) for name, parameter in op.named_parameters()}
    expected = function(gate, up, s.unsqueeze(-1), rows["beta"], rows["alpha"], 1.5)
    torch.testing.assert_close(y, expected)
    dy, leaves = torch.randn_like(y), [x, s, op.beta, op.alpha]
    for computed, right in zip(*(torch.autograd.grad(t, leaves, dy) for t in (y, expected)), strict=True):
        torch.testing.assert_close(computed, right)


def test_columns_are_parameters():
    op = Pointwise(swish, columns={"beta": (2, 4)})
    assert {name: p.shape for name, p in op.named_parameters()} == {"beta": (2, 4)}
    assert op.beta.eq(0).all()
    op.load_state_dict({"beta": torch.arange(8.0).view(2, 4)})
    x, sizes = torch.randn(5, 4), torch.tensor([2, 3])
    expected = swish(x, op.beta.repeat_interleave(sizes, 0))
    for other in (op, copy.deepcopy(op), pickle.loads(pickle.dumps(op))):
        torch.testing.assert_close(other(x, split_sizes=sizes), expected)
        torch.testing.assert_close(other(x, split_sizes=[2, 3]), expected)
    assert "beta=[2, 4]" in repr(op)


def test_wanted_gradients_of_columns_alone():
    op = Pointwise(lambda x, shift: x + shift, columns={"shift": torch.ones(4)})
    op(torch.randn(3, 4)).sum().backward()
    assert op.shift.grad.eq(3).all()
    op.shift.requires_grad_(False)
    x = torch.randn(3, 4, requires_grad=True)
    op(x).sum().backward()
    assert x.grad.eq(1).all()


def test_columns_in_a_container_and_in_compiled_code():
    torch.manual_seed(0)
    act = Pointwise(swish, columns={"beta": torch.rand(3, 8)})
    model = fusible.Sequential(fusible.GroupedLinear(3, 4, 8), act, fusible.GroupedLinear(3, 8, 4))
    x, results = torch.randn(7, 4, requires_grad=True), []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        y = run(x, split_sizes=SIZES)
        results.append((y, *torch.autograd.grad(y.sum(), [x, act.beta])))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    hidden = model[0](x, split_sizes=SIZES)
    torch.testing.assert_close(results[0][0], model[2](swish(hidden, by_groups(act.beta, 7)), split_sizes=SIZES))
    assert "GroupedMLP" in str(model.explain(x, split_sizes=SIZES))


@pytest.mark.parametrize(
    ("function", "halves", "words"),
    [
        (lambda: torch.ones(3), None, r"<lambda> must take x by position, .*test_pointwise.py:\d+"),
        (lambda x: x, "concat", "<lambda> must take gate and up by position"),
        (lambda x, *, s: x * s, None, "<lambda> takes 's' only by name.*; a number of a row is passed by position"),
    ],
)
def test_functions_that_do_not_take_what_they_are_given_are_named(function, halves, words):
    with pytest.raises(ValueError, match=words):
        Pointwise(function, halves=halves)


def test_wrong_columns_are_named():
    with pytest.raises(ValueError, match=r"swish has no parameter 'gamma', .*test_pointwise.py:\d+"):
        Pointwise(swish, columns={"gamma": (4,)})
    with pytest.raises(ValueError, match="'beta' is both a column and a constant"):
        Pointwise(swish, columns={"beta": (4,)}, constants={"beta": 1.0})
    with pytest.raises(ValueError, match=r"columns have one shape, got \[\(4,\), \(5,\)\]"):
        Pointwise(lambda x, a, b: x * a + b, columns={"a": (4,), "b": (5,)})
    with pytest.raises(ValueError, match=r"beta must be numbers \[C\] or \[E, C\]"):
        Pointwise(swish, columns={"beta": torch.ones(4, dtype=torch.int64)})
    for shape in ((-1,), (0,), "ab", 4, (2, 3, 4), (2.0,)):
        with pytest.raises(ValueError, match=r"swish: the columns beta must be numbers \[C\] or \[E, C\], got"):
            Pointwise(swish, columns={"beta": shape})
    op = Pointwise(swish, columns={"beta": (2, 4)})
    with pytest.raises(fusible.ArgumentError, match="split_sizes"):
        op(torch.randn(3, 4))
    with pytest.raises(fusible.ArgumentError, match="expected 2 sizes, one a group"):
        op(torch.randn(3, 4), split_sizes=[1, 1, 1])
    with pytest.raises(fusible.ArgumentError, match="expected 4 features"):
        op(torch.randn(3, 5), split_sizes=[1, 2])


def test_what_a_function_raises_names_the_function_and_its_tensors():
    def product_of_matrices(gate, up):
        return gate @ up

    with pytest.raises(RuntimeError, match="cannot be multiplied") as raised:
        Pointwise(product_of_matrices, halves="concat")

    (note,) = raised.value.__notes__
    assert "product_of_matrices raised this on tensors [" in note
