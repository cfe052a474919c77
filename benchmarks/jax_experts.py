"""The experts of a layer in jax by our kernels, jax's own products and tokamax's, and by our kernels in PyTorch.

    python -m fusible bench jax --preset qwen3 --tokens 8192

The experts of the preset gpt-oss have its biases, its clamped activation, and alternating columns of gate and up.

Each contestant is compiled ahead; ``compile`` is how long that takes, ``temporaries`` what XLA allocates beside
operands and results. Results are compared with float64 arithmetic first. Times are medians of rounds in which all take
turns. A measurement is as many calls as take ``--seconds``, one after the other, and ends when the device is done. The
kernels of tokamax are tuned before: ``--configurations`` of each product are tried.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fusible

from . import gpt_oss
from .arguments import command
from .contestant import Contestant, leaf
from .contestants import fused
from .gpt_oss import BiasedResult, GptOssProblem
from .grouped_mlp import check
from .left_out import LeftOut, footer
from .peers.peer import in_one_line
from .problem import Problem, Result, add_asked_arguments, asked
from .report import Report, describe
from .timing import interleaved, markdown
from .tokamax_tuning import tune

Layer = Callable[..., Any]  # of split sizes, x, scales, w1, w2; and of b1 and b2 in gpt-oss


class JaxMeasurement(NamedTuple):
    """Seconds of a call and of compilation, bytes, and the largest relative error of one contestant."""

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
    fields: type[Result | BiasedResult] = Result
    rounding: float = 0.0

    def result(self) -> Result | BiasedResult:
        """The result of a step, as tensors."""
        return self.fields(*map(as_tensor, self.step()))


def as_tensor(array: Any) -> Tensor:
    """The same numbers; arrays of jax are copied."""
    if isinstance(array, Tensor):
        return array.detach()
    tensor: Tensor = torch.utils.dlpack.from_dlpack(array)
    return tensor.clone()


def ours(sizes: Any, x: Any, scales: Any, w1: Any, w2: Any, b1: Any = None, b2: Any = None) -> Any:
    import fusible.jax

    keywords: dict[str, Any] = {}
    if b1 is not None:
        keywords = {"limit": gpt_oss.LIMIT, "alpha": gpt_oss.ALPHA, "linear_offset": gpt_oss.LINEAR_OFFSET}
        keywords |= {"interleave": 1, "b13": b1, "b2": b2, "probs_at": "output"}
    return fusible.jax.grouped_mlp(x, w1, w2, sizes, scales, weight_layout="nk", **keywords)


def _by_products(product: Layer) -> Layer:
    """The layer on a given ragged product; XLA fuses the ops between the products."""
    import jax
    import jax.numpy as jnp

    def layer(sizes: Any, x: Any, scales: Any, w1: Any, w2: Any, *biases: Any) -> Any:
        first = product(x, jnp.swapaxes(w1, 1, 2), sizes)
        if not biases:
            gate, up = jnp.split(first, 2, axis=1)
            hidden = (jax.nn.silu(gate) * up * scales[:, None]).astype(x.dtype)
            return product(hidden, jnp.swapaxes(w2, 1, 2), sizes)
        b1, b2 = (jnp.repeat(bias, sizes, axis=0, total_repeat_length=x.shape[0]) for bias in biases)
        hidden = _clamped(first + b1).astype(x.dtype)
        return ((product(hidden, jnp.swapaxes(w2, 1, 2), sizes) + b2) * scales[:, None]).astype(x.dtype)

    return layer


def _clamped(preact: Any) -> Any:
    """The activation of gpt-oss."""
    import jax
    import jax.numpy as jnp

    gate, up = preact[:, ::2], preact[:, 1::2]
    gate, up = jnp.minimum(gate, gpt_oss.LIMIT), jnp.clip(up, -gpt_oss.LIMIT, gpt_oss.LIMIT)
    return gate * jax.nn.sigmoid(gpt_oss.ALPHA * gate) * (up + gpt_oss.LINEAR_OFFSET)


def _ragged_dot() -> Layer:
    import jax

    return _by_products(lambda a, b, sizes: jax.lax.ragged_dot(a, b, sizes, preferred_element_type=a.dtype))


def _tokamax() -> Layer:
    import tokamax  # type: ignore[import-not-found, unused-ignore]

    return _by_products(lambda a, b, sizes: tokamax.ragged_dot(a, b, sizes, preferred_element_type=a.dtype))


TOKAMAX = "tokamax"
JAX = "fusible.jax"
LAYERS: dict[str, Callable[[], Layer]] = {
    JAX: lambda: ours,
    "ragged_dot": _ragged_dot,
    TOKAMAX: _tokamax,
}
PYTORCH = "fusible (PyTorch)"
CONTESTANTS = (*LAYERS, PYTORCH)
OURS = (JAX, PYTORCH)
WARM_UP = 3


def compiled(layer: Layer, problem: Problem, configurations: int = 0) -> CompiledLayer:
    """A layer compiled for a problem on jax's default device; tokamax first tries ``configurations`` configurations."""
    import jax

    sizes, dy, *arrays = _arrays(problem)

    def step(dy: Any, sizes: Any, *arrays: Any) -> Any:
        y, pull = jax.vjp(lambda *operands: layer(sizes, *operands), *arrays)
        return (y, *pull(dy))

    if configurations:
        tune(jax.jit(step).lower(dy, sizes, *arrays), configurations)
    start = time.perf_counter()
    both = jax.jit(step).lower(dy, sizes, *arrays).compile()
    seconds = time.perf_counter() - start
    forward, memory = jax.jit(layer).lower(sizes, *arrays).compile(), both.memory_analysis()
    temporaries = None if memory is None else int(memory.temp_size_in_bytes)
    fields = BiasedResult if isinstance(problem, GptOssProblem) else Result
    return CompiledLayer(
        lambda: forward(sizes, *arrays), lambda: both(dy, sizes, *arrays), seconds, temporaries, fields
    )


