"""Names and arguments of ``transformer_engine.pytorch.ops`` that Megatron-Core builds the experts of an MoE layer from.

    from fusible.integrations import transformer_engine

    transformer_engine.install()    # before the first forward of a model

Then ``TEGroupedMLP`` with ``use_transformer_engine_op_fuser`` builds its container from this module, and gives it the
rows without padding. All else in Megatron keeps the ops of TransformerEngine. Parameters, their checkpoints and their
``main_grad`` stay Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ... import fuser
from ...fuser.contract.op import OpKwargs
from ...fuser.contract.torch_private import current_saved_tensors_hooks
from ...ops import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY, ScaledActivation, interleaved
from ...ops.basic import composites as scaled
from ...ops.formats.recipe import Recipe
from ...ops.grouped import grouped_linear
from ...ops.quantized.linear import refusal
from ...ops.values.activation_spec import Interleaved
from ...ops.values.switches import config
from .recipes import in_force

if TYPE_CHECKING:
    from megatron.core.transformer.moe.experts import TEGroupedMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "GRAD_INPUT_BUFFER_KEY",
    "OUTPUT_BUFFER_KEY",
    "GroupedLinear",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSwiGLU",
    "Sequential",
    "install",
    "uninstall",
]

EXPERTS = "megatron.core.transformer.moe.experts"
STASH_MARK = "grouped_tensor_scale_inv"  # by which Megatron's paged stash knows saved rows; False: no scales


class Sequential(fuser.Sequential):
    """Our container under TransformerEngine's ``autocast`` and with the marks that Megatron's paged stash looks for.

    Saved tensors with a row for each row of ``x`` are marked where hooks on saved tensors are active.
    """

    def forward(  # type: ignore[override]
        self, x: Tensor, *extra_inputs: object, op_kwargs: OpKwargs | None = None, **shared: object
    ) -> Any:
        """Runs the container with the recipe that ``autocast`` has switched on.

        Raises:
            NotImplementedError: no recipe here equals it, or it does not support a linear or the dtype of ``x``.
        """
        recipe = in_force()
        if recipe is None:
            with _rows_marked(x):
                return super().forward(x, *extra_inputs, op_kwargs=op_kwargs, **shared)
        self._refuse_16_bits(recipe, x)
        with config(recipe=recipe), _rows_marked(x):
            return super().forward(x, *extra_inputs, op_kwargs=op_kwargs, **shared)

    def _refuse_16_bits(self, recipe: Recipe, x: Tensor) -> None:
        """Raises where a linear would not follow the recipe."""
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        for linear in self.modules():
            if isinstance(linear, grouped_linear.GroupedLinear):
                why = recipe.dtype_refusal(dtype) or refusal(linear, recipe)
                if why is not None:
                    raise NotImplementedError(f"experts under TransformerEngine's autocast: {why}")


@contextmanager
def _rows_marked(x: Tensor) -> Iterator[None]:
    """A context in which active saved-tensor hooks see a mark on each tensor with a row for each row of ``x``.

    Weights are not marked: they have three dimensions, or are parameters. Nor are 8-bit operands, which are stored in
    blocks.
    """
    hooks = current_saved_tensors_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks
    rows, dtypes = x.numel() // max(1, x.shape[-1]), (x.dtype, torch.float32)

    def marked(tensor: Tensor) -> object:
        is_parameter = isinstance(tensor, nn.Parameter)
        if tensor.dim() in (1, 2) and len(tensor) == rows and tensor.dtype in dtypes and not is_parameter:
            setattr(tensor, STASH_MARK, False)
        return pack(tensor)

    with saved_tensors_hooks(marked, unpack):
        yield


class GroupedLinear(grouped_linear.GroupedLinear):
    """Our grouped linear with TransformerEngine's defaults: one parameter per group.

    Megatron asks the signature for the newer arguments.

    Args:
        rng_state_tracker_function: ignored: it seeds the initial values, which Megatron replaces.
        options: further ones of :class:`fusible.GroupedLinear`.

    Raises:
        NotImplementedError: tokens or gradients would arrive as MXFP8 data in the memory of another tensor.
    """

    promises = grouped_linear.GroupedLinear.promises

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        rng_state_tracker_function: object = None,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        **options: Any,
    ) -> None:
        single = {"single_grouped_weight": single_grouped_weight, "single_grouped_bias": single_grouped_bias}
        options |= {**single, "delay_wgrad_compute": delay_wgrad_compute, "scale_bias": scale_bias}
        super().__init__(num_groups, in_features, out_features, **options)

    @property
    def ep_mxfp8_carrier_input(self) -> bool:
        """Whether ``x`` is MXFP8 data in the memory of another tensor."""
        return False

    @ep_mxfp8_carrier_input.setter
    def ep_mxfp8_carrier_input(self, value: bool) -> None:
        _refuse("moe_dispatch_fwd_dtype", value)

    @property
    def ep_mxfp8_carrier_grad(self) -> bool:
        """Whether the gradient of the output is MXFP8 data in the memory of another tensor."""
        return False

    @ep_mxfp8_carrier_grad.setter
    def ep_mxfp8_carrier_grad(self, value: bool) -> None:
        _refuse("moe_combine_bwd_dtype", value)


class ScaledSwiGLU(scaled.ScaledSwiGLU):
    """``silu(gate) * up * scales``.

    Args:
        glu_interleave_size: how many columns of gate and of up alternate; None or 0: gate before up.
        activation_recompute_in_mlp: ignored; the fused experts always compute the activation again.
    """

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(layout=_layout(glu_interleave_size))


class ScaledClampedQGeGLU(scaled.ScaledClampedSwiGLU):
    """``gate * sigmoid(alpha gate) * (up + glu_linear_offset) * scales``, clamped; see :class:`ScaledSwiGLU`."""

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        activation_recompute_in_mlp: bool = False,
    ) -> None:
        super().__init__(limit=limit, alpha=alpha, linear_offset=glu_linear_offset, layout=_layout(glu_interleave_size))


class ScaledSReLU(ScaledActivation):
    """``relu(x)**2 * scales``."""

    def __init__(self, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__("relu2")


class _Instead:
    """A namespace with some names replaced; all others are looked up in the original on each access."""

    def __init__(self, original: object, **replaced: object) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(self._original, name)


def install(experts: ModuleType | None = None) -> None:
    """Makes Megatron's experts use the ops here instead of ``transformer_engine``'s, without padded rows.

    Experts that have been called before build their container again.

    Args:
        experts: the module of ``TEGroupedMLP``; that of the installed Megatron-Core by default.

    Raises:
        ImportError: Megatron-Core is missing, or its experts are not built from ops.
    """
    module: Any = experts if experts is not None else import_module(EXPERTS)
    engine: Any = getattr(module, "te", None)
    mlp: Any = getattr(module, "TEGroupedMLP", None)
    if not hasattr(mlp, "_make_fused_ops") or not hasattr(module, "skip_routed_expert_padding") or engine is None:
        raise ImportError(
            f"{module.__name__} builds no experts from TransformerEngine's ops: that takes a Megatron-Core whose "
            "TEGroupedMLP has _make_fused_ops and skip_routed_expert_padding, from 0.18 on, and transformer_engine"
        )
    if not is_installed(module):
        module.te = _Instead(engine, pytorch=_Instead(engine.pytorch, ops=import_module(__name__)))
        module.skip_routed_expert_padding = _skipping(module.skip_routed_expert_padding)
        mlp._fused_forward = _building_ours(mlp._fused_forward)


def uninstall(experts: ModuleType | None = None) -> None:
    """Undoes :func:`install`, for containers that are built from then on."""
    module: Any = experts if experts is not None else import_module(EXPERTS)
    if is_installed(module):
        module.te = module.te._original
        module.skip_routed_expert_padding = module.skip_routed_expert_padding.__wrapped__
        module.TEGroupedMLP._fused_forward = module.TEGroupedMLP._fused_forward.__wrapped__


def is_installed(experts: object) -> bool:
    """Whether the experts of a module are built from the ops here."""
    return isinstance(getattr(experts, "te", None), _Instead)


def _skipping(original: Callable[[TransformerConfig], bool]) -> Callable[[TransformerConfig], bool]:
    @wraps(original)
    def skip_routed_expert_padding(config: TransformerConfig) -> bool:
        return config.use_transformer_engine_op_fuser or original(config)

    return skip_routed_expert_padding


def _building_ours(original: Callable[..., object]) -> Callable[..., object]:
    """Wraps the method to rebuild a container of TransformerEngine's ops, which would get rows without padding."""

    @wraps(original)
    def _fused_forward(self: TEGroupedMLP, *args: object, **kwargs: object) -> object:
        if self._fused_ops is not None and not isinstance(self._fused_ops[0], Sequential):
            self._fused_ops = None
        return original(self, *args, **kwargs)

    return _fused_forward


def _layout(glu_interleave_size: int | None) -> str | Interleaved:
    return interleaved(glu_interleave_size) if glu_interleave_size else "concat"


def _refuse(switch: str, value: bool) -> None:
    if value:
        raise NotImplementedError(
            f"fusible's grouped linears read no MXFP8 data: {switch}='mxfp8' needs TransformerEngine's"
        )
