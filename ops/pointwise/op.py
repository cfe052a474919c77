"""An op that a user writes as a function of one element."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...fuser import ArgumentError, Gradient, Grads, Keyword, Op, Spec
from ...fuser.op import RESERVED
from ..activation_spec import Interleaved
from ..checks import check_floats, check_rows
from .program import Program, part_of
from .tracing import UnknownFunctionError, check_pointwise, name_of, trace

Function = Callable[..., Tensor]


class Pointwise(Op):
    """A function of one element, such as an activation, with its gradients.

        Pointwise(lambda x: torch.relu(x).square())
        Pointwise(lambda gate, up: F.silu(gate.clamp(max=7)) * up, halves="concat")
        Pointwise(lambda x, s: x * s)  # s is a keyword of a call: a number for each row

    The function is read here, once, with the gradients that autograd gives it. From then on :attr:`program` is the op,
    on every device: what the function reads besides its arguments is constant. The function may be any callable, a
    module without parameters or the ``apply`` of a ``torch.autograd.Function`` among them, and may write in place.
    Half-precision inputs are computed in float32 and rounded once.

    A function with operations that kernels do not know is kept and run by PyTorch; :attr:`refusal` says why.

    Args:
        function: takes x [..., C], or with ``halves`` gate and up [..., C / 2]; then the numbers of the rows [..., 1]
            for each further parameter that has no default. Returns a tensor of the shape of the first.
        halves: None if all columns of x are one argument; ``"concat"`` if gate is their first half and up the second;
            :func:`interleaved` if gate and up alternate in blocks.

    Keywords of a call:
        the names of the function's further parameters: floating-point of shape ``x.shape[:-1]``, differentiable.

    Attributes:
        program: what the op computes, gradients included; None for a function that kernels do not know.
        refusal: why there is no program; else None.

    Raises:
        ValueError: an element of the result depends on other elements, on the shape or on chance; a tensor is read
            that is no argument; a parameter has a reserved name; another ``halves``.
        ArgumentError: in a call, an x or a keyword of another shape, dtype or device.
    """

    checks_values = False

    class Saved(NamedTuple):
        x: Tensor | None
        rows: dict[str, Tensor]
        row_dtypes: dict[str, torch.dtype]
        dtype: torch.dtype

    def __init__(self, function: Function, *, halves: str | Interleaved | None = None) -> None:
        super().__init__()
        self.name, self.halves = name_of(function), _checked(halves)
        names = _row_names(function, 1 if halves is None else 2)
        self.keywords = {name: Keyword(required=True, tensor=True) for name in names}
        self._row_inputs = {name: f"r{i}" for i, name in enumerate(names)}
        self._x_inputs = ("x",) if halves is None else ("x", "u")
        self.program: Program | None = None
        self.refusal: str | None = None
        self._function: Function | None = None
        try:
            self.program = trace(function, self._program_inputs)
        except UnknownFunctionError as error:
            check_pointwise(function, self._program_inputs)
            self.refusal, self._function = str(error), function

    @property
    def _program_inputs(self) -> tuple[str, ...]:
        return (*self._x_inputs, *self._row_inputs.values())

    def check(self, x: Spec, **rows: Tensor) -> Spec:
        check_floats(x)
        for name, numbers in rows.items():
            check_rows(name, numbers, x)
        if self.halves is None:
            return x
        block, columns = _block(self.halves), x.shape[-1]
        if columns % (2 * (block or 1)):
            halves = f" blocks of {block} columns" if block else " halves"
            raise ArgumentError(f"x: expected gate and up{halves} in the last dimension, got shape {list(x.shape)}")
        return x._replace(shape=(*x.shape[:-1], columns // 2))

    def fwd(self, x: Tensor, *, needs_grad: frozenset[str], **rows: Tensor) -> tuple[Tensor, Saved]:
        dtype = _compute_dtype(x, rows)
        inputs = self._inputs(x, rows, dtype)
        y = self._value(inputs).expand(inputs["x"].shape)
        residuals = self._residuals(x, rows, needs_grad)
        row_dtypes = {name: numbers.dtype for name, numbers in rows.items()}
        return self._merged([y]).to(x.dtype), self.Saved(*residuals, row_dtypes, dtype)

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        inputs = self._inputs(saved.x, saved.rows, saved.dtype)
        inputs["dy"] = self._split(dy.to(saved.dtype), 1)[0]
        computed = self._gradients(inputs, self._outputs(needs_grad))
        parts = [computed[f"d{name}"] for name in self._x_inputs if "x" in needs_grad]
        grads: dict[str, Gradient] = {"x": self._merged(parts).to(dy.dtype)} if parts else {}
        for name in needs_grad - {"x"}:
            by_element = self._merged([computed[f"d{self._row_inputs[name]}"]])
            grads[name] = by_element.sum(-1).to(saved.row_dtypes[name])
        return grads

    def trace_refusal(self) -> str | None:
        return None if self._function is None else f"{self.name} is differentiated by autograd in the backward"

    def extra_repr(self) -> str:
        halves = () if self.halves is None else (f"halves={self.halves!r}",)
        return ", ".join([self.name, *self.keywords, *halves])

    def _outputs(self, needs_grad: frozenset[str]) -> tuple[str, ...]:
        """The program's names for the gradients that are wanted."""
        rows = [f"d{self._row_inputs[name]}" for name in self.keywords if name in needs_grad]
        return (*[f"d{name}" for name in self._x_inputs if "x" in needs_grad], *rows)

    def _residuals(
        self, x: Tensor, rows: Mapping[str, Tensor], needs_grad: frozenset[str]
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Of x and the rows, what the wanted gradients are computed from."""
        outputs = self._outputs(needs_grad)
        if not outputs:
            return None, {}
        reads = frozenset(self._program_inputs) if self.program is None else part_of(self.program, outputs).reads
        kept = {name: numbers for name, numbers in rows.items() if self._row_inputs[name] in reads}
        return (None if reads.isdisjoint(self._x_inputs) else x), kept

    def _inputs(self, x: Tensor | None, rows: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """What the program reads, in the dtype that it computes in: columns [..., blocks, block], rows [..., 1, 1]."""
        halves = () if x is None else self._split(x.to(dtype), len(self._x_inputs))
        inputs = dict(zip(self._x_inputs, halves, strict=False))
        for name, numbers in rows.items():
            inputs[self._row_inputs[name]] = numbers.to(dtype).reshape(*numbers.shape, 1, 1)
        return inputs

    def _split(self, columns: Tensor, count: int) -> tuple[Tensor, ...]:
        """The halves of [..., C] (or its only one), as views [..., blocks, block]."""
        block = _block(self.halves) or columns.shape[-1] // count
        blocks = columns.shape[-1] // max(1, count * block)
        return columns.reshape(*columns.shape[:-1], blocks, count, block).unbind(-2)

    def _merged(self, halves: list[Tensor]) -> Tensor:
        """The inverse of :meth:`_split`."""
        return torch.stack(halves, -2).flatten(-3)

    def _value(self, inputs: Mapping[str, Tensor]) -> Tensor:
        if self.program is not None:
            return part_of(self.program, ("y",)).run(inputs)["y"]
        assert self._function is not None
        with torch.no_grad():
            return self._function(*[inputs[name].clone() for name in self._program_inputs])

    def _gradients(self, inputs: dict[str, Tensor], outputs: tuple[str, ...]) -> dict[str, Tensor]:
        shape = inputs["dy"].shape
        if self.program is not None:
            return {name: t.expand(shape) for name, t in part_of(self.program, outputs).run(inputs).items()}
        assert self._function is not None
        leaves = {name: inputs[name].expand(shape).clone().requires_grad_() for name in self._program_inputs}
        with torch.enable_grad():
            y = self._function(*[leaf * 1.0 for leaf in leaves.values()])
        asked = [leaves[name[1:]] for name in outputs]
        grads = torch.autograd.grad(y, asked, inputs["dy"], materialize_grads=True)
        return dict(zip(outputs, grads, strict=True))


def _checked(halves: Any) -> str | Interleaved | None:
    if halves is None or halves == "concat" or isinstance(halves, Interleaved):
        return halves  # type: ignore[no-any-return]
    raise ValueError(f"Pointwise: halves must be None, 'concat' or interleaved(n); got {halves!r}")


def _block(halves: str | Interleaved | None) -> int | None:
    return halves.block if isinstance(halves, Interleaved) else None


def _compute_dtype(x: Tensor, rows: Mapping[str, Tensor]) -> torch.dtype:
    dtype = torch.promote_types(x.dtype, torch.float32)
    for numbers in rows.values():
        dtype = torch.promote_types(dtype, numbers.dtype)
    return dtype


def _row_names(function: Function, skipped: int) -> list[str]:
    """The parameters of a function, behind the first ones, that a call must give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a builtin without a signature takes what it is a function of
        return []
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [p.name for p in parameters if p.default is p.empty and p.kind in positional][skipped:]
    for name in names:
        if name in RESERVED or name in ("x", "y"):
            raise ValueError(f"Pointwise: a parameter of {name_of(function)} is called {name!r}, which is reserved")
    return names
