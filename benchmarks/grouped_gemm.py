"""The six matrix products of the experts, forward and backward, against their peers. Accuracy first, then speed.

    python -m fusible bench grouped_gemm                                         small on a CPU, all presets on a GPU
    python -m fusible bench grouped_gemm --preset mixtral --tokens 8192 32768    some of them
    python -m fusible bench grouped_gemm --sustain 0.2 --tiles                   every tile, each alone for a while

Times are medians of rounds in one run, in which the contestants take their turns in random order. ``dense`` is one
product of as many operations, as if one expert had all rows: a yardstick, not a peer. A contestant whose result is
wrong is not timed: the run ends.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fusible
from fusible.ops.kernels.problems.gemm import GroupedGemm, Layout, stacked
from fusible.ops.values.switches import BACKENDS

from .arguments import command, duration
from .gemm_contestants import CONTESTANTS, Function, backend_of, products, refusal, tiles, under_recipe
from .problem import DISTRIBUTIONS, Asked, InaccurateError, add_asked_arguments, asked
from .recipes import RECIPES, rounding
from .report import Report, describe
from .timing import interleaved, markdown, sustained

YARDSTICK = "dense"  # computes something else: it has no error
SAMPLED_GROUPS, SAMPLED_ROWS = 6, 64
H200_FLOPS, H200_BYTES = 790e12, 4.3e12  # a second: bf16 cuBLAS at 8192^3, and a copy; measured on one


class GemmMeasurement(NamedTuple):
    """The time and error of one contestant on one product."""

    seconds: float
    error: float | None


class Sample(NamedTuple):
    """A part of a product: where it is in the result, and its operands."""

    where: tuple[int | slice | Tensor, ...]
    left: Tensor
    right: Tensor


def samples(p: GroupedGemm) -> Iterator[Sample]:
    """Samples rows of the result in some groups: the shortest, the longest, and some between."""
    sizes, b = p.split_sizes.cpu(), stacked(p.b)
    starts, order = sizes.cumsum(0) - sizes, sizes.argsort()
    if p.layout is not Layout.TN:
        order = order[sizes[order] > 0]  # others have nothing to check; a weight gradient of theirs is zero
    for g in order[_spread(len(order), SAMPLED_GROUPS)].tolist():
        rows = slice(int(starts[g]), int(starts[g] + sizes[g]))
        if p.layout is Layout.TN:
            some = _spread(p.a.shape[1], SAMPLED_ROWS).to(p.a.device)
            yield Sample((g, some), p.a[rows][:, some].mT, b[rows])
        else:
            some = (rows.start + _spread(int(sizes[g]), SAMPLED_ROWS)).to(p.a.device)
            yield Sample((some,), p.a[some], b[g].mT if p.layout is Layout.NT else b[g])


def check(p: GroupedGemm, functions: Mapping[str, Function]) -> dict[str, float]:
    """The largest relative error of a sampled row, against float64, of each contestant but the yardstick.

    Raises:
        InaccurateError: the error exceeds twice that of a plain product in the same dtype plus its recipe's rounding,
            or a value is not finite.
    """
    before = 0.0 if p.beta is None else 1.0  # in every element of the result, which counts with beta
    parts = [(s, s.left.double() @ s.right.double() + before, (s.left @ s.right).double() + before) for s in samples(p)]
    tiny = torch.finfo(p.a.dtype).eps
    allowed = tiny + 2 * max((_error(reference, truth) for _, truth, reference in parts), default=0.0)
    errors = {}
    for name, function in functions.items():
        if name == YARDSTICK:
            continue
        stacked(p.out).fill_(torch.nan if p.beta is None else before)  # NaN reveals elements that are not written
        result = function()
        errors[name] = max((_error(result[s.where], truth) for s, truth, _ in parts), default=0.0)
        finite, most = bool(result.sum(dtype=torch.float32).isfinite()), allowed + _rounding(name)
        if not (finite and errors[name] <= most):
            why = f"relative error {errors[name]:.3g}, allowed {most:.3g}" if finite else "not all of it is finite"
            raise InaccurateError(f"{name}: {p.layout.value}, M, N, K = {p.mnk}: {why}")
    return errors


def _rounding(name: str) -> float:
    """The relative rounding of a contestant's operands."""
    return rounding(RECIPES[name]) if name in RECIPES else 0.0


def measure(
    p: GroupedGemm, functions: Mapping[str, Function], rounds: int, sustain: float | None = None
) -> dict[str, GemmMeasurement]:
    """Checks, then times every contestant: in turn, or each for ``sustain`` seconds."""
    errors = check(p, functions)
    if sustain is None:
        seconds = interleaved(functions, rounds, p.a.device, calls=2, steady=True)
    else:
        seconds = sustained(functions, rounds, p.a.device, sustain)
    return {name: GemmMeasurement(seconds[name], errors.get(name)) for name in functions}


def bound(p: GroupedGemm, device: str) -> float | None:
    """The least possible seconds of the product on a known device, or None."""
    if "H200" not in device or p.a.element_size() != 2:
        return None
    return max(p.flops / H200_FLOPS, bytes_moved(p) / H200_BYTES)


