"""Functions of users in experts with a recipe on a Hopper GPU: fused they give the numbers of their ops one by one."""

from __future__ import annotations

import pytest
from checks import recipe_functions as checks
from checks.device import skip_module_without_hopper

pytestmark = pytest.mark.cuda
skip_module_without_hopper()


@pytest.mark.parametrize("mode", checks.MODES)
@pytest.mark.parametrize("function", checks.FUNCTIONS)
def test_the_numbers_are_those_of_the_ops(function: str, mode: str) -> None:
    layer = checks.Experts("cuda", function, "Float8Block", **checks.WIDE)
    checks.check_in_kernels_that_quantise(layer)
    checks.check_against_ops(layer, mode)


@pytest.mark.parametrize("recipe", [name for name in checks.RECIPES if name != "Float8Block"])
@pytest.mark.parametrize("function", ["plain of a column", "glu of a row and a column"])
def test_the_numbers_are_those_of_the_ops_under_other_recipes(function: str, recipe: str) -> None:
    checks.check_against_ops(checks.Experts("cuda", function, recipe, **checks.WIDE), "train")


@pytest.mark.parametrize("function", ["glu", "glu of a row and a column"])
def test_routed_experts(function: str) -> None:
    checks.check_against_ops(checks.Routed("cuda", function, "Float8Block", **checks.WIDE), "train")


def test_a_chain_and_a_bias() -> None:
    checks.check_against_ops(checks.Chain("cuda", "glu of a column", "Float8Block", **checks.WIDE), "train")
    layer = checks.Experts("cuda", "glu of a column", "Float8Block", bias=True, **checks.WIDE)
    checks.check_against_ops(layer, "train")


@pytest.mark.hopper
def test_replays_give_the_same_bits() -> None:
    layer = checks.Experts("cuda", "glu of a column", "Float8Block", **checks.WIDE)
    first = layer.results("train")
    for _ in range(4):
        checks.assert_equal(layer.results("train"), first)
