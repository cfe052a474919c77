"""Reads a user's function of tensors as a program, gradients included: PyTorch runs it under autograd and is observed.

Gradients are therefore PyTorch's, including those at the corners of ``relu`` and ``clamp`` and those of a user's
``torch.autograd.Function``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...fuser.contract.torch_private import core_decompositions, set_device_guard, storage_id
from .builder import Builder
from .program import Program, Value, with_constants
from .rules import RULES

if TYPE_CHECKING:
    from ...fuser.contract.torch_private import OpOverload

Function = Callable[..., Tensor]
R = TypeVar("R")

_SHAPE = (5, 7)
_TRIAL = (8, 48)
_OF_WHOLE_NUMBERS = frozenset({"where", "full", "full_like", "zeros_like", "ones_like"})
"""Operations that may have an integer dtype: choices among constants, which become float32 where they meet x."""
_NUMBERS_OF_PYTHON = {"_local_scalar_dense": "numbers that Python reads from a tensor or a constant"}


class UnknownFunctionError(ValueError):
    """The function uses operations that kernels do not know. PyTorch can still run it."""


class NotPointwiseError(ValueError):
    """The function does not compute each element from one element of each argument."""


def trace(function: Function, inputs: tuple[str, ...], constants: Sequence[float] = ()) -> Program:
    """Traces ``y`` and the gradient of each input, by element; the caller sums ``dr0``, ``db0``, … over rows.

    Runs in its own thread, outside of the caller's modes: inference, another trace, a default device. The state of the
    user's random numbers does not change.

    Args:
        function: takes a tensor for each input, all of the same shape, then the constants.
        inputs: their names in the program: ``x``, ``u`` of a gated function, then ``r0``, … for numbers of a row and
            ``b0``, … for those of a column.
        constants: values of ``c0``, … of the program, which can be replaced later.

    Raises:
        UnknownFunctionError: it uses an operation that kernels do not know.
        NotPointwiseError: an element depends on more than its own inputs.
    """
    return outside_of_modes(_trace, function, inputs, constants)


def check_pointwise(function: Function, inputs: tuple[str, ...], constants: Sequence[float] = ()) -> None:
    """Tries out a function that cannot be traced: parts of its arguments must give the same parts of its result.

    Raises:
        NotPointwiseError: they do not.
    """
    outside_of_modes(_check_pointwise, function, inputs, constants)


def outside_of_modes(function: Callable[..., R], *arguments: object) -> R:
    """Calls a function in its own thread, outside of the caller's modes such as inference or another trace."""
    set_device_guard()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *arguments).result()


def _trace(function: Function, inputs: tuple[str, ...], constants: Sequence[float]) -> Program:
    names = (*inputs, *[f"c{i}" for i in range(len(constants))], "dy")
    tracer = _Tracer(function, names)
    generator = torch.Generator().manual_seed(0)
    *leaves, dy = [_random(_SHAPE, generator, name != "dy") for name in (*inputs, "dy")]
    numbers = [torch.tensor(constant, dtype=torch.float32, device="cpu") for constant in constants]
    for name, leaf in zip(names, [*leaves, *numbers, dy], strict=True):
        tracer.values[storage_id(leaf)] = name
    with tracer, torch.autograd.set_detect_anomaly(False):  # which would add operations to the backward
        y = _call(function, leaves, numbers)
        if y.dtype != torch.float32 or y.shape != _SHAPE:
            raise NotPointwiseError(_expected_result(function, y))
        outputs = {"y": tracer.value(y)}
        for name, grad in zip(inputs, gradients(function, y, leaves, dy), strict=True):
            outputs[f"d{name}"] = 0.0 if grad is None else tracer.value(grad)
    program = tracer.builder.program(outputs)
    _try_out(function, program, inputs, tuple(constants))
    return program


