"""The cost of spreading experts over ranks: dispatch and combine of rows, forward and backward of a layer.

    python -m fusible bench ep --preset qwen3 --ranks 2

Each rank is a process: with its own GPU over NCCL, or on the CPU over gloo. ``torch`` is the same exchange written by
hand: sort, ``index_select`` and ``all_to_all_single``. Times are of the slowest rank. *Idle* is a call that starts on
an idle device; *steady* is one of many, between which the host does not wait for the device, as in training. Before
anything is timed, outputs and gradients are compared with those of one rank that has all experts and all tokens. The
transport ``vdev_2d`` is torch's ``all_to_all_vdev_2d`` through NVSHMEM, its rows are compared with the hand-written
exchange; if it cannot run, the reason is printed. A failure is reported in place of its table; the other measurements
go on, and the command exits with 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import pairwise, product
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch import distributed as dist

from fusible import Combine, Dispatch, Float8Block, GroupedLinear, Scale, Sequential, SwiGLU, config, ep

from . import vdev
from .arguments import command, file, positive, require_gpus
from .problem import DTYPES, PRESETS, InaccurateError, Preset
from .processes import run as run_on_ranks
from .report import Report
from .timing import markdown, phases_in_a_row

DISTRIBUTIONS = ("uniform", "skewed")
TRANSPORTS = ("collective", "symmetric", "vdev_2d")
Phases = tuple[str, ...]


class Setting(NamedTuple):
    """The parameters of a run, the same on every rank."""

    preset: str
    ranks: int
    tokens: int
    dtype: str
    device: str
    distribution: str
    combine: str
    transport: str
    overlap: int | None
    rounds: int
    check: bool
    overlap_dispatch: int | None = None
    overlap_combine: bool | None = None
    in_8_bits: bool = False

    @property
    def recipe(self) -> Float8Block | None:
        """The recipe under which tokens are sent and multiplied."""
        return Float8Block() if self.in_8_bits else None

    def of_rank(self, rank: int) -> torch.device:
        return torch.device(self.device, rank) if self.device == "cuda" else torch.device(self.device)


class Batch(NamedTuple):
    """Tokens, their chosen experts, and gradients of the output."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    dy: Tensor


def draw(setting: Setting, rank: int) -> Batch:
    """Draws the batch of one rank; a token's experts differ from one another."""
    preset, tokens, device = PRESETS[setting.preset], setting.tokens, setting.of_rank(dist.get_rank())
    generator = torch.Generator(device).manual_seed(rank)
    chance = torch.rand(tokens, preset.experts, generator=generator, device=device)
    if setting.distribution == "skewed":  # the first experts are chosen more often: by chance u^(1/w), w falling
        chance = chance ** (torch.arange(preset.experts, device=device) / preset.experts + 0.25)
    ids = chance.topk(preset.top_k, -1).indices
    x, dy = (
        torch.randn(tokens, preset.features, generator=generator, device=device).to(DTYPES[setting.dtype])
        for _ in range(2)
    )
    weights = torch.rand(tokens, preset.top_k, generator=generator, device=device)
    return Batch(x, ids, weights / weights.sum(-1, keepdim=True), dy)


def layer(
    first: Any, last: Any, preset: Preset, experts: slice, dtype: torch.dtype, device: torch.device
) -> Sequential:
    """A layer with some of the experts; an expert has the same parameters on every rank."""
    number, f, h = experts.stop - experts.start, preset.hidden, preset.features
    model = Sequential(
        *(first, GroupedLinear(number, h, 2 * f, bias=False, dtype=dtype, device=device), SwiGLU(), Scale()),
        *(GroupedLinear(number, f, h, bias=False, dtype=dtype, device=device), last),
    )
    generator = torch.Generator(device)
    with torch.no_grad():
        for parameter in model.parameters():
            for expert, weight in zip(range(experts.start, experts.stop), parameter, strict=True):
                weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator.manual_seed(expert))
    return model


def sharded_layer(setting: Setting, group: ep.Group, dtype: torch.dtype, device: torch.device) -> Sequential:
    """The layer with the experts of this rank, between the exchanges of the setting."""
    ends = ep.EPDispatch(group, recipe=setting.recipe), ep.EPCombine(group)
    return layer(*ends, PRESETS[setting.preset], group.local_experts, dtype, device)


# ------------------------------------------------------------------------------------------------------- by hand


class ByHand(NamedTuple):
    """The order and counts of the rows that a hand-written dispatch sent, for the way back."""

    order: Tensor
    arrival: Tensor
    to_rank: list[int]
    from_rank: list[int]


