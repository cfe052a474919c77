"""Properties: a container is its ops one by one, however its arguments come; the tail is inert.

And a table: what holds for every op, every fusion and every backend (``checks/properties.py``).
"""

from __future__ import annotations

import pytest
import torch
from checks import properties
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import glu, mlp

from fusible import (
    GLU,
    Activation,
    AddExtraInput,
    Bias,
    ConstantScale,
    GroupedLinear,
    Identity,
    Linear,
    Op,
    Scale,
    ScaledSwiGLU,
    Sequential,
    config,
    grouped_gemm,
    interleaved,
)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # what the compiler itself uses
@pytest.mark.parametrize("cell", properties.cells("cpu"), ids=str)
def test_table(cell: properties.Cell) -> None:
    cell.check("cpu")


FAST = settings(
    max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
ROWS, E = 7, 3
F64 = torch.float64

splits = st.lists(st.integers(0, 4), min_size=E, max_size=E)
names = st.sampled_from(["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid"])


@st.composite
def chains(draw):
    """Ops that fit one after the other; runs of an expert are likely, so that fusions fire."""
    ops, width = [], draw(st.sampled_from([4, 8]))
    start = width
    for kind in draw(
        st.lists(st.sampled_from(["grouped", "glu", "scale", "expert", "small", "linear"]), max_size=6, min_size=1)
    ):
        made, width = KINDS[kind](draw, width)
        ops += made
    return ops, start


def grouped(draw, width):
    n = draw(st.sampled_from([4, 8]))
    how = {"bias": draw(st.booleans()), "scale_bias": draw(st.booleans()), "single_grouped_weight": draw(st.booleans())}
    return [GroupedLinear(E, width, n, dtype=F64, **how)], n


def gated(draw, width):
    if width < 4:
        return [Activation(draw(names))], width
    layout = draw(st.sampled_from(["concat", interleaved(1), interleaved(2)]))
    return [GLU(draw(names), layout=layout, limit=draw(st.sampled_from([None, 0.7])))], width // 2


def scaled(draw, width):
    return [Scale()], width


def expert(draw, width):
    first, _ = grouped(draw, width)
    act = draw(st.sampled_from([GLU("silu"), Activation("gelu"), ScaledSwiGLU()]))
    inner = first[0].out_features if isinstance(act, Activation) else first[0].out_features // 2
    second, n = grouped(draw, inner)
    return [*first, act, *([Scale()] if draw(st.booleans()) else []), *second], n


def small(draw, width):
    op = draw(st.sampled_from([Identity(), ConstantScale(-1.5), Bias(width, dtype=F64), AddExtraInput("more")]))
    return [op], width


def linear(draw, width):
    return [Linear(width, 4, dtype=F64)], 4


KINDS = {"grouped": grouped, "glu": gated, "scale": scaled, "expert": expert, "small": small, "linear": linear}


def value_for(name, x_of_op, sizes):
    """A fresh argument for a keyword."""
    if name == "split_sizes":
        return sizes
    shape = x_of_op.shape if name == "more" else (ROWS,)
    return torch.randn(shape, dtype=F64, requires_grad=True)


def one_by_one(ops, x, sizes):
    """Runs every op alone. Returns the output, and the arguments that were made on the way, by position."""
    given_to = []
    for op in ops:
        given_to.append({name: value_for(name, x, sizes) for name, k in op.keywords.items() if k.required})
        x = op(x, **given_to[-1])
    return x, given_to


def keys_of(ops, draw):
    """For every op one of the ways to address it."""
    count = len(ops)
    return [draw(st.sampled_from([op, i, i - count, str(i)])) for i, op in enumerate(ops)]


@FAST
@given(data=st.data(), chain=chains(), sizes=st.sampled_from([[3, 0, 4], [0, 0, 0], [1, 1, 1], [0, 7, 0]]))
def test_a_container_is_its_ops_one_by_one(data, chain, sizes):
    ops, width = chain
    x = torch.randn(ROWS, width, dtype=F64, requires_grad=True)
    y, given_to = one_by_one(ops, x, torch.tensor(sizes))
    op_kwargs = {key: kw for key, kw in zip(keys_of(ops, data.draw), given_to, strict=True) if kw}
    got = Sequential(*ops)(x, op_kwargs=op_kwargs)
    leaves = [
        x,
        *(p for op in ops for p in op.parameters()),
        *(v for kw in given_to for v in kw.values() if v.requires_grad),
    ]

    assert_equal_in_valid_rows(got, y, leaves, sum(sizes))


def assert_equal_in_valid_rows(got, want, leaves, valid):
    """Values and gradients, but for the tail, which elementwise ops leave unspecified."""
    torch.testing.assert_close(got[:valid], want[:valid])
    if got.requires_grad:
        dy = torch.randn_like(got)
        dy[valid:] = 0
        both = [torch.autograd.grad(t, leaves, dy, allow_unused=True) for t in (got, want)]
        for mine, theirs in zip(*both, strict=True):
            ends = [t[:valid] if t is not None and t.shape[:1] == (ROWS,) else t for t in (mine, theirs)]
            torch.testing.assert_close(*ends)


@FAST
@given(data=st.data(), chain=chains())
def test_positional_arguments_are_the_required_keywords_in_order(data, chain):
    ops, width = chain
    x, sizes = torch.randn(ROWS, width, dtype=F64), torch.tensor([2, 5, 0])
    y, given_to = one_by_one(ops, x, sizes)
    extra = [value for keywords in given_to for value in keywords.values()]

    torch.testing.assert_close(Sequential(*ops)(x, *extra), y)


@FAST
@given(data=st.data(), chain=chains())
def test_frozen_parts_change_no_other_gradient(data, chain):
    ops, width = chain
    x = torch.randn(ROWS, width, dtype=F64, requires_grad=data.draw(st.booleans()))
    _, given_to = one_by_one(ops, x, torch.tensor([2, 5, 0]))
    leaves = [p for op in ops for p in op.parameters()] + [v for kw in given_to for v in kw.values() if v.requires_grad]
    for leaf in leaves:
        leaf.requires_grad_(data.draw(st.booleans()))
    wanted = [t for t in (x, *leaves) if t.requires_grad]
    op_kwargs = {i: keywords for i, keywords in enumerate(given_to) if keywords}
    want = one_by_one_again(ops, x, given_to)

    assert_equal_in_valid_rows(Sequential(*ops)(x, op_kwargs=op_kwargs), want, wanted, ROWS)


def one_by_one_again(ops, x, given_to):
    with config(disable_fusions={"GroupedMLP", "GroupedLinearGLU", "GLUScale"}):
        for op, keywords in zip(ops, given_to, strict=True):
            x = op(x, **keywords)
    return x


@FAST
@given(
    sizes=splits,
    tail=st.integers(0, 3),
    place=st.sampled_from(["none", "before", "after"]),
    fused=st.booleans(),
    name=names,
)
def test_nan_in_the_tail_reaches_nothing(sizes, tail, place, fused, name):
    valid = sum(sizes)
    one, two = GroupedLinear(E, 4, 12, dtype=F64), GroupedLinear(E, 6, 2, dtype=F64)
    ops = {
        "none": [one, GLU(name), two],
        "before": [one, GLU(name), Scale(), two],
        "after": [one, GLU(name), two, Scale()],
    }
    x = torch.randn(valid + tail, 4, dtype=F64)
    scales = torch.rand(valid + tail, dtype=F64)
    dy = torch.randn(valid + tail, 2, dtype=F64)
    for t in (x, scales, dy):
        t[valid:] = float("nan")
    given_to = {} if place == "none" else {"scales": scales.requires_grad_()}
    with config(disable_fusions=set() if fused else {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}):
        y = Sequential(*ops[place])(x.requires_grad_(), split_sizes=sizes, **given_to)
        leaves = [x, *given_to.values(), *one.parameters(), *two.parameters()]
        grads = torch.autograd.grad(y, leaves, dy)

    t = {"scales": None, "out": None, **({"before": {"scales": scales}, "after": {"out": scales}}.get(place, {}))}
    t = {k: None if v is None else v[:valid] for k, v in t.items()}
    want = mlp(x[:valid], sizes, glu(name), w1=one.weight, b1=one.bias, w2=two.weight, b2=two.bias, **t)
    expected = torch.autograd.grad(want, leaves, dy[:valid])
    torch.testing.assert_close(y[:valid], want)
    for mine, theirs, leaf in zip(grads, expected, leaves, strict=True):
        rows = slice(0, valid if leaf is x or leaf is scales else None)
        torch.testing.assert_close(mine[rows], theirs[rows])


@FAST
@given(sizes=splits, tail=st.integers(0, 3), layout=st.sampled_from(["NT", "NN", "TN"]))
def test_grouped_gemm_is_a_product_a_group(sizes, tail, layout):
    rows, ends = sum(sizes) + tail, torch.tensor(sizes).cumsum(0).tolist()
    a = torch.randn(rows, 3, dtype=F64)
    b = torch.randn((rows, 2) if layout == "TN" else (E, 2, 3) if layout == "NT" else (E, 3, 2), dtype=F64)
    c = grouped_gemm(a, b, torch.tensor(sizes), layout=layout)

    for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
        at = slice(end - size, end)
        if layout == "TN":
            torch.testing.assert_close(c[g], a[at].mT @ b[at])
        else:
            torch.testing.assert_close(c[at], a[at] @ (b[g].mT if layout == "NT" else b[g]))


@FAST
@given(chain=chains(), times=st.integers(1, 3))
def test_calling_again_gives_the_same_bits(chain, times):
    ops, width = chain
    x, sizes = torch.randn(ROWS, width, dtype=F64), torch.tensor([2, 4, 0])
    _, given_to = one_by_one(ops, x, sizes)
    model, op_kwargs = Sequential(*ops), {i: keywords for i, keywords in enumerate(given_to) if keywords}
    first = model(x, op_kwargs=op_kwargs)

    assert all(isinstance(op, Op) for op in model)
    for _ in range(times):
        torch.testing.assert_close(model(x, op_kwargs=op_kwargs), first, rtol=0, atol=0, equal_nan=True)
