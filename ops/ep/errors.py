"""Errors between ranks: a peer that does not take part, or too many rows."""

from __future__ import annotations


class PeerError(RuntimeError):
    """A rank did not take part in an exchange. The message names the exchange and, if known, the rank.

    The group has then failed: every later call of its ops raises the error again. The process and other groups
    continue.
    """


class CapacityError(RuntimeError):
    """A rank would get more rows than the group's capacity. The message gives the numbers.

    All ranks raise it at the same exchange, before any row has moved, and the group stays usable.
    """
