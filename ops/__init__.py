"""Basic ops, and the fused ops that replace runs of them."""

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
from .quantized.delayed import Delayed
from .quantized.mxfp4 import MXFP4
from .quantized.mxfp8 import MXFP8
from .quantized.nvfp4 import NVFP4
from .quantized.per_block import Float8Block
from .quantized.per_row import Float8Row
from .quantized.per_tensor import Float8Tensor
from .quantized.recipe import NoRecipe
from .quantized_modules import quantize_
from .quantized_operands import QUANTISERS
from .quantized_tensor import QuantizedGroupedTensor
from .quantized_values import EMULATED
from .quantized_weights import same_weights
from .residual import AddExtraInput, Identity, MakeExtraOutput
from .scale import ConstantScale, Scale
from .sharded_modules import gather_quantized

QUANTISERS.update(EMULATED)

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
    "gather_quantized",
    "grouped_gemm",
    "interleaved",
    "quantize_",
    "same_weights",
]
