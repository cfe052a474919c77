"""A recipe is one object: a format that nothing else knows is followed, and nothing asks which recipe it has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checks.recipes import ALL, far, tensor
from torch import Tensor

import fusible
from fusible.ops.formats.copies import Columns, Rows, Weight
from fusible.ops.formats.recipe import RECIPES, Recipe, register

ROOT = Path(__file__).parents[2]
E, K, N, T = 3, 48, 32, 40
SIZES = torch.tensor([20, 0, 16])


@dataclass(frozen=True)
class Sixteenths(Recipe):
    """Multiples of 1 / 16 in int8. A weight has one scale a group, which tells it from other formats of int8."""

    def rows(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Rows:
        return Rows(_rounded(x), torch.ones(x.shape[0], device=x.device))

    def columns(self, x: Tensor, split_sizes: Tensor, is_gradient: bool = False) -> Columns:
        return Columns(_rounded(x), torch.ones(x.shape[1], device=x.device))

    def weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return Weight(_rounded(weight), torch.ones(weight.shape[0], device=weight.device))

    def transposed_weight(self, weight: Tensor, parts: int = 1, is_gradient: bool = False) -> Weight:
        return self.weight(weight.mT.contiguous())

    def row_values(self, rows: Rows, split_sizes: Tensor) -> Tensor:
        return rows.data.float() / 16

    def column_values(self, columns: Columns, split_sizes: Tensor, rows: int) -> Tensor:
        return columns.data.float() / 16

    def weight_values(self, weight: Weight, parts: int = 1) -> Tensor:
        return weight.data.float() / 16


def _rounded(x: Tensor) -> Tensor:
    return (x.float() * 16).round().clamp(-127, 127).to(torch.int8)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "Sixteenths", Sixteenths)


def linear(recipe: Recipe | None) -> fusible.GroupedLinear:
    torch.manual_seed(1)
    return fusible.GroupedLinear(E, K, N, bias=False, dtype=torch.bfloat16, recipe=recipe)


def run(op: fusible.GroupedLinear, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = op(x, split_sizes=SIZES)
    y.backward(dy)
    return [each for each in (y.detach(), x.grad, op.weight.grad) if each is not None]


def test_a_linear_follows_a_format_that_no_kernel_knows() -> None:
    op, x, dy = linear(Sixteenths()), tensor(T, K), tensor(T, N, seed=2)
    exact = linear(None)
    with torch.no_grad():
        exact.weight.copy_(_rounded(exact.weight) / 16)

    ours, theirs = run(op, x, dy), run(exact, (_rounded(x) / 16).bfloat16(), (_rounded(dy) / 16).bfloat16())

    assert len(ours) == 3
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert far(ours[0], run(linear(None), x, dy)[0]) > 0.01


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ALL)
def test_the_default_dtype_of_torch_decides_nothing(name: str, default: torch.dtype) -> None:
    """Models are built while it is their own; kernels read scales of 32 bits."""
    x, dy = tensor(T, K), tensor(T, N, seed=2)
    usual = linear(ALL[name])
    try:
        torch.set_default_dtype(default)
        op = linear(ALL[name])
        op.load_state_dict(usual.state_dict())
        dtypes = [buffer.dtype for buffer in op.buffers()]
        found = [run(op, x, dy) for _ in range(2)]
    finally:
        torch.set_default_dtype(torch.float32)

    assert dtypes == [buffer.dtype for buffer in usual.buffers()]
    for ours, theirs in zip(found, [run(usual, x, dy) for _ in range(2)], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_its_weights_travel_in_state_dicts() -> None:
    op, x = fusible.quantize_(linear(None), Sixteenths()), tensor(T, K)
    rounded = linear(None)
    with pytest.warns(UserWarning, match="its rounded values are loaded"):
        rounded.load_state_dict(op.state_dict())

    assert op.weight.dtype == torch.int8
    assert torch.equal(rounded.weight, (op.weight / 16).bfloat16())
    assert torch.equal(op(x, split_sizes=SIZES), linear(Sixteenths())(x, split_sizes=SIZES))


def test_the_door_to_formats_is_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RECIPES, "Sixteenths")

    assert register(Sixteenths) is Sixteenths
    assert RECIPES["Sixteenths"] is Sixteenths


def classes_asked_for(source: str) -> Iterator[str]:
    """The names of classes in ``isinstance``, comparisons of types, and patterns."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            yield from (name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name))
        elif isinstance(node, ast.MatchClass):
            yield ast.unparse(node.cls)
        elif isinstance(node, ast.Compare):
            yield from (name.id for name in ast.walk(node) if isinstance(name, ast.Name))


FORMATS = set(RECIPES) | {"Recipe", "NoRecipe"}
FILES = [path for folder in ("fuser", "ops", "integrations") for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_asks_which_recipe_it_has(path: Path) -> None:
    asked = set(classes_asked_for(path.read_text())) & FORMATS

    assert asked <= ({"Recipe"} if path.name == "recipe.py" else set())


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(recipe, Float8Block)",
        "isinstance(x, (int, MXFP8 | NVFP4))",
        "match recipe:\n    case MXFP4(): pass",
        "recipe == MXFP8('fast')",
        "type(recipe) is NoRecipe",
    ],
)
def test_questions_are_seen(source: str) -> None:
    assert set(classes_asked_for(source)) & FORMATS
