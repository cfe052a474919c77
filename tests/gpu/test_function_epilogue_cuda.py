"""Functions of users in the grouped GEMM on a GPU, both directions; test_function_epilogue.py checks them on a CPU."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checks import fused
from checks.device import skip_module_without_hopper
from checks.functions import (
    ACTS_OF_COLUMNS,
    ACTS_OF_MATRICES,
    OF_COLUMNS,
    PUBLISHED,
    learned_slope,
    op_of_columns,
    random_function,
)
from checks.functions import op_of as op_of_function
from test_pointwise import FUNCTIONS

import fusible
from fusible import Pointwise, interleaved
from fusible.ops.kernels.jit import epilogue
from fusible.ops.kernels.jit.cache import kernel_cache

pytestmark = pytest.mark.cuda
skip_module_without_hopper()

from fusible.ops import _C  # noqa: E402

IN_EPILOGUES = [name for name in FUNCTIONS if name not in ("not linear in two rows", "rounding trick")]


def op_of(name, halves="concat"):
    function, gated = FUNCTIONS[name]
    return Pointwise(function, halves=halves if gated == 2 else None), function


@pytest.mark.parametrize("name", IN_EPILOGUES)
def test_every_function(name):
    case = fused.case_of(*op_of(name))
    fused.check_forward("cuda", case)
    fused.check_forward_in_all_tiles("cuda", case)
    fused.check_backward("cuda", case)
    fused.check_backward("cuda", replace(case, columns=320))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_activations(name):
    function, count = PUBLISHED[name]
    case = fused.case_of(op_of_function(function, count), function)
    fused.check_forward_in_all_tiles("cuda", case)
    fused.check_backward("cuda", case)
    if count == 2:
        case = fused.case_of(op_of_function(function, count, interleaved(32)), function, transposed=True)
        fused.check_forward("cuda", case)
        fused.check_backward("cuda", case)


@pytest.mark.parametrize("seed", range(60))
def test_random_functions(seed):
    function, count = random_function(seed)
    case = fused.case_of(op_of_function(function, count), function, columns=(192, 320, 72)[seed % 3])
    fused.check_forward_in_all_tiles("cuda", case)
    fused.check_backward("cuda", case)


@pytest.fixture
def one_tile(monkeypatch):
    """Compiles only the kernel of the first tile for each direction, as compilation takes most of the time."""
    variants = epilogue.variants
    monkeypatch.setattr(epilogue, "variants", lambda form: variants(form)[:1])
    epilogue.handles.cache_clear()
    yield
    epilogue.handles.cache_clear()


@pytest.mark.usefixtures("one_tile")
@pytest.mark.parametrize("seed", range(60, 200))
def test_more_random_functions(seed):
    function, count = random_function(seed)
    case = fused.case_of(op_of_function(function, count), function, columns=(192, 320, 72)[seed % 3])
    fused.check_forward("cuda", replace(case, variant=_C.ACTIVATION_VARIANTS[0]))
    fused.check_backward("cuda", case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [None, 1, 2, 4, 8, 32, 64])
def test_every_layout_of_gate_and_up(block, dtype):
    case = fused.case_of(*op_of("gpt-oss", "concat" if block is None else interleaved(block)), dtype=dtype)
    fused.check_forward_in_all_tiles("cuda", replace(case, bias=torch.float32, bias_scale=True))
    fused.check_forward_in_all_tiles("cuda", replace(case, transposed=True, columns=320))
    fused.check_backward("cuda", case)
    fused.check_backward("cuda", replace(case, transposed=True, columns=320, scales=torch.bfloat16))


def test_groups_of_every_size():
    for size in (1, 2, 17, 64, 129, 257, 1000):
        case = fused.case_of(*op_of("relu2 glu"), sizes=(size,), tail=size % 5, features=72, columns=136)
        fused.check_forward_in_all_tiles("cuda", case)
        fused.check_backward("cuda", case)
    fused.check_forward("cuda", fused.case_of(*op_of("relu2 glu"), sizes=(0, 0, 0)))
    fused.check_backward("cuda", fused.case_of(*op_of("relu2 glu"), sizes=(0, 0, 0)))


@pytest.mark.parametrize("name", ["slopes of gate and up", "bias"])
@pytest.mark.parametrize("halves", ["concat", interleaved(1), interleaved(8)], ids=str)
def test_numbers_of_columns_of_all_rows_and_of_gate_and_up(name, halves):
    build, function = ACTS_OF_COLUMNS[name]
    case = fused.case_of(build(halves), function)
    fused.check_forward("cuda", case)
    fused.check_forward_in_all_tiles("cuda", case)
    fused.check_backward("cuda", case)


@pytest.mark.parametrize("name", ACTS_OF_MATRICES)
@pytest.mark.parametrize("halves", ["concat", interleaved(8)], ids=str)
def test_matrices(name, halves):
    build, function = ACTS_OF_MATRICES[name]
    case = fused.case_of(build(halves), function)
    fused.check_forward("cuda", case)
    fused.check_forward_in_all_tiles("cuda", case)
    fused.check_forward("cuda", replace(case, columns=320, scales=None, matrices=torch.float32))
    fused.check_forward_in_all_tiles("cuda", replace(case, columns=320, scales=None, matrices=torch.float32))
    fused.check_forward("cuda", replace(case, dtype=torch.float16, transposed=True, bias=torch.float32))
    fused.check_forward("cuda", replace(case, sizes=(0, 0, 0)))


@pytest.mark.parametrize("block", [1, 4])
def test_matrices_beside_narrow_blocks_of_gate_and_up(block):
    build, function = ACTS_OF_MATRICES["residual"]
    fused.check_forward("cuda", fused.case_of(build(interleaved(block)), function, dtype=torch.float16))


@pytest.mark.parametrize("name", ["slopes of gate and up", "bias"])
@pytest.mark.parametrize("sizes", [(5000, 0, 3), tuple(range(200))], ids=["long", "many"])
def test_sums_over_more_groups_and_blocks_than_threads_take_at_a_time(name, sizes):
    build, function = ACTS_OF_COLUMNS[name]
    fused.check_backward("cuda", fused.case_of(build("concat"), function, sizes=sizes))


@pytest.mark.parametrize("vectors", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OF_COLUMNS)
def test_numbers_of_columns(name, vectors):
    case = fused.case_of(op_of_columns(name), OF_COLUMNS[name][0], vectors=vectors)
    fused.check_forward("cuda", case)
    fused.check_forward_in_all_tiles("cuda", case)
    fused.check_forward("cuda", replace(case, columns=320, transposed=True, bias=torch.float32))
    fused.check_forward_in_all_tiles("cuda", replace(case, columns=320, transposed=True, bias=torch.float32))
    fused.check_backward("cuda", case)
    fused.check_backward("cuda", replace(case, columns=320, transposed=True, scales=None))
    fused.check_backward("cuda", case, want_vectors=False)
    fused.check_backward("cuda", replace(case, sizes=(0, 0, 0)))


def test_kernels_without_scales_are_those_of_calls_without():
    case = fused.case_of(op_of_columns("slope"), learned_slope)
    for scales in (None, torch.float32):
        fused.check_forward_in_all_tiles("cuda", replace(case, scales=scales))
        fused.check_backward("cuda", replace(case, scales=scales))


@pytest.mark.parametrize("block", [1, 2, 8, 32])
def test_numbers_of_columns_where_gate_and_up_alternate(block):
    case = fused.case_of(op_of_columns("slope", interleaved(block)), learned_slope, dtype=torch.float16)
    fused.check_forward_in_all_tiles("cuda", case)
    fused.check_backward("cuda", replace(case, vectors=torch.float16))


def test_the_sums_of_columns_are_the_same_bits_every_time():
    t = fused.Tensors("cuda", fused.case_of(op_of_columns("slope"), learned_slope, sizes=(1000, 0, 3, 700)))
    preact = t.rows(t.case.width)
    first, again = fused.backward(t, preact), fused.backward(t, preact)
    assert all(torch.equal(a, b) for a, b in zip(first.vectors, again.vectors, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_layer_with_columns_is_one_fusion_and_captures_into_a_graph(dtype):
    def act():
        beta = torch.linspace(0.5, 1.5, 4 * 256, device="cuda", dtype=dtype).view(4, 256)
        return Pointwise(learned_slope, halves="concat", columns={"beta": beta})

    fused_layer, apart = layer(act()), layer(act())
    got = step(fused_layer)
    assert "hopper (function" in str(fused_layer.explain())
    assert len(fused_layer.explain().steps) == 1
    with fusible.config(disable_fusions={"GroupedMLP", "GroupedLinearGLU"}):
        expected = step(apart)
        assert len(apart.explain().steps) == 3
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2e-2)
    for again in (step(fused_layer), step(fused_layer), step(fused_layer)):  # the last are replayed
        assert all(torch.equal(one, other) for one, other in zip(got, again, strict=True))
    x, sizes, _ = inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = fused_layer(x, split_sizes=sizes)
    graph.replay()
    torch.testing.assert_close(y, got[0].detach())


def test_the_same_function_as_a_built_in_one_gives_nearly_its_numbers():
    built_in, own = (
        layer(act) for act in (fusible.SwiGLU(), Pointwise(lambda gate, up: F.silu(gate) * up, halves="concat"))
    )
    own.load_state_dict(built_in.state_dict())
    results = [step(model) for model in (built_in, own)]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2.0**-7, atol=1e-3)


def test_a_layer_is_one_fusion_and_captures_into_a_graph():
    model = layer(Pointwise(lambda gate, up, s: torch.tanh(gate * s) * up, halves="concat"))
    x, sizes, s = inputs()
    expected = model(x, split_sizes=sizes, s=s)
    assert "hopper" in str(model.explain())
    assert len(model.explain().steps) == 1
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = model(x, split_sizes=sizes, s=s)
    graph.replay()
    torch.testing.assert_close(y, expected.detach())


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_what_has_not_been_compiled_is_refused_inside_a_capture(tmp_path, monkeypatch):
    monkeypatch.setenv("FUSIBLE_CACHE_DIR", str(tmp_path))
    kernel_cache.cache_clear()
    model = layer(Pointwise(lambda gate, up: torch.sin(gate) * up * 1.25, halves="concat"))
    x, sizes, _ = inputs()
    refused = pytest.raises(RuntimeError, match="call it once before the capture")
    with refused, torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x, split_sizes=sizes)
    kernel_cache.cache_clear()


def layer(act):
    torch.manual_seed(0)
    return fusible.Sequential(
        fusible.GroupedLinear(4, 128, 512, bias=False, device="cuda", dtype=torch.bfloat16),
        act,
        fusible.GroupedLinear(4, 256, 128, bias=False, device="cuda", dtype=torch.bfloat16),
    )


def inputs():
    generator = torch.Generator("cuda").manual_seed(1)
    x = torch.randn(300, 128, device="cuda", dtype=torch.bfloat16, generator=generator)
    return x, torch.tensor([100, 0, 150, 50], device="cuda"), torch.rand(300, device="cuda", generator=generator)


def step(model):
    x, sizes, _ = inputs()
    x.requires_grad_()
    y = model(x, split_sizes=sizes)
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]


def adapted(*acts):
    torch.manual_seed(0)
    linears = [
        fusible.GroupedLoRA(4, *shape, 8, device="cuda", dtype=torch.bfloat16) for shape in ((128, 512), (256, 128))
    ]
    for parameter in (*linears[0].parameters(), *linears[1].parameters()):
        torch.nn.init.normal_(parameter, std=0.1)
    ends = fusible.Dispatch(4), fusible.Scale(), fusible.Combine()
    return fusible.Sequential(ends[0], linears[0], *acts, linears[1], *ends[1:])


def test_columns_and_chains_between_adapters():
    beta = torch.linspace(0.5, 1.5, 4 * 256, device="cuda", dtype=torch.bfloat16).view(4, 256)
    op = Pointwise(learned_slope, halves="concat", columns={"beta": beta})
    bias = fusible.Bias(512, device="cuda", dtype=torch.bfloat16)
    model, x = adapted(bias, op, fusible.ConstantScale(0.5)), inputs()[0].requires_grad_()
    index = torch.randint(5, (300, 2), device="cuda")  # some are of no expert
    weights = torch.rand(300, 2, device="cuda").requires_grad_()
    tensors = [x, weights, *model.parameters()]

    def gradients(expected):
        y = model(x, top_k_index=index, top_k_weights=weights)
        assert [step.name for step in model.explain().steps][:1] == expected
        return [y, *torch.autograd.grad(y, tensors, torch.ones_like(y))]

    got = gradients(["RoutedLoRA"])
    with fusible.config(disable_fusions={"RoutedLoRA"}):
        apart = gradients(["Dispatch"])
    for one, other in zip(got, apart, strict=True):
        assert (one.float() - other.float()).norm() <= 0.02 * other.float().norm()


@pytest.mark.hopper
def test_deep_products_of_short_groups_take_the_tile_of_the_built_in_activation():
    linear = fusible.GroupedLinear(8, 4096, 512, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(8 * 256, 4096, device="cuda", dtype=torch.bfloat16)
    sizes, results = torch.tensor([100, 412, 256, 256, 0, 512, 255, 257], device="cuda"), []
    for act in (fusible.SwiGLU(), Pointwise(lambda gate, up: F.silu(gate) * up, halves="concat")):
        model = fusible.Sequential(linear, act)
        results.append(model(x, split_sizes=sizes))
        assert "tile 160 x 256" in str(model.explain(x, split_sizes=sizes))
    torch.testing.assert_close(*results, rtol=2.0**-7, atol=1e-3)
