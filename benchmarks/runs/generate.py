"""Generation by a slice of a published language model, by each contestant: prefill, decode, memory.

    python -m fusible bench generate                                                 on a GPU
    python -m fusible bench generate --shrink 32 --layers 2 --prompt 16 --new 4      small, on a CPU

Models are transformers' own classes with random weights in bf16 on its static cache. All contestants decode by one CUDA
graph a token; those with ``compile`` compile its step, and those with ``grouped_mm`` decode by transformers'
``grouped_mm`` or ``batched_mm``, whichever is faster. ``--loop generate`` decodes by transformers' ``generate``, with
graphs if it is compiled. Times are between tokens on the host, medians after untimed calls. *Reading* is the time in
which a copy, at the bandwidth that it reaches here, reads the experts that a step meets and all other weights. The
error is the median over tokens of the relative error of the logits against float32 arithmetic on the same weights. A
contestant that fails, or is less accurate than it may be, is left out with the reason; the others go on.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from copy import deepcopy
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusible

from ..arguments import add_plot_argument, command, file, positive, require_gpus, require_packages
from ..left_out import LeftOut, footer
from ..processes import of_rank, run
from ..report import Report
from ..roofline import ceilings
from ..timing import markdown, peak_bytes
from .decoding import LOOPS, OneGraph, Options
from .plot import draw
from .slices import SLICES, Work, config_of, layers_here, model_of, size_of, work_of
from .ways import FORKED_WITH, WAYS, Way, routed

CHECKED = 64  # tokens
WARM_UP = 2  # calls
NO_MEMORY = "out of memory"
COLUMNS = (
    ("prefill", ", ms"),
    ("decode", ", ms"),
    ("reading", ", ms"),
    ("kernels of a token", ", ms"),
    ("their number", ""),
    ("peak", ", GB"),
)


class Request(NamedTuple):
    """The task of one contestant."""

    preset: str
    way: str
    layers: int
    shrink: int
    prompt: int
    new: int
    batches: tuple[int, ...]
    rounds: int
    device: str
    loop: str = "graph"
    tuned: bool = False


class Served(NamedTuple):
    """The times of a number of prompts, the bytes above the weights, and the kernels of a token, if they are known.

    ``experts`` is the implementation that decoded, if there was a choice.
    """

    prefill: float
    decode: float
    peak: int
    kernels: tuple[int, float] | None
    experts: str | None = None


def measure(job: Request) -> dict[str, Any]:
    """Error, and what is known of each batch up to the largest that fits into memory."""
    import fusible.integrations.transformers  # noqa: F401

    way, device = WAYS[job.way], of_rank(job.device)
    torch.manual_seed(0)
    config = config_of(job.preset, job.layers, job.shrink, job.prompt + job.new)
    model = routed(model_of(config, way.implementation, torch.bfloat16, device).eval(), way)
    by_batch: dict[int, Served] = {}
    with torch.no_grad(), way.switches():
        off = error(model, torch.randint(config.vocab_size, (1, CHECKED), device=device))
        for batch in sorted(job.batches):
            try:
                by_batch[batch] = fastest(model, prompts(batch, config, job), job, way)
            except torch.OutOfMemoryError:
                if not by_batch:
                    raise
                break  # so do larger ones
    return {
        "error": off,
        "prefill": {batch: one.prefill for batch, one in by_batch.items()},
        "decode": {batch: one.decode for batch, one in by_batch.items()},
        "kernels": {batch: one.kernels for batch, one in by_batch.items()},
        "experts": {batch: one.experts for batch, one in by_batch.items()},
        "peak": {batch: 2 * size_of(model) + one.peak for batch, one in by_batch.items()},
        "bandwidth": ceilings(job.device, torch.bfloat16, job.rounds).bandwidth,
    }


def prompts(batch: int, config: Any, job: Request) -> Tensor:
    """Random tokens [batch, prompt]."""
    return torch.randint(config.vocab_size, (batch, job.prompt), device=of_rank(job.device))


def fastest(model: Any, ids: Tensor, job: Request, way: Way) -> Served:
    """The result of the experts that decode fastest, of those that fit into memory."""
    ran, failure = list[Served](), ""
    for experts in way.decoding_experts if job.loop == "graph" else (None,):
        gc.collect()  # models hold themselves, and loops their graphs
        try:
            ran.append(served(model, ids, job, Options(job.new, way.compiled, job.tuned, experts)))
        except torch.OutOfMemoryError as error:
            failure = str(error)
    if not ran:
        raise torch.OutOfMemoryError(failure)
    return min(ran, key=lambda one: one.decode)


def served(model: Any, ids: Tensor, job: Request, options: Options) -> Served:
    """Times, memory and kernels of the loop that is asked for, after untimed calls."""
    cuda, before = job.device == "cuda", torch.cuda.memory_allocated()
    if options.compiled:
        torch.compiler.reset()  # a function is compiled for eight shapes at most
    loop = LOOPS[job.loop](model, ids, options)
    for _ in range(WARM_UP):
        loop()
    held = torch.cuda.memory_allocated() - before
    first, later = [], []
    for _ in range(job.rounds):
        seconds = [after - before for before, after in pairwise(loop())]
        first.append(seconds[0])
        later += seconds[1:]
    peak = held + peak_bytes(loop.small, job.device)
    kernels = loop.kernels() if cuda and isinstance(loop, OneGraph) else None
    return Served(median(first), median(later), peak, kernels, options.experts)


def error(model: Any, ids: Tensor) -> float:
    """The median over tokens of the relative error of the logits against float32."""
    exact = deepcopy(model).float()
    exact.set_experts_implementation("grouped_mm")
    with fusible.config(recipe=fusible.NoRecipe()):
        expected = exact(ids).logits.double()
    off = (model(ids).logits.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(off.median())


def wrong(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The contestants without a recipe whose errors are above twice that of ``grouped_mm``, with the reason."""
    base = results.get("grouped_mm", {}).get("error")
    reasons = {}
    for name, measured in results.items():
        off = measured.get("error")
        if base is not None and off is not None and WAYS[name].recipe is None and not off <= 2 * base:
            reasons[name] = f"wrong (relative error {off:.1e}, allowed {2 * base:.1e})"
    return reasons


