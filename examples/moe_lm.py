"""The demo: trains a small mixture-of-experts language model for a minute, then shows how its experts run.

The text is what every machine with Python has: the sources of the standard library, byte by byte. Run it with
``make demo`` or ``python -m fusible demo``. On a GPU the model computes in bfloat16 and is large enough for fusion to
help; on a CPU it is small enough for a minute.
"""

from __future__ import annotations

import json
import math
import random
import sys
import sysconfig
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusible.benchmarks.arguments import command, device, duration, positive
from fusible.benchmarks.contestant import Contestant
from fusible.benchmarks.contestants import race
from fusible.benchmarks.grouped_mlp import measure
from fusible.benchmarks.problem import Problem, Result
from fusible.benchmarks.report import describe
from fusible.benchmarks.timing import kept_bytes, markdown
from fusible.ep import Group
from fusible.examples.moe_layer import MoELayer

VOCABULARY = 256
CONTEXT = 128
BATCH = 16
BALANCE = 0.01
HELD_OUT_BYTES = 50_000
PEAK_RATE = 3e-3
COMPARED = ("fused", "unfused", "grouped_mm", "loop")
ON_A_GPU = (
    "On an H200 the demo trains 340 M parameters in bfloat16. There fused experts are 1.40 x as fast as unfused, "
    "1.69 x as fast as grouped_mm, and 3.54 x as fast as loop."
)  # docs/measured.md


class Size(NamedTuple):
    """The size of the model and its batches."""

    features: int
    heads: int
    hidden: int  # of an expert
    experts: int
    top_k: int
    layers: int
    batch: int  # stretches of text
    rate: float  # of learning, at its peak


SMALL = Size(128, 4, 64, experts=32, top_k=4, layers=2, batch=8, rate=PEAK_RATE)  # many experts: a loop takes long
LARGE = Size(2048, 16, 768, experts=32, top_k=8, layers=2, batch=64, rate=6e-4)


class Setting(NamedTuple):
    """The device of the demo, the dtype of the experts, and the size."""

    device: str
    dtype: torch.dtype
    size: Size

    @classmethod
    def on(cls, device: str) -> Setting:
        """The large model in bfloat16, with float32 parameters, on a GPU that supports it; the small one elsewhere."""
        if torch.device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            return cls(device, torch.bfloat16, LARGE)
        return cls(device, torch.float32, SMALL)

    def autocast(self) -> torch.autocast:
        """The context of the training."""
        return torch.autocast(torch.device(self.device).type, self.dtype, enabled=self.dtype != torch.float32)

    def model(self, group: Group | None = None) -> LanguageModel:
        """A new model, with all experts or those of one rank."""
        return LanguageModel(*self.size[:6], group).to(self.device)


class Ranks(Protocol):
    """Processes that train one model together."""

    rank: int

    def agreed(self, done: Iterator[float]) -> Iterator[float]:
        """The progress of the training, the same on all processes."""

    def clip(self, model: LanguageModel) -> None:
        """Averages the gradients over the batches of all processes, then clips as :func:`clip` does."""


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(features, 3 * features, bias=False)
        self.out = nn.Linear(features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, features))
        return y


class Block(nn.Module):
    """Attention, then experts, each on normalised input and with a residual connection."""

    def __init__(
        self, features: int, heads: int, hidden: int, experts: int, top_k: int, group: Group | None = None
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(features), nn.RMSNorm(features)
        self.attention = Attention(features, heads)
        self.moe = MoELayer(features, hidden, experts, top_k, group)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x))
        return x + y, balance


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(
        self,
        features: int = 128,
        heads: int = 4,
        hidden: int = 256,
        experts: int = 8,
        top_k: int = 2,
        layers: int = 2,
        group: Group | None = None,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, features)
        self.positions = nn.Parameter(torch.randn(CONTEXT, features) * 0.02)
        self.blocks = nn.ModuleList(Block(features, heads, hidden, experts, top_k, group) for _ in range(layers))
        self.norm = nn.RMSNorm(features)
        self.head = nn.Linear(features, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the load-balancing loss, with minimum 1 if all experts of all layers are used equally."""
        x, losses = self.embedding(text) + self.positions[: text.shape[1]], []
        for block in self.blocks:
            x, balance = block(x)
            losses.append(balance)
        return self.head(self.norm(x)), torch.stack(losses).mean()


def read_text(limit: int = 3_000_000) -> Tensor:
    """Bytes of sources of the standard library, whole files in an order that is always the same."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(files)
    text = bytearray()
    for file in files:
        if len(text) > limit:
            break
        text += file.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8).long()


