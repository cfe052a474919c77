"""The cache of compiled user functions on disk: lists, clears or fills it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn

from .. import GroupedLinear, Pointwise
from ..benchmarks.arguments import command
from ..benchmarks.problem import DTYPES
from ..ops.kernels import kernel_cache


def main(argv: Sequence[str]) -> None:
    """Runs the command: clears, compiles or lists the cache."""
    parser = command("cache", __doc__)
    parser.add_argument("--clear", action="store_true", help="remove every kernel")
    parser.add_argument(
        "--compile",
        metavar="MODULE:NAME",
        help="compile the functions of a module or op, or of the module that a function without arguments returns",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the rows to compile for")
    args = parser.parse_args(argv)
    if args.clear:
        kernel_cache().clear()
    compiled = _compile(args.compile, DTYPES[args.dtype]) if args.compile else 0
    report = {**about(), "compiled": compiled}
    print(json.dumps(report, indent=1) if args.json else "\n".join(lines(report)))


def about() -> dict[str, object]:
    """The state of the cache as a dict."""
    cache = kernel_cache()
    sizes = cache.sizes()
    return {"folder": str(cache.folder), "refusal": cache.refusal, "kernels": len(sizes), "bytes": sum(sizes)}


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The state of the cache as lines of text."""
    yield f"folder    {report['folder']}"
    if report["refusal"]:
        yield f"not used  it {report['refusal']}"
    yield f"kernels   {report['kernels']}, {report['bytes'] / 1e6:.1f} MB"
    if report["compiled"]:
        yield f"compiled  {report['compiled']}, or found"


def _compile(path: str, dtype: torch.dtype) -> int:
    """Compiles the functions in ``module:name`` for the recipe of its linears; returns the number of kernels."""
    modules = list(_target(path).modules())
    recipes = [linear.recipe for linear in modules if isinstance(linear, GroupedLinear) and linear.recipe is not None]
    recipe = next(iter(recipes), None)
    return sum(op.compile_kernels(dtype, recipe) for op in modules if isinstance(op, Pointwise))


def _target(path: str) -> nn.Module:
    """Imports the module ``module:name``; calls it first, on the meta device, if it is a function."""
    module, _, name = path.partition(":")
    target = getattr(importlib.import_module(module), name)
    if not isinstance(target, nn.Module):
        with torch.device("meta"):
            target = target()
    return cast(nn.Module, target)
