"""Fused ops. Importing this package registers their fusions."""

from .ep_grouped_mlp import EPGroupedMLP
from .glu_scale import GLUScale
from .grouped_linear_chain import GroupedLinearChain, GroupedLinearResidual
from .grouped_linear_glu import GroupedLinearGLU
from .grouped_mlp import GroupedMLP
from .pointwise_chain import PointwiseChain
from .routed_lora import RoutedLoRA
from .routed_mlp import RoutedMLP

__all__ = [
    "EPGroupedMLP",
    "GLUScale",
    "GroupedLinearChain",
    "GroupedLinearGLU",
    "GroupedLinearResidual",
    "GroupedMLP",
    "PointwiseChain",
    "RoutedLoRA",
    "RoutedMLP",
]
