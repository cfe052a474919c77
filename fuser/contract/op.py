"""The op contract: a pure ``fwd``/``bwd`` pair over named tensors, on top of an ``nn.Module``.

The signature of ``fwd`` is the declaration of an op: its keyword-only parameters are the keywords of a call. Tensors
are differentiable inputs, a :data:`Buffer` is memory of the caller that the op writes, everything else is metadata. The
runner fills reserved names for a ``fwd``, ``bwd`` or ``check`` that declares them: ``needs_grad`` (a frozenset of the
names whose gradients autograd will want), ``autocast_dtype`` (None without autocast) and, only for ``fwd``,
``x_is_inner`` (whether an earlier step of the same call made ``x``).
"""

from __future__ import annotations

import inspect
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from .config import Flags, constant
from .edits import children_changed
from .errors import ArgumentError
from .module_state import Attributes, attributes
from .spec import Specs, TensorSpec

Buffer: TypeAlias = Annotated[Tensor, "written by the op"]
"""A tensor that the caller provides for the op to write into; never differentiated, never read."""

Outputs: TypeAlias = Tensor | Mapping[str, Tensor]
"""The outputs of ``fwd``: ``y``, or by name ``{"y": y, "residual": r}`` if the op has extra outputs."""

Gradient: TypeAlias = Tensor | None | Callable[[], Tensor | None]
Grads: TypeAlias = Mapping[str, Gradient]
"""Gradients by the name of the input: ``"x"``, a keyword, or a parameter; thunks for those that cost a kernel.
None: autograd gets no gradient, as it was accumulated elsewhere or will be later."""

Keywords: TypeAlias = Mapping[str, object]
"""The keyword arguments of a call, by name."""

OpKwargs: TypeAlias = Mapping[Any, Keywords]
"""The keywords of ops, by the op itself, its index or its name."""

RESERVED = frozenset({"needs_grad", "autocast_dtype", "x_is_inner"})
_CHANGE_NOTHING = frozenset(
    {"__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__firstlineno__", "__static_attributes__"}
) | {"__classcell__", "__parameters__", "extra_repr"}


class Keyword(NamedTuple):
    """A keyword argument of an op's calls."""

    required: bool
    tensor: bool
    buffer: bool = False


class SideEffects(NamedTuple):
    """The destination of a gradient that ``bwd`` does not return.

    Attributes:
        tensors: the tensors that the gradient is written to, or whose aliases are returned.
        facts: other values that the result depends on.
        written: the written tensors.
        done: called after the tensors were written, to notify their owners.
    """

    tensors: Sequence[Tensor]
    facts: tuple[object, ...]
    written: Sequence[Tensor] = ()
    done: Callable[[], None] | None = None


class Delivery(NamedTuple):
    """A gradient that ``bwd`` delivers by itself: to memory that it finds, or later.

    Attributes:
        name: the input's name, as in ``needs_grad``.
        side_effects: returns the gradient's destination, and raises if the gradient cannot go there. A backward calls
            it before it writes anything, and only if it wants the gradient.
    """

    name: str
    side_effects: Callable[[], SideEffects]


