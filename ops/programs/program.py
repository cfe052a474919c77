"""A pointwise function as straight-line code with one operation per line; PyTorch runs it and kernels compile it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

Value = str | float
"""The name of an input or of a line, or a constant."""


class Operation(NamedTuple):
    """An operation of a line.

    Attributes:
        run: computes it on tensors.
        code: its C++ expression; ``{n}`` is an argument, ``M`` has the elementary functions.
        is_boolean: whether the result is a truth value.
        commutes: whether the two arguments may be exchanged; a constant is then the second.
        with_constant: computes it on a tensor and a number.
        code_of_multiple: its C++ expression for ``{0}`` times ``{1}``, which is the same for all elements.
    """

    run: Callable[..., Tensor]
    code: str
    is_boolean: bool = False
    commutes: bool = False
    with_constant: Callable[..., Tensor] | None = None
    code_of_multiple: str | None = None


OPERATIONS: dict[str, Operation] = {
    "neg": Operation(torch.neg, "-{0}"),
    "abs": Operation(torch.abs, "fabsf({0})"),
    "exp": Operation(torch.exp, "M::exp({0})", code_of_multiple="M::exp({0}, {1})"),
    "expm1": Operation(torch.expm1, "M::expm1({0})"),
    "log": Operation(torch.log, "M::log({0})"),
    "log1p": Operation(torch.log1p, "M::log1p({0})"),
    "sqrt": Operation(torch.sqrt, "M::sqrt({0})"),
    "rsqrt": Operation(torch.rsqrt, "M::rsqrt({0})"),
    "reciprocal": Operation(torch.reciprocal, "M::reciprocal({0})"),
    "sigmoid": Operation(torch.sigmoid, "M::sigmoid({0})", code_of_multiple="M::sigmoid({0}, {1})"),
    "tanh": Operation(torch.tanh, "M::tanh({0})"),
    "erf": Operation(torch.erf, "erff({0})"),
    "sin": Operation(torch.sin, "M::sin({0})"),
    "cos": Operation(torch.cos, "M::cos({0})"),
    "atan": Operation(torch.atan, "atanf({0})"),
    "round": Operation(torch.round, "rintf({0})"),
    "floor": Operation(torch.floor, "floorf({0})"),
    "add": Operation(torch.add, "{0} + {1}", commutes=True, with_constant=torch.add),
    "sub": Operation(torch.sub, "{0} - {1}", with_constant=torch.sub),
    "mul": Operation(torch.mul, "{0} * {1}", commutes=True, with_constant=torch.mul),
    "div": Operation(torch.div, "M::divide({0}, {1})", with_constant=torch.div),
    "pow": Operation(torch.pow, "powf({0}, {1})", with_constant=torch.pow),
    # NaN stays NaN, as in PyTorch
    "maximum": Operation(torch.maximum, "ptx::max_nan({0}, {1})", commutes=True, with_constant=torch.clamp_min),
    "minimum": Operation(torch.minimum, "ptx::min_nan({0}, {1})", commutes=True, with_constant=torch.clamp_max),
    "lt": Operation(torch.lt, "{0} < {1}", is_boolean=True, with_constant=torch.lt),
    "le": Operation(torch.le, "{0} <= {1}", is_boolean=True, with_constant=torch.le),
    "eq": Operation(torch.eq, "{0} == {1}", is_boolean=True, commutes=True, with_constant=torch.eq),
    "and": Operation(torch.logical_and, "{0} && {1}", is_boolean=True, commutes=True),
    "or": Operation(torch.logical_or, "{0} || {1}", is_boolean=True, commutes=True),
    "not": Operation(torch.logical_not, "!{0}", is_boolean=True),
    "where": Operation(torch.where, "{0} ? {1} : {2}"),
}


class Line(NamedTuple):
    """``name = operation(*arguments)``."""

    name: str
    operation: str
    arguments: tuple[Value, ...]

    def __str__(self) -> str:
        return f"{self.name} = {self.operation} {' '.join(map(str, self.arguments))}"


@dataclass(frozen=True, eq=False)
class Program:
    """Straight-line code. Programs of equal text compute the same, so the text is a key.

    Attributes:
        inputs: the names of its inputs: ``x`` and for a gated function ``u`` (gate and up), ``r0``, ``r1``, … (numbers
            of a row), ``b0``, … (numbers of a column, separate for each group, if there are groups), ``a0``, … (numbers
            of a column, the same for all rows), ``m0``, … (matrices, one number per element), ``c0``, … (constants),
            ``dy`` (the gradient of ``y``). Columns and matrices of gate and up are two inputs, ``b0g`` and ``b0u``.
        lines: in an order of computation.
        outputs: ``y`` and the gradients ``dx``, ``du``, ``dr0``, …, ``db0``, …, by name.
    """

    inputs: tuple[str, ...]
    lines: tuple[Line, ...]
    outputs: tuple[tuple[str, Value], ...]

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The inputs that are columns: ``x``, or ``x`` and ``u``."""
        return tuple([name for name in self.inputs if name in ("x", "u")])

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The inputs that are numbers of a row."""
        return tuple([name for name in self.inputs if name[0] == "r"])

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """The inputs that are numbers of a column."""
        return tuple([name for name in self.inputs if name[0] in "ab"])

    @cached_property
    def matrices(self) -> tuple[str, ...]:
        """The inputs that are numbers of an element."""
        return tuple([name for name in self.inputs if name[0] == "m"])

    @cached_property
    def column_operands(self) -> Mapping[str, tuple[str, ...]]:
        """The operands with numbers of a column, each with its inputs: one, or two for gate and up."""
        return _operands(self.columns)

    @cached_property
    def matrix_operands(self) -> Mapping[str, tuple[str, ...]]:
        """The operands that are matrices, each with its inputs."""
        return _operands(self.matrices)

    @cached_property
    def tensor_operands(self) -> Mapping[str, tuple[str, ...]]:
        """Column operands, then matrix operands."""
        return {**self.column_operands, **self.matrix_operands}

    @cached_property
    def constants(self) -> tuple[str, ...]:
        """The inputs that are one number for all elements."""
        return tuple([name for name in self.inputs if name[0] == "c"])

    def only(self, names: Iterable[str]) -> Program:
        """The program of these outputs alone, with unneeded lines removed and the rest renumbered. All inputs stay."""
        names = frozenset(names)
        outputs = [(name, value) for name, value in self.outputs if name in names]
        needed, kept = {value for _, value in outputs}, list[Line]()
        for line in reversed(self.lines):
            if line.name in needed:
                kept.append(line)
                needed |= set(line.arguments)
        kept.reverse()
        renamed: dict[Value, Value] = {line.name: f"t{i}" for i, line in enumerate(kept)}
        lines = [Line(str(renamed[n]), op, tuple([renamed.get(a, a) for a in args])) for n, op, args in kept]
        return Program(self.inputs, tuple(lines), tuple([(n, renamed.get(v, v)) for n, v in outputs]))

    @cached_property
    def reads(self) -> frozenset[str]:
        """The inputs on which the outputs depend."""
        values = {argument for line in self.lines for argument in line.arguments}
        return frozenset(self.inputs) & (values | {value for _, value in self.outputs})

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Computes every output in the dtype of the inputs, which broadcast.

        An output that reads no input has no dimension.
        """
        first = next(iter(inputs.values()))
        values: dict[Value, Tensor] = {name: inputs[name] for name in inputs}

        def tensor(value: Value) -> Tensor:
            if isinstance(value, str):
                return values[value]
            return torch.full((), value, dtype=first.dtype, device=first.device)

        for name, kind, arguments in self.lines:
            operation, last = OPERATIONS[kind], arguments[-1]
            if isinstance(last, float) and operation.with_constant is not None and isinstance(arguments[0], str):
                values[name] = operation.with_constant(values[arguments[0]], last)
            else:
                values[name] = operation.run(*map(tensor, arguments))
        return {name: tensor(value) for name, value in self.outputs}

    @cached_property
    def text(self) -> str:
        """The canonical text, which :func:`parse` reads. It contains none of the user's names."""
        return "\n".join(
            [" ".join(("in", *self.inputs)), *map(str, self.lines), *(f"{n} = {v}" for n, v in self.outputs)]
        )

    @cached_property
    def name(self) -> str:
        """The name of the program in messages; six letters of a digest of the text tell functions apart."""
        return f"function {sha256(self.text.encode()).hexdigest()[:6]}"

    def __str__(self) -> str:
        return self.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)


