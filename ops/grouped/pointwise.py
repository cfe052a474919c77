"""``Pointwise``: an op written as a function of one element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...fuser import Grads, Keyword, Op, Promises, TensorSpec
from ...fuser.contract.op import RESERVED
from ...fuser.contract.tracing import note
from .. import kernels
from ..basic.link import Link
from ..formats.recipe import Recipe, gives_blocks
from ..programs.columns import of_rows, sums
from ..programs.halves import join, split
from ..programs.operations import OnPyTorch, on_pytorch
from ..programs.parameters import InOrder, Parameters
from ..programs.program import Program
from ..programs.tracing import Function, UnknownFunctionError, check_pointwise, name_of, trace
from ..values.activation_spec import ActivationSpec, Interleaved
from ..values.checks import check_features, check_floats, check_halves, check_parameter, check_rows, check_split_sizes
from . import link_rows
from .grouped_linear import with_rows_of
from .link_rows import flat

_RESERVED = RESERVED | {"x", "y", "split_sizes", "self", "op_kwargs"}


class Pointwise(Op):
    """A function of one element, such as an activation, with its gradients.

        Pointwise(lambda x: torch.relu(x).square())
        Pointwise(lambda gate, up: F.silu(gate.clamp(max=7)) * up, halves="concat")
        Pointwise(lambda x, s: x * s)  # s is a keyword of a call: a number for each row
        Pointwise(lambda x, beta: x * torch.sigmoid(beta * x), columns={"beta": torch.ones(experts, features)})
        Pointwise(lambda x, limit: x.clamp(max=limit), constants={"limit": 7.0})

    The constructor reads the function once, with the gradients that autograd gives it. From then on :attr:`program`
    defines the op on every device: values that the function reads besides its arguments are constants. The function may
    be any callable, such as a module without parameters or the ``apply`` of a ``torch.autograd.Function``, and may
    write in place. Half-precision inputs are computed in float32 and rounded once.

    If the function has operations that kernels do not know, PyTorch runs its operations; :attr:`refusal` says why. A
    function that computes outside of PyTorch, or with constants as Python numbers, is called each time, as
    :class:`Promises` says.

    Args:
        function: takes x [..., C], or with ``halves`` gate and up [..., C / 2]; then the numbers of the rows [..., 1]
            for each further parameter that is neither a column nor a constant and has no default. Returns a tensor of
            the shape of the first argument.
        halves: None if all columns of x are one argument; ``"concat"`` if gate is their first half and up the second;
            :func:`interleaved` if gate and up alternate in blocks.
        columns: parameters of the op, by the name of a parameter of the function: one number for each column of y, [C],
            or for each column of each group, [E, C]. A value is a shape, for zeros, or a tensor of initial values. All
            have the same shape.
        constants: numbers for parameters of the function, by name. They are arguments of the kernels, not part of the
            code: assigning other numbers to :attr:`constants` compiles nothing.

    Keyword Args:
        further parameters of the function: floating-point of shape ``x.shape[:-1]``, differentiable.
        split_sizes: with columns of groups, the number of rows of each group, as for :class:`GroupedLinear`. Rows past
            the last group read zeros.

    Attributes:
        program: the program of the op, gradients included; None for a function that kernels do not know.
        refusal: the reason why there is no program, or None.
        constants: the numbers by name, read-only; to change one, assign all.

    Raises:
        TypeError: the function cannot be called.
        ValueError: an element of the result depends on other elements, on the shape or on random numbers; the function
            reads a tensor that is not an argument, or is a module with parameters; a parameter has a reserved name; a
            constant is not a number; constants or columns are not parameters of the function; columns differ in shape,
            or have the name of an attribute of the op; an unknown ``halves``.
        ArgumentError: in a call, x or a keyword has another shape, dtype or device.
    """

    promises = Promises(replayable=True, values_checked=frozenset())

    Saved = link_rows.Saved

    def __init__(
        self,
        function: Function,
        *,
        halves: str | Interleaved | None = None,
        columns: Mapping[str, Sequence[int] | Tensor] = MappingProxyType({}),
        constants: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if not callable(function):
            raise TypeError(f"Pointwise: expected a function of tensors, got {function!r}")
        super().__init__()
        self.name, self.halves = name_of(function), _checked(halves)
        self._x_inputs = ("x",) if halves is None else ("x", "u")
        parameters = Parameters.of(function, len(self._x_inputs), columns, constants, _RESERVED)
        self._row_inputs = {name: f"r{i}" for i, name in enumerate(parameters.rows)}
        self.program: Program | None = None
        self.refusal: str | None = None
        self._columns_shape = self._add_columns(columns)
        self._groups = self._columns_shape[0] if len(self._columns_shape) == 2 else None
        kind = "a" if self._groups is None else "b"
        self._column_inputs = {name: f"{kind}{i}" for i, name in enumerate(parameters.columns)}
        keywords = [*parameters.rows, *(() if self._groups is None else ("split_sizes",))]
        self.keywords = {name: Keyword(required=True, tensor=True) for name in keywords}
        self._constant_names = parameters.constants
        self.constants = constants
        self._on_pytorch: OnPyTorch | None = None
        if parameters.constants or parameters.columns:
            names = parameters.rows + parameters.columns + parameters.constants
            function = InOrder(function, len(self._x_inputs), names)
        try:
            self.program = trace(function, self._program_inputs, self._constants)
        except UnknownFunctionError as error:
            check_pointwise(function, self._program_inputs, self._constants)
            self.refusal = str(error)
            self._on_pytorch = on_pytorch(function, self._program_inputs, len(self._constants))
            self.promises = replace(self.promises, eager_only=self._on_pytorch.eager_only)

    def _add_columns(self, columns: Mapping[str, Sequence[int] | Tensor]) -> tuple[int, ...]:
        """Adds the parameters; returns their shape."""
        for name, start in columns.items():
            tensor = start.detach().clone() if isinstance(start, Tensor) else _zeros(start)
            if tensor is None or tensor.dim() not in (1, 2) or not tensor.numel() or not tensor.is_floating_point():
                raise ValueError(f"{self.name}: the columns {name} must be numbers [C] or [E, C], got {start!r}")
            if hasattr(type(self), name) or name in vars(self):
                raise ValueError(f"{self.name}: columns cannot be called {name!r}, as an attribute of the op is")
            self.register_parameter(name, torch.nn.Parameter(tensor))
        shapes = {tuple(parameter.shape) for parameter in self._parameters.values() if parameter is not None}
        if len(shapes) > 1:
            raise ValueError(f"{self.name}: columns have one shape, got {sorted(shapes)}")
        return next(iter(shapes), ())

    @property
    def constants(self) -> Mapping[str, float]:
        """The numbers by name, as a copy: assign all of them to change one."""
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
    def gate_block(self) -> int | None:
        """See :attr:`Activated.gate_block`."""
        return None if self.halves is None else _block(self.halves) or 0

    @property
    def column_dims(self) -> dict[str, int | None]:
        """The dimension of each parameter, from the end, that has the columns of the output."""
        return dict.fromkeys(self._column_inputs, -1)

    @property
    def link(self) -> Link | None:
        """The op as a link of a chain; None for a function that kernels do not know."""
        if self.program is None:
            return None
        operands = tuple(self._row_inputs), tuple(self._column_inputs), (), self._constants
        return Link(self.program, *operands, self.halves is not None, _block(self.halves), self._groups)

    @property
    def spec(self) -> ActivationSpec | None:
        """The function as an activation; None if kernels have no such activation."""
        return None if self.link is None else self.link.spec

    def compile_kernels(self, dtype: torch.dtype = torch.bfloat16, recipe: Recipe | None = None) -> int:
        """Compiles the kernels of the function for a Hopper GPU and keeps them on disk; returns their number.

        It compiles both directions, over rows and as the epilogue of a grouped linear, so that no call waits for a
        compiler. It takes seconds, and needs NVRTC but no GPU: call it at install time, or on one rank before the
        others.

        Args:
            recipe: the recipe of the linears before and after the function, if its kernels quantise their results.

        Raises:
            CompileError: NVRTC is missing, or refuses.
            ValueError: kernels do not know the function.
        """
        if self.program is None:
            raise ValueError(f"Pointwise: {self.refusal}")
        columns = tuple([parameter.dtype for _, parameter in self.inputs()])
        return kernels.compile_ahead(self.program, self.spec, dtype, columns, gives_blocks(recipe))

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
    ) -> tuple[Tensor, link_rows.Saved]:
        link, columns = self.link, dict(self.inputs())
        sizes = None if split_sizes is None else kernels.as_split_sizes(split_sizes, x.device)
        if link is not None:
            return link_rows.forward(link_rows.LinkOperands(link, rows, columns, sizes), x, needs_grad)
        note(f"PyTorch runs it: {self.refusal}")
        dtypes = {name: numbers.dtype for name, numbers in rows.items()}
        saved = (
            self.Saved(x, dict(rows), dtypes, columns, sizes) if needs_grad else self.Saved(None, {}, dtypes, {}, None)
        )
        return with_rows_of(x, self._value(flat(x), rows, columns, sizes)), saved

    def bwd(self, saved: link_rows.Saved, dy: Tensor, *, needs_grad: frozenset[str]) -> Grads:
        link, columns = self.link, dict(self.inputs())
        if link is not None:
            return link_rows.backward(link, saved, dy, columns, needs_grad)
        grads = self._gradients(saved, flat(dy))
        shapes = {"x": (*dy.shape[:-1], grads["x"].shape[-1]), **dict.fromkeys(self._row_inputs, dy.shape[:-1])}
        dtypes = {"x": dy.dtype, **saved.dtypes}
        for name, parameter in columns.items():
            shapes[name], dtypes[name] = tuple(parameter.shape), parameter.dtype
        return {name: grad.reshape(shapes[name]).to(dtypes[name]) for name, grad in grads.items() if name in needs_grad}

    def extra_repr(self) -> str:
        halves = () if self.halves is None else (f"halves={self.halves!r}",)
        constants = [f"{name}={number}" for name, number in self.constants.items()]
        columns = [f"{name}={list(parameter.shape)}" for name, parameter in self.inputs()]
        return ", ".join([self.name, *self.keywords, *columns, *constants, *halves])

    def _value(
        self, x: Tensor, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor], split_sizes: Tensor | None
    ) -> Tensor:
        """The value of a function that kernels do not know, by PyTorch; x is [rows, columns]."""
        assert self._on_pytorch is not None
        arguments = [t.flatten(1) for t in self._arguments(x, rows, columns, split_sizes)]
        return self._on_pytorch.value(arguments, self._constants).to(x.dtype)

    def _gradients(self, saved: link_rows.Saved, dy: Tensor) -> dict[str, Tensor]:
        """The gradients of x, of numbers of rows [rows] and of numbers of columns [groups, C], by PyTorch."""
        assert self._on_pytorch is not None
        assert saved.x is not None
        x = flat(saved.x)
        operands = self._arguments(x, saved.by_keyword, saved.columns, saved.split_sizes)
        computed = self._on_pytorch.gradients([t.flatten(1) for t in operands], self._constants, dy)
        grads = [grad.reshape(operand.shape) for grad, operand in zip(computed, operands, strict=True)]
        count, last = len(self._x_inputs), len(self._program_inputs) - len(self._column_inputs)
        by_name = {"x": join(tuple(grads[:count]), torch.empty_like(x))}
        by_name |= {name: g.flatten() for name, g in zip(self._row_inputs, grads[count:last], strict=True)}
        for name, grad in zip(self._column_inputs, grads[last:], strict=True):
            by_name[name] = sums(grad.reshape(dy.shape), saved.split_sizes)
        return by_name

    def _arguments(
        self, x: Tensor, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor], split_sizes: Tensor | None
    ) -> list[Tensor]:
        """The arguments of the function, in at least float32: [rows, blocks, block], or [rows, 1] for numbers of a row.

        Flattened, they are [rows, C].
        """
        dtype = kernels.operators.outputs.compute_dtype(x, list(rows.values()))
        halves = split(x.to(dtype), len(self._x_inputs), _block(self.halves))
        by_row = [rows[name].to(dtype).reshape(-1, 1) for name in self._row_inputs]
        vectors = [columns[name].to(dtype).reshape(self._groups or 1, -1) for name in self._column_inputs]
        return [*halves, *by_row, *[of_rows(vector, split_sizes, x.shape[0]) for vector in vectors]]


def _zeros(shape: Any) -> Tensor | None:
    """A tensor of zeros, or None if the value is not a shape."""
    is_shape = isinstance(shape, Sequence) and all([type(size) is int and size >= 0 for size in shape])
    return torch.zeros(tuple(shape)) if is_shape else None


def _checked(halves: Any) -> str | Interleaved | None:
    if halves is None or halves == "concat" or isinstance(halves, Interleaved):
        return halves  # type: ignore[no-any-return]
    raise ValueError(f"Pointwise: halves must be None, 'concat' or interleaved(n); got {halves!r}")


def _block(halves: str | Interleaved | None) -> int | None:
    return halves.block if isinstance(halves, Interleaved) else None
