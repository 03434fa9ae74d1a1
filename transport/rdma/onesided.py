"""OneSided: what this transport asks of a library that writes into other processes' memory.

Owns the port. Owns no library (nixl.py); another one, Mooncake say, fits behind the same few calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

__all__ = ["OneSided", "Post", "Span"]


@dataclass(frozen=True, order=True)
class Span:
    """A range of memory: address, size in bytes, and the GPU that it lies on (None: the host)."""

    address: int
    nbytes: int
    device: int | None = None


class Post(Protocol):
    """Prepared writes to one peer that are posted together, again and again."""

    nbytes: int

    def start(self) -> bool:
        """Posts; True when all bytes have left already. May copy the bytes itself, so call it from a worker thread.

        Raises StoreUnavailableError when the peer is gone.
        """

    def done(self) -> bool:
        """True when all bytes have left. Raises StoreUnavailableError when the peer is gone."""

    def release(self) -> None:
        """Gives its resources back; never raises."""


class OneSided(Protocol):
    """One process's agent. Calls are thread-safe unless they say otherwise.

    Attributes:
        name: unique among all agents that meet.
    """

    name: str

    def register(self, spans: Sequence[Span]) -> None:
        """Makes memory reachable, for local and remote use; blocks of an allocator rather than single tensors.

        Raises EngineError with what to do when the library refuses.
        """

    def metadata(self) -> bytes:
        """What a peer needs to reach the memory registered so far."""

    def connect(self, metadata: bytes) -> str:
        """Name of the peer. One that comes back under its old name replaces itself. Raises StoreUnavailableError."""

    def disconnect(self, peer: str) -> None:
        """Forgets a peer; posts to it are to be released before. Never raises."""

    def prepare(
        self, peer: str, rows: npt.NDArray[Any], local: int | None, remote: int | None, split: Sequence[int]
    ) -> list[Post]:
        """Descriptors of all ``rows`` ((n,) of `runs.RUN`), as posts that end at the rows given in ``split``.

        ``local`` and ``remote`` are the devices, None for the host.
        """

    def notify(self, peer: str, note: bytes) -> None:
        """A note that arrives after everything posted to the peer before. Raises StoreUnavailableError."""

    def notes(self) -> list[tuple[str, bytes]]:
        """Notes that have come since: (peer, note). Also drives transfers where the library has no thread of its own."""

    def close(self) -> None:
        """Takes all memory out of reach; never raises."""
