"""Memory that the caller lends: ``output`` and ``grad_input``."""

from __future__ import annotations

from functools import partial

import models
import pytest
import torch
from reference import assert_same, unit
from torch import nn

from fusible import (
    GRAD_INPUT_BUFFER_KEY,
    OUTPUT_BUFFER_KEY,
    ArgumentError,
    Bias,
    ConstantScale,
    GroupedLinear,
    Identity,
    Linear,
    MakeExtraOutput,
    Scale,
    Sequential,
    SwiGLU,
    config,
)
from fusible.fuser.runtime.buffers import overlap

E, K, F = 3, 4, 6
SIZES = torch.tensor([3, 0, 5])
T = 10
POISON = -7.0


mlp = partial(models.mlp, E, K, F, scaled=False, dtype=torch.float64)


def layer(k=K, n=F, **how):
    return GroupedLinear(E, k, n, dtype=torch.float64, **how)


def poisoned(*shape, dtype=torch.float64):
    return torch.full(shape, POISON, dtype=dtype)


def call(model, x, output=None, grad_input=None):
    """A layer alone, or an MLP with the output buffer on its last linear and the other on its first."""
    if isinstance(model, GroupedLinear):
        return model(x, split_sizes=SIZES, output=output, grad_input=grad_input)
    return model(x, split_sizes=SIZES, op_kwargs={-1: {"output": output}, 0: {"grad_input": grad_input}})


MODELS = {"layer": (layer, F), "discrete": (lambda: layer(single_grouped_weight=False), F), "mlp": (mlp, K)}


@pytest.fixture(params=["fused", "unfused"])
def switches(request):
    with config(disable_fusions={"GroupedMLP", "GroupedLinearGLU"} if request.param == "unfused" else set()):
        yield


SWITCHED = pytest.mark.usefixtures("switches")


@pytest.fixture(params=MODELS)
def model(request, switches):
    make, n = MODELS[request.param]
    made = make()
    made.columns = n
    return made


def test_keys_are_the_keywords():
    assert (OUTPUT_BUFFER_KEY, GRAD_INPUT_BUFFER_KEY) == ("output", "grad_input")


def test_result_is_the_buffer(model):
    out = poisoned(T, model.columns)
    y = call(model, unit(T, K), out)

    assert y.data_ptr() == out.data_ptr()
    assert y is not out


def test_input_gradient_is_the_buffer(model):
    dx = poisoned(T, K)
    x = unit(T, K)
    got = torch.autograd.grad(call(model, x, grad_input=dx).sum(), x)[0]

    assert got.data_ptr() == dx.data_ptr()


def test_buffers_hold_what_a_call_without_gives(model):
    x, out, dx = unit(T, K), poisoned(T, model.columns), poisoned(T, K)
    plain = call(model, x)
    gradient = torch.autograd.grad(plain.sum(), x)[0]
    call(model, x, out, dx).sum().backward()

    assert torch.equal(out[:8], plain[:8])
    assert torch.equal(dx[:8], gradient[:8])


def test_tails_are_not_touched(model):
    out, dx = poisoned(T, model.columns), poisoned(T, K)
    call(model, unit(T, K), out, dx).sum().backward()

    assert out[8:].eq(POISON).all()
    assert dx[8:].eq(POISON).all()


def test_parameter_gradients_do_not_depend_on_buffers(model):
    x = unit(T, K)
    results = []
    for out, dx in ((None, None), (poisoned(T, model.columns), poisoned(T, K))):
        model.zero_grad()
        call(model, x, out, dx)[:8].square().sum().backward()
        results.append({name: p.grad for name, p in model.named_parameters()})

    assert_same(*results)


def test_leading_dims():
    op, out, dx = layer(), poisoned(2, 5, F), poisoned(2, 5, K)
    x = unit(2, 5, K)
    y = call(op, x, out, dx)
    y.sum().backward()

    assert y.shape == (2, 5, F)
    assert torch.equal(out.view(T, F)[:8], call(op, x).view(T, F)[:8])
    assert dx.view(T, K)[:8].ne(POISON).all()


def test_buffer_never_joins_the_graph(model):
    out, dx = poisoned(T, model.columns), poisoned(T, K)
    y = call(model, unit(T, K), out, dx)
    y.sum().backward()

    assert y.grad_fn is not None
    assert not any((b.requires_grad, b.grad_fn) != (False, None) for b in (out, dx))


def test_version_counter_is_bumped(model):
    out, dx = poisoned(T, model.columns), poisoned(T, K)
    before = out._version, dx._version
    call(model, unit(T, K), out, dx).sum().backward()

    assert out._version > before[0]
    assert dx._version > before[1]


