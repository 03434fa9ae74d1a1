"""The publisher's way in: from whatever the transport has, through the inbox when there is one, to the trainer.

Owns which inbox is used and the meaning of `Publisher.take_trajectories`. Owns no promise (inbox.py, the transport).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weight_sync.config import Config
from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory.batch import Batch
from weight_sync.trajectory.inbox import TrajectoryInbox

if TYPE_CHECKING:
    from weight_sync.ports import PublisherEnd

__all__ = ["Intake"]


class Intake:
    """What one rank takes trajectories from.

    Attributes:
        inbox: None without one, and on other ranks than 0.
    """

    def __init__(self, end: PublisherEnd) -> None:
        self._end = end
        self._batch: Batch | None = None
        self._own: TrajectoryInbox | None = None
        self.inbox: TrajectoryInbox | None = None

    def open(self, config: Config, run_id: str, rank: int) -> TrajectoryInbox | None:
        """On rank 0 the transport's inbox, if it fills one by itself, else the configured one, which draws from it."""
        self.inbox = getattr(self._end, "inbox", None)  # transports of others may not know of it
        if rank == 0 and self.inbox is None and config.inbox is not None:
            self._own = self.inbox = TrajectoryInbox(
                config.inbox, run_id=run_id, max_count=config.inbox_count, max_bytes=config.inbox_bytes
            )
            self.inbox.draw_from(self._end.take_trajectories, config.poll_s)
        return self.inbox

    def take(self, limit: int) -> list[trajectory_pb2.Trajectory]:
        """Up to ``limit``; those of the call before count as used, durably so with an inbox."""
        if self.inbox is None:
            return self._end.take_trajectories(limit)
        self._settle()
        self._batch = self.inbox.take(limit)
        return list(self._batch)

    def _settle(self) -> None:
        if self._batch is not None:
            self._batch.acknowledge()
            self._batch = None

    def close(self) -> None:
        """What was taken last counts as used. Closes the inbox, unless it is the transport's, and the transport."""
        try:
            self._settle()
        finally:
            if self._own is not None:
                self._own.close()
            self._end.close()
