"""The example in flax trains: its loss falls, and its experts are what a loop over them gives."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jax", reason="jax is not installed")
pytest.importorskip("flax", reason="flax is not installed")
import jax
import jax.numpy as jnp
import numpy as np
from checks.device import needs_hopper
from flax import nnx

import fusible.jax
from fusible.examples import jax_moe_lm


def test_training_lowers_the_loss() -> None:
    losses = jax_moe_lm.train(12, features=32, hidden=32, experts=4)

    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.cuda
@needs_hopper
def test_two_hundred_steps_are_those_of_the_products_of_jax() -> None:
    """The last losses differ by less than those of different batches do."""

    def losses(**settings: Any) -> np.ndarray:
        with fusible.jax.config(**settings):
            return np.array(jax_moe_lm.train(200, dtype=jnp.bfloat16))

    ours, theirs = losses(strict=True), losses(backend="xla")

    assert ours[:20].mean() > ours[-20:].mean() + 0.5
    assert abs(ours[0] - theirs[0]) < 0.01
    assert abs(ours[-20:].mean() - theirs[-20:].mean()) < theirs[-20:].std() / 2


def test_experts_are_those_of_a_loop() -> None:
    layer = jax_moe_lm.Experts(8, 16, 4, 2, jnp.float32, nnx.Rngs(0))
    tokens = jax.random.normal(jax.random.key(1), (10, 8))
    out, balance = layer(tokens)
    weights, experts = jax.lax.top_k(jax.nn.softmax(layer.router(tokens)), 2)
    weights = weights / weights.sum(-1, keepdims=True)
    expected = np.zeros((10, 8))
    for token in range(10):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            gate, up = jnp.split(tokens[token] @ layer.w13[...][expert], 2)
            expected[token] += np.asarray(weight * (jax.nn.silu(gate) * up) @ layer.w2[...][expert])

    np.testing.assert_allclose(np.asarray(out), expected, rtol=1e-4, atol=1e-5)
    assert 0.9 < float(balance) < 4
