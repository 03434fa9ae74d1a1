"""Which engine of a group answers a request: the one with the fewest in flight, the next in turn among equals.

Owns the counts, in the event loop. Owns no health: an engine of the group that is gone makes the whole group not ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Balance"]


class Balance:
    """Of the engines at these URLs."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._inside = [0] * len(urls)
        self._last = -1

    @contextmanager
    def engine(self) -> Iterator[str]:
        """The URL of the engine for one request, which is in flight until the block ends."""
        count = len(self._urls)
        turn = [(self._last + 1 + k) % count for k in range(count)]
        self._last = chosen = min(turn, key=self._inside.__getitem__)
        self._inside[chosen] += 1
        try:
            yield self._urls[chosen]
        finally:
            self._inside[chosen] -= 1