def _arrays(problem: Problem) -> list[Any]:
    """Split sizes, dy, x, scales, W1, W2, and biases if any, as jax arrays."""
    import jax

    p = problem
    tensors = [p.split_sizes.to(torch.int32), p.dy, p.x, p.scales, p.w1, p.w2]
    tensors += [p.b1, p.b2] if isinstance(p, GptOssProblem) else []
    return [jax.dlpack.from_dlpack(tensor) for tensor in tensors]


def by_pytorch(problem: Problem) -> CompiledLayer:
    """The same kernels from PyTorch; calls are replayed as in training."""
    if isinstance(problem, GptOssProblem):
        contestant = _gpt_oss_by_pytorch(problem)
        return CompiledLayer(contestant.infer, contestant.step, None, None, BiasedResult)
    contestant = fused(problem)
    return CompiledLayer(contestant.infer, contestant.step, None, None)


def _gpt_oss_by_pytorch(problem: GptOssProblem) -> Contestant:
    """The experts of gpt-oss in PyTorch, run by the same fusion as the others."""
    groups, columns, features = problem.w1.shape
    fc1 = fusible.GroupedLinear(groups, features, columns, device="meta")
    fc2 = fusible.GroupedLinear(groups, columns // 2, features, device="meta")
    fc1.weight, fc2.weight = weights = nn.Parameter(problem.w1), nn.Parameter(problem.w2)
    fc1.bias, fc2.bias = biases = nn.Parameter(problem.b1), nn.Parameter(problem.b2)
    activation = fusible.ClampedSwiGLU(
        limit=gpt_oss.LIMIT,
        alpha=gpt_oss.ALPHA,
        linear_offset=gpt_oss.LINEAR_OFFSET,
        layout=fusible.interleaved(1),
    )
    model = fusible.Sequential(fc1, activation, fc2, fusible.Scale())
    x, scales = leaf(problem.x), leaf(problem.scales)
    leaves = (x, scales, *weights, *biases)
    return Contestant(lambda: model(x, split_sizes=problem.split_sizes, scales=scales), leaves, problem.dy)


def taking_part(
    problem: Problem, names: Sequence[str], configurations: int = 0, peer_error: float = 0.0
) -> tuple[dict[str, CompiledLayer], list[LeftOut], dict[str, float]]:
    """The contestants that can run here, the reasons why the others cannot, and the errors of the former.

    Errors of other libraries may exceed their dtype's rounding by ``peer_error``.
    """
    programs: dict[str, CompiledLayer] = {}
    left_out: list[LeftOut] = []
    errors: dict[str, float] = {}
    for name in names:
        try:
            tried = configurations if name == TOKAMAX else 0
            program = by_pytorch(problem) if name == PYTORCH else compiled(LAYERS[name](), problem, tried)
            program = program if name in OURS else replace(program, rounding=peer_error)
            errors |= check(problem, {name: program})  # type: ignore[dict-item]
            programs[name] = program
        except Exception as error:  # whatever a library raises, the others are timed
            left_out.append(LeftOut(name, f"failed ({in_one_line(error)})"))
    return programs, left_out, errors


def measure(
    programs: dict[str, CompiledLayer], errors: dict[str, float], rounds: int, least: float
) -> dict[str, JaxMeasurement]:
    """Times every contestant, each measurement for at least ``least`` seconds."""
    seconds = {}
    for part in ("forward", "step"):
        calls = {name: _calls_of(getattr(program, part), least) for name, program in programs.items()}
        functions = {name: _finished(getattr(programs[name], part), count) for name, count in calls.items()}
        seconds[part] = {name: time / calls[name] for name, time in interleaved(functions, rounds).items()}
    return {
        name: JaxMeasurement(seconds["forward"][name], seconds["step"][name], p.compile, p.temporaries, errors[name])
        for name, p in programs.items()
    }


def _calls_of(function: Callable[[], Any], least: float) -> int:
    """The number of calls that take ``least`` seconds, after warm-up calls in which PyTorch captures its replay."""
    several = _finished(function, WARM_UP)
    several()
    start = time.perf_counter()
    several()
    return max(1, round(least * WARM_UP / (time.perf_counter() - start)))


def _finished(function: Callable[[], Any], calls: int) -> Callable[[], None]:
    """A function that makes ``calls`` calls and waits for the device."""

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
    """Runs the benchmark for every requested problem, and prints Markdown."""
    args = _arguments(argv)
    if find_spec("jax") is None:
        raise SystemExit("fusible bench jax: needs jax (pip install jax)")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory as well
    with Report(args.out, args.json) as report:
        for one in asked(args):
            print(f"{one} …", file=sys.stderr, flush=True)
            problem = GptOssProblem.of(one.problem) if one.preset == "gpt-oss" else one.problem
            programs, left_out, errors = taking_part(problem, args.contestants, args.configurations, args.peer_error)
            measured = measure(programs, errors, args.rounds, args.seconds)
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
    parser.add_argument("--seconds", type=float, default=0.1, help="of one measurement, at least")
    tried = "of each product of tokamax are tried before; 0: none"
    parser.add_argument("--configurations", type=int, default=24, help=tried)
    beyond = "relative error that other libraries may have beyond their dtype's and still be timed; the table shows it"
    parser.add_argument("--peer-error", type=float, default=0.0, help=beyond)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
