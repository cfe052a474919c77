"""``fusible.jax`` under jax's transformations; on the CPU, by jax's products and by the kernels' sources."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("jax", reason="jax is not installed")
import jax
import jax.numpy as jnp
from emulation import build
from jax.sharding import AxisType, PartitionSpec
from jax_emulation import installed, kernels
from jax_problems import Experts, array, assert_close, exact, product64, seeded, wgrad64

import fusible.jax
from fusible.jax import extension

MISSING = build.missing()
ROWS = PartitionSpec("x")
ALL = PartitionSpec()
SIZES = (5, 0, 9)


@pytest.fixture(
    params=[
        "xla",
        pytest.param("kernels", marks=[pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]),
    ]
)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with installed() if request.param == "kernels" else fusible.jax.config(backend="xla"):
        yield request.param


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    random = seeded()
    return array(random, 20, 16), array(random, 3, 16, 24), jnp.array(SIZES, jnp.int32)


@pytest.mark.parametrize(
    "transform",
    [lambda f, x: jax.jvp(f, (x,), (x,)), lambda f, x: jax.jacfwd(f)(x), lambda f, x: jax.hessian(f)(x)],
    ids=["jvp", "jacfwd", "hessian"],
)
def test_forward_mode_is_refused(transform: Any) -> None:
    """As docs/jax.md says; second derivatives of products are those of the reverse mode."""
    x, weights, sizes = operands()

    def loss(x: Any) -> Any:
        return jnp.sum(jnp.square(fusible.jax.ragged_dot(x, weights, sizes)))

    with pytest.raises(TypeError, match="can't apply forward-mode autodiff"):
        transform(loss, x)
    assert jax.jacrev(jax.grad(loss))(x).shape == (*x.shape, *x.shape)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0)], ids=str)
def test_vmap_is_one_call_after_the_other(backend: str, axes: tuple[int | None, ...]) -> None:
    one = operands()
    other = (one[0] * 2, one[1] * -1, jnp.array((1, 12, 0), jnp.int32))
    pairs = [(a, b if axis is not None else a) for a, b, axis in zip(one, other, axes, strict=True)]
    stacked = [jnp.stack(pair) if axis is not None else pair[0] for pair, axis in zip(pairs, axes, strict=True)]

    def rows_and_gradient(a: Any, b: Any, n: Any) -> Any:
        out, pull = jax.vjp(lambda b: fusible.jax.ragged_dot(a, b, n), b)
        return out, pull(out)[0]

    out, grads = jax.vmap(rows_and_gradient, in_axes=axes)(*stacked)

    for i in range(2):
        expected = rows_and_gradient(*[pair[i] for pair in pairs])
        assert np.array_equal(np.asarray(out[i]), np.asarray(expected[0]))
        assert np.array_equal(np.asarray(grads[i]), np.asarray(expected[1]))


def test_vmap_of_experts(backend: str) -> None:
    """Rows and sizes are batched, the weights are not: their gradient is that of each."""
    problem = Experts(sizes=SIZES, tail=2, features=16, columns=24)
    arrays = problem.arrays()
    xs = jnp.stack([arrays["x"], jnp.nan_to_num(arrays["x"]) * 2])
    sizes = jnp.array([SIZES, (0, 12, 1)], jnp.int32)

    def output_and_gradient(x: Any, counts: Any) -> Any:
        y, pull = jax.vjp(lambda w: fusible.jax.grouped_mlp(x, w, arrays["w2"], counts), arrays["w13"])
        return y, pull(y)[0]

    together = jax.vmap(output_and_gradient)(xs, sizes)

    for i in range(2):
        for found, expected in zip(together, output_and_gradient(xs[i], sizes[i]), strict=True):
            assert np.array_equal(np.asarray(found[i]), np.asarray(expected))


def layers(problem: Experts, checkpointed: bool) -> Any:
    """Two layers of experts in a scan over their stacked weights, and the gradients of the sum."""
    arrays, counts = problem.arrays(), jnp.array(problem.sizes, jnp.int32)
    x = jnp.nan_to_num(arrays.pop("x"))
    weights = {name: jnp.stack([value, value * 0.5]) for name, value in arrays.items()}

    def layer(x: Any, weights: Any) -> Any:
        return x + fusible.jax.grouped_mlp(x, sizes=counts, **weights), None

    policy = jax.checkpoint_policies.save_only_these_names("fusible_pre")
    body = jax.checkpoint(layer, policy=policy) if checkpointed else layer

    def loss(x, weights):
        return jnp.sum(jax.lax.scan(body, x, weights)[0].astype(jnp.float32) ** 2)

    return jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weights)


def test_scan_and_checkpoint_change_nothing(backend: str) -> None:
    problem = Experts(sizes=SIZES, tail=2, features=16, columns=24)
    straight, again = layers(problem, False), layers(problem, True)

    for a, b in zip(jax.tree.leaves(straight), jax.tree.leaves(again), strict=True):
        assert_close(a, exact(b), roundings=2, dtype=jnp.bfloat16)


def test_a_donated_buffer_is_written_in_place(backend: str) -> None:
    a, _, counts = operands()
    into = array(seeded(1), 3, 16, 24, dtype=jnp.float32)
    dy, before = array(seeded(2), 20, 24), exact(into)
    run = jax.jit(lambda a, dy, into, n: fusible.jax.grouped_gemm(a, dy, last_dims=n, into=into), donate_argnums=2)
    address = into.unsafe_buffer_pointer()
    kept = fusible.jax.grouped_gemm(a, dy, last_dims=counts, into=into)
    assert np.array_equal(exact(into), before)
    out = run(a, dy, into, counts)

    assert into.is_deleted()
    assert out.unsafe_buffer_pointer() == address
    assert np.array_equal(np.asarray(out), np.asarray(kept))
    assert_close(out, before + wgrad64(a, dy, SIZES), roundings=10)


def shards(check_vma: bool, specs: tuple[Any, ...], function: Any) -> Any:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=ROWS, check_vma=check_vma)


COUNTS = jnp.array([3, 0, 2, 0, 5, 0, 1, 1, 1, 0, 0, 4], jnp.int32)  # of three groups on each of four devices


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("weights", [ALL, ROWS], ids=["replicated", "sharded"])
def test_shard_map(backend: str, weights: Any, check_vma: bool) -> None:
    """Local rows, local groups, local sizes; gradients of replicated weights are summed over the axis."""
    random = seeded()
    a = array(random, 20, 16)
    b = array(random, 3 if weights is ALL else 12, 16, 24)
    run = shards(
        check_vma, (ROWS, weights, ROWS), lambda *o: fusible.jax.ragged_dot(*o, preferred_element_type=jnp.float32)
    )
    out = jax.jit(run)(a, b, COUNTS)
    da, db = jax.jit(jax.grad(lambda a, b: jnp.sum(run(a, b, COUNTS)), (0, 1)))(a, b)
    wgrads = []
    for i in range(4):
        rows, sizes = slice(5 * i, 5 * i + 5), COUNTS[3 * i : 3 * i + 3].tolist()
        local, ones = (b if weights is ALL else b[3 * i : 3 * i + 3]), jnp.ones((5, 24), jnp.bfloat16)
        assert_close(out[rows], product64(a[rows], local, sizes), roundings=10)
        assert_close(da[rows], product64(ones, local, sizes, transpose=True))
        wgrads.append(wgrad64(a[rows], ones, sizes))
    whole = sum(wgrads[1:], wgrads[0]) if weights is ALL else np.concatenate(wgrads)

    assert_close(db, exact(whole), roundings=3)


@pytest.mark.parametrize("check_vma", [True, False])
def test_experts_in_shard_map(backend: str, check_vma: bool) -> None:
    problem = Experts(sizes=(3, 0, 2), tail=0, features=16, columns=24, biases=jnp.float32)
    arrays = problem.arrays()
    x, probs = (jnp.concatenate([arrays.pop(name)] * 4) for name in ("x", "probs"))
    counts, names = jnp.array([3, 0, 2] * 4, jnp.int32), list(arrays)
    run = shards(
        check_vma,
        (ROWS, ROWS, ROWS, *[ALL] * len(names)),
        lambda x, probs, n, *rest: fusible.jax.grouped_mlp(
            x, sizes=n, probs=probs, **dict(zip(names, rest, strict=True))
        ),
    )

    def loss(x, probs, *rest):
        return jnp.sum(run(x, probs, counts, *rest).astype(jnp.float32))

    grads = jax.jit(jax.grad(loss, tuple(range(2 + len(names)))))(x, probs, *arrays.values())
    one = problem.reference({"x": x[:5], "probs": probs[:5], **arrays}, jnp.ones((5, 16)))

    for name, grad in zip(("x", "probs", *names), grads, strict=True):
        first = grad[:5] if name in ("x", "probs") else grad / 4  # each device adds the same
        assert_close(first, one[name], roundings=6, dtype=jnp.bfloat16)


def test_export_for_a_gpu_on_a_machine_without() -> None:
    """The targets keep their names, which stand in the exported program."""
    if MISSING is not None:
        pytest.skip(MISSING)
    a, b, counts = operands()
    library = extension.Kernels(kernels().library, "cuda")
    with installed(), patch.object(extension, "kernels", lambda: library):
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in fusible.jax.info()["targets"]]
        run = jax.jit(lambda *operands: fusible.jax.ragged_dot(*operands))
        exported = jax.export.export(run, platforms=["cuda", "cpu"], disabled_checks=allowed)(a, b, counts)

    assert "fusible_grouped_gemm_v1" in exported.mlir_module()
    assert_close(exported.call(a, b, counts), product64(a, b, SIZES))


def test_a_step_is_exported_for_a_gpu() -> None:
    """Forward and backward of experts, by the same names."""
    if MISSING is not None:
        pytest.skip(MISSING)
    problem = Experts(sizes=SIZES, tail=2, features=16, columns=24, biases=jnp.float32)
    arrays, counts = jax.tree.map(jnp.nan_to_num, problem.arrays()), jnp.array(SIZES, jnp.int32)
    library = extension.Kernels(kernels().library, "cuda")

    def step(arrays: dict[str, Any], counts: Any) -> Any:
        def loss(arrays: dict[str, Any]) -> Any:
            return jnp.sum(fusible.jax.grouped_mlp(sizes=counts, **arrays).astype(jnp.float32))

        return jax.value_and_grad(loss)(arrays)

    with installed(), patch.object(extension, "kernels", lambda: library):
        allowed = [jax.export.DisabledSafetyCheck.custom_call(name) for name in fusible.jax.info()["targets"]]
        exported = jax.export.export(jax.jit(step), platforms=["cuda", "cpu"], disabled_checks=allowed)(arrays, counts)
    found = set(re.findall(r"fusible_(\w+)_v1", exported.mlir_module()))
    loss, grads = exported.call(arrays, counts)

    assert found == {"linear_activation", "linear_activation_backward", "grouped_gemm", "column_sums"}
    with fusible.jax.config(backend="xla"):
        expected_loss, expected = step(arrays, counts)
    assert_close(loss, exact(expected_loss), dtype=jnp.bfloat16)
    for name, grad in grads.items():
        assert_close(grad, exact(expected[name]), dtype=jnp.bfloat16)


@pytest.mark.slow
def test_kernels_are_compiled_no_slower_than_the_products_of_jax() -> None:
    """A program of six calls: there is nothing in it that XLA would compile."""
    if MISSING is not None:
        pytest.skip(MISSING)
    problem = Experts(sizes=SIZES, tail=2, features=16, columns=24)
    arrays, counts = jax.tree.map(jnp.nan_to_num, problem.arrays()), jnp.array(SIZES, jnp.int32)

    def experts_of_jax(x: Any, w13: Any, w2: Any, sizes: Any, probs: Any) -> Any:
        gate, up = jnp.split(jax.lax.ragged_dot(x, w13, sizes), 2, axis=1)
        return jax.lax.ragged_dot((jax.nn.silu(gate) * up * probs[:, None]).astype(x.dtype), w2, sizes)

    def compiled(layer: Any) -> tuple[float, str]:
        def loss(arrays: dict[str, Any]) -> Any:
            return jnp.sum(layer(sizes=counts, **arrays).astype(jnp.float32))

        start = time.perf_counter()
        text = jax.jit(jax.grad(loss)).lower(arrays).compile().as_text()
        return time.perf_counter() - start, text

    with installed():
        ours, text = compiled(fusible.jax.grouped_mlp)
    theirs, _ = compiled(experts_of_jax)

    assert ours < theirs
    assert not re.search(r"= \S+ (copy|transpose|dot|convert)\(", text)


def test_partitioned_without_shard_map_it_is_right(backend: str) -> None:
    """XLA gathers the operands first."""
    a, b, counts = operands()
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(a, jax.NamedSharding(mesh, ROWS))
    whole = [jax.device_put(value, jax.NamedSharding(mesh, ALL)) for value in (b, counts)]

    assert_close(jax.jit(lambda *o: fusible.jax.ragged_dot(*o))(spread, *whole), product64(a, b, SIZES))
