"""Adapters on experts: time and peak memory of a step, compared with frozen experts and with PEFT's summed weights.

    python -m fusible.benchmarks.lora --preset gpt-oss --tokens 8192

``frozen`` trains nothing of the experts: their input wants a gradient. ``LoRA`` trains adapters, over a base in bf16 or
in the named format. ``summed`` is the same adapters as PEFT has them by itself: ``weight + B A`` as a tensor, and
``grouped_mm``. ``PEFT`` is PEFT itself on an experts module of transformers with ``grouped_mm``. ``full`` trains the
weights. TFLOP/s count the products with weights that a step needs: forward and the rows' gradient, and the weights' for
``full``; those of a dense product in the same rounds say how fast the GPU is at the time, and the host's time to launch
a step says whether the device had to wait for it. Below the table is the time that a step decodes, which a product that
decodes by itself could save at most.

Another table has the decoding of the first linear's weight by each format, beside a copy of as many bytes. Before
anything is timed, steps over stored bases are compared with steps over their values in bf16, and decoded values with
those of the format's definition; what is wrong is left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from importlib import import_module
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusible
from fusible import MXFP4, NF4, Float8Block, Float8Weight, GroupedLinear, GroupedLoRA, Int4, NVFP4Weight
from fusible.ops.formats.copies import Weight
from fusible.ops.formats.recipe import Recipe
from fusible.ops.formats.weight_only import WeightOnly
from fusible.ops.kernels.doors import low_rank
from fusible.ops.kernels.doors.decoding import decode_weight
from fusible.ops.kernels.problems.gemm import nbytes

from .arguments import positive
from .left_out import LeftOut, footer
from .problem import PRESETS, InaccurateError, Preset
from .recipes import rounding
from .timing import interleaved, markdown, peak_bytes

Step = Callable[[], tuple[Tensor, ...]]
Linear = GroupedLinear | GroupedLoRA
T = TypeVar("T")

FORMATS: dict[str, WeightOnly] = {
    "MXFP4": MXFP4(),
    "NVFP4": NVFP4Weight(),
    "NF4": NF4(),
    "NF4 nested": NF4(nested=True),
    "int4": Int4(),
    "FP8 blocks": Float8Weight(),
    "FP8 rows": Float8Weight("rows"),
}
BASES: dict[str, Recipe] = {**FORMATS, "Float8Block": Float8Block()}


def linears(preset: Preset, rank: int, device: str) -> tuple[Linear, Linear]:
    """Up and down, with adapters of this rank, or without for 0."""
    shapes = (preset.features, 2 * preset.hidden), (preset.hidden, preset.features)
    options: dict[str, Any] = {"bias": False, "device": device, "dtype": torch.bfloat16}
    if rank:
        up, down = (GroupedLoRA(preset.experts, *shape, rank, **options) for shape in shapes)
        for linear in (up, down):
            torch.nn.init.normal_(linear.get_parameter("lora_b"), std=0.01)
        return up, down
    first, second = (GroupedLinear(preset.experts, *shape, **options) for shape in shapes)
    return first, second


def layer(preset: Preset, up: Linear, down: Linear, trained: str) -> fusible.Sequential:
    """Routed experts; only parameters with ``trained`` in their name require gradients."""
    model = fusible.Sequential(
        fusible.Dispatch(preset.experts), up, fusible.SwiGLU(), down, fusible.Scale(), fusible.Combine()
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained in name)
    return model


def stored_layers(
    preset: Preset, base: Recipe, rank: int, device: str
) -> tuple[fusible.Sequential, fusible.Sequential]:
    """A layer with adapters whose weights stay in a format, and the same one with their values in bf16."""
    stored = layer(preset, *linears(preset, rank, device), "lora")
    values = deepcopy(stored)
    fusible.quantize_(stored, base)
    for module, decoded in zip(stored, values, strict=True):
        if isinstance(module, GroupedLoRA):
            with torch.no_grad():
                decoded.get_parameter("weight").copy_(base.weight_values(module._stored()))
    return stored, values


def check(name: str, grads: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Compares the gradients of a step over a stored base with those over its values.

    Raises:
        InaccurateError: one differs by more than roundings of the rows do.
    """
    allowed = 4 * rounding(BASES[name]) if BASES[name].quantises_tokens else 0.02
    off = max(float((a - b).norm() / b.norm()) for a, b in zip(grads, expected, strict=True))
    if not off <= allowed:
        raise InaccurateError(f"a gradient is off by {off:.1e}, allowed {allowed:.1e}")


