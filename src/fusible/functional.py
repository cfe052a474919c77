"""Functions on tensors that the caller owns."""

from .ops.grouped.functional import grouped_gemm
from .ops.layers.route import route
from .ops.routed.routed_experts import routed_experts

__all__ = ["grouped_gemm", "route", "routed_experts"]
