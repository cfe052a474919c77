"""Problems for the tests of ``fusible.jax``, and what they should give: in float64 by PyTorch, a group at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

RAGGED = (67, 0, 1, 33)
TAIL = 19


def seeded(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def array(random: np.random.Generator, *shape: int, dtype: Any = jnp.bfloat16, scale: float = 1.0) -> jax.Array:
    return jnp.asarray(scale * random.standard_normal(shape), dtype)


def poisoned(rows: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """The rows with NaN past the last group."""
    return rows.at[sum(sizes) :].set(jnp.nan)


def exact(x: Any) -> Tensor:
    """As a tensor in float64."""
    return torch.from_numpy(np.asarray(x, np.float64).copy())


def assert_close(actual: Any, reference: Tensor, roundings: float = 1.0, dtype: Any = None) -> None:
    """Within the rounding of a dtype, by default its own, once for each step, relative to the largest value."""
    assert tuple(actual.shape) == tuple(reference.shape)
    values, largest = exact(actual), float(reference.abs().max()) if reference.numel() else 0.0
    assert torch.isfinite(values).all()
    eps = float(jnp.finfo(dtype or actual.dtype).eps)
    error = float((values - reference).abs().max()) if reference.numel() else 0.0
    assert error <= roundings * max(eps, 2e-6) * max(largest, 1e-6), (error, largest)


def rows_of_groups(sizes: Sequence[int]) -> list[slice]:
    ends = np.cumsum([0, *sizes])
    return [slice(int(a), int(b)) for a, b in pairwise(ends)]


def product64(lhs: Any, rhs: Any, sizes: Sequence[int], transpose: bool = False, bias: Any = None) -> Tensor:
    """[T, K] x [G, K, N], a group at a time; zero past the last group."""
    a, b = exact(lhs), exact(rhs)
    b = b.mT if transpose else b
    out = torch.zeros(a.shape[0], b.shape[2], dtype=torch.float64)
    for g, rows in enumerate(rows_of_groups(sizes)):
        out[rows] = a[rows] @ b[g] + (0 if bias is None else exact(bias)[g])
    return out


def wgrad64(lhs: Any, rhs: Any, sizes: Sequence[int]) -> Tensor:
    """[T, M] x [T, N] -> [G, M, N]."""
    a, b = exact(lhs), exact(rhs)
    return torch.stack([a[rows].mT @ b[rows] for rows in rows_of_groups(sizes)])


@dataclass
class Experts:
    """A problem of ``grouped_mlp``: its arrays by name, and its keywords."""

    sizes: tuple[int, ...] = RAGGED
    tail: int = TAIL
    features: int = 24
    columns: int = 40
    dtype: Any = jnp.bfloat16
    layout: str = "kn"
    probs: Any = jnp.float32
    biases: Any = None
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def gated(self) -> bool:
        return bool(self.keywords.get("gated", True))

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail

    def arrays(self) -> dict[str, Any]:
        random, groups = seeded(), len(self.sizes)
        wide = self.columns * (2 if self.gated else 1)
        shapes = {"w13": (self.features, wide), "w2": (self.columns, self.features)}
        made: dict[str, Any] = {"x": poisoned(array(random, self.rows, self.features, dtype=self.dtype), self.sizes)}
        for name, (rows, columns) in shapes.items():
            shape = (rows, columns) if self.layout == "kn" else (columns, rows)
            made[name] = array(random, groups, *shape, dtype=self.dtype, scale=rows**-0.5)
        if self.probs is not None:
            made["probs"] = poisoned(jnp.asarray(random.uniform(0.2, 1.0, self.rows), self.probs), self.sizes)
        if self.biases is not None:
            made["b13"] = array(random, groups, wide, dtype=self.biases)
            made["b2"] = array(random, groups, self.features, dtype=self.biases)
        return made

    def call_keywords(self) -> dict[str, Any]:
        return {"weight_layout": self.layout, **self.keywords}

    def reference(self, arrays: dict[str, Any], dy: Any) -> dict[str, Tensor]:
        """The output ``y``, and the gradients of the arrays by name."""
        at = {name: exact(value).nan_to_num(0.0).requires_grad_() for name, value in arrays.items()}
        y = self._forward(at)
        y.backward(exact(dy).nan_to_num(0.0))
        return {"y": y.detach()} | {name: value.grad for name, value in at.items() if value.grad is not None}

    def _forward(self, at: dict[str, Tensor]) -> Tensor:
        w13, w2 = (at[name] if self.layout == "kn" else at[name].mT for name in ("w13", "w2"))
        after = self.keywords.get("probs_at") == "output"
        rows = []
        for g, of_group in enumerate(rows_of_groups(self.sizes)):
            preact = at["x"][of_group] @ w13[g] + (at["b13"][g] if "b13" in at else 0.0)
            rounded = exact(jnp.asarray(preact.detach().numpy(), jnp.float32).astype(self.dtype))
            hidden = self.activate(preact + (rounded - preact).detach())  # it decides what is clamped
            probs = at["probs"][of_group, None] if "probs" in at else torch.ones(1, 1, dtype=torch.float64)
            y = (hidden if after else hidden * probs) @ w2[g] + (at["b2"][g] if "b2" in at else 0.0)
            rows.append(y * probs if after else y)
        return torch.cat([*rows, torch.zeros(self.tail, self.features, dtype=torch.float64)])

    def activate(self, preact: Tensor) -> Tensor:
        """The hidden rows [T, F] of rows [T, C], without probabilities."""
        k = self.keywords
        name, alpha = k.get("activation", "silu"), k.get("alpha", 1.0)
        curves = {
            "silu": lambda x: x * torch.sigmoid(alpha * x),
            "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
            "gelu": torch.nn.functional.gelu,
            "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
            "relu": torch.relu,
            "relu2": lambda x: torch.relu(x).square(),
            "sigmoid": torch.sigmoid,
        }
        if not self.gated:
            return curves[name](preact)
        block = k.get("interleave") or self.columns
        pairs = preact.unflatten(1, (-1, 2, block))
        gate, up = pairs[:, :, 0].flatten(1), pairs[:, :, 1].flatten(1)
        if (limit := k.get("limit")) is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return curves[name](gate) * (up + k.get("linear_offset", 0.0))