def dispatch_by_hand(batch: Batch, experts: int, ranks: int) -> tuple[Tensor, ByHand]:
    """Rows by expert, with torch alone."""
    order = batch.ids.flatten().sort(stable=True).indices
    counts = torch.bincount(batch.ids.flatten(), minlength=experts).view(ranks, -1)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    sizes = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
    rows = batch.x.index_select(0, order // batch.ids.shape[1])
    arrived = rows.new_empty(sum(sizes[1]), rows.shape[1])
    dist.all_to_all_single(arrived, rows, sizes[1], sizes[0])
    experts_of_rows = torch.arange(arriving.shape[1], device=rows.device).expand_as(arriving).flatten()
    arrival = experts_of_rows.repeat_interleave(arriving.flatten(), output_size=len(arrived)).sort(stable=True).indices
    return arrived.index_select(0, arrival), ByHand(order, arrival, *sizes)


def combine_by_hand(rows: Tensor, batch: Batch, went: ByHand) -> Tensor:
    """The sums of each token's rows, with torch alone."""
    leaving = torch.empty_like(rows).index_copy_(0, went.arrival, rows)
    back = rows.new_empty(sum(went.to_rank), rows.shape[1])
    dist.all_to_all_single(back, leaving, went.to_rank, went.from_rank)
    slots = torch.empty_like(back).index_copy_(0, went.order, back)
    return slots.view(*batch.ids.shape, -1).sum(1)


# --------------------------------------------------------------------------------------------------------- times


def phases(setting: Setting, batch: Batch, group: ep.Group) -> Iterator[tuple[Phases, Callable[[], Iterator[None]]]]:
    """The functions that are timed: generators that yield after each phase."""
    preset, device = PRESETS[setting.preset], batch.x.device
    dispatch, combine = ep.EPDispatch(group, recipe=setting.recipe), ep.EPCombine(group)
    model = sharded_layer(setting, group, batch.x.dtype, device)

    def ours() -> Iterator[None]:
        with torch.no_grad():
            rows, _, _, slots = dispatch(batch.x, top_k_index=batch.ids, top_k_weights=batch.weights)
            yield
            combine(rows, row_of_slot=slots)
            yield

    def by_hand() -> Iterator[None]:
        with torch.no_grad():
            rows, went = dispatch_by_hand(batch, preset.experts, setting.ranks)
            yield
            combine_by_hand(rows, batch, went)
            yield

    def step() -> Iterator[None]:
        x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
        y = model(x, top_k_index=batch.ids, top_k_weights=weights)
        yield
        torch.autograd.grad(y, [x, weights, *model.parameters()], batch.dy)
        yield

    yield ("dispatch", "combine"), ours
    if setting.transport == "symmetric" and setting.device == "cuda":
        yield ("dispatch in a graph", "combine in a graph"), in_graphs(batch, dispatch, combine)
    yield ("dispatch, torch", "combine, torch"), by_hand
    yield ("layer forward", "layer backward"), step


def in_graphs(batch: Batch, dispatch: ep.EPDispatch, combine: ep.EPCombine) -> Callable[[], Iterator[None]]:
    """The phases without the host, each captured as a CUDA graph."""
    graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graphs[0]):
            rows, _, _, slots = dispatch(batch.x, top_k_index=batch.ids, top_k_weights=batch.weights)
        with torch.cuda.graph(graphs[1]):
            kept = rows, slots, combine(rows, row_of_slot=slots)

    def replayed() -> Iterator[None]:
        for graph in graphs:
            graph.replay()
            yield
        assert kept  # memory of the graphs

    return replayed


def timed(setting: Setting, names: Phases, run: Callable[[], Iterator[None]]) -> dict[str, float]:
    """Median seconds of each phase from an idle device, of the slowest rank."""
    seconds: list[list[float]] = []
    for _ in range(setting.rounds + 2):
        dist.barrier()
        marks = [_now(setting.device), *(_now(setting.device) for _ in run())]
        seconds.append([after - before for before, after in pairwise(marks)])
    return _of_slowest(setting, names, [median(times) for times in zip(*seconds[2:], strict=True)])


def timed_in_a_row(setting: Setting, names: Phases, run: Callable[[], Iterator[None]]) -> dict[str, float]:
    """Mean seconds of each phase in the steady state, of the slowest rank."""
    dist.barrier()
    seconds = phases_in_a_row(run, setting.rounds, setting.device)
    return _of_slowest(setting, names, seconds)


def _of_slowest(setting: Setting, names: Phases, seconds: list[float]) -> dict[str, float]:
    slowest = torch.tensor(seconds, dtype=torch.float64, device=setting.of_rank(dist.get_rank()))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(names, slowest.tolist(), strict=True))


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# -------------------------------------------------------------------------------------------------------- checks


