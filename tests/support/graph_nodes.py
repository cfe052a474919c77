"""Captured CUDA graphs, and what they do, node by node, as the driver tells it."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

KINDS = ("kernel", "memcpy", "memset", "host", "graph", "empty", "wait event", "event record")


class _KernelNodeParams(ctypes.Structure):
    """``CUDA_KERNEL_NODE_PARAMS_v2`` of cuda.h."""

    _fields_ = [
        ("func", ctypes.c_void_p),
        ("dimensions", ctypes.c_uint * 7),  # grid, block, shared memory
        ("arguments", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def captured(function: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of ``function`` that can still be read, and its results, which a replay writes again."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        results = function()
    graph.instantiate()
    return graph, results


def kinds(graph: torch.cuda.CUDAGraph) -> Counter[str]:
    """How many nodes of each kind; the graph was made with ``keep_graph=True``."""
    found: Counter[str] = Counter()
    for node in _nodes(graph):
        kind = ctypes.c_int()
        _call("cuGraphNodeGetType", node, ctypes.byref(kind))
        found[KINDS[kind.value] if kind.value < len(KINDS) else f"kind {kind.value}"] += 1
    return found


def kernels(graph: torch.cuda.CUDAGraph) -> list[str]:
    """The (mangled) names of its kernels, in the order in which they were captured."""
    return [name for node in _nodes(graph) if (name := _kernel_name(node)) is not None]


def _nodes(graph: torch.cuda.CUDAGraph) -> Iterator[ctypes.c_void_p]:
    raw, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    _call("cuGraphGetNodes", raw, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    _call("cuGraphGetNodes", raw, nodes, ctypes.byref(count))
    yield from (ctypes.c_void_p(node) for node in nodes)


def _kernel_name(node: ctypes.c_void_p) -> str | None:
    kind, params, name = ctypes.c_int(), _KernelNodeParams(), ctypes.c_char_p()
    _call("cuGraphNodeGetType", node, ctypes.byref(kind))
    if KINDS[kind.value] != "kernel":
        return None
    _call("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
    if params.func:
        _call("cuFuncGetName", ctypes.byref(name), ctypes.c_void_p(params.func))
    else:
        _call("cuKernelGetName", ctypes.byref(name), ctypes.c_void_p(params.kernel))
    return (name.value or b"").decode()


def _call(name: str, *arguments: object) -> None:
    error = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if error:
        raise RuntimeError(f"{name} failed with error {error} of the CUDA driver")
