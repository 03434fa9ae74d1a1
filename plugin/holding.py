"""Holding: what this rank's snapshot holds now, for those who read it while the trainer goes on.

Owns which version the bits are of, and the handshake between readers and whoever moves the snapshot. Owns no bits
(snapshot.py). Readers never hold the trainer up for long: a move waits for them up to a limit, then goes ahead; what a
reader has taken by then is of no version, which it is told.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weight_sync.errors import VersionExpiredError

if TYPE_CHECKING:
    from weight_sync.served import ServedPiece
    from weight_sync.snapshot import Snapshot

__all__ = ["Holding"]


class Holding:
    """Thread-safe.

    Attributes:
        snapshot: the bits.
        patience_s: how long a move waits for readers.
    """

    def __init__(self, snapshot: Snapshot, patience_s: float) -> None:
        self.snapshot = snapshot
        self.patience_s = patience_s
        self._changed = threading.Condition()
        self._number: int | None = None
        self._pieces: tuple[ServedPiece, ...] = ()
        self._readers = 0
        self._moves = 0  # how often the bits have moved

    def state(self) -> tuple[int | None, tuple[ServedPiece, ...]]:
        """The version whose bits these are, None while they are of none; and the pieces."""
        with self._changed:
            return self._number, self._pieces

    def wait(self, known: int | None, timeout: float) -> int | None:
        """The version once it is another one than ``known``, or after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._number != known, timeout)
            return self._number

    def now(self, number: int | None, pieces: Sequence[ServedPiece]) -> None:
        """The snapshot holds version ``number``."""
        with self._changed:
            self._number, self._pieces = number, tuple(pieces)
            self._changed.notify_all()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """The bits move; they are of no version until `now` says so."""
        with self._changed:
            self._number = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._readers, self.patience_s)
            self._moves += 1
        yield

    @contextmanager
    def reading(self, number: int) -> Iterator[None]:
        """The bits of ``number`` stay while the block runs.

        Raises VersionExpiredError at its beginning when the bits are of another version, at its end when they have
        moved meanwhile.
        """
        with self._changed:
            if self._number != number:
                raise VersionExpiredError("the trainer has moved on", field="number", found=self._number,
                                          expected=number, do="ask for the newest version")  # fmt: skip
            self._readers += 1
            moves = self._moves
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                moved = self._moves != moves
                self._changed.notify_all()
        if moved:
            raise VersionExpiredError("the trainer moved on while its bits were read", field="number", found=number,
                                      do="ask for the newest version")  # fmt: skip
