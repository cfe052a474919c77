"""A program times a number of the row; and whether one is linear in such a number."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from .builder import Builder
from .program import Line, Program, Value

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
    part = program.only(("y",))
    reads, linear = {SCALE}, {SCALE}
    for line in part.lines:
        if not reads.isdisjoint(line.arguments):
            reads.add(line.name)
            linear |= {line.name} if _is_linear(line, reads, linear) else set()
    return dict(part.outputs)["y"] in linear


def _is_linear(line: Line, reads: set[str], linear: set[str]) -> bool:
    """Of a line that reads the scale."""
    match line:
        case (_, "neg", _) | (_, "add" | "sub", _):
            return linear.issuperset(line.arguments)
        case (_, "mul", (a, b)):
            return (a in linear and b not in reads) or (b in linear and a not in reads)
        case (_, "div", (a, b)):
            return a in linear and b not in reads
        case (_, "where", (condition, *values)):
            return condition not in reads and all(value in linear or value == 0.0 for value in values)
    return False


def _inlined(builder: Builder, program: Program, inputs: Mapping[str, Value]) -> dict[str, Value]:
    """Adds the lines of a program, with its inputs replaced by values of the builder; returns its outputs."""
    values: dict[Value, Value] = dict(inputs.items())
    for name, operation, arguments in program.lines:
        values[name] = builder(operation, *[values.get(argument, argument) for argument in arguments])
    return {name: values.get(value, value) for name, value in program.outputs}
