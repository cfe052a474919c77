"""The cost of routing rows to experts and back: our kernels and torch's ways, part by part.

    python -m fusible bench routing --tokens 8192 64

``ours`` marks :mod:`fusible.ops.kernels.doors.routing`. All ways of a part give the same numbers, or the run stops. The
bound is the time in which an H200 moves the minimum number of bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible.ops.kernels.doors import routing

from .arguments import add_common_arguments, command, positive
from .problem import DTYPES, PRESETS, InaccurateError, Preset
from .report import Report
from .timing import interleaved, markdown

H200_BYTES = 4.3e12  # a second: a copy, measured on one


class RoutingPart(NamedTuple):
    """One part of routing: the ways to do it, ours first, and the minimum number of bytes it moves."""

    name: str
    ways: Mapping[str, Callable[[], Tensor]]
    bytes: int


class RoutingInputs(NamedTuple):
    """A choice of experts for every token, rows of the experts, and rows of the tokens."""

    top_k_index: Tensor  # [T, k]
    rows: Tensor  # [T k, H]
    x: Tensor  # [T, H]
    experts: int


def draw(preset: Preset, tokens: int, device: str, dtype: torch.dtype) -> RoutingInputs:
    """Draws experts without repetition, and rows of unit variance."""
    generator = torch.Generator(device).manual_seed(0)
    index = torch.rand(tokens, preset.experts, generator=generator, device=device).argsort(-1)[:, : preset.top_k]
    sizes = ((tokens * preset.top_k, preset.features), (tokens, preset.features))
    rows, x = (torch.randn(s, generator=generator, device=device, dtype=torch.float32).to(dtype) for s in sizes)
    return RoutingInputs(index.contiguous(), rows, x, preset.experts)


def parts(inputs: RoutingInputs) -> Iterator[RoutingPart]:
    """Routing to an order of rows, rows to experts and back, and the parts of PyTorch's way."""
    index, rows, x, experts = inputs
    route, torchs = routing.route(index, experts, x.dtype), routing.by_torch(index, experts)
    ids, (tokens, slots), columns = index.reshape(-1), index.shape, rows.shape[1]
    few, many = x.numel() * x.element_size(), rows.numel() * rows.element_size()
    token, row_of_slot = torchs.slot_of_row // slots, torchs.row_of_slot
    routes = {"fusible": lambda: routing.route(index, experts, x.dtype).row_of_slot.long()} if route.is_native else {}
    yield RoutingPart(
        "route", {**routes, "torch": lambda: routing.by_torch(index, experts).row_of_slot}, 2 * 8 * ids.numel()
    )
    spreads = {"fusible": lambda: routing.permute(x, route)} if route.is_native else {}
    gathers = {"index_select": lambda: x.index_select(0, token), "x[token]": lambda: x[token]}
    yield RoutingPart("dispatch", {**spreads, **gathers}, few + many)
    sums: dict[str, Callable[[], Tensor]] = {
        "index_select, sum": lambda: rows.index_select(0, row_of_slot.view(-1)).view(tokens, slots, columns).sum(1),
        "embedding_bag": lambda: F.embedding_bag(row_of_slot, rows, mode="sum"),
    }
    ours = {"fusible": lambda: routing.unpermute(rows, route)} if route.is_native else {}
    yield RoutingPart("combine", {**ours, **(sums if x.is_cuda else dict(reversed(sums.items())))}, few + many)
    keys = {str(d).removeprefix("torch."): ids.to(d) for d in (torch.int16, torch.int64, torch.int32, torch.uint8)}
    yield RoutingPart("torch's sort", {name: _sorted(key) for name, key in keys.items()}, 3 * 8 * ids.numel())
    yield RoutingPart("torch's count", _counts(ids, experts), 8 * ids.numel())


def _sorted(keys: Tensor) -> Callable[[], Tensor]:
    return lambda: torch.sort(keys, stable=True)[1]


def _counts(ids: Tensor, experts: int) -> dict[str, Callable[[], Tensor]]:
    ordered, short = ids.sort()[0], ids.int()
    edges = torch.arange(experts + 1, device=ids.device)

    def searched() -> Tensor:
        starts = torch.searchsorted(ordered, edges)
        return starts[1:] - starts[:-1]

    def added() -> Tensor:
        ones = torch.ones_like(ids)
        return torch.zeros(experts, dtype=ids.dtype, device=ids.device).scatter_add_(0, ids, ones)

    def histogram() -> Tensor:
        values = short if ids.is_cuda else short.float()
        return torch.histc(values, bins=experts + 1, min=0, max=experts)[:experts]

    return {"searchsorted": searched, "scatter_add": added, "histc": histogram}


def check(part: RoutingPart) -> None:
    """Checks that all ways of a part give the same result as the first.

    Raises:
        InaccurateError: a result differs.
    """
    results = {name: way().double() for name, way in part.ways.items()}
    first = next(iter(results.values()))
    for name, result in results.items():
        if float((result - first).norm()) > 5e-3 * float(first.norm()):
            raise InaccurateError(f"{part.name}: {name} gives something else than {next(iter(results))}")


def measure(inputs: RoutingInputs, rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Seconds by part and way."""
    seconds: dict[str, dict[str, float]] = {}
    for part in parts(inputs):
        check(part)
        seconds[part.name] = interleaved(part.ways, rounds, inputs.x.device, calls)
    return seconds


def table(inputs: RoutingInputs, seconds: Mapping[str, Mapping[str, float]]) -> str:
    """The measurements as Markdown, on a GPU with the bound."""
    rows, on_gpu = [], inputs.x.is_cuda
    for part in parts(inputs):
        for i, (name, time) in enumerate(seconds[part.name].items()):
            label = f"{part.name}: {name}{'' if i else ' (ours)'}"
            bound = [f"{part.bytes / H200_BYTES * 1e6:.1f}"] * on_gpu
            rows.append((label, f"{time * 1e6:.1f}", *bound))
    return markdown(("", "us", *["H200 bound, us"] * on_gpu), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every requested preset and number of tokens, and prints Markdown."""
    args = _arguments(argv)
    with Report(args.out, args.json) as report:
        for name, tokens in product(args.preset, args.tokens):
            inputs = draw(PRESETS[name], tokens, args.device, DTYPES[args.dtype])
            print(f"{name}, {tokens} tokens …", file=sys.stderr, flush=True)
            seconds = measure(inputs, args.rounds, args.calls)
            where = torch.cuda.get_device_name() if args.device != "cpu" else "CPU"
            about = f"{name}, {tokens} tokens, {args.dtype}, {where}, torch {torch.__version__}"
            report.add(f"### {about}\n\n{table(inputs, seconds)}", [{"problem": about, "seconds": seconds}])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = command("bench routing", __doc__)
    presets, sizes = ["qwen3", "gpt-oss"] if cuda else ["small"], "sizes of a published model's experts"
    parser.add_argument("--preset", choices=PRESETS, nargs="+", default=presets, help=sizes)
    tokens = [8192, 64] if cuda else [256]
    parser.add_argument("--tokens", type=positive, nargs="+", default=tokens, help="in a batch")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32", help="of the rows")
    add_common_arguments(parser, rounds=9)
    parser.add_argument("--calls", type=positive, default=1, help="calls in one measurement")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
