"""An op that a user writes as a function of one element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..fuser import Grads, Keyword, Op, TensorSpec
from ..fuser.op import RESERVED
from ..fuser.tracing import note
from . import kernels, link_rows
from .activation_spec import ActivationSpec, Interleaved
from .checks import check_features, check_floats, check_halves, check_parameter, check_rows, check_split_sizes
from .grouped_linear import with_rows_of
from .link import Link
from .link_rows import flat
from .programs.columns import of_rows, sums
from .programs.halves import join, split
from .programs.parameters import InOrder, Parameters
from .programs.program import Program
from .programs.tracing import Function, UnknownFunctionError, check_pointwise, gradients, name_of, trace
from .quantized.recipe import Recipe, gives_blocks

_RESERVED = RESERVED | {"x", "y", "split_sizes", "self", "op_kwargs"}


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
            for each further parameter that is neither a column nor a constant and has no default. Returns a tensor
            of the shape of the first.
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
        TypeError: the function cannot be called.
        ValueError: an element of the result depends on other elements, on the shape or on chance; a tensor is read
            that is no argument; the function is a module with parameters; a parameter has a reserved name; a constant
            is no number; constants or columns are no parameters of the function; columns of several shapes, or called
            as an attribute of the op; another ``halves``.
        ArgumentError: in a call, an x or a keyword of another shape, dtype or device.
    """

    checks_values = False
    replayable = True
    values_checked_on_host = frozenset()

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
    def link(self) -> Link | None:
        """The op as a link of a chain; None for a function that kernels do not know."""
        if self.program is None:
            return None
        operands = tuple(self._row_inputs), tuple(self._column_inputs), (), self._constants
        return Link(self.program, *operands, self.halves is not None, _block(self.halves), self._groups)

    @property
    def spec(self) -> ActivationSpec | None:
        """The function as an activation; None where kernels have none such."""
        return None if self.link is None else self.link.spec

    def compile_kernels(self, dtype: torch.dtype = torch.bfloat16, recipe: Recipe | None = None) -> int:
        """Compiles the kernels of the function for a Hopper GPU and keeps them on disk; returns how many.

        Both directions, over rows and as the epilogue of a grouped linear. A call then waits for no compiler. It takes
        seconds, and needs NVRTC but no GPU: at install time, or on one rank before the others.

        Args:
            recipe: of the linears before and behind the function, where its kernels quantise what they compute.

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

    def trace_refusal(self) -> str | None:
        return None if self._function is None else f"{self.name} is differentiated by autograd in the backward"

    def extra_repr(self) -> str:
        halves = () if self.halves is None else (f"halves={self.halves!r}",)
        constants = [f"{name}={number}" for name, number in self.constants.items()]
        columns = [f"{name}={list(parameter.shape)}" for name, parameter in self.inputs()]
        return ", ".join([self.name, *self.keywords, *columns, *constants, *halves])

    def _value(
        self, x: Tensor, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor], split_sizes: Tensor | None
    ) -> Tensor:
        """Of a function that kernels do not know, by PyTorch; x is [rows, columns]."""
        assert self._function is not None
        with torch.no_grad():
            arguments = [t.flatten(1).clone() for t in self._arguments(x, rows, columns, split_sizes)]
            return self._function(*arguments, *self._constants).to(x.dtype)

    def _gradients(self, saved: link_rows.Saved, dy: Tensor) -> dict[str, Tensor]:
        """Of x, of the numbers of rows [rows] and of those of columns [groups, C], by autograd."""
        assert self._function is not None
        assert saved.x is not None
        x = flat(saved.x)
        leaves = [
            t.clone().requires_grad_() for t in self._arguments(x, saved.by_keyword, saved.columns, saved.split_sizes)
        ]
        with torch.enable_grad():
            y = self._function(*[leaf.flatten(1) * 1.0 for leaf in leaves], *self._constants)
        computed = gradients(self._function, y, leaves, dy.to(y.dtype))
        grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, computed, strict=True)]
        count, last = len(self._x_inputs), len(self._program_inputs) - len(self._column_inputs)
        by_name = {"x": join(tuple(grads[:count]), torch.empty_like(x))}
        by_name |= {name: g.flatten() for name, g in zip(self._row_inputs, grads[count:last], strict=True)}
        for name, grad in zip(self._column_inputs, grads[last:], strict=True):
            by_name[name] = sums(grad.reshape(dy.shape), saved.split_sizes)
        return by_name

    def _arguments(
        self, x: Tensor, rows: Mapping[str, Tensor], columns: Mapping[str, Tensor], split_sizes: Tensor | None
    ) -> list[Tensor]:
        """What the function takes, in float32 at least: [rows, blocks, block], or [rows, 1] for numbers of a row.

        Flattened, they are [rows, C].
        """
        dtype = kernels.outputs.compute_dtype(x, list(rows.values()))
        halves = split(x.to(dtype), len(self._x_inputs), _block(self.halves))
        by_row = [rows[name].to(dtype).reshape(-1, 1) for name in self._row_inputs]
        vectors = [columns[name].to(dtype).reshape(self._groups or 1, -1) for name in self._column_inputs]
        return [*halves, *by_row, *[of_rows(vector, split_sizes, x.shape[0]) for vector in vectors]]


def _zeros(shape: Any) -> Tensor | None:
    """None for what is no shape."""
    is_shape = isinstance(shape, Sequence) and all([type(size) is int and size >= 0 for size in shape])
    return torch.zeros(tuple(shape)) if is_shape else None


def _checked(halves: Any) -> str | Interleaved | None:
    if halves is None or halves == "concat" or isinstance(halves, Interleaved):
        return halves  # type: ignore[no-any-return]
    raise ValueError(f"Pointwise: halves must be None, 'concat' or interleaved(n); got {halves!r}")


def _block(halves: str | Interleaved | None) -> int | None:
    return halves.block if isinstance(halves, Interleaved) else None
