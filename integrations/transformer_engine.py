"""Names and arguments of ``transformer_engine.pytorch.ops`` that Megatron-Core builds the experts of an MoE layer from.

    from fusible.integrations import transformer_engine

    transformer_engine.install()    # before the first forward of a model

Then ``TEGroupedMLP`` with ``use_transformer_engine_op_fuser`` builds its container from this module. All else in
Megatron keeps the ops of TransformerEngine. Parameters, their checkpoints and their ``main_grad`` stay Megatron's.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ..fuser import Sequential
from ..ops import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY, ScaledActivation, interleaved
from ..ops.basic import composites as scaled
from ..ops.grouped import grouped_linear

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


class GroupedLinear(grouped_linear.GroupedLinear):
    """Ours, with TransformerEngine's defaults: one parameter a group.

    Args:
        rng_state_tracker_function: for the parameters' initial values, which Megatron replaces by its own.

    Raises:
        NotImplementedError: tokens or gradients shall come as MXFP8 data in the memory of a tensor.
    """

    replayable = True

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: Any = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
    ) -> None:
        super().__init__(
            *(num_groups, in_features, out_features),
            bias=bias,
            device=device,
            dtype=dtype,
            accumulate_into_main_grad=accumulate_into_main_grad,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            delay_wgrad_compute=delay_wgrad_compute,
            scale_bias=scale_bias,
        )

    @property
    def ep_mxfp8_carrier_input(self) -> bool:
        """Whether ``x`` is MXFP8 data in the memory of another tensor."""
        return False

    @ep_mxfp8_carrier_input.setter
    def ep_mxfp8_carrier_input(self, value: bool) -> None:
        _refuse("moe_dispatch_fwd_dtype", value)

    @property
    def ep_mxfp8_carrier_grad(self) -> bool:
        """Whether the gradient of the output is."""
        return False

    @ep_mxfp8_carrier_grad.setter
    def ep_mxfp8_carrier_grad(self, value: bool) -> None:
        _refuse("moe_combine_bwd_dtype", value)


class ScaledSwiGLU(scaled.ScaledSwiGLU):
    """``silu(gate) * up * scales``.

    Args:
        glu_interleave_size: how many columns of gate and of up alternate; None or 0: gate before up.
        activation_recompute_in_mlp: makes no difference; the fused experts always compute the activation again.
    """

    def __init__(self, glu_interleave_size: int | None = None, *, activation_recompute_in_mlp: bool = False) -> None:
        super().__init__(layout=_layout(glu_interleave_size))


class ScaledClampedQGeGLU(scaled.ScaledClampedSwiGLU):
    """``gate * sigmoid(alpha gate) * (up + glu_linear_offset) * scales``, clamped at ``limit``; else as the above."""

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
    """A namespace with one name replaced; all others are those of the original, as they are when asked for."""

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def install(experts: ModuleType | None = None) -> None:
    """Lets Megatron's experts find the ops here instead of in ``transformer_engine``.

    Experts that have been called before keep the container that they have built.

    Args:
        experts: the module of ``TEGroupedMLP``; that of the installed Megatron-Core by default.

    Raises:
        ImportError: there is no Megatron-Core, or one whose experts are not built from ops.
    """
    module: Any = experts if experts is not None else import_module(EXPERTS)
    engine = getattr(module, "te", None)
    if not hasattr(getattr(module, "TEGroupedMLP", None), "_make_fused_ops") or engine is None:
        raise ImportError(
            f"{module.__name__} builds no experts from TransformerEngine's ops: that takes a Megatron-Core whose "
            "TEGroupedMLP has _make_fused_ops, and transformer_engine"
        )
    if not isinstance(engine, _Instead):
        module.te = _Instead(engine, pytorch=_Instead(engine.pytorch, ops=import_module(__name__)))


def uninstall(experts: ModuleType | None = None) -> None:
    """Undoes :func:`install`, for containers that are built from then on."""
    module: Any = experts if experts is not None else import_module(EXPERTS)
    if isinstance(module.te, _Instead):
        module.te = module.te._original


def _layout(glu_interleave_size: int | None) -> Any:
    return interleaved(glu_interleave_size) if glu_interleave_size else "concat"


def _refuse(switch: str, value: bool) -> None:
    if value:
        raise NotImplementedError(
            f"fusible's grouped linears read no MXFP8 data: {switch}='mxfp8' needs TransformerEngine's"
        )