def test_reuse_across_steps(model):
    out, dx = poisoned(T, model.columns), poisoned(T, K)
    for _ in range(3):
        x = unit(T, K)
        y = call(model, x, out, dx)
        y.sum().backward()
        expected = torch.autograd.grad(call(model, x).sum(), x)[0]

        assert y.data_ptr() == out.data_ptr()
        assert torch.equal(dx[:8], expected[:8])


def test_under_no_grad(model):
    out = poisoned(T, model.columns)
    with torch.no_grad():
        y = call(model, unit(T, K), out)

    assert y.data_ptr() == out.data_ptr()
    assert not y.requires_grad


def test_overwriting_a_result_that_a_later_op_saved_is_detected():
    first, out = layer(), poisoned(T, F)
    y = call(first, unit(T, K), out)
    z = y.square().sum()
    call(first, unit(T, K), out)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_overwriting_a_result_that_a_later_linear_saved_is_detected():
    first, second, out = layer(), layer(F, K), poisoned(T, F)
    z = call(second, call(first, unit(T, K), out))
    out.zero_()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_grad_input_buffer_may_change_before_the_backward():
    op, dx, x = layer(), poisoned(T, K), unit(T, K)
    y = call(op, x, grad_input=dx)
    dx.zero_()
    y.sum().backward()

    assert x.grad.data_ptr() == dx.data_ptr()


def test_grad_input_without_a_gradient_for_x_is_left_alone(model):
    dx = poisoned(T, K)
    call(model, unit(T, K, grad=False), grad_input=dx).sum().backward()

    assert dx.eq(POISON).all()


