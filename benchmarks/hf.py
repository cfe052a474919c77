"""The mixture-of-experts block of transformers models, router included, by each experts implementation.

    python -m fusible bench hf --model qwen3-moe                     on a GPU
    python -m fusible bench hf --model gpt-oss --shrink 16 --tokens 64    small, on a CPU

One layer of the real configuration with random weights, or ``--layers`` of them, each with a residual connection.
Beside our experts, the router chooses by ``functional.route``.
Times are medians of interleaved rounds in one run. Forward and step are timed behind other calls, so that the host is
ahead; decode is a forward without gradients, timed alone. ``compiled`` runs all of it under ``torch.compile``; for
decode also with CUDA graphs (``mode="reduce-overhead"``). Memory is counted above weights and input, at three points:
the peak of a step that allocates all gradients; the peak of a step that adds to existing gradients; and between forward
and backward. The error is the largest, over output and gradients
of the experts, of the relative error against the eager implementation in float32 on the same rounded weights, with the
same choice of experts.

Other libraries take part where they can be imported, with the package that is installed rather than the one that
transformers would download. A library that fails, or is less accurate than ours may be, is left out, with the reason
below the table.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fusible.integrations.routers import route

from .arguments import add_common_arguments, command, positive, require_packages
from .left_out import LeftOut, footer
from .peers import PEERS
from .peers.peer import in_one_line
from .problem import DTYPES, InaccurateError
from .report import Report
from .timing import interleaved, kept_bytes, markdown, peak_bytes

DECODE = (1, 16, 64)
ROWS_CHECKED, FEW_ROWS_CHECKED = 256, 16
STOCK = ("eager", "grouped_mm", "batched_mm")
COMPILED = {"fusible compiled": None, "fusible compiled, graphs": "reduce-overhead"}  # by torch.compile in which mode
IMPLEMENTATIONS = (*STOCK, "fusible", *COMPILED, *PEERS)
REGISTERED = "fusible bench {}"  # a peer, in the registry of transformers, which has names of its own for some of them
DECODE_ONLY = ("batched_mm", "fusible compiled, graphs")  # the first copies the weights of an expert for every row


class Model(NamedTuple):
    """The location of a block in transformers, and the sizes of a published configuration."""

    folder: str
    config: str
    block: str
    sizes: dict[str, int]


MODELS = {
    "qwen3-moe": Model(
        "qwen3_moe",
        "Qwen3MoeConfig",
        "Qwen3MoeSparseMoeBlock",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    ),
    "mixtral": Model(
        "mixtral",
        "MixtralConfig",
        "MixtralSparseMoeBlock",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gpt-oss": Model(
        "gpt_oss",
        "GptOssConfig",
        "GptOssMLP",
        {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4},
    ),
}


class Stack(nn.Module):
    """Blocks in a row, each with a residual connection; a single block has none."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            output: Tensor = (y[0] if isinstance(y, tuple) else y).view_as(x)
            x = output if len(self.blocks) == 1 else x + output
        return x