def _operands(inputs: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys([name.rstrip("gu") for name in inputs])
    return {name: tuple([each for each in inputs if each.rstrip("gu") == name]) for name in names}


@lru_cache(maxsize=1024)
def part_of(program: Program, outputs: tuple[str, ...]) -> Program:
    """:meth:`Program.only`, computed once."""
    return program.only(outputs)


@lru_cache(maxsize=1024)
def with_constants(program: Program, constants: tuple[float, ...]) -> Program:
    """The program with these numbers in place of its constants."""
    values: dict[Value, Value] = dict(zip(program.constants, constants, strict=True))
    lines = [Line(name, op, tuple([values.get(a, a) for a in arguments])) for name, op, arguments in program.lines]
    inputs = tuple([name for name in program.inputs if name not in values])
    return Program(inputs, tuple(lines), tuple([(name, values.get(v, v)) for name, v in program.outputs]))


@lru_cache(maxsize=1024)
def parse(text: str) -> Program:
    """The inverse of :attr:`Program.text`.

    Raises:
        ValueError: the text is not that of a program.
    """
    head, *rest = text.split("\n")
    keyword, *inputs = head.split(" ")
    if keyword != "in" or not inputs:
        raise ValueError(f"a program starts with its inputs, 'in x dy'; got {head!r}")
    lines, outputs, names = list[Line](), list[tuple[str, Value]](), set(inputs)
    for number, row in enumerate(rest, start=2):
        name, _, value = row.partition(" = ")
        words = value.split(" ")
        if not value or name in names:
            raise ValueError(f"line {number} of a program: expected a new name, '=' and a value, got {row!r}")
        if len(words) == 1:
            outputs.append((name, _value(words[0], names)))
        elif outputs or words[0] not in OPERATIONS:
            raise ValueError(f"line {number} of a program: {words[0]!r} is not an operation, or follows an output")
        else:
            lines.append(Line(name, words[0], tuple([_value(word, names) for word in words[1:]])))
            names.add(name)
    program = Program(tuple(inputs), tuple(lines), tuple(outputs))
    if program.text != text:
        raise ValueError("the text of a program is not in canonical form")
    return program


def _value(word: str, names: set[str]) -> Value:
    return word if word in names else float(word)
