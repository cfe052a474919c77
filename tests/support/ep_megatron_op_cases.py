"""Megatron-Core's ``TEGroupedMLP`` on our ops, with nothing of Megatron's switched off; see ``ep_world``.

TransformerEngine is the stand-in of these tests, so this is imported in a process of its own.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformer_engine_stand_in as stand_in
from absent import triton_if_missing
from ep_world import World
from models import steps
from torch import Tensor, nn
from torch.nn import functional as F

with stand_in.installed(), triton_if_missing():
    from ep_megatron_cases import LENGTHS, integration, near, their_module, trained
    from megatron.core.activations import squared_relu
    from megatron.core.fp4_utils import get_fp4_context
    from megatron.core.fp8_utils import get_fp8_context
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.transformer.moe import experts as experts_module
    from megatron.core.transformer.moe import paged_stash
    from megatron_on_cpu import FFN, HIDDEN, OWNED, moe_layer, on_cpu
    from transformer_engine.common import recipe as te_recipe

import fusible
from fusible.integrations import transformer_engine as te_ops

os.environ["NVTE_CUTEDSL_FUSED_GROUPED_MLP"] = "1"
SIZES = [6, 0, 14]
CASES: list[Callable[[World], None]] = []
OP_FUSER: dict[str, Any] = {"use_te": True, "moe_grouped_gemm": True, "use_transformer_engine_op_fuser": True}
BF16: dict[str, Any] = {"bf16": True, "params_dtype": torch.bfloat16}


def case(function: Callable[[World], None]) -> Callable[[World], None]:
    """A case with our ops installed."""

    @wraps(function)
    def on_a_rank(world: World) -> None:
        with on_cpu(), installed():
            stand_in.Fp8Padding.calls = 0
            function(world)

    CASES.append(on_a_rank)
    return on_a_rank


@contextmanager
def installed() -> Iterator[None]:
    te_ops.install(experts_module)
    try:
        yield
    finally:
        te_ops.uninstall(experts_module)


def layer_of(world: World, dispatcher: str = "alltoall", **settings: Any) -> Any:
    return moe_layer(world.size, dispatcher, **{**OP_FUSER, **settings})


# ----------------------------------------------------------------------------------------------- numbers of the experts


def glu(act: Callable[[Tensor], Tensor], block: int | None = None, limit: float | None = None, offset: float = 0.0):
    def apply(pre: Tensor) -> Tensor:
        pre = pre if block is None else pre.view(-1, FFN // block, 2, block).transpose(1, 2).reshape(-1, 2 * FFN)
        gate, up = pre.chunk(2, -1)
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return act(gate) * (up + offset)

    return apply


SWIGLU = glu(F.silu)
BIAS, QUICK = {"add_bias_linear": True, "bias_dropout_fusion": False}, {"activation_func": quick_gelu}
ONE, CLAMPED = {"moe_single_grouped_weight": True}, {"activation_func_clamp_value": 0.5}
RELU2 = {"activation_func": squared_relu, "gated_linear_unit": False, "use_fused_weighted_squared_relu": True}
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = {
    "one weight an expert": ({}, SWIGLU),
    "one weight": (ONE, SWIGLU),
    "bias": (BIAS, SWIGLU),
    "one bias": ({**BIAS, **ONE, "moe_single_grouped_bias": True}, SWIGLU),
    "interleaved": ({"moe_mlp_glu_interleave_size": 16}, glu(F.silu, block=16)),
    "clamped": (CLAMPED, glu(F.silu, limit=0.5)),
    "quick gelu": (QUICK, glu(quick_gelu, limit=7.0, offset=1.0)),
    "quick gelu, clamped": ({**QUICK, **CLAMPED}, glu(quick_gelu, limit=0.5, offset=1.0)),
    "squared relu": (RELU2, squared_relu),
}


def inputs(dtype: torch.dtype = torch.float32, tail: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = sum(SIZES) + tail
    x = torch.randn(rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    return x, torch.tensor(SIZES), torch.rand(rows, generator=generator).requires_grad_()


def reference(mlp: Any, x: Tensor, probs: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Expert by expert: the probability after the activation and on the last bias."""
    parts = []
    for e, (rows, p) in enumerate(zip(x.split(SIZES), probs.unsqueeze(1).split(SIZES), strict=True)):
        linears = (mlp.linear_fc1, mlp.linear_fc2)
        weights = [linear.stacked("weight")[e] for linear in linears]
        biases = [linear.stacked("bias")[e] if linear.use_bias else 0 for linear in linears]
        hidden = act(rows @ weights[0].T + biases[0]) * p
        parts.append(hidden @ weights[1].T + biases[1] * p)
    return torch.cat(parts)


def weights_of(mlp: Any) -> list[nn.Parameter]:
    return [*mlp.linear_fc1.parameters(), *mlp.linear_fc2.parameters()]


