"""``routed_experts``: the experts of a routed layer as a function, on weights that the caller owns.

It runs a container of the same ops as a layer would, so that the same fusions fire. The linears of the container own
nothing: a call lends them its weights. Containers that no call uses wait in a pool, one or more for each form of
weights. A call takes one for itself, so threads and nested calls never share one.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import ArgumentError, Sequential
from ...fuser.contract.config import Config, constant, use_config
from ...fuser.contract.tracing import has_no_data
from ..basic.glu import Activated
from ..basic.named_activation import activation_op, activation_spec
from ..basic.scale import Scale
from ..grouped.grouped_linear import GroupedLinear
from ..values.activation_spec import ActivationSpec, Interleaved
from .moe import Combine, Dispatch


def routed_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str | Activated = "swiglu",
    layout: str | Interleaved = "concat",
    transposed: bool = False,
) -> Tensor:
    """``y[t] = sum over j of top_k_weights[t, j] * expert(top_k_index[t, j], x[t])``.

    An expert e is ``w_down[e] @ act(w_up[e] @ x + up_bias[e]) + down_bias[e]``. N is 2 F if the activation has a gate,
    else F. No weight is copied. All arguments but the ids are differentiable: gradients flow into the given tensors,
    parameters or not. The order of every sum is fixed, so the same input gives the same bits.

    Args:
        x: [T, H], the tokens.
        top_k_index: int32 or int64 [T, k], the experts of each token, k at least 1. An id below 0, or of E or more,
            belongs to no expert and adds nothing, so a rank of expert parallelism may pass ids of other ranks.
        top_k_weights: floating-point [T, k].
        w_up: [E, N, H], in the dtype of ``x`` unless autocast is on.
        w_down: [E, H, F].
        up_bias: [E, N].
        down_bias: [E, H].
        activation: ``"swiglu"``, ``"geglu"``, ``"geglu_tanh"``, ``"qgeglu"``, ``"reglu"``, ``"sreglu"``,
            ``"clamped_swiglu"``, a name that :class:`Activation` takes, or an op such as ``ClampedSwiGLU(limit=5.0)``.
        layout: the order of the N rows of gate and up in ``w_up``: ``"concat"``, gate first, or :func:`interleaved`.
        transposed: the weights are stored as [E, H, N] and [E, F, H], and are read in that layout.

    Returns:
        [T, H], in the dtype of ``x``, or that of autocast.

    Raises:
        ArgumentError: the tensors do not fit one another.
        ValueError: an unknown activation or layout.

    >>> import torch, fusible
    >>> x, up, down = torch.randn(5, 8), torch.randn(4, 32, 8), torch.randn(4, 8, 16)
    >>> scores, ids = torch.rand(5, 4).topk(2)
    >>> fusible.functional.routed_experts(x, ids, scores, up, down).shape
    torch.Size([5, 8])
    """
    spec, experts = activation_spec(activation, layout), _Experts(w_up, w_down, up_bias, down_bias)
    if torch.compiler.is_dynamo_compiling():
        return _traced(spec, transposed, x, top_k_index, top_k_weights, *experts)
    _check(x, experts, spec, transposed)
    key = _PoolKey.of(experts, spec, transposed)
    if has_no_data(x):  # traced tensors must not stay in a pool
        return _Container(key).run(experts, x, top_k_index, top_k_weights)
    container = _pool.take(key)
    try:
        return container.run(experts, x, top_k_index, top_k_weights)
    finally:
        _pool.give_back(key, container)


class _Experts(NamedTuple):
    """The tensors of all experts."""

    w_up: Tensor
    w_down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


class _PoolKey(NamedTuple):
    """The form of weights and activation that a container is built for."""

    up: torch.Size
    down: torch.Size
    dtype: torch.dtype
    has_bias: tuple[bool, bool]
    spec: ActivationSpec
    transposed: bool

    @classmethod
    def of(cls, experts: _Experts, spec: ActivationSpec, transposed: bool) -> _PoolKey:
        up, down, up_bias, down_bias = experts
        return cls(up.shape, down.shape, up.dtype, (up_bias is not None, down_bias is not None), spec, transposed)


class LentLinear(GroupedLinear):
    """A grouped linear on tensors that a call lends it. Between calls it has parameters without data."""

    promises = GroupedLinear.promises

    def reset_parameters(self) -> None:
        """Does nothing, as there is no data."""
        self._forms = dict(self._parameters)

    def lend(self, weight: Tensor, bias: Tensor | None) -> None:
        """Puts tensors in the place of the parameters; they need not be ``nn.Parameter``."""
        parameters: dict[str, Any] = self._parameters
        parameters["weight"] = weight
        if bias is not None:
            parameters["bias"] = bias

    def let_go(self) -> None:
        """Drops the tensors. The backward only asks parameters for their dtype, which stays."""
        self._parameters.update(self._forms)


class _Container:
    """The ops of a routed layer, for weights of one form."""

    def __init__(self, key: _PoolKey) -> None:
        self.up = _linear(key.up, key.has_bias[0], key)
        self.down = _linear(key.down, key.has_bias[1], key)
        self.ops = Sequential(
            OrderedDict(
                dispatch=Dispatch(self.up.num_groups),
                up=self.up,
                activation=activation_op(key.spec),
                down=self.down,
                scale=Scale(),
                combine=Combine(),
            )
        )

    def run(self, experts: _Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Runs the layer; returns [T, H]. Holds the tensors only while it runs."""
        try:
            self.up.lend(experts.w_up, experts.up_bias)
            self.down.lend(experts.w_down, experts.down_bias)
            y: Tensor = self.ops(x, top_k_index=top_k_index, top_k_weights=top_k_weights)
            return y
        except ArgumentError as error:
            raise error.located("routed_experts") from None
        finally:
            self.up.let_go()
            self.down.let_go()


