"""A mixture-of-experts layer: router, experts as one fused op, shared experts, load balancing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

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
from .balance import balance_loss, balancing_step, tokens_per_expert
from .router import Router, Routes
from .shared_expert import SharedExpert
from .token_count import TokenCount


@serialized_as("fusible.MoEOutput")
class MoEOutput(NamedTuple):
    """What :class:`MoE` returns.

    Attributes:
        y: the output, in the shape of the input.
        balance_loss: to be added to the loss of the model; None if the layer was built without.
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
        scores: ``"softmax"`` or ``"sigmoid"``; see :class:`Router`, as for the next four.
        normalize: the weights of a token add up to ``scale``.
        scale: a factor of all weights.
        groups: of experts; a token chooses from ``top_groups`` of them.
        top_groups: see there.
        balance_loss: alpha of the load-balancing loss of the Switch Transformer, ``alpha * E * sum of f_i P_i``
            (arxiv 2101.03961, equation 4), which each call then returns. None: there is none.
        bias_update_rate: how far :meth:`update_bias` moves the selection bias of an expert (arxiv 2408.15664). None:
            there is no such bias.
        shared_ffn: F of the shared experts together, which every token passes. None: there are none.
        shared_gate: the shared experts are multiplied by ``sigmoid(gate @ x)``.
        single_grouped_weight: each linear of the experts has one parameter ``weight`` [E, out, in]; else ``weight0``,
            ``weight1``, … [out, in], and so of its biases, for optimisers of matrices.

    Raises:
        ArgumentError: sizes that are not positive ints; factors that are no numbers; in a call, tokens that are not
            [..., H].
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
        normalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        balance_loss: float | None = None,
        bias_update_rate: float | None = None,
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
        self.hidden, self.balance_loss, self.bias_update_rate = hidden, balance_loss, bias_update_rate
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        choice: dict[str, Any] = {"scores": scores, "normalize": normalize, "scale": scale}
        choice |= {"groups": groups, "top_groups": top_groups, "selection_bias": bias_update_rate is not None}
        spec = activation_spec(activation, layout)
        self.router = Router(hidden, experts, top_k, **choice, **factory)
        single = {"single_grouped_weight": single_grouped_weight, "single_grouped_bias": single_grouped_weight}
        self.experts = _experts(hidden, ffn, experts, spec, {"bias": bias, **single, **factory})
        self.shared: SharedExpert | None = None
        if shared_ffn is not None:
            self.shared = SharedExpert(hidden, shared_ffn, spec, gated=shared_gate, bias=bias, **factory)
        self.token_count = None if bias_update_rate is None else TokenCount(experts, device)

    @property
    def load(self) -> Tensor | None:
        """int64 [E]: what :meth:`update_bias` will look at; None if there is no bias."""
        bias, count = self.router.selection_bias, self.token_count
        return None if bias is None or count is None else count.load_on(bias.device)

    def reset_parameters(self) -> None:
        """Draws all parameters anew, and sets the buffers to 0: what a layer needs that was built on ``meta``."""
        self.router.reset_parameters()
        for linear in (op for op in self.experts if isinstance(op, GroupedLinear)):
            linear.reset_parameters()
        if self.shared is not None:
            self.shared.reset_parameters()
        if (load := self.load) is not None:
            load.zero_()

    def forward(self, x: Tensor) -> MoEOutput:
        """The output for tokens [..., H]."""
        if not isinstance(x, Tensor) or not x.dim() or x.shape[-1] != self.hidden:
            came = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise ArgumentError(f"MoE: x must be tokens [..., {self.hidden}], got {came}")
        tokens = x.reshape(-1, self.hidden)
        routes = self.router(tokens)
        counts = tokens_per_expert(routes.top_k_index, self.router.num_experts)
        y = self.experts(tokens, top_k_index=routes.top_k_index, top_k_weights=routes.top_k_weights)
        if self.shared is not None:
            y = y + self.shared(tokens)
        if self.token_count is not None:
            y = self.token_count(y, counts)
        return MoEOutput(y.view(x.shape), self._loss(routes), counts)

    def _loss(self, routes: Routes) -> Tensor | None:
        if self.balance_loss is None:
            return None
        return self.balance_loss * balance_loss(routes.probabilities, routes.top_k_index)

    @torch.no_grad()
    def update_bias(self, group: Any = None) -> None:
        """Moves the selection bias towards an even load. Call it once per optimiser step.

        It looks at ``load``, the tokens since the last update, and resets it. Calls in training mode that record
        gradients count, once each under activation checkpointing.

        Args:
            group: the ranks whose tokens count, as ``torch.distributed`` takes it. None: this process alone.

        Raises:
            RuntimeError: the layer was built without ``bias_update_rate``.
        """
        bias, load, rate = self.router.selection_bias, self.load, self.bias_update_rate
        if bias is None or load is None or rate is None:
            raise RuntimeError("MoE: there is no selection bias; build the layer with bias_update_rate, such as 1e-3")
        if group is not None:
            torch.distributed.all_reduce(load, group=group)
        bias.add_(balancing_step(load, rate))
        load.zero_()

    def extra_repr(self) -> str:
        options = {"balance_loss": self.balance_loss, "bias_update_rate": self.bias_update_rate}
        return ", ".join([f"{name}={value}" for name, value in options.items() if value is not None])


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _experts(hidden: int, ffn: int, experts: int, spec: ActivationSpec, options: dict[str, Any]) -> Sequential:
    """Those of a layer; the options are of its linears."""
    columns = 2 * ffn if spec.gated else ffn
    return Sequential(
        OrderedDict(
            dispatch=Dispatch(experts),
            up=GroupedLinear(experts, hidden, columns, **options),
            activation=activation_op(spec),
            down=GroupedLinear(experts, ffn, hidden, **options),
            scale=Scale(),
            combine=Combine(),
        )
    )
