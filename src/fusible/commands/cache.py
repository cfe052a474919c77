"""The cache of compiled user functions on disk: lists, clears or fills it."""

from __future__ import annotations

import importlib
import inspect
import json
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .. import GroupedLinear, Pointwise
from ..benchmarks.arguments import command
from ..benchmarks.problem import DTYPES
from ..ops.kernels import kernel_cache
from ..ops.kernels.jit.nvrtc import CompileError


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
    try:
        module = module_with_functions(args.compile) if args.compile else None
    except ArgumentTypeError as error:
        parser.error(f"argument --compile: {error}")
    if args.clear:
        kernel_cache().clear()
    try:
        compiled = 0 if module is None else compile_functions(module, DTYPES[args.dtype])
    except (ValueError, CompileError) as error:  # of a function that kernels do not know, of a missing NVRTC
        parser.error(f"argument --compile: {error}")
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


def compile_functions(module: nn.Module, dtype: torch.dtype) -> int:
    """Compiles the functions of a module for the recipe of its linears; returns the number of kernels."""
    modules = list(module.modules())
    recipes = [linear.recipe for linear in modules if isinstance(linear, GroupedLinear) and linear.recipe is not None]
    recipe = next(iter(recipes), None)
    return sum(op.compile_kernels(dtype, recipe) for op in modules if isinstance(op, Pointwise))


def module_with_functions(path: str) -> nn.Module:
    """Imports the module ``module:name``; calls it first, on the meta device, if it is a function."""
    source, _, name = path.partition(":")
    if not name:
        raise ArgumentTypeError(f"expected MODULE:NAME, got {path!r}")
    try:
        target = getattr(importlib.import_module(source), name)
    except (ImportError, AttributeError) as error:
        raise ArgumentTypeError(
            f"{path!r} cannot be imported: {error}; PYTHONPATH names the folders of modules"
        ) from None
    module = target if isinstance(target, nn.Module) else _returned_by(target, path)
    if not any(isinstance(op, Pointwise) for op in module.modules()):
        raise ArgumentTypeError(f"{path!r} has no Pointwise, and other ops have no functions to compile")
    return module


def _returned_by(function: Any, path: str) -> nn.Module:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{path!r} is no function without arguments: {error}") from None
    with torch.device("meta"):
        module = function()
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"{path!r} returns a {type(module).__name__}, which is no module")
    return module
