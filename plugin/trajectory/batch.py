"""What a trainer is handed: trajectories, and the handle by which it says what became of them.

Owns the states of the handle. Owns no storage: the inbox is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["Batch"]


class Batch(Sequence[trajectory_pb2.Trajectory]):
    """A sequence of trajectories that are out, until they are acknowledged or come back.

    As a context manager it acknowledges at the end of the block, and gives back when the block raises. One that is
    dropped without a word gives back, too; so does a crash, since the file knows only what was acknowledged.
    """

    def __init__(
        self,
        trajectories: Sequence[trajectory_pb2.Trajectory],
        seqs: Sequence[int],
        settle: Callable[[Sequence[int]], None],
        lost: Callable[[Sequence[int]], None],
    ) -> None:
        self._trajectories, self._seqs, self._settle = trajectories, seqs, settle
        self._give_back = weakref.finalize(self, lost, seqs)
        self._give_back.atexit = False  # the file knows them as not acknowledged

    def acknowledge(self) -> None:
        """They are used and never come again; durable on return. A second call does nothing.

        Raises StoreError, StoreFullError; then they are still out, and the call may be repeated.
        """
        if self._give_back.alive:
            self._settle(self._seqs)
            self._give_back.detach()

    def release(self) -> None:
        """They are not used: another take may have them. Does nothing after `acknowledge`."""
        self._give_back()

    def __getitem__(self, index: Any) -> Any:
        return self._trajectories[index]

    def __len__(self) -> int:
        return len(self._trajectories)

    def __iter__(self) -> Iterator[trajectory_pb2.Trajectory]:
        return iter(self._trajectories)

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.acknowledge()
        else:
            self.release()
