"""How ``fusible.jax`` comes up: without torch, beside it, with a jax that takes its handlers or not; and its errors."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax", reason="jax is not installed")
import jax
import jax.numpy as jnp
import numpy as np
from emulation import build
from jax_emulation import installed
from jax_emulation import kernels as emulated

import fusible.jax
from fusible.jax import checks, dispatch, extension
from fusible.jax.extension import Version

ROOT = Path(__file__).resolve().parents[2]


def run(code: str) -> str:
    """The output of a fresh interpreter."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_it_imports_no_torch() -> None:
    code = """
import sys, fusible, fusible.jax
import jax.numpy as jnp
y = fusible.jax.ragged_dot(jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array([1, 2], jnp.int32))
print(sorted({"torch", "networkx", "fusible.ops", "fusible.fuser"} & set(sys.modules)), float(y.sum()))
"""
    assert run(code) == "[] 192.0\n"


@pytest.mark.parametrize("order", [("fusible.jax", "torch"), ("torch", "fusible.jax"), ("fusible.ops", "fusible.jax")])
def test_both_frameworks_in_one_process(order: tuple[str, str]) -> None:
    code = f"""
import {order[0]}
import {order[1]}
import fusible, jax.numpy as jnp, torch
sizes = [1, 2]
a = fusible.jax.ragged_dot(jnp.ones((4, 8)), jnp.ones((2, 8, 8)), jnp.array(sizes, jnp.int32))
b = fusible.grouped_gemm(torch.ones(4, 8), torch.ones(2, 8, 8), torch.tensor(sizes))
print(torch.equal(torch.from_dlpack(a), b), len([*fusible.fuser.registry]) > 3)
"""
    assert run(code) == "True True\n"


def test_names_are_loaded_once_they_are_asked_for() -> None:
    code = """
import sys, fusible
print("torch" in sys.modules, "Sequential" in dir(fusible), fusible.jax.__name__)
print(fusible.Sequential.__name__, "torch" in sys.modules, fusible.Sequential is fusible.fuser.Sequential)
try:
    fusible.Sequentail
except AttributeError as error:
    print(error)
"""
    first, second, third = run(code).splitlines()

    assert first == "False True fusible.jax"
    assert second == "Sequential True True"
    assert third == "module 'fusible' has no attribute 'Sequentail'"


def test_the_headers_are_those_of_the_oldest_jaxlib() -> None:
    ours = (ROOT / "third_party/xla_ffi/xla/ffi/api/c_api.h").read_text()

    assert "#define XLA_FFI_API_MAJOR 0\n" in ours
    assert "#define XLA_FFI_API_MINOR 3\n" in ours
    assert extension.version_refusal(Version(0, 3), extension.jaxlib_version()) is None


@pytest.mark.parametrize(("handlers", "taken"), [((0, 1), True), ((0, 3), True), ((0, 4), False), ((1, 0), False)])
def test_versions_that_jaxlib_takes(handlers: tuple[int, int], taken: bool) -> None:
    why = extension.version_refusal(Version(*handlers), Version(0, 3))

    assert (why is None) == taken
    assert taken or f"version {Version(*handlers)}" in str(why)


def test_handlers_that_jaxlib_would_refuse_are_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = SimpleNamespace(XLA_FFI_API=(0, 99), xla_handlers=lambda: pytest.fail("registered"))
    monkeypatch.setattr(extension, "_load", lambda: newer)
    extension.kernels.cache_clear()
    extension.unavailable.cache_clear()
    try:
        assert "is built for version 0.99" in str(extension.unavailable())
        assert "is built for version 0.99" in fusible.jax.info()["fallback"]
        assert float(fusible.jax.ragged_dot(*operands()).sum()) == 3 * 8 * 8
    finally:
        extension.kernels.cache_clear()
        extension.unavailable.cache_clear()


