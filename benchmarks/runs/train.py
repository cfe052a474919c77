"""A training run of a slice of a published language model, by each contestant: speed, memory, loss.

    python -m fusible bench train                                        on one GPU, and on 2 and 4 where they are
    python -m fusible bench train --shrink 32 --layers 2 --tokens 64     small, on a CPU

Models are transformers' own classes with random weights, in bf16 with AdamW on float32 main weights: on one GPU beside
the model, on several as FSDP2's shards, with and without experts spread over the ranks. Every contestant has processes
of its own; one that fails is named with its reason, and the others go on. Times are of steps that follow one another,
of the slowest rank. Losses are of a text, from the same weights, and must be closer to those of ``grouped_mm`` than
losses from other weights are; otherwise the command exits with 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from ..arguments import add_plot_argument, command, file, positive, require_gpus, require_packages
from ..left_out import LeftOut, footer
from ..processes import run
from ..report import Report
from ..timing import markdown
from .losses import Agreement, agreement
from .plot import draw
from .regions import OPTIMIZER, bottleneck
from .slices import FORMULA, SLICES, Work, layers_here, work_of
from .trainer import PHASES, Job, measure
from .ways import FORKED_WITH, WAYS, exchanges, refusal

UNSPREAD = "none"
SEEDS = (1, 2, 0)  # of the contestant that others are compared with; all train from the last


class Finding(NamedTuple):
    """The results of one contestant, or of its failure."""

    name: str
    job: Job
    results: dict[str, Any]

    @property
    def has_failed(self) -> bool:
        return "failure" in self.results


def name_of(job: Job) -> str:
    """The contestant, how its experts are spread, and whether it recomputes."""
    spread = "" if job.exchange is None else f", experts by {job.exchange}"
    return f"{job.way}{spread}{', checkpointing' if job.checkpointing else ''}"


def jobs(args: argparse.Namespace, preset: str, ranks: int) -> Iterator[Job]:
    """All jobs of a model on so many ranks; those that others are compared with come first."""
    for switch, way in product(args.checkpointing, args.contestants):
        checkpointing = switch == "on"
        for exchange in asked_exchanges(args, way, ranks):
            is_base = WAYS[way].base == way and exchange is None and not checkpointing
            yield Job(
                preset=preset,
                way=way,
                layers=args.layers or layers_here(preset, args.device),
                shrink=args.shrink,
                sequence=args.sequence,
                tokens=args.tokens,
                steps=args.steps,
                rounds=args.rounds,
                device=args.device,
                checkpointing=checkpointing,
                exchange=exchange,
                seeds=SEEDS if is_base else SEEDS[-1:],
            )


def asked_exchanges(args: argparse.Namespace, way: str, ranks: int) -> list[str | None]:
    """The ways to spread experts over so many ranks that a contestant has and that are asked for; None: not at all."""
    names = {UNSPREAD: None, **{name: name for name in (exchanges(WAYS[way]) if ranks > 1 else [])}}
    return [names[name] for name in args.exchanges or names if name in names]


def compared(finding: Finding, findings: Sequence[Finding]) -> Agreement | None:
    """The comparison of a contestant's losses with its base's; None: there is no base, or it is the base."""
    base = WAYS[finding.job.way].base
    curves = [f.results["losses"] for f in findings if f.job.way == base and len(f.job.seeds) > 1 and not f.has_failed]
    if not curves or finding.has_failed or len(finding.job.seeds) > 1:
        return None
    return agreement(finding.results["losses"][-1], curves[0])


def row(finding: Finding, work: Work, said: Agreement | None) -> list[str]:
    """A contestant's row of the table."""
    seconds, job, parts = finding.results["seconds"], finding.job, finding.results.get("parts", {})
    step = sum(seconds.values())
    return [
        finding.name,
        f"{job.tokens / step:.0f}",
        f"{work.flops * job.tokens / step / 1e12:.4g}",
        f"{work.flops * job.tokens / (step - seconds['optimizer']) / 1e12:.4g}",
        *(f"{seconds[phase] * 1e3:.1f}" for phase in PHASES),
        f"{finding.results['peak'] / 1e9:.4g}",
        f"{parts['experts'] / sum(parts.values()):.0%}" if parts else "",
        f"{finding.results['losses'][-1][-1]:.4f}",
        "" if said is None else str(said),
    ]