def decoding(name: str, weight: Tensor, rounds: int) -> tuple[str, ...]:
    """A line of the table of decoding.

    Raises:
        InaccurateError: values are not those of the definition.
    """
    format, device = FORMATS[name], weight.device
    stored = format.weight(weight)
    assert stored.scales is not None
    decode = partial(decode_weight, stored.data, stored.scales, stored.amax, weight, format)
    last = Weight(*[None if t is None else t[-1:].cpu() for t in stored.tensors])  # type: ignore[arg-type]
    if not torch.equal(decode()[-1:].cpu(), format.decoded(last, weight.dtype)):
        raise InaccurateError("decoded values differ from the definition's")
    moved = nbytes(stored.data, stored.scales, [stored.amax], weight)
    source = torch.empty(moved // 2, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    seconds = interleaved({"decode": decode, "copy": copy}, rounds, device, steady=device.type == "cuda")
    ours, theirs = seconds["decode"], seconds["copy"]
    return name, *(f"{s * 1e6:.1f}" for s in (ours, theirs)), f"{moved / ours / 1e9:.0f}", f"{theirs / ours:.3f}"


def attempts(names: Iterable[str], make: Callable[[str], T]) -> tuple[dict[str, T], list[LeftOut]]:
    """The results by name, and the names without one: a failure leaves the others."""
    results, left_out = dict[str, T](), []
    for name in names:
        try:
            results[name] = make(name)
        except (InaccurateError, ImportError, RuntimeError, ValueError) as error:
            left_out.append(LeftOut(name, f"{type(error).__name__}: {error}".splitlines()[0]))
    return results, left_out


class RoutedRows(NamedTuple):
    """The input of a layer, its routing, and the gradient of its output."""

    x: Tensor
    chosen: Tensor
    weights: Tensor
    dy: Tensor

    @classmethod
    def draw(cls, preset: Preset, tokens: int, device: str) -> RoutedRows:
        """Rows of unit variance, each to some experts."""
        x = torch.randn(tokens, preset.features, device=device, dtype=torch.bfloat16, requires_grad=True)
        scores = torch.rand(tokens, preset.experts, device=device).topk(preset.top_k, -1)
        return cls(x, scores.indices, scores.values.softmax(-1), torch.randn_like(x))

    def step(self, model: nn.Module) -> Step:
        """The gradients of the input and of what trains, by one call."""
        leaves = [self.x, *[p for p in model.parameters() if p.requires_grad]]

        def step() -> tuple[Tensor, ...]:
            y = model(self.x, top_k_index=self.chosen, top_k_weights=self.weights)
            return torch.autograd.grad(y, leaves, self.dy)

        return step


class Contestants(NamedTuple):
    """The steps that are timed, the decoding within each step over bytes, and the bases that do not run."""

    steps: dict[str, Step]
    decodings: dict[str, Step]
    left_out: list[LeftOut]


def contestants(preset: Preset, tokens: int, rank: int, device: str, bases: Sequence[str]) -> Contestants:
    """A step of each kind of training, on the same routing."""
    rows = RoutedRows.draw(preset, tokens, device)
    frozen, adapted = linears(preset, 0, device), linears(preset, rank, device)
    steps = {
        "frozen": rows.step(layer(preset, *frozen, "none")),
        "LoRA": rows.step(layer(preset, *adapted, "lora")),
        "full": rows.step(layer(preset, *linears(preset, 0, device), "weight")),
    }
    others, left_out = dict[str, Step](), list[LeftOut]()
    if device == "cuda":
        up, down = (dict(fc.named_parameters()) for fc in adapted)
        steps["summed"] = _summed(up, down, rows, preset)
        others, left_out = attempts(["PEFT"], lambda name: peft_step(preset, rank, frozen, rows))
    decodings: dict[str, Step] = {}

    def over(base: str) -> Step:
        stored, values = stored_layers(preset, BASES[base], rank, device)
        step = rows.step(stored)
        check(base, step(), rows.step(values)())
        if base in FORMATS:
            decodings[f"LoRA, {base}"] = decoding_twice(stored)
        return step

    on_bases, without = attempts(bases, over)
    steps |= others | {f"LoRA, {base}": step for base, step in on_bases.items()}
    return Contestants(steps, decodings, left_out + without)


def decoding_twice(stored: fusible.Sequential) -> Step:
    """The decoding of both weights in forward and backward, without the products."""
    linears = [module for module in stored if isinstance(module, GroupedLoRA)]

    def step() -> tuple[Tensor, ...]:
        for linear in (*linears, *reversed(linears)):
            weight, recipe = linear._stored(), linear.recipe
            assert isinstance(recipe, WeightOnly)
            assert weight.data is not None
            assert weight.scales is not None
            decode_weight(weight.data, weight.scales, weight.amax, linear.get_parameter("lora_a"), recipe)
        return ()

    return step


def peft_step(preset: Preset, rank: int, frozen: tuple[Linear, Linear], rows: RoutedRows) -> Step:
    """A step of PEFT's adapters on an experts module of transformers, which has the weights of ``frozen``.

    Raises:
        InaccurateError: without a change by its adapters, the output is another than ours.
    """
    transformers, peft = import_module("transformers"), import_module("peft")
    sizes = {"hidden_size": preset.features, "moe_intermediate_size": preset.hidden, "num_experts": preset.experts}
    config = transformers.Qwen3MoeConfig(**sizes, num_experts_per_tok=preset.top_k)
    config._experts_implementation = "grouped_mm"
    with rows.x.device:
        experts = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe").Qwen3MoeExperts(config)
    model = nn.ModuleDict({"experts": experts.to(torch.bfloat16)})
    for name, linear in zip(("gate_up_proj", "down_proj"), frozen, strict=True):
        experts.get_parameter(name).data = linear.get_parameter("weight").data
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    lora = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=[], target_parameters=targets)
    adapted = peft.inject_adapter_in_model(lora, model).experts
    with torch.no_grad():
        ours, theirs = (
            each(rows.x, top_k_index=rows.chosen, top_k_weights=rows.weights)
            for each in (layer(preset, *frozen, "none"), adapted)
        )
    if not (off := float((theirs - ours).norm() / ours.norm())) < 0.02:
        raise InaccurateError(f"PEFT's output is off by {off:.1e}")
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.01)
    return rows.step(adapted)


