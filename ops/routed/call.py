"""The arguments of a call of routed experts, as one object."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.doors import routing as permutation
from ..kernels.doors.routing import Routing
from ..values.checks import product_dtype


@dataclass(slots=True)
class RoutedCall:
    """Tokens [T, H], their experts and weights [T, k], and how the experts compute.

    Attributes:
        needs_grad: the wanted gradients.
    """

    x: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    needs_grad: frozenset[str] = frozenset()
    autocast_dtype: torch.dtype | None = None

    def tokens(self) -> Tensor:
        """x in the dtype of the products."""
        return self.x.to(product_dtype(self.x.dtype, self.autocast_dtype))

    def route(self, num_experts: int) -> tuple[Routing, Tensor]:
        """The order of the slots by expert, and the weights in that order."""
        dtype, weights = product_dtype(self.x.dtype, self.autocast_dtype), self.top_k_weights
        routing = permutation.route(self.top_k_index, num_experts, dtype, weights.contiguous())
        return routing._replace(scales=None), permutation.scales_of(routing, weights)
