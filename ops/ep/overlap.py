"""The moves of rows that run beside products, and the number of multiprocessors that they take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .settings import Settings

_MOST, _SHARE = 32, 4  # at most 32, measured on a GPU with 132; and at most a quarter of them
_LEAST_BYTES = 8 << 20  # of rows: a smaller sum takes about as long as two streams need to synchronise
_BRINGING = 16  # multiprocessors that bring rows: 8 are too few, 32 gain no more
_MOST_ROWS = 1024  # of a rank for an expert: with 2048, products are so long that moves no longer matter
_FOR = (
    f"products hide moves where a rank has at least {_LEAST_BYTES >> 20} MB of rows, "
    f"and an expert at most {_MOST_ROWS} rows of each rank"
)


class Overlaps(NamedTuple):
    """The moves of a forward that run beside its products; equal on all ranks, as the settings are.

    Attributes:
        dispatch: the number of multiprocessors that bring rows during the first product; 0: rows arrive before it.
        combine: whether the second product sends its rows to the ranks of their tokens.
        reason: the reason of these values; None: the transport has no such moves.
    """

    dispatch: int = 0
    combine: bool = False
    reason: str | None = None

    @classmethod
    def of(cls, settings: Settings, ranks: int) -> Overlaps:
        """The overlaps that the settings ask for, or else those that gain in the steady state of training."""
        against = _against(settings, ranks)
        sends = against is None and settings.combine == "exact"
        chosen = {"overlap_dispatch": 0 if against else _BRINGING, "overlap_combine": sends}
        asked = {name: getattr(settings, name) for name in chosen if getattr(settings, name) is not None}
        values = chosen | asked
        said = ", ".join(f"{each}={values[each]!r} ({'asked for' if each in asked else 'chosen'})" for each in values)
        if len(asked) < len(chosen):
            said += f": {against or _FOR}"
        if settings.combine == "reduced":
            said += "; no product sends rows that are summed first"
        return cls(values["overlap_dispatch"], values["overlap_combine"], said)


def _against(settings: Settings, ranks: int) -> str | None:
    """The reason why overlaps do not gain, or None. It must not depend on anything that differs between ranks."""
    moved, rows = settings.slots * settings.hidden * settings.dtype.itemsize, settings.slots / settings.num_experts
    if ranks == 1:
        return "no row leaves the only rank"
    if settings.dtype != torch.bfloat16:
        return f"products of {settings.dtype} neither wait for rows nor send them"
    if moved < _LEAST_BYTES:
        return f"a rank has at most {moved >> 10} KB of rows, and moves of less than {_LEAST_BYTES >> 20} MB are short"
    if rows > _MOST_ROWS:
        return f"an expert has up to {rows:.0f} rows of each rank, and with over {_MOST_ROWS} products take far longer"
    return None


def multiprocessors_beside(asked: int | None, there: int, summed: int) -> int:
    """The number of multiprocessors that sum while the others multiply; 0: all sum, then multiply.

    Args:
        asked: the group's ``overlap``; a number is obeyed.
        there: the number of multiprocessors of the device.
        summed: the bytes of the summed rows.
    """
    if asked is not None:
        return asked
    return min(_MOST, there // _SHARE) if summed >= _LEAST_BYTES else 0
