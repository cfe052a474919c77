"""The ``main_grad`` of weights: read anew at every backward, checked before any write, and never kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import is_not, not_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...fuser.contract.stored_values import stores_values
from ...fuser.contract.torch_private import tensor_guards, without_fake_tensors
from ...fuser.contract.tracing import WITHOUT_DATA, has_no_data
from ...fuser.runtime.buffers import extent
from ..kernels import addresses_of
from ..kernels.problems.gemm import Matrices
from ..values.checks import is_free_to_write
from .group import ExpertGroup

_PROTOCOL = "get_main_grad", "main_grad", "overwrite_main_grad", "grad_added_to_main_grad", "zero_out_wgrad"


class Destination(NamedTuple):
    """The destination of weight gradients and the weights' flags; lists have one entry per weight.

    Attributes:
        group: aliases of each ``main_grad``, in the shape of the weight; ``values``: their values, stacked if
            contiguous.
        add: whether the gradient is added to the existing value.
        flagged: whether the weight has ``grad_added_to_main_grad``.
        zeros: whether a stand-in must be zero.
    """

    group: ExpertGroup
    values: Matrices
    add: list[bool]
    flagged: list[bool]
    zeros: bool

    def flag(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sets ``grad_added_to_main_grad`` on the weights that have it."""
        for parameter, flagged in zip(parameters, self.flagged, strict=True):
            if flagged:
                parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]


class _Judged(NamedTuple):
    """Tensors that passed the checks, with the checked facts. ``.data`` and views in place leave ids and addresses.

    ``owners`` drop the entry with a tensor, so ids stay unique.
    """

    ids: list[int]
    addresses: list[int] | bytes
    match: Callable[..., bool]
    kind: tuple[object, ...]
    owners: list[weakref.ref[Tensor]]
    group: ExpertGroup
    values: Matrices

    def fits(self, ids: list[int], kind: tuple[object, ...], grads: Sequence[Tensor]) -> bool:
        """Whether these are the tensors, at their addresses and in their forms."""
        if self.ids != ids or self.kind != kind or self.addresses != _addresses(grads):
            return False
        return self.match(*grads)


class MainGrads:
    """The ``main_grad`` tensors of one op.

    Results of checks are kept while the user's tensors live; a copy starts empty.
    """

    def __init__(self) -> None:
        self._judged: _Judged | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return MainGrads, ()

    def forget(self) -> None:
        """Drops the cached results."""
        self._judged = None

    def of(
        self, op: str, names: Sequence[str], parameters: Sequence[nn.Parameter], read: Iterable[Tensor | None]
    ) -> Destination:
        """The destination of the gradients of the named weights.

        Args:
            op: the class of the op, for errors.
            names: the names of the weights.
            parameters: the weights.
            read: the other tensors that the op reads, which must not be overwritten.

        Raises:
            RuntimeError: a ``main_grad`` is missing, or does not fit.
        """
        fetchers, grads, overwrite, flags, zeros = _attributes(parameters)
        if any(fetchers):
            grads = [g if fetch is None else fetch() for fetch, g in zip(fetchers, grads, strict=True)]
        ids, kind = list(map(id, grads)), (parameters[0].shape, parameters[0].device)
        judged = self._judged
        if judged is None or not judged.fits(ids, kind, grads):
            group = ExpertGroup(tuple([_judge(op, *each) for each in zip(names, parameters, grads, strict=True)]))
            _refuse_overlaps(op, names, group.tensors, [p for p in (*parameters, *read) if p is not None])
            forget = _forget(weakref.ref(self), weakref.ref(group))
            owners = [weakref.ref(grad, forget) for grad in grads]
            addresses, match = _addresses(grads), tensor_guards(grads)
            judged = self._judged = _Judged(ids, addresses, match, kind, owners, group, group.values())
        add, flagged = list(map(not_, overwrite)), list(map(is_not, flags, repeat(None)))
        return Destination(judged.group, judged.values, add, flagged, any(zeros))


def foreseen(
    op: str, names: Sequence[str], parameters: Sequence[nn.Parameter]
) -> tuple[ExpertGroup, list[bool], list[str]]:
    """For ``explain``: the destinations, whether gradients would be added, and the weights without ``main_grad`` yet.

    Caches nothing and calls no ``get_main_grad``. A missing ``main_grad`` is assumed to be float32.

    Raises:
        RuntimeError: a ``main_grad`` does not fit.
    """
    fetchers, grads, overwrite, *_ = _attributes(parameters)
    set_by_user = [grad if fetch is None else None for fetch, grad in zip(fetchers, grads, strict=True)]
    missing = [name for name, grad in zip(names, set_by_user, strict=True) if grad is None]
    tensors: list[Tensor] = []
    for name, parameter, grad in zip(names, parameters, set_by_user, strict=True):
        if grad is None:
            tensors.append(torch.empty_like(parameter, dtype=torch.float32))
            continue
        with without_fake_tensors():  # where tensors of the user lie decides which kernels take them
            tensors.append(_judge(op, name, parameter, grad))
    return ExpertGroup(tuple(tensors)), [not o for o in overwrite], missing


