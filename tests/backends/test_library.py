"""The kernels as custom ops of ``torch.library``, and programs that ``torch.export`` makes of them."""

from __future__ import annotations

import io
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import mlp
from reference import assert_same
from torch import Tensor, nn
from torch.library import opcheck

from fusible import Pointwise, interleaved
from fusible.ops import kernels
from fusible.ops.formats import mxfp4, mxfp8, reference
from fusible.ops.kernels.doors.inference import Experts
from fusible.ops.kernels.doors.routing import Routing
from fusible.ops.kernels.operators import codecs, custom_ops
from fusible.ops.values.activation_spec import ActivationSpec

pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
OPS = torch.ops.fusible
ROWS, SIZES = 12, torch.tensor([3, 4, 2])
WHOLE = torch.tensor([3, 5, 4])  # no tail, which is not specified in what only grouped products read
SPEC = ("silu", True, 2.0, 1.5, 1.0, 4, None)
X, WIDE, SCALES = torch.randn(ROWS, 8), torch.randn(ROWS, 16), torch.rand(ROWS)
WEIGHT, BIAS = torch.randn(3, 16, 8), torch.randn(3, 16)
IDS = torch.tensor([[0, 2], [1, 3], [2, 1], [0, 1], [3, 3], [2, 0]])  # 3 is of no expert
PLACE = torch.tensor([[0, 6], [3, 9], [7, 4], [1, 5], [10, 11], [8, 2]], dtype=torch.int32)
COUNTS = torch.tensor([3, 3, 3, 9], dtype=torch.int32)
ROUTING = (torch.tensor([3, 5, 4, 12], dtype=torch.int32), PLACE.view(-1).argsort(), PLACE.long(), False)  # no tail
EXPERTS = [WEIGHT, torch.randn(3, 8, 8)]
TURNED = [weight.mT.contiguous() for weight in EXPERTS]
TOKENS = (X[:6], IDS % 3, torch.rand(6, 2))
GATED = Pointwise(lambda gate, up, s: gate.tanh() * up * s, halves=interleaved(4)).program.text
HALF, WIDE_HALF = X.bfloat16(), WIDE.bfloat16()
ROW_COPY, BYTES = reference.quantize_rows(HALF, True)[:2], reference.quantize_weight(WEIGHT, 1, True)[:2]
NIBBLES = mxfp4.quantize_weight(torch.randn(3, 16, 32))[:2]
PACKED = (*mxfp8.quantize_rows(WEIGHT)[:2], SIZES, "MXFP8")
STORED = (*NIBBLES, SIZES)
LONG_HALF, SECOND_PAIR = torch.randn(ROWS, 32).bfloat16(), (HALF, torch.randn(3, 8, 32).bfloat16())
COLUMNS, WIDE_COLUMNS = (reference.quantize_columns(each, SIZES, True)[:2] for each in (HALF, WIDE_HALF))
PLAIN = (None, None, None, None, None, "auto")  # no factor, no bias, no scales

