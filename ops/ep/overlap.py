"""On how many multiprocessors the gradients of tokens are summed beside the products that give those of weights."""

from __future__ import annotations

_MOST, _SHARE = 32, 4  # as measured on 132 multiprocessors, and never more than one of so many
_LEAST_BYTES = 8 << 20  # of rows: below, a sum takes about as long as two streams need to wait for one another


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
