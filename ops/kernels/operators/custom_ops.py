"""One declaration per kernel: the signature of a function of the door is the schema of its custom op.

Compiled code and exported programs call kernels as custom ops of ``torch.library``. :func:`kernel` derives all of an op
from a Python function: the schema from the type hints, the fake from the function that allocates the result, and the
call that a compiler traces.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from ....fuser.contract.config import Config, config_of, use_config
from ....fuser.contract.tracing import is_traced
from ...values.switches import active_switches
from ..problems.gemm import Matrices, first
from .bundles import Bundle, spread_over, with_bundles
from .codecs import NO_RESULT, OUT, Codec, codec_of, codec_of_result, unflattened

F = TypeVar("F", bound=Callable[..., Any])
_library: Any = torch.library.Library("fusible", "DEF")  # type: ignore[no-untyped-call]
_UNCHANGED = nullcontext()
_TENSORS = (Tensor, Matrices)


def kernel(
    allocate: Callable[..., Any],
    *,
    name: str | None = None,
    obeys_switches: bool = True,
    eager_only: Collection[str] = (),
    only_with_out: Collection[str] = (),
    only_without_out: Collection[str] = (),
    added: Sequence[str] = (),
    spread: Mapping[str, Sequence[str]] = MappingProxyType({}),
    schema_names: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[F], F]:
    """Declares a function of a door as a kernel: registers its custom op, and calls the op for traced tensors.

    The first positional parameter that is a tensor, or matrices, decides whether a call is traced. A function with a
    parameter ``out`` has two ops: ``NAME`` allocates, ``NAME_out`` writes.

    Args:
        allocate: makes the result from the parameters that it names. On tensors without data it is the fake.
        name: the name of the op; by default the function's.
        eager_only: parameters, and last fields of the result, that the op lacks: compiled code has their defaults. If
            ``out`` is one of them, there is one op.
        obeys_switches: whether the op takes the switches of its trace as an argument, or obeys those of its call.
        only_with_out, only_without_out: parameters that one of the two ops does not have.
        added: parameters that older exported programs do not name: they come last, in order, by default None or False.
        spread: the fields of named tuples that are parameters of the schema; other fields have defaults in the op.
        schema_names: the schema's names of renamed parameters, as in exported programs.
    """

    def declared(function: F) -> F:
        op, hints, signature = name or function.__name__, get_type_hints(function), inspect.signature(function)
        position = next(i for i, parameter in enumerate(signature.parameters) if hints[parameter] in _TENSORS)
        bundles = {p: Bundle(hints[p], tuple(fields)) for p, fields in spread.items()}
        crossing = _without(spread_over(bundles, hints, Bundle.annotations), "return", *eager_only)
        codecs = _in_order(_codecs_of(crossing, schema_names), obeys_switches, added)
        new = _without(codecs, "out", *only_with_out), codec_of_result(hints["return"], eager_only)
        allocates = _define(op, Declared(function, allocate, bundles), *new)
        if "out" in codecs:
            into_out = _without(codecs | {"out": OUT.named("out")}, *only_without_out), NO_RESULT
            writes = _define(f"{op}_out", Declared(function, lambda: None, bundles), *into_out)

        def traced(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = {**spread_over(bundles, bound.arguments, Bundle.values), "switches": switches()}
            if "out" not in codecs or arguments["out"] is None:
                return allocates(arguments)
            writes(arguments)
            return arguments["out"]

        @wraps(function)
        def door(*args: Any, **kwargs: Any) -> Any:
            tensor = args[position]
            if type(tensor) is not Tensor and is_traced(first(tensor)):
                return traced(*args, **kwargs)
            return function(*args, **kwargs)

        return cast(F, door)

    return declared


def _codecs_of(annotations: dict[str, Any], schema_names: Mapping[str, str]) -> dict[str, Codec]:
    """The codecs of parameters by name."""
    return {name: codec_of(hint).named(schema_names.get(name, name)) for name, hint in annotations.items()}


def _in_order(codecs: dict[str, Codec], obeys_switches: bool, added: Sequence[str]) -> dict[str, Codec]:
    """The codecs in the order of the schema: the switches after the original parameters, then those with a default."""
    late = {p: codecs[p] if codecs[p].has_default else codecs[p].with_default() for p in added}
    codecs = {p: codec for p, codec in codecs.items() if p not in late} | late
    if obeys_switches:
        codecs["switches"] = codec_of(str).named("switches")
    return dict(sorted(codecs.items(), key=lambda item: item[1].has_default))


def _without(parameters: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in names}


class Declared(NamedTuple):
    """The function of a door, the function that allocates its result, and the named tuples that the schema spreads."""

    function: Callable[..., Any]
    allocate: Callable[..., Any]
    bundles: dict[str, Bundle]

    def run(self, **arguments: Any) -> Any:
        """Calls the function with the arguments of the op."""
        fields = {field for bundle in self.bundles.values() for field in bundle.fields}
        return self.function(**_without(with_bundles(self.bundles, arguments), *fields))

    def fake(self, **arguments: Any) -> Any:
        """Allocates the result."""
        parameters, arguments = inspect.signature(self.allocate).parameters, with_bundles(self.bundles, arguments)
        return self.allocate(**{name: value for name, value in arguments.items() if name in parameters})


def _define(
    name: str, implementation: Declared, codecs: dict[str, Codec], result: Codec
) -> Callable[[dict[str, Any]], Any]:
    """Registers an op with these parameters and this result, and returns the function that calls it in a trace."""

    def flat(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any) -> Any:
            arguments = unflattened(codecs, values)
            with obeying(arguments.pop("switches", None)):
                return result.flatten(function(**arguments))

        return run

    def call(arguments: dict[str, Any]) -> Any:
        values = [value for parameter, codec in codecs.items() for value in codec.flatten(arguments[parameter])]
        returned = getattr(torch.ops.fusible, name)(*values)
        return result.unflatten(*returned if len(result.schemas) > 1 else [returned])

    declared = ", ".join(schema for codec in codecs.values() for schema in codec.schemas)
    _register(f"{name}({declared}) -> ({', '.join(result.schemas)})", flat(implementation.fake))(
        flat(implementation.run)
    )
    return call


def _register(schema: str, fake: Callable[..., Any]) -> Callable[[F], F]:
    """Registers a function under the schema; ``fake`` takes the same, of tensors without data."""

    def registered(function: F) -> F:
        def run(*arguments: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*arguments)
            with torch.no_grad():  # an exported program may run with gradients on; a backward through it warns
                return function(*arguments)

        name = schema[: schema.index("(")]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fusible::{name}", fake, lib=_library)
        return function

    return registered


def switches() -> str:
    """The switches in force that a kernel obeys, as text: compiled code keeps them."""
    active = active_switches()
    return f"{active.backend} strict" if active.strict else active.backend


def obeying(switches: str | None) -> AbstractContextManager[Any]:
    """Puts the switches of compiled code in force, if it has any, unless they are."""
    recorded = None if switches is None else config(switches)
    return _UNCHANGED if recorded is None or active_switches() is recorded else use_config(recorded)


@cache
def config(switches: str) -> Config:
    """The inverse of :func:`switches`."""
    backend, *strict = switches.split()
    return config_of(backend=backend, strict=bool(strict))
