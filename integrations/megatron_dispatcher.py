"""Megatron-Core's flex token dispatcher on the exchanges of :mod:`fusible.ep`.

    from fusible.integrations import megatron_dispatcher

    megatron_dispatcher.install()    # before the model is built

Then every MoE layer with ``moe_token_dispatcher_type="flex"`` moves its tokens through a :class:`fusible.ep.Group`,
whichever ``moe_flex_dispatcher_backend`` it names.
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher, MoETokenDispatcher, _DispatchManager
from torch import Tensor

from . import transformer_engine
from .exchanges.shared_exchange import ExchangeOps, ExchangeOptions, exchange_ops

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.distributed import ProcessGroup

__all__ = ["FusibleDispatchManager", "FusibleFlexTokenDispatcher", "install", "uninstall"]

LAYER = "megatron.core.transformer.moe.moe_layer"


class FusibleDispatchManager(_DispatchManager):  # type: ignore[misc]
    """Moves the tokens of one layer; all layers of a process share a group.

    A token's experts are in the order of probabilities, which travel with the rows: Megatron applies them in the
    experts. Slots without a chosen expert, such as those of dropped tokens, get no expert.
    """

    def __init__(self, process_group: ProcessGroup, top_k: int, num_experts: int, options: ExchangeOptions) -> None:
        self._process_group, self._top_k, self._num_experts = process_group, top_k, num_experts
        self._options = options
        self._ops: ExchangeOps | None = None
        self.token_probs: Tensor | None = None
        self.token_indices: Tensor | None = None
        self.dispatched_probs: Tensor | None = None
        self._tokens_per_expert: Tensor | None = None
        self._row_of_slot: Tensor | None = None

    def setup_metadata(self, routing_map: Tensor, probs: Tensor) -> None:
        """Notes the experts of each token [T, k] and their probabilities, from the dense [T, ...] of all experts."""
        chosen = routing_map.reshape(-1, self._num_experts)
        dense = probs.reshape(-1, self._num_experts).masked_fill(~chosen, -1.0)
        top, index = dense.topk(self._top_k, dim=-1)
        none = top < 0
        self.token_probs, self.token_indices = top.masked_fill(none, 0.0), index.masked_fill(none, -1)

    def dispatch(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Sends tokens [T, H] of this rank to the ranks of their experts; returns rows [Q, H], sorted by expert."""
        ops = self._ops = exchange_ops(
            *(self._process_group, self._num_experts, self._top_k),
            *(hidden_states.shape[-1], hidden_states.dtype, self._options),
        )
        rows: Tensor
        rows, self._tokens_per_expert, self.dispatched_probs, self._row_of_slot = ops.dispatch(
            hidden_states, top_k_index=self.token_indices, top_k_weights=self.token_probs
        )
        return rows

    def get_permuted_hidden_states_by_experts(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """The received rows, unchanged, and the probability of each."""
        return hidden_states, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> Tensor:
        """The number of rows of each local expert, int64 [E / ranks] on the device of the rows."""
        assert self._tokens_per_expert is not None
        return self._tokens_per_expert.long()

    def get_restored_hidden_states_by_experts(self, hidden_states: Tensor) -> Tensor:
        """The experts' rows, unchanged."""
        return hidden_states

    def combine(self, hidden_states: Tensor, async_finish: bool = True, on_comm_stream: bool = True) -> Tensor:
        """Sends rows [Q, H] of the experts back; returns tokens [T, H], each the sum of its rows."""
        assert self._ops is not None
        sums: Tensor = self._ops.combine(hidden_states, row_of_slot=self._row_of_slot)
        self.dispatched_probs = self._tokens_per_expert = self._row_of_slot = None
        return sums

    def row_buffer(self) -> Tensor | None:
        """Memory [Q, H] for the rows that :meth:`combine` reads; None if any memory will do."""
        return None if self._ops is None else self._ops.group.row_buffer()


class FusibleFlexTokenDispatcher(MoEFlexTokenDispatcher):  # type: ignore[misc]
    """Megatron's flex dispatcher with :class:`FusibleDispatchManager` as its backend.

    Args:
        options: options of the exchanges. The capacity defaults to ``moe_expert_rank_capacity_factor`` if Megatron has
            it, else to the number of rows that arrive.

    Raises:
        ValueError: the configuration pads the tokens of experts, or its experts need padded rows.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: list[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        options: ExchangeOptions | None = None,
    ) -> None:
        for name in ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization"):
            if getattr(config, name, False):
                raise ValueError(f"fusible's flex dispatcher pads no expert's tokens: {name} must be off")
        options = _with_capacity(options or ExchangeOptions(), config)
        _refuse_experts_in_blocks(config, options)
        MoETokenDispatcher.__init__(self, config=config, pg_collection=pg_collection)
        self.num_local_experts, self.local_expert_indices = num_local_experts, local_expert_indices
        self._comm_manager = FusibleDispatchManager(
            self.tp_ep_group, self.tp_size * config.moe_router_topk, self.tp_size * config.num_moe_experts, options
        )
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.token_indices"]

    def get_expert_zero_copy_buffers(self) -> tuple[Tensor | None, None]:
        """Memory for the experts' output that other ranks read directly, if the transport has some.

        The gradient of the input is copied instead: it would share that memory, which one call of a container cannot
        use twice.
        """
        return self._comm_manager.row_buffer(), None


def install(layer: ModuleType | None = None, **options: Any) -> None:
    """Makes MoE layers of Megatron that are built from now on use :class:`FusibleFlexTokenDispatcher` for flex.

    Args:
        layer: the module of ``MoELayer``; that of the installed Megatron-Core by default.
        options: arguments of :class:`fusible.ep.Group`: ``max_tokens``, ``capacity``, ``combine``, ``transport``,
            ``timeout``. ``max_tokens`` is only needed with a fixed capacity.
    """
    module: Any = layer if layer is not None else import_module(LAYER)
    module.MoEFlexTokenDispatcher = partial(FusibleFlexTokenDispatcher, options=ExchangeOptions(**options))


def uninstall(layer: ModuleType | None = None) -> None:
    """Undoes :func:`install`, for layers that are built from then on."""
    module: Any = layer if layer is not None else import_module(LAYER)
    module.MoEFlexTokenDispatcher = MoEFlexTokenDispatcher


def _refuse_experts_in_blocks(config: TransformerConfig, options: ExchangeOptions) -> None:
    """Raises if TransformerEngine's experts multiply blocks of rows but Megatron does not pad our rows to them.

    Megatron splits the rows by their numbers on the host, so there may be no rows after the last expert's. For two of
    its own backends it assumes that the rows are padded.
    """
    needs = [name for name in ("fp8", "fp4", "moe_use_grouped_tensor") if getattr(config, name, None)]
    experts = sys.modules.get(transformer_engine.EXPERTS)
    is_ours = transformer_engine.is_installed(experts) and config.use_transformer_engine_op_fuser
    if not needs or is_ours:
        return
    backend = config.moe_flex_dispatcher_backend
    if backend in ("hybridep", "ncclep"):
        why = f"pads rows of moe_flex_dispatcher_backend={backend!r} nowhere, ours neither"
    elif options.capacity != "exact":
        why = f"cannot pad rows of a fixed capacity, which came as {options.capacity!r}"
    else:
        return
    raise ValueError(
        f"experts with {' and '.join(needs)} read blocks of rows, and Megatron {why}: call "
        "fusible.integrations.transformer_engine.install() before the model is built, with "
        "use_transformer_engine_op_fuser, or leave moe_flex_dispatcher_backend and the capacity at their defaults"
    )


def _with_capacity(options: ExchangeOptions, config: TransformerConfig) -> ExchangeOptions:
    factor = getattr(config, "moe_expert_rank_capacity_factor", None)
    if factor is None or options.capacity != "exact":
        return options
    return options._replace(capacity=float(factor))
