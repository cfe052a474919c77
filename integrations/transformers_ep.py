"""The expert parallelism ``"fusible"`` for transformers 5.24 or newer; importing this module registers it.

``import fusible`` imports it in programs that import transformers' models.

    config = DistributedConfig(fsdp_size=8, ep_size=8, ep_implementation="fusible")
    AutoModelForCausalLM.from_pretrained(name, experts_implementation="fusible", distributed_config=config)

``"fusible"`` exchanges as many rows as come, by collectives. ``"fusible_symmetric"`` exchanges a fixed number of rows
between the GPUs of one host. :func:`register` makes other names.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import AllReduceEP, EPImplementation, EPImplementationInterface

from ..fuser import ArgumentError, Sequential
from ..fuser.explain.model import LayerContainer, add_finder
from ..ops.ep import EPCombine, EPDispatch
from .exchanges import experts_by_rows
from .exchanges.shared_exchange import ExchangeOps, ExchangeOptions, agreed_tokens, exchange_ops
from .hugging_face.experts import ModuleParameters, _key, _put, autocasts, layer_like, refusal

EXPERTS = "fusible"  # the experts implementation that becomes one op with its exchange
CAPACITY = 1.5  # of "fusible_symmetric", whose layers keep as many rows as fit
_ATTRIBUTE = "_fusible_ep"  # of the module, where neither its children nor its state_dict show it


class FusibleEP(EPImplementation):  # type: ignore[misc]
    """Sends tokens to the ranks of their experts and back through a :class:`fusible.ep.Group` that layers share.

    Experts that run as ``"fusible"`` are one fused op with it; other experts get rows. Ranks of a tensor-parallel group
    have one batch: each takes a part of it, and gathers the results. If they are all ranks, and no gradients are
    wanted, no token travels: each runs its experts on the batch, and outputs are summed.

    Deep copies and pickles of the module leave it out.

    Attributes:
        options: the options of the exchange. ``max_tokens=None`` with a fixed capacity: ranks agree on the largest
            number of tokens in the first call.
    """

    options = ExchangeOptions()

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self._experts = experts
        self._shared = AllReduceEP(experts, ep_mesh, tp_mesh) if self.shares_batch else None
        self._built: tuple[tuple[object, ...], Sequential] | None = None
        self._last: Sequential | str | None = "no call yet"
        experts.__dict__[_ATTRIBUTE] = self

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the experts of all ranks on the tokens of this rank.

        Args:
            hidden_states: [T, H].
            top_k_index: int [T, k], global ids.
            top_k_weights: [T, k].

        Returns:
            [T, H], in the dtype of ``hidden_states``.

        Raises:
            ArgumentError: more tokens than in the first call, if the first call fixed their number.
            CapacityError: a rank would own more rows than there is room for.
            PeerError: a rank did not take part, or did something else.
        """
        tensors = hidden_states, top_k_index, top_k_weights
        if self._shared is not None and not (torch.is_grad_enabled() and hidden_states.requires_grad):
            self._last = None
            summed: Tensor = self._shared(*tensors)
            return summed
        y = self._exchanged(*(self._part(tensor) for tensor in tensors))
        return self._whole(y, hidden_states.shape)

    def explained(self) -> LayerContainer | str | None:
        """The container of the last call, or the reason why there is none; None if the experts ran alone."""
        return LayerContainer(self._last) if isinstance(self._last, Sequential) else self._last

    def __reduce_ex__(self, protocol: object) -> tuple[type[None], tuple[()]]:
        return (type(None), ())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _exchanged(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        parameters = ModuleParameters.of(self._experts)
        why = self._rows_because(parameters)
        dtype = x.dtype if why is not None else parameters.up.dtype
        if autocasts(x):
            dtype = torch.get_autocast_dtype(x.device.type)
        ops = self._ops(x, ids, dtype)
        if why is None:
            return self._fused(ops, parameters, x.to(dtype), ids, weights).to(x.dtype)
        self._last = f"{self._experts.config._experts_implementation!r} runs on the rows of an exchange: {why}"
        tensors = x.to(dtype), ids, weights
        return experts_by_rows.run(ops, self.experts_forward, self.num_local_experts, *tensors).to(x.dtype)

    def _rows_because(self, parameters: ModuleParameters) -> str | None:
        """The reason why the experts are no fused op with the exchange, or None."""
        implementation = self._experts.config._experts_implementation
        if implementation != EXPERTS:
            return f"experts_implementation={EXPERTS!r} would be one op with it"
        return refusal(self._experts, parameters)

    def _ops(self, x: Tensor, ids: Tensor, dtype: torch.dtype) -> ExchangeOps:
        """The exchange of this call, which layers share; the first call for it is collective."""
        experts = self.num_local_experts * self.ep_mesh.size()
        exchange = self.ep_mesh.get_group(), experts, ids.shape[1], x.shape[1], dtype, self.options
        most = agreed_tokens(x, *exchange) if self.options.needs_tokens else None
        if most is not None and x.shape[0] > most:
            raise ArgumentError(
                f"ep_implementation: this rank has {x.shape[0]} tokens, and no rank had more than {most} in the first "
                "call, which has fixed the memory of the exchange; give the largest number in advance: "
                f"fusible.integrations.transformers_ep.register(NAME, max_tokens={x.shape[0]}, ...)"
            )
        return exchange_ops(*exchange[:-1], self.options if most is None else self.options._replace(max_tokens=most))

    def _fused(self, ops: ExchangeOps, parameters: ModuleParameters, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The experts and their exchange as one op, on parameters that are lent for the call."""
        container = self._last = self._container(ops, parameters)
        _put(container, parameters)
        try:
            y: Tensor = container(x, top_k_index=ids, top_k_weights=weights)
            return y
        finally:  # FSDP frees what it has gathered
            _put(container, ModuleParameters._make(map(_without_data, parameters)))

    def _container(self, ops: ExchangeOps, parameters: ModuleParameters) -> Sequential:
        key = ops.group, parameters.up.dtype, *_key(self._experts, parameters)
        if self._built is None or self._built[0] != key:
            steps = OrderedDict(layer_like(self._experts, parameters)._modules)
            steps |= {"dispatch": EPDispatch(ops.group), "combine": EPCombine(ops.group)}
            self._built = key, Sequential(steps)
        return self._built[1]

    def _part(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that the ranks of a tensor-parallel group have; the backward gathers."""
        if self.tp_mesh.size() == 1:
            return tensor
        whole = DTensor.from_local(tensor, self.tp_mesh, [Replicate()], run_check=False)
        return whole.redistribute(self.tp_mesh, [Shard(0)]).to_local()

    def _whole(self, y: Tensor, shape: torch.Size) -> Tensor:
        """The parts of all ranks of a tensor-parallel group."""
        if self.tp_mesh.size() == 1:
            return y
        part, stride = y.contiguous(), (shape[1], 1)
        return DTensor.from_local(part, self.tp_mesh, [Shard(0)], shape=shape, stride=stride).full_tensor()


def register(name: str, **options: Any) -> None:
    """Makes ``ep_implementation=name`` an exchange with other options.

    Args:
        name: replaces an implementation of that name.
        options: of :class:`~fusible.integrations.exchanges.shared_exchange.ExchangeOptions`, by name:
            ``register("mine", transport="symmetric", capacity=2.0, max_tokens=8192)``.
    """
    kind = type(FusibleEP.__name__, (FusibleEP,), {"options": ExchangeOptions(**options), "__doc__": FusibleEP.__doc__})
    EPImplementationInterface.register(name, kind)


def _without_data(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def _explained(module: nn.Module) -> LayerContainer | str | None:
    implementation: FusibleEP | None = module.__dict__.get(_ATTRIBUTE)
    return None if implementation is None else implementation.explained()


register("fusible")
register("fusible_symmetric", transport="symmetric", capacity=CAPACITY)
add_finder(_explained)