class Block:
    """Blocks whose experts implementation can be switched, and their inputs."""

    def __init__(self, model: Model, shrink: int, device: str, dtype: torch.dtype, layers: int = 1) -> None:
        import fusible.integrations.transformers  # noqa: F401

        sizes = {n: max(16, size // shrink & -16) if n.endswith("_size") else size for n, size in model.sizes.items()}
        classes = import_module(f"transformers.models.{model.folder}.modeling_{model.folder}")
        self.config = getattr(import_module("transformers"), model.config)(**sizes)
        torch.manual_seed(0)
        with torch.device(device):
            make = getattr(classes, model.block)
            self.stack = Stack([make(self.config).to(dtype) for _ in range(layers)])
        for parameter in self.stack.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        shared = {id(kept): kept for kept in (self.config, *self.stack.parameters())}
        self.routed = deepcopy(self.stack, shared)  # for our experts
        route(self.routed)
        self.hidden, self.device, self.dtype = self.config.hidden_size, device, dtype
        first: Any = self.stack.blocks[0]
        self._used, self._runs = "", dict[str, Callable[[Tensor], Tensor]]()
        self.top_k, self.experts = self.config.num_experts_per_tok, first.experts

    def use(self, implementation: str) -> None:
        """Switches the experts implementation."""
        name = REGISTERED.format(implementation) if implementation in PEERS else implementation.split()[0]
        if name != self._used:  # a configuration takes tens of microseconds to be told
            self._used = self.config._experts_implementation = name

    def run(self, implementation: str, x: Tensor) -> Tensor:
        """Runs all blocks."""
        self.use(implementation)
        if implementation not in self._runs:
            mode, stack = COMPILED.get(implementation, ""), self.routed if self._used == "fusible" else self.stack
            self._runs[implementation] = stack if mode == "" else torch.compile(stack, mode=mode)
        return self._runs[implementation](x)

    def rows(self, tokens: int, grad: bool = False) -> Tensor:
        """Draws hidden states of unit variance."""
        return torch.randn(1, tokens, self.hidden, device=self.device, dtype=self.dtype).requires_grad_(grad)

    def forward(self, implementation: str, x: Tensor) -> Callable[[], Tensor]:
        """A function that runs the block's forward without gradients."""
        return torch.no_grad()(partial(self.run, implementation, x))

    def step(self, implementation: str, x: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """A function that runs forward and backward."""
        dy, leaves = torch.randn_like(x), [x, *self.stack.parameters()]

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(self.run(implementation, x), leaves, dy)

        return run

    def added(self, implementation: str, x: Tensor) -> Callable[[], None]:
        """A function that runs forward and backward, adding to existing gradients."""
        dy = torch.randn_like(x)
        for leaf in (x, *self.stack.parameters()):
            leaf.grad = torch.zeros_like(leaf)

        def run() -> None:
            torch.autograd.backward(self.run(implementation, x), dy)

        return run

    def recorded(self, implementation: str, x: Tensor) -> Callable[[], Tensor]:
        """A function that runs the forward of a step; its result keeps the tensors of the backward."""

        return partial(self.run, implementation, x)


def error(block: Block, implementation: str) -> float:
    """The largest relative error of the experts' output and gradients; see above."""
    if implementation in COMPILED:  # compare a compiled block with the eager one
        x = block.rows(FEW_ROWS_CHECKED)
        return _distance(block.forward(implementation, x)(), block.forward("fusible", x)().double())
    rows = FEW_ROWS_CHECKED if implementation in DECODE_ONLY else ROWS_CHECKED
    truth, results = (_results(block, n, d, rows) for n, d in (("eager", torch.float32), (implementation, block.dtype)))
    return max(_distance(a, b) for a, b in zip(results, truth, strict=True))


def _results(block: Block, implementation: str, dtype: torch.dtype, rows: int) -> tuple[Tensor, ...]:
    generator = torch.Generator(block.device).manual_seed(1)
    options: dict[str, Any] = {"generator": generator, "device": block.device}
    x = torch.randn(rows, block.hidden, **options).to(block.dtype).to(dtype).requires_grad_()
    index = torch.rand(rows, block.experts.num_experts, **options).argsort(-1)[:, : block.top_k]
    weights = torch.rand(rows, block.top_k, **options).softmax(-1).requires_grad_()
    parameters = {n: p.detach().to(dtype).requires_grad_() for n, p in block.experts.named_parameters()}
    block.use(implementation)
    y = torch.func.functional_call(block.experts, parameters, (x, index, weights))
    return y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, weights, *parameters.values()])


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.double().norm())


def refusal(name: str, block: Block) -> str | None:
    """The reason why another library cannot take part, or None."""
    peer = PEERS[name]
    if peer.experts_forward is None and peer.import_error() is None:
        return "cannot take weights that a model owns"
    return peer.refusal(block.device, block.dtype)


def peer_reason(name: str, block: Block) -> str | None:
    """The reason why another library is not timed; None if its results are right. Registers it with transformers."""
    why = refusal(name, block)
    if why is not None:
        return why
    moe = import_module("transformers.integrations.moe")
    moe.ExpertsInterface.register(REGISTERED.format(name), PEERS[name].experts_forward)
    try:
        off, allowed = error(block, name), _allowed([error(block, "eager")], block.dtype)
    except Exception as problem:  # whatever a library raises, the others are timed
        return f"failed ({in_one_line(problem)})"
    return None if off <= allowed else f"wrong (relative error {off:.2e}, allowed {allowed:.2e})"


def _allowed(others: Sequence[float], dtype: torch.dtype) -> float:
    return 2 * min(others) + 8 * torch.finfo(dtype).eps


def check(block: Block, implementations: Sequence[str]) -> dict[str, float]:
    """The error of each.

    Raises:
        InaccurateError: an error is not finite, or ours exceeds twice the error of the best other.
    """
    errors = {name: error(block, name) for name in implementations}
    broken = [f"{name}: relative error {value}" for name, value in errors.items() if not math.isfinite(value)]
    if broken:
        raise InaccurateError("; ".join(broken))
    if set(implementations) <= {*STOCK, *PEERS}:
        return errors
    others = [errors[name] for name in implementations if name in STOCK] or [error(block, "eager")]
    allowed = _allowed(others, block.dtype)
    ours = errors["fusible"] if "fusible" in errors else error(block, "fusible")  # what compiled ones are compared with
    if not ours <= allowed:
        raise InaccurateError(f"fusible: relative error {ours:.2e}, allowed {allowed:.2e}")
    return errors


class BlockMeasurement(NamedTuple):
    """The measurements of one implementation; None for those that were not run."""

    forward: float | None
    step: float | None
    peak: int | None
    peak_added: int | None
    kept: int | None
    decode: dict[int, float]
    error: float