def table(results: dict[str, dict[str, Any]], work: Work, batches: Sequence[int]) -> str:
    """The contestants that ran, as Markdown."""
    columns = [tuple(f"{name} {b}{unit}" for name, unit in COLUMNS) for b in batches]
    rows = []
    for name, measured in results.items():
        cells = [cell for batch in batches for cell in cells_of(measured, work, batch)]
        rows.append((name, *cells, f"{measured['error']:.1e}"))
    return markdown(("", *(name for some in columns for name in some), "error"), rows)


def cells_of(measured: dict[str, Any], work: Work, batch: int) -> tuple[str, ...]:
    """The cells of a batch size."""
    if str(batch) not in measured["decode"]:
        return NO_MEMORY, *[""] * (len(COLUMNS) - 1)
    reading = 2 * work.read(batch) / measured["bandwidth"]
    number, busy = measured["kernels"][str(batch)] or ("", None)
    seconds = (measured["prefill"][str(batch)], measured["decode"][str(batch)], reading, busy)
    milliseconds = ["" if s is None else f"{s * 1e3:.3f}" for s in seconds]
    return *milliseconds, str(number), f"{measured['peak'][str(batch)] / 1e9:.4g}"


def report_on(args: argparse.Namespace, report: Report, preset: str) -> None:
    """Measures and reports a model."""
    layers, results = args.layers or layers_here(preset, args.device), dict[str, dict[str, Any]]()
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    about = f"{preset}: {layers} layers, prompts of {args.prompt} tokens, {where}, torch {torch.__version__}"
    work = work_of(preset, layers, args.shrink, args.prompt)

    def findings() -> tuple[str, list[dict[str, Any]]]:
        text, contestants = section(results, work, args)
        return f"### {about}\n\n{text}", [{"run": about, "preset": preset, "ranks": 1, "contestants": contestants}]

    for way in args.contestants:
        print(f"{preset}: {way} …", file=sys.stderr, flush=True)
        sizes = (layers, args.shrink, args.prompt, args.new, tuple(args.batch))
        request = Request(preset, way, *sizes, args.rounds, args.device, args.loop, args.tune)
        results[way] = run(measure, request, 1, args.device, FORKED_WITH)
        report.say(f"{way}: {line(results[way])}")
        report.draft(*findings())
    report.add(*findings())


