"""Checks of routed experts with adapters beside weights in 8 and 4 bits, on a GPU or its emulation: against float64."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import stored_formats
import torch
from kernels_asked import noted
from torch import Tensor

import fusible
from fusible import (
    MXFP4,
    NF4,
    Combine,
    Dispatch,
    Float8Block,
    Float8Weight,
    GroupedLoRA,
    Int4,
    NVFP4Weight,
    Scale,
    Sequential,
    SwiGLU,
    config,
)
from fusible.ops.formats.recipe import Recipe
from fusible.ops.formats.weight_only import WeightOnly, in_words
from fusible.ops.kernels.doors import stored
from fusible.ops.kernels.problems.kinds import DECODING, STORED

from . import lora
from .device import synchronize

RECIPES: tuple[Recipe, ...] = (
    MXFP4(),
    NVFP4Weight(2),
    NF4(),
    NF4(nested=True),
    Int4(),
    *[Float8Weight(scales) for scales in ("blocks", "rows", "tensor")],
    Float8Block(),
)
IDS = [in_words(recipe) if isinstance(recipe, WeightOnly) else recipe.name for recipe in RECIPES]
TOP_K = 2


class Inputs(NamedTuple):
    """The tensors of a step; ``x`` and ``weights`` want gradients."""

    x: Tensor
    dy: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def draw(cls, model: Sequential, tokens: int, seed: int = 0) -> Inputs:
        """Some of the ids are of no expert: their rows are padding behind the last group."""
        up = model[1]
        device, generator = up.weight.device, torch.Generator().manual_seed(seed)
        x, dy = torch.randn(2, tokens, up.in_features, generator=generator).bfloat16()
        ids = torch.rand(tokens, up.num_groups, generator=generator).topk(TOP_K, -1).indices
        ids[:: max(1, tokens // 4)] = up.num_groups
        weights = torch.rand(tokens, TOP_K, generator=generator)
        return cls(*[each.to(device) for each in (x, dy, ids, weights)])


def layer(device: str, recipe: Recipe, experts: int, features: int, hidden: int = 128) -> Sequential:
    """In bfloat16; adapters and biases train, and the weights stay in the format."""
    torch.manual_seed(0)
    up = GroupedLoRA(experts, hidden, 2 * features, 8, dtype=torch.bfloat16)
    down = GroupedLoRA(experts, features, hidden, 16, dtype=torch.bfloat16)
    for linear in (up, down):
        linear.weight.requires_grad_(False)
        for factor in (linear.lora_a, linear.lora_b):
            torch.nn.init.normal_(factor, std=0.1)
    return fusible.quantize_(Sequential(Dispatch(experts), up, SwiGLU(), down, Scale(), Combine()).to(device), recipe)


def trained(model: Sequential) -> dict[str, Any]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def step(model: Sequential, given: Inputs, call: Any = None) -> list[Tensor]:
    """The output, and the gradients of the input, the routing weights and what trains."""
    x, weights = given.x.detach().requires_grad_(), given.weights.detach().requires_grad_()
    y = (call or model)(x, top_k_index=given.ids, top_k_weights=weights)
    return [y, *torch.autograd.grad(y, [x, weights, *trained(model).values()], given.dy)]


def decoded(linear: Any) -> Tensor:
    """The values of a stored weight in float64, on the CPU, where the definitions are."""
    parts, recipe = linear._stored(), linear.recipe
    if not isinstance(recipe, WeightOnly):
        recipe = Float8Weight()  # the same blocks
    return stored_formats.values(recipe, parts._replace(**{n: _on_cpu(getattr(parts, n)) for n in _PARTS}))


_PARTS = ("data", "scales", "amax")


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().cpu()


def exact_step(model: Sequential, given: Inputs) -> list[Tensor]:
    """The results on decoded weights, in double precision; padding counts for nothing."""
    linears = [model.get_submodule(name) for name in ("1", "3")]
    wide = {id(p): p.detach().double().cpu().requires_grad_() for p in trained(model).values()}
    x, weights = (each.detach().double().cpu().requires_grad_() for each in (given.x, given.weights))
    matrices = [
        {"weight": decoded(each), **{name: wide[id(p)] for name, p in each.named_parameters() if id(p) in wide}}
        for each in linears
    ]
    padding = given.ids.cpu() == linears[0].num_groups
    ids = given.ids.cpu().masked_fill(padding, 0)
    y = lora.exact(matrices, x, ids, weights.masked_fill(padding, 0))
    grads = torch.autograd.grad(y, [x, weights, *wide.values()], given.dy.double().cpu())
    return [y, *grads]


def assert_close(found: list[Tensor], expected: list[Tensor], recipe: Recipe) -> None:
    bound = 0.08 if recipe.quantises_tokens else 0.02
    for number, (result, true) in enumerate(zip(found, expected, strict=True)):
        error = (result.detach().double().cpu() - true).norm() / true.norm()
        assert error < bound, (number, float(error))


def check(
    device: str,
    recipe: Recipe,
    experts: int = 5,
    features: int = 256,
    hidden: int = 128,
    rows: tuple[int, ...] = (150, 150, 143),
    backend: str = "hopper",
) -> None:
    """Calls of so many tokens: the first computes, the second is recorded, further ones are replayed."""
    model = layer(device, recipe, experts, features, hidden)
    for seed, count in enumerate(rows):
        given = Inputs.draw(model, count, seed)
        with config(backend=backend):
            found = step(model, given)
        synchronize(device)
        assert_close(found, exact_step(model, given), recipe)
    assert [each.name for each in model.explain().steps] == ["RoutedLoRA"]


def check_decoded_within(device: str) -> None:
    """Products read the bytes of MXFP4, and give what they give of decoded weights."""
    model = layer(device, MXFP4(), 3, 64, 64)
    given = Inputs.draw(model, 40)
    with config(backend="hopper"):
        with noted(STORED) as within, noted(DECODING) as before:
            found = step(model, given)
        assert len(within) == 4, "forward and backward of both linears"
        assert not before
        with patch.object(stored, "MOST_ROWS", 1), noted(STORED) as within, noted(DECODING) as before:
            expected = step(layer(device, MXFP4(), 3, 64, 64), given)
        assert not within
        assert len(before) == 4, "many rows read decoded weights"
    synchronize(device)
    assert_close(found, [each.detach().double().cpu() for each in expected], MXFP4())
