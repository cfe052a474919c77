"""Writes what ``ops/_C.pyi`` declares of the launches, as the extension says it of their structs.

``python -m emulation.stub``, run in ``tests``, builds the emulated extension and writes the file.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Mapping
from pathlib import Path

from emulation import build

STUB = build.ROOT / "ops" / "_C.pyi"
GENERATED = "# what follows is written by `python -m emulation.stub`, run in tests\n"
WIDTH = 120


def declarations(module: Path) -> dict[str, str]:
    """The parameters and the result of each launch, by its name."""
    spec = importlib.util.spec_from_file_location("_C", module)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return dict(extension.declarations)


def written(text: str, launches: Mapping[str, str]) -> str:
    """The text of the stub, with these launches in place of those that it has."""
    by_hand = text.partition(GENERATED)[0]
    return by_hand + GENERATED + "".join([_declared(name, launches[name]) for name in sorted(launches)])


def _declared(name: str, signature: str) -> str:
    """A function; a long one over several lines."""
    line = f"def {name}{signature}: ..."
    if len(line) <= WIDTH:
        return line + "\n"
    parameters, _, result = signature[1:].rpartition(") -> ")
    lines = textwrap.wrap(parameters.replace(": ", ":\0").replace(" = ", "\0=\0"), WIDTH - 5, break_long_words=False)
    body = "\n".join([f"    {each}".replace("\0", " ") for each in lines])
    return f"def {name}(\n{body},\n) -> {result}: ...\n"


def main() -> None:
    """Writes the file."""
    STUB.write_text(written(STUB.read_text(), declarations(build.build())))


if __name__ == "__main__":
    main()
