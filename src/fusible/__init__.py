"""Fusible operations: write basic ops in sequence, and let the compiler pick the kernels."""

# ruff: noqa: F403, F405 (type checkers read the lists of the packages)

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .integrations.on_import import after_import

if TYPE_CHECKING:
    from . import ep, functional, integrations, testing
    from . import jax as jax
    from .fuser import (
        ArgumentError,
        Buffer,
        Composite,
        DoubleBackwardError,
        Explanation,
        FusedOp,
        Grads,
        Keyword,
        Match,
        ModelExplanation,
        Op,
        OpGraph,
        Pattern,
        Promises,
        RefusedError,
        Sequential,
        TensorSpec,
        explain,
        optional,
        register_fusion,
        unregister,
    )
    from .ops import *
    from .ops.layers import *

__version__ = "0.1.0"

__all__ = [
    "GEGLU",
    "GLU",
    "GRAD_INPUT_BUFFER_KEY",
    "MXFP4",
    "MXFP8",
    "NF4",
    "NVFP4",
    "OUTPUT_BUFFER_KEY",
    "QGEGLU",
    "Activation",
    "AddExtraInput",
    "ArgumentError",
    "Bias",
    "Buffer",
    "ClampedSwiGLU",
    "Combine",
    "Composite",
    "ConstantScale",
    "Delayed",
    "Dispatch",
    "DoubleBackwardError",
    "Explanation",
    "Float8Block",
    "Float8Row",
    "Float8Tensor",
    "Float8Weight",
    "FusedOp",
    "GLUScale",
    "GlobalLoss",
    "Grads",
    "GroupedLinear",
    "GroupedLinearChain",
    "GroupedLinearGLU",
    "GroupedLinearResidual",
    "GroupedLoRA",
    "GroupedMLP",
    "GroupedTensor",
    "Groups",
    "Identity",
    "IdentityExperts",
    "Int4",
    "Keyword",
    "Linear",
    "MakeExtraOutput",
    "Match",
    "MoE",
    "MoEOutput",
    "ModelExplanation",
    "NVFP4Weight",
    "NoRecipe",
    "Op",
    "OpGraph",
    "Pattern",
    "Pointwise",
    "PointwiseChain",
    "Promises",
    "QuantileBias",
    "QuantizedGroupedTensor",
    "ReGLU",
    "Record",
    "RefusedError",
    "RoutedLoRA",
    "RoutedMLP",
    "Router",
    "Routes",
    "SReGLU",
    "Scale",
    "ScaledActivation",
    "ScaledClampedSwiGLU",
    "ScaledSwiGLU",
    "SequenceLoss",
    "Sequential",
    "SignBias",
    "SwapExtra",
    "SwiGLU",
    "SwitchLoss",
    "TensorSpec",
    "ZLoss",
    "__version__",
    "check_device_errors",
    "config",
    "ep",
    "explain",
    "functional",
    "gather_quantized",
    "grouped_gemm",
    "integrations",
    "interleaved",
    "optional",
    "quantize_",
    "record_routes",
    "register_fusion",
    "same_weights",
    "testing",
    "unregister",
    "update_biases",
]

_PACKAGES = ("fuser", "ops", "ops.layers")  # where the other names are
_MODULES = frozenset(("ep", "functional", "fuser", "jax", "ops", "testing"))
after_import(f"{__name__}.fuser", f"{__name__}.ops")  # importing the compiler brings the fusions


def __getattr__(name: str) -> Any:
    """Imports a public name on first access, so ``import fusible.jax`` does not import torch."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    packages = [import_module(f"{__name__}.{package}") for package in _PACKAGES]
    value = next(vars(package)[name] for package in packages if name in package.__all__)
    return globals().setdefault(name, value)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
