"""The experts of a layer in jax: our kernels, jax's own products, tokamax's; beside them the same kernels from PyTorch.

    python -m fusible bench jax --preset qwen3 --tokens 8192

Each contestant is compiled ahead; ``compile`` is how long that takes, ``temporaries`` what XLA allocates beside
operands and results. Results are compared with float64 arithmetic first. Times are medians of rounds in which all take
turns; a measurement is ``--calls`` calls, and ends when the device is done.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .arguments import command, positive
from .contestants import fused
from .grouped_mlp import check
from .left_out import LeftOut, footer
from .peers.peer import in_one_line
from .problem import Problem, Result, add_asked_arguments, asked
from .report import Report, describe
from .timing import interleaved, markdown

Layer = Callable[..., Any]  # of x, scales, w1, w2 and split sizes


class JaxMeasurement(NamedTuple):
    """What one contestant did: seconds of a call, seconds of compilation, bytes, the largest relative error."""

    forward: float
    step: float
    compile: float | None
    temporaries: int | None
    error: float


@dataclass(frozen=True)
class CompiledLayer:
    """A layer compiled for one problem: a forward, and a forward with a backward."""

    forward: Callable[[], Any]
    step: Callable[[], Any]
    compile: float | None
    temporaries: int | None
    rounding: float = 0.0

    def result(self) -> Result:
        """What a step gives, as tensors."""
        return Result(*map(as_tensor, self.step()))


def as_tensor(array: Any) -> Tensor:
    """The same numbers; arrays of jax are copied."""
    if isinstance(array, Tensor):
        return array.detach()
    tensor: Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor.clone()


def ours(x: Any, scales: Any, w1: Any, w2: Any, sizes: Any) -> Any:
    import fusible.jax

    return fusible.jax.grouped_mlp(x, w1, w2, sizes, scales, weight_layout="nk")


def _by_products(product: Layer) -> Layer:
    """The layer by somebody's ragged product; XLA fuses what is between."""
    import jax
    import jax.numpy as jnp

    def layer(x: Any, scales: Any, w1: Any, w2: Any, sizes: Any) -> Any:
        gate, up = jnp.split(product(x, jnp.swapaxes(w1, 1, 2), sizes), 2, axis=1)
        hidden = (jax.nn.silu(gate) * up * scales[:, None]).astype(x.dtype)
        return product(hidden, jnp.swapaxes(w2, 1, 2), sizes)

    return layer


def _ragged_dot() -> Layer:
    import jax

    return _by_products(lambda a, b, sizes: jax.lax.ragged_dot(a, b, sizes, preferred_element_type=a.dtype))


def _tokamax() -> Layer:
    import tokamax  # type: ignore[import-not-found, unused-ignore]

    return _by_products(lambda a, b, sizes: tokamax.ragged_dot(a, b, sizes, preferred_element_type=a.dtype))


LAYERS: dict[str, Callable[[], Layer]] = {
    "fusible.jax": lambda: ours,
    "ragged_dot": _ragged_dot,
    "tokamax": _tokamax,
}
PYTORCH = "fusible (PyTorch)"
CONTESTANTS = (*LAYERS, PYTORCH)


def compiled(layer: Layer, problem: Problem) -> CompiledLayer:
    """A layer for a problem, on jax's default device."""
    import jax

    arrays, dy = _arrays(problem)

    def step(dy: Any, x: Any, scales: Any, w1: Any, w2: Any, sizes: Any) -> Any:
        y, pull = jax.vjp(lambda *operands: layer(*operands, sizes), x, scales, w1, w2)
        return (y, *pull(dy))

    start = time.perf_counter()
    both = jax.jit(step).lower(dy, *arrays).compile()
    seconds = time.perf_counter() - start
    forward, memory = jax.jit(layer).lower(*arrays).compile(), both.memory_analysis()
    temporaries = None if memory is None else int(memory.temp_size_in_bytes)
    return CompiledLayer(lambda: forward(*arrays), lambda: both(dy, *arrays), seconds, temporaries)


