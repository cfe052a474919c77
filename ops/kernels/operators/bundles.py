"""Bundles: parameters of a kernel that are named tuples, whose fields the schema has as parameters of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_type_hints


class Bundle(NamedTuple):
    """A parameter that is a named tuple.

    Attributes:
        kind: the type of the tuple.
        fields: the fields in the schema; other fields have their defaults in the op.
    """

    kind: Any
    fields: tuple[str, ...]

    def annotations(self, kind: Any) -> dict[str, Any]:
        """The annotations of the fields by name."""
        hints = get_type_hints(kind)
        return {name: hints[name] for name in self.fields}

    def values(self, value: Any) -> dict[str, Any]:
        """The fields of a value by name."""
        return {name: getattr(value, name) for name in self.fields}

    def of(self, arguments: dict[str, Any]) -> Any:
        """The inverse of :meth:`values`; fields that are not among the arguments have their defaults."""
        return self.kind(**{name: arguments[name] for name in self.fields if name in arguments})


def spread_over(
    bundles: dict[str, Bundle], parameters: dict[str, Any], fields: Callable[[Bundle, Any], dict[str, Any]]
) -> dict[str, Any]:
    """The parameters by name in order, each bundle replaced by its fields."""
    flat: dict[str, Any] = {}
    for name, value in parameters.items():
        flat |= {name: value} if name not in bundles else fields(bundles[name], value)
    return flat


def with_bundles(bundles: dict[str, Bundle], arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name, fields and bundles of them."""
    return arguments | {name: bundle.of(arguments) for name, bundle in bundles.items()}
