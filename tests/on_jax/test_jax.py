"""``fusible.jax`` against float64: by jax's own products, and by the kernels' sources on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("jax", reason="jax is not installed")
import jax
import jax.numpy as jnp
from checks.device import needs_hopper
from emulation import build
from jax.test_util import check_grads
from jax_emulation import installed
from jax_problems import (
    RAGGED,
    TAIL,
    Experts,
    array,
    assert_close,
    exact,
    poisoned,
    product64,
    rows_of_groups,
    seeded,
    wgrad64,
)

import fusible.jax
from fusible.jax import activation, extension, fallback
from fusible.ops.programs.activations import ACTIVATIONS, CURVES

NEEDS_EMULATION = pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")


EMULATED = pytest.param("kernels", marks=[NEEDS_EMULATION, pytest.mark.slow])
HOPPER = pytest.param("hopper", marks=[pytest.mark.cuda, needs_hopper])


@pytest.fixture(params=["xla", EMULATED, HOPPER])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test by jax's products, by the kernels' sources on the CPU, and on a GPU."""
    name = request.param
    ways = {
        "xla": lambda: fusible.jax.config(backend="xla"),
        "kernels": installed,
        "hopper": lambda: fusible.jax.config(strict=True),
    }
    with ways[name]():
        yield name


def operands(k: int, n: int, dtype: Any, sizes: tuple[int, ...] = RAGGED, tail: int = TAIL) -> tuple[jax.Array, ...]:
    random = seeded()
    lhs = poisoned(array(random, sum(sizes) + tail, k, dtype=dtype), sizes)
    return lhs, array(random, len(sizes), k, n, dtype=dtype), jnp.array(sizes, jnp.int32)


SHAPES = [(24, 40), (136, 72), (20, 9)]  # the last by the kernel for any numbers of features


@pytest.mark.parametrize(("dtype", "wide"), [(jnp.bfloat16, False), (jnp.bfloat16, True), (jnp.float16, False)])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_rows_are_ragged(backend: str, k: int, n: int, dtype: Any, wide: bool) -> None:
    lhs, rhs, sizes = operands(k, n, dtype)
    out = jnp.float32 if wide else dtype
    by_dot = fusible.jax.ragged_dot(lhs, rhs, sizes, preferred_element_type=out)
    transposed = fusible.jax.grouped_gemm(
        lhs, jnp.swapaxes(rhs, 1, 2), first_dims=sizes, transpose_rhs=True, preferred_element_type=out
    )

    assert by_dot.dtype == out
    assert_close(by_dot, product64(lhs, rhs, RAGGED))
    assert_close(transposed, product64(lhs, rhs, RAGGED))
    assert not np.any(np.asarray(by_dot[sum(RAGGED) :]))


@pytest.mark.parametrize(("m", "n", "dtype"), [(136, 72, jnp.bfloat16), (24, 40, jnp.float16), (20, 9, jnp.bfloat16)])
def test_the_contraction_is_ragged(backend: str, m: int, n: int, dtype: Any) -> None:
    random, rows = seeded(), sum(RAGGED) + TAIL
    lhs, rhs = (poisoned(array(random, rows, columns, dtype=dtype), RAGGED) for columns in (m, n))
    sizes = jnp.array(RAGGED, jnp.int32)
    out = fusible.jax.grouped_gemm(lhs, rhs, last_dims=sizes)
    into = array(random, len(RAGGED), m, n, dtype=jnp.float32)
    added = fusible.jax.grouped_gemm(lhs, rhs, last_dims=sizes, into=into)

    assert_close(out, wgrad64(lhs, rhs, RAGGED))
    assert not np.any(np.asarray(out[1]))  # of an empty group
    assert added.dtype == jnp.float32
    assert_close(added, exact(into) + wgrad64(lhs, rhs, RAGGED), roundings=4)


