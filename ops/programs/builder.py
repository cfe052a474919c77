"""Builds a program line by line: each value once, in its simplest form."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch

from .program import OPERATIONS, Line, Program, Value

_NO_LINE = Line("", "", ("",))
_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}
_LARGEST_POWER = 8  # a chain of so many products is shorter than powf


class Builder:
    """Adds lines to a program. A call adds a line and returns its name, or an existing value that is equal.

    It folds constants and uses identities that hold for every number, NaN and infinities among them: not ``x * 0``. The
    sign of a zero may be lost, as in ``x + 0``.
    """

    def __init__(self, inputs: tuple[str, ...]) -> None:
        self._inputs, self._lines, self._names = inputs, list[Line](), dict[tuple[object, ...], str]()
        self._quotients: dict[Value, tuple[Value, float]] = {}  # products that stand for a division by a constant

    def __call__(self, operation: str, *arguments: Value) -> Value:
        if operation != "where" and all([isinstance(argument, float) for argument in arguments]):
            return _folded(operation, *arguments)
        if OPERATIONS[operation].commutes:
            arguments = tuple(sorted(arguments, key=lambda value: (isinstance(value, float), value)))
        simpler = self._simplified(operation, *arguments)
        return self._add(operation, *arguments) if simpler is None else simpler

    def program(self, outputs: Mapping[str, Value]) -> Program:
        """The program of these outputs."""
        return Program(self._inputs, tuple(self._lines), tuple(outputs.items())).only(outputs)

    def as_number(self, value: Value) -> Value:
        """Converts a value to a number: a truth value to 1 or 0."""
        return self("where", value, 1.0, 0.0) if self._is_boolean(value) else value

    def as_boolean(self, value: Value) -> Value:
        """Converts a value to a truth value: a number to whether it is not 0."""
        if isinstance(value, float):
            return float(bool(value))
        return value if self._is_boolean(value) else self("not", self("eq", value, 0.0))

    def _is_boolean(self, value: Value) -> bool:
        line = self._line(value)
        return line is not _NO_LINE and OPERATIONS[line.operation].is_boolean

    def _add(self, operation: str, *arguments: Value) -> str:
        key = operation, *[repr(a) if isinstance(a, float) else (a,) for a in arguments]  # 0.0 is not -0.0 here
        if key not in self._names:
            self._names[key] = name = f"v{len(self._lines)}"
            self._lines.append(Line(name, operation, arguments))
        return self._names[key]

    def _line(self, value: Value) -> Line:
        is_line = isinstance(value, str) and value[0] == "v"
        return self._lines[int(str(value)[1:])] if is_line else _NO_LINE

    def _simplified(self, operation: str, *arguments: Value) -> Value | None:
        if operation == "where":
            return self._selected(*arguments)
        first, last = arguments[0], arguments[-1]
        if isinstance(last, float) and isinstance(first, str):
            return self._with_constant(operation, first, last)
        return self._of_values(operation, first, last)

    def _selected(self, condition: Value, if_true: Value, if_false: Value) -> Value | None:
        if isinstance(condition, float):
            return if_true if condition else if_false
        return if_true if if_true == if_false else None

    def _with_constant(self, operation: str, x: str, c: float) -> Value | None:
        inner = self._line(x)
        match operation:
            case "mul" if c in (1.0, -1.0):
                return x if c == 1.0 else self("neg", x)
            case "mul" if inner.operation == "neg":
                return self("mul", inner.arguments[0], -c)
            case "mul" | "add" if inner.operation == operation:
                return self._merged(operation, inner.arguments[0], inner.arguments[1], c)
            case "add" | "sub" if c == 0.0:
                return x
            case "sub":
                return self("add", x, -c)
            case "div" if _is_moderate(c):
                product = self("mul", x, 1.0 / c)
                self._quotients.setdefault(product, (x, c))
                return product
            case "pow" if c in _POWERS:
                return self(_POWERS[c], x)
            case "pow" if 0 < abs(c) <= _LARGEST_POWER and c == int(c):
                return self._power(x, int(c))
        return None

    def _merged(self, operation: str, x: Value, c: Value, d: float) -> Value | None:
        """``(x + c) + d`` or ``(x * c) * d`` with one constant, if they differ by rounding alone; else None."""
        if not isinstance(c, float):
            return None
        if operation == "add":  # with opposite signs, as in (x + 2**23) - 2**23, the user may want the rounding
            return self("add", x, c + d) if c * d > 0 else None
        return self("mul", x, c * d) if all(map(_is_moderate, (c, d, c * d))) else None

    def _of_values(self, operation: str, x: Value, z: Value) -> Value | None:
        inner, before = self._line(x), self._line(z)
        match operation:
            case "neg" if inner.operation == "neg":
                return inner.arguments[0]
            case "add" if before.operation == "neg":
                return self("sub", x, before.arguments[0])
            case "add" if inner.operation == "neg":
                return self("sub", z, inner.arguments[0])
            case "div" if x == 1.0:
                return self("reciprocal", z)
            case "reciprocal" if self._is_one_plus_exp(inner):
                return self("sigmoid", self("neg", self._line(inner.arguments[0]).arguments[0]))
            case "floor" | "round" if x in self._quotients:  # a product may fall below the whole number that it is
                return self._add(operation, self._add("div", *self._quotients[x]))
        return None

    def _is_one_plus_exp(self, line: Line) -> bool:
        return line.operation == "add" and line.arguments[1] == 1.0 and self._line(line.arguments[0]).operation == "exp"

    def _power(self, x: Value, exponent: int) -> Value:
        power = reduce(lambda a, b: self("mul", a, b), [x] * abs(exponent))
        return power if exponent > 0 else self("reciprocal", power)


def _is_moderate(c: float) -> bool:
    """Whether the number and its inverse are within the range of float32."""
    return 2.0**-100 < abs(c) < 2.0**100


def _folded(operation: str, *constants: Value) -> float:
    numbers = [torch.tensor(constant, dtype=torch.float64, device="cpu") for constant in constants]
    return float(OPERATIONS[operation].run(*numbers))