HEADING = (
    "",
    "tokens/s a GPU",
    "TFLOP/s a GPU",
    "without optimizer",
    *(f"{phase}, ms" for phase in PHASES),
    "peak, GB",
    "experts, of the step",
    "last loss",
    "apart ≤ seeds apart",
)


def table(findings: Sequence[Finding], work: Work) -> str:
    """The contestants that ran, as Markdown, and below it those that did not."""
    rows = [row(f, work, compared(f, findings)) for f in findings if not f.has_failed]
    failed = [LeftOut(f.name, f.results["failure"]) for f in findings if f.has_failed]
    return "\n".join(filter(None, (markdown(HEADING, rows), footer(failed))))


def uncompared(findings: Sequence[Finding]) -> list[str]:
    """A sentence for each base that did not run, about the contestants whose losses it would be compared with."""
    names: dict[str, list[str]] = {}
    for finding in findings:
        is_base = len(finding.job.seeds) > 1
        if not (finding.has_failed or is_base or compared(finding, findings)):
            names.setdefault(WAYS[finding.job.way].base, []).append(finding.name)
    return [
        f"Losses of {' and '.join(those)} are compared with no others: {base} did not run with every expert on every "
        "rank and without checkpointing"
        for base, those in names.items()
    ]


def profiles(findings: Sequence[Finding]) -> str:
    """Parts and largest kernels of a step of each contestant whose code is not compiled."""
    sections = []
    for finding in findings:
        if parts := finding.results.get("parts"):
            whole = sum(parts.values())
            of_parts = [(part, _ms(s), f"{s / whole:.0%}") for part, s in _largest(parts)]
            of_kernels = [(name[:90], part, _ms(s), f"{s / whole:.0%}") for name, part, s in finding.results["kernels"]]
            shares = markdown(("part", "ms", "of the step"), of_parts)
            kernels = markdown(("kernel", "part", "ms", "of the step"), of_kernels)
            sections.append(f"#### {finding.name}\n\n{shares}\n\n{kernels}\n\n{bottleneck(parts)}\n\n{_sums(finding)}")
    return "\n\n".join(sections)


def _sums(finding: Finding) -> str:
    """Forward and backward in the profile and without it, as kernels may be counted wrongly, or the host be slow."""
    parts, seconds = finding.results["parts"], finding.results["seconds"]
    in_profile, without = sum(parts.values()) - parts[OPTIMIZER], seconds["forward"] + seconds["backward"]
    return f"forward and backward: {_ms(in_profile)} ms of kernels in the profile, {_ms(without)} ms without it"


