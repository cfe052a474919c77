"""Table rows that differ only in one number of their path, joined to one row with the numbers as ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

TableRow = tuple[str, ...]


class Numbered(NamedTuple):
    """A row with a number in its path; rows with an equal rest can share a row."""

    before: tuple[str, ...]
    number: int
    after: tuple[str, ...]
    rest: TableRow

    @classmethod
    def of(cls, row: TableRow) -> Numbered | None:
        """The row by the first number in its path; None if it has no number."""
        parts = row[0].split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
        return None if at is None else cls(tuple(parts[:at]), int(parts[at]), tuple(parts[at + 1 :]), row[1:])

    @property
    def key(self) -> tuple[object, ...]:
        return self.before, self.after, self.rest


def grouped(rows: Sequence[TableRow]) -> list[TableRow]:
    """Groups rows whose first column is a path; rows that share one take the place of the first."""
    numbers: dict[object, list[int]] = {}
    firsts: dict[object, TableRow | Numbered] = {}
    for row in rows:
        numbered = Numbered.of(row)
        key = row if numbered is None else numbered.key
        firsts.setdefault(key, row if numbered is None else numbered)
        numbers.setdefault(key, []).extend([] if numbered is None else [numbered.number])
    return [_joined(first, numbers[key]) for key, first in firsts.items()]


def _joined(first: TableRow | Numbered, numbers: Iterable[int]) -> TableRow:
    if not isinstance(first, Numbered):
        return first
    return (".".join([*first.before, ",".join(_ranges(sorted(numbers))), *first.after]), *first.rest)


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    """Ascending numbers: ``0-2``, ``5``."""
    start = 0
    for i, number in enumerate(numbers):
        if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
            yield f"{numbers[start]}-{number}" if i > start else f"{number}"
            start = i + 1
