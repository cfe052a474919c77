"""An op that a user writes as a function of one element."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import Gradient, Grads, Keyword, Op, TensorSpec
from ..fuser.op import RESERVED
from . import kernels
from .activation_spec import Interleaved
from .checks import check_floats, check_halves, check_rows
from .programs.halves import join, split
from .programs.program import Program, part_of
from .programs.tracing import UnknownFunctionError, check_pointwise, name_of, trace

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
    values_checked_on_host = frozenset()

    class Saved(NamedTuple):
        x: Tensor | None
        rows: dict[str, Tensor]
        row_dtypes: dict[str, torch.dtype]

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

    def check(self, x: TensorSpec, **rows: Tensor) -> TensorSpec:
        check_floats(x)
        for name, numbers in rows.items():
            check_rows(name, numbers, x)
        if self.halves is None:
            return x
        check_halves(x, _block(self.halves))
        return x._replace(shape=(*x.shape[:-1], x.shape[-1] // 2))

    def fwd(self, x: Tensor, *, needs_grad: frozenset[str], **rows: Tensor) -> tuple[Tensor, Saved]:
        flat = _flat(x)
        if self.program is None:
            y = self._value(flat, rows)
        else:
            y = kernels.pointwise(flat, self.program, _block(self.halves), self._numbers(x, rows))
        kept, kept_rows = self._residuals(x, rows, needs_grad)
        return y.reshape(*x.shape[:-1], y.shape[-1]), self.Saved(kept, kept_rows, {n: t.dtype for n, t in rows.items()})

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        x, flat = None if saved.x is None else _flat(saved.x), _flat(dy)
        wanted = [name for name in self.keywords if name in needs_grad]
        if self.program is None:
            assert x is not None
            computed = self._gradients(x, saved.rows, flat)
        else:
            wants = {"want_x": "x" in needs_grad, "want_numbers": bool(wanted)}
            numbers = self._numbers(dy, saved.rows)
            computed = kernels.pointwise_backward(flat, x, self.program, _block(self.halves), numbers, **wants)
        dx, by_row = computed
        grads: dict[str, Gradient] = {"x": dx.reshape(*dy.shape[:-1], dx.shape[-1])} if dx is not None else {}
        for i, name in enumerate(self.keywords):
            if name in needs_grad and by_row is not None:
                grads[name] = by_row[i].view(dy.shape[:-1]).to(saved.row_dtypes[name])
        return grads

    def _numbers(self, columns: Tensor, rows: Mapping[str, Tensor]) -> Tensor | None:
        """[R, rows]: the numbers of the rows, in the dtype that the program computes in; zeros for what is not read."""
        if not self.keywords:
            return None
        dtype = torch.promote_types(columns.dtype, torch.float32)
        for numbers in rows.values():
            dtype = torch.promote_types(dtype, numbers.dtype)
        if len(rows) == len(self.keywords) == 1:
            return next(iter(rows.values())).to(dtype).reshape(1, -1).contiguous()
        zeros = columns.new_zeros(columns.shape[:-1], dtype=dtype)
        return torch.stack([rows.get(name, zeros).to(dtype).reshape(-1) for name in self.keywords])

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

    def _value(self, x: Tensor, rows: Mapping[str, Tensor]) -> Tensor:
        """Of a function that kernels do not know, by PyTorch; x is [rows, columns]."""
        assert self._function is not None
        with torch.no_grad():
            y = self._function(*[t.clone() for t in self._arguments(x, rows)])
        return join((y,), x.new_empty((x.shape[0], x.shape[1] // len(self._x_inputs))))

    def _gradients(self, x: Tensor, rows: Mapping[str, Tensor], dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Of x, and [R, rows] of the numbers, by autograd."""
        assert self._function is not None
        leaves = [t.clone().requires_grad_() for t in self._arguments(x, rows)]
        with torch.enable_grad():
            y = self._function(*[leaf * 1.0 for leaf in leaves])
        above = split(dy.to(y.dtype), 1, _block(self.halves))[0]
        grads = torch.autograd.grad(y, leaves, above, materialize_grads=True)
        count = len(self._x_inputs)
        by_row = torch.stack([g.flatten() for g in grads[count:]]) if rows else None
        return join(grads[:count], torch.empty_like(x)), by_row

    def _arguments(self, x: Tensor, rows: Mapping[str, Tensor]) -> list[Tensor]:
        """What the function takes: columns [rows, blocks, block] and numbers [rows, 1, 1], in float32 at least."""
        numbers = self._numbers(x, rows)
        dtype = torch.promote_types(x.dtype, torch.float32) if numbers is None else numbers.dtype
        halves = split(x.to(dtype), len(self._x_inputs), _block(self.halves))
        return [*halves, *(() if numbers is None else numbers[:, :, None, None])]


def _checked(halves: Any) -> str | Interleaved | None:
    if halves is None or halves == "concat" or isinstance(halves, Interleaved):
        return halves  # type: ignore[no-any-return]
    raise ValueError(f"Pointwise: halves must be None, 'concat' or interleaved(n); got {halves!r}")


def _block(halves: str | Interleaved | None) -> int | None:
    return halves.block if isinstance(halves, Interleaved) else None


def _flat(x: Tensor) -> Tensor:
    """[rows, columns], dense."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()


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
