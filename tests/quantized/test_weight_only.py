"""Formats of weights alone: bytes against definitions in double precision, and against the packages that write them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import stored_formats
import torch
from host_reads import NoHostTensors
from stored_formats import FORMATS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import fusible
from fusible import MXFP4, NF4, ArgumentError, Float8Weight, GroupedLinear, Int4, NVFP4Weight, Sequential, SwiGLU
from fusible.ops.formats import forms, nf4, runs
from fusible.ops.formats.copies import Weight
from fusible.ops.formats.weight_only import WeightOnly, in_words, of_words

E, N, K = 3, 136, 384
IDS = [in_words(format) for format in FORMATS]
each_format = pytest.mark.parametrize("format", FORMATS, ids=IDS)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@each_format
def test_values_are_those_of_the_definition(format: WeightOnly) -> None:
    weight = stored_formats.random_weight(format, (E, N, K))
    exact = stored_formats.values(format, weight)

    single, half = (format.decoded(weight, dtype) for dtype in (torch.float32, torch.bfloat16))
    bound = exact.abs() * 2.0**-23  # the scale of a block is rounded, and the product
    assert ((single.double() - exact).abs() <= bound).all()
    assert torch.equal(half, single.bfloat16())


def test_every_byte_of_every_format_of_four_bits() -> None:
    data = torch.arange(256, dtype=torch.uint8).view(1, 2, 128)
    for format in (MXFP4(), NVFP4Weight(), NF4(), Int4()):
        like = format.weight(torch.randn(1, 2, 256))
        weight = Weight(data, like.scales, like.amax)
        assert torch.equal(format.values(weight), stored_formats.values(format, weight).float())


FINE = [format for format in FORMATS if not getattr(format, "nested", False)]  # nested scales are coarser


@pytest.mark.parametrize("format", FINE, ids=repr)
def test_no_code_is_nearer_than_the_one_that_was_chosen(format: WeightOnly) -> None:
    weight = torch.randn(1, 128, 128)
    parts = format.weight(weight)
    error = (format.values(parts) - weight).abs()
    for step in (1, 16, -1, -16) if format.values_in_byte == 2 else (1, -1):
        beside = format.values(parts._replace(data=(parts.data.view(torch.uint8) + step).view(parts.data.dtype)))
        assert (error <= (beside - weight).abs().nan_to_num(nan=torch.inf) * 1.0001 + 1e-6).all()


@each_format
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_may_make_the_first_call(format: WeightOnly) -> None:
    op = fusible.quantize_(GroupedLinear(2, 128, 128, dtype=torch.bfloat16), format)
    x, sizes = torch.randn(5, 128, dtype=torch.bfloat16), torch.tensor([2, 3])
    forms.form_of.cache_clear()
    y = torch.compile(op, backend="eager", fullgraph=True)(x, split_sizes=sizes)

    assert torch.equal(y, op(x, split_sizes=sizes))


def test_forms_are_kept_for_calls_of_every_mode() -> None:
    forms.form_of.cache_clear()
    with torch.inference_mode(), FakeTensorMode():
        parts = forms.form_of(NF4(), (2, 128, 128))

    assert {(type(part), part.is_inference()) for part in (parts.data, *parts.decoders)} == {(Tensor, False)}


@each_format
def test_a_stack_is_its_matrices_one_by_one(format: WeightOnly) -> None:
    weight = torch.randn(E, N, K)
    whole = format.weight(weight)
    for group in range(E):
        one = format.weight(weight[group : group + 1])
        for a, b in zip(whole.tensors, one.tensors, strict=True):
            assert (a is None and b is None) or torch.equal(_bytes(a[group]), _bytes(b[0]))  # type: ignore[index]


@each_format
def test_the_format_crosses_a_schema_as_text(format: WeightOnly) -> None:
    assert of_words(in_words(format)) == format


@each_format
def test_bits_are_those_that_are_stored(format: WeightOnly) -> None:
    weight = format.weight(torch.randn(1, 1024, 1024))
    stored = sum(8 * part.nbytes for part in weight.tensors if part is not None) / 1024**2
    assert stored == pytest.approx(format.bits(1024), rel=0.005)


GOLDEN = {
    MXFP4(): ("f0e1d2c3b4a5968778695a4b3c2d1e0f", "7d"),
    NVFP4Weight(): ("f0e1d2c3b4a5968778695a4b3c2d1e0f", "30b8"),
    Int4(): ("f0e1d2c3b4a5968778695a4b3c2d1e0f", "003c"),
}
GOLDEN_VALUES = {
    MXFP4(): [0.0, -1.5, 0.125, -1.0, 0.25, -0.75, 0.375, -0.5],
    NVFP4Weight(): [0.0, -3.0, 0.25, -2.0, 0.5, -1.5, 0.75, -1.0],
    Int4(): [-0.0625, 0.0546875, -0.0546875, 0.046875, -0.046875, 0.0390625, -0.0390625, 0.03125],
}


@pytest.mark.parametrize("format", GOLDEN, ids=repr)
def test_golden_bytes(format: WeightOnly) -> None:
    """Written out by hand: 0xF0 is code 0, then code 15, which is -6 in e2m1, and 7 in int4."""
    data, scales = (torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8) for text in GOLDEN[format])
    dtype = {MXFP4(): torch.float8_e8m0fnu, NVFP4Weight(): torch.float8_e4m3fn, Int4(): torch.bfloat16}[format]
    factor = torch.ones(1, 1) if isinstance(format, NVFP4Weight) else None
    values = format.values(Weight(data.view(1, 1, -1), scales.view(dtype).view(1, 1, -1), factor))
    assert values[0, 0, :8].tolist() == GOLDEN_VALUES[format]


@each_format
def test_decoding_copies_nothing_from_the_host(format: WeightOnly) -> None:
    """A call after the first, which a CUDA graph may capture."""
    parts = [None if each is None else each.to("meta") for each in format.weight(torch.randn(E, N, K)).tensors]
    weight = Weight(*parts)  # type: ignore[arg-type]
    format.decoded(weight, torch.bfloat16)
    with NoHostTensors():
        assert format.decoded(weight, torch.bfloat16).shape == (E, N, K)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@each_format
def test_the_default_dtype_of_torch_decides_nothing(format: WeightOnly, default: torch.dtype) -> None:
    """Models are built, and loaded, while it is their own."""
    weight = torch.randn(E, N, K)
    parts = format.weight(weight)
    values = format.values(parts)
    _forget_tables()
    try:
        torch.set_default_dtype(default)
        again, found = format.weight(weight), format.values(parts)
    finally:
        torch.set_default_dtype(torch.float32)
        _forget_tables()

    assert [p is None or p.dtype for p in again.tensors] == [p is None or p.dtype for p in parts.tensors]
    assert all(
        a is None or torch.equal(_bytes(a), _bytes(b)) for a, b in zip(again.tensors, parts.tensors, strict=True)
    )
    assert found.dtype == torch.float32
    assert torch.equal(found, values)


def _forget_tables() -> None:
    if hasattr(nf4, "_pairs_on"):
        nf4._pairs_on.cache_clear()


def test_decoding_has_no_temporaries_of_the_size_of_all_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN", run := 1 << 18)
    groups, rows, columns = 64, 256, 256
    for format in (MXFP4(), NF4(), Int4(), NVFP4Weight(), Float8Weight()):
        weight = format.weight(torch.zeros(1, rows, columns))
        parts = [None if p is None else p.expand(groups, *p.shape[1:]) for p in weight.tensors]
        with _Peak() as peak:
            format.decoded(Weight(*parts), torch.bfloat16)  # type: ignore[arg-type]
        whole = groups * rows * columns
        assert peak.largest <= 2 * whole  # the result
        assert peak.most_beside <= 4 * run


class _Peak(TorchDispatchMode):
    """The largest tensor that is allocated, and the largest one besides."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().nbytes() >= 1 << 16:
            self.sizes.append(result.untyped_storage().nbytes())
        return result

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def most_beside(self) -> int:
        return max(size for size in self.sizes if size != self.largest)