def test_autocast_writes_the_dtype_of_the_product():
    op, x = GroupedLinear(E, K, F), unit(T, K, dtype=torch.float32)
    out, dx = poisoned(T, F, dtype=torch.bfloat16), poisoned(T, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(op, x, out, dx)
    y.sum().backward()

    assert y.data_ptr() == out.data_ptr()
    assert x.grad.data_ptr() == dx.data_ptr()


WRONG = [
    ("shape", lambda n: poisoned(T, n + 1), r"expected shape \[10, \d\], got \[10, \d\]"),
    ("rank", lambda n: poisoned(2, 5, n), r"expected shape \[10, \d\], got \[2, 5, \d\]"),
    ("dtype", lambda n: poisoned(T, n, dtype=torch.float32), "expected dtype torch.float64, got torch.float32"),
    ("device", lambda n: poisoned(T, n).to("meta"), "expected a buffer on cpu, got one on meta"),
    ("strides", lambda n: poisoned(n, T).mT, r"expected a contiguous buffer, got strides \[1, 10\]"),
    ("grad", lambda n: poisoned(T, n).requires_grad_(), r"requires grad; give buffer.detach\(\)"),
    ("kind", lambda n: [1.0], "expected a tensor to write into, got a list"),
]


@pytest.mark.parametrize("name", ["output", "grad_input"])
@pytest.mark.parametrize(("make", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_buffer_is_refused_before_anything_is_written(model, make, message, name):
    n = {"output": model.columns, "grad_input": K}
    good = {k: poisoned(T, c) for k, c in n.items()}
    bad = make(n[name])

    with pytest.raises(ArgumentError, match=f"{name}: {message}"):
        call(model, unit(T, K), **{**good, name: bad})
    assert all(b.eq(POISON).all() for b in good.values())


@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_overlap_with_x_is_refused(model, name):
    memory = unit(2 * T * F, grad=False)
    n = {"output": model.columns, "grad_input": K}[name]
    x, buffer = memory[: T * K].view(T, K), memory[K : K + T * n].view(T, n)
    before = memory.clone()

    with pytest.raises(ArgumentError, match=f"{name}.* overlaps x in memory; give a buffer of its own"):
        call(model, x, **{name: buffer})
    assert torch.equal(memory, before)


@pytest.mark.parametrize("name", ["output", "grad_input"])
@pytest.mark.parametrize("make", [lambda: mlp(), lambda: layer(K, K)])
@SWITCHED
def test_x_itself_is_refused_as_a_buffer(make, name):
    x = unit(T, K, grad=False)
    before = x.clone()

    with pytest.raises(ArgumentError, match=r"overlaps x in memory"):
        call(make(), x, **{name: x})
    assert torch.equal(x, before)


def test_overlap_with_a_parameter_is_refused(model):
    first = next(model.parameters())
    first.data = torch.cat([first.data.flatten(), poisoned(T * F)])[: first.numel()].view_as(first)
    buffer = first.detach().as_strided((T, model.columns), (model.columns, 1))
    before = first.detach().clone()

    with pytest.raises(ArgumentError, match=r"output.* overlaps a parameter in memory"):
        call(model, unit(T, K), buffer)
    assert torch.equal(first, before)


@pytest.mark.parametrize("make", [lambda: mlp(), lambda: layer(K, K)])
@pytest.mark.parametrize("apart", [0, K])
@SWITCHED
def test_overlap_of_the_buffers_is_refused(make, apart):
    memory = poisoned(T * K + apart)
    out, dx = memory[: T * K].view(T, K), memory[apart:].view(T, K)

    with pytest.raises(ArgumentError, match=r"overlaps .*'?(output|grad_input)'? in memory"):
        call(make(), unit(T, K), out, dx)
    assert memory.eq(POISON).all()


@pytest.mark.parametrize("make", [lambda: mlp(), lambda: layer(K, K)])
@SWITCHED
def test_one_tensor_as_both_buffers_is_refused(make):
    buffer = poisoned(T, K)

    with pytest.raises(ArgumentError, match=r"in memory; give a buffer of its own"):
        call(make(), unit(T, K), buffer, buffer)
    assert buffer.eq(POISON).all()


@pytest.mark.parametrize("keyword", ["scales", "bias_scale"])
def test_overlap_with_another_input_is_refused(keyword):
    model = Sequential(GroupedLinear(E, K, K, scale_bias=keyword == "bias_scale", dtype=torch.float64), Scale())
    buffer = poisoned(T, K)
    given = {"scales": torch.ones(T).double(), **({"bias_scale": None} if keyword == "scales" else {})}
    given = {k: v for k, v in given.items() if v is not None} | {keyword: buffer.view(-1)[5 : 5 + T]}

    with pytest.raises(ArgumentError, match=rf"'output' overlaps op \d \(\w+\): '{keyword}' in memory"):
        model(unit(T, K), split_sizes=SIZES, op_kwargs={0: {"output": buffer}}, **given)


@pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
def test_one_element_in_common_is_an_overlap(dtype):
    memory = torch.zeros(9, dtype=dtype)

    for a, b in ((memory[:5], memory[4:]), (memory, memory[8:]), (memory[:1], memory)):
        assert overlap(a, b)
        assert overlap(b, a)
    assert not overlap(memory[:5], memory[5:])


def test_neighbouring_memory_is_no_overlap():
    memory = poisoned(2 * T * K)
    x = memory[: T * K].view(T, K)
    y = call(layer(K, K), x, memory[T * K :].view(T, K))

    assert y.data_ptr() == memory.data_ptr() + T * K * 8


def test_no_rows_overlap_nothing():
    op, empty = layer(K, K), torch.empty(0, K, dtype=torch.float64)
    y = op(empty, split_sizes=[0, 0, 0], output=empty.detach())

    assert y.shape == (0, K)


INTERIOR = [(0, "output", 2 * F, "fc1 has 'output'"), (2, "grad_input", F, "fc2 has 'grad_input'")]


@pytest.mark.parametrize(("at", "name", "n", "reason"), INTERIOR)
def test_interior_buffer_is_not_fused_and_works(at, name, n, reason):
    model, x, buffer = mlp(), unit(T, K), poisoned(T, n)
    y = model(x, split_sizes=SIZES, op_kwargs={at: {name: buffer}})
    declined = {f.name: f.reason for f in model.explain().fusions if not f.taken}
    gradient = torch.autograd.grad(y.sum(), x)[0]

    assert declined["GroupedMLP"] == reason
    assert buffer[:8].ne(POISON).all()
    torch.testing.assert_close((y, gradient), ((z := call(model, x)), torch.autograd.grad(z.sum(), x)[0]))


def test_output_buffer_before_a_last_scale_is_not_fused_and_holds_the_linear():
    model, x, out, p = Sequential(*mlp(), Scale()), unit(T, K), poisoned(T, K), unit(T, grad=False)
    y = model(x, split_sizes=SIZES, scales=p, op_kwargs={2: {"output": out}})
    declined = {f.name: f.reason for f in model.explain().fusions if f.ops == (0, 1, 2, 3)}

    assert declined == {"GroupedMLP": "the scale after fc2 would change what its output buffer holds"}
    torch.testing.assert_close(y[:8], (out * p[:, None])[:8])


def test_fused_mlp_takes_both_buffers():
    model = mlp()
    call(model, unit(T, K), poisoned(T, K), poisoned(T, K))

    assert [step.name for step in model.explain().steps] == ["GroupedMLP"]


def test_buffer_after_a_module_that_is_no_op():
    model, out = Sequential(nn.Identity(), layer(), ConstantScale(2.0)), poisoned(T, F)
    y = model(unit(T, K), split_sizes=SIZES, op_kwargs={1: {"output": out}})

    assert torch.equal(y[:8], 2 * out[:8])


@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_buffer_made_under_inference_mode_is_refused_before_it_is_written(name):
    with torch.inference_mode():
        buffer = poisoned(T, K)

    with pytest.raises(ArgumentError, match=rf"{name}: was made under torch.inference_mode\(\), .* give buffer.clone"):
        layer(K, K)(unit(T, K), split_sizes=SIZES, **{name: buffer})
    assert buffer.eq(POISON).all()
    with torch.inference_mode():
        layer(K, K)(unit(T, K), split_sizes=SIZES, output=buffer)


# ------------------------------------------------------------------------------------------------- tails in front

FRONT = {
    "GroupedLinear": (lambda: layer(K, K, bias=True), {"split_sizes": [4, 2, 4]}),
    "Linear": (lambda: Linear(K, K, dtype=torch.float64), {}),
    "nn.Linear": (lambda: nn.Linear(K, K, dtype=torch.float64), {}),
    "Bias": (lambda: Bias(K, dtype=torch.float64), {}),
}
INNER = {"layer": lambda: [layer(K, K)], "GroupedLinearGLU": lambda: [layer(K, 2 * F), SwiGLU()], "GroupedMLP": mlp}


def hooked(ops):
    for op in ops:
        op.register_forward_hook(lambda *_: None)
    return ops


@pytest.mark.parametrize("hook", [False, True], ids=["plain", "hooked"])
@pytest.mark.parametrize("fill", [100.0, float("nan")])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("front", FRONT)
@SWITCHED
def test_the_tail_of_an_inner_buffer_reaches_no_gradient_in_front(front, inner, fill, hook):
    build, keywords = FRONT[front]
    first, behind, x = build(), list(INNER[inner]()), unit(T, K)
    if hook:
        hooked(behind)
    model, grads = Sequential(first, *behind), []
    for buffer in (None, *[torch.full((T, K), fill, dtype=torch.float64) for _ in range(3)]):
        addressed = {1: {"grad_input": buffer}} | ({0: keywords} if keywords else {})
        y = model(x, split_sizes=SIZES, op_kwargs=addressed)
        grads.append(torch.autograd.grad(y[:8].square().sum(), [x, *first.parameters()]))
        if buffer is not None:
            torch.testing.assert_close(buffer[8:], torch.full_like(buffer[8:], fill), equal_nan=True, rtol=0, atol=0)
            assert (buffer[:8] != fill).all()
            torch.testing.assert_close(grads[-1], grads[0])


def test_what_is_in_front_of_an_inner_buffer_gets_the_same_in_compiled_code():
    model, x, grads = Sequential(layer(K, K), layer(K, K)), unit(T, K), []
    torch.compiler.reset()
    for run in (model, torch.compile(model, backend="aot_eager")):
        buffer = torch.full((T, K), 100.0, dtype=torch.float64)
        wanted = {0: {"split_sizes": torch.tensor([4, 2, 4])}, 1: {"split_sizes": SIZES, "grad_input": buffer}}
        grads.append(torch.autograd.grad(run(x, op_kwargs=wanted).sum(), [x, *model[0].parameters()]))
        assert buffer[8:].eq(100.0).all()

    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("passes", [[Identity()], [MakeExtraOutput("r")]], ids=["Identity", "MakeExtraOutput"])
def test_a_gradient_of_x_itself_is_the_buffer_behind_what_passes_x_on(passes):
    x, buffer = unit(T, K), poisoned(T, K)
    result = Sequential(*passes, layer(K, K))(x, split_sizes=SIZES, grad_input=buffer)
    y = result[0] if isinstance(result, tuple) else result

    assert torch.autograd.grad(y.sum(), x)[0].data_ptr() == buffer.data_ptr()


def test_explain_notes_the_copy_of_an_inner_buffer():
    model, x = Sequential(layer(K, K), layer(K, K)), unit(T, K)
    steps = model.explain(x, split_sizes=SIZES, op_kwargs={1: {"grad_input": poisoned(T, K)}}).steps

    assert [step.notes for step in steps] == [
        (),
        ("the gradient of x is copied from grad_input, whose tail must reach nothing in front",),
    ]


def test_a_leaf_with_the_strides_of_the_buffer_keeps_it_as_its_gradient():
    for x, same in ((unit(T, K), True), (unit(K, T).mT.detach().requires_grad_(), False)):
        buffer = poisoned(T, K)
        layer(K, K)(x, split_sizes=SIZES, grad_input=buffer).sum().backward()

        assert (x.grad.data_ptr() == buffer.data_ptr()) == same
