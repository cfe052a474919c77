"""Explanations in notebooks, and those of models with many equal layers."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import fusible
from fusible.fuser.explain.model import grouped


class Model(nn.Module):
    """Layers of the given sizes, in a list."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        blocks = [fusible.Sequential(fusible.Linear(4, 2 * n), fusible.SwiGLU(), fusible.Linear(n, 4)) for n in sizes]
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def paths(*sizes: int) -> list[str]:
    """The first column of what is printed for such a model."""
    model = Model(*sizes)
    model(torch.zeros(2, 4))
    return [line.split()[0] for line in str(fusible.explain(model)).splitlines()[2:]]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((8, 8, 8), ["layers.0-2"]),
        ((8, 8, 16), ["layers.0-1", "layers.2"]),
        ((8, 16, 8, 8), ["layers.0,2-3", "layers.1"]),
        ((8,), ["layers.0"]),
    ],
)
def test_equal_layers_share_a_row(sizes: tuple[int, ...], expected: list[str]) -> None:
    assert paths(*sizes) == expected


def test_layers_that_differ_elsewhere_do_not() -> None:
    rows = [("a.0.x", "k"), ("a.1.y", "k"), ("b.2.x", "k"), ("a.1.x", "other"), ("plain", "k"), ("a.10.x", "k")]

    assert [row[0] for row in grouped(rows)] == ["a.0,10.x", "a.1.y", "b.2.x", "a.1.x", "plain"]


def test_ten_follows_nine() -> None:
    assert grouped([(f"layers.{i}", "k") for i in range(12)]) == [("layers.0-11", "k")]


def cells(html: str) -> list[str]:
    tree = ElementTree.fromstring(f"<div>{html}</div>")
    return ["".join(cell.itertext()) for cell in tree.iter() if cell.tag in ("td", "th", "p")]


def test_an_explanation_is_tables_in_a_notebook() -> None:
    model = Model(8).layers[0]
    model(torch.zeros(2, 4))
    explanation = model.explain()
    shown = cells(explanation._repr_html_())

    assert "saved B/row" in shown
    assert [step.name for step in explanation.steps] == [cell for cell in shown if cell in ("Linear", "SwiGLU")]
    assert any(cell.endswith("saved bytes a row") for cell in [c.partition(";")[0] for c in shown])


def test_a_model_is_a_table_in_a_notebook() -> None:
    model = Model(8, 8)
    assert cells(fusible.explain(nn.Linear(2, 2))._repr_html_()) == ["no layer runs through fusible"]

    assert cells(fusible.explain(model)._repr_html_()).count("no call yet") == 1
    assert "layers.0-1" in cells(fusible.explain(model)._repr_html_())


def test_a_shell_shows_the_tables_too() -> None:
    model = Model(8)
    model.layers[0](torch.zeros(2, 4))
    for explanation in (fusible.explain(model), model.layers[0].explain()):
        assert repr(explanation) == str(explanation)


def test_names_cannot_break_html() -> None:
    class Odd(fusible.Op):
        def fwd(self, x: torch.Tensor):
            return x + 0, None

        def bwd(self, saved, dy):
            return {"x": dy}

    Odd.__name__ = "<b>&"
    model = fusible.Sequential(Odd())
    model(torch.zeros(2, 4))
    assert "<b>&" in cells(model.explain()._repr_html_())


def test_a_model_is_plain_data() -> None:
    model = Model(8, 16)
    model.layers[0](torch.zeros(2, 4))
    first, second = fusible.explain(model).to_dict()["layers"]

    assert (first["path"], first["kind"]) == ("layers.0", "Sequential")
    assert first["explanation"] == model.layers[0].explain().to_dict()
    assert (second["reason"], second["explanation"]) == ("no call yet", None)