@each_format
@pytest.mark.parametrize("features", [704, 1856, 2880, 3072])
def test_linears_multiply_the_decoded_values(format: WeightOnly, features: int) -> None:
    inner = 256
    if format.size_refusal(features, inner) is not None or format.size_refusal(inner, features) is not None:
        pytest.skip("a size that the format refuses")
    layer = Sequential(GroupedLinear(E, inner, 2 * features), SwiGLU(), GroupedLinear(E, features, inner)).bfloat16()
    decoded = copy.deepcopy(layer)
    for name in ("0", "2"):
        linear: Any = decoded.get_submodule(name)
        linear.weight.data = format.decoded(format.weight(linear.weight.data), torch.bfloat16)
        linear.weight.requires_grad_(False)
    stored = fusible.quantize_(layer, format)
    x, sizes = torch.randn(9, inner).bfloat16(), torch.tensor([5, 0, 4])

    results = [_results(each, x, sizes) for each in (stored, decoded)]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def _results(layer: Any, x: Tensor, sizes: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x, split_sizes=sizes)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters() if p.requires_grad]]  # type: ignore[list-item]


@each_format
def test_state_dicts_keep_every_byte(format: WeightOnly) -> None:
    linear, again = (fusible.quantize_(GroupedLinear(E, K, N).bfloat16(), format) for _ in range(2))
    again.load_state_dict(linear.state_dict())
    for name, value in linear.state_dict().items():
        assert torch.equal(_bytes(again.state_dict()[name]), _bytes(value)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_scales_stay_in_the_dtype_that_they_came_in(dtype: torch.dtype) -> None:
    linear = fusible.quantize_(GroupedLinear(E, K, N).bfloat16(), Int4(128))
    state = linear.state_dict()
    state["weight_scale_inv"] = state["weight_scale_inv"].to(dtype)
    linear.load_state_dict(state, assign=True)
    assert linear.weight_scale_inv.dtype == dtype
    assert linear(torch.randn(4, K).bfloat16(), split_sizes=[1, 2, 1]).isfinite().all()


REFUSED = [
    (MXFP4(), 48, N, "MXFP4 needs in_features that are multiples of 32, got 48"),
    (NVFP4Weight(), 40, N, "NVFP4Weight needs in_features that are multiples of 16, got 40"),
    (NVFP4Weight(2), K, 7, "NVFP4Weight needs out_features that divide by 2, got 7"),
    (NF4(), 96, N, "NF4 needs in_features that are multiples of 64, got 96"),
    (NF4(nested=True, sections=2), K, 7, "NF4 needs out_features that divide by 2, got 7"),
    (Int4(128), 320, N, "Int4 in groups of 128 needs in_features that are multiples of it, got 320"),
    (Float8Weight("tensor", 2), K, 7, "Float8Weight needs out_features that divide by 2, got 7"),
]


@pytest.mark.parametrize(("format", "k", "n", "why"), REFUSED)
def test_sizes_are_refused_in_words(format: WeightOnly, k: int, n: int, why: str) -> None:
    linear = GroupedLinear(2, k, n)
    with pytest.raises(ArgumentError, match=why):
        fusible.quantize_(linear, format)
    assert linear.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Int4(12), "Int4: group must be a multiple of 8, got 12"),
        (lambda: NVFP4Weight(3), "NVFP4Weight: sections must be 1 or 2, got 3"),
        (lambda: Float8Weight("rows", 2), "Float8Weight: sections must be 1, got 2"),
        (lambda: Float8Weight("mx"), "Float8Weight: scales must be 'blocks' or 'rows' or 'tensor', got 'mx'"),
        (lambda: NF4("yes"), "NF4: nested must be True or False, got 'yes'"),
        (lambda: NF4(sections=2), "NF4: sections must be 1, got 2"),
    ],
)
def test_switches_are_refused_in_words(make: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make()


@each_format
def test_a_part_of_another_form_is_named(format: WeightOnly) -> None:
    good = fusible.quantize_(GroupedLinear(E, K, N).bfloat16(), format).state_dict()
    for name in [name for name in good if name.startswith("weight")]:
        for spoilt in (good[name][:, :-1], good[name].view(torch.uint8).double(), None):
            linear = fusible.quantize_(GroupedLinear(E, K, N).bfloat16(), format)
            before = {key: value.clone() for key, value in linear.state_dict().items()}
            state = {**good, name: spoilt} if spoilt is not None else {k: v for k, v in good.items() if k != name}
            with pytest.raises(RuntimeError, match=name):
                linear.load_state_dict(state)
            assert all(torch.equal(_bytes(before[key]), _bytes(value)) for key, value in linear.state_dict().items())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


# ---- the packages that write such checkpoints


def test_nf4_is_that_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = (torch.randn(1, 96, 1024) * torch.rand(1, 96, 1)).bfloat16()
    for nested in (False, True):
        data, state = functional.quantize_4bit(weight[0], blocksize=64, quant_type="nf4", compress_statistics=nested)
        ours = NF4(nested).weight(weight)
        assert ours.scales is not None
        theirs = Weight(data.view(1, 96, 512), state.absmax.view(1, 96, 16))
        if nested:  # whose codes they find by other comparisons
            assert state.absmax.dtype == torch.uint8
            assert (ours.scales.int() - theirs.scales.int()).abs().max() <= 1  # type: ignore[union-attr]
            decoders = nf4.Nested(
                *[each.view(1, -1) for each in (state.state2.absmax, state.state2.code, state.offset)]
            )
            theirs = theirs._replace(amax=decoders.joined())
            assert torch.equal(ours.amax, theirs.amax)  # type: ignore[arg-type]
        else:
            assert torch.equal(ours.scales, theirs.scales)  # type: ignore[arg-type]
        assert torch.equal(ours.data, theirs.data)
        assert torch.equal(NF4(nested).decoded(theirs, torch.bfloat16)[0], functional.dequantize_4bit(data, state))


def _scheme(**weights: Any) -> Any:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    return quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**weights))