@pytest.mark.parametrize(("sizes", "tail"), [((0, 0, 0), 5), ((1,), 0), ((0, 40, 0), 5), ((130, 3), 0)], ids=str)
def test_groups_of_any_sizes(backend: str, sizes: tuple[int, ...], tail: int) -> None:
    lhs, rhs, counts = operands(16, 24, jnp.bfloat16, sizes, tail)
    grads = array(seeded(1), lhs.shape[0], 24)

    assert_close(fusible.jax.ragged_dot(lhs, rhs, counts), product64(lhs, rhs, sizes))
    assert_close(fusible.jax.grouped_gemm(lhs, grads, last_dims=counts), wgrad64(lhs, grads, sizes))


def check_groups(groups: int) -> None:
    """Those on both sides of a window's end have rows."""
    sizes = tuple(3 if g in (510, 511, 512, groups - 1) else int(g % 97 == 5) for g in range(groups))
    lhs, rhs, counts = operands(16, 24, jnp.bfloat16, sizes, 5)
    grads = array(seeded(1), lhs.shape[0], 24)

    assert_close(fusible.jax.ragged_dot(lhs, rhs, counts), product64(lhs, rhs, sizes))
    assert_close(fusible.jax.grouped_gemm(lhs, grads, last_dims=counts), wgrad64(lhs, grads, sizes))


@pytest.mark.parametrize("groups", [513, 896, 4096])
def test_groups_of_several_windows(backend: str, groups: int) -> None:
    check_groups(groups)


@pytest.mark.parametrize("backend", [EMULATED, HOPPER], indirect=True)
@pytest.mark.parametrize("groups", [511, 512, 2048])
def test_numbers_of_groups_of_our_kernels(backend: str, groups: int) -> None:
    check_groups(groups)


def test_sizes_beyond_the_rows_are_cut_off(backend: str) -> None:
    lhs, rhs, _ = operands(16, 24, jnp.bfloat16, (30, 10), 0)
    out = fusible.jax.ragged_dot(lhs, rhs, jnp.array([30, 1000], jnp.int32))

    assert_close(out, product64(lhs, rhs, (30, 10)))
    if backend != "xla":
        with pytest.raises(RuntimeError, match="the size of group 1 is 1000"):
            extension.kernels().library.raise_wrong_sizes(0)


WRONG = {  # of 40 rows, and what is taken instead
    (30, 20, 1000): (30, 10, 0),
    (-5, 25, -(2**31)): (0, 25, 0),
    (2**31 - 1, 2**31 - 1, 1): (40, 0, 0),
    (12, -3, 2**31 - 1): (12, 0, 28),
}


@pytest.mark.parametrize("asked", WRONG, ids=str)
@pytest.mark.parametrize(("k", "n"), [(16, 24), (20, 9)])
def test_wrong_sizes_are_cut_to_the_rows(backend: str, k: int, n: int, asked: tuple[int, ...]) -> None:
    """Below 0 they count as 0; with features for either kernel."""
    sizes, counts = WRONG[asked], jnp.array(asked, jnp.int32)
    lhs, rhs, _ = operands(k, n, jnp.bfloat16, sizes, 40 - sum(sizes))
    bias, dy = array(seeded(2), 3, n), poisoned(array(seeded(3), 40, n), sizes)
    y, pull = jax.vjp(lambda *a: fusible.jax.grouped_gemm(*a[:2], first_dims=counts, bias=a[2]), lhs, rhs, bias)
    dlhs, drhs, dbias = pull(dy)

    assert_close(y, product64(lhs, rhs, sizes, bias=bias))
    assert_close(dlhs, product64(dy, rhs, sizes, transpose=True))
    assert_close(drhs, wgrad64(lhs, dy, sizes))
    assert_close(dbias, torch.stack([exact(dy)[rows].sum(0) for rows in rows_of_groups(sizes)]), roundings=2)
    if backend != "xla" and k % 8 == 0:
        with pytest.raises(RuntimeError, match="the size of group"):
            extension.kernels().library.raise_wrong_sizes(0)


