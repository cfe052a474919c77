"""A layer's experts run as one function, where their container would run as one ``GroupedMLP``."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import Sequential
from ..fuser.compiler.registry import registry
from ..fuser.config import Config, config_of, thread_config
from ..ops.activation_spec import ActivationSpec
from ..ops.routed_mlp import Experts
from ..ops.routing import routed_by
from . import routed

DEFAULT = config_of(**vars(Config()))


class _Seen(NamedTuple):
    """What :meth:`Sequential.explain` needs to know of a call."""

    x: torch.Size
    ids: tuple[torch.Size, torch.dtype]
    dtypes: tuple[torch.dtype, torch.dtype]
    device: torch.device
    grads: tuple[bool, bool, bool]  # of x, of the weights; whether they are recorded


class RoutedLayer:
    """Stands beside a container, which says what is fused, explains, and runs what this does not take."""

    def __init__(self, container: Sequential, spec: ActivationSpec, transposed: bool) -> None:
        self._container, self._spec, self._transposed = container, spec, transposed
        self._version: int | None = None  # of the registry, when it was last asked
        self._fits = False
        self._last: _Seen | None = None

    def takes(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> bool:
        """Whether :meth:`run` does what the container would. Switches and autocast are the container's."""
        if _switched() or x.is_meta or type(top_k_index) is not Tensor or torch.is_autocast_enabled(x.device.type):
            return False
        if self._version != registry.version:
            self._last = _seen(x, top_k_index, top_k_weights)
            self.explain_last()
            self._version, self._fits = registry.version, self._container.runs_as("GroupedMLP")
        return self._fits

    def run(self, parameters: tuple[Any, ...], x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[T, H] in the dtype of x: the weighted sums; ``parameters`` are up, down and their biases, as stored."""
        experts, given = Experts._make((*parameters, self._spec, self._transposed)), x.dtype
        x = x if given == experts.up.dtype else x.to(experts.up.dtype)
        self._last = _seen(x, top_k_index, top_k_weights)
        y = routed.run(experts, x, top_k_index, top_k_weights)
        return y if y.dtype == given else y.to(given)

    def explain_last(self) -> str | None:
        """Lets the container explain the last call, which it has not seen. Returns what routed it; None: no call."""
        seen, self._last = self._last, None
        if seen is None:
            return None
        (shape, ids), features = seen.ids, seen.x[1]
        first: Any = self._container[0]
        count = shape.numel()
        rows = torch.empty(min(count, 1), features, dtype=seen.dtypes[0], device=seen.device).expand(count, features)
        scales = torch.empty(count, dtype=seen.dtypes[1], device=seen.device)
        sizes = torch.zeros(first.num_groups, dtype=torch.int32, device=seen.device)
        with torch.set_grad_enabled(seen.grads[2]):
            rows, scales = rows.requires_grad_(seen.grads[0]), scales.requires_grad_(seen.grads[1])
            self._container.note(rows, split_sizes=sizes, scales=scales)
        return routed_by(ids, seen.device, first.num_groups, count, rows.dtype)


def _seen(x: Tensor, index: Tensor, weights: Tensor) -> _Seen:
    grads = x.requires_grad, weights.requires_grad, torch.is_grad_enabled()
    return _Seen(x.shape, (index.shape, index.dtype), (x.dtype, weights.dtype), x.device, grads)


def _switched() -> bool:
    return thread_config.config is not DEFAULT
