"""The memory and the time of a step that fine-tunes gpt-oss-20b with its experts in MXFP4, by slices of its layers.

    python -m fusible.benchmarks.runs.finetune                                  on a GPU
    python -m fusible.benchmarks.runs.finetune --shrink 45 --tokens 64 --device cpu

The lines are those of a user: ``from_pretrained`` of a checkpoint in OpenAI's format (random bytes), PEFT's LoRA on
all linears and experts, activation checkpointing, AdamW in float32 for the adapters, and the loss in parts of 1024
tokens: the logits of 8192 and their gradients take 17 GB. The last row extends the first two to all layers: each layer
adds the same.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusible.integrations.transformers  # noqa: F401

from ..arguments import command, positive
from ..timing import markdown, peak_bytes, phases_in_a_row
from .main_weights import adamw, state_of
from .slices import SLICES, config_of
from .trainer import checkpoint_layers

PRESET, PUBLISHED_LAYERS, BLOCK, RANK, LOSS_TOKENS = "gpt-oss-20b", 24, 32, 8, 1024


class StepCost(NamedTuple):
    """The bytes held between steps, the peak of a step, and its seconds, for a number of layers."""

    layers: float
    held: float
    peak: float
    seconds: float


def write_checkpoint(folder: Path, layers: int, shrink: int, device: str) -> Path:
    """Writes a slice of the published model with random weights: experts as blocks and scales, the rest in bfloat16.

    They are drawn on ``device``: a CPU takes a minute for the numbers of a published embedding.
    """
    config, transformers = config_of(PRESET, layers, shrink, 4096), import_module("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, rows, columns = tensor.mT.shape
            blocks = experts, rows, math.ceil(columns / BLOCK)
            state[f"{name}_blocks"] = torch.randint(256, (*blocks, BLOCK // 2), dtype=torch.uint8, device=device)
            state[f"{name}_scales"] = torch.randint(116, 120, blocks, dtype=torch.uint8, device=device)
        else:
            state[name] = (torch.randn(tensor.shape, device=device) * 0.02).bfloat16()
    import_module("safetensors.torch").save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    written["architectures"] = [type(model).__name__]
    (folder / "config.json").write_text(json.dumps(written, default=str))
    return folder


def adapted(folder: Path, device: str) -> Any:
    """The model of a checkpoint, with adapters, ready to train."""
    load = import_module("transformers").AutoModelForCausalLM.from_pretrained
    attention = SLICES[PRESET].attention if device == "cuda" else "eager"
    options = {"dtype": torch.bfloat16, "experts_implementation": "fusible", "attn_implementation": attention}
    model = load(folder, device_map=device, **options)
    peft = import_module("peft")
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    lora = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", target_parameters=experts)
    model = peft.get_peft_model(model, lora).train()
    checkpoint_layers(model.get_base_model())
    return model


def loss_in_parts(model: Any, ids: Tensor) -> Tensor:
    """The mean loss of the next tokens of a sequence [1, T]. The backward computes the logits again, part by part."""
    causal = model.get_base_model()
    hidden, labels = causal.model(input_ids=ids).last_hidden_state[0, :-1], ids[0, 1:]

    def part(rows: Tensor, of_rows: Tensor) -> Tensor:
        return F.cross_entropy(causal.lm_head(rows).float(), of_rows, reduction="sum")

    parts = zip(torch.split(hidden, LOSS_TOKENS), torch.split(labels, LOSS_TOKENS), strict=True)
    losses = [checkpoint(part, *each, use_reentrant=False) for each in parts]
    return torch.stack(losses).sum() / len(labels)


def measure(layers: int, args: argparse.Namespace) -> StepCost:
    """Trains a slice for some steps."""
    with tempfile.TemporaryDirectory() as folder:
        model = adapted(write_checkpoint(Path(folder), layers, args.shrink, args.device), args.device)
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


def table(costs: list[StepCost]) -> str:
    """The costs of two slices, and the published model's on the line through both, as Markdown."""
    few, more = costs
    rows = [few, more, extended(few, more, PUBLISHED_LAYERS)]
    heading = ("layers", "held between steps, GB", "peak of a step, GB", "step, ms")
    cells = [(f"{f.layers:.0f}", f"{f.held / 1e9:.2f}", f"{f.peak / 1e9:.2f}", f"{f.seconds * 1e3:.1f}") for f in rows]
    return markdown(heading, cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains two slices, and prints Markdown."""
    args = _arguments(argv)
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"### {PRESET}, LoRA of rank {RANK} over MXFP4, {args.tokens} tokens, {where}, torch {torch.__version__}\n")
    print(table([measure(layers, args) for layers in args.layers]))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command("runs.finetune", __doc__)
    parser.add_argument("--layers", type=positive, nargs=2, default=[2, 4], help="of the two slices")
    parser.add_argument("--shrink", type=positive, default=1, help="divide widths, heads and experts by this")
    parser.add_argument("--tokens", type=positive, default=8192, help="of a step")
    parser.add_argument("--rounds", type=positive, default=5, help="steps that are timed, in a row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