@dataclass(frozen=True)
class Promises:
    """The promises of an op to the runner. A subclass that states none keeps those that its own code cannot break.

    Attributes:
        replayable: calls of one form may be replayed (``replay``). All work of ``fwd`` and ``bwd`` is launched by the
            kernels' library, returned, or declared by :meth:`Op.deliveries`. It depends only on the forms of the call's
            tensors and of :meth:`Op.device_inputs`, and on assigned attributes except ``training``. Lost by a subclass
            that defines more than ``__init__``.
        passes_x_on: all outputs are ``x`` itself. The runner then passes it on, as ``torch.nn.Identity`` does: autograd
            does not see the op, and code that works in place behaves as without it. Lost with another ``fwd`` or
            ``bwd``.
        values_checked: the keywords whose values :meth:`Op.check` may read, only on the host, where reading does not
            wait. For other tensors and for parameters it reads shapes, dtypes and devices, so a call with shapes that
            have passed is not checked again. None: it may read any value. Lost with another ``check``.
        eager_only: the reason why ``torch.compile`` runs the op eagerly, between graphs; None: it compiles the op.
    """

    replayable: bool = False
    passes_x_on: bool = False
    values_checked: frozenset[str] | None = None
    eager_only: str | None = None

    def of_subclass(self, defined: Collection[str]) -> Promises:
        """The promises that remain for a subclass that defines these attributes."""
        code = set(defined) - _CHANGE_NOTHING
        return Promises(
            replayable=self.replayable and not code,
            passes_x_on=self.passes_x_on and code.isdisjoint(("fwd", "bwd")),
            values_checked=None if "check" in code else self.values_checked,
            eager_only=self.eager_only,
        )


class _Uninitialised:
    """Stands in the class for an attribute that ``nn.Module.__init__`` sets on the object, which then hides it."""

    def __get__(self, op: Op | None, kind: type[Op]) -> _Uninitialised:
        if op is None:
            return self
        raise TypeError(f"{kind.__name__}.__init__ must call super().__init__() before it does anything else")


class StandaloneRunner(Protocol):
    """Runs, compiles and explains ops that are called outside of a container.

    This file does not import the code that runs ops: :mod:`sequential` sets :attr:`Op._standalone` when it is imported.
    """

    def run(self, op: Op, x: Tensor, keywords: Keywords, /) -> Any:
        """``op(x, **keywords)``; drops the keywords that are None."""

    def traced_plan(self, op: Op, flags: Flags, /, *call: object) -> Any:
        """The steps that ``torch.compile`` traces for a call of the op."""

    def explain(self, op: Op, arguments: tuple[object, ...], op_kwargs: OpKwargs | None, keywords: Keywords, /) -> Any:
        """The explanation of a call of the op."""