def batch_of(text: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random stretches of text, and the same shifted by one byte."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    stretches = text[starts + torch.arange(CONTEXT + 1)]
    return stretches[:, :-1], stretches[:, 1:]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The mean cross-entropy, in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def progress(seconds: float, steps: int | None) -> Iterator[float]:
    """Yields the progress of the training, 0 to 1, before each step; ends after ``seconds`` or ``steps``."""
    start, step = time.perf_counter(), 0
    while (done := step / steps if steps else (time.perf_counter() - start) / seconds) < 1:
        yield done
        step += 1


def clip(model: nn.Module) -> None:
    """Scales the gradient to norm 1 if it is larger."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def train(
    model: LanguageModel,
    text: Tensor,
    seconds: float,
    steps: int | None = None,
    batch: int = BATCH,
    rate: float = PEAK_RATE,
    *,
    ranks: Ranks | None = None,
) -> list[float]:
    """Trains with AdamW, the rate rising for a tenth of the time and falling along a cosine; returns the losses.

    Args:
        ranks: the processes that train together, each on its own batches.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    generator, losses, bar = torch.Generator().manual_seed(ranks.rank + 1 if ranks else 1), [], Bar()
    done_by_now = progress(seconds, steps)
    device = model.positions.device
    for done in ranks.agreed(done_by_now) if ranks else done_by_now:
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, done / 0.1 + 0.05) * 0.5 * (1 + math.cos(math.pi * done))
        x, target = (t.to(device) for t in batch_of(text, batch, generator))
        logits, balance = model(x)
        loss = cross_entropy(logits, target)
        optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        ranks.clip(model) if ranks else clip(model)
        optimizer.step()
        losses.append(loss.item())
        bar.show(done, f"step {len(losses):4}  loss {recent(losses):.3f}  balance {balance.item():.2f}")
    bar.show(1, f"step {len(losses):4}  loss {recent(losses):.3f}")
    return losses


def recent(losses: Sequence[float]) -> float:
    """The mean of the last losses."""
    last = losses[-20:]
    return sum(last) / len(last)


class Bar:
    """A progress bar; without a terminal, a line every tenth."""

    WIDTH = 30

    def __init__(self) -> None:
        self._watched = sys.stdout.isatty()
        self._shown = -1

    def show(self, done: float, text: str) -> None:
        filled = int(done * self.WIDTH)
        line = f"[{'#' * filled}{'.' * (self.WIDTH - filled)}] {done:4.0%}  {text}"
        if self._watched:
            print(f"\r{line}", end="" if done < 1 else "\n", flush=True)
        elif int(done * 10) > self._shown:
            self._shown = int(done * 10)
            print(line, flush=True)


@torch.no_grad()
def held_out_loss(model: LanguageModel, text: Tensor) -> float:
    """The mean loss on text that the training has not seen."""
    x, target = (t.to(model.positions.device) for t in batch_of(text, 64, torch.Generator().manual_seed(2)))
    return float(cross_entropy(model(x)[0], target))


@torch.no_grad()
def complete(model: LanguageModel, prompt: str, length: int) -> str:
    """Continues a text byte by byte. Bytes that are no text, as an untrained model writes them, are replaced."""
    text, generator = torch.tensor([list(prompt.encode())]), torch.Generator().manual_seed(3)
    for _ in range(length):
        logits = model(text[:, -CONTEXT:].to(model.positions.device))[0][0, -1].float().cpu() / 0.7
        text = torch.cat([text, torch.multinomial(logits.softmax(0), 1, generator=generator)[None]], 1)
    said = bytes(text[0].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in said)