def bytes_moved(p: GroupedGemm) -> int:
    """Bytes of operands read once and of the result written once; weights of empty groups are not read."""
    if p.layout is Layout.TN:
        return p.bytes
    weights, unused = stacked(p.b), int((p.split_sizes == 0).sum())
    return p.bytes - unused * weights[0].numel() * weights.element_size()


def finding(name: str, p: GroupedGemm, measured: Mapping[str, GemmMeasurement]) -> dict[str, Any]:
    """One product and its measurements, as a dict."""
    least = bound(p, torch.cuda.get_device_name(p.a.device)) if p.a.is_cuda else None
    speeds = {who: p.flops / m.seconds / 1e12 for who, m in measured.items()}
    mine = measured.get("ours")
    return {
        "product": name,
        "layout": p.layout.value,
        "shape": p.mnk,
        "flops": p.flops,
        "bytes": bytes_moved(p),
        "backend": backend_of(p),
        "tflops": speeds,
        "ours_to": {who: speeds["ours"] / speed for who, speed in speeds.items() if who != "ours"} if mine else {},
        "share_of_bound": least / mine.seconds if mine and least else None,
        "contestants": {who: m._asdict() for who, m in measured.items()},
    }


def table(findings: Sequence[Mapping[str, Any]], contestants: Sequence[str]) -> str:
    """The findings as Markdown: speeds in TFLOP/s, then the ratios of ours to the others."""
    others = [who for who in contestants if who != "ours"] if "ours" in contestants else []
    heading = ("TFLOP/s", "M × N × K", *contestants, *(f"ours / {who}" for who in others), "of bound", "error", "by")
    rows = []
    for f in findings:
        speeds = [_number(f["tflops"].get(who), ".4g") for who in contestants]
        ratios = [_number(f["ours_to"].get(who), ".2f") for who in others]
        error = _number(f["contestants"].get("ours", {}).get("error"), ".1e")
        shape, share = " × ".join(map(str, f["shape"])), _number(f["share_of_bound"], ".2f")
        rows.append((f"{f['product']} {f['layout']}", shape, *speeds, *ratios, share, error, f["backend"]))
    return markdown(heading, rows)


def run(args: argparse.Namespace, case: Asked, report: Report) -> None:
    """Measures the products of one problem, and reports them."""
    findings: list[dict[str, Any]] = []
    left_out: list[str] = []
    for name, p in products(case.problem, args.main_grad):
        refusals = {who: refusal(who, p) for who in args.contestants}
        functions = {who: CONTESTANTS[who](p) for who, why in refusals.items() if why is None}
        functions |= tiles(p) if args.tiles else {}
        quantised = {recipe: under_recipe(p, RECIPES[recipe]) for recipe in args.recipe}
        functions |= {recipe: function for recipe, function in quantised.items() if function is not None}
        left_out += [f"{who} {why}" for who, why in refusals.items() if why]
        print(f"{case}: {name} …", file=sys.stderr, flush=True)
        findings.append(finding(name, p, measure(p, functions, args.rounds, args.sustain)))
    present = list(dict.fromkeys(who for f in findings for who in f["tflops"]))
    notes = [f"\nLeft out: {'; '.join(dict.fromkeys(left_out))}."] if left_out else []
    section = "\n".join([f"### {case}: {describe(case.problem)}\n", table(findings, present), *notes])
    splits = case.problem.split_sizes.tolist()
    report.add(
        section, [{**case.about(), "problem": describe(case.problem), "split_sizes": splits, "products": findings}]
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measures every requested preset, number of tokens and distribution, and prints Markdown."""
    args = _arguments(argv)
    with Report(args.out, args.json) as report, fusible.config(backend=args.backend):
        for case in asked(args):
            run(args, case, report)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = command("bench grouped_gemm", __doc__)
    add_asked_arguments(parser, [8192, 32768], CONTESTANTS, rounds=10)
    parser.set_defaults(distribution=list(DISTRIBUTIONS) if cuda else ["random"])
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="of ours")
    parser.add_argument("--tiles", action="store_true", help="also each tile that our kernels are built with")
    parser.add_argument("--recipe", choices=RECIPES, nargs="+", default=[], help="also of operands quantised before")
    parser.add_argument(
        "--sustain", type=duration, metavar="SECONDS", help="each alone for so long, timed in its second half"
    )
    return parser.parse_args(argv)


def _spread(count: int, wanted: int) -> Tensor:
    """At most ``wanted`` of ``count`` indices, evenly spread, including the first and the last."""
    return torch.linspace(0, max(count - 1, 0), min(count, wanted)).long()


def _error(result: Tensor, truth: Tensor) -> float:
    """The largest relative error of a row; NaN if any value is NaN."""
    apart, size = (result.double() - truth).norm(dim=1), truth.norm(dim=1)
    return float((apart / size.clamp(min=torch.finfo(torch.float64).tiny)).nan_to_num(torch.inf).max())


def _number(value: float | None, format_spec: str) -> str:
    return "" if value is None else format(value, format_spec)
