"""An op that a user writes as a function of one element."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..fuser import Gradient, Grads, Keyword, Op, TensorSpec
from ..fuser.op import RESERVED
from . import kernels
from .activation_spec import ActivationSpec, Interleaved, spec_of_program
from .checks import check_features, check_floats, check_halves, check_parameter, check_rows, check_split_sizes
from .programs.columns import of_rows, sums
from .programs.halves import join, split
from .programs.parameters import Function, InOrder, Parameters
from .programs.program import Program, part_of, with_constants
from .programs.tracing import UnknownFunctionError, check_pointwise, name_of, trace

_RESERVED = RESERVED | {"x", "y", "split_sizes"}


class Pointwise(Op):
    """A function of one element, such as an activation, with its gradients.

        Pointwise(lambda x: torch.relu(x).square())
        Pointwise(lambda gate, up: F.silu(gate.clamp(max=7)) * up, halves="concat")
        Pointwise(lambda x, s: x * s)  # s is a keyword of a call: a number for each row
        Pointwise(lambda x, beta: x * torch.sigmoid(beta * x), columns={"beta": torch.ones(experts, features)})
        Pointwise(lambda x, limit: x.clamp(max=limit), constants={"limit": 7.0})

    The function is read once, here, with the gradients that autograd gives it. From then on :attr:`program` is the op,
    on every device: what the function reads besides its arguments is constant. The function may be any callable, such
    as a module without parameters or the ``apply`` of a ``torch.autograd.Function``, and may write in place.
    Half-precision inputs are computed in float32 and rounded once.

    A function with operations that kernels do not know is kept and run by PyTorch; :attr:`refusal` says why.

    Args:
        function: takes x [..., C], or with ``halves`` gate and up [..., C / 2]; then the numbers of the rows [..., 1]
            for each further parameter that is of no column, no constant and has no default. Returns a tensor of the
            shape of the first.
        halves: None if all columns of x are one argument; ``"concat"`` if gate is their first half and up the second;
            :func:`interleaved` if gate and up alternate in blocks.
        columns: parameters of the op, by the name of a parameter of the function: one number for each column of y, [C],
            or for each group of rows too, [E, C]. A shape, for zeros, or a tensor that they begin as. All have the same
            shape.
        constants: numbers for parameters of the function, by name. They are parameters of the kernels and not part of
            their code: assigning others to :attr:`constants` compiles nothing.

    Keywords of a call:
        the names of the function's further parameters: floating-point of shape ``x.shape[:-1]``, differentiable.
        split_sizes: with columns of groups, how many rows each has, as :class:`GroupedLinear` takes it. Rows past the
            last group read zeros.

    Attributes:
        program: what the op computes, gradients included; None for a function that kernels do not know.
        refusal: why there is no program; else None.
        constants: the numbers by name, which can be read; to change one, assign all.

    Raises:
        ValueError: an element of the result depends on other elements, on the shape or on chance; a tensor is read
            that is no argument; a parameter has a reserved name; a constant is no number; constants or columns are no
            parameters of the function; columns of several shapes; another ``halves``.
        ArgumentError: in a call, an x or a keyword of another shape, dtype or device.
    """

    checks_values = False
    replayable = True
    values_checked_on_host = frozenset()

    class Saved(NamedTuple):
        x: Tensor | None
        rows: dict[str, Tensor]
        row_dtypes: dict[str, torch.dtype]
        columns: dict[str, Tensor]
        split_sizes: Tensor | None

    def __init__(
        self,
        function: Function,
        *,
        halves: str | Interleaved | None = None,
        columns: Mapping[str, Sequence[int] | Tensor] = MappingProxyType({}),
        constants: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.name, self.halves = name_of(function), _checked(halves)
        self._x_inputs = ("x",) if halves is None else ("x", "u")
        parameters = Parameters.of(function, len(self._x_inputs), columns, constants, _RESERVED)
        self._row_inputs = {name: f"r{i}" for i, name in enumerate(parameters.rows)}
        self._column_inputs = {name: f"b{i}" for i, name in enumerate(parameters.columns)}
        self._columns_shape = self._add_columns(columns)
        self._groups = self._columns_shape[0] if len(self._columns_shape) == 2 else None
        keywords = [*parameters.rows, *(() if self._groups is None else ("split_sizes",))]
        self.keywords = {name: Keyword(required=True, tensor=True) for name in keywords}
        self._constant_names = parameters.constants
        self.constants = constants
        self.program: Program | None = None
        self.refusal: str | None = None
        self._function: Function | None = None
        if parameters.constants or parameters.columns:
            names = parameters.rows + parameters.columns + parameters.constants
            function = InOrder(function, len(self._x_inputs), names)
        try:
            self.program = trace(function, self._program_inputs, self._constants)
        except UnknownFunctionError as error:
            check_pointwise(function, self._program_inputs, self._constants)
            self.refusal, self._function = str(error), function

    def _add_columns(self, columns: Mapping[str, Sequence[int] | Tensor]) -> tuple[int, ...]:
        """Adds the parameters, and returns their shape."""
        for name, start in columns.items():
            tensor = start.detach().clone() if isinstance(start, Tensor) else torch.zeros(tuple(start))
            if tensor.dim() not in (1, 2) or not tensor.is_floating_point():
                raise ValueError(f"{self.name}: the columns {name} must be numbers [C] or [E, C], got {start!r}")
            self.register_parameter(name, torch.nn.Parameter(tensor))
        shapes = {tuple(parameter.shape) for parameter in self._parameters.values() if parameter is not None}
        if len(shapes) > 1:
            raise ValueError(f"{self.name}: columns have one shape, got {sorted(shapes)}")
        return next(iter(shapes), ())

    @property
    def constants(self) -> Mapping[str, float]:
        """The numbers by name. A copy: assign all of them to change one."""
        return dict(zip(self._constant_names, self._constants, strict=True))

    @constants.setter
    def constants(self, constants: Mapping[str, float]) -> None:
        if constants.keys() != set(self._constant_names):
            raise ValueError(f"{self.name}: the constants are {list(self._constant_names)}, got {list(constants)}")
        for name, number in constants.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"{self.name}: the constant {name} must be a number, got {number!r}")
        self._constants = tuple([float(constants[name]) for name in self._constant_names])

    @property
    def spec(self) -> ActivationSpec | None:
        """The function as an activation, with the scale of a row for its number; None where kernels have none such.

        Its numbers of columns are those of groups: :attr:`vectors`.
        """
        if self.program is None or len(self.program.rows) > 1 or (self._column_inputs and self._groups is None):
            return None
        return spec_of_program(with_constants(self.program, self._constants), _block(self.halves))

    @property
    def vectors(self) -> Tensor | None:
        """[K, groups, C]: the numbers of columns, of a group or of all rows; None if the function reads none."""
        return self._vectors(dict(self.inputs()))

    @property
    def has_columns_of_groups(self) -> bool:
        """Whether each group of rows has numbers of columns of its own."""
        return self._groups is not None

    @property
    def has_columns(self) -> bool:
        """Whether the function reads numbers of columns."""
        return bool(self._column_inputs)

    @property
    def reads_a_row(self) -> bool:
        """Whether the function reads numbers of a row."""
        return bool(self._row_inputs)

    def column_grads(self, by_column: Tensor | None, wanted: Collection[str]) -> dict[str, Gradient]:
        """The wanted gradients of the columns by name, from those of :attr:`vectors`."""
        if by_column is None:
            return {}
        return {
            name: by_column[i].view(parameter.shape).to(parameter.dtype)
            for i, (name, parameter) in enumerate(self.inputs())
            if name in wanted
        }

    def compile_kernels(self, dtype: torch.dtype = torch.bfloat16) -> int:
        """Compiles the kernels of the function for a Hopper GPU and keeps them on disk; returns how many.

        Both directions, over rows and as the epilogue of a grouped linear. A call then waits for no compiler. It takes
        seconds, and needs NVRTC but no GPU: at install time, or on one rank before the others.

        Raises:
            CompileError: NVRTC is missing, or refuses.
            ValueError: kernels do not know the function.
        """
        if self.program is None:
            raise ValueError(f"Pointwise: {self.refusal}")
        vectors = self.vectors
        return kernels.compile_ahead(self.program, self.spec, dtype, None if vectors is None else vectors.dtype)

    @property
    def _program_inputs(self) -> tuple[str, ...]:
        return (*self._x_inputs, *self._row_inputs.values(), *self._column_inputs.values())

    def check(self, x: TensorSpec, *, split_sizes: Any = None, **rows: Tensor) -> TensorSpec:
        check_floats(x)
        for name, numbers in rows.items():
            check_rows(name, numbers, x)
        if self.halves is not None:
            check_halves(x, _block(self.halves))
            x = x._replace(shape=(*x.shape[:-1], x.shape[-1] // 2))
        if self._groups is not None:
            check_split_sizes(split_sizes, self._groups, x)
        for name in self._column_inputs:
            check_parameter(name, getattr(self, name), self._columns_shape, x.device)
            check_features(x, self._columns_shape[-1])
        return x

    def fwd(
        self,
        x: Tensor,
        *,
        split_sizes: Tensor | Sequence[int] | None = None,
        needs_grad: frozenset[str],
        **rows: Tensor,
    ) -> tuple[Tensor, Saved]:
        flat, columns = _flat(x), dict(self.inputs())
        sizes = None if split_sizes is None else kernels.as_split_sizes(split_sizes, x.device)
        if self.program is None:
            y = self._value(flat, rows, columns, sizes)
        else:
            y = kernels.pointwise(
                flat,
                self.program,
                _block(self.halves),
                self._numbers(x, rows),
                self._vectors(columns),
                sizes,
                self._constants,
            )
        saved = self._residuals(x, rows, columns, needs_grad)._replace(split_sizes=sizes)
        return y.reshape(*x.shape[:-1], y.shape[-1]), saved

    def bwd(self, saved: Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        x, flat = None if saved.x is None else _flat(saved.x), _flat(dy)
        want_numbers, want_vectors = (
            not needs_grad.isdisjoint(each) for each in (self._row_inputs, self._column_inputs)
        )
        if self.program is None:
            assert x is not None
            computed = self._gradients(x, saved, flat)
        else:
            computed = kernels.pointwise_backward(
                flat,
                x,
                self.program,
                _block(self.halves),
                self._numbers(dy, saved.rows),
                self._vectors(saved.columns),
                saved.split_sizes,
                want_x="x" in needs_grad,
                want_numbers=want_numbers,
                want_vectors=want_vectors,
                constants=self._constants,
            )
        dx, by_row, by_column = computed
        grads: dict[str, Gradient] = {"x": dx.reshape(*dy.shape[:-1], dx.shape[-1])} if dx is not None else {}
        for i, name in enumerate(self._row_inputs):
            if name in needs_grad and by_row is not None:
                grads[name] = by_row[i].view(dy.shape[:-1]).to(saved.row_dtypes[name])
        return grads | self.column_grads(by_column, needs_grad)

    def _numbers(self, columns: Tensor, rows: Mapping[str, Tensor]) -> Tensor | None:
        """[R, rows]: the numbers of the rows. None if none is read; zeros for one that is not read beside others."""
        if not rows:
            return None
        if len(self._row_inputs) == 1:
            return next(iter(rows.values())).reshape(1, -1).contiguous()
        dtype = _compute_dtype(columns, *rows.values())
        zeros = columns.new_zeros(columns.shape[:-1], dtype=dtype)
        return torch.stack([rows.get(name, zeros).to(dtype).reshape(-1) for name in self._row_inputs])

    def _vectors(self, columns: Mapping[str, Tensor]) -> Tensor | None:
        """[K, groups, C]: the numbers of the columns. None if none is read; zeros for one that is not read."""
        if not columns:
            return None
        like = next(iter(columns.values()))
        shape = (1, self._groups or 1, like.shape[-1])
        if len(self._column_inputs) == 1:
            return like.reshape(shape).contiguous()
        dtype, zeros = _compute_dtype(*columns.values()), torch.zeros_like(like)
        return torch.cat([columns.get(name, zeros).to(dtype).reshape(shape) for name in self._column_inputs])

    def trace_refusal(self) -> str | None:
        return None if self._function is None else f"{self.name} is differentiated by autograd in the backward"

    def extra_repr(self) -> str:
        halves = () if self.halves is None else (f"halves={self.halves!r}",)
        constants = [f"{name}={number}" for name, number in self.constants.items()]
        columns = [f"{name}={list(parameter.shape)}" for name, parameter in self.inputs()]
        return ", ".join([self.name, *self.keywords, *columns, *constants, *halves])

    def _outputs(self, needs_grad: frozenset[str]) -> tuple[str, ...]:
        """The program's names for the gradients that are wanted."""
        inputs = self._row_inputs | self._column_inputs
        numbers = [f"d{value}" for name, value in inputs.items() if name in needs_grad]
        return (*[f"d{name}" for name in self._x_inputs if "x" in needs_grad], *numbers)

    def _residuals(
        self, x: Tensor, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor], needs_grad: frozenset[str]
    ) -> Saved:
        """Of x, the rows and the columns, what the wanted gradients are computed from."""
        outputs, dtypes = self._outputs(needs_grad), {name: numbers.dtype for name, numbers in rows.items()}
        if not outputs:
            return self.Saved(None, {}, dtypes, {}, None)
        reads = frozenset(self._program_inputs) if self.program is None else part_of(self.program, outputs).reads
        kept = {name: numbers for name, numbers in rows.items() if self._row_inputs[name] in reads}
        kept_columns = {name: numbers for name, numbers in columns.items() if self._column_inputs[name] in reads}
        kept_x = None if reads.isdisjoint(self._x_inputs) else x
        return self.Saved(kept_x, kept, dtypes, kept_columns, None)

    def _value(
        self, x: Tensor, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor], split_sizes: Tensor | None
    ) -> Tensor:
        """Of a function that kernels do not know, by PyTorch; x is [rows, columns]."""
        assert self._function is not None
        with torch.no_grad():
            y = self._function(*[t.clone() for t in self._arguments(x, rows, columns, split_sizes)], *self._constants)
        return join((y,), x.new_empty((x.shape[0], x.shape[1] // len(self._x_inputs))))

    def _gradients(self, x: Tensor, saved: Saved, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Of x, [R, rows] of the numbers and [K, groups, C] of the columns, by autograd."""
        assert self._function is not None
        arguments = self._arguments(x, saved.rows, saved.columns, saved.split_sizes)
        leaves = [t.clone().requires_grad_() for t in arguments]
        with torch.enable_grad():
            y = self._function(*[leaf * 1.0 for leaf in leaves], *self._constants)
        above = split(dy.to(y.dtype), 1, _block(self.halves))[0]
        grads = torch.autograd.grad(y, leaves, above, materialize_grads=True)
        count, last = len(self._x_inputs), len(self._program_inputs) - len(self._column_inputs)
        by_row = torch.stack([g.flatten() for g in grads[count:last]]) if saved.rows else None
        by_column = [g.reshape(dy.shape) for g in grads[last:]]
        of_groups = sums(torch.stack(by_column), saved.split_sizes) if by_column else None
        return join(grads[:count], torch.empty_like(x)), by_row, of_groups

    def _arguments(
        self, x: Tensor, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor], split_sizes: Tensor | None
    ) -> list[Tensor]:
        """What the function takes, in float32 at least: [rows, blocks, block], or [rows, 1, 1] for numbers of a row."""
        numbers, vectors = self._numbers(x, rows), self._vectors(columns)
        dtype = _compute_dtype(x, *rows.values())
        halves = split(x.to(dtype), len(self._x_inputs), _block(self.halves))
        by_row = () if numbers is None else numbers.to(dtype)[:, :, None, None]
        if vectors is None:
            return [*halves, *by_row]
        by_column = of_rows(vectors.to(dtype), split_sizes, x.shape[0])
        return [*halves, *by_row, *split(by_column, 1, _block(self.halves))[0]]


def _checked(halves: Any) -> str | Interleaved | None:
    if halves is None or halves == "concat" or isinstance(halves, Interleaved):
        return halves  # type: ignore[no-any-return]
    raise ValueError(f"Pointwise: halves must be None, 'concat' or interleaved(n); got {halves!r}")


def _block(halves: str | Interleaved | None) -> int | None:
    return halves.block if isinstance(halves, Interleaved) else None


def _flat(x: Tensor) -> Tensor:
    """[rows, columns], dense."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1]).contiguous()


def _compute_dtype(*operands: Tensor) -> torch.dtype:
    """float32, or wider where an operand is."""
    return reduce(torch.promote_types, [operand.dtype for operand in operands], torch.float32)