SHIFTED_BY_SCALE = (
    "function",
    False,
    None,
    1.0,
    0.0,
    None,
    "in x r0 b0 dy\nt0 = add x b0\nt1 = mul t0 r0\nt2 = mul dy r0\nt3 = mul dy t0\ny = t1\ndx = t2\ndr0 = t3\ndb0 = t2",
)
OF_GROUPS = torch.rand(1, 3, 16)
SHIFTED = "in x b0 dy\nt0 = add x b0\ny = t0\ndx = dy\ndb0 = dy"
CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "NT": (OPS.grouped_gemm, ("NT", X, [WEIGHT], SIZES, None, 2.0, None, [BIAS], SCALES, SCALES, "auto")),
    "NT of lists": (OPS.grouped_gemm, ("NT", X, [*WEIGHT], SIZES, torch.float64, None, None, [*BIAS], *PLAIN[3:])),
    "NT with a second pair": (
        OPS.grouped_gemm,
        ("NT", X, [WEIGHT], SIZES, None, None, None, [BIAS], *PLAIN[3:], torch.rand(ROWS, 3), torch.rand(3, 16, 3)),
    ),
    "NN": (OPS.grouped_gemm, ("NN", WIDE, [WEIGHT], SIZES.int(), None, *PLAIN)),
    "TN": (OPS.grouped_gemm, ("TN", WIDE, [X], SIZES, None, None, torch.rand(3), *PLAIN[2:5], "loop strict")),
    "no rows": (OPS.grouped_gemm, ("TN", WIDE[:0], [X[:0]], 0 * SIZES, None, *PLAIN)),
    "NN into": (OPS.grouped_gemm_out, ("NN", WIDE, [WEIGHT], SIZES, [torch.ones(ROWS, 8)], None, None, *PLAIN)),
    "TN into": (OPS.grouped_gemm_out, ("TN", WIDE, [X], SIZES, [*torch.ones(3, 16, 8)], None, None, 1.0, *PLAIN[1:])),
    "fc1": (OPS.grouped_linear_activation, (X, [WEIGHT], WHOLE, *SPEC, [BIAS], SCALES, SCALES, True, True, "auto")),
    "fc1 alone": (OPS.grouped_linear_activation, (X, [WEIGHT], SIZES, *SPEC, None, None, None, False, False, "auto")),
    "fc2 backward": (
        OPS.grouped_linear_activation_backward,
        (X, [torch.randn(3, 8, 8)], WIDE, WHOLE, *SPEC, SCALES, True, True, torch.float64, "auto"),
    ),
    "fc2 backward alone": (
        OPS.grouped_linear_activation_backward,
        (X, [torch.randn(3, 8, 8)], WIDE, WHOLE, *SPEC, None, False, False, None, "auto"),
    ),
    "activate": (OPS.activate, (WIDE, *SPEC, SCALES)),
    "activate backward": (OPS.activate_backward, (X, WIDE, *SPEC, SCALES, True, True)),
    "activate backward alone": (OPS.activate_backward, (X, WIDE, *SPEC, None, False, False)),
    "fc1 with columns": (
        OPS.grouped_linear_activation,
        (X, [WEIGHT], WHOLE, *SHIFTED_BY_SCALE, None, None, SCALES, True, True, "auto", OF_GROUPS),
    ),
    "fc2 backward with columns": (
        OPS.grouped_linear_activation_backward,
        (X, [torch.randn(3, 8, 16)], WIDE, WHOLE, *SHIFTED_BY_SCALE, SCALES, True, True, None, "auto", OF_GROUPS, True),
    ),
    "activate with columns": (OPS.activate, (WIDE, *SHIFTED_BY_SCALE, SCALES, OF_GROUPS, SIZES)),
    "activate backward with columns": (
        OPS.activate_backward,
        (WIDE, WIDE, *SHIFTED_BY_SCALE, None, False, False, OF_GROUPS, SIZES, True),
    ),
    "column sums": (OPS.column_sums, (WIDE, SIZES, torch.float32, SCALES)),
    "pointwise": (OPS.pointwise, (WIDE, GATED, 4, SCALES[None], None, None)),
    "pointwise backward": (OPS.pointwise_backward, (X, WIDE, GATED, 4, SCALES[None], None, None, True, True, False)),
    "pointwise backward alone": (
        OPS.pointwise_backward,
        (X, None, "in x dy\ny = x\ndx = dy", *[None] * 4, True, False, False),
    ),
    "pointwise with columns": (OPS.pointwise, (X, SHIFTED, None, None, torch.rand(1, 3, 8), SIZES)),
    "pointwise backward with columns": (
        OPS.pointwise_backward,
        (X, None, SHIFTED, None, None, None, SIZES, False, False, True),
    ),
    "pointwise with a constant": (OPS.pointwise, (WIDE, "in x c0 dy\nt0 = minimum x c0\ny = t0", *[None] * 4, [0.5])),
    "row dots": (OPS.row_dots, (WIDE, [BIAS], SIZES, torch.float32)),
    "choose experts": (
        OPS.choose_experts,
        (X, 2, "sigmoid", True, 1.5, 4, 2, 2, True, BIAS[0, :8], torch.arange(ROWS) > 2, None),
    ),
    "choose given experts": (
        OPS.choose_experts,
        (HALF, 2, "softmax", False, 1.0, 1, 1, 1, False, None, None, IDS.repeat(2, 1)),
    ),
    "choose experts backward": (
        OPS.choose_experts_backward,
        (X, 2, "sqrtsoftplus", True, 1.5, 1, 1, 1, True, IDS.repeat(2, 1), WIDE[:, :2], BIAS[0, :8], SCALES[:1]),
    ),
    "choose experts backward, of weights alone": (
        OPS.choose_experts_backward,
        (HALF, 2, "softmax", False, 1.5, 1, 1, 1, False, IDS.repeat(2, 1), WIDE[:, :2], None, None),
    ),
    "route": (OPS.route, (IDS, 3)),
    "spread rows": (OPS.spread_rows, (X[:6], PLACE, COUNTS)),
    "sum rows": (OPS.sum_rows, (X, PLACE, COUNTS)),
    "routed MLP": (OPS.routed_mlp, (*TOKENS, *EXPERTS, BIAS, None, *SPEC, False, "auto")),
    "routed MLP, transposed": (OPS.routed_mlp, (*TOKENS, *TURNED, None, None, *SPEC, True, "loop strict")),
    "quantize rows": (OPS.quantize_rows, (HALF, SIZES, True, True, True, None, 1, "auto")),
    "quantize columns": (OPS.quantize_rows, (HALF, SIZES, False, False, True, COUNTS[:3].repeat(2), 2, "auto")),
    "quantize whole rows": (
        OPS.quantize_whole_rows,
        (HALF, SIZES, "rows", False, True, True, None, None, 1, "auto"),
    ),
    "quantize whole columns": (
        OPS.quantize_whole_rows,
        (HALF, SIZES, "groups", True, False, True, None, COUNTS[:3].repeat(2), 2, "auto"),
    ),
    "quantize whole weight": (OPS.quantize_whole_weight, ([WEIGHT], "rows", True, True, None, "auto")),
    "quantize whole weights": (OPS.quantize_whole_weight, ([*WEIGHT], "groups", False, False, None, "loop")),
    "quantize weight": (OPS.quantize_weight, ([WEIGHT], True, 2, True, "auto")),
    "quantize weights": (OPS.quantize_weight, ([*WEIGHT], False, 1, False, "loop")),
    "transpose bytes": (OPS.transpose_bytes, (BYTES[0], "auto")),
    "decode a weight": (OPS.decode_weight, (*NIBBLES, None, X, "MXFP4", "auto")),
    "fake-quantize rows": (OPS.fake_quantize_rows, (HALF, SIZES, "MXFP8", True, True, False, None, None, 1, "auto")),
    "fake-quantize gathered columns": (
        OPS.fake_quantize_rows,
        (HALF.repeat(1, 2), SIZES, "NVFP4", False, True, True, COUNTS[:1].long(), COUNTS[:3].repeat(2), 2, "auto"),
    ),
    "fake-quantize weight": (OPS.fake_quantize_weight, ([WEIGHT], "MXFP8", True, True, "auto")),
    "fake-quantize weights": (OPS.fake_quantize_weight, ([*WEIGHT.mT], "NVFP4", True, False, "loop")),
    "quantize activation": (OPS.quantize_activation, (WIDE_HALF, SIZES, *SPEC, SCALES, True, True, True, "auto")),
    "quantize activation backward": (
        OPS.quantize_activation_backward,
        (HALF, WIDE_HALF, WHOLE, *SPEC, SCALES, True, True, True, True, True, "auto"),
    ),
    "quantize activation backward alone": (
        OPS.quantize_activation_backward,
        (HALF, WIDE_HALF, WHOLE, *SPEC, None, False, True, False, False, False, "auto"),
    ),
    "scaled": (OPS.scaled_gemm, (*ROW_COPY, *BYTES, SIZES, 1, None, [BIAS], SCALES, SCALES, "auto")),
    "scaled into": (
        OPS.scaled_gemm_out,
        (*ROW_COPY, *BYTES, SIZES, 1, [torch.ones(ROWS, 16)], [BIAS], None, SCALES, "auto"),
    ),
    "scaled activation": (
        OPS.scaled_gemm_activation,
        (*ROW_COPY, *BYTES, WHOLE, *SPEC, [BIAS], SCALES, SCALES, True, True, torch.bfloat16, "auto"),
    ),
    "scaled activation alone": (
        OPS.scaled_gemm_activation,
        (*ROW_COPY, *BYTES, WHOLE, *SPEC, None, None, None, False, False, torch.float16, "auto"),
    ),
    "scaled wgrad": (OPS.scaled_wgrad, (*WIDE_COLUMNS, *COLUMNS, SIZES, ROWS, torch.float32, "auto")),
    "scaled wgrad into": (
        OPS.scaled_wgrad_out,
        (*WIDE_COLUMNS, *COLUMNS, SIZES, ROWS, [*torch.ones(3, 16, 8)], True, "auto"),
    ),
    "packed": (OPS.packed_gemm, (HALF, *PACKED, torch.float32, torch.rand(3), [BIAS], SCALES, SCALES, "auto")),
    "packed into": (
        OPS.packed_gemm_out,
        (HALF, *PACKED, [torch.ones(ROWS, 16)], None, [*BIAS], None, SCALES, "loop"),
    ),
    "stored": (OPS.stored_gemm, ("NT", LONG_HALF, *STORED, [BIAS], SCALES, SCALES, False, "auto")),
    "stored into, with a second pair": (
        OPS.stored_gemm_out,
        ("NN", WIDE_HALF, *STORED, [torch.ones(ROWS, 32).bfloat16()], None, None, None, False, "loop", *SECOND_PAIR),
    ),
    "gathered wgrad": (OPS.gathered_wgrad, (X[:6], WIDE, *ROUTING, False, torch.float32, "auto")),
    "gathered wgrad whose tokens lead": (OPS.gathered_wgrad, (X[:6], WIDE, *ROUTING, True, torch.float64, "auto")),
    "low rank pass": (
        OPS.low_rank_pass,
        (X, "NT", WHOLE, None, 1, torch.rand(3, 4, 8), torch.rand(ROWS, 4), None, False),
    ),
    "low rank pass over gathered rows": (
        OPS.low_rank_pass,
        (X[:6], "NN", WHOLE, ROUTING[1].int(), 2, torch.rand(3, 8, 4), torch.rand(ROWS, 4), torch.float64, True),
    ),
    "low rank pass for a gradient": (
        OPS.low_rank_pass,
        (X[:6], "NT", WHOLE, ROUTING[1].int(), 2, None, torch.rand(ROWS, 4), None, False),
    ),
}


WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def is_narrow(value: Any) -> bool:
    """Whether values have 8 bits, which torch does not compare: opcheck cannot tell whether an op changes them."""
    return isinstance(value, Tensor) and value.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu)


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    op, arguments = CALLS[name]
    options = {"test_utils": WITHOUT_SCHEMA} if any(map(is_narrow, arguments)) else {}
    results = opcheck(op, arguments, **options)

    assert set(results.values()) == {"SUCCESS"}


def test_every_custom_op_is_checked() -> None:
    registered = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fusible::")}

    assert registered == {op._qualified_op_name for op, _ in CALLS.values()}


def test_custom_ops_are_the_door() -> None:
    layout, spec = kernels.Layout.NT, ActivationSpec(*SPEC)
    terms = kernels.Terms(alpha=2.0, bias=BIAS, bias_scale=SCALES, row_scale=SCALES)
    gemm = kernels.grouped_gemm(layout, X, WEIGHT, SIZES, terms=terms)
    of_bias, call = kernels.Terms(bias=BIAS, bias_scale=SCALES), kernels.ActivationCall(SCALES, keep_preact=True)

    assert_same(OPS.grouped_gemm(*CALLS["NT"][1]), gemm)
    assert_same(
        OPS.grouped_linear_activation(*CALLS["fc1"][1]),
        kernels.grouped_linear_activation(X, WEIGHT, WHOLE, spec, of_bias, call),
    )


