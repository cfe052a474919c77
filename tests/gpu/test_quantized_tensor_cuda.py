"""Reference quantisers give the same bits on a GPU as on a CPU, and wait for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fusible import MXFP8, NVFP4, Float8Block, Float8Row, Float8Tensor, QuantizedGroupedTensor
from fusible.ops import quantized_products as quantised
from fusible.ops.formats import formats, mxfp8, reference
from fusible.ops.formats.formats import E4M3, E5M2
from fusible.ops.kernels.problems.quantized import ScaledGemm, ScaledWgrad
from fusible.ops.kernels.pytorch import scaled_gemm as products

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

RECIPES = [
    Float8Block(),
    Float8Block(scales="float32"),
    Float8Row(),
    Float8Row(scales="float32"),
    Float8Tensor(),
    Float8Tensor(scales="power_of_two"),
    MXFP8(),
    NVFP4(),
    NVFP4(hadamard=False),
]
SIZES = torch.tensor([170, 0, 130, 1])


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def parts(copies: Any) -> Iterator[Tensor]:
    return (part.view(torch.uint8).cpu() for part in copies if isinstance(part, Tensor))


def are_same(on_cpu: Any, on_gpu: Any) -> bool:
    return all([torch.equal(a, b) for a, b in zip(parts(on_cpu), parts(on_gpu), strict=True)])


def copies_of(tensor: QuantizedGroupedTensor) -> list[Tensor | None]:
    return [tensor.rowwise, tensor.rowwise_scales, tensor.columnwise, tensor.columnwise_scales]


def owned(tensor: QuantizedGroupedTensor) -> list[Tensor]:
    """The tensors of both copies, without what no group owns: the tail, and blocks that are not used."""
    parts: list[Tensor] = []
    assert tensor.first_dims is not None
    sizes, size = tensor.first_dims.cpu(), {MXFP8: 32, NVFP4: 16}.get(type(tensor.recipe), 128)
    blocks, tokens = int(((sizes + size - 1) // size).sum()), int(sizes.sum())
    for part in copies_of(tensor):
        assert part is not None
        is_blocked = part.shape[0] == tensor.shape[0] // size + len(sizes)
        if part is tensor.rowwise_scales and isinstance(tensor.recipe, Float8Block):
            parts.append(part[:, :tokens].contiguous())
        elif is_blocked:
            parts.append(part[:blocks])
        else:
            parts.append(part[:tokens] if part.shape[0] == tensor.shape[0] else part)
    return parts


def varied(*shape: int) -> Tensor:
    x = torch.randn(shape) * torch.randn(*shape[:-1], 1).mul(3).exp() * torch.randn(shape[-1]).exp()
    x[..., 3, :] = 0
    return x.bfloat16()


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_of_16_bits_is_converted_alike(dtype: torch.dtype, format: formats.Format) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).float()

    assert are_same([formats.cast(values, format)], [formats.cast(values.cuda(), format)])
    assert are_same([formats.cast_e2m1(values)], [formats.cast_e2m1(values.cuda())])


@pytest.mark.parametrize("power_of_two", [True, False])
def test_every_amax_has_the_same_scale(power_of_two: bool) -> None:
    amax = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16).unsqueeze(1)

    (on_cpu, scales), (on_gpu, expected) = (
        reference.quantize_blocks(x, (1,), power_of_two) for x in (amax, amax.cuda())
    )

    assert torch.equal(scales.nan_to_num(nan=-1), expected.cpu().nan_to_num(nan=-1))
    assert are_same([on_cpu], [on_gpu])
    assert are_same(mxfp8.quantize_rows(amax), mxfp8.quantize_rows(amax.cuda()))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_tokens_are_quantised_alike(recipe: Any) -> None:
    x = varied(305, 272)

    on_cpu = QuantizedGroupedTensor.quantize(x, recipe, SIZES, columnwise=True)
    on_gpu = QuantizedGroupedTensor.quantize(x.cuda(), recipe, SIZES.cuda(), columnwise=True)

    for mine, theirs in zip(owned(on_cpu), owned(on_gpu), strict=True):
        assert are_same([mine], [theirs])
    for columnwise in (False, True):
        assert torch.equal(on_gpu.dequantize(columnwise=columnwise).cpu(), on_cpu.dequantize(columnwise=columnwise))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_weights_are_quantised_alike(recipe: Any) -> None:
    weight = varied(3, 288, 272)

    on_cpu, on_gpu = (
        QuantizedGroupedTensor.quantize(each, recipe, columnwise=True, halves=2) for each in (weight, weight.cuda())
    )

    assert are_same(copies_of(on_cpu), copies_of(on_gpu))


def test_mxfp8_regroups_alike() -> None:
    x, weight = varied(305, 272), varied(3, 288, 272)

    assert are_same(*(mxfp8.regroup_rows(mxfp8.quantize_rows(each)) for each in (x, x.cuda())))
    assert are_same(*(mxfp8.regroup_weight(mxfp8.quantize_rows(each), 2) for each in (weight, weight.cuda())))
    assert are_same(
        *(
            mxfp8.regroup_columns(mxfp8.quantize_columns(each, sizes), sizes)
            for each, sizes in ((x, SIZES), (x.cuda(), SIZES.cuda()))
        )
    )


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_graph_captures_quantisers(recipe: Any) -> None:
    """Nothing waits for the device: sizes change between replays."""
    x, sizes = varied(305, 272).cuda(), SIZES.cuda()
    QuantizedGroupedTensor.quantize(x, recipe, sizes, columnwise=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = QuantizedGroupedTensor.quantize(x, recipe, sizes, columnwise=True)

    sizes.copy_(torch.tensor([5, 200, 0, 90]))
    graph.replay()

    again = QuantizedGroupedTensor.quantize(x, recipe, sizes, columnwise=True)
    assert are_same(owned(again), owned(captured))


def test_products_are_those_of_a_cpu() -> None:
    x, dy, weight = torch.randn(305, 272), torch.randn(305, 144), torch.randn(4, 144, 272)
    results = []
    for device in ("cpu", "cuda"):
        sizes = SIZES.to(device)
        a = reference.quantize_rows(x.to(device).bfloat16(), True)
        b = reference.quantize_weight(weight.to(device), 1, True)
        columns = (reference.quantize_columns(each.to(device).bfloat16(), sizes, True) for each in (dy, x))
        y, dw = torch.zeros(305, 144, device=device), torch.zeros(4, 144, 272, device=device)
        products.run(ScaledGemm(a, b.data, b.scales, 1, sizes, y, fresh=True))
        products.run(ScaledWgrad(*columns, sizes, 305, dw))
        results.append((y.cpu(), dw.cpu()))

    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("recipe", [*RECIPES, MXFP8("fast")], ids=str)
def test_products_under_a_recipe_are_those_of_a_cpu(recipe: Any) -> None:
    operands = [torch.randn(304, 256).bfloat16(), torch.randn(304, 384).bfloat16(), torch.randn(4, 384, 256).bfloat16()]
    results = []
    for device in ("cpu", "cuda"):
        x, dy, weight = (each.to(device) for each in operands)
        sizes, quantize = SIZES.to(device), QuantizedGroupedTensor.quantize
        a, b = (quantize(each, recipe, sizes, columnwise=True) for each in (x, dy))
        w = quantize(weight, recipe, columnwise=True)
        results.append((quantised.forward(a, w), quantised.input_grad(b, w), quantised.weight_grad(b, a)))

    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_cpu - on_gpu.cpu()).float().norm() < 2**-7 * on_cpu.float().norm()