@pytest.mark.parametrize("asked", WRONG, ids=str)
@pytest.mark.parametrize("form", ["swiglu", "probabilities after, biases", "odd columns"])
def test_wrong_sizes_of_experts_are_cut_to_the_rows(backend: str, form: str, asked: tuple[int, ...]) -> None:
    sizes = WRONG[asked]
    check_experts(Experts(**{**FORMS[form], "sizes": sizes, "tail": 40 - sum(sizes)}), asked=asked)
    if backend != "xla" and form != "odd columns":
        with pytest.raises(RuntimeError, match="the size of group"):
            extension.kernels().library.raise_wrong_sizes(0)


def test_one_compiled_program_takes_all_sizes(backend: str) -> None:
    lhs, rhs, _ = operands(16, 24, jnp.bfloat16, (30, 0, 10), 6)
    lhs, run = jnp.nan_to_num(lhs), jax.jit(lambda *a: fusible.jax.ragged_dot(*a))
    for sizes in ((30, 0, 10), (0, 0, 0), (1, 45, 0), (15, 15, 16)):
        assert_close(run(lhs, rhs, jnp.array(sizes, jnp.int32)), product64(lhs, rhs, sizes))
    assert run._cache_size() == 1


def test_bias_into_and_leading_dimensions(backend: str) -> None:
    random, sizes = seeded(), (20, 0, 10)
    lhs, rhs, counts = operands(16, 24, jnp.bfloat16, sizes, 6)
    lhs = lhs.reshape(4, 9, 16)
    bias, into = array(random, 3, 24, dtype=jnp.float32), array(random, 4, 9, 24, dtype=jnp.float32)
    out = fusible.jax.grouped_gemm(lhs, rhs, first_dims=counts, bias=bias, preferred_element_type=jnp.float32)
    added = fusible.jax.grouped_gemm(lhs, rhs, first_dims=counts, into=into)
    flat = lhs.reshape(-1, 16)

    assert out.shape == added.shape == (4, 9, 24)
    assert_close(out.reshape(-1, 24), product64(flat, rhs, sizes, bias=bias))
    assert_close(added.reshape(-1, 24), exact(into).reshape(-1, 24) + product64(flat, rhs, sizes), roundings=4)


