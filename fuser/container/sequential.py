"""The container: binds arguments to ops, finds the plan for the call, runs it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..compiler.binding import bind
from ..compiler.flatten import Container, FlatContainer
from ..compiler.registry import registry
from ..contract.config import Flags, constant
from ..contract.edits import children_changed, tell_of_edits
from ..contract.op import Op, OpKwargs
from ..explain.explanation import Explanation
from ..runtime.autograd import Runtime
from .call_cache import CallCache, explain_last
from .standalone import Standalone

if TYPE_CHECKING:
    from ..dynamo.steps import TracedPlan


class StateFormat(NamedTuple):
    """A foreign format that containers load, and notes that they save."""

    read: Callable[[Sequential, dict[str, object], str, dict[str, object]], list[str]]
    """Given a container, a state dict to rewrite, the container's prefix and metadata in it; returns the errors."""
    write: Callable[[Sequential, dict[str, object], str], None]
    """Adds notes to a state dict."""


_state_formats: list[StateFormat] = []


def add_state_format(form: StateFormat) -> None:
    """Makes all containers read and write a format."""
    _state_formats.append(form)


def _no_module(name: str, value: object) -> str:
    if isinstance(value, type):
        came, cure = f"the class {value.__name__}", f"give an object, such as {value.__name__}(...)"
    elif isinstance(value, list | tuple):
        came, cure = f"a {type(value).__name__}", "give its modules one by one, as Sequential(*modules)"
    elif callable(value):
        came, cure = getattr(value, "__name__", "a function"), "fusible.Pointwise makes one of a function"
    else:
        came, cure = f"{value!r:.60}", "torch.nn.Module is the base of both"
    return f"Sequential: module {name} must be an op or another module, got {came}; {cure}"


class Sequential(Container):
    """``nn.Sequential`` of ops, fused where a fusion matches; any other module is called with ``x`` only.

    Modules are given in order, as one mapping of names to modules, or as keywords that name them.

    >>> import torch, fusible
    >>> model = fusible.Sequential(fusible.Linear(4, 8), fusible.SwiGLU(), fusible.Linear(4, 4))
    >>> model(torch.randn(3, 4)).shape
    torch.Size([3, 4])
    """

    _compiled: CallCache | None

    def __init__(self, *modules: Any, **named: nn.Module) -> None:
        if modules and named:
            raise TypeError(
                f"Sequential: give names to all modules or to none; {', '.join(named)} came with unnamed ones"
            )
        modules = modules or (named,)
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            modules = (OrderedDict(modules[0]),)
        super().__init__(*modules)
        self._compiled = None

    def __setattr__(self, name: str, value: Any) -> None:
        is_child = isinstance(value, nn.Module) or name in self.__dict__.get("_modules", ())
        super().__setattr__(name, value)
        if is_child:
            children_changed(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        children_changed(self)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a module, as any ``nn.Module`` does.

        Raises:
            TypeError: it is not a module.
        """
        if not isinstance(module, nn.Module | None):
            raise TypeError(_no_module(name, module))
        super().add_module(name, module)
        children_changed(self)

    def forget_children(self) -> None:
        """Drops the state of earlier calls, because the container, or one inside it, is being edited."""
        self._compiled = None

    def forward(  # type: ignore[override]
        self, x: Tensor, *extra_inputs: object, op_kwargs: OpKwargs | None = None, **shared: object
    ) -> Any:
        """Runs the ops.

        Args:
            x: the input of the first op.
            *extra_inputs: the required tensor keywords that are not given otherwise, in op order, then signature order.
            op_kwargs: the keywords of an op, by the op itself, its index, or its name.
            **shared: keywords for every op that takes them and did not get them by ``op_kwargs``.

        Returns:
            The output of the last op; with extra outputs that no op reads, a tuple of it and them, in op order.

        Raises:
            ArgumentError: an argument does not fit; it is a ``TypeError`` and a ``ValueError``. Nothing has run, except
            if it does not fit the output of a module that is not an op: then no op after that module has run.
            IndexError: an int key of ``op_kwargs`` is out of range.
            RefusedError: under ``config(strict=True)``, a fusion is refused.
        """
        if torch.compiler.is_dynamo_compiling():
            from ..dynamo.frontend import run_container

            return run_container(self, x, extra_inputs, op_kwargs, shared)
        return self._current().call(x, extra_inputs, op_kwargs, shared)

    container_forward = forward

    def explain(
        self, x: object = None, *extra_inputs: object, op_kwargs: OpKwargs | None = None, **shared: object
    ) -> Explanation:
        """Explains which ops and kernels a call with these arguments runs, and why fusions and kernels were or were not
        used.

        Takes the arguments of :meth:`forward`, or none for the last call. Runs nothing.

        Raises:
            ArgumentError: no arguments, and no call yet; arguments without ``x``; otherwise as :meth:`forward`.
        """
        if x is None and not extra_inputs and not op_kwargs and not shared:
            return explain_last(self._compiled)
        compiled, runtime = self._current(), Runtime.of(x)
        return compiled.explain(bind(compiled.layout, x, extra_inputs, op_kwargs, shared), runtime)

    @property
    def was_called(self) -> bool:
        """Whether there is a last call for :meth:`explain`."""
        return self._compiled is not None and self._compiled.last is not None

    @constant
    def _traced_plan(self, flags: Flags, constants: object, *call: object) -> TracedPlan:
        from ..dynamo.steps import traced_plan_or_reason

        return traced_plan_or_reason(self._current, flags, *call)

    def _current(self) -> CallCache:
        """The state for the current structure and fusions."""
        compiled = self._compiled
        if compiled is None or not compiled.layout.is_current(self):
            compiled = self._compiled = CallCache(FlatContainer(self))
            for module in (self, *compiled.layout.opened()):
                tell_of_edits(module, self)
        elif compiled.version != registry.version:
            compiled = self._compiled = CallCache(compiled.layout, compiled.last)
        return compiled

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of any module, parameters unchanged, with notes of the registered formats."""
        state = super().state_dict(*args, **kwargs)
        for form in _state_formats:
            form.write(self, state, kwargs.get("prefix", args[1] if len(args) > 1 else ""))
        return state

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: Any) -> None:
        for form in _state_formats:
            for wrong in form.read(self, state_dict, prefix, args[0]):
                args[-1].append(f"{prefix.removesuffix('.') or type(self).__name__}: {wrong}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _replicate_for_data_parallel(self) -> Sequential:
        replica: Sequential = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        replica._compiled = None  # it has ops of its own
        return replica

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_compiled": None}

    def __add__(self, other: nn.Sequential) -> Sequential:
        if not isinstance(other, nn.Sequential):
            raise ValueError(f"add operator supports only objects of Sequential class, but {type(other)} is given.")
        return Sequential(*self, *other)

    def __mul__(self, times: int) -> Sequential:
        return Sequential(*super().__mul__(times))


Op._standalone = Standalone()
