"""Functions with operations that kernels do not know: recorded as graphs of PyTorch operations, or kept as Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ...fuser.contract.torch_private import symbolic_graph
from .tracing import Function, NotPointwiseError, gradients, name_of, outside_of_modes

_SHAPE = (5, 7)  # of an example; graphs are for any
_DTYPES = (torch.float32, torch.float64)


class OnPyTorch(Protocol):
    """A function that PyTorch runs.

    Attributes:
        eager_only: the reason why it cannot be compiled, or None.
    """

    @property
    def eager_only(self) -> str | None: ...

    def value(self, arguments: Sequence[Tensor], constants: Sequence[float]) -> Tensor:
        """The value [rows, C] for arguments [rows, C], or [rows, 1] for numbers of rows, all float32 or float64."""

    def gradients(self, arguments: Sequence[Tensor], constants: Sequence[float], dy: Tensor) -> list[Tensor]:
        """The gradient of each argument, in its shape."""


class Operations(NamedTuple):
    """A function as graphs, one per dtype of its arguments; values that it read elsewhere are frozen in them."""

    values: dict[torch.dtype, GraphModule]
    derivatives: dict[torch.dtype, GraphModule]

    @property
    def eager_only(self) -> str | None:
        return None

    def value(self, arguments: Sequence[Tensor], constants: Sequence[float]) -> Tensor:
        y: Tensor = _run(self.values, arguments, constants, ())
        return y

    def gradients(self, arguments: Sequence[Tensor], constants: Sequence[float], dy: Tensor) -> list[Tensor]:
        return list(_run(self.derivatives, arguments, constants, (dy.to(arguments[0].dtype),)))


class KeptFunction(NamedTuple):
    """A function that is called each time, with autograd in the backward. Pickling it pickles the function."""

    function: Function
    why: str

    @property
    def eager_only(self) -> str | None:
        return self.why

    def value(self, arguments: Sequence[Tensor], constants: Sequence[float]) -> Tensor:
        with torch.no_grad():
            return self.function(*[argument.clone() for argument in arguments], *constants)

    def gradients(self, arguments: Sequence[Tensor], constants: Sequence[float], dy: Tensor) -> list[Tensor]:
        return _gradients(self.function, arguments, constants, dy)


def on_pytorch(function: Function, inputs: tuple[str, ...], constants: int) -> OnPyTorch:
    """The form in which PyTorch runs a function: graphs for any number of rows and columns, or the function itself.

    Args:
        function, inputs: as for :func:`.tracing.trace`.
        constants: the number of constants after its inputs.
    """
    return outside_of_modes(_read, function, inputs, constants)


def _read(function: Function, inputs: tuple[str, ...], constants: int) -> OnPyTorch:
    number = len(inputs)

    def value(*arguments: Tensor) -> Tensor:
        return function(*[argument.clone() for argument in arguments])

    def derivative(*arguments: Tensor) -> list[Tensor]:
        *operands, dy = arguments
        return _gradients(function, operands[:number], operands[number:], dy)

    def graphs(of: Callable[..., object], *dy: tuple[int, int]) -> dict[torch.dtype, GraphModule]:
        shapes = [*[(_SHAPE[0], 1) if name[0] == "r" else _SHAPE for name in inputs], *[()] * constants, *dy]
        return {t: _graph(of, [torch.ones(shape, dtype=t, device="cpu") for shape in shapes]) for t in _DTYPES}

    try:
        return Operations(graphs(value), graphs(derivative, _SHAPE))
    except NotPointwiseError as error:
        raise NotPointwiseError(f"{name_of(function)}: {error}") from None
    except Exception as error:  # whatever it is: PyTorch cannot follow the function, which has run on numbers before
        why = f"{name_of(function)} is not made of PyTorch's operations alone ({type(error).__name__}: {error})"
        return KeptFunction(function, why.partition("\n")[0])


def _gradients(
    function: Function, arguments: Sequence[Tensor], constants: Sequence[object], dy: Tensor
) -> list[Tensor]:
    """Gradients by autograd; zeros for arguments that the function does not depend on."""
    leaves = [argument.detach().clone().requires_grad_() for argument in arguments]
    with torch.enable_grad():
        y = function(*[leaf * 1.0 for leaf in leaves], *constants)  # not the leaves themselves: it may write in place
    computed = gradients(function, y, leaves, dy.to(y.dtype))
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, computed, strict=True)]


def _graph(function: Callable[..., object], examples: Sequence[Tensor]) -> GraphModule:
    """Traces a graph that takes a device after its tensors, so that it serves any device."""
    module = symbolic_graph(function, examples)
    graph, first = module.graph, next(node for node in module.graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        device = graph.placeholder("device")
    for node in [*graph.nodes]:
        if node.op == "get_attr":
            with graph.inserting_before(node):
                node.replace_all_uses_with(_number(graph, getattr(module, node.target), device))
            graph.erase_node(node)
        elif "device" in node.kwargs:
            node.update_kwarg("device", device)
    graph.eliminate_dead_code()
    return GraphModule(torch.nn.Module(), graph)


def _number(graph: Graph, tensor: Tensor, device: Node) -> Node:
    """The node of a one-element tensor that the function reads from outside, with its current value."""
    if tensor.numel() != 1:
        raise NotPointwiseError(
            f"reads a tensor of shape {list(tensor.shape)} that is not one of its arguments; make it an argument"
        )
    full = torch.ops.aten.full.default
    return graph.call_function(full, ([*tensor.shape], tensor.item()), {"dtype": tensor.dtype, "device": device})


def _run(
    graphs: dict[torch.dtype, GraphModule],
    arguments: Sequence[Tensor],
    constants: Sequence[float],
    dy: Sequence[Tensor],
) -> Any:
    dtype, device = arguments[0].dtype, arguments[0].device
    numbers = [torch.full((), constant, dtype=dtype, device=device) for constant in constants]
    with torch.no_grad():
        return graphs[dtype](*arguments, *numbers, *dy, device)
