"""The op graph: ops and the tensors that they read, as a networkx digraph."""

from __future__ import annotations

from dataclasses import dataclass

import networkx
from torch import Tensor

from ..contract.op import Op
from ..contract.spec import TensorSpec
from .binding import BoundArguments
from .flatten import FlatContainer, OpEntry

X = ".x"  # the node of the input of the first op


@dataclass(frozen=True)
class OpGraph:
    """The ops and inputs of one call.

    Nodes are op labels ("0", "1.0") with ``entry=``, and inputs (".x", ".%1", which cannot be labels) with ``spec=`` (a
    :class:`TensorSpec` without a shape, as plans serve any shape; None if it is not a tensor). A tensor that
    several ops read is one node. Edges carry ``ports=``: for each port of the reader ("x" or a keyword) the output of
    the source ("y" or an extra output); and ``port=``, the first port.
    """

    nx: networkx.DiGraph[str]

    @classmethod
    def of(cls, layout: FlatContainer, call: BoundArguments) -> OpGraph:
        graph: networkx.DiGraph[str] = networkx.DiGraph()
        sources = [f".%{slot}" if slot else X for slot in range(len(call.values))]
        for name, value in zip(sources, call.values, strict=True):
            graph.add_node(name, spec=TensorSpec.without_shape(value) if isinstance(value, Tensor) else None)
        previous = X
        for i, entry in enumerate(layout.entries):
            graph.add_node(entry.label, entry=entry, position=i)
            _connect(graph, previous, entry.label, "x", "y")
            for name, slot in call.reads[i]:
                _connect(graph, sources[slot], entry.label, name, "y")
            previous = entry.label
        for (reader, name), (maker, output) in layout.channels.items():
            _connect(graph, layout.entries[maker].label, layout.entries[reader].label, name, output)
        return cls(graph)

    def inputs(self) -> list[TensorSpec | None]:
        """The inputs, in the order of their slots."""
        return [attributes["spec"] for _, attributes in self.nx.nodes.items() if "spec" in attributes]

    def entry(self, node: str) -> OpEntry | None:
        """The entry of an op node, None for an input."""
        return self.nx.nodes[node].get("entry")

    def op(self, node: str) -> Op | None:
        """The op of a node, None for inputs and for modules that are not ops."""
        entry = self.entry(node)
        return None if entry is None else entry.op

    def entries(self) -> list[str]:
        """The op nodes in execution order."""
        return sorted((n for n in self.nx if self.entry(n)), key=lambda n: self.nx.nodes[n]["position"])

    def sources(self, node: str) -> dict[str, tuple[str, str]]:
        """Port -> (node, output) that an op reads."""
        edges = self.nx.pred[node].items()
        return {port: (source, output) for source, edge in edges for port, output in edge["ports"].items()}

    def readers(self, node: str) -> list[tuple[str, str, str]]:
        """The (node, port, output) that read an op's outputs."""
        edges = self.nx.succ[node].items()
        return [(reader, port, output) for reader, edge in edges for port, output in edge["ports"].items()]

    def returns(self, node: str, output: str, is_read: bool) -> bool:
        """Whether a call returns an extra output of an op; ``is_read``: whether a later op reads it."""
        entry = self.nx.nodes[node]["entry"]
        return entry.stands_alone or entry.op.returns(output, is_read)  # type: ignore[no-any-return]

    def ops_only(self) -> networkx.DiGraph[str]:
        """The graph without inputs, and without modules that are not ops."""
        return self.nx.subgraph([n for n in self.nx if self.op(n) is not None])

    def __str__(self) -> str:
        names = {n: f"{n} {entry.kind}" if (entry := self.entry(n)) else n[1:] for n in self.nx}
        return "\n".join(networkx.generate_network_text(networkx.relabel_nodes(self.nx, names)))


def _connect(graph: networkx.DiGraph[str], source: str, reader: str, port: str, output: str) -> None:
    if graph.has_edge(source, reader):
        graph.edges[source, reader]["ports"][port] = output
    else:
        graph.add_edge(source, reader, port=port, ports={port: output})