@case
def experts_are_the_unfused_experts(world: World) -> None:
    if "glu_linear_offset" not in inspect.getsource(experts_module.TEGroupedMLP._make_fused_ops):
        del VARIANTS["clamped"]  # 0.19 builds SwiGLU without its clamp
    for name, (settings, act) in VARIANTS.items():
        mlp, (x, sizes, probs) = layer_of(world, **settings).experts, inputs()
        y, expected = mlp(x, sizes, probs)[0], reference(mlp, x, probs, act)
        wanted, dy = [x, probs, *weights_of(mlp)], torch.randn_like(x)

        assert steps(mlp._fused_ops[0]) == ["GroupedMLP"], name
        torch.testing.assert_close(y, expected, msg=lambda text, name=name: f"{name}: {text}")
        came = torch.autograd.grad(y, wanted, dy)
        torch.testing.assert_close(came, torch.autograd.grad(expected, wanted, dy), msg=lambda t, n=name: f"{n}: {t}")


@case
def weight_gradients_go_to_main_grad(world: World) -> None:
    for delay, single in ((False, False), (True, False), (False, True), (True, True)):
        settings = {"gradient_accumulation_fusion": True, "moe_single_grouped_weight": single}
        mlp, (x, sizes, probs) = (
            layer_of(world, overlap_dispatch_backward_with_experts_wgrad=delay, **settings).experts,
            inputs(),
        )
        for weight in weights_of(mlp):
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        dy = torch.randn_like(x)
        gradients = torch.autograd.grad(reference(mlp, x, probs, SWIGLU), weights_of(mlp), dy)
        mlp(x, sizes, probs)[0].backward(dy)

        assert weights_of(mlp)[0].main_grad.any() != delay
        if delay:
            mlp.backward_dw()
        torch.testing.assert_close([p.main_grad for p in weights_of(mlp)], list(gradients))
        assert [linear.hooks_ran for linear in (mlp.linear_fc1, mlp.linear_fc2)] == [int(delay)] * 2


@case
def buffers_of_the_dispatcher_are_written(world: World) -> None:
    mlp, (x, sizes, probs) = layer_of(world, **BIAS).experts, inputs()
    output, grad_input, dy = torch.empty_like(x), torch.empty_like(x), torch.randn_like(x)
    y, _ = mlp(x, sizes, probs, output, grad_input)
    y.backward(dy)
    expected = reference(mlp, x, probs, SWIGLU)

    assert y.data_ptr() == output.data_ptr()
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(grad_input, torch.autograd.grad(expected, x, dy)[0])


@case
def hooks_of_the_linears_run_before_the_container(world: World) -> None:
    mlp, seen = layer_of(world).experts, []
    mlp.linear_fc1.register_forward_pre_hook(lambda module, _: seen.append(module))
    mlp(*inputs())

    assert seen == [mlp.linear_fc1]


# --------------------------------------------------------------------------------------------------------- installation


@case
def install_replaces_what_the_experts_look_up(world: World) -> None:
    te_ops.install(experts_module)  # twice is once
    ours = experts_module.te, experts_module.skip_routed_expert_padding, experts_module.TEGroupedMLP._fused_forward
    assert experts_module.te.pytorch.ops is te_ops
    assert experts_module.te.pytorch.GroupedLinear is stand_in.GroupedLinear
    te_ops.uninstall(experts_module)
    te_ops.uninstall(experts_module)
    theirs = experts_module.te, experts_module.skip_routed_expert_padding, experts_module.TEGroupedMLP._fused_forward
    assert [a.__wrapped__ for a in ours[1:]] == [*theirs[1:]]
    assert theirs[0] is ours[0]._original


@case
def containers_built_before_are_built_again(world: World) -> None:
    mlp = layer_of(world).experts
    mlp._fused_ops = (nn.Identity(),)
    y, _ = mlp(*inputs())
    x, _, probs = inputs()
    torch.testing.assert_close(y, reference(mlp, x, probs, SWIGLU))
    kept = mlp._fused_ops
    mlp(*inputs())
    assert mlp._fused_ops is kept


def rows_multiplied(layer: Any) -> list[int]:
    """Rows that the experts' container gets, from its next call on."""
    mlp, seen = layer.experts, []
    mlp(torch.empty(0, HIDDEN), torch.zeros(OWNED, dtype=torch.int64), torch.empty(0))
    mlp._fused_ops[0].register_forward_pre_hook(lambda _, arguments: seen.append(len(arguments[0])))
    return seen


