"""A router: a product that gives logits, and the choice of experts by them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...fuser import ArgumentError, Sequential
from ..parameters.wide_buffers import WideBuffers
from ..routed.choose import SCORES, Choose
from ..routed.gate import Gate, logits_of
from ..values.checks import check_numbers, check_sizes, check_switches
from .balance import Balance, check_balance
from .losses import Loss, Tally, check_sequences, checked_losses
from .record import Record
from .route import Groups, Routes, check_choice, check_tensors, form, normalizes, rule_of
from .token_count import TokenCount

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Router(WideBuffers):
    """Sends every token to the ``top_k`` experts with the highest scores, as :func:`fusible.functional.route` does.

    Logits are computed in float32, also under autocast.

    Args:
        features: H, the width of a token.
        num_experts: E, the number of experts.
        top_k: the number of experts that each token goes to.
        scores: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``.
        normalize: whether the weights of a token are divided by their sum. None: if ``top_k`` is above 1.
        scale: a factor of every weight, applied last.
        groups: a :class:`Groups`, or the number of groups, ``top_groups`` of which are kept by their two best scores.
        top_groups: with a number of groups, how many of them a token chooses from.
        selection_bias: whether there is a buffer ``selection_bias`` [E], zero at first. It is added to the scores for
            the choice of experts, but not to the weights.
        balance: the rule by which :meth:`update_bias` moves ``selection_bias``: :class:`SignBias` or
            :class:`QuantileBias`. It implies ``selection_bias=True``.
        losses: the losses of each call, added up in ``Routes.loss``: :class:`SwitchLoss`, :class:`GlobalLoss`,
            :class:`SequenceLoss`, :class:`ZLoss`.
        bias: whether the logits have a bias, a parameter [E].

    Attributes:
        gate: the op that gives the logits, with the keywords ``weight`` and ``logit_bias``.
        choice: a container with the op that chooses. It takes logits, gives weights, ids and counts, and has the
            keywords ``selection_bias``, ``valid`` and ``ids``.

    Raises:
        ArgumentError: a size is not a positive int, or the scale is not a number.
        ValueError: unknown scores; more choices than experts; groups that do not divide the experts, or hold too few; a
            balance that does not fit the choice.

    >>> import torch, fusible
    >>> router = fusible.Router(8, 16, top_k=2, losses=(fusible.SwitchLoss(0.01), fusible.ZLoss(1e-3)))
    >>> routes = router(torch.randn(5, 8))
    >>> routes.top_k_index.shape, routes.loss.requires_grad
    (torch.Size([5, 2]), True)
    """

    selection_bias: Tensor | None
    bias: nn.Parameter | None
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
        balance: Balance | None = None,
        losses: Sequence[Loss] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"features": features, "num_experts": num_experts, "top_k": top_k}
        check_sizes("Router", dtype, **sizes)
        check_numbers("Router", scale=scale)
        check_switches("Router", selection_bias=selection_bias, bias=bias)
        self.groups = _groups(groups, top_groups)
        check_choice("Router", num_experts, top_k, scores, self.groups)
        normalize = normalizes("Router", top_k, normalize)
        if normalize and top_k == 1:
            warnings.warn(
                "Router: normalize=True with top_k=1: the weight is 1 whatever the scores, so the router has no "
                "gradient but that of losses",
                stacklevel=2,
            )
        self.losses, self.balance = checked_losses("Router", losses), balance
        self.gate = Gate()
        self.rule = rule_of(top_k, scores, normalize, scale, self.groups, bool(self.losses))
        self.choice = Sequential(Choose(self.rule))
        self.token_count: TokenCount | None = None
        if balance is not None:
            check_balance("Router", balance)
            balance.check(num_experts, self.rule)
            self.token_count = TokenCount(balance.shape(num_experts), device)
        self.weight = nn.Parameter(torch.empty(num_experts, features, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.empty(num_experts, device=device, dtype=dtype))
        biased = selection_bias or balance is not None
        buffer = torch.empty(num_experts, device=device, dtype=torch.float32) if biased else None
        self.register_buffer("selection_bias", buffer)
        self.reset_parameters()

    @property
    def num_experts(self) -> int:
        """The number of experts, E."""
        return self.weight.shape[0]

    @property
    def top_k(self) -> int:
        """The number of experts that each token goes to."""
        return self.rule.top_k

    @property
    def load(self) -> Tensor | None:
        """The load that :meth:`update_bias` will read, for :class:`SignBias` int64 [E]; None without a balance."""
        bias, count = self.selection_bias, self.token_count
        return None if bias is None or count is None else count.load_on(bias.device)

    def reset_parameters(self) -> None:
        """Draws the weight uniformly from ±1/sqrt(features), as ``torch.nn.Linear`` does. Biases are 0."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        for tensor in (self.bias, self.selection_bias, self.load):
            if tensor is not None:
                nn.init.zeros_(tensor)

    def forward(
        self, x: Tensor, valid: Tensor | None = None, ids: Tensor | None = None, sequences: Tensor | int | None = None
    ) -> Routes:
        """Routes tokens [T, H].

        Args:
            valid: bool [T], as for :func:`fusible.functional.route`.
            ids: whole numbers [T, k], as for :func:`fusible.functional.route`.
            sequences: for :class:`SequenceLoss`: the number of each token's sequence, whole numbers [T]; or the length
                of all sequences.
        """
        weight, rule = self.weight, self.rule
        is_rows = isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point()
        if not is_rows or x.shape[1] != weight.shape[1]:
            raise ArgumentError(f"Router: x must be floating-point tokens [T, {weight.shape[1]}], got {form(x)}")
        logits = logits_of(self.gate, x, weight, self.bias)
        check_tensors("Router", logits, rule.top_k, valid, ids)
        if sequences is not None or self.losses:
            check_sequences("Router", self.losses, sequences, logits)
        keywords = {"selection_bias": self.selection_bias, "valid": valid, "ids": None if ids is None else ids.long()}
        chosen = self.choice(logits, **{name: tensor for name, tensor in keywords.items() if tensor is not None})
        weights, index, counts, *tallies = chosen
        routes = Routes(index, weights, counts, logits, SCORES.index(rule.scores))
        if not self.losses:
            return routes
        slots, sums, squares = tallies
        tally = Tally(slots, sums, squares, logits, index, rule.scores, sequences)
        first, *others = [loss(tally) for loss in self.losses]
        return routes._replace(loss=sum(others, first))

    def count(self, y: Tensor, routes: Routes) -> Tensor:
        """Counts the tokens of ``routes`` for the balance; returns ``y``, the output of their layer, for use in its
        place.

        A call in training mode that records gradients counts its tokens, once even under activation checkpointing.
        """
        if self.token_count is None or self.balance is None or not self.token_count.counts(y):
            return y
        assert self.selection_bias is not None
        top_k, scores = routes.top_k_index.shape[1], SCORES[routes.scores]
        if top_k != self.top_k or scores != self.rule.scores:  # routes of another router
            self.balance.check(self.num_experts, replace(self.rule, top_k=top_k, scores=scores))
        counted: Tensor = self.token_count(y, self.balance.count(routes, self.selection_bias))
        return counted

    @torch.no_grad()
    def update_bias(self, group: ProcessGroup | None = None) -> None:
        """Moves the selection bias towards an even load, from the counts since the last update.

        Args:
            group: the ranks whose tokens count, as ``torch.distributed`` takes it. None: only this process.

        Raises:
            RuntimeError: the router was built without ``balance``.
        """
        bias, load = self.selection_bias, self.load
        if bias is None or load is None or self.balance is None:
            raise RuntimeError("Router: there is no bias to update; build it with balance, such as SignBias(1e-3)")
        if group is not None:
            torch.distributed.all_reduce(load, group=group)
        bias.copy_(self.balance.next_bias(bias, load, self.top_k))
        load.zero_()

    @contextmanager
    def record(self) -> Iterator[Record]:
        """Records the experts of every call in the body: ``record.ids``, int16 [T, k], which a later call takes as
        ``ids``.
        """
        with Record([self]).recording() as record:
            yield record

    def extra_repr(self) -> str:
        groups = "" if self.groups is None else f", {self.groups.keep} of {self.groups.count} groups"
        return f"{self.weight.shape[1]}, {self.top_k} of {self.num_experts}, {self.rule.scores}{groups}"


