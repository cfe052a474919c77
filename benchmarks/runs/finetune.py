"""The memory and the time of a step that fine-tunes a model with its experts in few bits, by slices of its layers.

    python -m fusible.benchmarks.runs.finetune                                  on a GPU
    python -m fusible.benchmarks.runs.finetune --preset qwen3-30b-fp8
    python -m fusible.benchmarks.runs.finetune --shrink 45 --tokens 64 --device cpu

The lines are those of a user: ``from_pretrained`` of a checkpoint in the publisher's format (random bytes), PEFT's LoRA
on all linears and experts, activation checkpointing, AdamW in float32 for the adapters, and the loss in parts of 1024
tokens: the logits of 8192 and their gradients take 17 GB. A peer does the same by PEFT and transformers alone: experts
in 16 bits, ``grouped_mm``. The row of all layers extends the first two: each layer adds the same.

transformers multiplies the other linears of an FP8 checkpoint by kernels that it downloads. Without them they are
decoded for each product.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..arguments import positive, program, require_gpus, require_packages
from ..timing import markdown, peak_bytes, phases_in_a_row
from .main_weights import adamw, state_of
from .slices import SLICES, config_of
from .trainer import checkpoint_layers

BLOCK, FP8_BLOCK, RANK, LOSS_TOKENS = 32, 128, 8, 1024


class Checkpoint(NamedTuple):
    """A published model in few bits.

    Attributes:
        slice: of :data:`SLICES`.
        layers: of the whole model.
        format: of its experts, in words.
        stores: the tensors of a file by name, for a name and a tensor of the model that may be stored in few bits.
        quantization: of the ``config.json``.
        dequantize: the class of transformers' options that load it in 16 bits.
        downloads_kernels: whether transformers downloads kernels for its other linears.
    """

    slice: str
    layers: int
    format: str
    stores: Callable[[str, Tensor, str], Mapping[str, Tensor] | None]
    quantization: dict[str, object]
    dequantize: str
    downloads_kernels: bool = False


def in_mxfp4(name: str, tensor: Tensor, device: str) -> dict[str, Tensor] | None:
    """OpenAI's blocks and scales of experts; None: in 16 bits."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return None
    experts, rows, columns = tensor.mT.shape
    blocks = experts, rows, math.ceil(columns / BLOCK)
    return {
        f"{name}_blocks": torch.randint(256, (*blocks, BLOCK // 2), dtype=torch.uint8, device=device),
        f"{name}_scales": torch.randint(116, 120, blocks, dtype=torch.uint8, device=device),
    }


def in_fp8_blocks(name: str, tensor: Tensor, device: str) -> dict[str, Tensor] | None:
    """Bytes of each linear and each expert, and scales in bfloat16, as Qwen3 has them; None: in 16 bits."""
    if "_proj" not in name:
        return None
    linears = {name: tensor} if tensor.dim() == 2 else dict(_of_experts(name, tensor))
    stored: dict[str, Tensor] = {}
    for linear, shape in ((linear, each.shape) for linear, each in linears.items()):
        stored[linear] = torch.randn(shape, device=device).mul_(16).to(torch.float8_e4m3fn)
        blocks = [math.ceil(size / FP8_BLOCK) for size in shape]
        stored[f"{linear}_scale_inv"] = torch.full(blocks, 0.02 / 16, dtype=torch.bfloat16, device=device)
    return stored


def _of_experts(name: str, stack: Tensor) -> Iterator[tuple[str, Tensor]]:
    path, _, last = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    for number, expert in enumerate(stack):
        for part, matrix in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{path}.{number}.{part}.weight", matrix


CHECKPOINTS = {
    "gpt-oss-20b": Checkpoint("gpt-oss-20b", 24, "MXFP4", in_mxfp4, {"quant_method": "mxfp4"}, "Mxfp4Config"),
    "qwen3-30b-fp8": Checkpoint(
        "qwen3",
        48,
        "FP8 in blocks",
        in_fp8_blocks,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [FP8_BLOCK, FP8_BLOCK]},
        "FineGrainedFP8Config",
        downloads_kernels=True,
    ),
}
OURS, PEER = "fusible", "grouped_mm"


class StepCost(NamedTuple):
    """The bytes held between steps, the peak of a step, and its seconds, for a number of layers."""

    layers: float
    held: float
    peak: float
    seconds: float


def write_checkpoint(folder: Path, kind: Checkpoint, layers: int, shrink: int, device: str) -> Path:
    """Writes a slice of a published model with random weights.

    They are drawn on ``device``: a CPU takes a minute for the numbers of a published embedding.
    """
    config, transformers = config_of(kind.slice, layers, shrink, 4096), import_module("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        drawn = kind.stores(name, tensor, device)
        state |= drawn or {name: (torch.randn(tensor.shape, device=device) * 0.02).bfloat16()}
    import_module("safetensors.torch").save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {"quantization_config": kind.quantization}
    written["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(written, default=str))
    return folder


def adapted(folder: Path, kind: Checkpoint, implementation: str, device: str) -> Any:
    """The model of a checkpoint, with adapters, ready to train; in 16 bits for another implementation than ours."""
    import fusible.integrations.transformers  # noqa: F401

    transformers = import_module("transformers")
    attention = SLICES[kind.slice].attention if device == "cuda" else "eager"
    options = {"dtype": torch.bfloat16, "experts_implementation": implementation, "attn_implementation": attention}
    if implementation != OURS:
        options["quantization_config"] = getattr(transformers, kind.dequantize)(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map=device, **options)
    peft = import_module("peft")
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    lora = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", target_parameters=experts)
    model = peft.get_peft_model(model, lora).train()
    checkpoint_layers(model.get_base_model())
    return model


def decode_linears_without_kernels() -> None:
    """Gives transformers' FP8 linears a product of decoded weights, if their kernels cannot be had."""
    fp8: Any = import_module("transformers.integrations.finegrained_fp8")
    try:
        fp8.load_finegrained_fp8_kernel()
    except Exception as error:  # of a missing package, of a network
        print(f"linears besides experts are decoded for each product: {str(error).splitlines()[0]}\n")
        fp8.fp8_linear = _decoded_linear


def _decoded_linear(
    rows: Tensor,
    weight: Tensor,
    scales: Tensor,
    block: list[int] | None = None,
    bias: Tensor | None = None,
    *others: object,
) -> Tensor:
    fp8 = import_module("transformers.integrations.finegrained_fp8")
    return F.linear(rows, fp8._dequantize_fp8_weight(weight, scales, block, rows.dtype), bias)


def loss_in_parts(model: Any, ids: Tensor) -> Tensor:
    """The mean loss of the next tokens of a sequence [1, T]. The backward computes the logits again, part by part."""
    causal = model.get_base_model()
    hidden, labels = causal.model(input_ids=ids).last_hidden_state[0, :-1], ids[0, 1:]

    def part(rows: Tensor, of_rows: Tensor) -> Tensor:
        return F.cross_entropy(causal.lm_head(rows).float(), of_rows, reduction="sum")

    parts = zip(torch.split(hidden, LOSS_TOKENS), torch.split(labels, LOSS_TOKENS), strict=True)
    losses = [checkpoint(part, *each, use_reentrant=False) for each in parts]
    return torch.stack(losses).sum() / len(labels)


def measure(folder: Path, kind: Checkpoint, implementation: str, layers: int, args: argparse.Namespace) -> StepCost:
    """Trains a slice for some steps."""
    gc.collect()  # models hold themselves
    model = adapted(folder, kind, implementation, args.device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = adamw(trained)
    ids = torch.randint(model.config.vocab_size, (1, args.tokens), device=args.device)

    def phases() -> Iterator[None]:
        loss_in_parts(model, ids).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield

    (seconds,) = phases_in_a_row(phases, args.rounds, args.device)
    tensors = [*model.parameters(), *model.buffers(), *state_of(optimizer)]
    held = sum(tensor.nbytes for tensor in tensors)
    return StepCost(layers, held, held + peak_bytes(lambda: list(phases()), args.device), seconds)


def extended(few: StepCost, more: StepCost, layers: int) -> StepCost:
    """The values of so many layers, on the line through two slices."""
    share = (layers - few.layers) / (more.layers - few.layers)
    return StepCost(*[a + share * (b - a) for a, b in zip(few, more, strict=True)])


def rows_of(name: str, costs: Sequence[StepCost], tokens: int) -> list[tuple[str, ...]]:
    """The lines of a table."""
    return [
        (
            name,
            f"{cost.layers:.0f}",
            *(f"{of / 1e9:.2f}" for of in (cost.held, cost.peak)),
            f"{cost.seconds * 1e3:.1f}",
            f"{tokens / cost.seconds:.0f}",
        )
        for cost in costs
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains two slices by each implementation, and prints Markdown."""
    args = _arguments(argv)
    kind = CHECKPOINTS[args.preset]
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"### {args.preset}, LoRA of rank {RANK}, {args.tokens} tokens, {where}, torch {torch.__version__}\n")
    if kind.downloads_kernels:
        decode_linears_without_kernels()
    costs: dict[str, list[StepCost]] = {name: [] for name in args.implementations}
    for layers in args.layers:
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), kind, layers, args.shrink, args.device)
            for name in [*costs]:
                try:
                    costs[name].append(measure(Path(folder), kind, name, layers, args))
                except (RuntimeError, ImportError) as error:
                    if name == OURS:
                        raise
                    print(f"{name} is left out: {error}", flush=True)
                    del costs[name]
                else:
                    print(f"{name}, {layers} layers: {costs[name][-1].seconds * 1e3:.1f} ms", flush=True)
    for two in costs.values():
        two.append(extended(two[0], two[1], kind.layers))
    names = {OURS: f"fusible, {kind.format}", PEER: "PEFT and grouped_mm, 16 bits"}
    heading = ("experts", "layers", "held between steps, GB", "peak of a step, GB", "step, ms", "tokens/s")
    lines = [row for name, each in costs.items() for row in rows_of(names[name], each, args.tokens)]
    print("", markdown(heading, lines), sep="\n")
    if len(costs) == 2:
        ours, theirs = costs[OURS][-1], costs[PEER][-1]
        faster, share = theirs.seconds / ours.seconds, ours.peak / theirs.peak
        print(f"\nfusible: {faster:.2f} x the tokens/s of PEFT with transformers alone, in {share:.2f} of its peak")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program("fusible.benchmarks.runs.finetune", __doc__)
    parser.add_argument("--preset", choices=CHECKPOINTS, default="gpt-oss-20b", help="the checkpoint")
    parser.add_argument("--layers", type=positive, nargs=2, default=[2, 4], help="of the two slices")
    parser.add_argument("--shrink", type=positive, default=1, help="divide widths, heads and experts by this")
    parser.add_argument("--tokens", type=positive, default=8192, help="of a step")
    parser.add_argument("--rounds", type=positive, default=5, help="steps that are timed, in a row")
    parser.add_argument("--implementations", choices=(OURS, PEER), nargs="+", default=[OURS, PEER], help="of experts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    require_packages(parser, "transformers", "peft")
    require_gpus(parser, args.device)
    if args.layers[0] == args.layers[1]:
        parser.error(f"--layers: expected two different numbers, got {args.layers[0]} twice")
    return args


if __name__ == "__main__":
    main()
