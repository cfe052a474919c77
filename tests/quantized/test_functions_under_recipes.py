"""Functions of users in experts with a recipe: fused they give the numbers of their ops one by one."""

from __future__ import annotations

import pytest
import torch
from checks import recipe_functions as checks
from checks.recipe_functions import FUNCTIONS, MODES, RECIPES
from checks.recipes import assert_close, assert_equal

import fusible

KINDS = list(FUNCTIONS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("function", KINDS)
def test_fused_experts_give_the_bits_of_their_ops(function, recipe, mode):
    layer = checks.Experts("cpu", function, recipe)

    assert layer.steps() == ["GroupedMLP"]
    assert_equal(layer.results(mode), layer.results(mode, fused=False))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("function", KINDS)
def test_routed_experts_give_the_bits_of_their_experts(function, recipe):
    layer = checks.Routed("cpu", function, recipe)

    assert layer.steps() == ["RoutedMLP"]
    assert_equal(layer.results("train"), layer.results("train", without={"RoutedMLP"}))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("function", KINDS)
def test_the_first_half_alone_gives_the_bits_of_its_ops(function, recipe):
    layer = checks.FirstHalf("cpu", function, recipe)

    assert layer.steps() == ["GroupedLinearGLU"]
    assert_equal(layer.results("train"), layer.results("train", fused=False))


@pytest.mark.parametrize("recipe", ["Float8Block", "MXFP8"])
@pytest.mark.parametrize("function", KINDS)
def test_experts_without_a_row(function, recipe):
    layer = checks.Experts("cpu", function, recipe, sizes=(0, 0, 0), rows=0)

    assert_equal(layer.results("train"), layer.results("train", fused=False))


@pytest.mark.parametrize("frozen", [("act",), ("fc1",), ("fc2",), ("x",), ("x", "fc1", "fc2")], ids="+".join)
@pytest.mark.parametrize("recipe", ["Float8Block", "Float8Tensor", "NVFP4"])
def test_frozen_parts_leave_the_other_gradients_as_they_are(recipe, frozen):
    layer = checks.Experts("cpu", "glu of a column", recipe)
    whole, some = layer.results("train"), layer.results("train", frozen=frozen)

    assert set(some) == {name for name in whole if not name.startswith(frozen)}
    assert_equal(some, {name: whole[name] for name in some})


def test_a_constant_is_a_parameter_of_the_function():
    layer = checks.Experts("cpu", "glu with a constant", "Float8Block")
    before = layer.results("train")
    layer.act.constants = {"cap": 0.125}

    assert_equal(layer.results("train"), layer.results("train", fused=False))
    assert not torch.equal(before["y"], layer.results("train")["y"])


def test_a_chain_with_numbers_of_all_rows_and_of_groups():
    """Op by op it is rounded between its ops."""
    layer = checks.Chain("cpu", "glu of a column", "Float8Block")

    assert layer.steps() == ["GroupedMLP"]
    assert_close(layer.results("train"), layer.results("train", fused=False), 0.04)


@pytest.mark.parametrize("function", ["glu", "glu of a column"])
def test_compiled_experts_give_the_same_bits(function):
    layer = checks.Experts("cpu", function, "Float8Block")

    assert_equal(layer.results("train", compiled=True), layer.results("train"))


def test_a_scale_after_the_second_linear_joins_a_function_that_is_linear_in_it():
    layer = checks.Experts("cpu", "glu of a column", "Float8Block", second=fusible.Scale())

    assert layer.steps() == ["GroupedMLP"]
    assert_close(layer.results("train"), layer.results("train", fused=False), 0.08)