@contextmanager
def record_routes(model: nn.Module) -> Iterator[Record]:
    """Records the experts that every :class:`Router` of the model chooses in the body, in the order of the modules.

    ``record.ids`` is int16 [T, L, k], the form in which engines store routes, and ``record.names`` are the L routers.
    Pass ``record.ids[:, i]`` to layer i as ``ids``: the weights then come from its current logits, with a gradient
    (arxiv 2510.11370). The recomputation of a checkpointed call is not recorded again.
    """
    routers = {name: module for name, module in model.named_modules() if isinstance(module, Router)}
    with Record(list(routers.values()), list(routers)).recording() as record:
        yield record


@torch.no_grad()
def update_biases(model: nn.Module, group: ProcessGroup | None = None) -> None:
    """Calls :meth:`Router.update_bias` for every router of the model that has a balance, with one reduction for all.

    Args:
        group: the ranks whose tokens count: data, expert and context parallel ranks together. None: only this process.
    """
    routers = [module for module in model.modules() if isinstance(module, Router) and module.balance is not None]
    loads = [load for router in routers if (load := router.load) is not None]
    if group is not None and loads:
        total = torch.cat([load.flatten() for load in loads])
        torch.distributed.all_reduce(total, group=group)
        parts = torch.split(total, [load.numel() for load in loads])
        for load, part in zip(loads, parts, strict=True):
            load.copy_(part.view_as(load))
    for router in routers:
        router.update_bias()


def _groups(count: Groups | int, keep: int) -> Groups | None:
    """The groups, given or as two numbers; None for one group of all experts."""
    if isinstance(count, Groups):
        if keep != 1:
            raise ValueError(f"Router: groups={count} says how many are kept; leave top_groups={keep} out")
        return count
    check_sizes("Router", None, groups=count, top_groups=keep)
    if keep > count:
        raise ValueError(
            "Router: groups must divide the experts, and top_groups be at most groups; "
            f"got groups={count}, top_groups={keep}"
        )
    return None if count == 1 else Groups(count, keep)
