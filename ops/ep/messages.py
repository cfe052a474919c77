"""Error texts of exchanges, common to all transports."""

from __future__ import annotations

from functools import lru_cache

from .settings import Settings

WANTED = ("x", "top_k_weights")
"""The gradients that a backward of a dispatch gives; a bit each."""
GRADIENTS = frozenset(WANTED)
EIGHT_BITS, WIDE_WEIGHTS = "8 bits", "weights of 64 bits"
"""Beside them: the form in which tokens and routing weights travel. Their bits are behind those of the gradients."""
_FLAGS = (*WANTED, EIGHT_BITS, WIDE_WEIGHTS)
_FORMS = (
    (EIGHT_BITS, "sends tokens", 8, 16, "give EPDispatch the same recipe on all ranks"),
    (WIDE_WEIGHTS, "has routing weights", 64, 32, "give them one dtype on all ranks"),
)


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


def form_of(flags: int) -> int:
    """The flags of the form in which an exchange travels, which determine the sizes of messages."""
    return flags >> len(WANTED)


def other_wishes(rank: int, theirs: int, mine: int, named: str) -> str:
    """The error for a rank that runs another backward, or sends in another form. Both arguments are flags."""
    for form, sends, with_it, without, fix in _FORMS:
        bit = flags_of(frozenset({form}))
        if (theirs ^ mine) & bit:
            bits = (with_it, without) if theirs & bit else (without, with_it)
            return f"rank {rank} {sends} of {bits[0]} bits in {named}, this rank of {bits[1]}; {fix}"
    return other_gradients(rank, theirs, mine, named)


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
