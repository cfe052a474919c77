"""Grouped products and experts for jax: Hopper kernels as XLA custom calls, ``jax.lax.ragged_dot`` elsewhere.

Importing this imports neither torch nor the rest of ``fusible``.
"""

from .checks import ArgumentError, RefusedError
from .dispatch import info
from .gemm import grouped_gemm, ragged_dot
from .mlp import grouped_mlp
from .settings import config

__all__ = ["ArgumentError", "RefusedError", "config", "grouped_gemm", "grouped_mlp", "info", "ragged_dot"]
