"""The roles of the parameters of a user's function."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from .tracing import Function, name_of

_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
_NAMED = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY


class Parameters(NamedTuple):
    """The names of a function's parameters after x, or gate and up: numbers of a row, of a column, and constants."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    constants: tuple[str, ...]

    @classmethod
    def of(
        cls,
        function: Function,
        skipped: int,
        columns: Collection[str],
        constants: Collection[str],
        reserved: Collection[str],
    ) -> Parameters:
        """Classifies the parameters of a function.

        A parameter without a default that is neither a column nor a constant is a number of a row.

        Args:
            skipped: the number of leading parameters: x, or gate and up.
            reserved: forbidden names.

        Raises:
            TypeError: the function is not callable.
            ValueError: it is a module with parameters; a column or a constant is not a parameter of the function; a
                name is both; a name is reserved; or an argument cannot be passed by position.
        """
        _check_callable(function)
        parameters = _parameters(function)
        _check_positions(function, parameters, skipped, {*columns, *constants})
        further = parameters[skipped:]
        named = {p.name for p in further if p.kind in _NAMED}
        for name in (*columns, *constants):
            if name in columns and name in constants:
                raise ValueError(f"Pointwise: {name!r} is both a column and a constant{definition_of(function)}")
            if name not in named:
                raise ValueError(f"Pointwise: {name_of(function)} has no parameter {name!r}{definition_of(function)}")
        required = [p.name for p in further if p.default is p.empty and p.kind in _POSITIONAL]
        rows = tuple([name for name in required if name not in constants and name not in columns])
        for name in (*rows, *columns, *constants):
            if name in reserved:
                raise ValueError(f"Pointwise: a parameter of {name_of(function)} is called {name!r}, which is reserved")
        return cls(rows, tuple(columns), tuple(constants))


class InOrder:
    """A function that takes its arguments by position in the program's order, whatever the order of its signature."""

    def __init__(self, function: Function, first: int, names: tuple[str, ...]) -> None:
        self.__wrapped__, self.__name__, self._first, self._names = function, name_of(function), first, names

    def __call__(self, *arguments: Tensor) -> Tensor:
        return self.__wrapped__(
            *arguments[: self._first], **dict(zip(self._names, arguments[self._first :], strict=True))
        )


def _check_callable(function: Function) -> None:
    if not callable(function):
        raise TypeError(f"Pointwise: expected a function of tensors, got {function!r}")
    names = [name for name, _ in function.named_parameters()] if isinstance(function, torch.nn.Module) else ()
    if names:
        raise ValueError(
            f"Pointwise: {name_of(function)} has parameters of its own, {', '.join(names)}; write a function that "
            "takes them as arguments, and name them in columns"
        )


def _parameters(function: Function) -> list[inspect.Parameter]:
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        return list(inspect.signature(called).parameters.values())
    except ValueError:  # a builtin without a signature takes x, or gate and up
        return [inspect.Parameter("arguments", inspect.Parameter.VAR_POSITIONAL)]


def _check_positions(
    function: Function, parameters: list[inspect.Parameter], first: int, by_name: Collection[str]
) -> None:
    """Checks that all arguments can be passed by position, except those passed by name."""
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) < first and not takes_any:
        wanted = "x" if first == 1 else "gate and up"
        raise ValueError(f"Pointwise: {name_of(function)} must take {wanted} by position{definition_of(function)}")
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in by_name:
            raise ValueError(
                f"Pointwise: {name_of(function)} takes {p.name!r} only by name{definition_of(function)}; "
                "a number of a row is passed by position"
            )


def definition_of(function: Function) -> str:
    """The line where a function is defined, as an error text; empty if unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f", {code.co_filename}:{code.co_firstlineno}"
