"""The command line: ``python -m fusible info | explain | demo | roofline | bench``."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

import torch

from . import GroupedLinear, Scale, Sequential, SwiGLU, __version__, config, installation
from .benchmarks import grouped_gemm, grouped_mlp, hf, roofline, routing
from .benchmarks.arguments import file
from .benchmarks.problem import add_size_arguments, sizes_of
from .examples import moe_lm
from .fuser import RefusedError, registry
from .fuser.config import BACKENDS


def info(argv: Sequence[str]) -> None:
    """Prints versions, the device, the fusions, and which backends run here, or why not."""
    argparse.ArgumentParser(prog="fusible info", description=info.__doc__).parse_args(argv)
    cuda = torch.cuda.is_available()
    device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if cuda else "no CUDA device"
    print(f"fusible   {__version__} from {installation.FOLDER}")
    print(f"kernels   {installation.kernels()}")
    print(f"torch     {torch.__version__}, {torch.get_num_threads()} CPU threads")
    print(f"python    {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(f"device    {device}")
    print(f"fusions   {', '.join(fusion.name for fusion in registry)}")
    for line in _backends("cuda" if cuda else "cpu"):
        print(f"backend   {line}")


def explain(argv: Sequence[str]) -> None:
    """Explains the experts of a model: what a training step runs, and why."""
    parser = argparse.ArgumentParser(prog="fusible explain", description=explain.__doc__)
    add_size_arguments(parser, tokens=8192)
    parser.add_argument("--draw", choices=("text", "mermaid", "dot", "svg"), help="a drawing instead of tables")
    parser.add_argument("--out", type=file, help="write it there")
    args = parser.parse_args(argv)
    experts, features, hidden, rows = sizes_of(args)
    model = flagship(experts, features, hidden)
    device = next(model.parameters()).device
    x = torch.empty(rows, features, device=device, dtype=torch.bfloat16, requires_grad=True)
    splits, scales = torch.empty(experts, device=device, dtype=torch.int64), torch.empty(rows, device=device)
    found = model.explain(x, split_sizes=splits, scales=scales.requires_grad_())
    if x.is_meta:
        print("No CUDA device here: sizes are right, kernels are those of a tensor without data.", file=sys.stderr)
    text = getattr(found, f"to_{args.draw}")() if args.draw else str(found)
    if args.out:
        args.out.write_text(text + "\n")
    else:
        print(text)


def flagship(experts: int, features: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> Sequential:
    """The experts of a mixture-of-experts layer: on CUDA where there is a GPU, else on the meta device."""
    device = "cuda" if torch.cuda.is_available() else "meta"
    with torch.device("meta"):  # nothing is drawn at random: only sizes count
        model = Sequential(
            GroupedLinear(experts, features, 2 * hidden, bias=False, dtype=dtype),
            SwiGLU(),
            Scale(),
            GroupedLinear(experts, hidden, features, bias=False, dtype=dtype),
        )
    return model.to_empty(device=device)


def _backends(device: str) -> Iterator[str]:
    """Every grouped-GEMM backend, and the dtypes that it takes on a device, or why it takes none."""
    for name in BACKENDS[1:]:
        refusals = {dtype: _refusal(name, device, dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)}
        taken = [str(dtype).removeprefix("torch.") for dtype, refusal in refusals.items() if refusal is None]
        yield f"{name} takes {', '.join(taken)}" if taken else str(refusals[torch.bfloat16])


def _refusal(backend: str, device: str, dtype: torch.dtype) -> str | None:
    """Why a backend cannot run a small linear, None if it can. Runs nothing."""
    linear = GroupedLinear(2, 16, 16, bias=False, device=device, dtype=dtype)
    x, splits = torch.zeros(4, 16, device=device, dtype=dtype), torch.zeros(2, dtype=torch.int64, device=device)
    try:
        with config(backend=backend):
            Sequential(linear).explain(x, split_sizes=splits)
    except RefusedError as error:
        return str(error).partition(": ")[2]
    return None


def bench(argv: Sequence[str]) -> None:
    """Times the experts, the grouped GEMM alone, or a transformers block; the first argument says which (``mlp``)."""
    named = bool(argv) and not argv[0].startswith("-")
    parser = argparse.ArgumentParser(prog="fusible bench")
    parser.add_argument("benchmark", choices=BENCHMARKS)
    which = parser.parse_args(argv[:1]).benchmark if named else "mlp"
    BENCHMARKS[which](argv[named:])


BENCHMARKS: dict[str, Callable[[Sequence[str]], None]] = {
    "mlp": grouped_mlp.main,
    "grouped_gemm": grouped_gemm.main,
    "hf": hf.main,
    "routing": routing.main,
}
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "info": (info, "versions, device, which backends run here and why others do not"),
    "explain": (explain, "what the experts of a model run, and why; tables or a drawing"),
    "demo": (moe_lm.main, "train a small language model for a minute, and see how its experts run"),
    "roofline": (roofline.main, "how near the matrix products of the experts come to what the device can do"),
    "bench": (
        bench,
        "time the experts (mlp), the grouped GEMM (grouped_gemm), blocks of transformers (hf), or routing",
    ),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command that the first argument names."""
    parser = argparse.ArgumentParser(prog="fusible", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.epilog = "\n".join(f"{name:10}{text}" for name, (_, text) in COMMANDS.items())
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the command; --help lists them")
    args = parser.parse_args(argv if argv is not None else sys.argv[1:])
    COMMANDS[args.command][0](args.arguments)


if __name__ == "__main__":
    main()
