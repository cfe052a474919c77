"""The command line: ``fusible info | cache | tune | explain | demo | roofline | bench``, or ``python -m fusible …``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from . import __version__
from .benchmarks import expert_parallel, grouped_gemm, grouped_mlp, hf, jax_experts, roofline, routing
from .benchmarks.runs import generate, train
from .commands import cache, explain, info, tune
from .examples import moe_lm


def bench(argv: Sequence[str]) -> None:
    """Times the benchmark that the first argument names: experts in PyTorch (``mlp``, the default) or jax, products,
    whole blocks, trainings, generation.
    """
    named = bool(argv) and not argv[0].startswith("-")
    parser = argparse.ArgumentParser(prog="fusible bench", description=bench.__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    which = parser.parse_args(argv[:1]).benchmark if named else "mlp"
    if not named and {"-h", "--help"} & {*argv}:
        print(f"benchmarks: {', '.join(BENCHMARKS)}; each has its own --help; the one of {which} follows\n")
    BENCHMARKS[which](argv[named:])


BENCHMARKS: dict[str, Callable[[Sequence[str]], None]] = {
    "mlp": grouped_mlp.main,
    "grouped_gemm": grouped_gemm.main,
    "hf": hf.main,
    "routing": routing.main,
    "jax": jax_experts.main,
    "ep": expert_parallel.main,
    "train": train.main,
    "generate": generate.main,
}
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "info": (info.main, "versions, device, which backends run here and why others do not"),
    "cache": (cache.main, "kernels of user-written functions that are kept on disk: list, remove, compile ahead"),
    "tune": (tune.main, "measure tiles of Triton's kernels on this card for a minute, and keep clearly faster ones"),
    "explain": (explain.main, "what the experts of a model run, and why; tables or a drawing"),
    "demo": (moe_lm.main, "train a small language model for a minute, and see how its experts run"),
    "roofline": (roofline.main, "how near the matrix products of the experts come to what the device can do"),
    "bench": (
        bench,
        "time the experts (mlp, jax), ranks (ep), the grouped GEMM (grouped_gemm), routing, blocks of transformers "
        "(hf), or whole models (train, generate)",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names; without one, lists the commands."""
    parser = argparse.ArgumentParser(prog="fusible", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "\n".join(f"{name:10}{text}" for name, (_, text) in COMMANDS.items())
    parser.add_argument("--version", action="version", version=f"fusible {__version__}")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command; --help lists them")
    words = sys.argv[1:] if argv is None else argv
    if not words:
        parser.print_help()
        return
    args = parser.parse_args(words)
    COMMANDS[args.command][0](args.arguments)


if __name__ == "__main__":
    main()
