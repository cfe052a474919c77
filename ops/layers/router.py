"""A router: a product that gives logits, and the choice of experts by them."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checks import check_numbers, check_sizes
from ..wide_buffers import WideBuffers
from .route import Groups, Routes, check_choice, route


class Router(WideBuffers):
    """Sends every token to the ``top_k`` experts with the highest scores, as :func:`fusible.functional.route` does.

    Logits are computed in float32, also under autocast.

    Args:
        features: H, the width of a token.
        num_experts: E.
        top_k: how many experts each token goes to.
        scores: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        normalize: the weights of a token are divided by their sum. None: if ``top_k`` is above 1.
        scale: a factor of every weight, applied last.
        groups: a :class:`Groups`; or the number of groups, of which ``top_groups`` are kept by their two best scores.
        top_groups: see there.
        selection_bias: whether there is a buffer ``selection_bias`` [E], zero at first. It is added to the scores when
            experts are chosen, but is not part of the weights.

    Raises:
        ArgumentError: sizes that are not positive ints, a scale that is no number.
        ValueError: other scores; more choices than experts; groups that do not divide the experts, or hold too few.
    """

    selection_bias: Tensor | None
    wide_buffers = ("selection_bias",)  # in fewer bits its small steps would be lost

    def __init__(
        self,
        features: int,
        num_experts: int,
        top_k: int,
        *,
        scores: str = "softmax",
        normalize: bool | None = None,
        scale: float = 1.0,
        groups: Groups | int = 1,
        top_groups: int = 1,
        selection_bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"features": features, "num_experts": num_experts, "top_k": top_k}
        check_sizes("Router", dtype, **sizes)
        check_numbers("Router", scale=scale)
        self.top_k, self.scores, self.scale = top_k, scores, scale
        self.normalize = top_k > 1 if normalize is None else normalize
        self.groups = groups if isinstance(groups, Groups) else _groups(groups, top_groups)
        check_choice("Router", num_experts, top_k, scores, self.groups)
        if self.normalize and top_k == 1:
            warnings.warn(
                "Router: normalize=True with top_k=1: the weight is 1 whatever the scores, so the router has no "
                "gradient but that of losses",
                stacklevel=2,
            )
        self.weight = nn.Parameter(torch.empty(num_experts, features, device=device, dtype=dtype))
        bias = torch.empty(num_experts, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    @property
    def num_experts(self) -> int:
        """E."""
        return self.weight.shape[0]

    def reset_parameters(self) -> None:
        """Draws the weight uniformly from ±1/sqrt(features), as ``torch.nn.Linear`` does. The selection bias is 0."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def forward(self, x: Tensor, valid: Tensor | None = None, ids: Tensor | None = None) -> Routes:
        """The routes of tokens [T, H]; ``valid`` bool [T] and ``ids`` [T, k] as :func:`fusible.functional.route`."""
        return route(
            self._logits(x),
            self.top_k,
            scores=self.scores,
            normalize=self.normalize,
            scale=self.scale,
            bias=self.selection_bias,
            groups=self.groups,
            valid=valid,
            ids=ids,
        )

    def _logits(self, x: Tensor) -> Tensor:
        """[T, E]: few numbers, on which much depends, so that they are worth their bits (arxiv 2101.03961, 2.4)."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        if x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type):
            return F.linear(x.to(dtype), self.weight.to(dtype))
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(dtype), self.weight.to(dtype))

    def extra_repr(self) -> str:
        groups = "" if self.groups is None else f", {self.groups.keep} of {self.groups.count} groups"
        return f"{self.weight.shape[1]}, {self.top_k} of {self.num_experts}, {self.scores}{groups}"


def _groups(count: int, keep: int) -> Groups | None:
    """From two numbers; None where there is one group of all experts."""
    check_sizes("Router", None, groups=count, top_groups=keep)
    if keep > count:
        raise ValueError(
            "Router: groups must divide the experts, and top_groups be at most groups; "
            f"got groups={count}, top_groups={keep}"
        )
    return None if count == 1 else Groups(count, keep)
