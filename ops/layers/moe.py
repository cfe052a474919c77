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
        balance_loss: the sum of the router's losses, to be added to the model's loss; None if the router has none.
        tokens_per_expert: int64 [E], the number of tokens that each expert got in this call.
    """

    y: Tensor
    balance_loss: Tensor | None
    tokens_per_expert: Tensor


class MoE(nn.Module):
    """A layer of experts ``down(act(up(x)))``. Every token goes to ``top_k`` of them; no token is dropped.

    ``experts`` is a :class:`Sequential`, so ``layer.experts.explain()`` says what runs. The host never waits for the
    device.

    Args:
        hidden: H, the width of a token.
        ffn: F, the width inside an expert.
        experts: E, the number of experts.
        top_k: the number of experts that a token goes to.
        activation: the experts' activation, as for :func:`fusible.functional.routed_experts`.
        layout: the order of gate and up, as for :func:`fusible.functional.routed_experts`.
        bias: whether the linears of the experts have biases.
        scores: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``, as for :class:`Router`.
        normalize: whether the weights of a token add up to ``scale``. None: if ``top_k`` is above 1.
        scale: a factor of all weights.
        groups: the groups of experts, as a :class:`Groups` or as their number.
        top_groups: with a number of groups, how many of them a token chooses from.
        balance_loss: alpha of the load-balancing loss of the Switch Transformer, ``alpha * E * sum of f_i P_i`` (arxiv
            2101.03961, equation 4), which each call then returns. None: no such loss.
        losses: further losses, as for :class:`Router`.
        bias_update_rate: the step by which :meth:`update_bias` moves the selection bias of an expert (arxiv
            2408.15664): ``balance=SignBias(rate)``. None: no selection bias.
        balance: another rule for the selection bias, as for :class:`Router`.
        router_bias: whether the logits have a bias, a parameter [E].
        shared_ffn: the width of the shared experts together, which every token passes. None: no shared experts.
        shared_gate: whether the output of the shared experts is multiplied by ``sigmoid(gate @ x)``.
        single_grouped_weight: whether each linear of the experts has one parameter ``weight`` [E, out, in]. Otherwise
            it has ``weight0``, ``weight1``, … [out, in], and biases alike, for optimisers of matrices.

    Raises:
        ArgumentError: a size is not a positive int, or a factor is not a number; in a call, tokens are not [..., H], or
            ``valid`` or ``ids`` do not fit the tokens.
        ValueError: an unknown activation, layout or scores; more choices than experts.

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
        """The load that :meth:`update_bias` will read, int64 [E]; None without a selection bias."""
        return self.router.load

    def reset_parameters(self) -> None:
        """Draws all parameters anew and sets the buffers to 0, for a layer that was built on ``meta``."""
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
        """Runs the layer on tokens [..., H].

        Args:
            valid: bool [...], True for a real token. Other tokens go to no expert and enter no count and no loss;
                shared experts see them. A padding mask is ``valid=~mask``.
            ids: whole numbers [..., k], the experts of each token, such as those of another run; see
                :func:`fusible.functional.route`.
            sequences: for :class:`SequenceLoss`: the number of each token's sequence, whole numbers [...]; or the
                length of all sequences.
            routes: the routes of these tokens, flattened to [T, H], from another router; the layer's own router does
                not run.
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

        It reads and resets ``load``, the tokens since the last update. A call in training mode that records gradients
        counts its tokens, once even under activation checkpointing.

        Args:
            group: the ranks whose tokens count, as ``torch.distributed`` takes it. None: only this process.

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