@pytest.mark.parametrize("into", [False, True], ids=["", "into"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_gradients_of_ragged_rows(backend: str, transposed: bool, into: bool) -> None:
    lhs, rhs, counts = operands(24, 40, jnp.bfloat16)
    rhs = jnp.swapaxes(rhs, 1, 2) if transposed else rhs
    bias, dy = array(seeded(2), len(RAGGED), 40), poisoned(array(seeded(3), lhs.shape[0], 40), RAGGED)
    start = array(seeded(4), lhs.shape[0], 40) if into else None

    def run(lhs: Any, rhs: Any, bias: Any, start: Any) -> Any:
        return fusible.jax.grouped_gemm(lhs, rhs, first_dims=counts, transpose_rhs=transposed, bias=bias, into=start)

    _, pull = jax.vjp(run, lhs, rhs, bias, start)
    dlhs, drhs, dbias, dstart = pull(dy)
    dw = wgrad64(lhs, dy, RAGGED)

    assert_close(dlhs, product64(dy, rhs, RAGGED, transpose=not transposed))
    assert_close(drhs, dw.mT if transposed else dw)
    assert_close(dbias, torch.stack([exact(dy)[rows].sum(0) for rows in rows_of_groups(RAGGED)]), roundings=2)
    assert dstart is None or np.array_equal(np.asarray(dstart), np.asarray(dy), equal_nan=True)


def test_gradients_of_a_ragged_contraction(backend: str) -> None:
    random, rows = seeded(), sum(RAGGED) + TAIL
    lhs, rhs = (poisoned(array(random, rows, columns), RAGGED) for columns in (24, 40))
    counts, dout = jnp.array(RAGGED, jnp.int32), array(random, len(RAGGED), 24, 40)
    _, pull = jax.vjp(lambda a, b: fusible.jax.grouped_gemm(a, b, last_dims=counts), lhs, rhs)
    dlhs, drhs = pull(dout)

    assert_close(dlhs, product64(rhs, dout, RAGGED, transpose=True))
    assert_close(drhs, product64(lhs, dout, RAGGED))


def test_second_derivatives(backend: str) -> None:
    """Gradients are products, which have gradients: d/dW of sum(dlhs ** 2)."""
    lhs, rhs, counts = operands(16, 8, jnp.bfloat16, (9, 4), 3)
    lhs = jnp.nan_to_num(lhs)

    def of_gradient(rhs: Any) -> Any:
        dlhs = jax.grad(lambda a: fusible.jax.ragged_dot(a, rhs, counts).astype(jnp.float32).sum())(lhs)
        return (dlhs.astype(jnp.float32) ** 2).sum()

    weights = exact(rhs).requires_grad_()
    rows = torch.cat([weights[g].sum(1).expand(n, 16) for g, n in enumerate((9, 4))])
    rows.square().sum().backward()

    assert weights.grad is not None
    assert_close(jax.grad(of_gradient)(rhs), weights.grad, roundings=2)


@pytest.mark.parametrize("ragged", ["rows", "transposed", "contraction"])
def test_gradients_of_both_orders_by_finite_differences(ragged: str) -> None:
    """In float32, by jax's own test; products alone have a second derivative."""
    random, counts = seeded(), jnp.array((5, 0, 2), jnp.int32)
    lhs, rhs = array(random, 9, 4, dtype=jnp.float32), array(random, 3, 4, 3, dtype=jnp.float32)
    calls = {
        "rows": (lambda a, b: fusible.jax.grouped_gemm(a, b, first_dims=counts), rhs),
        "transposed": (
            lambda a, b: fusible.jax.grouped_gemm(a, b, first_dims=counts, transpose_rhs=True),
            jnp.swapaxes(rhs, 1, 2),
        ),
        "contraction": (lambda a, b: fusible.jax.grouped_gemm(a, b, last_dims=counts), lhs[:, :3] * 2),
    }
    function, right = calls[ragged]

    check_grads(function, (lhs, right), order=2, modes=("rev",), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("form", ["swiglu", "probabilities after", "not gated"])
def test_gradients_of_experts_by_finite_differences(form: str) -> None:
    problem = Experts(**FORMS[form] | {"sizes": (4, 0, 2), "features": 4, "columns": 3, "dtype": jnp.float32})
    arrays = jax.tree.map(jnp.nan_to_num, problem.arrays())
    counts = jnp.array(problem.sizes, jnp.int32)

    for name, value in arrays.items():  # one by one: each is checked in a single direction

        def run(value: Any, name: str = name) -> Any:
            return fusible.jax.grouped_mlp(sizes=counts, **arrays | {name: value}, **problem.call_keywords())

        check_grads(run, (value,), order=1, modes=("rev",), rtol=2e-2, atol=1e-2, eps=2e-3)


def test_products_without_depth_are_their_bias() -> None:
    sizes, bias = jnp.array([2, 1], jnp.int32), jnp.ones((2, 8))
    y = fusible.jax.grouped_gemm(jnp.ones((4, 0)), jnp.ones((2, 0, 8)), first_dims=sizes, bias=bias)
    assert y.tolist() == [[1.0] * 8] * 3 + [[0.0] * 8]
    assert fusible.jax.grouped_gemm(jnp.ones((4, 0)), jnp.ones((4, 8)), last_dims=sizes).shape == (2, 0, 8)
    x, w13, w2 = jnp.ones((4, 0)), jnp.ones((2, 0, 16)), jnp.ones((2, 8, 0))
    assert fusible.jax.grouped_mlp(x, w13, w2, sizes).shape == (4, 0)


def test_ragged_dot_is_called_as_that_of_jax() -> None:
    ours, theirs = (inspect.signature(function).parameters for function in (fusible.jax.ragged_dot, jax.lax.ragged_dot))

    assert [(p.name, p.kind, p.default) for p in ours.values()] == [
        (p.name, p.kind, p.default) for p in theirs.values()
    ]


def check_experts(problem: Experts, roundings: float = 4, asked: tuple[int, ...] | None = None) -> None:
    """Forward and all gradients; ``asked``: the sizes of the call, where they are not those of the problem."""
    arrays, counts = problem.arrays(), jnp.array(asked or problem.sizes, jnp.int32)
    dy = poisoned(array(seeded(5), problem.rows, problem.features, dtype=problem.dtype), problem.sizes)

    def run(arrays: dict[str, Any]) -> Any:
        return fusible.jax.grouped_mlp(sizes=counts, **arrays, **problem.call_keywords())

    y, pull = jax.jit(lambda arrays, dy: (lambda y, pull: (y, pull(dy)))(*jax.vjp(run, arrays)))(arrays, dy)
    reference = problem.reference(arrays, dy)

    assert_close(y, reference.pop("y"), roundings, problem.dtype)
    assert reference.keys() == arrays.keys()
    for name, grad in pull[0].items():
        assert grad.dtype == arrays[name].dtype
        assert_close(grad, reference[name], roundings, problem.dtype)


FORMS: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "weights [G, out, in], biases": {"biases": jnp.bfloat16, "layout": "nk"},
    "no probabilities, no tail": {"probs": None, "tail": 0},
    "probabilities in bfloat16, interleaved": {
        "probs": jnp.bfloat16,
        "keywords": {"interleave": 8},
        "layout": "nk",
    },
    "probabilities after": {"keywords": {"probs_at": "output"}},
    "probabilities after, biases": {"biases": jnp.float32, "keywords": {"probs_at": "output"}},
    "gpt-oss": {
        "biases": jnp.bfloat16,
        "keywords": {"alpha": 1.702, "limit": 1.5, "linear_offset": 1.0, "interleave": 1},
    },
    "not gated": {"keywords": {"gated": False, "activation": "relu2"}},
    "odd columns": {"features": 20, "columns": 6, "biases": jnp.float32, "keywords": {"probs_at": "output"}},
    "blocks that no tile holds": {"columns": 48, "keywords": {"interleave": 24}},
    "empty": {"sizes": (0, 0), "tail": 3},
    "float16": {"dtype": jnp.float16, "biases": jnp.float16},
}


@pytest.mark.parametrize("form", FORMS)
def test_experts(backend: str, form: str) -> None:
    check_experts(Experts(**FORMS[form]))


@pytest.mark.parametrize("gated", [True, False], ids=["gated", ""])
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
def test_activations(name: str, gated: bool) -> None:
    """As functions of jax; the kernels have them by number."""
    problem = Experts(columns=24, dtype=jnp.float32, keywords={"activation": name, "gated": gated})
    spec = activation.activation(name, gated, None, 1.0, 0.0, None)
    preact = array(seeded(), 6, 48 if gated else 24, dtype=jnp.float32)
    postact, pull = jax.vjp(lambda preact: activation.activate(preact, spec), preact)
    dpostact, rows = array(seeded(1), 6, 24, dtype=jnp.float32), exact(preact).requires_grad_()
    expected = problem.activate(rows)
    expected.backward(exact(dpostact))

    assert_close(postact, expected.detach(), roundings=4)
    assert_close(pull(dpostact)[0], torch.as_tensor(rows.grad), roundings=4)


def test_numbers_of_activations_are_those_of_the_kernels() -> None:
    assert tuple(CURVES) == activation.CURVES
    assert activation.ACTIVATIONS == ACTIVATIONS


def test_float32_runs_by_jax() -> None:
    check_experts(Experts(dtype=jnp.float32, biases=jnp.float32), roundings=40)


def test_products_of_the_fallback_are_those_of_ragged_dot() -> None:
    lhs, rhs, sizes = operands(24, 40, jnp.float32)
    lhs = jnp.nan_to_num(lhs)

    expected = jax.lax.ragged_dot(lhs, rhs, sizes)
    assert np.array_equal(np.asarray(fusible.jax.ragged_dot(lhs, rhs, sizes)), np.asarray(expected))


def test_groups_of_rows() -> None:
    sizes = jnp.array([2, 0, 1], jnp.int32)

    assert fallback.group_of_rows(sizes, 5).tolist() == [0, 0, 2, 2, 2]
    assert fallback.in_a_group(sizes, 5).tolist() == [True, True, True, False, False]
