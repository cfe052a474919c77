"""The fallback backends on a GPU: right, sync-free, capturable, and safe on several streams. Run with ``-m cuda``."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial

import models
import pytest
import torch
from checks.device import needs_hopper
from graph_nodes import captured
from reference import assert_as_good, assert_same, glu, grouped_linear, mlp, run, unit

from fusible import ArgumentError, GroupedLinear, RefusedError, Sequential, check_device_errors, config, grouped_gemm
from fusible.ops.kernels.extension import device_refusal

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings(
        "ignore:Synchronization debug mode", "ignore:The CUDA Graph is empty", "ignore:The AccumulateGrad node"
    ),
]

HOPPER = pytest.param("hopper", marks=needs_hopper)

E, K, F, N, T = 5, 64, 128, 72, 256
SIZES = [100, 0, 90, 1, 50]
VALID = sum(SIZES)
BF16 = torch.bfloat16
FUSIONS = {"GroupedMLP", "GroupedLinearGLU", "GLUScale"}
NEW_SIZES = [[100, 0, 90, 1, 50], [0, 0, 0, 0, 256], [51, 51, 51, 51, 52], [0, 0, 0, 0, 0], [7, 8, 9, 0, 0]]


def on_device(*shape, dtype=BF16, grad=True):
    return unit(*shape, dtype=dtype, grad=False).cuda().requires_grad_(grad)


def sizes_of(sizes=SIZES):
    return torch.tensor(sizes, device="cuda")


def layer(dtype=BF16, **how):
    return GroupedLinear(E, K, N, device="cuda", dtype=dtype, **how)


experts = partial(models.mlp, E, K, F, N, device="cuda", dtype=BF16)


def arguments(model, dtype=BF16):
    """Everything that the model differentiates, by its name in :func:`reference.mlp`, and a dy."""
    tensors = {"x": on_device(T, K, dtype=dtype), "scales": on_device(T, dtype=torch.float32)}
    names = {"0.weight": "w1", "0.bias": "b1", "3.weight": "w2", "3.bias": "b2"}
    tensors |= {names[name]: p for name, p in model.named_parameters()}
    return tensors, on_device(T, N, dtype=dtype, grad=False)


def caller(model, sizes):
    return lambda x, scales, **_: model(x, split_sizes=sizes, scales=scales)


@pytest.mark.parametrize("backend", ["auto", HOPPER, "grouped_mm", "loop"])
@pytest.mark.parametrize("bias", [None, "plain", "scaled"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32, torch.float64], ids=str)
def test_layer(dtype, bias, backend):
    if (backend == "grouped_mm" and dtype != BF16) or (backend == "hopper" and dtype not in (BF16, torch.float16)):
        pytest.skip(f"{backend} does not take {dtype}")
    op, dy = layer(dtype, bias=bias is not None, scale_bias=bias == "scaled"), on_device(T, N, dtype=dtype, grad=False)
    tensors = {"x": on_device(T, K, dtype=dtype), **dict(op.named_parameters())}
    if bias == "scaled":
        tensors["bias_scale"] = on_device(T, dtype=torch.float32)

    def ours(x, bias_scale=None, **_):
        return op(x, split_sizes=sizes_of(), bias_scale=bias_scale)

    with config(backend=backend):
        got = run(ours, tensors, dy)

    assert_as_good(got, lambda x, **t: grouped_linear(x, SIZES, **t), tensors, dy, rows=VALID)
    assert got["y"][VALID:].eq(0).all()


@pytest.mark.parametrize("backend", [HOPPER, "grouped_mm"])
@pytest.mark.parametrize("bias", [None, "plain"])
def test_discrete_weights_give_what_stacked_ones_give(bias, backend):
    one, many = layer(bias=bias is not None), layer(bias=bias is not None, single_grouped_weight=False)
    many.load_state_dict(one.state_dict())
    x = on_device(T, K)
    results = []
    for op in (one, many):
        with config(backend=backend):
            y = op(x, split_sizes=sizes_of())
            y.float().square().sum().backward()
        results.append(
            (y.detach(), torch.stack([getattr(op, n).grad for n in op.parameter_names("weight")]).view(E, N, K))
        )

    assert_same(*results)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
def test_mlp(dtype, fused):
    model = experts(dtype=dtype)
    tensors, dy = arguments(model, dtype)
    with config(disable_fusions=set() if fused else FUSIONS):
        got = run(caller(model, sizes_of()), tensors, dy)

    assert ([s.name for s in model.explain().steps] == ["GroupedMLP"]) == fused
    assert_as_good(got, lambda x, **t: mlp(x, SIZES, glu("silu"), **t), tensors, dy, rows=VALID)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_graph_replayed_with_other_split_sizes_gives_what_eager_gives(single, fused):
    model, sizes = experts(single_grouped_weight=single), sizes_of()
    x, scales, dy = on_device(T, K), on_device(T, dtype=torch.float32), on_device(T, N, grad=False)

    def step():
        with config(disable_fusions=set() if fused else FUSIONS):
            y = model(x, split_sizes=sizes, scales=scales)
            return (y, *torch.autograd.grad(y, [x, scales, *model.parameters()], dy))

    graph, results = captured(step)
    for new in NEW_SIZES:
        sizes.copy_(sizes_of(new))
        x.data.copy_(on_device(T, K, grad=False))
        graph.replay()
        replayed = [t.detach().clone() for t in results]
        rows = [t[: sum(new)] if t.shape[0] == T else t for t in (*replayed, *(t.detach() for t in step()))]

        assert_same(tuple(rows[: len(results)]), tuple(rows[len(results) :]))


def test_graph_writes_buffers_and_main_grad():
    op, sizes = layer(accumulate_into_main_grad=True), sizes_of()
    op.weight.main_grad = torch.zeros(E, N, K, device="cuda")
    x, out, dx = (
        on_device(T, K),
        torch.zeros(T, N, device="cuda", dtype=BF16),
        torch.zeros(T, K, device="cuda", dtype=BF16),
    )

    def step():
        y = op(x, split_sizes=sizes, output=out, grad_input=dx)
        return torch.autograd.grad(y, [x, op.bias, op.weight], torch.ones_like(y), allow_unused=True)[:2]

    graph, _ = captured(step)
    for buffer in (op.weight.main_grad, out, dx):
        buffer.zero_()
    graph.replay()
    expected = layer()
    expected.load_state_dict(op.state_dict())
    expected(x, split_sizes=sizes)[:VALID].sum().backward()

    assert_same(out[:VALID], expected(x, split_sizes=sizes)[:VALID].detach())
    torch.testing.assert_close(op.weight.main_grad, expected.weight.grad.float(), rtol=0.02, atol=0.05)


def test_graph_captures_delayed_weight_gradients():
    op, sizes, x = layer(bias=False, delay_wgrad_compute=True), sizes_of(), on_device(T, K, grad=False)
    op.weight.grad = torch.zeros_like(op.weight)

    def step():
        op.weight.grad.zero_()
        op(x, split_sizes=sizes).sum().backward()
        op.backward_dw()

    graph, _ = captured(step)
    for new in NEW_SIZES:
        sizes.copy_(sizes_of(new))
        graph.replay()
        replayed = op.weight.grad.clone()
        step()

        assert_same(replayed, op.weight.grad)


def test_loop_path_refuses_to_be_captured():
    op, x, sizes = layer(torch.float64), on_device(T, K, dtype=torch.float64, grad=False), sizes_of()
    op(x, split_sizes=sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()

    with (
        pytest.raises(RefusedError, match="loop reads split sizes on the host, which a CUDA graph cannot"),
        torch.no_grad(),
        torch.cuda.graph(graph),
    ):
        op(x, split_sizes=sizes)
    torch.cuda.synchronize()


def test_first_call_of_a_thread():
    op, x, sizes, results = layer(), on_device(T, K, grad=False), sizes_of(), []
    thread = threading.Thread(target=lambda: results.append(op(x, split_sizes=sizes)))
    thread.start()
    thread.join()

    assert_same(results[0], op(x, split_sizes=sizes))


def test_two_streams_with_different_problems():
    problems = []
    for sizes in NEW_SIZES[:2]:
        model = experts()
        tensors, dy = arguments(model)
        problems.append((caller(model, sizes_of(sizes)), tensors, dy))
    alone = [run(*problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(10):
        together = []
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                together.append(run(*problem))
    torch.cuda.synchronize()

    assert_same(tuple(together), tuple(alone))


@pytest.mark.parametrize("fused", [True, False])
def test_no_host_sync(fused):
    model, sizes = experts(), sizes_of()
    tensors, dy = arguments(model)
    with config(disable_fusions=set() if fused else FUSIONS):
        expected = run(caller(model, sizes), tensors, dy)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = run(caller(model, sizes), tensors, dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    assert_same(got, expected)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_buffers(dtype):
    op, x = layer(dtype), on_device(T, K, dtype=dtype)
    out, dx = (torch.full((T, n), -7.0, device="cuda", dtype=dtype) for n in (N, K))
    y = op(x, split_sizes=sizes_of(), output=out, grad_input=dx)
    gradient = torch.autograd.grad(y.sum(), x)[0]
    plain = op(x, split_sizes=sizes_of())

    assert (y.data_ptr(), gradient.data_ptr()) == (out.data_ptr(), dx.data_ptr())
    assert_same(out[:VALID], plain[:VALID].detach())
    assert_same(dx[:VALID], torch.autograd.grad(plain.sum(), x)[0][:VALID])
    assert out[VALID:].eq(-7).all()
    assert dx[VALID:].eq(-7).all()


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("delay", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_main_grad(single, delay, overwrite):
    model = experts(accumulate_into_main_grad=True, delay_wgrad_compute=delay, single_grouped_weight=single)
    plain = experts(single_grouped_weight=single)
    plain.load_state_dict(model.state_dict())
    weights = {n: p for n, p in model.named_parameters() if "weight" in n}
    for p in weights.values():
        p.main_grad = torch.full_like(p, float("nan") if overwrite else 0.5, dtype=torch.float32)
        p.overwrite_main_grad = overwrite
    x, scales = on_device(T, K), on_device(T, dtype=torch.float32)
    for m in (model, plain):
        m(x, split_sizes=sizes_of(), scales=scales)[:VALID].sum().backward()
    for op in (model[0], model[3]):
        op.backward_dw()

    for name, p in weights.items():
        expected = plain.get_parameter(name).grad.float() + (0 if overwrite else 0.5)
        torch.testing.assert_close(p.main_grad, expected, rtol=0.02, atol=0.1)


def test_autocast_from_float32_weights_takes_the_fast_path():
    model, x, scales = (
        experts(dtype=torch.float32),
        on_device(T, K, dtype=torch.float32),
        on_device(T, dtype=torch.float32),
    )
    with torch.autocast("cuda", BF16):
        y = model(x, split_sizes=sizes_of(), scales=scales)
        step = model.explain().steps[0]
    y.float().sum().backward()

    assert y.dtype == BF16
    assert "loop" not in step.kernel
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("sizes", [SIZES, torch.tensor(SIZES)], ids=["list", "cpu tensor"])
def test_split_sizes_on_the_host_are_copied_with_a_note(sizes):
    op, x = layer(), on_device(T, K)
    model = Sequential(op)
    y = model(x, split_sizes=sizes)

    assert_same(y, op(x, split_sizes=sizes_of()))
    assert any("split_sizes are copied" in note for note in model.explain().steps[0].notes)


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("op", "x", "reason"),
    [
        (
            lambda: layer(torch.float32),
            lambda: on_device(T, K, dtype=torch.float32),
            "hopper needs bfloat16 or float16 operands, got torch.float32",
        ),
        (lambda: GroupedLinear(E, 60, N, device="cuda", dtype=BF16), lambda: on_device(T, 60), "multiples of 8, got"),
    ],
)
def test_fallback_says_why_and_strict_refuses_it(op, x, reason):
    model, x = Sequential(op()), x()
    step = model.explain(x, split_sizes=sizes_of()).steps[0]

    assert step.kernel.split(" + ")[0] == "triton"  # then the kernel that zeroes its tail
    assert reason in step.reason
    with config(strict=True), pytest.raises(RefusedError, match="the grouped GEMM falls back to triton"):
        model(x, split_sizes=sizes_of())


def test_fast_path_is_named():
    step = Sequential(layer()).explain(on_device(T, K), split_sizes=sizes_of()).steps[0]

    assert "loop" not in step.kernel


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_sizes_beyond_the_rows_are_clamped(dtype):
    op, x = layer(dtype), on_device(T, K, dtype=dtype)
    beyond = op(x, split_sizes=sizes_of([200, 200, -5, 7, 0]))
    torch.cuda.synchronize()
    reported = dtype == BF16 or device_refusal(torch.cuda.current_device()) is None  # the loop on its own reports none
    with pytest.raises(RuntimeError, match="group 1 is 200, more than") if reported else nullcontext():
        check_device_errors()
    within = op(x, split_sizes=sizes_of([200, 56, 0, 0, 0]))

    assert_same({"y": beyond.detach()}, {"y": within.detach()})


@pytest.mark.parametrize(
    ("sizes", "message"), [([200, 200, 0, 0, 0], "they sum to 400"), ([-1, 0, 0, 0, 0], "negative")]
)
def test_debug_checks_sizes_on_the_device(sizes, message):
    with config(debug=True), pytest.raises(ArgumentError, match=message):
        layer()(on_device(T, K), split_sizes=sizes_of(sizes))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["NT", "NN", "TN"])
def test_grouped_gemm(layout, dtype):
    shapes = {"NT": ((T, K), (E, N, K)), "NN": ((T, K), (E, K, N)), "TN": ((T, K), (T, N))}[layout]
    a, b = (on_device(*shape, dtype=dtype, grad=False) for shape in shapes)
    how = {"alpha": torch.linspace(-1, 1, E), "bias": unit(E, N, dtype=torch.float32, grad=False)}
    got = grouped_gemm(a, b, sizes_of(), layout=layout, **{k: t.cuda() for k, t in how.items()})
    want = grouped_gemm(a.cpu().float(), b.cpu().float(), torch.tensor(SIZES), layout=layout, **how)

    torch.testing.assert_close(got.float().cpu(), want, rtol=0.02, atol=0.1)
