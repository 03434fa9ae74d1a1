"""Limits per peer: how many calls it may make.

Owns the counting. Owns no identity of a peer: that is what the caller says, here the machine's address.
"""

from __future__ import annotations

import time
from collections import OrderedDict

__all__ = ["RateLimit"]

_REMEMBERED = 4096  # peers; the one that was silent longest is forgotten, with its full allowance


class RateLimit:
    """A token bucket per peer: ``rate`` calls a second on average, four seconds' worth at once."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._room = 4 * rate
        self._peers: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, peer: str, now: float | None = None) -> bool:
        """Counts one call; False when the peer has to slow down."""
        now = time.monotonic() if now is None else now
        left, last = self._peers.pop(peer, (self._room, now))
        left = min(self._room, left + (now - last) * self._rate)
        allowed = left >= 1
        self._peers[peer] = (left - 1 if allowed else left, now)
        if len(self._peers) > _REMEMBERED:
            self._peers.popitem(last=False)
        return allowed


def machine_of(peer: str) -> str:
    """The machine of a gRPC peer name, without the port of the connection: "ipv4:10.0.0.1:5123" -> "ipv4:10.0.0.1"."""
    return peer.rpartition(":")[0] or peer
