"""Functions of users in experts with a recipe on our own kernels, emulated on a CPU: g++ compiles what NVRTC would.

The checks are those of a GPU: tests/gpu/test_functions_under_recipes_cuda.py.
"""

from __future__ import annotations

import pytest
import torch
from checks import recipe_functions as checks
from emulation import build
from test_replay import Runs, runs

import fusible
from fusible.ops.kernels.jit import epilogue, quantized
from fusible.ops.kernels.jit.nvrtc import SpillError

pytestmark = [
    pytest.mark.skipif(build.missing() is not None, reason=f"cannot be built: {build.missing()}"),
    pytest.mark.usefixtures("emulation"),
]
__all__ = ["runs"]


@pytest.mark.parametrize("mode", checks.MODES)
@pytest.mark.parametrize("function", ["plain", "glu", "glu of a row", "glu of a column"])
def test_the_numbers_are_those_of_the_ops(function: str, mode: str) -> None:
    layer = checks.Experts("cpu", function, "Float8Block", **checks.WIDE)
    checks.check_in_kernels_that_quantise(layer)
    checks.check_against_ops(layer, mode)


@pytest.mark.parametrize("recipe", [name for name in checks.RECIPES if name != "Float8Block"])
def test_the_numbers_are_those_of_the_ops_under_other_recipes(recipe: str) -> None:
    checks.check_against_ops(checks.Experts("cpu", "glu of a column", recipe, **checks.WIDE), "train")


def test_routed_experts() -> None:
    checks.check_against_ops(checks.Routed("cpu", "glu of a row and a column", "Float8Block", **checks.WIDE), "train")


def test_a_chain_with_numbers_of_all_rows_and_of_groups() -> None:
    checks.check_against_ops(checks.Chain("cpu", "glu of a column", "Float8Block", **checks.WIDE), "train")


def test_experts_with_a_bias() -> None:
    """The backward takes two passes."""
    checks.check_against_ops(checks.Experts("cpu", "glu of a column", "Float8Block", bias=True, **checks.WIDE), "train")


def test_a_third_step_is_replayed_bit_by_bit(runs: Runs) -> None:
    layer = checks.Experts("cpu", "glu of a column", "Float8Block", **checks.WIDE)
    first = layer.results("train")
    layer.results("train")
    layer.results("train")

    again: list[checks.Results] = []
    assert runs.of(lambda: again.append(layer.results("train"))) == (0, 2)
    checks.assert_equal(again[0], first)


def spilling(where: type) -> object:
    """Nothing of this form fits."""
    load = epilogue.load

    def load_others(texts: list[str]) -> int:
        marker = "QuantizedActivationEpilogue<" if where is quantized.ScaledForm else "QuantizeFunction<"
        if marker in texts[-1]:
            raise SpillError("ptxas: 12 bytes spill")
        return load(texts)

    return load_others


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (quantized.ScaledForm, "the hidden rows are quantised by a kernel of its own: the epilogue has no kernel of"),
        (quantized.QuantizerForm, "the activation is a kernel of its own, and so is what quantises it: hopper has no"),
    ],
)
def test_what_spills_is_a_kernel_of_its_own(where: type, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = checks.Experts("cpu", "glu of a column", "Float8Block", **checks.WIDE)
    expected = layer.results("train")
    monkeypatch.setattr(epilogue, "load", spilling(where))
    quantized.handle.cache_clear()
    explanation = layer.explanation()
    got = layer.results("train")
    quantized.handle.cache_clear()

    assert reason in explanation
    assert "ptxas: 12 bytes spill" in explanation
    checks.assert_close(got, expected, 1e-3)


def test_strict_refuses_what_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = checks.Experts("cpu", "glu", "Float8Block", **checks.WIDE)
    monkeypatch.setattr(epilogue, "load", spilling(quantized.QuantizerForm))
    quantized.handle.cache_clear()
    with fusible.config(strict=True), pytest.raises(fusible.RefusedError, match="ptxas: 12 bytes spill"):
        layer.results("train")
    quantized.handle.cache_clear()


def test_another_constant_is_another_result() -> None:
    layer = checks.Experts("cpu", "glu with a constant", "Float8Block", **checks.WIDE)
    before = layer.results("train")
    layer.act.constants = {"cap": 0.125}

    assert not torch.equal(before["y"], layer.results("train")["y"])
    checks.check_against_ops(layer, "train")
