"""Basic ops, and the fused ops that replace runs of them."""

from . import quantized_products
from .activation import Activation
from .activation_spec import interleaved
from .bias import Bias
from .composites import ScaledActivation, ScaledClampedSwiGLU, ScaledSwiGLU
from .device_errors import check_device_errors
from .functional import grouped_gemm
from .fused import (
    GLUScale,
    GroupedLinearChain,
    GroupedLinearGLU,
    GroupedLinearResidual,
    GroupedMLP,
    PointwiseChain,
    RoutedLoRA,
    RoutedMLP,
)
from .glu import GEGLU, GLU, QGEGLU, ClampedSwiGLU, ReGLU, SReGLU, SwiGLU
from .grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY, GroupedLinear
from .grouped_tensor import GroupedTensor
from .linear import Linear
from .lora import GroupedLoRA
from .moe import Combine, Dispatch
from .pointwise import Pointwise
from .quantized.recipe import MXFP4, MXFP8, NVFP4, Delayed, Float8Block, Float8Row, Float8Tensor, NoRecipe
from .quantized_modules import quantize_
from .quantized_tensor import QuantizedGroupedTensor
from .quantized_weights import same_weights
from .residual import AddExtraInput, Identity, MakeExtraOutput
from .scale import ConstantScale, Scale
from .sharded_modules import gather_quantized
from .switches import config

__all__ = [
    "GEGLU",
    "GLU",
    "GRAD_INPUT_BUFFER_KEY",
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "OUTPUT_BUFFER_KEY",
    "QGEGLU",
    "Activation",
    "AddExtraInput",
    "Bias",
    "ClampedSwiGLU",
    "Combine",
    "ConstantScale",
    "Delayed",
    "Dispatch",
    "Float8Block",
    "Float8Row",
    "Float8Tensor",
    "GLUScale",
    "GroupedLinear",
    "GroupedLinearChain",
    "GroupedLinearGLU",
    "GroupedLinearResidual",
    "GroupedLoRA",
    "GroupedMLP",
    "GroupedTensor",
    "Identity",
    "Linear",
    "MakeExtraOutput",
    "NoRecipe",
    "Pointwise",
    "PointwiseChain",
    "QuantizedGroupedTensor",
    "ReGLU",
    "RoutedLoRA",
    "RoutedMLP",
    "SReGLU",
    "Scale",
    "ScaledActivation",
    "ScaledClampedSwiGLU",
    "ScaledSwiGLU",
    "SwiGLU",
    "check_device_errors",
    "config",
    "gather_quantized",
    "grouped_gemm",
    "interleaved",
    "quantize_",
    "quantized_products",
    "same_weights",
]
