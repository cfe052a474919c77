"""Prints a program as a C++ type, which kernels take as their function."""

from __future__ import annotations

import ctypes
import math

from .program import OPERATIONS, Line, Program, Value, part_of

_LARGEST_FACTOR = 2.0**100  # products of smaller numbers with log2(e) are finite


def function_type(program: Program, name: str = "Function", *, fast: str = "true", vectors: int = 1) -> str:
    """The definition of a type that computes a program, for elements of a kernel.

    Its members: ``kGated`` (whether there is an up half), ``kRows`` (numbers of a row), ``kColumns`` (of a column),
    ``kMatrices`` (of an element), ``kConstants``, ``kVectors`` (for epilogues: how many vectors a lane differentiates
    at a time), ``forward(x, u, r)``, and ``backward(x, u, r, dy)``, which returns ``Gradients{y, dx, du, dr}``. In
    ``r`` stand the numbers of the row, of the column, of the element, and the constants. Nothing of the text is the
    user's.

    Args:
        fast: a truth value of C++, whether elementary functions are the hardware's approximations, for results that
            are rounded to 16 bits.
        vectors: see ``kVectors``.
    """
    numbers = program.rows + program.columns + program.matrices
    read = {name: f"r[{i}]" for i, name in enumerate(numbers + program.constants)}
    names = {**read, "x": "x", "u": "u", "dy": "dy"}
    outputs = ("y", "dx", *(("du",) if "u" in program.inputs else ()), *(f"d{name}" for name in numbers))
    forward, backward = (_with_multiples(part_of(program, each)) for each in (("y",), outputs))
    results = [_expression(dict(backward.outputs).get(output, 0.0), names) for output in ("y", "dx", "du")]
    row_results = ", ".join(_expression(dict(backward.outputs)[f"d{name}"], names) for name in numbers)
    return f"""struct {name} {{
  using M = Math<{fast}>;
  static constexpr bool kGated = {boolean("u" in program.inputs)};
  static constexpr int kRows = {len(program.rows)}, kColumns = {len(program.columns)};
  static constexpr int kMatrices = {len(program.matrices)}, kConstants = {len(program.constants)}, kVectors = {vectors};
  DEVICE static float forward(float x, float u, const float* r) {{
    {_statements(forward, names)}return {_expression(dict(forward.outputs)["y"], names)};
  }}
  DEVICE static Gradients<{len(numbers)}> backward(float x, float u, const float* r, float dy) {{
    {_statements(backward, names)}return {{{", ".join(results)}, {{{row_results}}}}};
  }}
}};
"""


def number(x: float) -> str:
    """A C++ float literal with the value of x in float32."""
    x = ctypes.c_float(x).value
    if math.isnan(x):
        return "NAN"
    return f"{x.hex()}f" if math.isfinite(x) else "INFINITY" if x > 0 else "-INFINITY"


def _with_multiples(program: Program) -> Program:
    """The program with a second argument for operations that absorb a factor of their first one at no cost."""
    multiples, lines = dict[Value, tuple[Value, ...]](), list[Line]()
    for line in program.lines:
        if line.operation == "mul" and (factors := _factors(program, line.arguments)):
            multiples[line.name] = factors
        elif OPERATIONS[line.operation].code_of_multiple is not None and line.arguments[0] in multiples:
            line = line._replace(arguments=multiples[line.arguments[0]])
        lines.append(line)
    return Program(program.inputs, tuple(lines), program.outputs).only(dict(program.outputs))


def _factors(program: Program, arguments: tuple[Value, ...]) -> tuple[Value, ...]:
    """The factors of a product, the uniform one second; empty if neither is uniform."""
    first, second = arguments
    if first in program.constants:
        first, second = second, first
    is_number = isinstance(second, float) and abs(second) < _LARGEST_FACTOR
    return (first, second) if is_number or second in program.constants else ()


def _statements(program: Program, names: dict[str, str]) -> str:
    lines = []
    for name, kind, arguments in program.lines:
        operation, is_multiple = OPERATIONS[kind], len(arguments) == 2
        code = (operation.code_of_multiple if is_multiple else None) or operation.code
        code = code.format(*[_expression(argument, names) for argument in arguments])
        lines.append(f"const {'bool' if operation.is_boolean else 'float'} {name} = {code};\n    ")
    return "".join(lines)


def _expression(value: Value, names: dict[str, str]) -> str:
    return number(value) if isinstance(value, float) else names.get(value, value)


def boolean(value: bool) -> str:
    """A C++ truth value."""
    return "true" if value else "false"
