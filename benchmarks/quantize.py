"""The time to quantise rows and weights: our kernels, a copy of as many bytes, and torch.compile.

    python -m fusible.benchmarks.quantize --preset qwen3 --tokens 32768

Rows are spread at random over the preset's experts. A copy reads half of the bytes and writes the other half.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fusible.ops.formats.copies import BLOCK, Columns, Rows, Scaling, ceil_blocks
from fusible.ops.kernels.doors import routing
from fusible.ops.kernels.hopper import quantize
from fusible.ops.kernels.hopper import rows as kernels
from fusible.ops.kernels.problems.gemm import ActivationGrads, nbytes
from fusible.ops.kernels.problems.quantized import (
    QuantizeActivation,
    QuantizeActivationBackward,
    QuantizedWeight,
    QuantizeRows,
    QuantizeWeight,
    Quantizing,
    RowWeight,
)
from fusible.ops.values.activation_spec import gated

from .arguments import add_common_arguments, command, positive
from .problem import PRESETS, Preset, split_sizes
from .report import Report
from .timing import interleaved, markdown


class QuantizePart(NamedTuple):
    """A tensor to quantise, and other ways to do the same."""

    name: str
    problem: Quantizing
    peers: Mapping[str, Callable[[], Any]]


def empty_rows(tokens: int, features: int, device: str) -> Rows:
    scales = torch.empty(ceil_blocks(features), -(-tokens // 4) * 4, device=device)
    return Rows(torch.empty(tokens, features, device=device, dtype=torch.float8_e4m3fn), scales)


def empty_columns(tokens: int, groups: int, features: int, device: str) -> Columns:
    blocks = tokens // BLOCK + groups
    data = torch.empty(blocks, features, BLOCK, device=device, dtype=torch.float8_e4m3fn)
    return Columns(data, torch.empty(blocks, features, device=device))


def empty_weight(experts: int, n: int, k: int, halves: int, device: str) -> QuantizedWeight:
    data = torch.empty(experts, n, k, device=device, dtype=torch.float8_e4m3fn)
    scales = torch.empty(experts, halves * ceil_blocks(n // halves), ceil_blocks(k), device=device)
    return QuantizedWeight(data, torch.empty_like(data.mT.contiguous()), scales)


def whole_rows(tokens: int, features: int, device: str) -> Rows:
    data = torch.empty(tokens, features, device=device, dtype=torch.float8_e4m3fn)
    return Rows(data, torch.empty(tokens, device=device))


def whole_weight(experts: int, n: int, k: int, device: str) -> RowWeight:
    data = torch.empty(experts, n, k, device=device, dtype=torch.float8_e4m3fn)
    scales = [torch.empty(experts, rows, device=device) for rows in (n, k)]
    return RowWeight(data, scales[0], torch.empty_like(data.mT.contiguous()), scales[1])


def torch_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of 1 x 128 with power-of-two scales in plain PyTorch; whole blocks only."""
    blocks = x.float().view(x.shape[0], -1, BLOCK)
    encode = _encode(blocks.abs().amax(-1, keepdim=True))
    return (blocks * encode).to(torch.float8_e4m3fn).flatten(1), (1 / encode).squeeze(-1).t().contiguous()


