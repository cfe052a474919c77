"""Kernels that were compiled for functions of users and are kept on disk: how many, where; removed, or made ahead."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .. import Pointwise
from ..benchmarks.arguments import command
from ..benchmarks.problem import DTYPES
from ..ops.kernels import kernel_cache


def main(argv: Sequence[str]) -> None:
    """Prints what is kept."""
    parser = command("cache", __doc__)
    parser.add_argument("--clear", action="store_true", help="remove every kernel")
    parser.add_argument(
        "--compile",
        metavar="MODULE:NAME",
        help="compile the functions of a module, of an op, or of what a function without arguments returns",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the rows to compile for")
    args = parser.parse_args(argv)
    if args.clear:
        kernel_cache().clear()
    compiled = sum(op.compile_kernels(DTYPES[args.dtype]) for op in _functions(args.compile)) if args.compile else 0
    report = {**about(), "compiled": compiled}
    print(json.dumps(report, indent=1) if args.json else "\n".join(lines(report)))


def about() -> dict[str, Any]:
    """What is kept, as data."""
    cache = kernel_cache()
    sizes = cache.sizes()
    return {"folder": str(cache.folder), "refusal": cache.refusal, "kernels": len(sizes), "bytes": sum(sizes)}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    yield f"folder    {report['folder']}"
    if report["refusal"]:
        yield f"not used  it {report['refusal']}"
    yield f"kernels   {report['kernels']}, {report['bytes'] / 1e6:.1f} MB"
    if report["compiled"]:
        yield f"compiled  {report['compiled']}, or found"


def _functions(path: str) -> list[Pointwise]:
    """The ops of what ``module:name`` is."""
    module, _, name = path.partition(":")
    target = getattr(importlib.import_module(module), name)
    if not isinstance(target, nn.Module):
        with torch.device("meta"):
            target = target()
    return [op for op in target.modules() if isinstance(op, Pointwise)]
