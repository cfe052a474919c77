"""The moves of rows that run beside products, and the number of multiprocessors that they take."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .settings import Settings

_MOST, _SHARE = 32, 4  # as measured on 132 multiprocessors, and never more than one of so many
_LEAST_BYTES = 8 << 20  # of rows: below, a sum takes about as long as two streams need to wait for one another
_BRINGING = 16  # multiprocessors that bring rows: 8 are too few, 32 gain no more
_MOST_ROWS = 1024  # of a rank for an expert: with 2048, products take so long that moves no longer matter
_FOR = (
    f"products hide moves where a rank has at least {_LEAST_BYTES >> 20} MB of rows, "
    f"and an expert at most {_MOST_ROWS} rows of each rank"
)


class Overlaps(NamedTuple):
    """The moves of a forward that run beside its products. All ranks have the same, as they have the same settings.

    Attributes:
        dispatch: the number of multiprocessors that bring rows beside the first product; 0: rows come before it.
        combine: whether the second product sends its rows to the ranks of their tokens.
        reason: why it is so; None: the transport has no such moves.
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
    """The reason why overlaps do not gain, or None. It must depend on nothing that can differ between ranks."""
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
    """How many take a sum while the others multiply; 0: all of them take it, and multiply afterwards.

    Args:
        asked: ``overlap`` of the group, which is followed where it is a number.
        there: of the device.
        summed: bytes of rows.
    """
    if asked is not None:
        return asked
    return min(_MOST, there // _SHARE) if summed >= _LEAST_BYTES else 0