def test_handlers_that_jax_refuses_to_register_do_not_break_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise RuntimeError("jax has another handler of that name")

    library = SimpleNamespace(XLA_FFI_API=(0, 1), xla_handlers=lambda: {"row_dots": object()})
    monkeypatch.setattr(extension, "_load", lambda: library)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    extension.kernels.cache_clear()
    extension.unavailable.cache_clear()
    try:
        assert fusible.jax.info()["fallback"] == "jax has another handler of that name"
        assert float(jax.jit(fusible.jax.ragged_dot)(*operands()).sum()) == 3 * 8 * 8
    finally:
        extension.kernels.cache_clear()
        extension.unavailable.cache_clear()


@pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}")
@pytest.mark.slow
def test_handlers_check_what_they_are_given() -> None:
    """Arguments that pass the checks in Python fit; a program from elsewhere gets an error, not a fault."""
    lhs, rhs, sizes = operands()
    empty, target = jnp.zeros((0,), jnp.float32), emulated().target("row_dots")
    call = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((4,), np.float32))
    with pytest.raises(Exception, match="a buffer must have 2 dimensions, got 3"):
        jax.block_until_ready(call(rhs, lhs, sizes))
    with pytest.raises(Exception, match="sizes must be int32 or int64"):
        jax.block_until_ready(call(lhs, rhs[0], empty))
    with pytest.raises(Exception, match="Wrong number of arguments"):
        jax.block_until_ready(call(lhs))


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    return jnp.ones((4, 8), jnp.bfloat16), jnp.ones((2, 8, 8), jnp.bfloat16), jnp.array([1, 2], jnp.int32)


def test_info_says_why_jax_multiplies() -> None:
    info = fusible.jax.info()

    assert info["jax"] == jax.__version__
    assert info["ffi_api"] == str(extension.jaxlib_version())
    if jax.default_backend() == "cpu":
        assert info["fallback"].startswith(("is not built", "needs a CUDA device"))
    with fusible.jax.config(backend="xla"):
        assert fusible.jax.info()["fallback"] == "config(backend='xla') asks for jax.lax.ragged_dot"


def test_strict_raises_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "unavailable", lambda: "is not built (for this test)")
    with (
        fusible.jax.config(strict=True),
        pytest.raises(fusible.jax.RefusedError, match="the Hopper backend is not built"),
    ):
        fusible.jax.ragged_dot(*operands())
    with fusible.jax.config(strict=True, backend="xla"):
        fusible.jax.ragged_dot(*operands())


def test_strict_names_operands_that_no_kernel_takes() -> None:
    if build.missing() is not None:
        pytest.skip(str(build.missing()))
    lhs, rhs, sizes = operands()
    with installed(), pytest.raises(fusible.jax.RefusedError, match="needs bfloat16 or float16 operands, got float32"):
        fusible.jax.ragged_dot(lhs.astype(jnp.float32), rhs.astype(jnp.float32), sizes)


def test_a_fallback_on_a_gpu_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension, "unavailable", lambda: "is not built (for this test)")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    dispatch._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="jax.lax.ragged_dot runs instead"):
        fusible.jax.ragged_dot(*operands())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusible.jax.ragged_dot(*operands())


def test_settings_are_those_of_the_body() -> None:
    with fusible.jax.config(backend="xla"):
        with fusible.jax.config(strict=True) as inner:
            assert (inner.backend, inner.strict) == ("xla", True)
        assert fusible.jax.info()["fallback"].startswith("config")
    with (
        pytest.raises(ValueError, match="backend must be one of auto, hopper, xla, got 'triton'"),
        fusible.jax.config(backend="triton"),
    ):
        pass


def gemm(**changes: Any) -> Callable[[], Any]:
    lhs, rhs, sizes = operands()
    arguments = {"lhs": lhs, "rhs": rhs, "first_dims": sizes} | changes
    return lambda: fusible.jax.grouped_gemm(arguments.pop("lhs"), arguments.pop("rhs"), **arguments)


def mlp(**changes: Any) -> Callable[[], Any]:
    lhs, rhs, sizes = operands()
    arguments = {"x": lhs, "w13": rhs, "w2": jnp.ones((2, 4, 8), jnp.bfloat16), "sizes": sizes} | changes
    return lambda: fusible.jax.grouped_mlp(**arguments)


