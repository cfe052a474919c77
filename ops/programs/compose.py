"""Operations on programs: composition, multiplication by a number of the row, and tests of linearity."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from .builder import Builder
from .program import Line, Program, Value, part_of

SCALE = "r0"
_KINDS = {"r": 0, "a": 1, "b": 1, "m": 2, "c": 3}
_OF_ARGUMENT = {"x": "g", "u": "u"}
"""The suffix of names of inputs that belong to gate, or to up."""


@lru_cache(maxsize=1024)
def scaled(program: Program) -> Program:
    """Multiplies a program without numbers of a row by one: ``y * r0``, with the gradient of ``r0``."""
    operands = program.columns + program.matrices + program.constants
    builder = Builder((*program.arguments, SCALE, *operands, "dy"))
    outputs = _inlined(builder, program, {"dy": builder("mul", "dy", SCALE)})
    drow = builder("mul", "dy", outputs["y"])
    return builder.program({**outputs, "y": builder("mul", outputs["y"], SCALE), f"d{SCALE}": drow})


@lru_cache(maxsize=1024)
def unscaled(program: Program) -> Program:
    """The inverse of :func:`scaled`: the program with a number of the row of 1."""
    builder = Builder(tuple([name for name in program.inputs if name != SCALE]))
    outputs = _inlined(builder, program, {SCALE: 1.0})
    return builder.program({name: value for name, value in outputs.items() if name != f"d{SCALE}"})


class _Stage(NamedTuple):
    """A program of a chain. Before gate and up meet, it computes both of them.

    Attributes:
        names: for each argument of the chain, the chain's names of the program's other inputs.
    """

    program: Program
    names: dict[str, dict[str, Value]]


@lru_cache(maxsize=1024)
def composed(programs: tuple[Program, ...]) -> Program:
    """Composes programs, with gradients by the chain rule; at most one has gate and up.

    Numbers of the row and of columns, matrices and constants are those of the programs, in order. Columns and matrices
    of a program that runs before gate and up meet have parts for both.
    """
    stages = list(_stages(programs))
    arguments = tuple(stages[0].names) if len(stages[0].program.arguments) == 1 else ("x", "u")
    renamed = {str(new) for stage in stages for names in stage.names.values() for new in names.values()}
    operands = sorted(renamed, key=_order)
    builder = Builder((*arguments, *operands, "dy"))
    values, before = {name: name for name in arguments}, list[dict[str, Value]]()
    current: dict[str, Value] = dict(values)
    for stage in stages:
        before.append(current)
        current = _forward(builder, stage, current)
    grads, outputs = dict[str, Value]({"x": "dy"}), dict[str, Value]({"y": current["x"]})
    for stage, inputs in zip(reversed(stages), reversed(before), strict=True):
        grads = _backward(builder, stage, inputs, grads, outputs)
    of_arguments = {f"d{name}": gradient for name, gradient in grads.items()}
    of_operands = {f"d{name}": outputs[f"d{name}"] for name in operands if name[0] != "c"}
    return builder.program({"y": outputs["y"], **of_arguments, **of_operands})


def _stages(programs: Sequence[Program]) -> Iterator[_Stage]:
    gates = [i for i, program in enumerate(programs) if "u" in program.inputs]
    columns = count()
    numbers = {"r": count(), "a": columns, "b": columns, "m": count(), "c": count()}

    def numbered(name: str) -> str:
        return f"{name[0]}{next(numbers[name[0]])}"

    for i, program in enumerate(programs):
        of_both = bool(gates) and i < gates[0]
        names: dict[str, dict[str, Value]] = {argument: {} for argument in (("x", "u") if of_both else ("x",))}
        for name in program.rows + program.columns + program.matrices + program.constants:
            new = numbered(name)
            for argument, of_argument in names.items():
                is_of_one = of_both and name[0] in "abm"
                of_argument[name] = new + _OF_ARGUMENT[argument] if is_of_one else new
        yield _Stage(program, names)


def _forward(builder: Builder, stage: _Stage, values: Mapping[str, Value]) -> dict[str, Value]:
    """Adds a program to the builder; returns its values by argument of the chain."""
    program = part_of(stage.program, ("y",))
    if "u" in program.inputs:
        return {"x": _inlined(builder, program, {**values, **stage.names["x"]})["y"]}
    return {
        argument: _inlined(builder, program, {"x": values[argument], **names})["y"]
        for argument, names in stage.names.items()
    }


def _backward(
    builder: Builder, stage: _Stage, inputs: Mapping[str, Value], grads: Mapping[str, Value], outputs: dict[str, Value]
) -> dict[str, Value]:
    """The gradients of a program's inputs from those of its outputs; adds its operands' gradients to ``outputs``."""
    before = dict[str, Value]()
    for argument, names in stage.names.items():
        arguments = inputs if "u" in stage.program.inputs else {"x": inputs[argument]}
        computed = _inlined(builder, stage.program, {**arguments, **names, "dy": grads[argument]})
        for name, renamed in names.items():
            if name[0] != "c":
                key, gradient = f"d{renamed}", computed[f"d{name}"]
                outputs[key] = builder("add", outputs[key], gradient) if key in outputs else gradient
        before |= {"x": computed["dx"], "u": computed["du"]} if "du" in computed else {argument: computed["dx"]}
    return before


def _order(name: str) -> tuple[int, int, str]:
    """Sort key of operands: kind, number, gate before up."""
    digits = name[1:].rstrip("gu")
    return _KINDS[name[0]], int(digits), name[1 + len(digits) :]


@lru_cache(maxsize=1024)
def is_linear_in_scale(program: Program) -> bool:
    """Whether the value is linear in ``r0``, so that another factor of the row can be merged into it."""
    part = program.only(("y",))
    reads, linear = {SCALE}, {SCALE}
    for line in part.lines:
        if not reads.isdisjoint(line.arguments):
            reads.add(line.name)
            linear |= {line.name} if _is_linear(line, reads, linear) else set()
    return dict(part.outputs)["y"] in linear


def _is_linear(line: Line, reads: set[str], linear: set[str]) -> bool:
    """Whether a line that reads the scale is linear in it."""
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