def _linear(shape: torch.Size, bias: bool, key: _PoolKey) -> LentLinear:
    groups, *matrix = map(int, shape)  # a compiler may have made symbols of them, which it gives up here
    sizes = matrix if key.transposed else matrix[::-1]
    return LentLinear(groups, *sizes, bias=bias, device="meta", dtype=key.dtype, transposed_weight=key.transposed)


class _Pool:
    """Idle containers, by the form that they are built for."""

    def __init__(self, size: int) -> None:
        self._idle: dict[_PoolKey, list[_Container]] = {}
        self._size = size

    def take(self, key: _PoolKey) -> _Container:
        """A container for exclusive use until it is given back."""
        try:
            return self._idle[key].pop()
        except LookupError:
            return _Container(key)

    def give_back(self, key: _PoolKey, container: _Container) -> None:
        """Keeps a container for the next call. If there are too many forms, all idle ones are dropped."""
        if len(self._idle) >= self._size and key not in self._idle:
            self._idle.clear()
        self._idle.setdefault(key, []).append(container)


_pool = _Pool(64)


def _check(x: Tensor, experts: _Experts, spec: ActivationSpec, transposed: bool) -> None:
    """Checks the arguments that have other names in the ops; the ops check the rest."""
    for name, tensor in (("x", x), *experts._asdict().items()):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("x", "w_up", "w_down")):
            raise ArgumentError(f"routed_experts: {name} must be a tensor, got a {type(tensor).__name__}")
    up, down, up_bias, down_bias = experts
    if up.dim() != 3:
        wanted = "[E, H, N]" if transposed else "[E, N, H]"
        raise ArgumentError(f"routed_experts: w_up must be {wanted}, got shape {list(up.shape)}")
    groups, rows, columns = up.mT.shape if transposed else up.shape
    if spec.gated and rows % (2 * (spec.block or 1)):
        parts = f"blocks of {spec.block} rows of gate and up" if spec.block else "gate and up"
        raise ArgumentError(f"routed_experts: w_up must have {parts} for {spec.name}, got shape {list(up.shape)}")
    width = spec.out_features(rows)
    _check_form("w_down", down, (groups, width, columns) if transposed else (groups, columns, width), up)
    _check_form("up_bias", up_bias, (groups, rows), up)
    _check_form("down_bias", down_bias, (groups, columns), up)


def _check_form(name: str, tensor: Tensor | None, shape: tuple[int, ...], up: Tensor) -> None:
    if tensor is not None and (tensor.shape != shape or tensor.dtype != up.dtype):
        raise ArgumentError(
            f"routed_experts: {name} must be {list(shape)}, {up.dtype}, to fit w_up {list(up.shape)}, "
            f"got {list(tensor.shape)}, {tensor.dtype}"
        )


def _traced(spec: ActivationSpec, transposed: bool, *tensors: Tensor | None) -> Tensor:
    """The call under Dynamo: a node of the graph, with the current switches."""
    from ...fuser.dynamo.frontend import active_flags, constant_value

    _register_with_dynamo()
    y: Tensor = _in_graph(constant_value(spec), transposed, _name_switches(active_flags()), *tensors)
    return y


_switches: dict[str, Config] = {}  # of compiled calls, by their names


@constant
def _name_switches(flags: tuple[tuple[str, Any], ...]) -> str:
    """A name for switches, which a graph can store."""
    from ...fuser.dynamo.steps import switches_of

    switches = switches_of(flags)
    _switches[repr(switches)] = switches
    return repr(switches)


def _in_graph(spec: tuple[Any, ...], transposed: bool, switches: str, *tensors: Any) -> Tensor:
    """:func:`routed_experts` on values that graphs can store; AOTAutograd traces through it, down to custom ops."""
    x, top_k_index, top_k_weights, *weights = tensors
    experts, activation = _Experts(*weights), ActivationSpec(*spec)
    _check(x, experts, activation, transposed)
    container = _Container(_PoolKey.of(experts, activation, transposed))
    with use_config(_switches[switches]):
        return container.run(experts, x, top_k_index, top_k_weights)


@constant
def _register_with_dynamo() -> None:
    """Registers the call with Dynamo when it is first traced, as its decorator imports the compiler."""
    torch.compiler.allow_in_graph(_in_graph)  # type: ignore[no-untyped-call]
