"""Error texts of exchanges, common to all transports."""

from __future__ import annotations

from functools import lru_cache

from .settings import Settings

WANTED = ("x", "top_k_weights")
"""The gradients that a backward of a dispatch gives; a bit each."""
EIGHT_BITS = "8 bits"
"""Beside them: tokens travel so. Its bit is behind theirs."""
_FLAGS = (*WANTED, EIGHT_BITS)


@lru_cache
def flags_of(wanted: frozenset[str]) -> int:
    """Encodes the wanted gradients as bits."""
    return sum(1 << _FLAGS.index(name) for name in wanted)


def other_step(rank: int, theirs: str, mine: str) -> str:
    """The error for a rank that is at another step."""
    return f"rank {rank} is at {theirs}, this rank at {mine}; all ranks must run the same layers in the same order"


def other_gradients(rank: int, theirs: int, mine: int, named: str) -> str:
    """The error that a rank will run another backward. Both arguments are flags."""
    return (
        f"rank {rank} wants gradients of {_named(theirs)} in {named}, this rank of {_named(mine)}; set requires_grad "
        "alike on all ranks, also where there are no tokens"
    )


def other_wishes(rank: int, theirs: int, mine: int, named: str) -> str:
    """The error for a rank that runs another backward, or sends tokens in another form. Both arguments are flags."""
    of_bits = 1 << len(WANTED)
    if not (theirs ^ mine) & of_bits:
        return other_gradients(rank, theirs, mine, named)
    bits = (8, 16) if theirs & of_bits else (16, 8)
    return (
        f"rank {rank} sends tokens of {bits[0]} bits in {named}, this rank of {bits[1]}; give EPDispatch the same "
        "recipe on all ranks"
    )


def overflow(settings: Settings, named: str, rank: int, required: int, capacity: int, cures: str) -> str:
    """The error that a rank would own too many rows.

    Args:
        cures: the fixes besides a larger capacity.
    """
    factor = settings.capacity
    product = f" ({factor} x max_tokens x top_k)" if isinstance(factor, float) else ""
    return (
        f"{named}: rank {rank} had to own {required} rows, its capacity is {capacity}{product}; make the group with "
        f"capacity={required} or more, {cures}"
    )


def _named(flags: int) -> str:
    return " and ".join(name for bit, name in enumerate(WANTED) if flags >> bit & 1) or "nothing"