def _attributes(parameters: Sequence[nn.Parameter]) -> list[list[Any]]:
    """Each parameter's ``main_grad`` attributes, or None. Reads ``__dict__``, since a failing getattr is slow."""
    parameter_type, names = nn.Parameter, _PROTOCOL
    attributes = [
        p.__dict__ if type(p) is parameter_type else {name: getattr(p, name, None) for name in names}
        for p in parameters
    ]
    present, nothing = set().union(*attributes), [None] * len(attributes)
    return [list(map(dict.get, attributes, repeat(name))) if name in present else nothing for name in names]


def _forget(
    main_grads: weakref.ref[MainGrads], group: weakref.ref[ExpertGroup]
) -> Callable[[weakref.ref[Tensor]], None]:
    """A callback that drops the aliases of a group once one of their tensors is freed."""

    def forget(_: weakref.ref[Tensor]) -> None:
        holder = main_grads()
        if holder is not None and holder._judged is not None and holder._judged.group is group():
            holder._judged = None

    return forget


def _addresses(tensors: Sequence[Tensor]) -> list[int] | bytes:
    return [] if isinstance(tensors[0], WITHOUT_DATA) else addresses_of(tensors)


def _judge(op: str, name: str, parameter: nn.Parameter, grad: object) -> Tensor:
    """An alias of the parameter's ``main_grad`` in the parameter's shape; raises if it does not fit."""
    if not isinstance(grad, Tensor):
        raise RuntimeError(
            f"{op}: accumulate_into_main_grad needs {name}.main_grad, which is not set; "
            "set it to a tensor of the parameter's shape before the backward"
        )
    if grad.layout != torch.strided or not stores_values(type(grad)):
        kind = str(grad.layout) if type(grad) is Tensor else f"a {type(grad).__name__}"
        raise RuntimeError(f"{op}: {name}.main_grad must be a plain dense tensor, got {kind}")
    if grad.numel() != parameter.numel() or not grad.is_floating_point() or grad.device != parameter.device:
        raise RuntimeError(
            f"{op}: {name}.main_grad must be floating-point, on {parameter.device}, of shape {list(parameter.shape)}; "
            f"got {grad.dtype} on {grad.device}, shape {list(grad.shape)}"
        )
    if grad.itemsize == 1:
        raise RuntimeError(
            f"{op}: {name}.main_grad must have at least 16 bits, to which can be added; got {grad.dtype}"
        )
    if not is_free_to_write(grad):
        raise RuntimeError(
            f"{op}: {name}.main_grad was made under torch.inference_mode() and cannot be written outside of it; "
            "set it to main_grad.clone()"
        )
    if _repeats(grad):
        raise RuntimeError(
            f"{op}: {name}.main_grad, of shape {list(grad.shape)} and strides {list(grad.stride())}, has elements that "
            "share memory, as in an expanded tensor; give each its own memory, with main_grad.contiguous()"
        )
    try:
        return grad.detach().view(parameter.shape)
    except RuntimeError:
        raise RuntimeError(
            f"{op}: {name}.main_grad, of shape {list(grad.shape)} and strides {list(grad.stride())}, "
            f"cannot be viewed as {list(parameter.shape)}; make it contiguous"
        ) from None


def _repeats(tensor: Tensor) -> bool:
    """Whether two elements may share an address; False for every view that slices or permutes dense memory."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def _refuse_overlaps(op: str, names: Sequence[str], grads: Sequence[Tensor], read: Sequence[Tensor]) -> None:
    """Raises if a ``main_grad`` shares memory with another, or with a tensor that the op reads.

    Only dense ones are checked.
    """
    if has_no_data(grads[0]) or grads[0].is_meta:
        return
    spans = [(*extent(grad), name) for name, grad in zip(names, grads, strict=True) if _is_dense(grad)]
    spans += [(*extent(t), "") for t in read if t.device == grads[0].device and _is_dense(t)]
    reached = {True: (-1, ""), False: (-1, "")}  # by whether it is a main_grad
    for first, last, name in sorted(spans):
        for written, (end, other) in reached.items():
            if first <= end and (name or written):
                others = f"{other}.main_grad" if other and name else "a parameter of the op"
                raise RuntimeError(
                    f"{op}: {name or other}.main_grad overlaps {others} in memory; give it memory of its own"
                )
        reached[bool(name)] = max(reached[bool(name)], (last, name))


def _is_dense(tensor: Tensor) -> bool:
    """Whether the tensor owns every byte between its first and its last."""
    if not tensor.numel() or tensor.layout != torch.strided:
        return False
    first, last = extent(tensor)
    return last + 1 - first == tensor.nbytes
