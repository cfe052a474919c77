"""Products of e4m3 operands with scales of blocks of 128 or of whole rows, against bfloat16 and others' fp8.

    python -m fusible.benchmarks.scaled_gemm            the first linear of five models, and its gradients
    python -m fusible.benchmarks.scaled_gemm --linears fc1 fc2              both linears
    python -m fusible.benchmarks.scaled_gemm --wgrad-tiles 0 1 --rounds 7   some tiles

Random normals are quantised; the rows are spread unevenly. ``rows`` are our products of operands that have one scale
for each row. ``dense`` is one product of as many operations by ``torch._scaled_mm`` with one scale for each operand:
``fast`` leaves all sums to the tensor cores, ``two-level`` does not. ``grouped`` is ``torch._scaled_grouped_mm`` of the
operands of ``rows``; groups of weight gradients are rounded to multiples of 16 rows for it. ``deepgemm`` has block
scales and needs rows padded beforehand: groups start at multiples of 128. Only rows that are not padding count as
operations. Its weight gradients are accumulated in float32, so compare them with ``fp32 +=``.

An untimed call precedes each timed one, so that the device never waits for the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from fusible.ops.formats.copies import BLOCK, Columns, Rows, ceil_blocks
from fusible.ops.kernels.hopper import gemm, quantize, scaled_activation, scaled_gemm
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout
from fusible.ops.kernels.problems.quantized import ActivatedScaledGemm, QuantizeActivation, ScaledGemm, ScaledWgrad
from fusible.ops.values.activation_spec import ActivationSpec

from .arguments import positive, require_cuda
from .peers import deepgemm
from .problem import PRESETS, InaccurateError, split_sizes
from .timing import interleaved, markdown

E4M3 = torch.float8_e4m3fn
MOST = 448.0
Function = Callable[[], Tensor]


class Shape(NamedTuple):
    """A model, and its number of tokens before top-k."""

    preset: str
    tokens: int


SHAPES = {
    "Mixtral 8k": Shape("mixtral", 8192),
    "Qwen3 32k": Shape("qwen3", 32768),
    "gpt-oss 32k": Shape("gpt-oss", 32768),
    "Qwen3 8k": Shape("qwen3", 8192),
    "DSv3 EP-8": Shape("deepseek-v3-ep8", 8192),
}
FEW_ROWS = {"Mixtral 64": Shape("mixtral", 64), "Qwen3 64": Shape("qwen3", 64)}


class GemmOperands(NamedTuple):
    """The operands of one model in bfloat16: rows, weights, gradients of the result."""

    x: Tensor  # [T, K]
    weight: Tensor  # [E, N, K]
    dy: Tensor  # [T, N]
    sizes: Tensor  # [E]


LINEARS = ("fc1", "fc2")


def operands(shape: Shape, linear: str) -> GemmOperands:
    """Draws normal operands."""
    model = PRESETS[shape.preset]
    rows = shape.tokens * model.top_k // model.ranks
    columns, depth = (2 * model.hidden, model.features) if linear == "fc1" else (model.features, model.hidden)
    random = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return torch.randn(size, generator=random, device="cuda", dtype=torch.bfloat16) * scale

    sizes = split_sizes("random", model.experts, rows).cuda()
    weight = draw(model.experts, columns, depth, scale=depth**-0.5)
    return GemmOperands(draw(rows, depth), weight, draw(rows, columns), sizes)


def transposed(o: GemmOperands) -> GemmOperands:
    """The operands of the product that gives the gradient of the rows: the result's gradients and the transposed
    weights.
    """
    return GemmOperands(o.dy, o.weight.mT.contiguous(), o.x, o.sizes)


def quantized(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes in blocks [..., block] and the power of two that decodes each block."""
    scale = torch.exp2((blocks.abs().amax(-1).float() / MOST).clamp(min=2.0**-100).log2().ceil())
    return (blocks.float() / scale[..., None]).clamp(-MOST, MOST).to(E4M3), scale


