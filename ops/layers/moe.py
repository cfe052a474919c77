"""A mixture-of-experts layer: router, experts as one fused op, shared experts, load balancing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...fuser import ArgumentError, Sequential
from ...fuser.contract.torch_private import serialized_as
from ..basic.glu import Activated
from ..basic.named_activation import activation_op, activation_spec
from ..basic.scale import Scale
from ..grouped.grouped_linear import GroupedLinear
from ..routed.moe import Combine, Dispatch
from ..values.activation_spec import ActivationSpec, Interleaved
from ..values.checks import check_numbers, check_sizes
from .balance import Balance, SignBias
from .losses import Loss, SwitchLoss, checked_losses
from .route import Groups, Routes
from .router import Router
from .shared_expert import SharedExpert

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")


@serialized_as("fusible.MoEOutput")
class MoEOutput(NamedTuple):
    """The result of :class:`MoE`.

    Attributes:
        y: the output, in the shape of the input.
        balance_loss: the sum of the losses of the router, to be added to that of the model; None if it has none.
        tokens_per_expert: int64 [E], of this call.
    """

    y: Tensor
    balance_loss: Tensor | None
    tokens_per_expert: Tensor


class MoE(nn.Module):
    """Experts of the form ``down(act(up(x)))``. Every token goes to ``top_k`` of them; none is ever dropped.

    ``experts`` is a :class:`Sequential`, so ``layer.experts.explain()`` says what runs. Nothing waits for the device.

    Args:
        hidden: H, the width of a token.
        ffn: F, the width inside an expert.
        experts: E.
        top_k: how many experts a token goes to.
        activation: as :func:`fusible.functional.routed_experts` takes it.
        layout: see there.
        bias: whether the linears of the experts have biases.
        scores: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``; see :class:`Router`, as for the next four.
        normalize: the weights of a token add up to ``scale``. None: if ``top_k`` is above 1.
        scale: a factor of all weights.
        groups: of experts, a :class:`Groups`, or their number; a token chooses from ``top_groups`` of them.
        top_groups: see there.
        balance_loss: alpha of the load-balancing loss of the Switch Transformer, ``alpha * E * sum of f_i P_i``
            (arxiv 2101.03961, equation 4), which each call then returns. None: there is none.
        losses: more of them; see :class:`Router`, as for the next three.
        bias_update_rate: how far :meth:`update_bias` moves the selection bias of an expert (arxiv 2408.15664):
            ``balance=SignBias(rate)``. None: there is no such bias.
        balance: another way to move it.
        router_bias: whether the logits have a bias, a parameter [E].
        shared_ffn: F of the shared experts together, which every token passes. None: there are none.
        shared_gate: the shared experts are multiplied by ``sigmoid(gate @ x)``.
        single_grouped_weight: each linear of the experts has one parameter ``weight`` [E, out, in]; else ``weight0``,
            ``weight1``, … [out, in], and so of its biases, for optimisers of matrices.

    Raises:
        ArgumentError: sizes that are not positive ints; factors that are no numbers; in a call, tokens that are not
            [..., H], ``valid`` or ``ids`` that do not fit them.
        ValueError: an unknown activation, layout or scores; more choices than there are experts.

    >>> import torch, fusible
    >>> layer = fusible.MoE(hidden=8, ffn=16, experts=4, top_k=2, balance_loss=0.01)
    >>> y, loss, counts = layer(torch.randn(2, 5, 8))
    >>> y.shape, int(counts.sum())
    (torch.Size([2, 5, 8]), 20)
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        activation: str | Activated = "swiglu",
        layout: str | Interleaved = "concat",
        bias: bool = False,
        scores: str = "softmax",
        normalize: bool | None = None,
        scale: float = 1.0,
        groups: Groups | int = 1,
        top_groups: int = 1,
        balance_loss: float | None = None,
        losses: Sequence[Loss] = (),
        bias_update_rate: float | None = None,
        balance: Balance | None = None,
        router_bias: bool = False,
        shared_ffn: int | None = None,
        shared_gate: bool = False,
        single_grouped_weight: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden": hidden, "ffn": ffn, "experts": experts, "top_k": top_k}
        check_sizes("MoE", dtype, **sizes, **_without_none(shared_ffn=shared_ffn))
        check_numbers("MoE", **_without_none(balance_loss=balance_loss, bias_update_rate=bias_update_rate))
        if shared_gate and shared_ffn is None:
            raise ValueError("MoE: shared_gate is the gate of shared experts; give shared_ffn, their width")
        losses = checked_losses("MoE", losses)
        if balance is not None and bias_update_rate is not None:
            raise ValueError("MoE: bias_update_rate=u is balance=SignBias(u); give one of them")
        self.hidden, self.balance_loss, self.bias_update_rate = hidden, balance_loss, bias_update_rate
        balance = balance if bias_update_rate is None else SignBias(bias_update_rate)
        losses = [*([] if balance_loss is None else [SwitchLoss(balance_loss)]), *losses]
        spec = activation_spec(activation, layout)
        router = partial(Router, hidden, experts, top_k, scores=scores, normalize=normalize, scale=scale)
        router = partial(router, groups=groups, top_groups=top_groups, balance=balance, losses=losses)
        self.router = router(bias=router_bias, device=device, dtype=dtype)
        linear = partial(GroupedLinear, experts, bias=bias, device=device, dtype=dtype)
        single = {"single_grouped_weight": single_grouped_weight, "single_grouped_bias": single_grouped_weight}
        self.experts = _experts(partial(linear, **single), hidden, ffn, experts, spec)
        self.shared: SharedExpert | None = None
        if shared_ffn is not None:
            self.shared = SharedExpert(
                hidden, shared_ffn, spec, gated=shared_gate, bias=bias, device=device, dtype=dtype
            )

    @property
    def load(self) -> Tensor | None:
        """The load that :meth:`update_bias` will read, int64 [E]; None if there is no bias."""
        return self.router.load

    def reset_parameters(self) -> None:
        """Draws all parameters anew, and sets the buffers to 0: what a layer needs that was built on ``meta``."""
        self.router.reset_parameters()
        for linear in (op for op in self.experts if isinstance(op, GroupedLinear)):
            linear.reset_parameters()
        if self.shared is not None:
            self.shared.reset_parameters()

    def forward(
        self,
        x: Tensor,
        valid: Tensor | None = None,
        ids: Tensor | None = None,
        sequences: Tensor | int | None = None,
        routes: Routes | None = None,
    ) -> MoEOutput:
        """The output for tokens [..., H].

        Args:
            valid: bool [...], True for a real token. Others go to no expert and are in no count and no loss; shared
                experts see them. A padding mask is ``valid=~mask``.
            ids: whole numbers [..., k]: the experts, given, such as those of another run; see
                :func:`fusible.functional.route`.
            sequences: for :class:`SequenceLoss`: whole numbers [...], which sequence a token is of; or the length of
                all.
            routes: of these tokens [T, H], flattened, from another router; the layer's own is then not asked.
        """
        if not isinstance(x, Tensor) or not x.dim() or x.shape[-1] != self.hidden:
            came = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ArgumentError(f"MoE: x must be tokens [..., {self.hidden}], got {came}")
        tokens = x if x.dim() == 2 else x.reshape(-1, self.hidden)
        router, of_tokens = self.router, {"valid": valid, "ids": ids, "sequences": sequences}
        flat = {name: self._flat(name, x, value) for name, value in of_tokens.items() if value is not None}
        if routes is None:
            routes = router(tokens, **flat)
        elif flat:
            raise ArgumentError(f"MoE: routes are already made, so {', '.join(flat)} cannot be given with them")
        else:
            self._check_routes(routes, tokens)
        assert routes is not None
        y = self.experts(tokens, top_k_index=routes.top_k_index, top_k_weights=routes.top_k_weights)
        if self.shared is not None:
            y = y + self.shared(tokens)
        y = router.count(y, routes)
        return MoEOutput(y if tokens is x else y.view(x.shape), routes.loss, routes.tokens_per_expert)

    def _check_routes(self, routes: object, tokens: Tensor) -> None:
        """Raises for routes of other tokens, or of a router with another number of experts."""
        if not isinstance(routes, Routes):
            raise ArgumentError(f"MoE: routes must be those that a Router returns, got a {type(routes).__name__}")
        sizes = (len(tokens), self.router.num_experts)
        if routes.logits.shape != sizes:
            raise ArgumentError(
                "MoE: routes must be of the tokens, flattened, and of a router with as many experts: T={}, E={}; "
                "got T={}, E={}".format(*sizes, *routes.logits.shape)
            )

    def _flat(self, name: str, x: Tensor, value: T) -> T | Tensor:
        """Reshapes an argument to one row per token, as the router takes it."""
        if not isinstance(value, Tensor):
            return value
        of_token = (self.router.top_k,) if name == "ids" else ()
        if value.shape != (*x.shape[:-1], *of_token):
            dims = ", ".join(map(str, ("...", *of_token)))
            fits = f"as the tokens [..., {self.hidden}]: {[*x.shape[:-1], *of_token]}"
            raise ArgumentError(f"MoE: {name} must be [{dims}], {fits}; got {list(value.shape)}")
        return value.reshape(-1, *of_token)

    @torch.no_grad()
    def update_bias(self, group: ProcessGroup | None = None) -> None:
        """Moves the selection bias towards an even load. Call it once per optimiser step.

        It looks at ``load``, the tokens since the last update, and resets it. Calls in training mode that record
        gradients count, once each under activation checkpointing.

        Args:
            group: the ranks whose tokens count, as ``torch.distributed`` takes it. None: this process alone.

        Raises:
            RuntimeError: the layer was built without ``bias_update_rate`` or ``balance``.
        """
        if self.router.balance is None:
            raise RuntimeError("MoE: there is no selection bias; build the layer with bias_update_rate, such as 1e-3")
        self.router.update_bias(group)

    def extra_repr(self) -> str:
        options = {"balance_loss": self.balance_loss, "bias_update_rate": self.bias_update_rate}
        return ", ".join([f"{name}={value}" for name, value in options.items() if value is not None])


def _without_none(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}


def _experts(
    linear: Callable[[int, int], GroupedLinear], hidden: int, ffn: int, experts: int, spec: ActivationSpec
) -> Sequential:
    """The experts of a layer; ``linear(in, out)`` makes the linears."""
    columns = 2 * ffn if spec.gated else ffn
    return Sequential(
        OrderedDict(
            dispatch=Dispatch(experts),
            up=linear(hidden, columns),
            activation=activation_op(spec),
            down=linear(ffn, hidden),
            scale=Scale(),
            combine=Combine(),
        )
    )