def first_layer(model: LanguageModel) -> MoELayer:
    """The experts of the first layer and their router, which the comparison measures."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block.moe


def experts_problem(
    model: LanguageModel, text: Tensor, batch: int = BATCH, dtype: torch.dtype = torch.float32
) -> Problem:
    """The rows of the first layer's experts for a batch, as a problem for the benchmarks."""
    layer, caught = first_layer(model), dict[str, Tensor]()

    def catch(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        caught.update(x=args[0].detach(), **{name: tensor.detach() for name, tensor in keywords.items()})

    hook = layer.experts.register_forward_pre_hook(catch, with_kwargs=True)
    model(batch_of(text, batch, torch.Generator().manual_seed(4))[0].to(model.positions.device))
    hook.remove()
    w1, w2 = (weight.detach().to(dtype) for weight in layer.experts.parameters())
    rows, split_sizes, scales, *_ = layer.experts[0](**caught)
    dy = torch.randn(rows.shape, generator=torch.Generator().manual_seed(5)).to(rows.device, dtype)
    return Problem(w1=w1, w2=w2, dy=dy, x=rows.to(dtype), split_sizes=split_sizes, scales=scales.float())


def compared(problem: Problem, rounds: int) -> dict[str, dict[str, float]]:
    """Compares the fused and unfused plan, grouped_mm where it runs, and a loop: times, memory, difference."""
    contestants = race(problem, COMPARED)
    measured, truth = measure(problem, contestants, rounds), contestants["loop"].result()
    return {
        name: {
            "seconds": measured[name].step,
            "peak_bytes": measured[name].peak,
            "kept_bytes": kept_bytes(contestant.forward),
            "difference": difference(contestant, truth),
        }
        for name, contestant in contestants.items()
    }


def comparison(results: Mapping[str, Mapping[str, float]]) -> str:
    """The results of :func:`compared` as a Markdown table."""
    heading = ("experts of layer 0", "forward + backward, ms", "peak memory, MB", "kept for backward, MB", "difference")
    rows = []
    for name, f in results.items():
        memory = f"{f['peak_bytes'] / 1e6:.1f}", f"{f['kept_bytes'] / 1e6:.1f}"
        rows.append((name, f"{f['seconds'] * 1e3:.2f}", *memory, f"{f['difference']:.1e}"))
    return markdown(heading, rows)


def verdict(results: Mapping[str, Mapping[str, float]], device: str) -> str:
    """Says in a sentence what :func:`comparison` shows, and on a CPU also what a GPU would show."""
    fused, unfused = results["fused"], results["unfused"]
    speeds = [
        f"{f['seconds'] / fused['seconds']:.2f} x as fast as {name}" for name, f in results.items() if f is not fused
    ]
    kept = f"{fused['kept_bytes'] / unfused['kept_bytes']:.0%} of the memory that unfused ones keep for the backward"
    said = f"Fused experts are {', '.join(speeds)}. They keep {kept}."
    return f"{said}\n{ON_A_GPU}" if device == "cpu" else said


def difference(contestant: Contestant, truth: Result) -> float:
    """The largest difference of any element of output and gradients, relative to the largest element."""
    pairs = zip(contestant.result(), truth, strict=True)
    return max(float((came - should).abs().max() / should.abs().max()) for came, should in pairs)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, completes a text, explains, compares."""
    parser = command("demo", __doc__)
    parser.add_argument("--seconds", type=duration, default=45, help="of training")
    parser.add_argument("--steps", type=positive, help="of training, instead of seconds")
    parser.add_argument("--rounds", type=positive, default=20, help="of the comparison at the end")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu", help="where")
    parser.add_argument("--ep", type=positive, default=1, metavar="RANKS", help="spread the experts over processes")
    args = parser.parse_args(argv)
    if args.ep > 1:
        from fusible.examples.moe_lm_ranks import start  # which is made of the parts of this file

        return start(args)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        results = run(args)
    if args.json:
        print(json.dumps(results, indent=1))


def run(args: Namespace) -> dict[str, Any]:
    """Runs the demo, prints, and returns the results as a dict."""
    setting, text = Setting.on(args.device), read_text()
    with setting.autocast():
        model, data = trained(setting, text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:], args)
        problem = experts_problem(model, text[-HELD_OUT_BYTES:], setting.size.batch, setting.dtype)
    explanation = first_layer(model).experts.explain()
    print(explanation, "\n")
    results, where = compared(problem, args.rounds), describe(problem)
    print(f"Experts of layer 0: {where}\n\n{comparison(results)}")
    print("\nTimes and memory were measured in this run. Differences are to the loop, relative to its largest element.")
    print(verdict(results, problem.x.device.type))
    return {**data, "problem": where, "explanation": explanation.to_dict(), "comparison": results}


def trained(setting: Setting, text: Tensor, held_out: Tensor, args: Namespace) -> tuple[LanguageModel, dict[str, Any]]:
    """The model after its training, and facts about the training."""
    torch.manual_seed(0)
    model, size = setting.model(), setting.size
    parameters = sum(p.numel() for p in model.parameters())
    experts = f"top {size.top_k} of {size.experts} experts"
    print(f"{parameters / 1e6:.1f} M parameters, {experts}; {len(text) / 1e6:.1f} MB of the standard library")
    losses = train(model, text, args.seconds, args.steps, size.batch, size.rate)
    unseen, completion = held_out_loss(model, held_out), complete(model, "    def __init__(self", 160)
    print(f"held-out loss: {unseen:.3f} nats a byte\n\n{completion} \n")
    return model, {"parameters": parameters, "losses": losses, "held_out_loss": unseen, "completion": completion}


if __name__ == "__main__":
    main()
