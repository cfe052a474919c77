"""A program as a C++ type, which kernels take as their function."""

from __future__ import annotations

import ctypes
import math

from .program import OPERATIONS, Program, Value, part_of


def function_type(program: Program, name: str = "Function", *, fast: bool = True, vectors: int = 1) -> str:
    """The definition of a type that computes a program, for elements of a kernel.

    Its members: ``kGated`` (whether there is an up half), ``kRows`` (numbers of a row), ``kColumns`` (of a column),
    ``kConstants``, ``kVectors`` (for epilogues: how many vectors a lane differentiates at a time), ``forward(x, u,
    r)``, and ``backward(x, u, r, dy)``, which returns ``Gradients{y, dx, du, dr}``. In ``r`` stand the numbers of the
    row, those of the column and the constants. Nothing of the text is the user's.

    Args:
        fast: elementary functions by the hardware's approximations, for results that are rounded to 16 bits.
        vectors: see ``kVectors``.
    """
    numbers = program.rows + program.columns
    outputs = ("y", "dx", *(("du",) if "u" in program.inputs else ()), *(f"d{name}" for name in numbers))
    operands = {name: f"r[{i}]" for i, name in enumerate(numbers + program.constants)}
    names = {**operands, "x": "x", "u": "u", "dy": "dy"}
    forward, backward = part_of(program, ("y",)), part_of(program, outputs)
    results = [_expression(dict(backward.outputs).get(output, 0.0), names) for output in ("y", "dx", "du")]
    row_results = ", ".join(_expression(dict(backward.outputs)[f"d{name}"], names) for name in numbers)
    return f"""struct {name} {{
  using M = Math<{_bool(fast)}>;
  static constexpr bool kGated = {_bool("u" in program.inputs)};
  static constexpr int kRows = {len(program.rows)}, kColumns = {len(program.columns)};
  static constexpr int kConstants = {len(program.constants)};
  static constexpr int kVectors = {vectors};
  DEVICE static float forward(float x, float u, const float* r) {{
    {_statements(forward, names)}return {_expression(dict(forward.outputs)["y"], names)};
  }}
  DEVICE static Gradients<kRows + kColumns> backward(float x, float u, const float* r, float dy) {{
    {_statements(backward, names)}return {{{", ".join(results)}, {{{row_results}}}}};
  }}
}};
"""


def number(x: float) -> str:
    """A float of C++ with the value that x has in float32."""
    x = ctypes.c_float(x).value
    if math.isnan(x):
        return "NAN"
    return f"{x.hex()}f" if math.isfinite(x) else "INFINITY" if x > 0 else "-INFINITY"


def _statements(program: Program, names: dict[str, str]) -> str:
    lines = []
    for name, kind, arguments in program.lines:
        operation = OPERATIONS[kind]
        code = operation.code.format(*[_expression(argument, names) for argument in arguments])
        lines.append(f"const {'bool' if operation.is_boolean else 'float'} {name} = {code};\n    ")
    return "".join(lines)


def _expression(value: Value, names: dict[str, str]) -> str:
    return number(value) if isinstance(value, float) else names.get(value, value)


def _bool(value: bool) -> str:
    return "true" if value else "false"
