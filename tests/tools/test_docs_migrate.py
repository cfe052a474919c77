"""``docs/migrate.md`` says what other libraries compute. Their formulas, written out for one token at a time, agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_docs import run_page
from torch import Tensor
from torch.nn import functional as F


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    torch.manual_seed(0)
    return run_page("docs/migrate.md")


def routed(x: Tensor, ids: Tensor, weights: Tensor, expert: Any) -> Tensor:
    """[T, H]: ``expert(e, token)`` summed with the weights of each token."""
    tokens = [
        sum(w * expert(int(e), token) for e, w in zip(chosen, by, strict=True))
        for token, chosen, by in zip(x, ids, weights, strict=True)
    ]
    return torch.stack(tokens)


def test_sonicmoe_has_alternating_rows_and_a_softmax_of_the_chosen(names: dict[str, Any]) -> None:
    layer, weights, x = names["layer"], names["sonic"], torch.randn(10, names["hidden"])
    logits = x @ weights["router.weight"].T
    chosen, ids = logits.topk(names["top_k"])

    def expert(e: int, token: Tensor) -> Tensor:
        rows = weights["c_fc.weight"][e] @ token
        return weights["c_proj.weight"][e] @ (F.silu(rows[::2]) * rows[1::2])

    expected = routed(x, ids, chosen.softmax(-1), expert)
    torch.testing.assert_close(layer(x).y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_sonicmoe_has_the_loss_of_balance_one(names: dict[str, Any]) -> None:
    layer, x = names["layer"], torch.randn(10, names["hidden"])
    logits = x @ names["sonic"]["router.weight"].T
    counts = torch.bincount(logits.topk(names["top_k"]).indices.flatten(), minlength=names["experts"]).float()
    means, shares = (F.normalize(t, p=1, dim=0) for t in (logits.softmax(-1).sum(0), counts))

    torch.testing.assert_close(layer(x).balance_loss, names["experts"] * (means * shares).sum())


def test_scattermoe_has_up_before_gate(names: dict[str, Any]) -> None:
    def expert(e: int, token: Tensor) -> Tensor:
        up, gate = (names["up_gate"][e] @ token).chunk(2)
        return names["output_experts"][e] @ (F.silu(gate) * up)

    x = torch.randn(6, names["hidden"])
    weights, ids = torch.rand(6, names["experts"]).topk(names["top_k"])
    expected = routed(x, ids, weights, expert)
    y = names["fusible"].functional.routed_experts(x, ids, weights, names["w_up"], names["output_experts"])
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_transformer_engine_has_a_parameter_an_expert_and_blocks_of_gate_and_up(names: dict[str, Any]) -> None:
    state, rows = names["te_state"], torch.randn(names["experts"], names["hidden"])
    sizes, scales = torch.ones(names["experts"], dtype=torch.int64), torch.rand(names["experts"])

    def expert(e: int, row: Tensor) -> Tensor:
        gate, up = (state[f"0.weight{e}"] @ row).view(-1, 2, 8).unbind(1)
        return state[f"2.weight{e}"] @ (scales[e] * F.silu(gate) * up).flatten()

    expected = torch.stack([expert(e, row) for e, row in enumerate(rows)])
    y = names["container"](rows, sizes, scales, sizes)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