def _summed(up: Mapping[str, Tensor], down: Mapping[str, Tensor], rows: RoutedRows, preset: Preset) -> Step:
    x, index, weights, dy = rows
    leaves = [linear[name] for linear in (up, down) for name in ("lora_a", "lora_b")]

    def step() -> tuple[Tensor, ...]:
        order = index.flatten().sort(stable=True)
        ends = torch.bincount(index.flatten(), minlength=preset.experts).cumsum(0).to(torch.int32)
        sorted_x = x[order.indices // preset.top_k]
        gate, value = F.grouped_mm(sorted_x, _sum(up).mT, offs=ends).chunk(2, -1)
        y = F.grouped_mm(F.silu(gate) * value, _sum(down).mT, offs=ends)
        y = y * weights.flatten()[order.indices].unsqueeze(-1).to(y.dtype)
        out = torch.zeros_like(x).index_add(0, order.indices // preset.top_k, y)
        return torch.autograd.grad(out, [x, *leaves], dy)

    return step


def _sum(linear: Mapping[str, Tensor]) -> Tensor:
    return linear["weight"] + linear["lora_b"] @ linear["lora_a"]


def print_decodings(args: argparse.Namespace, device: str) -> None:
    """Prints the table of decoding the first linear's weight."""
    experts, features, hidden = PRESETS[args.preset][:3]
    weight = torch.randn(experts, 2 * hidden, features, device=device, dtype=torch.bfloat16)
    names = [name for name in args.bases if name in FORMATS]
    rows, left_out = attempts(names, lambda name: decoding(name, weight, args.rounds))
    heading = [f"{args.preset}, {device}", "decoding, µs", "copy, µs", "GB/s", "share of the copy's speed"]
    print(markdown(heading, rows.values()), footer(left_out), sep="\n", flush=True)


def products(preset: Preset, tokens: int, name: str) -> int:
    """The operations of a step's products with weights: those of the forward, and as many for each gradient."""
    return 6 * tokens * preset.top_k * preset.features * preset.hidden * (3 if name == "full" else 2)


def dense_step(side: int = 8192) -> Step:
    """A product of PyTorch, of 2 side^3 operations."""
    a, b = torch.randn(2, side, side, device="cuda", dtype=torch.bfloat16)
    return lambda: (a @ b,)


def host_seconds(step: Step, device: str, rounds: int = 5) -> float:
    """The median time in which the host launches a step for an idle device."""
    seconds = list[float]()
    for _ in range(rounds):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def print_steps(args: argparse.Namespace, device: str) -> None:
    """Prints the table of steps, and the time of each that is decoding."""
    preset, side = PRESETS[args.preset], 8192
    steps, decodings, left_out = contestants(preset, args.tokens, args.rank, device, args.bases)
    every = steps | {f"decode {name}": step for name, step in decodings.items()}
    if device == "cuda":
        every["dense"] = dense_step(side)
    seconds = interleaved(every, args.rounds, device, steady=device == "cuda")
    rows = [
        [
            name,
            f"{seconds[name] * 1e3:.2f}",
            f"{seconds[name] / seconds['frozen']:.2f}",
            f"{seconds[name] / seconds['LoRA']:.3f}",
            f"{host_seconds(step, device, args.rounds) * 1e3:.2f}",
            f"{products(preset, args.tokens, name) / seconds[name] / 1e12:.0f}",
            f"{args.tokens / seconds[name] / 1e6:.2f}",
            f"{peak_bytes(step, device) >> 20}",
        ]
        for name, step in steps.items()
    ]
    where = f"{args.preset}, {args.tokens} tokens, rank {args.rank}, bf16, {device}"
    print(markdown([where, "step, ms", "/ frozen", "/ LoRA", "host, ms", "TFLOP/s", "tokens/µs", "peak, MB"], rows))
    print(footer(left_out))
    if device == "cuda":
        ms = seconds["dense"] * 1e3
        print(f"dense product of {side} x {side} x {side}: {ms:.2f} ms, {2 * side**3 / ms / 1e9:.0f} TFLOP/s")
    for name in decodings:
        decoding, step = seconds[f"decode {name}"] * 1e3, seconds[name] * 1e3
        print(f"decode: {decoding:.2f} ms of {step:.2f} ms, {decoding / step:.1%} ({name})")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="qwen3")
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--rank", type=positive, default=16)
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--bases", choices=BASES, nargs="*", default=[*BASES], help="formats in which weights stay")
    parser.add_argument("--passes", nargs="*", help="kinds of passes that one kernel makes, all by 'all'")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.passes is not None:
        low_rank.PASSES = low_rank.ALL_PASSES if args.passes == ["all"] else frozenset(args.passes)
    if args.bases:
        print_decodings(args, device)
    print_steps(args, device)


if __name__ == "__main__":
    main()
