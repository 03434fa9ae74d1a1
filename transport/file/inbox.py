"""Trajectories as objects: the replica's outbox and the trainer's inbox.

Owns ``trajectories/<sender>/<time>-<random>.pb``, one object per batch, and what is promised:

- A receipt means that the batch is durable in the store.
- At least once. The inbox deletes a batch when the next one is asked for or at ``close``, so a trainer that dies in
  between gets it again.
- Duplicates, by trajectory id, are dropped as far as is cheaply known: the outbox remembers the ids it has sent and,
  after a restart, those of its own batches still pending; the inbox remembers the ids it has handed out. Both remember
  the last 65,536, in memory. A trajectory that is sent again after both sides restarted is delivered again.
- A batch that cannot be read is moved to ``rejected/`` and reported once, by CorruptionError; the next call goes on.

Owns no order: batches are taken by their senders' clocks, which only makes old ones come first, roughly.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NoReturn

from weight_sync.config import check_name
from weight_sync.errors import CorruptionError, InputError
from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory.rules import check_batch
from weight_sync.transport.file import keys
from weight_sync.transport.file.log import decode
from weight_sync.transport.file.store import SMALL_OBJECT, Store

__all__ = ["Inbox", "Outbox", "reject"]

_REMEMBERED = 65_536


class _Recent:
    """The last ids that were added."""

    def __init__(self) -> None:
        self._order: deque[str] = deque()
        self._known: set[str] = set()

    def __contains__(self, item: str) -> bool:
        return item in self._known

    def add(self, items: Iterable[str]) -> None:
        for item in items:
            if item not in self._known:
                self._known.add(item)
                self._order.append(item)
        while len(self._order) > _REMEMBERED:
            self._known.discard(self._order.popleft())


class Outbox:
    """The sender's side."""

    def __init__(self, store: Store, run_id: str, sender: str) -> None:
        self._store = store
        self._run_id = run_id
        self._folder = f"{keys.trajectories(run_id)}/{check_name('replica_id', sender)}"
        self._sent: _Recent | None = None

    def send(self, batch: Sequence[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.TrajectoryReceipt]:
        """Stores what is new of ``batch``; one receipt per trajectory, in order.

        Raises TrajectoryError and LineageError for what the trainer's inbox would refuse; nothing is stored then.
        """
        check_batch(batch, self._run_id)
        if self._sent is None:
            self._sent = self._pending_ids()
        sent = self._sent
        fresh: dict[str, trajectory_pb2.Trajectory] = {}
        receipts = []
        for trajectory in batch:
            duplicate = trajectory.id in sent or trajectory.id in fresh
            receipts.append(trajectory_pb2.TrajectoryReceipt(id=trajectory.id, duplicate=duplicate))
            if not duplicate:
                fresh[trajectory.id] = trajectory
        if fresh:
            data = trajectory_pb2.TrajectoryBatch(trajectories=fresh.values()).SerializeToString()
            if len(data) > SMALL_OBJECT:
                raise InputError(
                    "batch is too large", field="bytes", found=len(data), expected=SMALL_OBJECT, do="send fewer at once"
                )
            self._store.create(f"{self._folder}/{time.time_ns() // 1_000_000:013d}-{secrets.token_hex(8)}.pb", data)
            sent.add(fresh)
        return receipts

    def _pending_ids(self) -> _Recent:
        known = _Recent()
        for meta in self._store.list(self._folder):
            batch = _read_batch(self._store, self._run_id, meta.key)
            known.add(trajectory.id for trajectory in batch.trajectories)
        return known


class Inbox:
    """The trainer's side."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._seen = _Recent()
        self._waiting: deque[trajectory_pb2.Trajectory] = deque()
        self._read: set[str] = set()  # keys whose content has gone through _waiting
        self._done = False  # all of it has been handed out: the next call deletes them

    def take(self, limit: int) -> list[trajectory_pb2.Trajectory]:
        """Up to ``limit`` trajectories. Raises CorruptionError once per batch that cannot be read."""
        self.close()
        if len(self._waiting) < limit:
            for meta in sorted(self._store.list(keys.trajectories(self._run_id)), key=lambda m: keys.stem(m.key)):
                if meta.key not in self._read:
                    self._open(meta.key)
                if len(self._waiting) >= limit:
                    break
        taken = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        self._done = not self._waiting
        return taken

    def close(self) -> None:
        """Deletes the batches that have been handed out in full."""
        if self._done:
            for key in list(self._read):
                self._store.delete(key)
                self._read.discard(key)
        self._done = False

    def _open(self, key: str) -> None:
        batch = _read_batch(self._store, self._run_id, key)
        self._read.add(key)
        fresh = [trajectory for trajectory in batch.trajectories if trajectory.id not in self._seen]
        self._waiting.extend(fresh)
        self._seen.add(trajectory.id for trajectory in fresh)


def _read_batch(store: Store, run_id: str, key: str) -> trajectory_pb2.TrajectoryBatch:
    """A batch, empty when it was taken meanwhile. Raises CorruptionError after setting an unreadable one aside."""
    try:
        return decode(trajectory_pb2.TrajectoryBatch, store.get(key) or b"", store.name(key))
    except CorruptionError as error:
        reject(store, run_id, key, error)


def reject(store: Store, run_id: str, key: str, error: CorruptionError) -> NoReturn:
    """Moves an object that cannot be read out of the way, then raises CorruptionError: garbage is reported once."""
    aside = keys.rejected(run_id, key)
    store.move(key, aside)
    raise CorruptionError(
        "unreadable object set aside", field=store.name(key), found=error.what, do=f"look at {store.name(aside)}"
    ) from error
