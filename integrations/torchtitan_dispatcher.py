"""torchtitan's expert parallelism on the exchanges of :mod:`fusible.ep`: an override of its all-to-all token
dispatcher.

    --override.imports fusible.integrations.torchtitan_dispatcher.token_dispatcher

``symmetric_token_dispatcher`` overrides its HybridEP dispatcher and can be captured in torchtitan's CUDA graphs. Both
work with torchtitan's experts and with those of ``fusible.integrations.torchtitan``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import spmd_types as spmd
import torch
from torch import Tensor
from torchtitan.config import derive, override
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    BaseEPTokenDispatcher,
    HybridEPTokenDispatcher,
    LocalTokenDispatcher,
)

from .exchanges.shared_exchange import ExchangeOps, ExchangeOptions, exchange_ops


class Dispatched(NamedTuple):
    """The results of ``dispatch`` that ``combine`` needs.

    Attributes:
        scales: the score of each row, [R].
        row_of_slot: the row of each slot, [T, K], for :class:`fusible.ep.EPCombine`.
    """

    scales: Tensor
    row_of_slot: Tensor


class FusibleTokenDispatcher(BaseEPTokenDispatcher):  # type: ignore[misc]
    """``AllToAllTokenDispatcher`` on a :class:`fusible.ep.Group`, which all layers of a process share.

    Scores are applied to the rows that the experts give, as torchtitan does; the rows of a token are summed in float32
    and rounded once.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config):  # type: ignore[misc]
        exchange: ExchangeOptions = field(default_factory=ExchangeOptions)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._options = config.exchange

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, object]:
        """Sends tokens [T, D] of this rank to the ranks of their experts.

        Returns:
            The rows [R, D] of the local experts, sorted by expert; the number of rows of each, int32 [E / ranks]; and
            the state that :meth:`combine` needs. With a fixed capacity, rows past the last expert's are zero.

        Raises:
            NotImplementedError: torchtitan follows the types of sharded tensors, which ours do not have.
        """
        if self.ep_mesh is None:
            local = LocalTokenDispatcher.dispatch(
                self, x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
            )
            return tuple(local)
        rows, sizes, scales, row_of_slot = self._ops(x_TD).dispatch(
            x_TD, top_k_index=topk_expert_ids_TK, top_k_weights=topk_scores_TK
        )
        return rows, sizes, Dispatched(scales, row_of_slot)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        """Sends rows [R, D] of the experts back; returns tokens [T, D], each the sum of its rows times their scores."""
        if self.ep_mesh is None:
            local: Tensor = LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
            return local
        combine = self._ops(x_TD).weighted_combine
        y: Tensor = combine(routed_output_RD, scales=metadata.scales, row_of_slot=metadata.row_of_slot)
        return y

    def _ops(self, x_TD: Tensor) -> ExchangeOps:
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            raise NotImplementedError(
                "fusible's token dispatcher has no types of sharded tensors; switch torchtitan's checks of them off, "
                "or leave the override token_dispatcher out"
            )
        group = self.ep_mesh.get_group()
        return exchange_ops(group, self.num_experts, self.top_k, x_TD.shape[1], x_TD.dtype, self._options)


@override(  # type: ignore[untyped-decorator]
    target=AllToAllTokenDispatcher.Config, exact=True, description="Token dispatch by fusible.ep."
)
def token_dispatcher(cfg: AllToAllTokenDispatcher.Config, **options: Any) -> FusibleTokenDispatcher.Config:
    """The all-to-all dispatcher of a configuration as :class:`FusibleTokenDispatcher`.

    Args:
        options: of :class:`ExchangeOptions`, by name.
    """
    ours: FusibleTokenDispatcher.Config = derive(
        cfg, FusibleTokenDispatcher.Config, exchange=ExchangeOptions(**options)
    )
    return ours


class FusibleSymmetricTokenDispatcher(FusibleTokenDispatcher):
    """:class:`FusibleTokenDispatcher` as a HybridEP dispatcher that does not wait for the host.

    Its configuration is a HybridEP one: torchtitan captures only those in CUDA graphs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(HybridEPTokenDispatcher.Config):  # type: ignore[misc]
        exchange: ExchangeOptions = field(default_factory=ExchangeOptions)


@override(  # type: ignore[untyped-decorator]
    target=HybridEPTokenDispatcher.Config, exact=True, description="Token dispatch by fusible.ep, in CUDA graphs too."
)
def symmetric_token_dispatcher(
    cfg: HybridEPTokenDispatcher.Config, **options: Any
) -> FusibleSymmetricTokenDispatcher.Config:
    """The HybridEP dispatcher of a configuration as :class:`FusibleSymmetricTokenDispatcher`.

    Args:
        options: of :class:`ExchangeOptions`, by name. The transport is ``"symmetric"`` by default, the capacity
            ``"worst"``, and ``max_tokens`` the maximum that torchtitan has computed for the run.

    Raises:
        ValueError: the configuration pads the tokens of experts.
    """
    if cfg.pad_multiple is not None:
        raise ValueError(f"fusible's token dispatcher pads no expert's tokens: pad_multiple={cfg.pad_multiple} must go")
    asked = {"transport": "symmetric", "capacity": "worst", "max_tokens": cfg.num_max_tokens_per_rank, **options}
    ours: FusibleSymmetricTokenDispatcher.Config = derive(
        cfg, FusibleSymmetricTokenDispatcher.Config, exchange=ExchangeOptions(**asked)
    )
    return ours
