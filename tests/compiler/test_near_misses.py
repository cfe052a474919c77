"""Near misses in ``explain``: fusions that would fit but for one op, and those that are not reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fusible import (
    Activation,
    Combine,
    Dispatch,
    GroupedLinear,
    Identity,
    Linear,
    Scale,
    Sequential,
    SwiGLU,
    config,
    explain,
)

E, H, F = 2, 4, 3
CALL = {"split_sizes": torch.tensor([2, 3])}
ROUTED = {"top_k_index": torch.tensor([[0], [1], [1], [0], [1]]), "top_k_weights": torch.rand(5, 1)}
X = torch.randn(5, H)


def fc1(columns: int = F) -> GroupedLinear:
    return GroupedLinear(E, H, columns)


def fc2(rows: int = F) -> GroupedLinear:
    return GroupedLinear(E, rows, H)


def missed(model: Sequential, **call: Any) -> list[tuple[Any, ...]]:
    return [(f.name, f.ops, f.taken, f.reason) for f in model.explain(X, **call).near_misses]


def test_an_activation_that_is_no_op_of_ours() -> None:
    model = Sequential(fc1(), nn.SiLU(), fc2())

    assert missed(model, **CALL) == [
        (
            "GroupedMLP",
            (0, 1, 2),
            False,
            "would fit, but op 1 (SiLU) is not of type Activated or Pointwise, as act must be",
        )
    ]
    assert "missed" in str(model.explain(X, **CALL))
    assert "op 1 (SiLU)" in str(model.explain(X, **CALL))
    assert model.explain(X, **CALL).to_dict()["near_misses"][0]["name"] == "GroupedMLP"


def test_an_op_too_many() -> None:
    model = Sequential(fc1(2 * F), SwiGLU(), Identity(), fc2())

    assert missed(model, **CALL) == [
        ("GroupedMLP", (0, 1, 2, 3), False, "would fit, but for op 2 (Identity) in between")
    ]


def test_only_the_longest_is_named() -> None:
    model = Sequential(Dispatch(E), fc1(), nn.SiLU(), fc2(), Scale(), Combine())

    assert missed(model, **ROUTED) == [
        (
            "RoutedMLP",
            (0, 1, 2, 3, 4, 5),
            False,
            "would fit, but op 2 (SiLU) is not of type Activated or Pointwise, as act must be",
        )
    ]


@pytest.mark.parametrize(
    "model",
    [
        Sequential(fc1(2 * F), SwiGLU(), fc2()),
        Sequential(fc1(H), fc2(H), fc2(H)),
        Sequential(fc1(), Activation("relu2")),
        Sequential(Linear(H, H), nn.SiLU(), Linear(H, H)),
        Sequential(fc1(H), nn.SiLU(), nn.Linear(H, H), fc2(H)),
        Sequential(fc1(2 * F), SwiGLU(), fc2(), nn.SiLU(), fc2(H)),
    ],
    ids=["it fits", "another sequence", "a part", "no experts", "two ops in the way", "it fits before"],
)
def test_what_is_no_near_miss(model: Sequential) -> None:
    call = CALL if any(isinstance(op, GroupedLinear) for op in model) else {}

    assert missed(model, **call) == []


def test_a_fusion_that_is_refused_or_disabled_is_not_missed_as_well() -> None:
    model = Sequential(fc1(2 * F), SwiGLU(), fc2())
    model[1].register_forward_hook(lambda *_: None)
    assert missed(model, **CALL) == []

    other = Sequential(fc1(), nn.SiLU(), fc2())
    with config(disable_fusions={"GroupedMLP"}):
        assert missed(other, **CALL) == []


def test_a_table_of_a_model_tells_of_near_misses() -> None:
    model = nn.ModuleDict({"experts": Sequential(fc1(), nn.SiLU(), fc2())})
    model["experts"](X, **CALL)

    assert "GroupedMLP: would fit, but op 1 (SiLU)" in explain(model).layers[0].reason


def test_strict_does_not_mind() -> None:
    with config(strict=True, backend="loop"):
        Sequential(fc1(), nn.SiLU(), fc2())(X, **CALL)


def test_what_a_longer_fusion_covers_is_not_listed_as_refused() -> None:
    model = Sequential(fc1(2 * F), SwiGLU(), Scale(), fc2())

    assert [(f.name, f.taken) for f in model.explain(X, **CALL, scales=torch.rand(5)).fusions] == [("GroupedMLP", True)]