@case
def no_row_of_padding_is_multiplied(world: World) -> None:
    layer = layer_of(world)
    seen = rows_multiplied(layer)
    stock = moe_layer(world.size, "alltoall")
    came, expected = trained(layer, world), trained(stock, world)
    torch.testing.assert_close(came[:2], expected[:2])

    total = torch.tensor(seen)
    torch.distributed.all_reduce(total)
    assert total.tolist() == [sum(LENGTHS) * 2 * 2]  # sequences of two, top 2
    assert stand_in.Fp8Padding.calls == 0


@case
def experts_of_transformer_engine_are_still_padded(world: World) -> None:
    layer = layer_of(world, use_transformer_engine_op_fuser=False, fp8="e4m3", fp8_recipe="blockwise")
    trained(layer, world)
    assert stand_in.Fp8Padding.calls > 0


# -------------------------------------------------------------------------------------------------------------- recipes


def outputs(mlp: Any, context: Any) -> list[Tensor]:
    """The outputs of a forward in the context, and of a backward after it."""
    x, sizes, probs = inputs(torch.bfloat16)
    with context:
        y, _ = mlp(x, sizes, probs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, probs, *weights_of(mlp)], dy)]


QUANTIZERS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
FOLLOWED: list[tuple[dict[str, Any], fusible.Recipe]] = [
    ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, fusible.Float8Block()),
    ({"fp8": "hybrid", "fp8_recipe": "blockwise"}, fusible.Float8Block(gradient="e5m2")),
    ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, fusible.Float8Tensor()),
    ({"fp8": "hybrid", "fp8_recipe": "tensorwise"}, fusible.Float8Tensor(gradient="e5m2")),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, fusible.MXFP8()),
]


@case
def recipes_of_the_configuration_are_followed(world: World) -> None:
    for settings, recipe in FOLLOWED:
        mlp = layer_of(world, **BF16, **settings).experts
        plain = outputs(mlp, nullcontext())
        came = outputs(mlp, get_fp8_context(mlp.config))
        expected = outputs(mlp, fusible.config(recipe=recipe))

        for a, b in zip(came, expected, strict=True):
            assert torch.equal(a, b), settings
        assert not torch.equal(came[0], plain[0]), settings
        assert stand_in.Fp8Padding.calls == 0, settings


@case
def nvfp4_is_followed(world: World) -> None:
    mlp = layer_of(world, **BF16, fp4="e2m1", fp4_recipe="nvfp4").experts
    came, expected = outputs(mlp, get_fp4_context(mlp.config)), outputs(mlp, fusible.config(recipe=fusible.NVFP4()))
    assert torch.equal(came[0], expected[0])  # gradients are rounded by random numbers
    assert not torch.equal(came[0], outputs(mlp, nullcontext())[0])


@case
def layers_that_megatron_keeps_in_bfloat16_stay_so(world: World) -> None:
    settings = {"fp8": "e4m3", "fp8_recipe": "blockwise", "first_last_layers_bf16": True}
    mlp = layer_of(world, **BF16, **settings).experts
    came, plain = outputs(mlp, get_fp8_context(mlp.config, 0)), outputs(mlp, nullcontext())
    for a, b in zip(came, plain, strict=True):
        assert torch.equal(a, b)


@case
def recipes_that_none_of_ours_equals_are_refused(world: World) -> None:
    refused = [
        ({"fp8": "e4m3", "fp8_recipe": "delayed"}, "TransformerEngine's TEDelayedScaling"),
        ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, r"fusible.MXFP8 has gradients in e4m3; give fp8='e4m3' in Megatron"),
    ]
    for settings, words in refused:
        mlp = layer_of(world, **BF16, **settings).experts
        with get_fp8_context(mlp.config), pytest.raises(NotImplementedError, match=words):
            mlp(*inputs(torch.bfloat16))


@case
def settings_of_recipes_that_none_of_ours_has_are_refused(world: World) -> None:
    exact = stand_in.QParams(power_2_scale=False)
    refused = [
        (te_recipe.CustomRecipe(), "TransformerEngine's CustomRecipe"),
        (te_recipe.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), "x_block_scaling_dim=2"),
        (te_recipe.Float8BlockScaling(backward_override="dequantized"), "backward_override='dequantized'"),
        (te_recipe.Float8BlockScaling(fp8_quant_fwd_inp=exact), "one kind of scales for all operands"),
        (te_recipe.Float8BlockScaling(fp8_quant_fwd_inp=stand_in.QParams(True, 1e-4)), "amax_epsilon=0.0001"),
        (te_recipe.MXFP8BlockScaling(enable_2d_quantization=True), "enable_2d_quantization=True"),
        (te_recipe.NVFP4BlockScaling(disable_2d_quantization=True), "disable_2d_quantization=True"),
        (te_recipe.NVFP4BlockScaling(nvfp4_4over6="all"), "nvfp4_4over6='all'"),
    ]
    mlp = layer_of(world, **BF16).experts
    for recipe, words in refused:
        with stand_in.fp8_autocast(fp8_recipe=recipe), pytest.raises(NotImplementedError, match=words):
            mlp(*inputs(torch.bfloat16))
    exact_scales = te_recipe.Float8BlockScaling(**dict.fromkeys(QUANTIZERS, exact))
    came = outputs(mlp, stand_in.fp8_autocast(fp8_recipe=exact_scales))
    expected = outputs(mlp, fusible.config(recipe=fusible.Float8Block(scales="float32")))
    assert all(map(torch.equal, came, expected))