GEMM = "str layout, Tensor a, Tensor[] b, Tensor split_sizes"
ALPHA, BETA = "float? alpha, Tensor? alphas", "float? beta, Tensor? betas"
SECOND = "Tensor? second_a=None, Tensor? second_b=None"
EPILOGUE = f"Tensor[]? bias, Tensor? bias_scale, Tensor? row_scale, str switches, {SECOND}"
ACTIVATION = "str name, bool gated, float? limit, float alpha, float linear_offset, int? block, str? program"
RULE = "int top_k, str scores, bool normalize, float scale, int groups, int keep, int best, bool tallied"
SCHEMAS = {  # exported programs name the arguments
    "grouped_gemm": f"({GEMM}, ScalarType? out_dtype, {ALPHA}, {EPILOGUE}) -> Tensor",
    "grouped_gemm_out": f"({GEMM}, Tensor(a!)[] out, {ALPHA}, {BETA}, {EPILOGUE}) -> ()",
    "grouped_linear_activation": f"(Tensor x, Tensor[] weight, Tensor split_sizes, {ACTIVATION}, Tensor[]? bias, "
    "Tensor? bias_scale, Tensor? scales, bool keep_pre, bool interior, str switches, "
    f"Tensor? vectors=None, {SECOND}, Tensor? matrices=None) -> (Tensor, Tensor)",
    "activate": f"(Tensor pre, {ACTIVATION}, Tensor? scales, Tensor? vectors=None, Tensor? split_sizes=None) -> Tensor",
    "row_dots": "(Tensor tokens, Tensor[] vectors, Tensor split_sizes, ScalarType dtype) -> Tensor",
    "choose_experts": f"(Tensor logits, {RULE}, Tensor? bias, Tensor? valid, Tensor? fixed_ids) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "choose_experts_backward": f"(Tensor logits, {RULE}, Tensor ids, Tensor? d_weights, Tensor? d_sums, "
    "Tensor? d_squares) -> Tensor",
    "route": "(Tensor top_k_index, int num_experts) -> (Tensor, Tensor, Tensor)",
    "spread_rows": "(Tensor x, Tensor place, Tensor counts) -> Tensor",
    "sum_rows": "(Tensor rows, Tensor place, Tensor counts) -> Tensor",
    "gathered_wgrad": "(Tensor tokens, Tensor rows, Tensor tokens_per_expert, Tensor slot_of_row, Tensor row_of_slot, "
    "bool is_native, bool leads, ScalarType? dtype, str switches) -> Tensor",
    "low_rank_pass": "(Tensor x, str layout, Tensor split_sizes, Tensor? slot_of_row, int top_k, Tensor? factor, "
    "Tensor? low, ScalarType? gradient_dtype, bool want_rows) -> (Tensor, Tensor, Tensor)",
    "routed_mlp": "(Tensor x, Tensor top_k_index, Tensor top_k_weights, Tensor up, Tensor down, Tensor? up_bias, "
    f"Tensor? down_bias, {ACTIVATION}, bool transposed, str switches) -> Tensor",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_signature_of_a_kernel_is_its_schema(name: str) -> None:
    assert str(getattr(OPS, name).default._schema) == f"fusible::{name}{SCHEMAS[name]}"


@pytest.mark.parametrize(
    ("annotation", "value", "flat"),
    [
        (kernels.Matrices, WEIGHT, ([WEIGHT],)),
        (kernels.Matrices, [X, SCALES], ([X, SCALES],)),
        (kernels.Matrices | None, None, (None,)),
        (float | Tensor | None, 2.0, (2.0, None)),
        (float | Tensor | None, SCALES, (None, SCALES)),
        (float | Tensor | None, None, (None, None)),
        (torch.dtype | None, torch.float16, (torch.float16,)),
        (kernels.Layout, kernels.Layout.TN, ("TN",)),
        (ActivationSpec, ActivationSpec(*SPEC), SPEC),
        (Experts, Experts(*EXPERTS, BIAS, None, ActivationSpec(*SPEC), False), (*EXPERTS, BIAS, None, *SPEC, False)),
        (Routing, Routing(*ROUTING), ROUTING),
    ],
)
def test_parameters_come_out_of_a_schema_as_they_went_in(annotation: Any, value: Any, flat: tuple[Any, ...]) -> None:
    codec = codecs.codec_of(annotation)

    assert tuple(codec.flatten(value)) == flat
    assert codec.unflatten(*flat) is value or codec.unflatten(*flat) == value


def test_fields_with_a_default_do_not_cross_a_schema() -> None:
    codec = codecs.codec_of(Routing)
    flat = codec.flatten(Routing(*ROUTING, scales=SCALES))

    assert len(flat) == len(ROUTING)
    assert codec.unflatten(*flat).scales is None


@dataclass(frozen=True)
class Tiling:
    layout: kernels.Layout
    columns: int = 8


def test_fields_of_a_dataclass_cross_by_their_own_codecs() -> None:
    codec, tiling = codecs.codec_of(Tiling), Tiling(kernels.Layout.NN, 4)

    assert codec.schemas == ("str layout", "int columns")
    assert codec.flatten(tiling) == ["NN", 4]
    assert codec.unflatten("NN", 4) == tiling


def test_one_matrix_travels_as_a_stack_of_one() -> None:
    codec = codecs.codec_of(kernels.Matrices)

    assert torch.equal(codec.unflatten(*codec.flatten([X])), X[None])


def test_what_is_not_wanted_is_none_whatever_the_number_of_rows() -> None:
    codec, grads = codecs.codec_of_result(kernels.ActivationGrads), kernels.ActivationGrads(WIDE[:0], SCALES[:0], None)
    returned = codec.flatten(grads)

    assert [t.numel() for t in returned] == [0] * 5
    assert [t is None for t in codec.unflatten(*returned)] == [False, False, True, True, True]


def test_a_parameter_that_no_schema_declares_is_refused() -> None:
    def rotate(x: Tensor, angles: dict[str, float]) -> Tensor: ...

    with pytest.raises(
        TypeError, match=r"a kernel cannot take a parameter of type dict\[str, float\]: it has no codec"
    ):
        custom_ops.kernel(lambda x: x)(rotate)


OWN_KERNEL = """
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from fusible.ops.kernels.operators.custom_ops import kernel

def new_halves(x: Tensor, want_high: bool) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), torch.empty_like(x) if want_high else None

@kernel(new_halves)
def halves(x: Tensor, factor: float | Tensor | None = None, *, want_high: bool) -> tuple[Tensor, Tensor | None]:
    low, high = new_halves(x, want_high)
    low.copy_(x / 2 if factor is None else x / 2 * factor)
    return low, high

x = torch.ones(3)
graph = make_fx(lambda x: halves(x, 3.0, want_high=False), tracing_mode="fake")(x)
print(*[node.target for node in graph.graph.nodes if node.op == "call_function" and "fusible" in str(node.target)])
print(halves(x, 3.0, want_high=False), graph(x))
"""


def test_a_kernel_is_one_declaration() -> None:
    done = subprocess.run([sys.executable, "-c", OWN_KERNEL], capture_output=True, text=True, check=True)

    result = "(tensor([1.5000, 1.5000, 1.5000]), None)"
    assert done.stdout == f"fusible.halves.default\n{result} {result}\n"


BUNDLED = """
from typing import NamedTuple
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from fusible.ops.kernels.operators.custom_ops import kernel

class Line(NamedTuple):
    slope: float | Tensor | None = None
    start: Tensor | None = None
    note: str = "no note"

def new_points(x: Tensor, top: int, line: Line) -> Tensor:
    return torch.empty_like(x)

@kernel(new_points, spread={"line": ("slope", "start")}, added=("start",), obeys_switches=False)
def points(x: Tensor, line: Line, top: int) -> Tensor:
    print(line.note, top)
    return x * line.slope if line.start is None else x * line.slope + line.start

x, line = torch.ones(2), Line(3.0, torch.ones(2), "a note")
print(torch.ops.fusible.points.default._schema)
print(points(x, line, 4), make_fx(lambda x: points(x, line, 4), tracing_mode="fake", _allow_non_fake_inputs=True)(x)(x))
"""


def test_fields_of_a_bundle_are_parameters_of_the_op() -> None:
    done = subprocess.run([sys.executable, "-c", BUNDLED], capture_output=True, text=True, check=True)

    schema = "fusible::points(Tensor x, float? slope, Tensor? slopes, int top, Tensor? start=None) -> Tensor"
    assert done.stdout == f"{schema}\na note 4\nno note 4\n{'tensor([4., 4.]) ' * 2}".rstrip() + "\n"


EAGER_ONLY = """
from typing import NamedTuple
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from fusible.ops.kernels.operators.custom_ops import kernel

class Sorted(NamedTuple):
    values: Tensor
    order: Tensor
    weights: Tensor | None = None

def new_sorted(x: Tensor) -> Sorted:
    return Sorted(torch.empty_like(x), torch.empty_like(x, dtype=torch.int64))

@kernel(new_sorted, name="sorted_rows", eager_only=("weights", "out"))
def sort(x: Tensor, weights: Tensor | None = None, out: Tensor | None = None) -> Sorted:
    values, order = torch.sort(x)
    return Sorted(values, order, None if weights is None else weights[order])

x = torch.tensor([2, 1])
print(torch.ops.fusible.sorted_rows.default._schema, hasattr(torch.ops.fusible, "sorted_rows_out"))
print(sort(x, weights=x).weights, make_fx(lambda x: sort(x, weights=x), tracing_mode="fake")(x)(x).weights)
"""


def test_an_op_lacks_what_only_eager_calls_pass() -> None:
    done = subprocess.run([sys.executable, "-c", EAGER_ONLY], capture_output=True, text=True, check=True)

    schema = "fusible::sorted_rows(Tensor x, str switches) -> (Tensor, Tensor)"
    assert done.stdout == f"{schema} False\ntensor([1, 2]) None\n"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = mlp(3, 8, 8)

    def forward(self, x: Tensor, sizes: Tensor, scales: Tensor) -> Any:
        return self.experts(x, split_sizes=sizes, scales=scales)


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.parametrize("strict", [True, False])
def test_export_of_a_layer_with_any_number_of_rows(strict: bool) -> None:
    model, rows = Layer(), torch.export.Dim("rows", min=2)
    exported = torch.export.export(
        model, (X, SIZES, SCALES), dynamic_shapes=({0: rows}, None, {0: rows}), strict=strict
    )
    file = io.BytesIO()
    torch.export.save(exported, file)
    loaded = torch.export.load(io.BytesIO(file.getvalue())).module()
    targets = [str(node.target) for node in exported.graph.nodes if "fusible" in str(node.target)]

    assert targets == ["fusible.grouped_linear_activation.default", "fusible.grouped_gemm.default"]
    for n, sizes in ((12, [3, 4, 2]), (20, [10, 0, 9])):
        arguments = torch.randn(n, 8), torch.tensor(sizes), torch.rand(n)
        assert torch.equal(loaded(*arguments), model(*arguments))


def test_export_of_a_container_itself() -> None:
    model = Layer().experts
    given = {"split_sizes": SIZES, "scales": SCALES}

    assert torch.equal(torch.export.export(model, (X,), given).module()(X, **given), model(X, **given))


def test_backward_through_an_exported_program_warns() -> None:
    exported = torch.export.export(Layer(), (X, SIZES, SCALES)).module()
    with pytest.warns(UserWarning, match="an autograd kernel") as warned:
        exported(X, SIZES, SCALES).sum().backward()

    assert ["an autograd kernel was not registered" in str(w.message) for w in warned] == [True, True]


def test_the_compiler_is_not_imported_before_it_is_used() -> None:
    code = "import sys, fusible; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "False\n"
