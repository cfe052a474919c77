"""``fusible.jax`` on a Hopper GPU: the bits of PyTorch's side, no copy to the host, one program for all sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from checks.device import needs_hopper

pytest.importorskip("jax", reason="jax is not installed")
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax_problems import Experts, array, assert_close, exact, product64, seeded, wgrad64
from torch import Tensor, nn

import fusible
import fusible.jax

pytestmark = [pytest.mark.cuda, needs_hopper]

SIZES = (200, 0, 1, 131, 300, 64, 3, 65)
DTYPES = {torch.bfloat16: jnp.bfloat16, torch.float16: jnp.float16, torch.float32: jnp.float32}


@pytest.fixture(autouse=True)
def _strict() -> Any:
    """Nothing runs by jax's own products."""
    with fusible.jax.config(strict=True):
        yield


def tensor(value: Any) -> Tensor:
    """The same bits on the GPU."""
    return torch.from_dlpack(value).clone()


def assert_same_bits(actual: Any, expected: Tensor) -> None:
    assert torch.equal(tensor(actual).view(torch.uint8), expected.detach().contiguous().view(torch.uint8))


def test_info_knows_no_reason_for_a_fallback() -> None:
    info = fusible.jax.info()

    assert info["fallback"] is None
    assert info["handlers_api"] == "0.3"


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_products_have_the_bits_of_pytorch(dtype: Any) -> None:
    random, counts, groups = seeded(), jnp.array(SIZES, jnp.int32), len(SIZES)
    a, b, dy = (
        array(random, 800, 512, dtype=dtype),
        array(random, groups, 512, 384, dtype=dtype),
        array(random, 800, 384, dtype=dtype),
    )
    into = array(random, groups, 512, 384, dtype=jnp.float32)
    at, bt, dyt, ct, out = map(tensor, (a, b, dy, counts, into))

    rows = jax.jit(lambda a, b, n: fusible.jax.grouped_gemm(a, b, first_dims=n))(a, b, counts)
    assert_same_bits(rows, fusible.grouped_gemm(at, bt, ct, layout="NN"))  # type: ignore[arg-type]
    back = jax.jit(lambda a, b, n: fusible.jax.grouped_gemm(a, b, first_dims=n, transpose_rhs=True))(dy, b, counts)
    assert_same_bits(back, fusible.grouped_gemm(dyt, bt, ct, layout="NT"))  # type: ignore[arg-type]
    weights = jax.jit(lambda a, b, n, into: fusible.jax.grouped_gemm(a, b, last_dims=n, into=into))(a, dy, counts, into)
    assert_same_bits(weights, fusible.grouped_gemm(at, dyt, ct, layout="TN", out=out, accumulate=True))  # type: ignore[arg-type]


