"""What can go wrong between ranks: a peer that does not come, rows for which there is no room."""

from __future__ import annotations


class PeerError(RuntimeError):
    """A rank did not take part in an exchange. The message names the exchange, and the rank where it is known.

    The group has failed with it: every later call of its ops raises it again. The process and other groups live on.
    """


class CapacityError(RuntimeError):
    """The tokens of all ranks give a rank more rows than the group has room for. The message says how many.

    All ranks raise it at the same exchange, before any row has moved, and the group stays as it is.
    """
