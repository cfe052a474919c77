"""Contestants that a benchmark was asked to time and left out; printed below the table and part of its data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .peers import PEERS


class LeftOut(NamedTuple):
    """A contestant that does not take part, and the reason."""

    name: str
    reason: str

    @property
    def requirement(self) -> str | None:
        """The requirement of another library; None for contestants of this one."""
        return PEERS[self.name].requirement if self.name in PEERS else None

    def about(self) -> dict[str, Any]:
        """The contestant and the reason as a dict."""
        return {**self._asdict(), "requirement": self.requirement}

    def __str__(self) -> str:
        needs = f"; needs {self.requirement}" if self.requirement else ""
        return f"- {self.name}: {self.reason}{needs}"


def footer(left_out: Iterable[LeftOut]) -> str:
    """A list below a table; empty if nothing was left out."""
    lines = [str(one) for one in left_out]
    return "\n".join(["\nLeft out:\n", *lines]) if lines else ""