def torch_weight(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks of 128 x 128 with the transposed bytes in plain PyTorch; whole blocks only."""
    blocks = weight.float().view(len(weight), weight.shape[1] // BLOCK, BLOCK, -1, BLOCK)
    encode = _encode(blocks.abs().amax((2, 4), keepdim=True))
    data = (blocks * encode).to(torch.float8_e4m3fn).flatten(3).flatten(1, 2)
    return data, data.mT.contiguous(), 1 / encode.squeeze(4).squeeze(2)


def _encode(amax: Tensor) -> Tensor:
    return (torch.where(amax == 0, 1.0, 448.0 / amax).view(torch.int32) & ~0x7FFFFF).view(torch.float32)


def parts(preset: Preset, tokens: int, device: str, compiled: bool) -> Iterator[QuantizePart]:
    """The rows of the first linear, and both operands of its weights."""
    rows, (experts, k, f) = tokens * preset.top_k // preset.ranks, preset[:3]
    sizes = split_sizes("random", experts, rows).to(device)
    x = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
    copies = empty_rows(rows, k, device), empty_columns(rows, experts, k, device)
    yield QuantizePart("rows and columns", QuantizeRows(x, sizes, True, *copies), {})
    peers = {"torch.compile": partial(torch.compile(torch_rows), x)} if compiled and k % BLOCK == 0 else {}
    yield QuantizePart("rows", QuantizeRows(x, sizes, True, copies[0], None), peers)
    yield QuantizePart("columns", QuantizeRows(x, sizes, True, None, copies[1]), {})
    del copies
    yield from whole_parts(x, sizes, f, device)
    del x
    yield from routed_parts(preset, tokens, device)
    yield from activation_parts(rows, f, sizes, device)
    for dtype in (torch.bfloat16, torch.float32):
        weight, out = (
            torch.randn(experts, 2 * f, k, device=device, dtype=dtype),
            empty_weight(experts, 2 * f, k, 2, device),
        )
        whole = compiled and dtype == torch.bfloat16 and f % BLOCK == k % BLOCK == 0
        others = {"torch.compile": partial(torch.compile(torch_weight), weight)} if whole else {}
        yield QuantizePart(
            f"weights, {str(dtype).removeprefix('torch.')}", QuantizeWeight(weight, 2, True, out), others
        )
        del weight, out


def whole_parts(x: Tensor, sizes: Tensor, f: int, device: str) -> Iterator[QuantizePart]:
    """The same with one scale per row and per column of a group, which need two reads."""
    (rows, k), experts = x.shape, sizes.shape[0]
    by_row, by_column = whole_rows(rows, k, device), empty_columns(rows, experts, k, device)
    for scaling in (Scaling.ROWS, Scaling.GROUPS):
        of = f"scales of {scaling.value}"
        for name, copies in (("rows and columns", (by_row, by_column)), ("rows", (by_row, None))):
            problem = QuantizeRows(x, sizes, True, copies[0], copies[1], scaling=scaling)
            yield QuantizePart(f"{name}, {of}", problem, {})
    del by_row, by_column
    weight = torch.randn(experts, 2 * f, k, device=device, dtype=torch.bfloat16)
    out = whole_weight(experts, 2 * f, k, device)
    for scaling in (Scaling.ROWS, Scaling.GROUPS):
        problem_of_weight = QuantizeWeight(weight, 1, True, out, scaling)
        yield QuantizePart(f"weights, bfloat16, scales of {scaling.value}", problem_of_weight, {})


def routed_parts(preset: Preset, tokens: int, device: str) -> Iterator[QuantizePart]:
    """Column operands gathered from rows in place."""
    experts, k, top_k = preset.experts, preset.features, preset.top_k
    tokens //= preset.ranks  # their slots are all of these experts
    index = torch.rand(tokens, experts, device=device).argsort(-1)[:, :top_k].contiguous()
    x, route = torch.randn(tokens, k, device=device, dtype=torch.bfloat16), routing.route(index, experts)
    if not route.is_native:
        return
    columns = empty_columns(tokens * top_k, experts, k, device)
    gather = QuantizeRows(x, route.split_sizes, True, None, columns, route.slot_of_row, top_k)
    yield QuantizePart("columns of gathered rows", gather, {})


def activation_parts(rows: int, f: int, sizes: Tensor, device: str) -> Iterator[QuantizePart]:
    """A gated silu with scales: the quantised outputs of its forward, and of its backward if a kernel supports it."""
    experts, spec = sizes.shape[0], gated("silu", None, 1.0, 0.0, "concat")
    preact, dpostact = (torch.randn(rows, n, device=device, dtype=torch.bfloat16) for n in (2 * f, f))
    scales = torch.rand(rows, device=device)
    postact, columns = empty_rows(rows, f, device), empty_columns(rows, experts, f, device)
    both = QuantizeActivation(preact, sizes, spec, scales, True, postact, None)
    out = torch.empty_like(dpostact)
    yield QuantizePart(
        "activation, rows", both, {"activation alone": partial(kernels.forward, preact, spec, scales, out)}
    )
    copies = empty_rows(rows, 2 * f, device), empty_columns(rows, experts, 2 * f, device), columns
    backward = QuantizeActivationBackward(
        *(dpostact, preact, sizes, spec, scales, True, *copies, torch.empty_like(scales))
    )
    if quantize.refusal(backward) is None:
        grads = ActivationGrads(torch.empty_like(preact), scales, out)
        alone = partial(kernels.backward, dpostact, preact, spec, scales, grads)
        yield QuantizePart("activation backward", backward, {"activation backward alone": alone})


def moved_bytes(problem: Quantizing) -> int:
    """Bytes read (once or twice) and written, without the allocated column blocks that no group uses."""
    if isinstance(problem, QuantizeWeight):
        return problem.bytes
    columns = [problem.columns]
    if isinstance(problem, QuantizeActivationBackward):
        columns.append(problem.postact_columns)
    used = int((-(-problem.split_sizes // BLOCK)).sum())
    return problem.bytes - sum(
        nbytes(*(t[used:] for t in copy[:2] if t is not None)) for copy in columns if copy is not None
    )


def measure(part: QuantizePart, rounds: int, device: str) -> dict[str, float]:
    """Seconds of the kernel, of a copy, and of the peers.

    Raises:
        RuntimeError: the kernel refuses the operands.
    """
    if (why := quantize.refusal(part.problem)) is not None:
        raise RuntimeError(f"{part.name}: {why}")
    source = torch.empty(moved_bytes(part.problem) // 2, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    ways: dict[str, Callable[[], Any]] = {"fusible": partial(quantize.run, part.problem), "copy": copy, **part.peers}
    return interleaved(ways, rounds, device)


def row_of(part: QuantizePart, seconds: Mapping[str, float]) -> tuple[str, ...]:
    """A line of the table."""
    ours, copy = seconds["fusible"], seconds["copy"]
    others = ", ".join(f"{name} {time * 1e6:.1f}" for name, time in seconds.items() if name not in ("fusible", "copy"))
    speed = f"{moved_bytes(part.problem) / ours / 1e9:.0f}"
    return part.name, f"{ours * 1e6:.1f}", speed, f"{copy * 1e6:.1f}", f"{copy / ours:.3f}", others


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every requested preset and number of tokens, and prints Markdown."""
    args = _arguments(argv)
    head = ("", "us", "GB/s", "copy, us", "share of the copy's speed", "others, us")
    with Report(args.out, args.json) as report:
        for name, tokens in product(args.preset, args.tokens):
            print(f"{name}, {tokens} tokens …", file=sys.stderr, flush=True)
            rows, seconds = [], {}
            for part in parts(PRESETS[name], tokens, args.device, args.compiled):
                seconds[part.name] = measure(part, args.rounds, args.device)
                rows.append(row_of(part, seconds[part.name]))
            about = f"{name}, {tokens} tokens, {torch.cuda.get_device_name()}, torch {torch.__version__}"
            report.add(f"### {about}\n\n{markdown(head, rows)}", [{"problem": about, "seconds": seconds}])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command("fusible.benchmarks.quantize", __doc__)
    sizes = "sizes of a published model's experts"
    parser.add_argument("--preset", choices=PRESETS, nargs="+", default=["mixtral", "qwen3", "gpt-oss"], help=sizes)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[8192], help="in a batch")
    parser.add_argument("--compiled", action="store_true", help="time torch.compile too")
    add_common_arguments(parser, rounds=15)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