def _try_out(function: Function, program: Program, inputs: tuple[str, ...], constants: tuple[float, ...]) -> None:
    """Compares the program with the function on other numbers and another shape; rows and columns share values."""
    leaves = _trial_inputs(inputs)
    y = _call(function, leaves, constants)
    dy = _random(_TRIAL, torch.Generator().manual_seed(2), requires_grad=False)
    tensors = {**{name: t.detach() for name, t in zip(inputs, leaves, strict=True)}, "dy": dy}
    computed = with_constants(program, constants).run(tensors)
    same = y.shape == _TRIAL and _close(y, computed["y"].expand(_TRIAL), 1e-4)
    for name, leaf, grad in zip(inputs, leaves, gradients(function, y, leaves, dy), strict=True):
        summed = computed[f"d{name}"].expand(_TRIAL).sum_to_size(leaf.shape)
        same = same and _close(torch.zeros_like(leaf) if grad is None else grad, summed, 1e-3)
    if not same:
        raise NotPointwiseError(_depends_on_more(function))


@torch.random.fork_rng(devices=())  # the function may draw random numbers
def _check_pointwise(function: Function, inputs: tuple[str, ...], constants: Sequence[float]) -> None:
    leaves = [leaf.detach() for leaf in _trial_inputs(inputs)]
    y, repeated = _call(function, leaves, constants), _call(function, leaves, constants)
    if y.shape != _TRIAL or not y.dtype.is_floating_point:
        raise NotPointwiseError(_expected_result(function, y))
    rows = _call(function, [leaf if leaf.shape[0] == 1 else leaf[2:5] for leaf in leaves], constants)
    columns = _call(function, [leaf if leaf.shape[1] == 1 else leaf[:, 7:20] for leaf in leaves], constants)
    elements = [leaf.expand(_TRIAL)[:, :6].reshape(-1, 1, 1) for leaf in leaves]  # of both signs, each by itself
    alone = torch.stack([_call(function, element, constants) for element in zip(*elements, strict=True)])
    same = _close(y, repeated, 0) and _close(y[2:5], rows, 1e-4) and _close(y[:, 7:20], columns, 1e-4)
    if not (same and _close(y[:, :6].reshape(-1), alone.reshape(-1), 1e-4)):
        raise NotPointwiseError(_depends_on_more(function))


def _call(function: Function, leaves: Sequence[Tensor], constants: Sequence[Tensor | float]) -> Tensor:
    with _named_in_errors(function, leaves):
        y = function(*[leaf * 1.0 for leaf in leaves], *constants)  # not the leaves themselves: it may write in place
    if not isinstance(y, Tensor):
        raise NotPointwiseError(f"{name_of(function)}: must return one tensor, returned a {type(y).__name__}")
    return y


@contextmanager
def _named_in_errors(function: Function, leaves: Sequence[Tensor], part: str = "") -> Iterator[None]:
    """Adds to an error of the user's code which function, or which part of it, raised it on which tensors."""
    try:
        yield
    except (NotPointwiseError, UnknownFunctionError):
        raise
    except Exception as error:
        shapes = ", ".join(str(list(leaf.shape)) for leaf in leaves)
        subject = f"{part}{name_of(function)}"
        error.add_note(f"{subject} raised this on tensors {shapes}; a function of one element takes any shape")
        raise


def gradients(function: Function, y: Tensor, leaves: Sequence[Tensor], dy: Tensor) -> Sequence[Tensor | None]:
    """The gradients of a function's value by autograd; None for leaves that it does not depend on."""
    if not y.requires_grad:
        return [None] * len(leaves)
    with _named_in_errors(function, leaves, "the backward of "):
        return torch.autograd.grad(y, leaves, dy, allow_unused=True)