def _largest(parts: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(parts.items(), key=lambda item: -item[1])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def findings_of(args: argparse.Namespace, preset: str, ranks: int) -> Iterator[Finding]:
    """Runs all contestants of a model on so many ranks, one after the other."""
    for job in jobs(args, preset, ranks):
        name = name_of(job)
        print(f"{preset}, {ranks} ranks: {name} …", file=sys.stderr, flush=True)
        why = refusal(WAYS[job.way], preset, ranks, args.device)
        results = run(measure, job, ranks, args.device, FORKED_WITH) if why is None else {"failure": why}
        yield Finding(name, job, results)


def report_on(args: argparse.Namespace, report: Report, preset: str, ranks: int) -> bool:
    """Measures and reports a model on so many ranks; returns whether all losses agree."""
    layers = args.layers or layers_here(preset, args.device)
    work, findings = work_of(preset, layers, args.shrink, args.sequence), list[Finding]()
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    about = (
        f"{preset}: {layers} layers, {work.parameters / 1e9:.3g} B parameters, {work.active / 1e9:.3g} B active, "
        f"{args.tokens} tokens a step and GPU, sequences of {args.sequence}, {ranks} x {where}, "
        f"torch {torch.__version__}"
    )
    of_run = {"run": about, "preset": preset, "ranks": ranks, "work": work._asdict()}
    for finding in findings_of(args, preset, ranks):
        findings.append(finding)
        report.say(line(finding, work))
        report.draft(section(about, findings, work, args.profile), [{**of_run, "contestants": data(findings)}])
    report.add(section(about, findings, work, args.profile), [{**of_run, "contestants": data(findings)}])
    said = [compared(f, findings) for f in findings]
    return all(one is None or one.holds for one in said)


def line(finding: Finding, work: Work) -> str:
    """A contestant, as soon as it has run, in a line."""
    if finding.has_failed:
        return f"{finding.name}: {finding.results['failure']}"
    _, *names = HEADING
    name, *cells = row(finding, work, None)
    return f"{name}: {', '.join(f'{name} {cell}' for name, cell in zip(names, cells, strict=True) if cell)}"


def section(about: str, findings: Sequence[Finding], work: Work, is_profiled: bool) -> str:
    """The contestants so far, as Markdown."""
    formula = f"{FORMULA}: {work.flops / 1e9:.4g} GFLOP"
    details = profiles(findings) if is_profiled else ""
    return "\n\n".join(filter(None, (f"### {about}", table(findings, work), *uncompared(findings), formula, details)))


def data(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """The contestants so far, for JSON."""
    return [
        {**f.results, "name": f.name, "tokens": f.job.tokens, "checkpointing": f.job.checkpointing} for f in findings
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains every model that is asked for on every number of GPUs, and prints Markdown."""
    args = _arguments(argv)
    agree = []
    with Report(args.out, args.json) as report:
        for preset in args.preset:
            agree += [report_on(args, report, preset, ranks) for ranks in args.ranks]
    if args.plot:
        draw(args.plot, report.data)
    if not all(agree):
        sys.exit("losses differ by more than those of other seeds")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = command("bench train", __doc__)
    parser.add_argument("--preset", choices=SLICES, nargs="+", default=["qwen3"], help="whose layers")
    parser.add_argument("--contestants", choices=WAYS, nargs="+", default=[*WAYS], help="who computes the experts")
    ranks = [n for n in (1, 2, 4) if n <= gpus] or [1]
    parser.add_argument("--ranks", type=positive, nargs="+", default=ranks, help="processes, with a GPU each on cuda")
    parser.add_argument("--layers", type=positive, help="instead of as many as train on a GPU of this memory")
    parser.add_argument("--shrink", type=positive, default=1, help="divide widths, heads and experts by this")
    parser.add_argument("--sequence", type=positive, default=4096, help="tokens of a sequence, at most --tokens")
    parser.add_argument("--tokens", type=positive, default=8192, help="of a step and rank")
    parser.add_argument("--steps", type=positive, default=50, help="of the loss curves")
    parser.add_argument("--rounds", type=positive, default=10, help="steps that are timed, in a row")
    switch = ["off", "on"]
    parser.add_argument("--checkpointing", choices=switch, nargs="+", default=switch, help="of activations")
    exchange_help = f"how experts are spread over ranks: {UNSPREAD}, or names of transformers' ways (default: all)"
    parser.add_argument("--exchanges", nargs="+", help=exchange_help)
    parser.add_argument("--profile", action="store_true", help="print parts and kernels of a step as well")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpus else "cpu", help="where it runs")
    parser.add_argument("--out", type=file, metavar="PREFIX", help="write PREFIX.md and PREFIX.json as well")
    add_plot_argument(parser)
    args = parser.parse_args(argv)
    require_packages(parser, "transformers")
    require_gpus(parser, args.device, max(args.ranks))
    args.sequence = min(args.sequence, args.tokens)
    if args.tokens % args.sequence:
        parser.error(f"argument --tokens: expected a multiple of --sequence {args.sequence}, got {args.tokens}")
    _check_exchanges(parser, args)
    return args


def _check_exchanges(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    offered = {UNSPREAD, *(name for way in args.contestants for name in exchanges(WAYS[way]))}
    if missing := {*(args.exchanges or ())} - offered:
        parser.error(f"--exchanges: no contestant has {', '.join(sorted(missing))}, only {', '.join(sorted(offered))}")
    if 1 in args.ranks and UNSPREAD not in (args.exchanges or (UNSPREAD,)):
        parser.error(f"--exchanges: one rank has all experts, add {UNSPREAD!r} or leave 1 out of --ranks")


if __name__ == "__main__":
    main()