def quantized_rows(x: Tensor) -> Rows:
    rows, features = x.shape
    blocks = ceil_blocks(features)
    padded = torch.nn.functional.pad(x, (0, blocks * BLOCK - features)).view(rows, blocks, BLOCK)
    data, scales = quantized(padded)
    held = scales.new_zeros(blocks, -(-rows // 4) * 4)
    held[:, :rows] = scales.mT
    return Rows(data.view(rows, -1)[:, :features].contiguous(), held)


def quantized_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantises one matrix at a time, as all of them in float32 do not fit in memory."""
    results = [_quantized_matrix(matrix) for matrix in weight]
    return torch.stack([data for data, _ in results]), torch.stack([scales for _, scales in results])


def _quantized_matrix(matrix: Tensor) -> tuple[Tensor, Tensor]:
    n, k = matrix.shape
    tall, wide = ceil_blocks(n), ceil_blocks(k)
    padded = torch.nn.functional.pad(matrix, (0, wide * BLOCK - k, 0, tall * BLOCK - n))
    data, scales = quantized(padded.view(tall, BLOCK, wide, BLOCK).transpose(1, 2).flatten(2))
    data = data.view(tall, wide, BLOCK, BLOCK).transpose(1, 2).reshape(tall * BLOCK, -1)
    return data[:n, :k].contiguous(), scales


def whole_rows(o: GemmOperands, out: Tensor) -> ScaledGemm:
    """The product of operands with one scale per row."""
    weights, scales = zip(*map(quantized, o.weight), strict=True)
    return ScaledGemm(Rows(*quantized(o.x)), torch.stack(weights), torch.stack(scales), 1, o.sizes, out)


def blocked_columns(x: Tensor, sizes: Tensor) -> Columns:
    rows, features = x.shape
    count = rows // BLOCK + len(sizes)
    data = torch.zeros(count, features, BLOCK, dtype=E4M3, device=x.device)
    scales = torch.ones(count, features, device=x.device)
    first = start = 0
    for size in sizes.tolist():
        used = ceil_blocks(size)
        if used:
            padded = torch.nn.functional.pad(x[start : start + size], (0, 0, 0, used * BLOCK - size))
            chunk = quantized(padded.view(used, BLOCK, features).transpose(1, 2))
            data[first : first + used], scales[first : first + used] = chunk
        first, start = first + used, start + size
    return Columns(data, scales)


def forward(o: GemmOperands) -> dict[str, Function]:
    """The contestants of the product of rows and weights."""
    rows, columns = len(o.x), o.weight.shape[1]
    bytes_, grid = quantized_weight(o.weight)
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    problem = ScaledGemm(quantized_rows(o.x), bytes_, grid, 1, o.sizes, out)
    rowwise = whole_rows(o, out)
    fast = replace(rowwise, fast_accumulation=True)
    ours = {"ours": problem, "rows": rowwise, "rows fast": fast}
    functions: dict[str, Function] = {
        name: lambda product=product: _ran(product)  # type: ignore[misc]
        for name, product in ours.items()
    }
    by_bfloat16 = torch.empty_like(out)

    def bf16() -> Tensor:
        gemm.launch(GroupedGemm(Layout.NT, o.x, o.weight, o.sizes, by_bfloat16))
        return by_bfloat16

    return functions | {"bf16": bf16} | _torch_forward(rowwise) | _deepgemm(partial(deepgemm.float8_product, problem))


def _ran(problem: ScaledGemm | ScaledWgrad, tile: int = -1) -> Tensor:
    if isinstance(problem, ScaledGemm):
        scaled_gemm.launch_gemm(problem)
    else:
        scaled_gemm.launch_wgrad(problem, tile)
    assert isinstance(problem.out, Tensor)
    return problem.out


def _torch_forward(p: ScaledGemm) -> dict[str, Function]:
    """torch's own products that can run here."""
    one = torch.ones((), device="cuda")
    ends = p.split_sizes.cumsum(0).to(torch.int32)

    a_scales = p.a.scales
    assert a_scales is not None

    def dense(fast: bool) -> Tensor:
        return torch._scaled_mm(
            p.a.data, p.weight[0].mT, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def grouped(fast: bool) -> Tensor:
        return torch._scaled_grouped_mm(
            *(p.a.data, p.weight.mT, a_scales, p.weight_scales),
            offs=ends,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )

    named = {"dense fast": (dense, True), "dense two-level": (dense, False)}
    named |= {"grouped fast": (grouped, True), "grouped two-level": (grouped, False)}
    functions: dict[str, Function] = {
        name: lambda function=function, fast=fast: function(fast)  # type: ignore[misc]
        for name, (function, fast) in named.items()
    }
    return {name: function for name, function in functions.items() if _runs(name, function)}


def _deepgemm(make: Callable[[], deepgemm.Float8Product]) -> dict[str, Function]:
    """DeepGEMM's product, if it is installed and runs."""
    why = deepgemm.PEER.refusal("cuda", torch.bfloat16)
    if why is not None:
        print(f"deepgemm is left out: {why}")
        return {}
    function = make()
    return {"deepgemm": function} if _runs("deepgemm", function) else {}


def _runs(name: str, function: Function) -> bool:
    try:
        function()
        torch.cuda.synchronize()
    except (RuntimeError, AttributeError, ValueError) as error:
        print(f"{name} does not run: {str(error).splitlines()[0][:150]}")
        return False
    return True


def wgrad(o: GemmOperands, tiles: Sequence[int], dtype: torch.dtype) -> dict[str, Function]:
    """The contestants of the gradient of the weights."""
    (experts, columns, features), rows = o.weight.shape, len(o.x)
    out = torch.empty(experts, columns, features, device="cuda", dtype=dtype)
    problem = ScaledWgrad(
        blocked_columns(o.dy, o.sizes), blocked_columns(o.x, o.sizes), o.sizes, rows, out, accumulate=False
    )
    functions: dict[str, Function] = {} if tiles else {"ours": lambda: _ran(problem)}
    for tile in tiles:
        functions[f"tile {tile}"] = lambda tile=tile: _ran(problem, tile)  # type: ignore[misc]
    sums = torch.zeros(experts, columns, features, device="cuda")
    adding = replace(problem, out=sums, accumulate=True)
    functions["fp32 +="] = lambda: _ran(adding)
    by_bfloat16 = torch.empty_like(out)

    def bf16() -> Tensor:
        gemm.launch(GroupedGemm(Layout.TN, o.dy, o.x, o.sizes, by_bfloat16))
        return by_bfloat16

    return functions | {"bf16": bf16} | _torch_wgrad(o) | _deepgemm(partial(deepgemm.float8_wgrad, adding))


def _torch_wgrad(o: GemmOperands) -> dict[str, Function]:
    """torch's own weight gradients that can run here: one scale per column, and groups of multiples of 16 rows."""
    (dy, _), (x, _) = (quantized(operand.mT.contiguous()) for operand in (o.dy, o.x))
    ends = o.sizes.cumsum(0) // 16 * 16
    ends[-1] = len(o.x)
    ends = ends.to(torch.int32)
    of_dy, of_x = (torch.ones(len(o.sizes) * len(columns), device="cuda") for columns in (dy, x))
    one = torch.ones((), device="cuda")

    def dense(fast: bool) -> Tensor:
        return torch._scaled_mm(dy, x.mT, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)

    def grouped(fast: bool) -> Tensor:
        return torch._scaled_grouped_mm(
            *(dy, x.mT, of_dy, of_x), offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    functions: dict[str, Function] = {
        "dense fast": lambda: dense(True),
        "dense two-level": lambda: dense(False),
        "grouped fast": lambda: grouped(True),
        "grouped two-level": lambda: grouped(False),
    }
    return {name: function for name, function in functions.items() if _runs(name, function)}


def activation(o: GemmOperands) -> dict[str, Function]:
    """The contestants for product, SwiGLU and quantiser of the hidden rows; bf16 has no quantiser."""
    bytes_, grid = quantized_weight(o.weight)
    tokens, columns = len(o.x), o.weight.shape[1]
    alternate = columns // 2 % BLOCK != 0  # as in the model that has such a number
    swiglu = ActivationSpec("silu", gated=True, block=1 if alternate else None)
    preact = torch.empty(tokens, columns, device="cuda", dtype=torch.bfloat16)
    product = ScaledGemm(quantized_rows(o.x), bytes_, grid, 1, o.sizes, preact)
    scales = torch.empty(ceil_blocks(columns // 2), -(-tokens // 4) * 4, device="cuda")
    rows = Rows(torch.empty(tokens, columns // 2, dtype=E4M3, device="cuda"), scales)
    fused = ActivatedScaledGemm(product, swiglu, None, True, rows)
    not_kept = replace(fused, product=replace(product, out=preact[:0]))
    apart = QuantizeActivation(preact, o.sizes, swiglu, None, True, rows, None)

    def in_epilogue(problem: ActivatedScaledGemm) -> Tensor:
        scaled_activation.run(problem)
        return scales

    def by_two_kernels() -> Tensor:
        scaled_gemm.launch_gemm(product)
        quantize.run(apart)
        return scales

    return {
        "two kernels": by_two_kernels,
        "epilogue": lambda: in_epilogue(fused),
        "epilogue, product not kept": lambda: in_epilogue(not_kept),
    }


def check(functions: dict[str, Function]) -> dict[str, float]:
    """The relative error against the product in bfloat16.

    Raises:
        InaccurateError: the error is larger than quantisation explains.
    """
    want, errors = functions["bf16"]().clone(), {}
    for name in functions:
        if name.startswith(("ours", "tile", "rows", "deepgemm")):
            function = functions[name]
            got = function.result() if isinstance(function, deepgemm.Float8Product) else function()
            total = sum(float((g.float() - w.float()).square().sum()) for g, w in _chunks(got, want))
            errors[name] = (total / sum(float(w.float().square().sum()) for _, w in _chunks(want, want))) ** 0.5
            got.fill_(torch.nan)
            if not errors[name] < 0.05:
                raise InaccurateError(f"{name}: relative error {errors[name]:.3g}")
    return errors


def _chunks(a: Tensor, b: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(torch.split(a.flatten(), 2**28), torch.split(b.flatten(), 2**28), strict=True))


def measure(functions: dict[str, Function], flops: int, rounds: int, accurate: bool) -> list[tuple[str, str, str]]:
    """Rows of the table: name, TFLOP/s, error."""
    errors = check(functions) if accurate else {}
    seconds = interleaved(functions, rounds, "cuda", steady=True)
    return [
        (name, f"{flops / seconds[name] / 1e12:.0f}", f"{errors[name]:.4f}" if name in errors else "")
        for name in functions
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, *FEW_ROWS], default=list(SHAPES))
    parser.add_argument(
        "--products",
        nargs="+",
        choices=["forward", "dgrad", "wgrad", "activation"],
        default=["forward", "dgrad", "wgrad"],
    )
    parser.add_argument("--linears", nargs="+", choices=LINEARS, default=["fc1"])
    parser.add_argument("--wgrad-tiles", nargs="*", type=int, default=[], help="by their numbers")
    arguments = parser.parse_args(argv)
    require_cuda(parser)
    for linear, name in product(arguments.linears, arguments.shapes):
        o = operands((SHAPES | FEW_ROWS)[name], linear)
        flops = 2 * o.dy.numel() * o.x.shape[1]
        for asked in arguments.products:
            functions = contestants(o, asked, arguments.wgrad_tiles)
            rows = measure(functions, flops, arguments.rounds, accurate="bf16" in functions)
            print(f"{name} {linear} {asked}")
            print(markdown(("contestant", "TFLOP/s", "error"), rows), flush=True)
            del functions


def contestants(o: GemmOperands, asked: str, tiles: Sequence[int]) -> dict[str, Function]:
    """The contestants of a product, by its name on the command line."""
    if asked == "activation":
        return activation(o)
    if asked == "wgrad":
        return wgrad(o, tiles, torch.bfloat16)
    return forward(o if asked == "forward" else transposed(o))


if __name__ == "__main__":
    main()
