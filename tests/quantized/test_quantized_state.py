"""Bytes and scales of quantised weights in state dicts and modules: saved, loaded, refused where they do not fit."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusible
from fusible import MXFP4, MXFP8, NVFP4, ArgumentError, Float8Block, Float8Row, Float8Tensor, GroupedLinear
from fusible.ops.formats.recipe import Recipe

E, K, N = 3, 160, 272
SIZES = torch.tensor([7, 0, 20])
RECIPES: tuple[Recipe, ...] = (Float8Block(), Float8Row(), Float8Tensor(), MXFP8(), MXFP4(), NVFP4())
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)
State = dict[str, Tensor]


def linear(recipe: Recipe | None = None, seed: int = 1, **options: bool) -> GroupedLinear:
    torch.manual_seed(seed)
    return GroupedLinear(E, K, N, dtype=torch.bfloat16, recipe=recipe, **options)


def quantised(recipe: Recipe, seed: int = 1, **options: bool) -> GroupedLinear:
    return fusible.quantize_(linear(recipe, seed, **options), recipe)  # type: ignore[return-value]


def result(op: GroupedLinear) -> Tensor:
    x = torch.randn(30, K, generator=torch.Generator().manual_seed(0)).bfloat16()
    y: Tensor = op(x, split_sizes=SIZES)
    return y.detach()


def in_torch_file(state: State, _: Path) -> State:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: State = torch.load(file, weights_only=True)
    return loaded


def in_safetensors(state: State, folder: Path) -> State:
    files = pytest.importorskip("safetensors.torch")
    files.save_file(state, folder / "state.safetensors")
    loaded: State = files.load_file(folder / "state.safetensors")
    return loaded


@each_recipe
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("through", [in_torch_file, in_safetensors])
def test_files_hold_the_bytes(recipe: Recipe, single: bool, through: Any, tmp_path: Path) -> None:
    saved = quantised(recipe, single_grouped_weight=single)
    loaded = quantised(recipe, seed=2, single_grouped_weight=single)
    expected = result(saved)
    assert not torch.equal(result(loaded), expected)
    loaded.load_state_dict(through(saved.state_dict(), tmp_path))

    assert torch.equal(result(loaded), expected)
    for name, tensor in saved.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def doubled(scales: Tensor, dim: int) -> Tensor:
    return torch.cat([bytes_of(scales)] * 2, dim).view(scales.dtype)


CHANGES: dict[str, Any] = {
    "more columns": lambda scales: doubled(scales, -1),
    "more groups": lambda scales: doubled(scales, 0),
    "one for all": lambda scales: torch.ones(1),
    "integers": lambda scales: torch.ones(scales.shape, dtype=torch.int32),
    "float64": lambda scales: scales.double(),
}


@each_recipe
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("into", ["quantised", "16 bits"])
def test_scales_that_do_not_fit_are_refused(recipe: Recipe, change: str, into: str) -> None:
    op = quantised(recipe, seed=2) if into == "quantised" else linear(seed=2)
    before, state = result(op), quantised(recipe).state_dict()
    state["weight_scale_inv"] = CHANGES[change](state["weight_scale_inv"])
    name = type(recipe).__name__
    with pytest.raises(RuntimeError, match=rf"weight_scale_inv: expected \[3.*under {name}, got \["):
        op.load_state_dict(state, strict=False)

    assert torch.equal(result(op), before)  # nothing is half loaded


@pytest.mark.parametrize("recipe", [MXFP8(), MXFP4(), NVFP4()], ids=str)
@pytest.mark.parametrize("into", ["quantised", "16 bits"])
def test_bytes_of_scales_without_their_dtype_are_no_numbers(recipe: Recipe, into: str) -> None:
    state = quantised(recipe).state_dict()
    dtype = state["weight_scale_inv"].dtype
    state["weight_scale_inv"] = state["weight_scale_inv"].view(torch.uint8)
    with pytest.raises(RuntimeError, match=rf"got .*uint8; if these are its bytes, give .view\({dtype}\)"):
        (quantised(recipe) if into == "quantised" else linear()).load_state_dict(state)


@pytest.mark.parametrize("recipe", RECIPES[:4], ids=str)
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("into", ["quantised", "16 bits"])
def test_bytes_without_scales_are_refused(recipe: Recipe, single: bool, into: str) -> None:
    op = quantised(recipe, seed=2) if into == "quantised" else linear(seed=2)
    before, state = result(op), quantised(recipe, single_grouped_weight=single).state_dict()
    del state["weight_scale_inv"]
    with pytest.raises(RuntimeError, match=r"weight is torch.float8_e4m3fn, and weight_scale_inv is missing"):
        op.load_state_dict(state, strict=False)

    assert torch.equal(result(op), before)


@pytest.mark.parametrize("into", ["quantised", "16 bits"])
def test_nvfp4_without_the_amaxes_of_its_groups_is_refused(into: str) -> None:
    state = quantised(NVFP4()).state_dict()
    del state["weight_amax"]
    with pytest.raises(RuntimeError, match=r"weight_amax: is missing, and NVFP4 has \[3\], float32"):
        (quantised(NVFP4()) if into == "quantised" else linear()).load_state_dict(state, strict=False)


@pytest.mark.parametrize("recipe", RECIPES[:3], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_checkpoints_become_float32(recipe: Recipe, dtype: torch.dtype) -> None:
    """Some publish scales in bfloat16, some powers of two in 8 bits."""
    recipe = type(recipe)(scales="power_of_two")  # type: ignore[call-arg]
    op, other, state = quantised(recipe, seed=2), linear(seed=2), quantised(recipe).state_dict()
    state["weight_scale_inv"] = state["weight_scale_inv"].to(dtype)
    op.load_state_dict(state)
    holder = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"b": other})})
    with pytest.warns(UserWarning, match="rounded values are loaded") as warned:
        holder.load_state_dict({f"a.b.{name}": tensor for name, tensor in state.items()})

    assert warned[0].filename == __file__
    assert op.weight_scale_inv.dtype == torch.float32
    assert torch.equal(result(op), result(quantised(recipe)))
    rounded = fusible.QuantizedGroupedTensor.quantize(linear().weight, recipe).dequantize()
    assert torch.equal(other.weight, rounded)


@each_recipe
def test_weights_of_another_recipe_say_which_is_expected(recipe: Recipe) -> None:
    other = Float8Row() if isinstance(recipe, Float8Block) else Float8Block()
    op = quantised(recipe)
    with pytest.raises(RuntimeError, match=rf"expected .* under {type(recipe).__name__}, got"):
        op.load_state_dict(quantised(other).state_dict())


@each_recipe
@pytest.mark.parametrize("called", [True, False])
def test_a_quantised_module_that_is_cast_is_refused(recipe: Recipe, called: bool) -> None:
    """Also where a call went before. Its bytes or scales would be read as another format."""
    op = quantised(recipe, bias=False)
    if called:
        result(op)
    op.to(torch.bfloat16)
    with pytest.raises(ArgumentError, match=r"a cast of the module also casts .*, so quantise after the cast"):
        result(op)


def test_scales_that_are_replaced_are_checked() -> None:
    op = quantised(Float8Block())
    result(op)
    op.weight_scale_inv = op.weight_scale_inv[:, :1]
    with pytest.raises(ArgumentError, match=r"weight_scale_inv: expected \[3, 3, 2\], float32, under Float8Block, got"):
        result(op)