def _trial_inputs(inputs: tuple[str, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"r": (_TRIAL[0], 1), "a": (1, _TRIAL[1]), "b": (1, _TRIAL[1])}
    return [_random(shapes.get(name[0], _TRIAL), generator, True, 3.0) for name in inputs]


def _random(shape: tuple[int, int], generator: torch.Generator, requires_grad: bool, scale: float = 1.0) -> Tensor:
    numbers = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * scale
    return numbers.requires_grad_(requires_grad)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    return torch.allclose(a, b, tolerance, tolerance / 10, equal_nan=True)


class _Tracer(TorchDispatchMode):
    """Adds a line for each operation. Values are keyed by memory, so in-place writes and views need no special care."""

    def __init__(self, function: Function, inputs: tuple[str, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.builder, self.values = Builder(inputs), dict[int, Value]()
        self._function, self._alive = function, list[Tensor]()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch._dynamo, which takes two seconds

    def value(self, argument: object) -> Any:
        """The program's value for an argument; the argument itself if it is neither tensor nor number."""
        if isinstance(argument, bool | int | float):
            return float(argument)
        if not isinstance(argument, Tensor):
            return argument
        if storage_id(argument) in self.values:
            return self.values[storage_id(argument)]
        if argument.numel() != 1 or argument.requires_grad:
            raise NotPointwiseError(
                f"{name_of(self._function)}: reads a tensor of shape {list(argument.shape)} that is not one of its "
                f"arguments{_line_of(self._function)}; make it an argument, or a number"
            )
        return float(argument)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        rule = RULES.get(name) or RULES.get(name.removesuffix("_"))
        if rule is None:
            return self._decomposed(func, name, args, kwargs)
        values = [*map(self.value, args)], {k: self.value(v) for k, v in kwargs.items() if k != "out"}
        result = func(*args, **kwargs)
        self._check_result(name, result)
        try:
            value = rule(self.builder, *values[0], **values[1])
        except TypeError:  # the rule has no such argument
            raise self._unknown(f"{name} with {values[1] or args}") from None
        as_type = self.builder.as_boolean if result.dtype == torch.bool else self.builder.as_number
        self.values[storage_id(result)] = as_type(value)
        self._alive.append(result)  # so that no other tensor gets its memory
        return result

    def _decomposed(self, func: OpOverload, name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        decomposition: Callable[..., object] = _decompositions().get(func, func.decompose)
        with self:
            result = decomposition(*args, **kwargs)
        if result is NotImplemented:
            raise self._unknown(_NUMBERS_OF_PYTHON.get(name, name))
        return result

    def _check_result(self, name: str, result: Tensor) -> None:
        at = _line_of(self._function)
        if result.numel() != 1 and result.shape != _SHAPE:
            raise NotPointwiseError(
                f"{name_of(self._function)}: {name} returns shape {list(result.shape)} for elements of shape "
                f"{list(_SHAPE)}{at}"
            )
        of_elements = result.numel() != 1 and name not in _OF_WHOLE_NUMBERS
        if of_elements and result.dtype not in (torch.float32, torch.bool):
            raise self._unknown(f"{name} to {result.dtype}")

    def _unknown(self, operation: str) -> UnknownFunctionError:
        return UnknownFunctionError(
            f"{name_of(self._function)}: kernels do not know {operation}{_line_of(self._function)}"
        )


@cache
def _decompositions() -> dict[OpOverload, Callable[..., object]]:
    """PyTorch's decompositions, for functions without a rule. Loading them takes a second."""
    return core_decompositions()


def name_of(function: object) -> str:
    """The name of a function in errors."""
    return str(getattr(function, "__name__", type(function).__name__))


def _expected_result(function: Function, y: Tensor) -> str:
    return (
        f"{name_of(function)}: must return a float32 tensor of the shape of its arguments, {list(_SHAPE)} while it is "
        f"read; returned {y.dtype} of shape {list(y.shape)}"
    )


def _depends_on_more(function: Function) -> str:
    more = "a shape, other elements, or random numbers"
    return f"{name_of(function)}: an element depends on more than its own inputs: {more}"


def _line_of(function: Function) -> str:
    """The line of the user's function that is running, if there is one."""
    code, frame = getattr(inspect.unwrap(function), "__code__", None), sys._getframe()
    while frame is not None and code is not None:
        if frame.f_code.co_filename == code.co_filename:
            return f", {frame.f_code.co_filename}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
