"""Drawings of an op graph: Mermaid, Graphviz, SVG; and tables of text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape

from ..compiler.graph import OpGraph, X

Boxes = Mapping[str, tuple[str, ...]]  # name of a fused step -> its nodes


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows, the first one the heading, with columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def html_table(rows: list[tuple[str, ...]]) -> str:
    """Rows, the first one the heading, as a table of HTML."""
    lines = []
    for i, row in enumerate(rows):
        tag = "td" if i else "th"
        lines.append(f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in row)}</tr>")
    return "\n".join(["<table>", *lines, "</table>"])


def html_line(text: str) -> str:
    """A line of text as a paragraph of HTML."""
    return f"<p>{escape(text)}</p>"


def name(graph: OpGraph, node: str) -> str:
    """The name of a node in a drawing."""
    entry = graph.entry(node)
    if entry is not None:
        return f"{entry.label}: {entry.kind}"
    ports = sorted({port for _, port, _ in graph.readers(node)})
    return "x" if node == X else ", ".join(ports)


def edges(graph: OpGraph) -> Iterator[tuple[str, str, str]]:
    """(source, reader, label) for every edge; the main path has no label."""
    for source, reader in graph.nx.edges:
        ports = graph.nx.edges[source, reader]["ports"]
        yield source, reader, ", ".join(port for port in ports if port != "x")


def _for_mermaid(text: str) -> str:
    """Escapes text for quotes in Mermaid, with special characters as numeric entities."""
    return "".join(c if c.isalnum() or c in " _.,:=-" else f"#{ord(c)};" for c in _printable(text))


def _for_dot(text: str) -> str:
    """Escapes text for quotes in DOT."""
    return _printable(text).replace("\\", "\\\\").replace('"', '\\"')


def _for_svg(text: str) -> str:
    """Escapes text of an SVG element."""
    return escape(_printable(text))


def _printable(text: str) -> str:
    """Text without control characters, surrogates and other characters that drawings must not contain."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def mermaid(graph: OpGraph, boxes: Boxes) -> str:
    """A Mermaid flowchart."""
    ids = {node: f"n{i}" for i, node in enumerate(graph.nx)}
    lines = ["flowchart LR"]
    for node in graph.nx:
        opening, closing = ("[", "]") if graph.entry(node) else ("([", "])")
        lines.append(f'  {ids[node]}{opening}"{_for_mermaid(name(graph, node))}"{closing}')
    for source, reader, label in edges(graph):
        lines.append(f"  {ids[source]} -->{f'|{_for_mermaid(label)}|' if label else ''} {ids[reader]}")
    for i, (title, nodes) in enumerate(boxes.items()):
        lines += [f'  subgraph f{i}["{_for_mermaid(title)}"]', *(f"    {ids[node]}" for node in nodes), "  end"]
    return "\n".join(lines)


def dot(graph: OpGraph, boxes: Boxes) -> str:
    """A Graphviz digraph."""
    lines = ["digraph fusible {", "  rankdir=LR;"]
    for node in graph.nx:
        shape = "box" if graph.entry(node) else "ellipse"
        lines.append(f'  "{_for_dot(node)}" [label="{_for_dot(name(graph, node))}", shape={shape}];')
    for source, reader, label in edges(graph):
        lines.append(f'  "{_for_dot(source)}" -> "{_for_dot(reader)}" [label="{_for_dot(label)}"];')
    for i, (title, nodes) in enumerate(boxes.items()):
        inside = " ".join(f'"{_for_dot(node)}";' for node in nodes)
        lines.append(f'  subgraph cluster_{i} {{ label="{_for_dot(title)}"; {inside} }}')
    return "\n".join([*lines, "}"])


def svg(graph: OpGraph, boxes: Boxes) -> str:
    """An SVG image: ops in a column, inputs to their left, fused steps as frames."""
    rows = {node: i for i, node in enumerate(graph.entries())}
    inputs = [node for node in graph.nx if node not in rows]
    positions = {node: (320, 30 + 60 * i) for node, i in rows.items()}
    positions |= {node: (20, 30 + 60 * _first_reader(graph, node, rows) + 16 * i) for i, node in enumerate(inputs)}
    height = 60 + max(y for _, y in positions.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" height="{height}" font-family="sans" font-size="12">'
    ]
    for title, nodes in boxes.items():
        top, bottom = min(positions[n][1] for n in nodes), max(positions[n][1] for n in nodes)
        parts.append(
            f'<rect x="300" y="{top - 12}" width="320" height="{bottom - top + 54}" fill="none" stroke="teal"/>'
        )
        parts.append(f'<text x="500" y="{top + 2}" fill="teal">{_for_svg(title)}</text>')
    for source, reader, label in edges(graph):
        (x1, y1), (x2, y2) = positions[source], positions[reader]
        ends = (x1 + 80, y1 + 30, x2 + 80, y2) if source in rows else (x1 + 130, y1 + 12, x2, y2 + 15)
        parts.append('<line x1="{}" y1="{}" x2="{}" y2="{}" stroke="gray"/>'.format(*ends))
        if source in rows and label:
            parts.append(f'<text x="{x2 + 165}" y="{y2 + 20}" fill="gray">{_for_svg(label)}</text>')
    for node, (x, y) in positions.items():
        if node in rows:
            parts.append(f'<rect x="{x}" y="{y}" width="160" height="30" fill="white" stroke="black"/>')
        parts.append(f'<text x="{x + 6}" y="{y + 19}">{_for_svg(name(graph, node))}</text>')
    return "\n".join([*parts, "</svg>"])


def _first_reader(graph: OpGraph, node: str, rows: Mapping[str, int]) -> int:
    return min((rows[reader] for reader, _, _ in graph.readers(node)), default=0)
