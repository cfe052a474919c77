"""A small mixture-of-experts language model in flax, trained on text: its experts are ``fusible.jax.grouped_mlp``.

    python -m fusible.examples.jax_moe_lm --steps 200

The text is what every machine with Python has: the sources of the standard library, byte by byte. On a Hopper GPU the
experts compute in bfloat16 by our kernels; elsewhere in float32 by ``jax.lax.ragged_dot``.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import fusible.jax

VOCABULARY = 256
CONTEXT = 64


class Experts(nnx.Module):  # type: ignore[misc]
    """Routes each token to ``top_k`` experts, and sums their outputs, weighted by the router."""

    def __init__(self, features: int, hidden: int, experts: int, top_k: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.top_k, self.dtype = top_k, dtype
        normal = nnx.initializers.normal
        self.router = nnx.Linear(features, experts, use_bias=False, rngs=rngs)
        self.w13 = nnx.Param(normal(features**-0.5)(rngs.params(), (experts, features, 2 * hidden)))
        self.w2 = nnx.Param(normal(hidden**-0.5)(rngs.params(), (experts, hidden, features)))

    def __call__(self, tokens: Any) -> tuple[Any, Any]:
        """Maps tokens [T, H] to the output [T, H] and the loss that balances the load of the experts."""
        chances = jax.nn.softmax(self.router(tokens))
        weights, experts = jax.lax.top_k(chances, self.top_k)
        weights = weights / weights.sum(-1, keepdims=True)
        slots, count = experts.reshape(-1), chances.shape[1]
        order = jnp.argsort(slots, stable=True)  # rows sorted by expert
        sizes = jnp.bincount(slots, length=count).astype(jnp.int32)
        rows = tokens.astype(self.dtype)[order // self.top_k]
        w13, w2 = self.w13[...].astype(self.dtype), self.w2[...].astype(self.dtype)
        rows = fusible.jax.grouped_mlp(rows, w13, w2, sizes, weights.reshape(-1)[order])
        out = rows[jnp.argsort(order)].reshape(*weights.shape, -1).sum(1)
        balance = count * jnp.sum(sizes / slots.size * chances.mean(0))
        return out.astype(tokens.dtype), balance


class Block(nnx.Module):  # type: ignore[misc]
    """Attention, then experts, each on normalised input and with a residual connection."""

    def __init__(self, features: int, hidden: int, experts: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.RMSNorm(features, rngs=rngs), nnx.RMSNorm(features, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, features, decode=False, rngs=rngs)
        self.experts = Experts(features, hidden, experts, 2, dtype, rngs)

    def __call__(self, x: Any) -> tuple[Any, Any]:
        """Maps [B, L, H] to the same shape, and returns the router's loss."""
        x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
        y, balance = self.experts(self.norm2(x).reshape(-1, x.shape[-1]))
        return x + y.reshape(x.shape), balance


class LanguageModel(nnx.Module):  # type: ignore[misc]
    """Bytes in, logits of the next byte out."""

    def __init__(self, features: int, hidden: int, experts: int, layers: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(VOCABULARY, features, rngs=rngs)
        self.position = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (CONTEXT, features)))
        self.blocks = nnx.List([Block(features, hidden, experts, dtype, rngs) for _ in range(layers)])
        self.head = nnx.Linear(features, VOCABULARY, rngs=rngs)

    def __call__(self, text: Any) -> tuple[Any, Any]:
        """Logits [B, L, 256], and the sum of the routers' losses."""
        x, balance = self.embedding(text) + self.position[...], 0.0
        for block in self.blocks:
            x, of_block = block(x)
            balance = balance + of_block
        return self.head(x), balance


def loss_of(model: LanguageModel, text: Any) -> Any:
    """The mean cross-entropy of bytes [B, L + 1] in nats per byte, plus a hundredth of the routers' losses."""
    logits, balance = model(text[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean() + 0.01 * balance


def train_step(model: LanguageModel, optimizer: Any, text: Any) -> Any:
    """Makes one training step; returns the loss before it."""
    loss, grads = nnx.value_and_grad(loss_of)(model, text)
    optimizer.update(model, grads)
    return loss


def batches(size: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yields random stretches of the standard library's sources, bytes [size, CONTEXT + 1], without end."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, text.size - CONTEXT - 1, size)
        yield np.stack([text[start : start + CONTEXT + 1] for start in starts])


def train(steps: int, features: int = 64, hidden: int = 64, experts: int = 8, dtype: Any = None) -> list[float]:
    """Trains the model; returns the losses. The experts compute in ``dtype``, by default the fastest here."""
    dtype = dtype or (jnp.float32 if fusible.jax.info()["fallback"] else jnp.bfloat16)
    model = LanguageModel(features, hidden, experts, 2, dtype, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    step = nnx.jit(train_step)
    return [float(step(model, optimizer, text)) for _, text in zip(range(steps), batches(16), strict=False)]


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, and prints how the loss falls."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200, help="of training (default: 200)")
    args = parser.parse_args(argv)
    print(json.dumps(fusible.jax.info()))
    start, losses = time.perf_counter(), train(args.steps)
    for i in range(0, len(losses), max(1, len(losses) // 10)):
        print(f"step {i:4}: loss {losses[i]:.3f}")
    print(f"loss {losses[-1]:.3f} after {len(losses)} steps, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