def differences(setting: Setting, group: ep.Group) -> dict[str, float]:
    """The largest differences of outputs and gradients from those of one rank with everything, relative to the largest
    value.
    """
    preset, rank, device = PRESETS[setting.preset], dist.get_rank(), setting.of_rank(dist.get_rank())
    dtype, batches = DTYPES[setting.dtype], [draw(setting, r) for r in range(setting.ranks)]
    everything = Batch(*(torch.cat(parts) for parts in zip(*batches, strict=True)))
    alone = layer(Dispatch(preset.experts), Combine(), preset, slice(0, preset.experts), dtype, device)
    expected = _step(alone, everything)
    came = _step(sharded_layer(setting, group, dtype, device), batches[rank])
    tokens = slice(rank * setting.tokens, (rank + 1) * setting.tokens)
    expected_here = [expected[i][tokens] if i < 3 else expected[i][group.local_experts] for i in range(len(expected))]
    names = ("y", "dx", "dweights", "dW1", "dW2")
    off = [
        float((a.double() - b.double()).abs().max() / b.double().abs().max())
        for a, b in zip(came, expected_here, strict=True)
    ]
    differences: list[Any] = [None] * setting.ranks
    dist.all_gather_object(differences, off)
    return {name: max(of_rank[i] for of_rank in differences) for i, name in enumerate(names)}


def _step(model: Sequential, batch: Batch) -> list[Tensor]:
    x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
    y = model(x, top_k_index=batch.ids, top_k_weights=weights)
    return [y.detach(), *torch.autograd.grad(y, [x, weights, *model.parameters()], batch.dy)]


