"""A program as the text of a function in Triton."""

from __future__ import annotations

import ctypes
import math

from .program import Program, Value, part_of

CODE: dict[str, str] = {
    "neg": "-{0}",
    "abs": "tl.abs({0})",
    "exp": "tl.exp({0})",
    "expm1": "expm1({0})",
    "log": "tl.log({0})",
    "log1p": "log1p({0})",
    "sqrt": "tl.sqrt({0})",
    "rsqrt": "tl.rsqrt({0})",
    "reciprocal": "1.0 / {0}",
    "sigmoid": "sigmoid({0})",
    "tanh": "tanh({0})",
    "erf": "tl.erf({0})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "atan": "atan({0})",
    "round": "rint({0})",
    "floor": "tl.floor({0})",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "div": "{0} / {1}",
    "pow": "power({0}, {1})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "and": "{0} & {1}",
    "or": "{0} | {1}",
    "not": "{0} == 0",
    "where": "tl.where({0}, {1}, {2})",
}
"""The expression of each operation; ``{n}`` is an argument."""


def function_source(program: Program, outputs: tuple[str, ...]) -> str:
    """The definition of ``f(x, u, dy, rows, columns, matrices)``, which returns a tuple of these outputs of a program.

    Each is [M, N], in float32. ``rows``, ``columns`` and ``matrices`` are tuples in the order of the program's inputs.
    Nothing of the text is the user's.
    """
    part, shape_of = part_of(program, outputs), "x" if outputs == ("y",) else "dy"
    values = dict(part.outputs)
    results = "".join([f"{_full(values.get(name, 0.0), shape_of)}, " for name in outputs])
    body = [*_inputs(part), *(_line(*line) for line in part.lines), f"return ({results})"]
    return "def f(x, u, dy, rows, columns, matrices):\n" + "".join([f"    {line}\n" for line in body])


def _inputs(program: Program) -> list[str]:
    tuples = {"rows": program.rows, "columns": program.columns, "matrices": program.matrices}
    return [
        f"{name} = {kind}[{i}]"
        for kind, names in tuples.items()
        for i, name in enumerate(names)
        if name in program.reads
    ]


def _line(name: str, operation: str, arguments: tuple[Value, ...]) -> str:
    return f"{name} = {CODE[operation].format(*map(number, arguments))}"


def number(value: Value) -> str:
    """A name as it is, a constant with the value that it has in float32. Triton reads a subnormal as float64."""
    if isinstance(value, str):
        return value
    x = ctypes.c_float(value).value
    if not math.isfinite(x):
        return f'float("{x}")'
    return repr(x) if abs(x) >= 2.0**-126 else "-0.0" if math.copysign(1, x) < 0 else "0.0"


def _full(value: Value, like: str) -> str:
    if isinstance(value, float):
        return f"tl.full({like}.shape, {number(value)}, tl.float32)"
    return f"tl.broadcast_to({value}, {like}.shape)"