class Op(nn.Module, ABC):
    """One differentiable step.

    Subclasses define :meth:`fwd` and :meth:`bwd`, and keep what the backward needs in a ``NamedTuple``, by convention
    called ``Saved``; nothing else may pass between the two. An op runs in a :class:`Sequential`, or alone, as ``op(x,
    **keywords)``.

    Attributes:
        keywords: the keywords of a call, from the signature of ``fwd``. An op whose keywords depend on its constructor
            sets them in ``__init__``.
        extra_outputs: names of the outputs besides ``y``.
        output_to_caller: by extra output, whether a container returns it; None: if no later op reads it.
        promises: the promises to the runner; see :class:`Promises`.
        untraced: names of attributes that cache state of calls, on which no result depends: ``torch.compile`` runs a
            copy in which they are empty.
        reserved: the reserved names that ``fwd``, ``bwd`` and ``check`` declare.
        caches: names of attributes that cache facts about parameters; a view (:mod:`parametrized`) has its own.
        attribute_version: how often an attribute has been assigned.
        decision_version: how often an attribute that is not a tensor has been assigned, other than by ``fwd`` and
            ``bwd``: fusions are then decided anew.
        layouts: the accepted layouts of a call's tensors; a nested tensor counts as ``torch.jagged``.
    """

    __slots__ = ("_container_of_one",)
    _backward_hooks: Any = _Uninitialised()  # read first by every call
    _modules: dict[str, nn.Module | None] = _Uninitialised()  # type: ignore[assignment]  # what a container reads first
    keywords: Mapping[str, Keyword] = {}
    promises: Promises = Promises()
    untraced: frozenset[str] = frozenset()
    caches: frozenset[str] = frozenset()
    extra_outputs: tuple[str, ...] = ()
    output_to_caller: Mapping[str, bool] = {}
    layouts: frozenset[torch.layout] = frozenset({torch.strided})
    reserved: Mapping[str, frozenset[str]] = {"check": frozenset()}
    attribute_version: int = 0
    decision_version: int = 0
    _standalone: ClassVar[StandaloneRunner]
    _container_of_one: Any  # the state between its calls, if it is called alone
    _computed: tuple[str, ...] = ()  # of a view: the names of computed parameters
    _outline: Op | None = None  # of a view for a run: one for its backward, without values

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "fwd" in cls.__dict__ and "keywords" not in cls.__dict__:
            cls.keywords = _declared_keywords(cls)
        if "promises" not in cls.__dict__:
            cls.promises = cls.promises.of_subclass(cls.__dict__.keys())
        if "reserved" not in cls.__dict__:
            defined = {name: cls.__dict__[name] for name in ("fwd", "bwd", "check") if name in cls.__dict__}
            cls.reserved = {**cls.reserved, **{name: _declared_reserved(cls, name, f) for name, f in defined.items()}}

    @abstractmethod
    def fwd(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Outputs, object]:
        """Returns the output (or outputs by name), and the residuals for ``bwd``."""

    @abstractmethod
    def bwd(self, saved: Any, dy: Tensor, *args: Any, **kwargs: Any) -> Grads:
        """Returns the gradients by name. The gradient of an extra output comes as the keyword of its name."""

    def check(self, x: TensorSpec, *args: Any, **keywords: Any) -> Specs:
        """Raises :class:`ArgumentError` for a call that the op cannot take, before anything runs.

        A keyword that reads an earlier op's extra output is a tensor without data here. Returns the specs of the
        outputs of ``fwd``, by name if there are extra outputs, or None if they are unknown before the run.
        """
        return None

    def check_without_x(self, *args: Any, **keywords: Any) -> None:
        """Raises :class:`ArgumentError` for keywords, or parameters, that fit no ``x``.

        Called before anything runs, if ``x`` is the output of a module that is not an op. Missing keywords may still be
        filled. :meth:`check` follows when ``x`` exists, and must find all of these errors too.
        """

    def returns(self, name: str, is_read: bool) -> bool:
        """Whether a container returns an extra output; ``is_read``: a later op of it reads the output."""
        return self.output_to_caller.get(name, not is_read)

    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        """The current parameters by name; a replaced parameter is seen at the next call.

        In a run, a parametrized parameter is the result of its parametrization, through which autograd passes.
        """
        return zip(self.input_names(), self.input_tensors(), strict=True)

    def input_names(self) -> tuple[str, ...]:
        """The names alone; they change with the structure only."""
        return tuple([name for name, _ in self._named()])

    def input_tensors(self) -> list[Tensor]:
        """The parameters alone, in the order of their names."""
        return [p for _, p in self._named()]

    def device_inputs(self) -> list[Tensor]:
        """The tensors of the op that ``fwd`` reads, in a fixed order."""
        return self.input_tensors()

    def autograd_inputs(self, grad_enabled: bool) -> list[Tensor]:
        """:meth:`device_inputs` and, where autograd records, :meth:`input_tensors`; each tensor once."""
        return self.input_tensors()

    def deliveries(self, wanted: frozenset[str], role: str = "") -> Sequence[Delivery]:
        """The wanted gradients that ``bwd`` does not return; ``role`` precedes the op's names in ``wanted``."""
        return ()

    def decision_key(self) -> tuple[object, ...]:
        """The facts on parameters that fusions may read; part of the key of the plan cache."""
        if not (self._parameters or self._modules):
            return ()
        return tuple(
            [(name, type(p), p.dtype, p.device, p.layout, p.requires_grad, p.shape) for name, p in self._named()]
        )

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        if not self._modules:
            return [(name, p) for name, p in self._parameters.items() if p is not None]
        return self.named_parameters(remove_duplicate=False)

    def inner_ops(self) -> Mapping[str, Op]:
        """The ops inside, by role."""
        return {}

    def __setattr__(self, name: str, value: Any) -> None:
        is_child = isinstance(value, nn.Module) or name in self.__dict__.get("_modules", ())
        super().__setattr__(name, value)
        if name != "training":
            self._count_edit(isinstance(value, Tensor))
        if is_child:
            children_changed(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        self._count_edit(False)
        children_changed(self)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds a child module, as any ``nn.Module`` does."""
        super().add_module(name, module)
        children_changed(self)

    def _count_edit(self, of_tensor: bool) -> None:
        self.__dict__["attribute_version"] = self.attribute_version + 1
        if not of_tensor:
            self.__dict__["decision_version"] = self.decision_version + 1

    def restore_decision_version(self, decision_version: int) -> None:
        """Restores the version after a run, since conditions must not depend on attributes that an op sets while it
        runs.
        """
        self.__dict__["decision_version"] = decision_version

    def trace_refusal(self) -> str | None:
        """The reason why ``torch.compile`` cannot compile a backward of the op, or None."""
        return None

    @constant
    def _attributes(self, path: str) -> Attributes:
        return attributes(self, path, Op)

    @constant
    def _traced_plan(self, flags: Flags, constants: object, *call: object) -> Any:
        return self._standalone.traced_plan(self, flags, *call)

    def forward(self, x: Tensor, *positional: object, **keywords: object) -> Any:
        """Runs the op alone, as a container of one.

        Args:
            x: the input.
            *positional: not allowed; the error lists the keywords.
            **keywords: the op's keywords; None counts as not given.

        Raises:
            ArgumentError: an unknown or a missing keyword, or an error that :meth:`check` finds.

        Returns:
            ``y``, or ``(y, *extras)`` where there are extra outputs.
        """
        if positional:
            raise ArgumentError(f"{type(self).__name__}: only x is passed by position, {_by_name(self.keywords)}")
        return self._standalone.run(self, x, keywords)


def _by_name(keywords: Iterable[str]) -> str:
    names = ", ".join(sorted(keywords))
    return f"and by name: {names}" if names else "as there are no keywords"


def _declared_keywords(cls: type[Op]) -> dict[str, Keyword]:
    parameters = list(inspect.signature(cls.fwd).parameters.values())[1:]
    names_x = parameters and parameters[0].name == "x"
    if not names_x or any(p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in parameters[1:]):
        raise TypeError(f"{cls.__name__}.fwd must be fwd(self, x, *, ...): an op has one input, the rest are keywords")
    hints = _hints(cls.fwd)
    named = [p for p in parameters[1:] if p.kind is p.KEYWORD_ONLY and p.name not in RESERVED]
    passed_on = cls.keywords if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else {}
    return {**passed_on, **{p.name: _keyword(p, hints.get(p.name, Tensor)) for p in named}}


def _declared_reserved(cls: type[Op], name: str, function: Callable[..., object]) -> frozenset[str]:
    """The reserved names of the function; with ``**keywords`` also those of the method that it overrides."""
    parameters = inspect.signature(function).parameters
    passes_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return (RESERVED & parameters.keys()) | (cls.reserved.get(name, frozenset()) if passes_on else frozenset())


def _keyword(parameter: inspect.Parameter, hint: object) -> Keyword:
    buffer = _mentions(hint, Buffer)
    return Keyword(parameter.default is parameter.empty, not buffer and _mentions(hint, Tensor), buffer)


def _hints(function: Callable[..., object]) -> dict[str, object]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except NameError:  # a type that is imported for type checkers only: go by the names
        types = {"Buffer": Buffer, "Tensor": Tensor}
        annotations = function.__annotations__
        return {k: next((t for name, t in types.items() if name in str(v)), object) for k, v in annotations.items()}


def _mentions(hint: object, wanted: object) -> bool:
    return bool(hint == wanted or any(_mentions(h, wanted) for h in typing.get_args(hint) if hint != Buffer))
