"""Basic ops, and the fused ops that replace runs of them."""

from .activation import Activation
from .activation_spec import interleaved
from .bias import Bias
from .composites import ScaledActivation, ScaledClampedSwiGLU, ScaledSwiGLU
from .device_errors import check_device_errors
from .functional import grouped_gemm
from .fused import GLUScale, GroupedLinearGLU, GroupedMLP, PointwiseChain, RoutedLoRA, RoutedMLP
from .glu import GEGLU, GLU, QGEGLU, ClampedSwiGLU, ReGLU, SReGLU, SwiGLU
from .grouped_linear import GRAD_INPUT_BUFFER_KEY, OUTPUT_BUFFER_KEY, GroupedLinear
from .grouped_tensor import GroupedTensor
from .linear import Linear
from .lora import GroupedLoRA
from .moe import Combine, Dispatch
from .pointwise import Pointwise
from .residual import AddExtraInput, Identity, MakeExtraOutput
from .scale import ConstantScale, Scale

__all__ = [
    "GEGLU",
    "GLU",
    "GRAD_INPUT_BUFFER_KEY",
    "OUTPUT_BUFFER_KEY",
    "QGEGLU",
    "Activation",
    "AddExtraInput",
    "Bias",
    "ClampedSwiGLU",
    "Combine",
    "ConstantScale",
    "Dispatch",
    "GLUScale",
    "GroupedLinear",
    "GroupedLinearGLU",
    "GroupedLoRA",
    "GroupedMLP",
    "GroupedTensor",
    "Identity",
    "Linear",
    "MakeExtraOutput",
    "Pointwise",
    "PointwiseChain",
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
    "grouped_gemm",
    "interleaved",
]