def skew(batch: Batch, setting: Setting) -> float:
    """The rows of the busiest rank, relative to the mean."""
    owned = PRESETS[setting.preset].experts // setting.ranks
    rows = torch.bincount(batch.ids.flatten() // owned, minlength=setting.ranks).double()
    dist.all_reduce(rows)
    return float(rows.max() / rows.mean())


# -------------------------------------------------------------------------------------------------------- tables


def measure(setting: Setting) -> dict[str, Any]:
    """Measures on all ranks together."""
    preset, batch = PRESETS[setting.preset], draw(setting, dist.get_rank())
    if setting.transport == "vdev_2d":
        return measure_vdev(setting, batch)
    group = ep.Group(
        num_experts=preset.experts,
        max_tokens=setting.tokens,
        top_k=preset.top_k,
        hidden=preset.features,
        dtype=DTYPES[setting.dtype],
        capacity="exact" if setting.transport == "collective" else 2.0,
        combine=setting.combine,
        transport=setting.transport,
        overlap=setting.overlap,
        overlap_dispatch=setting.overlap_dispatch,
        overlap_combine=setting.overlap_combine,
    )
    seconds: dict[str, float] = {}
    steady: dict[str, float] = {}
    with config(recipe=setting.recipe) if setting.in_8_bits else nullcontext():
        off = differences(setting, group) if setting.check else {}
        if any(not value <= 0.1 for value in off.values()):
            raise InaccurateError(f"not what one rank computes: {off}")
        for names, run in phases(setting, batch, group):
            seconds |= timed(setting, names, run)
            steady |= timed_in_a_row(setting, names, run)
    group.close()
    times = {"seconds": seconds, "steady": steady}
    return {**times, "differences": off, "skew": skew(batch, setting), "transport": group.transport}


def measure_vdev(setting: Setting, batch: Batch) -> dict[str, Any]:
    """Times torch's exchange on the device, and compares its rows and sums with those of the hand-written one."""
    reason, experts = vdev.refusal(batch.x.device), PRESETS[setting.preset].experts
    results = {"seconds": {}, "steady": {}, "differences": {}, "skew": skew(batch, setting), "transport": "vdev_2d"}
    if reason is not None:
        return {**results, "refusal": reason}
    rows, went = dispatch_by_hand(batch, experts, setting.ranks)
    most = torch.tensor([len(rows)], device=rows.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    exchange = vdev.DeviceExchange(batch.x, batch.ids, experts, int(most))

    def run() -> Iterator[None]:
        exchange.dispatch(batch.x, batch.ids)
        yield
        exchange.combine()
        yield

    for _ in run():
        pass
    sums = combine_by_hand(rows, batch, went)
    pairs = {"rows": (exchange.rows[: len(rows)], rows), "sums": (exchange.combine(), sums)}
    off = {name: float((a.double() - b.double()).abs().max()) for name, (a, b) in pairs.items()}
    if any(value > 0 for value in off.values()):
        raise InaccurateError(f"all_to_all_vdev_2d does not give what all_to_all_single gives: {off}")
    phases = setting, ("dispatch, vdev_2d", "combine, vdev_2d"), run
    return {**results, "seconds": timed(*phases), "steady": timed_in_a_row(*phases), "differences": off}


def table(setting: Setting, results: dict[str, Any]) -> str:
    """The findings as Markdown."""
    if "refusal" in results:
        return f"not measured: {results['refusal']}"
    if "failure" in results:
        return f"failed, and was not measured: {results['failure']}"
    preset = PRESETS[setting.preset]
    flops = 6 * setting.tokens * preset.top_k * preset.features * preset.hidden
    rows = []
    for name, seconds in results["seconds"].items():
        work = {"layer forward": flops, "layer backward": 2 * flops}.get(name)
        times = seconds, results["steady"][name]
        rows.append((name, *(f"{time * 1e3:.3f}" for time in times), *(_teraflops(work, time) for time in times)))
    off = ", ".join(f"{name} {value:.1e}" for name, value in results["differences"].items())
    other = "torch by hand" if setting.transport == "vdev_2d" else "one rank"
    said = f"differs from {other} by at most: {off}" if off else f"not compared with {other}"
    heading = ("", "idle, ms", "steady, ms", "idle, TFLOP/s a rank", "steady, TFLOP/s a rank")
    return f"{markdown(heading, rows)}\n\n{said}; skew {results['skew']:.2f}"


def _teraflops(work: int | None, seconds: float) -> str:
    return f"{work / seconds / 1e12:.1f}" if work else ""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every preset and distribution that is asked for, and prints Markdown."""
    args, failed = _arguments(argv), 0
    with Report(args.out, args.json) as report:
        for preset, distribution, transport in product(args.preset, args.distribution, args.transport):
            setting = Setting(
                *(preset, args.ranks, args.tokens, args.dtype, args.device, distribution),
                *(args.combine, transport, args.overlap, args.rounds, not args.no_check),
                *(args.overlap_dispatch, args.overlap_combine, args.float8),
            )
            results = run_on_ranks(measure, setting, setting.ranks, setting.device)
            failed += "failure" in results
            about = (
                f"{preset}, {args.ranks} ranks, {args.tokens} tokens each, {args.dtype}, {distribution}, "
                f"{args.combine} sums, transport {transport}{beside(setting)}, {args.device}, torch {torch.__version__}"
            )
            report.add(f"### {about}\n\n{table(setting, results)}", [{"problem": about, **results}])
    if failed:
        sys.exit(1)


def beside(setting: Setting) -> str:
    """Describes 8 bits, and the settings of overlap that are given; the group chooses the others."""
    said = ", tokens and products in e4m3 (Float8Block)" if setting.in_8_bits else ""
    if setting.overlap is not None:
        said += f" with {setting.overlap} multiprocessors beside weight gradients"
    if setting.overlap_dispatch is not None:
        said += f" with {setting.overlap_dispatch} that bring rows beside the first product"
    sent = {None: "", True: ", rows sent from the second product", False: ", rows sent after the second product"}
    return said + sent[setting.overlap_combine]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = command("bench ep", __doc__)
    sizes = "sizes of a published model's experts"
    parser.add_argument("--preset", choices=PRESETS, nargs="+", default=["qwen3" if gpus else "small"], help=sizes)
    parser.add_argument("--ranks", type=positive, default=gpus or 2, help="processes, with a GPU each on cuda")
    parser.add_argument("--tokens", type=positive, default=8192 if gpus else 128, help="of each rank")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if gpus else "fp32", help="of the rows")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu", help="where it runs")
    parser.add_argument("--distribution", choices=DISTRIBUTIONS, nargs="+", default=["uniform"], help="of the experts")
    parser.add_argument("--combine", choices=("exact", "reduced"), default="exact", help="how rows are summed")
    parser.add_argument("--transport", choices=TRANSPORTS, nargs="+", default=["collective"], help="what moves rows")
    take = "multiprocessors that sum gradients of tokens beside those of weights (symmetric); else the group decides"
    parser.add_argument("--overlap", type=int, help=take)
    bring = "multiprocessors that bring rows beside the first product (symmetric); else the group decides"
    parser.add_argument("--overlap-dispatch", type=int, help=bring)
    send = "whether the second product sends its rows to the ranks of their tokens (symmetric); else the group decides"
    parser.add_argument("--overlap-combine", action=argparse.BooleanOptionalAction, help=send)
    parser.add_argument("--float8", action="store_true", help="tokens and products in e4m3, under Float8Block()")
    parser.add_argument("--rounds", type=positive, default=9, help="how often each is timed; the median counts")
    parser.add_argument("--no-check", action="store_true", help="do not compare with one rank that has everything")
    parser.add_argument("--out", type=file, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well")
    args = parser.parse_args(argv)
    require_gpus(parser, args.device, args.ranks)
    for preset in args.preset:
        if PRESETS[preset].experts % args.ranks:
            parser.error(
                f"argument --ranks: {PRESETS[preset].experts} experts of {preset} do not divide into {args.ranks} ranks"
            )
    return args


if __name__ == "__main__":
    main()