WRONG: list[tuple[Callable[[], Any], str]] = [
    (gemm(first_dims=None), "grouped_gemm: give first_dims or last_dims, and not both"),
    (gemm(last_dims=operands()[2]), "grouped_gemm: give first_dims or last_dims, and not both"),
    (gemm(lhs=[1.0]), "grouped_gemm: lhs must be an array, got a list"),
    (gemm(lhs=jnp.ones(8)), "grouped_gemm: lhs must have 2 dimensions or more, got shape [8]"),
    (gemm(rhs=jnp.ones((8, 8), jnp.bfloat16)), "grouped_gemm: rhs must have 3 dimensions, got shape [8, 8]"),
    (gemm(lhs=jnp.ones((4, 8), jnp.int32)), "grouped_gemm: lhs must hold real numbers, got int32"),
    (gemm(lhs=jnp.ones((4, 8), jnp.float8_e4m3fn)), "grouped_gemm: lhs must hold numbers of at least 16 bits"),
    (gemm(lhs=jnp.ones((4, 8))), "operands of one dtype expected; lhs has float32, rhs has bfloat16"),
    (gemm(lhs=jnp.ones((4, 16), jnp.bfloat16)), "contracts 16 of lhs with 8 of rhs; they must be equal"),
    (gemm(first_dims=jnp.ones(2)), "first_dims must be an int32 or int64 array [G], got float32 [2]"),
    (gemm(first_dims=[1, 2]), "first_dims must be an int32 or int64 array [G], got a list"),
    (gemm(first_dims=jnp.ones(3, jnp.int32)), "first_dims must have a size for each of 2 groups, got 3"),
    (gemm(bias=jnp.ones((2, 4))), "bias must be [2, 8], got shape [2, 4]"),
    (gemm(into=jnp.ones((4, 4))), "into must be [4, 8], got shape [4, 4]"),
    (gemm(into=jnp.ones((4, 8)), preferred_element_type=jnp.bfloat16), "into must be bfloat16"),
    (gemm(preferred_element_type=jnp.int32), "a result of int32 cannot hold a product of bfloat16"),
    (
        lambda: fusible.jax.grouped_gemm(*operands()[:2], last_dims=operands()[2]),
        "contracts 4 of lhs's rows with 16 of rhs's rows",
    ),
    (
        lambda: fusible.jax.grouped_gemm(*operands()[:2], last_dims=operands()[2], transpose_rhs=True),
        "are for first_dims",
    ),
    (
        lambda: fusible.jax.ragged_dot(*operands(), group_offset=jnp.array([0])),
        "group_offset is not supported; slice the weights",
    ),
    (lambda: fusible.jax.ragged_dot(*operands(), precision="highest"), "precision is not supported"),
    (mlp(activation="swish"), "activation must be one of silu, gelu"),
    (mlp(activation="gelu", alpha=2.0), "alpha is the slope inside silu"),
    (mlp(limit=-1.0), "limit must be positive or None; got -1.0"),
    (mlp(interleave=0), "interleave must be a positive int or None; got 0"),
    (mlp(interleave=3), "w13 has 8 columns, which do not divide into gate and up"),
    (mlp(gated=False, limit=1.0), "need gated=True"),
    (mlp(weight_layout="nt"), "weight_layout must be 'kn' or 'nk', got 'nt'"),
    (mlp(probs_at="input"), "probs_at must be 'output' or 'activation', got 'input'"),
    (mlp(probs=jnp.ones(3)), "probs must be [4], got shape [3]"),
    (mlp(b13=jnp.ones((2, 4))), "b13 must be [2, 8], got shape [2, 4]"),
    (mlp(b2=jnp.ones((2, 4))), "b2 must be [2, 8], got shape [2, 4]"),
    (mlp(w2=jnp.ones((2, 8, 8), jnp.bfloat16)), "contracts 4 of the activation with 8 of w2"),
    (mlp(w2=jnp.ones((2, 4, 16), jnp.bfloat16)), "contracts 8 of x with 16 of the columns of w2"),
    (mlp(w2=jnp.ones((3, 4, 8), jnp.bfloat16)), "w2 must be [2, 4, 8], got shape [3, 4, 8]"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words[:60] for _, words in WRONG])