def _compressor(name: str) -> Any:
    return pytest.importorskip("compressed_tensors.compressors").BaseCompressor.get_value_from_registry(name)


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("zero_points", [False, True])
def test_int4_is_that_of_compressed_tensors(group: int, zero_points: bool) -> None:
    compressor = _compressor("pack-quantized")
    scheme = _scheme(num_bits=4, type="int", strategy="group", group_size=group, symmetric=not zero_points)
    weight = torch.randn(N, K).bfloat16()
    scale = (weight.float().unflatten(1, (-1, group)).abs().amax(-1) / 7.5).bfloat16()
    state = {"weight": weight, "weight_scale": scale}
    if zero_points:
        state["weight_zero_point"] = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    packed = compressor.compress(dict(state), scheme)
    theirs = compressor.decompress(dict(packed), scheme)["weight"]

    third = packed["weight_zero_point"].unsqueeze(0) if zero_points else None
    parts = Weight(packed["weight_packed"].view(torch.uint8).unsqueeze(0), scale.unsqueeze(0), third)
    assert torch.equal(Int4(group, zero_points).decoded(parts, torch.bfloat16)[0], theirs)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_fp4_is_that_of_compressed_tensors(name: str) -> None:
    compressor, group = _compressor(f"{name}-pack-quantized"), 32 if name == "mxfp4" else 16
    strategy = "group" if name == "mxfp4" else "tensor_group"
    scheme = _scheme(num_bits=4, type="float", strategy=strategy, group_size=group, symmetric=True)
    format: WeightOnly = MXFP4() if name == "mxfp4" else NVFP4Weight(divides=True)
    weight = (torch.randn(N, K) * 0.02).bfloat16()
    ours = format.weight(weight.unsqueeze(0))
    assert ours.scales is not None
    state = {"weight": weight, "weight_scale": ours.scales[0].float().bfloat16()}
    if ours.amax is not None:
        state |= {"weight_global_scale": ours.amax[0], "weight_scale": ours.scales[0].float()}
    packed = compressor.compress(dict(state), scheme)
    theirs = compressor.decompress(dict(packed), scheme)["weight"]

    scales = packed["weight_scale"].view(ours.scales.dtype)
    parts = Weight(packed["weight_packed"].unsqueeze(0), scales.unsqueeze(0), ours.amax)
    assert torch.equal(format.decoded(parts, theirs.dtype)[0], theirs)


