"""MXFP4: bytes and scales against a definition written out, products, gpt-oss's checkpoints against transformers."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from math import frexp, inf, isinf, isnan, nan
from typing import Any

import pytest
import scalar_quantisers as scalar
import torch
from torch import Tensor

import fusible
from fusible import MXFP4, ArgumentError, GroupedLinear, QuantizedGroupedTensor
from fusible.integrations import checkpoints
from fusible.ops.formats import mxfp4
from fusible.ops.formats.copies import Weight
from fusible.ops.formats.formats import unpack

E, K, F = 3, 64, 96
SIZES = (5, 0, 4)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def exponent_of(amax: float) -> int:
    """The byte of a sixth of the largest magnitude, rounded up to a power of two."""
    if isnan(amax):
        return 255
    if isinf(amax):
        return 254
    sixth = scalar.float32(amax / 6)
    mantissa, exponent = frexp(sixth)  # the mantissa from a half on
    return max(exponent - (mantissa == 0.5), -127) + 127 if sixth else 0


def block(values: list[float]) -> tuple[list[int], int]:
    exponent = exponent_of(nan if any(map(isnan, values)) else max(map(abs, values)))
    inverse = nan if exponent == 255 else 2.0 ** (127 - exponent)
    return [7 if isnan(v * inverse) else scalar.nearest(scalar.float32(v * inverse), "e2m1") for v in values], exponent


def check_block(values: Tensor) -> None:
    quantised = mxfp4.quantize_weight(values)
    codes, exponent = block(values.double().tolist())
    assert quantised.scales.view(torch.uint8).tolist() == [exponent]
    assert unpack(quantised.data).tolist() == codes


def test_bytes_and_scales_are_those_of_the_definition() -> None:
    for _ in range(200):
        check_block((torch.randn(32) * torch.randn(32).exp() * 2.0 ** torch.randint(-140, 120, ())).bfloat16())
    check_block(torch.arange(32.0) / 4)  # ties
    check_block(torch.zeros(32).index_fill_(0, torch.tensor(3), 2.0**-149))
    check_block(-torch.zeros(32))


@pytest.mark.parametrize("value", [inf, -inf, nan])
def test_what_is_not_finite_stays_so(value: float) -> None:
    x = torch.randn(2, 64).bfloat16()
    x[0, 40] = value
    values = mxfp4.dequantize(mxfp4.quantize_weight(x))

    assert torch.equal(values[0, 40], torch.tensor(value).bfloat16()) or (isnan(value) and values[0, 32:].isnan().all())
    assert values[0, :32].isfinite().all()
    assert values[1].isfinite().all()


def test_scales_of_every_amax_let_nothing_saturate() -> None:
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16)
    quantised = mxfp4.quantize_weight(torch.nn.functional.pad(amax.unsqueeze(1), (0, 31)))

    exponents = quantised.scales.view(torch.uint8).flatten().int()
    assert exponents.tolist() == [exponent_of(value) for value in amax.double().tolist()]
    assert (6 * 2.0 ** (exponents.double() - 127) >= amax.double()).all()


def test_values_that_were_quantised_are_quantised_exactly() -> None:
    values = mxfp4.dequantize(mxfp4.quantize_weight(torch.randn(50, 96)))
    assert torch.equal(mxfp4.dequantize(mxfp4.quantize_weight(values)), values)


def test_values_are_those_of_transformers() -> None:
    theirs = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    exponents = torch.arange(2, 252, dtype=torch.uint8).view(1, -1, 1)
    blocks = torch.randint(256, (1, exponents.shape[1], 1, 16), dtype=torch.uint8)

    ours = mxfp4.dequantize(Weight(blocks.flatten(-2), exponents.view(torch.float8_e8m0fnu)))
    assert torch.equal(ours.mT, theirs(blocks, exponents))


def test_storage() -> None:
    weight = torch.randn(E, 40, K).bfloat16()
    tensor = QuantizedGroupedTensor.quantize(weight, MXFP4())
    file = io.BytesIO()
    torch.save(tensor.state(), file)
    file.seek(0)
    loaded = QuantizedGroupedTensor.from_state(torch.load(file, weights_only=True))

    assert torch.equal(loaded.dequantize(), mxfp4.dequantize(mxfp4.quantize_weight(weight)))
    assert 0.05 < float((loaded.dequantize() - weight).norm() / weight.norm()) < 0.15
    scales = loaded.rowwise_scales
    assert scales is not None
    with pytest.raises(ValueError, match=r"rowwise_scales must be \(\[3, 40, 2\], torch.float8_e8m0fnu\)"):
        QuantizedGroupedTensor.from_state(tensor.state() | {"rowwise_scales": scales.float()})
    with pytest.raises(ValueError, match="MXFP4 quantises weights, not tokens"):
        QuantizedGroupedTensor.quantize(weight[0], MXFP4(), torch.tensor([40]))
    with pytest.raises(ValueError, match="MXFP4 has no columnwise copy of a weight"):
        QuantizedGroupedTensor.quantize(weight, MXFP4(), columnwise=True)
    with pytest.raises(ValueError, match="MXFP4 needs features that are multiples of 32, got 48"):
        QuantizedGroupedTensor.quantize(weight[..., :48], MXFP4())


# --- products ---------------------------------------------------------------------------------------------------------


def experts(**options: Any) -> fusible.Sequential:
    options = {"dtype": torch.bfloat16, **options}
    first, second = GroupedLinear(E, K, 2 * F, **options), GroupedLinear(E, F, K, **options)
    return fusible.Sequential(first, fusible.SwiGLU(), second)


def results(model: fusible.Sequential, **keywords: Any) -> dict[str, Tensor]:
    x = torch.randn(10, K, generator=torch.Generator().manual_seed(3)).bfloat16().requires_grad_()
    y = model(x, split_sizes=torch.tensor(SIZES), **keywords)
    y[:9].square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


def test_products_are_those_of_the_dequantised_weights() -> None:
    plain = experts()
    rounded = copy.deepcopy(plain)
    for linear in (rounded[0], rounded[2]):
        linear.weight.data = mxfp4.dequantize(mxfp4.quantize_weight(linear.weight.data))
    expected, stays = results(rounded), fusible.quantize_(copy.deepcopy(plain), MXFP4())
    with fusible.config(recipe=MXFP4()):
        in_training = results(plain)

    assert expected.keys() == in_training.keys()
    for name, value in expected.items():
        assert torch.equal(in_training[name], value), name
    for name, value in results(stays).items():
        assert torch.equal(value, expected[name]), name
    assert "0.weight" not in results(stays)


def test_weights_load_as_they_were_saved() -> None:
    plain = experts(single_grouped_weight=False)
    stays, again, rounded = fusible.quantize_(plain, MXFP4()), fusible.quantize_(experts(), MXFP4()), experts()
    again.load_state_dict(stays.state_dict())
    with pytest.warns(UserWarning, match="rounded values are loaded"):
        rounded.load_state_dict(again.state_dict())

    assert stays.state_dict()["0.weight_scale_inv"].dtype == torch.float8_e8m0fnu
    assert torch.equal(results(again)["y"], results(stays)["y"])
    assert torch.equal(results(rounded)["y"], results(stays)["y"])


def test_what_is_refused() -> None:
    stays = fusible.quantize_(experts(), MXFP4())
    for dtype in (torch.float16, torch.float32):
        why = f"x: the weight is quantised, and MXFP4 multiplies bfloat16, not {dtype}".replace("torch.", "")
        with pytest.raises(ArgumentError, match=f"{why}; cast it"):
            stays(torch.randn(9, K, dtype=dtype), split_sizes=torch.tensor(SIZES))
    with pytest.raises(ArgumentError, match="MXFP4 needs in_features that are multiples of 32, got 48"):
        fusible.quantize_(GroupedLinear(E, 48, 32, dtype=torch.bfloat16), MXFP4())
    with fusible.config(recipe=MXFP4()):
        x = torch.randn(9, K).half()
        explained = fusible.explain(experts(dtype=torch.float16), x, split_sizes=torch.tensor(SIZES))
    assert "not quantised: MXFP4 multiplies bfloat16, not float16" in str(explained)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def packed(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    data, scales, *_ = mxfp4.quantize_weight(torch.randn(E, rows, columns) / 4)
    assert scales is not None
    return data.unflatten(-1, (-1, 16)), scales.view(torch.uint8)


def checkpoint(prefix: str = "model.layers.2.mlp.experts.") -> dict[str, Tensor]:
    """A layer as it is published."""
    named = {}
    for name, rows, columns in (("gate_up_proj", 2 * F, K), ("down_proj", K, F)):
        named[f"{prefix}{name}_blocks"], named[f"{prefix}{name}_scales"] = packed(rows, columns)
        named[f"{prefix}{name}_bias"] = torch.randn(E, rows).bfloat16()
    return named


def layer(layout: Any) -> fusible.Sequential:
    fc1, fc2 = GroupedLinear(E, K, 2 * F, dtype=torch.bfloat16), GroupedLinear(E, F, K, dtype=torch.bfloat16)
    act = fusible.ClampedSwiGLU(layout=layout)
    steps = OrderedDict(dispatch=fusible.Dispatch(E), fc1=fc1, act=act, fc2=fc2, scale=fusible.Scale())
    return fusible.quantize_(fusible.Sequential(OrderedDict(**steps, combine=fusible.Combine())), MXFP4())  # type: ignore[return-value]


@pytest.mark.parametrize("layout", ["concat", fusible.interleaved(1), fusible.interleaved(32)], ids=str)
def test_a_checkpoint_computes_what_transformers_makes_of_it(layout: Any) -> None:
    model = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    convert = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    config = model.GptOssConfig(num_local_experts=E, hidden_size=K, intermediate_size=F)
    config._experts_implementation = "eager"
    theirs, prefix, state = model.GptOssExperts(config).bfloat16(), "model.layers.2.mlp.experts.", checkpoint()
    for name in ("gate_up_proj", "down_proj"):
        getattr(theirs, name).data = convert(state[f"{prefix}{name}_blocks"], state[f"{prefix}{name}_scales"])
        getattr(theirs, f"{name}_bias").data = state[f"{prefix}{name}_bias"]
    ours, converted = layer(layout), checkpoints.from_mxfp4(state | {"lm_head": torch.ones(1)}, ("fc1", "fc2"))
    ours.load_state_dict({key.removeprefix(prefix): value for key, value in converted.items() if key != "lm_head"})
    x, ids, weights = torch.randn(7, K).bfloat16(), torch.rand(7, E).topk(2).indices, torch.rand(7, 2).bfloat16()
    y, expected = ours(x, top_k_index=ids, top_k_weights=weights), theirs(x, ids, weights)

    assert converted["lm_head"] == 1
    assert len(converted) == 8
    assert (y.float() - expected.float()).norm() < 0.01 * expected.float().norm()


def test_gate_before_up_stays_in_its_order() -> None:
    state = checkpoint("")
    straight = checkpoints.from_mxfp4(state, ("0", "2"), interleaved=False)
    assert torch.equal(straight["0.weight"], state["gate_up_proj_blocks"].flatten(-2))
    turned = checkpoints.from_mxfp4(state, ("0", "2"))
    assert torch.equal(turned["0.weight"][:, :F], state["gate_up_proj_blocks"].flatten(-2)[:, ::2])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_scales", lambda t: t[..., :1], r"_scales must be uint8 or float8_e8m0fnu \[3, 192, 2\], as"),
        ("down_proj_scales", lambda t: t.float(), r"as the blocks are .* not float32 \[3, 64, 3\]"),
        ("gate_up_proj_blocks", lambda t: t.flatten(-2), r"gate_up_proj_blocks must be uint8 \[E, out, in / 32, 16\]"),
        ("down_proj_blocks", lambda t: t.int(), "down_proj_blocks must be uint8"),
        ("down_proj_scales", lambda t: None, "down_proj_scales is missing"),
    ],
)
def test_a_checkpoint_that_does_not_fit_itself(name: str, change: Any, message: str) -> None:
    state = checkpoint("l.")
    state[f"l.{name}"] = change(state[f"l.{name}"])
    with pytest.raises(ValueError, match=message) as error:
        checkpoints.from_mxfp4({key: value for key, value in state.items() if value is not None}, ("0", "2"))
    assert str(error.value).startswith("l.")


def test_matrices_that_do_not_fit_one_another() -> None:
    state = checkpoint("")
    state["down_proj_blocks"], state["down_proj_scales"] = packed(K, 2 * F)
    with pytest.raises(ValueError, match="gate_up_proj and down_proj do not fit one another"):
        checkpoints.from_mxfp4(state, ("0", "2"))


@pytest.mark.parametrize("interleaved", [True, False])
def test_an_odd_number_of_rows_is_no_gate_and_up(interleaved: bool) -> None:
    state = checkpoint("l.")
    for name in ("blocks", "scales"):
        state[f"l.gate_up_proj_{name}"] = state[f"l.gate_up_proj_{name}"][:, 1:]
    with pytest.raises(ValueError, match=r"^l\.gate_up_proj_blocks must have as many rows of gate as of up, not 191"):
        checkpoints.from_mxfp4(state, ("0", "2"), interleaved=interleaved)


@pytest.mark.parametrize("name", ["gate_up_proj_scales", "down_proj_scales"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_that_are_nan_are_refused(name: str, dtype: torch.dtype) -> None:
    state = checkpoint("l.")
    state[f"l.{name}"].view(torch.uint8)[1, 2, 0] = 255
    state[f"l.{name}"] = state[f"l.{name}"].view(dtype)
    with pytest.raises(ValueError, match=rf"^l\.{name} must be exponents below 255, which is NaN, and has it 1 times"):
        checkpoints.from_mxfp4(state, ("0", "2"))


def test_rows_that_share_scales_keep_their_order() -> None:
    fc1, fc2 = GroupedLinear(E, 128, 512, dtype=torch.bfloat16), GroupedLinear(E, 256, 128, dtype=torch.bfloat16)
    concat = fusible.quantize_(fusible.Sequential(fc1, fusible.SwiGLU(), fc2), fusible.Float8Block())
    alternating = copy.deepcopy(fusible.Sequential(fc1, fusible.SwiGLU(layout=fusible.interleaved(1)), fc2))
    with pytest.raises(RuntimeError, match=r"0\.weight: rows of gate and up are in another order, and share scales"):
        alternating.load_state_dict(concat.state_dict())