def test_errors_name_the_argument(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(fusible.jax.ArgumentError) as raised:
        call()

    assert words in str(raised.value)
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ValueError)


def test_errors_are_raised_while_tracing() -> None:
    with pytest.raises(fusible.jax.ArgumentError, match="contracts 16 of lhs with 8 of rhs"):
        jax.jit(fusible.jax.ragged_dot).lower(jax.ShapeDtypeStruct((4, 16), jnp.bfloat16), *operands()[1:])


SECOND: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "hessian": jax.hessian,
    "grad of grad": lambda loss: jax.grad(lambda x: jax.grad(loss)(x).sum()),
    "grad of a compiled grad": lambda loss: jax.jit(jax.grad(lambda x: jax.jit(jax.grad(loss))(x).sum())),
    "of a checkpoint": lambda loss: jax.grad(lambda x: jax.grad(jax.checkpoint(loss))(x).sum()),
}


@pytest.mark.parametrize("derivative", SECOND)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_second_derivatives_of_experts_say_what_has_them(derivative: str, dtype: Any) -> None:
    """Second derivatives of products are in test_jax.py."""
    lhs, rhs, sizes = (value.astype(dtype) if value.ndim > 1 else value for value in operands())

    def loss(x):
        return fusible.jax.grouped_mlp(x, rhs, jnp.ones((2, 4, 8), dtype), sizes).astype(jnp.float32).sum()

    with pytest.raises(NotImplementedError, match="second derivatives are not supported; a layer of two grouped_gemm"):
        SECOND[derivative](loss)(lhs)


def mesh_of(kind: jax.sharding.AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("x",), axis_types=(kind,))


def test_explicit_axes_are_for_shard_map() -> None:
    """jax's own product has no rule for them either."""
    lhs, rhs, sizes = operands()
    rows = jax.sharding.PartitionSpec("x")
    with jax.set_mesh(mesh_of(jax.sharding.AxisType.Explicit)):
        spread = jax.device_put(lhs, rows)
        counts = jax.device_put(jnp.array([1, 0] * 4, jnp.int32), rows)
        with pytest.raises(fusible.jax.ArgumentError, match="the explicit axes x, for which there is no sharding rule"):
            jax.jit(fusible.jax.ragged_dot)(spread, rhs, sizes)
        with pytest.raises(fusible.jax.ArgumentError, match="grouped_mlp: an operand is on a mesh"):
            fusible.jax.grouped_mlp(spread, rhs, jnp.ones((2, 4, 8), jnp.bfloat16), sizes)
        local = jax.shard_map(
            fusible.jax.ragged_dot, in_specs=(rows, jax.sharding.PartitionSpec(), rows), out_specs=rows
        )
        assert jax.jit(local)(spread, rhs, counts).astype(jnp.float32).tolist() == [[8.0] * 8] * 4
        whole = jax.sharding.auto_axes(fusible.jax.ragged_dot, out_sharding=jax.sharding.PartitionSpec())
        assert float(jax.jit(whole)(spread, rhs, sizes).sum()) == 3 * 8 * 8


def test_what_xla_will_gather_is_told_once() -> None:
    lhs, rhs, sizes = operands()
    mesh = mesh_of(jax.sharding.AxisType.Auto)
    spread, replicated = (
        jax.device_put(lhs, jax.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))) for axes in (("x",), ())
    )
    checks._warn_of_gathering.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusible.jax.ragged_dot(replicated, rhs, sizes)
    with pytest.warns(UserWarning, match="grouped_gemm has an operand that is sharded, outside of shard_map"):
        out = fusible.jax.ragged_dot(spread, rhs, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fusible.jax.ragged_dot(spread, rhs, sizes)

    assert float(out.sum()) == 3 * 8 * 8