def by_pytorch(problem: Experts, arrays: dict[str, Any], dy: Any) -> dict[str, Tensor]:
    """The output and the gradients of the same experts as a container."""
    groups, bias = len(problem.sizes), "b13" in arrays
    wide = problem.columns * 2
    fc1 = fusible.GroupedLinear(groups, problem.features, wide, bias=bias, device="meta")
    fc2 = fusible.GroupedLinear(groups, problem.columns, problem.features, bias=bias, device="meta")
    at = {name: tensor(value) for name, value in arrays.items()}
    fc1.weight, fc2.weight = nn.Parameter(at["w13"]), nn.Parameter(at["w2"])
    if bias:
        fc1.bias, fc2.bias = nn.Parameter(at["b13"]), nn.Parameter(at["b2"])
    layer = fusible.Sequential(fc1, fusible.SwiGLU(), fusible.Scale(), fc2)
    x, probs = at["x"].requires_grad_(), at["probs"].requires_grad_()
    counts = torch.tensor(problem.sizes, dtype=torch.int32, device="cuda")
    with fusible.config(strict=True):
        y = layer(x, split_sizes=counts, scales=probs)
        y.backward(tensor(dy))
    grads = {"x": x.grad, "probs": probs.grad, "w13": fc1.weight.grad, "w2": fc2.weight.grad}
    grads |= {"b13": fc1.bias.grad, "b2": fc2.bias.grad} if bias else {}
    return {"y": y.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.hopper
@pytest.mark.parametrize("biases", [None, jnp.bfloat16], ids=["", "biases"])
def test_experts_have_the_bits_of_pytorch(biases: Any) -> None:
    problem = Experts(SIZES, tail=36, features=512, columns=384, layout="nk", biases=biases)
    arrays, counts = problem.arrays(), jnp.array(SIZES, jnp.int32)
    dy = array(seeded(5), problem.rows, problem.features)

    def step(arrays: Any, dy: Any) -> Any:
        y, pull = jax.vjp(lambda arrays: fusible.jax.grouped_mlp(sizes=counts, weight_layout="nk", **arrays), arrays)
        return {"y": y} | pull(dy)[0]

    found, expected = jax.jit(step)(arrays, dy), by_pytorch(problem, arrays, dy)

    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert_same_bits(value, expected[name])


def device_activity(run: Callable[[], Any]) -> Counter[str]:
    """How often each kernel, copy and graph launch of a call is seen by the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        jax.block_until_ready(run())
        torch.cuda.synchronize()
    return Counter(event.name for event in profile.events())


def test_sizes_stay_on_the_device() -> None:
    """Computed in the same program; what launches is no copy to the host, whatever the sizes."""
    problem = Experts(SIZES, tail=36, features=512, columns=384)
    arrays, groups = problem.arrays(), len(SIZES)

    def step(arrays: Any, ids: Any) -> Any:
        counts = jnp.bincount(ids, length=groups).astype(jnp.int32)

        def loss(arrays):
            return jnp.sum(fusible.jax.grouped_mlp(sizes=counts, **arrays).astype(jnp.float32))

        return jax.grad(loss)(arrays)["w13"], counts

    run = jax.jit(step)
    several = [jnp.asarray(seeded(seed).integers(0, groups, problem.rows)) for seed in range(3)]
    jax.block_until_ready([run(arrays, ids) for ids in several])
    found = device_activity(lambda: run(arrays, several[0]))

    print(dict(found))
    assert any("gemm" in name.lower() or "kernel" in name.lower() or "GraphLaunch" in name for name in found)
    assert not [name for name in found if "DtoH" in name or "Device -> Host" in name]
    assert run._cache_size() == 1


def test_one_program_takes_all_sizes_in_a_command_buffer() -> None:
    random = seeded()
    a, b = array(random, 800, 512), array(random, 3, 512, 384)

    def step(a: Any, b: Any, counts: Any) -> Any:
        once = jnp.tanh(fusible.jax.ragged_dot(a, b, counts).astype(jnp.float32))
        return fusible.jax.grouped_gemm(a, once.astype(a.dtype), last_dims=counts), once

    options = {"xla_gpu_graph_min_graph_size": 1}
    run = jax.jit(step, compiler_options=options)
    for sizes in ((300, 0, 500), (0, 0, 0), (1, 798, 1), (800, 0, 0)) * 2:
        counts = jnp.array(sizes, jnp.int32)
        weights, rows = run(a, b, counts)
        reference = torch.tanh(product64(a, b, sizes))
        assert_close(rows, reference, roundings=1, dtype=jnp.bfloat16)
        assert_close(weights, wgrad64(a, rows.astype(a.dtype), sizes), roundings=1)
    text = run.lower(a, b, counts).compile().as_text()
    print("command buffers in the program:", text.count("command_buffer"))


def test_what_is_donated_is_written_in_place() -> None:
    random, counts = seeded(), jnp.array(SIZES, jnp.int32)
    a, dy = array(random, 800, 512), array(random, 800, 384)
    into = array(random, len(SIZES), 512, 384, dtype=jnp.float32)
    before, address = exact(into), into.unsafe_buffer_pointer()
    run = jax.jit(lambda a, b, into, n: fusible.jax.grouped_gemm(a, b, last_dims=n, into=into), donate_argnums=2)
    out = run(a, dy, into, counts)

    assert out.unsafe_buffer_pointer() == address
    assert_close(out, before + wgrad64(a, dy, SIZES), roundings=40)


@pytest.mark.skipif(len(jax.devices()) < 2, reason="needs two GPUs")
def test_two_gpus_in_one_process() -> None:
    """Rows and groups of each GPU are its own, and replicated weights have the sum of the gradients."""
    random, mesh = seeded(), jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b = array(random, 400, 256), array(random, 4, 256, 128)
    counts, shards = jnp.array([50, 0, 100, 40, 10, 150, 0, 30], jnp.int32), PartitionSpec("x")

    def local(a: Any, b: Any, counts: Any) -> Any:
        return fusible.jax.ragged_dot(a, b, counts, preferred_element_type=jnp.float32)

    over = jax.shard_map(local, mesh=mesh, in_specs=(shards, PartitionSpec(), shards), out_specs=shards)
    rows = jax.jit(over)(a, b, counts)
    db = jax.jit(jax.grad(lambda b: jnp.sum(over(a, b, counts))))(b)
    halves = [(a[:200], (50, 0, 100, 40)), (a[200:], (10, 150, 0, 30))]
    ones = jnp.ones((200, 128), jnp.bfloat16)

    assert_close(rows, torch.cat([product64(half, b, sizes) for half, sizes in halves]), roundings=40)
    assert_close(db, sum(wgrad64(half, ones, sizes) for half, sizes in halves), roundings=2)  # type: ignore[arg-type]


def test_on_the_cpu_of_the_same_process_jax_multiplies() -> None:
    cpu = jax.devices("cpu")[0]
    a, b = (jax.device_put(array(seeded(), *shape), cpu) for shape in ((10, 16), (2, 16, 8)))
    out = jax.jit(lambda a, b: fusible.jax.ragged_dot(a, b, jnp.array([3, 5], jnp.int32)))(a, b)

    assert_close(out, product64(a, b, (3, 5)))
    assert np.asarray(out).shape == (10, 8)
