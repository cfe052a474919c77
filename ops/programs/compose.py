"""Programs made of programs: one after another, and one times a number of the row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from .builder import Builder
from .program import Program, Value

SCALE = "r0"


@lru_cache(maxsize=1024)
def scaled(program: Program) -> Program:
    """A program without numbers of a row, times one: ``y * r0``, with the gradient of ``r0``."""
    builder = Builder((*program.arguments, SCALE, *program.columns, *program.constants, "dy"))
    outputs = _inlined(builder, program, {"dy": builder("mul", "dy", SCALE)})
    drow = builder("mul", "dy", outputs["y"])
    return builder.program({**outputs, "y": builder("mul", outputs["y"], SCALE), f"d{SCALE}": drow})


@lru_cache(maxsize=1024)
def is_linear_in_scale(program: Program) -> bool:
    """Whether the value is ``r0`` times what does not depend on it, which another factor of the row then joins."""
    value = dict(program.outputs)["y"]
    line = next((line for line in program.lines if line.name == value), None)
    if line is None or line.operation != "mul" or SCALE not in line.arguments:
        return False
    factors = [argument for argument in line.arguments if argument != SCALE]
    if len(factors) != 1:
        return False
    factor = Program(program.inputs, program.lines, (("y", factors[0]),)).only(("y",))
    return SCALE not in factor.reads


def then(first: Program, second: Program) -> Program:
    """``second`` of the value of ``first``. The numbers of the row of both follow one another.

    Raises:
        ValueError: ``second`` takes gate and up, not one value.
    """
    if second.arguments != ("x",):
        raise ValueError("a program of gate and up cannot follow another one: it would need two values")
    renamed = {row: f"r{len(first.rows) + i}" for i, row in enumerate(second.rows)}
    builder = Builder((*first.arguments, *first.rows, *renamed.values(), "dy"))
    value = _inlined(builder, first.only(("y",)), {})["y"]
    outer = _inlined(builder, second, {"x": value, **renamed})
    inner = _inlined(builder, first, {"dy": outer["dx"]})
    rows = {f"d{new}": outer[f"d{old}"] for old, new in renamed.items()}
    return builder.program({**inner, "y": outer["y"], **rows})


def _inlined(builder: Builder, program: Program, inputs: Mapping[str, Value]) -> dict[str, Value]:
    """Adds the lines of a program, with its inputs replaced by values of the builder; returns its outputs."""
    values: dict[Value, Value] = dict(inputs.items())
    for name, operation, arguments in program.lines:
        values[name] = builder(operation, *[values.get(argument, argument) for argument in arguments])
    return {name: values.get(value, value) for name, value in program.outputs}
