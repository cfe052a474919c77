"""Compiled containers on a GPU: the bits of eager, with our kernels, without waiting for the device, in CUDA graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import mlp
from reference import assert_same
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck

from fusible import ClampedSwiGLU, GroupedLinear, Sequential, SwiGLU

_QUIET = ("DeprecationWarning", "FutureWarning", "UserWarning")  # of the compiler itself
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("fresh_compiler"),
    *[pytest.mark.filterwarnings(f"ignore::{kind}") for kind in _QUIET],
]
E, K, F = 4, 64, 96
SPLITS = ([40, 0, 25, 31], [0, 0, 96, 0], [7, 50, 3, 36])


def experts(**options: Any) -> Sequential:
    return mlp(E, K, F, act=ClampedSwiGLU(), device="cuda", **options)


def batch(rows: int, sizes: list[int], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    x = torch.randn(rows, K, device="cuda", dtype=dtype, requires_grad=True)
    scales = torch.rand(rows, device="cuda", requires_grad=True)
    return {"x": x, "split_sizes": torch.tensor(sizes, device="cuda"), "scales": scales}


def results(function: Any, model: Sequential, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    y = function(**given)
    wanted = [given["x"], given["scales"], *model.parameters()]
    return (y.detach().clone(), *[g.clone() for g in torch.autograd.grad(y, wanted, torch.cos(y.detach()))])


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False}, {"single_grouped_weight": False, "single_grouped_bias": False}],
    ids=["stacked", "no bias", "one a group"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_inductor_gives_the_bits_of_eager(options: dict[str, Any], dtype: torch.dtype) -> None:
    counter = CompileCounterWithBackend("inductor")
    for model in [experts(dtype=dtype, **options) for _ in range(2)]:
        compiled = torch.compile(model, fullgraph=True, backend=counter)
        for rows, sizes in zip((100, 96, 128), SPLITS, strict=True):
            given = batch(rows, sizes, dtype)
            assert_same(results(compiled, model, given), results(model, model, given))

    assert counter.frame_count == 2


def test_autocast() -> None:
    model, given = experts(), batch(100, SPLITS[0], torch.float32)
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        assert_same(results(compiled, model, given), results(model, model, given))


def test_nothing_waits_for_the_device() -> None:
    model, given = experts(dtype=torch.bfloat16), batch(100, SPLITS[0])
    compiled, expected = torch.compile(model, fullgraph=True), results(model, model, given)
    results(compiled, model, given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = results(compiled, model, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert_same(found, expected)


def test_cuda_graphs_of_inductor_replay_with_other_splits() -> None:
    model = experts(dtype=torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for sizes in (*SPLITS, *SPLITS):
        given = batch(100, sizes)
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(results(compiled, model, given), results(model, model, given))


def test_buffers() -> None:
    model, given = experts(dtype=torch.bfloat16), batch(100, SPLITS[0])
    compiled, made = torch.compile(model, fullgraph=True), []
    for function in (model, compiled):
        output, grad_input = (torch.full((100, K), 7.0, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        own = {3: {"output": output}, 0: {"grad_input": grad_input}}
        made.append((*results(function, model, {**given, "op_kwargs": own}), output, grad_input))  # type: ignore[dict-item]

    assert_same(made[1], made[0])


def test_opcheck() -> None:
    def of(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    ops, sizes = torch.ops.fusible, torch.tensor([40, 0, 25, 35], device="cuda")
    x, weight, wide, rows = of(100, K), of(E, 2 * F, K), of(100, 2 * F), torch.rand(100, device="cuda")
    spec = ("silu", True, None, 1.0, 0.0, None, None)
    none = (None, None, None, None, None, "auto")
    calls = (
        (ops.grouped_gemm, ("NT", x, [weight], sizes, None, *none)),
        (ops.grouped_gemm, ("TN", wide, [x], sizes, torch.float32, *none)),
        (ops.grouped_gemm_out, ("NN", wide, [weight], sizes, [of(100, K)], None, None, *none)),
        (ops.grouped_linear_activation, (x, [weight], sizes, *spec, None, None, rows, True, False, "auto")),
        (
            ops.grouped_linear_activation_backward,
            (x, [of(E, K, F)], wide, sizes, *spec, rows, True, True, torch.float32, "auto"),
        ),
        (ops.activate, (wide, *spec, rows)),
        (ops.activate_backward, (of(100, F), wide, *spec, rows, True, True)),
        (ops.column_sums, (wide, sizes, torch.float32, None)),
        (ops.row_dots, (wide, [of(E, 2 * F)], sizes, torch.float32)),
    )
    for op, arguments in calls:
        assert set(opcheck(op, arguments).values()) == {"SUCCESS"}


def test_opcheck_of_a_routed_layer() -> None:
    def of(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    ops, spec = torch.ops.fusible, ("silu", True, None, 1.0, 0.0, None, None)
    x, ids, weights = of(50, K), torch.rand(50, E, device="cuda").argsort(-1)[:, :2], torch.rand(50, 2, device="cuda")
    experts = of(E, 2 * F, K), of(E, K, F), of(E, 2 * F), of(E, K), *spec, False
    counts, order, place = ops.route(ids, E)
    rows = of(100, 2 * F)
    calls = (
        (ops.route, (ids, E)),
        (ops.spread_rows, (x, place, counts)),
        (ops.sum_rows, (rows, place, counts)),
        (ops.routed_mlp, (x, ids, weights, *experts, "auto")),
        (ops.gathered_wgrad, (x, rows, counts, order, place, True, False, torch.float32, "auto")),
    )
    for op, arguments in calls:
        assert set(opcheck(op, arguments).values()) == {"SUCCESS"}


def test_export() -> None:
    model, given = (
        Sequential(GroupedLinear(E, K, 2 * F, device="cuda", dtype=torch.bfloat16), SwiGLU()),
        batch(100, SPLITS[0]),
    )
    x, sizes = given["x"].detach(), {"split_sizes": given["split_sizes"]}
    program = torch.export.export(model, (x,), sizes)

    assert torch.equal(program.module()(x, **sizes), model(x, **sizes))
