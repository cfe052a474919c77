"""The decoding of a stored weight as kernels do it: a code, less a zero point, times the scale of its block."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Codes(Enum):
    """The meaning of a code. Two codes of four bits are a byte, the first one in its low bits, but for NF4."""

    E2M1 = "e2m1"
    NF4 = "nf4"
    INTEGER = "integer"  # from -8 to 7, as that plus 8; zero points are packed along the rows
    E4M3 = "e4m3"

    __hash__ = object.__hash__  # a member is one object; Enum's own hash is Python code


class Decoding(NamedTuple):
    """A format of weights in the terms of kernels. Products are rounded to float32, then to 16 bits.

    Scales in uint8 are codes of a map, as in double quantisation. Scales in e4m3 have factors in float32.

    Attributes:
        columns: values of a row that share a scale; None: all.
        rows: rows that share a scale; None: those of a section, of which there are as many as scales.
        divides: whether scales are divided by their factors.
        sections: equal parts of the rows of a group, each of which decodes as a group does.
    """

    codes: Codes
    columns: int | None
    rows: int | None = 1
    divides: bool = False
    sections: int = 1
