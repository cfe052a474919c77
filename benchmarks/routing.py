"""The cost of choosing experts, and of routing rows to them and back: our kernels and torch's ways, part by part.

    python -m fusible bench routing --tokens 8192
    python -m fusible bench routing --tokens 64 --graph-calls 20 --parts choose route

``ours`` marks :mod:`fusible.ops.kernels.doors.routing`. All ways of a part give the same numbers, or the run stops. The
bound is the time of a copy that moves as many bytes as the part must.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fusible import functional
from fusible.ops.kernels.doors import routing

from .arguments import add_common_arguments, command, positive
from .problem import DTYPES, PRESETS, InaccurateError, Preset
from .report import Report
from .roofline import ceilings
from .timing import graph_of, interleaved, markdown

Choose = Callable[[Tensor, int], tuple[Tensor, Tensor]]  # weights and ids


class RoutingPart(NamedTuple):
    """One part of routing: the ways to do it, ours first, and the minimum number of bytes it moves."""

    name: str
    ways: Mapping[str, Callable[[], Tensor]]
    bytes: int


class RoutingInputs(NamedTuple):
    """A choice of experts for every token, rows of the experts, and rows of the tokens."""

    logits: Tensor  # [T, E]
    top_k_index: Tensor  # [T, k]
    rows: Tensor  # [T k, H]
    x: Tensor  # [T, H]
    experts: int


def draw(preset: Preset, tokens: int, device: str, dtype: torch.dtype) -> RoutingInputs:
    """Draws logits and rows of unit variance."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(tokens, preset.experts, generator=generator, device=device)
    sizes = ((tokens * preset.top_k, preset.features), (tokens, preset.features))
    rows, x = (torch.randn(s, generator=generator, device=device, dtype=torch.float32).to(dtype) for s in sizes)
    return RoutingInputs(logits, logits.topk(preset.top_k)[1], rows, x, preset.experts)


def parts(inputs: RoutingInputs) -> Iterator[RoutingPart]:
    """The choice of experts, an order of rows, rows to experts and back, and the parts of PyTorch's way."""
    logits, index, rows, x, experts = inputs
    yield from _choices(logits, index.shape[1], x)
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


def _choices(logits: Tensor, top_k: int, x: Tensor) -> Iterator[RoutingPart]:
    """The weights of the chosen experts, their gradient, and all of a router and a dispatch."""
    (tokens, experts), read, moved = logits.shape, logits.numel() * 4, (1 + top_k) * x.numel() * x.element_size()
    results = tokens * top_k * 12 + experts * 8  # weights and ids; loads
    leaf, d_weights = logits.clone().requires_grad_(), torch.rand(tokens, top_k, device=logits.device)
    ways = {"fusible": _chosen, "softmax, topk, scatter_add": _chosen_by_torch}

    def gradient(choose: Choose) -> Tensor:
        return torch.autograd.grad(choose(leaf, top_k)[0], leaf, d_weights)[0]

    def dispatched(choose: Choose) -> Tensor:
        return routing.permute(x, routing.route(choose(logits, top_k)[1], experts, x.dtype))

    def each(part: Callable[[Choose], Tensor]) -> dict[str, Callable[[], Tensor]]:
        return {name: partial(part, choose) for name, choose in ways.items()}

    yield RoutingPart("choose", each(lambda choose: choose(logits, top_k)[0]), read + results)
    yield RoutingPart("choose, with backward", each(gradient), 3 * read + results)
    if routing.route(_chosen(logits, top_k)[1], experts, x.dtype).is_native:
        yield RoutingPart("choose, route, dispatch", each(dispatched), read + results + moved)


def _chosen(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    routes = functional.route(logits, top_k)
    return routes.top_k_weights, routes.top_k_index


def _chosen_by_torch(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(top_k)
    slots = ids.view(-1)  # counted without bincount, which waits for the device
    torch.zeros(logits.shape[1], dtype=ids.dtype, device=ids.device).scatter_add_(0, slots, torch.ones_like(slots))
    return weights / weights.sum(-1, keepdim=True), ids


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


def measure(
    asked: Sequence[RoutingPart], device: torch.device, rounds: int, calls: int, graph_calls: int = 0
) -> dict[str, dict[str, float]]:
    """Seconds by part and way; of a call in a CUDA graph of ``graph_calls``, unless that is 0."""
    seconds: dict[str, dict[str, float]] = {}
    for part in asked:
        check(part)
        ways = {name: graph_of(way, graph_calls) if graph_calls else way for name, way in part.ways.items()}
        times = interleaved(ways, rounds, device, calls)
        seconds[part.name] = {name: each / max(1, graph_calls) for name, each in times.items()}
    return seconds


def table(asked: Sequence[RoutingPart], bandwidth: float | None, seconds: Mapping[str, Mapping[str, float]]) -> str:
    """The measurements as Markdown, with the bound if the bandwidth of a copy is known."""
    rows = []
    for part in asked:
        for i, (name, time) in enumerate(seconds[part.name].items()):
            label = f"{part.name}: {name}{'' if i else ' (ours)'}"
            bound = [f"{part.bytes / bandwidth * 1e6:.1f}"] if bandwidth else []
            rows.append((label, f"{time * 1e6:.1f}", *bound))
    return markdown(("", "us", *["copy bound, us"] * (bandwidth is not None)), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every requested preset and number of tokens, and prints Markdown."""
    args = _arguments(argv)
    bandwidth = ceilings(args.device, torch.bfloat16, 5).bandwidth if args.device != "cpu" else None
    with Report(args.out, args.json) as report:
        for name, tokens in product(args.preset, args.tokens):
            preset = PRESETS[name]._replace(experts=args.experts or PRESETS[name].experts)
            inputs = draw(preset, tokens, args.device, DTYPES[args.dtype])
            print(f"{name}, {tokens} tokens …", file=sys.stderr, flush=True)
            asked = _asked(args.parts, [*parts(inputs)])
            seconds = measure(asked, inputs.x.device, args.rounds, args.calls, args.graph_calls)
            where = torch.cuda.get_device_name() if args.device != "cpu" else "CPU"
            about = (
                f"{name}, {preset.experts} experts, {tokens} tokens, {args.dtype}, {where}, torch {torch.__version__}"
            )
            report.add(f"### {about}\n\n{table(asked, bandwidth, seconds)}", [{"problem": about, "seconds": seconds}])


def _asked(beginnings: Sequence[str] | None, every: Sequence[RoutingPart]) -> list[RoutingPart]:
    """The parts whose names begin like one of these."""
    asked = [part for part in every if part.name.startswith(tuple(beginnings or [""]))]
    if not asked:
        names = ", ".join(part.name for part in every)
        sys.exit(f"--parts: none begins like {' or '.join(beginnings or [])}; there are {names}")
    return asked


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = command("bench routing", __doc__)
    presets, sizes = ["qwen3", "gpt-oss"] if cuda else ["small"], "sizes of a published model's experts"
    parser.add_argument("--preset", choices=PRESETS, nargs="+", default=presets, help=sizes)
    parser.add_argument("--experts", type=positive, help="instead of the preset's")
    tokens = [8192, 64] if cuda else [256]
    parser.add_argument("--tokens", type=positive, nargs="+", default=tokens, help="in a batch")
    parser.add_argument("--parts", nargs="+", help="only those whose names begin like one of these")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32", help="of the rows")
    add_common_arguments(parser, rounds=9)
    parser.add_argument("--calls", type=positive, default=1, help="calls in one measurement")
    in_graph = "time calls in a CUDA graph of so many, without the host's time"
    parser.add_argument("--graph-calls", type=positive, default=0, help=in_graph)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
