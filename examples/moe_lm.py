"""The demo: trains a small mixture-of-experts language model for a minute, then shows how its experts run.

The text is what every machine with Python has: the sources of the standard library, byte by byte. Run it with
``make demo`` or ``python -m fusible demo``.
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
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusible.benchmarks.arguments import command, duration, positive
from fusible.benchmarks.contestant import Contestant
from fusible.benchmarks.contestants import race
from fusible.benchmarks.grouped_mlp import measure
from fusible.benchmarks.problem import Problem, Result
from fusible.benchmarks.timing import kept_bytes, markdown

from .moe_layer import MoELayer

VOCABULARY = 256
CONTEXT = 128
BATCH = 16
BALANCE = 0.01
HELD_OUT_BYTES = 50_000
PEAK_RATE = 3e-3


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
    """Attention, then experts, each on normalised rows and added to what comes in."""

    def __init__(self, features: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(features), nn.RMSNorm(features)
        self.attention = Attention(features, heads)
        self.moe = MoELayer(features, hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        y, balance = self.moe(self.norm2(x))
        return x + y, balance


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, features: int = 128, heads: int = 4, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, features)
        self.positions = nn.Parameter(torch.randn(CONTEXT, features) * 0.02)
        self.blocks = nn.ModuleList(Block(features, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(features)
        self.head = nn.Linear(features, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the load-balancing loss: 1 where all experts of all layers are used alike."""
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
    """Stretches of text, and the same one byte later."""
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    stretches = text[starts + torch.arange(CONTEXT + 1)]
    return stretches[:, :-1], stretches[:, 1:]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """In nats a byte."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def progress(seconds: float, steps: int | None) -> Iterator[float]:
    """How far the training is, 0 to 1, before each step; ends after that many seconds, or steps."""
    start, step = time.perf_counter(), 0
    while (done := step / steps if steps else (time.perf_counter() - start) / seconds) < 1:
        yield done
        step += 1


def train(model: LanguageModel, text: Tensor, seconds: float, steps: int | None = None) -> list[float]:
    """Trains with AdamW, the rate rising for a tenth of the time and falling along a cosine; returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    generator, losses, bar = torch.Generator().manual_seed(1), [], Bar()
    device = model.positions.device
    for done in progress(seconds, steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * min(1, done / 0.1 + 0.05) * 0.5 * (1 + math.cos(math.pi * done))
        x, target = (t.to(device) for t in batch_of(text, BATCH, generator))
        logits, balance = model(x)
        loss = cross_entropy(logits, target)
        optimizer.zero_grad()
        (loss + BALANCE * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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
    """A progress bar; where nobody watches, a line every tenth."""

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
    x, target = batch_of(text, 64, torch.Generator().manual_seed(2))
    return float(cross_entropy(model(x)[0], target))


@torch.no_grad()
def complete(model: LanguageModel, prompt: str, length: int) -> str:
    """Continues a text byte by byte."""
    text, generator = torch.tensor([list(prompt.encode())]), torch.Generator().manual_seed(3)
    for _ in range(length):
        logits = model(text[:, -CONTEXT:])[0][0, -1] / 0.7
        text = torch.cat([text, torch.multinomial(logits.softmax(0), 1, generator=generator)[None]], 1)
    return bytes(text[0].tolist()).decode(errors="replace")


def first_layer(model: LanguageModel) -> MoELayer:
    """The experts that the comparison is about, with their router."""
    block = model.blocks[0]
    assert isinstance(block, Block)
    return block.moe


def experts_problem(model: LanguageModel, text: Tensor) -> Problem:
    """The rows of the first layer's experts for a batch, as a problem for the benchmarks."""
    layer, caught = first_layer(model), dict[str, Tensor]()

    def catch(module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        caught.update(x=args[0].detach(), **{name: tensor.detach() for name, tensor in keywords.items()})

    hook = layer.experts.register_forward_pre_hook(catch, with_kwargs=True)
    model(batch_of(text, BATCH, torch.Generator().manual_seed(4))[0])
    hook.remove()
    w1, w2 = (weight.detach() for weight in layer.experts.parameters())
    rows, split_sizes, scales, *_ = layer.experts[0](**caught)
    dy = torch.randn(rows.shape, generator=torch.Generator().manual_seed(5))
    return Problem(w1=w1, w2=w2, dy=dy, x=rows, split_sizes=split_sizes, scales=scales)


def compared(problem: Problem, rounds: int) -> dict[str, dict[str, float]]:
    """Fused plan, unfused plan and a loop over experts: times, memory, and how far they are apart."""
    contestants = race(problem, ["fused", "unfused", "loop"])
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


def comparison(found: Mapping[str, Mapping[str, float]]) -> str:
    """What :func:`compared` has found, as Markdown."""
    heading = ("experts of layer 0", "forward + backward, ms", "peak memory, MB", "kept for backward, MB", "difference")
    rows = []
    for name, f in found.items():
        memory = f"{f['peak_bytes'] / 1e6:.1f}", f"{f['kept_bytes'] / 1e6:.1f}"
        rows.append((name, f"{f['seconds'] * 1e3:.2f}", *memory, f"{f['difference']:.1e}"))
    return markdown(heading, rows)


def difference(contestant: Contestant, truth: Result) -> float:
    """The largest difference of any element of the output and the gradients, in parts of the largest element."""
    pairs = zip(contestant.result(), truth, strict=True)
    return max(float((came - should).abs().max() / should.abs().max()) for came, should in pairs)


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, completes a text, explains, compares."""
    parser = command("demo", __doc__)
    parser.add_argument("--seconds", type=duration, default=45, help="of training")
    parser.add_argument("--steps", type=positive, help="of training, instead of seconds")
    parser.add_argument("--rounds", type=positive, default=20, help="of the comparison at the end")
    args = parser.parse_args(argv)
    with redirect_stdout(sys.stderr) if args.json else nullcontext():
        found = run(args)
    if args.json:
        print(json.dumps(found, indent=1))


def run(args: Namespace) -> dict[str, Any]:
    """Does it all, says so, and returns it as data."""
    torch.manual_seed(0)
    text = read_text()
    train_text, held_out = text[:-HELD_OUT_BYTES], text[-HELD_OUT_BYTES:]
    model = LanguageModel()
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.1f} M parameters, top 2 of 8 experts; {len(train_text) / 1e6:.1f} MB of the standard library")
    losses = train(model, train_text, args.seconds, args.steps)
    unseen, completion = held_out_loss(model, held_out), complete(model, "    def __init__(self", 160)
    print(f"loss on text that it has not seen: {unseen:.3f} nats a byte\n\n{completion} \n")
    problem = experts_problem(model, held_out)
    explanation = first_layer(model).experts.explain()
    print(explanation, "\n")
    found = compared(problem, args.rounds)
    print(comparison(found))
    print("\nTimes and memory are of this run; the difference is to the loop, in parts of the largest element.")
    data = {"parameters": size, "losses": losses, "held_out_loss": unseen, "completion": completion}
    return {**data, "explanation": explanation.to_dict(), "comparison": found}


if __name__ == "__main__":
    main()
