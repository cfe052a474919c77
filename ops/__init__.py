"""Basic ops, and the fused ops that replace runs of them."""

from .basic.activation import Activation
from .basic.bias import Bias
from .basic.composites import ScaledActivation, ScaledClampedSwiGLU, ScaledSwiGLU
from .basic.glu import GEGLU, GLU, QGEGLU, ClampedSwiGLU, ReGLU, SReGLU, SwiGLU
from .basic.linear import Linear
from .basic.residual import AddExtraInput, Identity, MakeExtraOutput, SwapExtra
from .basic.scale import ConstantScale, Scale
from .formats.delayed import Delayed
from .formats.float8_weight import Float8Weight
from .formats.int4 import Int4
from .formats.mxfp4 import MXFP4
from .formats.mxfp8 import MXFP8
from .formats.nf4 import NF4
from .formats.nvfp4 import NVFP4
from .formats.nvfp4_weight import NVFP4Weight
from .formats.per_block import Float8Block
from .formats.per_row import Float8Row
from .formats.per_tensor import Float8Tensor
from .formats.recipe import NoRecipe
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
from .grouped.functional import grouped_gemm
from .grouped.grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY, GroupedLinear
from .grouped.lora import GroupedLoRA
from .grouped.pointwise import Pointwise
from .kernels.doors.device_errors import check_device_errors
from .modules.quantize import quantize_
from .modules.shard import gather_quantized
from .quantized import products as quantized_products
from .quantized.operands import QUANTISERS
from .quantized.tensor import QuantizedGroupedTensor
from .quantized.values import EMULATED
from .quantized.weights import same_weights
from .routed.identity_experts import IdentityExperts
from .routed.moe import Combine, Dispatch
from .values.activation_spec import interleaved
from .values.grouped_tensor import GroupedTensor
from .values.switches import config

QUANTISERS.update(EMULATED)

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
    "Bias",
    "ClampedSwiGLU",
    "Combine",
    "ConstantScale",
    "Delayed",
    "Dispatch",
    "Float8Block",
    "Float8Row",
    "Float8Tensor",
    "Float8Weight",
    "GLUScale",
    "GroupedLinear",
    "GroupedLinearChain",
    "GroupedLinearGLU",
    "GroupedLinearResidual",
    "GroupedLoRA",
    "GroupedMLP",
    "GroupedTensor",
    "Identity",
    "IdentityExperts",
    "Int4",
    "Linear",
    "MakeExtraOutput",
    "NVFP4Weight",
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
    "SwapExtra",
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