def measure(block: Block, implementations: Sequence[str], tokens: int, rounds: int) -> dict[str, BlockMeasurement]:
    """Checks, then times."""
    errors, device = check(block, implementations), block.device
    large = [name for name in implementations if name not in DECODE_ONLY]
    x = block.rows(tokens, grad=True)
    forward = interleaved({name: block.forward(name, x) for name in large}, rounds, device, steady=True)
    step = interleaved({name: block.step(name, x) for name in large}, rounds, device, steady=True)
    peaks = {name: peak_bytes(block.step(name, x), device) for name in large}
    kept = {name: kept_bytes(block.recorded(name, x), device) for name in large}
    added = {name: peak_bytes(block.added(name, x), device) for name in large}
    for leaf in (x, *block.stack.parameters()):
        leaf.grad = None
    decode: dict[str, dict[int, float]] = {name: {} for name in implementations}
    for count in DECODE:
        few = block.rows(count)
        times = interleaved({name: block.forward(name, few) for name in implementations}, 5 * rounds, device)
        for name, seconds in times.items():
            decode[name][count] = seconds
    measures = {n: (forward.get(n), step.get(n), peaks.get(n), added.get(n), kept.get(n)) for n in implementations}
    return {n: BlockMeasurement(*measures[n], decode[n], errors[n]) for n in implementations}


def table(measured: Mapping[str, BlockMeasurement], tokens: int) -> str:
    """The measurements as Markdown."""
    decode = [f"decode {count}, ms" for count in DECODE]
    memories = ("peak, MB", "peak above gradients, MB", "kept, MB")
    times = (f"forward, {tokens} tokens, ms", "forward + backward, ms", "time / grouped_mm", *memories)
    base = measured["grouped_mm"].step if "grouped_mm" in measured else None
    rows = []
    for name, m in measured.items():
        ratio = f"{m.step / base:.2f}" if m.step and base else ""
        memory = ["" if size is None else f"{size / 1e6:.0f}" for size in (m.peak, m.peak_added, m.kept)]
        few = [_milliseconds(m.decode[count]) for count in DECODE]
        rows.append((name, _milliseconds(m.forward), _milliseconds(m.step), ratio, *memory, *few, f"{m.error:.1e}"))
    return markdown(("", *times, *decode, "error"), rows)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark for every requested model, and prints Markdown."""
    args = _arguments(argv)
    with Report(args.out, args.json) as report:
        for name in args.model:
            _measure_model(name, args, report)


def _measure_model(name: str, args: argparse.Namespace, report: Report) -> None:
    block = Block(MODELS[name], args.shrink, args.device, DTYPES[args.dtype], args.layers)
    reasons = {n: why for n in args.implementations if n in PEERS and (why := peer_reason(n, block))}
    left_out, timed = [LeftOut(*r) for r in reasons.items()], [n for n in args.implementations if n not in reasons]
    print(f"{name}: {', '.join(timed)} …", file=sys.stderr, flush=True)
    measured = measure(block, timed, args.tokens, args.rounds)
    about = _describe(name, block)
    text = "\n".join(filter(None, (f"### {about}\n", table(measured, args.tokens), footer(left_out))))
    data = {"implementations": {n: m._asdict() for n, m in measured.items()}}
    report.add(text, [{"model": about, **data, "left_out": [one.about() for one in left_out]}])


def _describe(name: str, block: Block) -> str:
    import transformers

    config = block.config
    width = getattr(config, "moe_intermediate_size", config.intermediate_size)
    sizes = f"E={block.experts.num_experts}, K={block.hidden}, F={width}, top {block.top_k}"
    where = torch.cuda.get_device_name() if block.device != "cpu" else f"CPU, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    count = len(block.stack.blocks)
    layers = f"{count} layers, " if count > 1 else ""
    return f"{name}: {layers}{sizes}, {str(block.dtype).removeprefix('torch.')}, {where}, {versions}"


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = command("bench hf", __doc__)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["qwen3-moe"], help="whose block")
    parser.add_argument("--tokens", type=positive, default=8192 if cuda else 64, help="in a batch")
    parser.add_argument(
        "--shrink", type=positive, default=1 if cuda else 16, help="divide the sizes of matrices by this, down to 16s"
    )
    names = [*STOCK, "fusible", *PEERS]
    parser.add_argument("--implementations", choices=IMPLEMENTATIONS, nargs="+", default=names, help="of the experts")
    parser.add_argument("--layers", type=positive, default=1, help="blocks in a row")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16" if cuda else "fp32", help="of tokens and weights")
    add_common_arguments(parser, rounds=10 if cuda else 3)
    args = parser.parse_args(argv)
    require_packages(parser, "transformers")
    return args


if __name__ == "__main__":
    main()