def test_nvfp4_is_that_of_modelopt() -> None:
    qtensor = pytest.importorskip("modelopt.torch.quantization.qtensor")
    weight = torch.randn(N, K) * 0.02
    quantised, scale, second = qtensor.NVFP4QTensor.quantize(weight, 16)
    parts = Weight(quantised._quantized_data.unsqueeze(0), scale.unsqueeze(0), second.view(1, 1))
    theirs = quantised.dequantize(torch.bfloat16, scale=scale, double_scale=second, block_sizes={-1: 16})

    assert torch.equal(NVFP4Weight().decoded(parts, torch.bfloat16)[0], theirs)
    ours = NVFP4Weight().weight(weight.unsqueeze(0))
    assert ours.scales is not None
    assert torch.equal(_bytes(ours.scales[0]), _bytes(scale))
    assert torch.equal(ours.data[0], quantised._quantized_data)


@pytest.mark.parametrize("scales", ["blocks", "rows", "tensor"])
def test_fp8_is_that_of_transformers(scales: Any) -> None:
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    format = Float8Weight(scales)
    parts = stored_formats.random_weight(format, (1, 256, K))
    assert parts.scales is not None
    scale = parts.scales[0].unsqueeze(-1) if scales == "rows" else parts.scales[0]
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(parts.data[0], scale, torch.bfloat16)
    assert torch.equal(format.decoded(parts, torch.bfloat16)[0], theirs)