@case
def rows_that_a_recipe_does_not_take_are_refused(world: World) -> None:
    mlp = layer_of(world, fp8="e4m3", fp8_recipe="blockwise").experts
    words = "Float8Block quantises bfloat16 or float16, not float32"
    with get_fp8_context(mlp.config), pytest.raises(NotImplementedError, match=words):
        mlp(*inputs())


# ------------------------------------------------------------------------------------------------------ our dispatcher


def on_our_dispatcher(world: World, options: dict[str, Any], **settings: Any) -> Any:
    integration.install(their_module, **options)
    try:
        return layer_of(world, "flex", **settings)
    finally:
        integration.uninstall(their_module)


@case
def a_fixed_capacity_goes_with_any_backend(world: World) -> None:
    stock = trained(layer_of(world), world)
    for backend in ({}, {"moe_flex_dispatcher_backend": "hybridep"}):
        for options in ({}, {"capacity": "worst", "max_tokens": 2 * max(LENGTHS)}):
            near(trained(on_our_dispatcher(world, options, **backend), world), stock)
    assert stand_in.Fp8Padding.calls == 0


@case
def experts_in_blocks_are_refused_where_megatron_does_not_pad(world: World) -> None:
    te_ops.uninstall(experts_module)
    settings = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    fixed = {"capacity": "worst", "max_tokens": 2 * max(LENGTHS)}
    with pytest.raises(ValueError, match=r"experts with fp8 .*cannot pad rows of a fixed capacity.* 'worst'"):
        on_our_dispatcher(world, fixed, **settings)
    with pytest.raises(ValueError, match=r"moe_flex_dispatcher_backend='hybridep' nowhere.*transformer_engine.install"):
        on_our_dispatcher(world, {}, **settings, moe_flex_dispatcher_backend="hybridep")
    on_our_dispatcher(world, {}, **settings)  # which Megatron pads


# ---------------------------------------------------------------------------------------------------------- paged stash


def stash(capturing: bool) -> Any:
    """Megatron's manager, at the start of an iteration that notes what there is to stash."""
    with patch.object(paged_stash.PagedStashManager, "STASH_MGR", None):
        manager = paged_stash.PagedStashManager.get_instance()
    manager.enabled, manager.status, manager.device = capturing, "capture", torch.device("cpu")
    manager.vp_size, manager.current_vp_stage = 1, 0
    manager.update_model_chunk(0)
    manager.current_schedule_index = 0
    return manager


@case
def paged_stash_finds_rows(world: World) -> None:
    settings = {"moe_paged_stash": True, "moe_expert_rank_capacity_factor": 2.0}
    mlp = layer_of(world, **BF16, moe_flex_dispatcher_backend="hybridep", **settings).experts
    results = []
    for capturing in (False, True):
        manager = stash(capturing)
        with patch.object(paged_stash.PagedStashManager, "STASH_MGR", manager):
            x, sizes, probs = inputs(torch.bfloat16, tail=12)
            y, _ = mlp(x, sizes, probs)
            dy = torch.ones_like(y)
            results.append([y[: sum(SIZES)], *torch.autograd.grad(y, [x, probs, *weights_of(mlp)], dy)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    rows, found = sum(SIZES), manager.max_tokens_across_vp_stages
    expected = {(torch.bfloat16, HIDDEN): rows, (torch.bfloat16, 2 * FFN): rows, (torch.float32, 1): rows}
    assert found == expected, found


@case
def what_stands_behind_the_last_row_is_not_read(world: World) -> None:
    """The stash gives back rows of experts alone: behind them is what the memory held."""
    mlp, marked = layer_of(world, **BF16).experts, []

    def forgetful(tensor: Tensor) -> Any:
        if not hasattr(tensor, te_ops.STASH_MARK):
            return tensor
        marked.append(tensor.shape)
        rest = torch.full_like(tensor, torch.nan)
        rest[: sum(SIZES)] = tensor.detach()[: sum(SIZES)]
        return rest

    results = []
    for pack in (lambda tensor: tensor, forgetful):
        x, sizes, probs = inputs(torch.bfloat16, tail=12)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, _ = mlp(x, sizes, probs)
        results.append(torch.autograd.grad(y, [x, probs, *weights_of(mlp)], torch.ones_like(y)))
    assert len(marked) == 3
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