def _arrays(problem: Problem) -> tuple[list[Any], Any]:
    """x, scales, W1, W2 and split sizes as arrays of jax, and dy."""
    import jax

    p, sizes = problem, problem.split_sizes.to(torch.int32)
    arrays = [jax.dlpack.from_dlpack(tensor) for tensor in (p.x, p.scales, p.w1, p.w2, sizes, p.dy)]
    return arrays[:-1], arrays[-1]


def by_pytorch(problem: Problem) -> CompiledLayer:
    """The same kernels without jax; calls are replayed as in training."""
    contestant = fused(problem)
    return CompiledLayer(contestant.infer, contestant.step, None, None)


def taking_part(
    problem: Problem, names: Sequence[str]
) -> tuple[dict[str, CompiledLayer], list[LeftOut], dict[str, float]]:
    """Those that can run here, why the others cannot, and how wrong the first are."""
    programs: dict[str, CompiledLayer] = {}
    left_out: list[LeftOut] = []
    errors: dict[str, float] = {}
    for name in names:
        try:
            program = by_pytorch(problem) if name == PYTORCH else compiled(LAYERS[name](), problem)
            errors |= check(problem, {name: program})  # type: ignore[dict-item]
            programs[name] = program
        except Exception as error:  # whatever a library raises, the others are timed
            left_out.append(LeftOut(name, f"failed ({in_one_line(error)})"))
    return programs, left_out, errors


def measure(
    problem: Problem, programs: dict[str, CompiledLayer], errors: dict[str, float], rounds: int, calls: int
) -> dict[str, JaxMeasurement]:
    """Times every contestant."""
    seconds = {}
    for part in ("forward", "step"):
        functions = {name: _finished(getattr(program, part), calls) for name, program in programs.items()}
        seconds[part] = {name: time / calls for name, time in interleaved(functions, rounds).items()}
    return {
        name: JaxMeasurement(seconds["forward"][name], seconds["step"][name], p.compile, p.temporaries, errors[name])
        for name, p in programs.items()
    }


def _finished(function: Callable[[], Any], calls: int) -> Callable[[], None]:
    """So many calls, until the device is done."""

    def run() -> None:
        for _ in range(calls):
            result = function()
        if any(isinstance(part, Tensor) for part in (result if isinstance(result, tuple) else (result,))):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return
        import jax

        jax.block_until_ready(result)

    return run


def table(problem: Problem, measured: dict[str, JaxMeasurement]) -> str:
    """The measurements as Markdown."""
    rows = []
    for name, m in measured.items():
        speed = f"{3 * problem.flops / m.step / 1e12:.3g}"
        built = [
            "" if m.compile is None else f"{m.compile:.2f}",
            "" if m.temporaries is None else f"{m.temporaries / 1e6:.1f}",
        ]
        rows.append((name, f"{m.forward * 1e3:.3f}", f"{m.step * 1e3:.3f}", speed, *built, f"{m.error:.1e}"))
    return markdown(("", "forward, ms", "both, ms", "TFLOP/s", "compile, s", "temporaries, MB", "error"), rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every problem that is asked for, and prints Markdown."""
    args = _arguments(argv)
    if find_spec("jax") is None:
        raise SystemExit("fusible bench jax: needs jax (pip install fusible[jax])")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory as well
    with Report(args.out, args.json) as report:
        for one in asked(args):
            print(f"{one} …", file=sys.stderr, flush=True)
            programs, left_out, errors = taking_part(one.problem, args.contestants)
            measured = measure(one.problem, programs, errors, args.rounds, args.calls)
            text = [f"### {one}: {describe(one.problem)}, jax {_version()}\n", table(one.problem, measured)]
            data = {"contestants": {name: m._asdict() for name, m in measured.items()}}
            report.add(
                "\n".join([*text, footer(left_out)]),
                [{**one.about(), **data, "left_out": [o.about() for o in left_out]}],
            )


def _version() -> str:
    import jax

    return str(jax.__version__)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command("bench jax", __doc__)
    add_asked_arguments(parser, [8192], CONTESTANTS, rounds=9)
    parser.add_argument("--calls", type=positive, default=5, help="calls in one measurement")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
