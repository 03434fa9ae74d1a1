"""Trajectories at the trainer: the durable inbox, and what a trajectory must be like.

Owns the public names of this room. The message itself is proto/v1/trajectory.proto; how it travels is a transport's.
"""

from __future__ import annotations

from weight_sync.trajectory.batch import Batch
from weight_sync.trajectory.inbox import DROPS, InboxCounts, TrajectoryInbox
from weight_sync.trajectory.rules import check, oldest_version, staleness

__all__ = ["DROPS", "Batch", "InboxCounts", "TrajectoryInbox", "check", "oldest_version", "staleness"]