def section(
    results: dict[str, dict[str, Any]], work: Work, args: argparse.Namespace
) -> tuple[str, list[dict[str, Any]]]:
    """The contestants so far, as Markdown and as data."""
    reasons = {name: measured["failure"] for name, measured in results.items() if "failure" in measured}
    reasons |= wrong(results)
    ran = {name: measured for name, measured in results.items() if name not in reasons}
    text = f"{table(ran, work, args.batch)}\n{chosen(ran)}{footer(LeftOut(*reason) for reason in reasons.items())}"
    each = [{"name": name, "prompt": args.prompt, **measured} for name, measured in ran.items()]
    return text, [*each, *({"name": name, "failure": why} for name, why in reasons.items())]


def chosen(results: dict[str, dict[str, Any]]) -> str:
    """A line for each contestant that could decode by several implementations."""
    text = ""
    for name, measured in results.items():
        by_batch = [f"{experts} at {batch}" for batch, experts in measured["experts"].items() if experts]
        if by_batch:
            text += f"\n{name} decodes by {', '.join(by_batch)}\n"
    return text


def line(measured: dict[str, Any]) -> str:
    """A contestant, as soon as it has run, in a line."""
    if "failure" in measured:
        return str(measured["failure"])
    each = [
        f"batch {b}: prefill {measured['prefill'][b] * 1e3:.3f} ms, decode {s * 1e3:.3f} ms, "
        f"peak {measured['peak'][b] / 1e9:.4g} GB"
        for b, s in measured["decode"].items()
    ]
    return f"{'; '.join(each)}; error {measured['error']:.1e}"


def main(argv: Sequence[str] | None = None) -> None:
    """Generates by every model that is asked for, and prints Markdown."""
    args = _arguments(argv)
    with Report(args.out, args.json) as report:
        for preset in args.preset:
            report_on(args, report, preset)
    if args.plot:
        draw(args.plot, report.data)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = command("bench generate", __doc__)
    ways = [name for name, way in WAYS.items() if not way.titan]
    parser.add_argument("--preset", choices=SLICES, nargs="+", default=["qwen3"], help="whose layers")
    parser.add_argument("--contestants", choices=ways, nargs="+", default=ways, help="who computes the experts")
    parser.add_argument("--layers", type=positive, help="instead of as many as train on a GPU of this memory")
    parser.add_argument("--shrink", type=positive, default=1, help="divide widths, heads and experts by this")
    parser.add_argument("--prompt", type=positive, default=2048, help="tokens of a prompt")
    parser.add_argument("--new", type=positive, default=32, help="tokens that follow a prompt")
    parser.add_argument("--batch", type=positive, nargs="+", default=[1, 8, 64], help="prompts at a time")
    parser.add_argument(
        "--loop", choices=LOOPS, default="graph", help="a CUDA graph a token, or transformers' generate"
    )
    parser.add_argument("--tune", action="store_true", help="compile products of one row to kernels with timed tiles")
    parser.add_argument("--rounds", type=positive, default=3, help="calls that are timed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if cuda else "cpu", help="where it runs")
    parser.add_argument("--out", type=file, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well")
    add_plot_argument(parser)
    args = parser.parse_args(argv)
    require_packages(parser, "transformers")
    require_gpus(parser, args.device)
    if args.new < 2:
        parser.error("--new must be at least 2: decoding is timed from one token to the next")
    if args.tune and args.loop != "graph":
        parser.error(f"--tune: only --loop graph compiles with timed tiles, not {args.loop}")
    if args.tune and not any(WAYS[way].compiled for way in args.contestants):
        parser.error("--tune: none of the contestants is compiled, add one that ends in +compile")
    return args


if __name__ == "__main__":
    main()
