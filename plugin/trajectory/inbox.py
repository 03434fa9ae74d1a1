"""The trainer's durable inbox: what engines send, from the receipt until the trainer has used it.

Owns the promises:

- A receipt means that the trajectory is in the file and that the file is on the disk (disk.py says how).
- At least once. What was taken and not acknowledged comes back: when it is released, when its handle is dropped, after
  a crash. What was acknowledged never comes again.
- An id counts once. A second put of it is answered with ``duplicate``, as long as it is pending and for the last
  ``remember`` ids after that.
- Nothing vanishes unseen: every trajectory that got a receipt ends as acknowledged or is counted under a reason.
- It is full at ``max_count`` trajectories or ``max_bytes`` bytes; then senders are told when to try again.

Staleness is the trainer's current version minus the oldest version in a trajectory's spans (rules.py).

Puts of several threads share a transaction: the thread that gets the lock writes what has queued up for all of them, so
that the disk is waited for once. Owns no wire and no transport; `TrajectoryInbox.draw_from` lets it pull from one.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal
from zlib import crc32

from google.protobuf.message import DecodeError

from weight_sync.errors import (
    CorruptionError,
    InboxFullError,
    InputError,
    LineageError,
    StoreError,
    TrajectoryError,
    WeightSyncError,
)
from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory.batch import Batch
from weight_sync.trajectory.rules import check, check_run, check_size, oldest_version, retry_after
from weight_sync.trajectory.shelf import Limits, Row, Shelf, Taken

__all__ = ["DROPS", "InboxCounts", "TrajectoryInbox"]

DROPS = ("too_stale", "other_run", "malformed", "evicted", "corrupt")
"""Why a trajectory was not delivered. ``malformed`` ones and those of an ``other_run`` were refused and got no receipt,
except those of the run that the inbox was of before. ``corrupt`` ones were damaged on the disk."""

_GROUP_ROWS = 4096  # of one transaction, so that the log stays small and nobody waits long
_DRAW = 1024  # trajectories that are drawn from a transport at once

_Source = Callable[[int], Sequence[trajectory_pb2.Trajectory]]


@dataclass(frozen=True)
class InboxCounts:
    """What is in an inbox, and what has gone through it since the file was made.

    Attributes:
        pending: trajectories held, taken ones included.
        pending_bytes: of their messages.
        taken: of them, given out and not acknowledged.
        received: that got a first receipt.
        duplicates: that came again.
        acknowledged: that the trainer has used.
        dropped: by reason, all of `DROPS`.
    """

    pending: int
    pending_bytes: int
    taken: int
    received: int
    duplicates: int
    acknowledged: int
    dropped: dict[str, int]


@dataclass
class _Put:
    """One put on its way; one of the last two is set when it has ended."""

    rows: list[Row]
    receipts: list[trajectory_pb2.TrajectoryReceipt] | None = None
    error: WeightSyncError | None = None

    @property
    def ended(self) -> bool:
        return self.receipts is not None or self.error is not None


class TrajectoryInbox:
    """One SQLite file, held by one process whose threads may put, take and acknowledge at the same time.

    Args:
        path: of the file; made when it is not there.
        run_id: the run whose trajectories are taken. Others are refused, and those of another run that the file still
            holds are dropped. None takes any.
        max_count, max_bytes: how much may be pending.
        when_full: ``refuse`` raises InboxFullError; ``evict`` makes room by dropping the stalest.
        remember: ids that are known after they were used.

    Raises StoreUnavailableError when the file is held already, CorruptionError, FormatError, StoreError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        run_id: str | None = None,
        max_count: int = 100_000,
        max_bytes: int = 4 << 30,
        when_full: Literal["refuse", "evict"] = "refuse",
        remember: int = 1 << 20,
    ) -> None:
        for name, value, least in (("max_count", max_count, 1), ("max_bytes", max_bytes, 1), ("remember", remember, 0)):
            if value < least:
                raise InputError("too small", field=name, found=value, expected=f"{least} or more")
        if when_full not in ("refuse", "evict"):
            raise InputError("no such policy", field="when_full", found=when_full, expected="refuse or evict")
        self.path, self.run_id = Path(path), run_id
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._puts: deque[_Put] = deque()
        self._lost: deque[Sequence[int]] = (
            deque()
        )  # handles that were dropped: finalizers run anywhere and lock nothing
        self._pace: deque[tuple[float, int]] = deque(maxlen=16)  # when batches were acknowledged, and of what size
        self._source: _Source | None = None
        self._poll_s = 0.2
        self._drawn: Sequence[trajectory_pb2.Trajectory] = ()  # handed over by the source and not in the file yet
        self._drawing = threading.Lock()
        self._shelf = Shelf(self.path, Limits(max_count, max_bytes, when_full, remember))
        if run_id is not None:
            self._shelf.drop_others(run_id)

    # --- putting ---

    def put(
        self, batch: Sequence[trajectory_pb2.Trajectory], *, skip_bad: bool = False
    ) -> list[trajectory_pb2.TrajectoryReceipt]:
        """Keeps a batch: on return all of it is durable. When it raises, nothing of it was kept.

        Args:
            skip_bad: keep what is good of it and count the rest, for senders that cannot be told.

        Returns one receipt per trajectory, in order (per good one with ``skip_bad``).

        Raises TrajectoryError naming the field, LineageError for another run, InboxFullError with ``retry_after_s``,
        InputError for a batch above the inbox's capacity, StoreFullError, StoreError.
        """
        rows = list(self._rows(batch, skip_bad))
        limits, size = self._shelf.limits, sum(row.size for row in rows)
        for name, found, most in (("trajectories", len(rows), limits.count), ("bytes", size, limits.bytes)):
            if found > most:
                raise InputError("more than the whole inbox can hold", field=f"{name} of batch", found=found,
                                 expected=f"at most {most}", do="send fewer at once")  # fmt: skip
        if not rows:
            return []
        put = _Put(rows)
        self._puts.append(put)
        while not put.ended:
            with self._lock:
                if not put.ended:  # no other thread has written it with its own
                    self._write_group()
        if put.error is not None:
            raise put.error
        assert put.receipts is not None
        return put.receipts

    def _rows(self, batch: Sequence[trajectory_pb2.Trajectory], skip_bad: bool) -> Iterator[Row]:
        for k, trajectory in enumerate(batch):
            try:
                check(trajectory, f"batch[{k}]")
                check_run(trajectory, self.run_id, f"batch[{k}]")
                data = trajectory.SerializeToString()
                check_size(len(data), f"batch[{k}]")
            except (TrajectoryError, LineageError) as error:
                with self._lock:
                    self._shelf.tell("malformed" if isinstance(error, TrajectoryError) else "other_run")
                if skip_bad:
                    continue
                raise
            yield Row(trajectory.id, trajectory.run_id, oldest_version(trajectory), len(data), crc32(data), data)

    def _write_group(self) -> None:
        """Under the lock: one transaction for the puts that wait."""
        group = [self._puts.popleft()]
        rows = len(group[0].rows)
        while self._puts and rows + len(self._puts[0].rows) <= _GROUP_ROWS:
            rows += len(self._puts[0].rows)
            group.append(self._puts.popleft())
        try:
            with self._shelf.change():
                answers = [self._shelf.insert(put.rows) for put in group]
                self._shelf.forget(2 * rows)
        except BaseException as error:
            for put in group:  # one error each, since each is raised in a thread of its own
                put.error = copy.copy(error) if isinstance(error, WeightSyncError) else StoreError(
                    "the write was interrupted", field=str(self.path), found=repr(error), do="put it again")  # fmt: skip
            if not isinstance(error, WeightSyncError):
                raise
            return
        for put, answer in zip(group, answers, strict=True):
            if isinstance(answer, int):
                put.error = self._full(answer)
            else:
                put.receipts = answer
        self._arrived.notify_all()

    def _full(self, missing: int) -> InboxFullError:
        limits = self._shelf.limits
        return InboxFullError(
            "the inbox is full", retry_after(self._pace, missing), field=str(self.path),
            found=f"{self._shelf.count} trajectories, {self._shelf.bytes} bytes",
            expected=f"at most {limits.count} and {limits.bytes}", do="send again later, or let the trainer take more",
        )  # fmt: skip

    # --- taking ---

    def take(
        self,
        limit: int,
        *,
        max_staleness: int | None = None,
        current_version: int | None = None,
        order: Literal["arrival", "freshest"] = "arrival",
        at_least: int = 1,
        timeout: float = 0.0,
    ) -> Batch:
        """Up to ``limit`` trajectories that are not out already.

        Args:
            max_staleness: drop, for good, what is staler: ``current_version`` minus the oldest version in its spans.
            current_version: the trainer's.
            order: as they arrived, or those with the newest oldest version first.
            at_least: wait until so many are there.
            timeout: seconds to wait for them.

        Returns an empty batch when they did not come in time.

        Raises CorruptionError once for each that is damaged on the disk; it is dropped and the others stay. What the
        transport raises that it draws from.
        """
        _check_take(limit, max_staleness, current_version, order, at_least)
        deadline = time.monotonic() + timeout
        while True:
            self._draw(limit)
            with self._lock:
                self._return_lost()
                if max_staleness is not None and current_version is not None:
                    self._shelf.drop_stale(current_version - max_staleness)
                left = deadline - time.monotonic()
                if (enough := self._shelf.free() >= at_least) or left <= 0:
                    rows = self._shelf.take(limit, order) if enough else []
                    break
                self._arrived.wait(min(left, self._poll_s))  # not longer: a source and a dropped handle wake nobody
        return self._batch(rows)

    def _batch(self, rows: Sequence[Taken]) -> Batch:
        seqs = [row.seq for row in rows]
        try:
            trajectories = [self._parsed(row) for row in rows]
        except BaseException:
            self._lost.append(seqs)
            raise
        return Batch(trajectories, seqs, self._acknowledge, self._release)

    def _parsed(self, row: Taken) -> trajectory_pb2.Trajectory:
        try:
            if crc32(row.payload) == row.sum:
                return trajectory_pb2.Trajectory.FromString(row.payload)
            what = "its checksum is wrong"
        except DecodeError as error:
            what = str(error)
        with self._lock, self._shelf.change():
            self._shelf.settle([row.seq], "corrupt")
        raise CorruptionError("a trajectory is damaged on the disk and was dropped", field=f"{self.path}: {row.id}",
                              found=what, do="look at the disk; the other trajectories stay")  # fmt: skip

    def _acknowledge(self, seqs: Sequence[int]) -> None:
        with self._lock:
            with self._shelf.change():
                self._shelf.settle(seqs, "acknowledged")
            self._pace.append((time.monotonic(), len(seqs)))

    def _release(self, seqs: Sequence[int]) -> None:
        """By a handle; in any thread, at any time, so it only takes note."""
        self._lost.append(seqs)

    def _return_lost(self) -> None:
        while self._lost:
            self._shelf.give_back(self._lost.popleft())

    # --- drawing ---

    def draw_from(self, source: Callable[[int], Sequence[trajectory_pb2.Trajectory]], poll_s: float = 0.2) -> None:
        """Lets `take` pull from a transport that keeps trajectories until they are fetched.

        Args:
            source: called with a limit by one thread at a time. It may forget what it handed over once it is called
                again, which happens when that is in the file.
            poll_s: seconds between two looks while `take` waits.
        """
        self._source, self._poll_s = source, poll_s

    def _draw(self, wanted: int) -> None:
        """Moves what the source has into the file, until ``wanted`` are there or there is no room."""
        if self._source is None:
            return
        with self._drawing:
            while self._drawn or self._shelf.free() < wanted:
                self._drawn = self._drawn or self._source(_DRAW)
                if not self._drawn:
                    return
                try:
                    self.put(self._drawn, skip_bad=True)
                except InboxFullError:
                    return  # they stay with us and with the source
                self._drawn = ()

    # --- the end ---

    def counts(self) -> InboxCounts:
        """What is there and what has gone through."""
        with self._lock:
            self._return_lost()
            totals = self._shelf.totals()
            return InboxCounts(
                self._shelf.count, self._shelf.bytes, self._shelf.taken, totals["received"], totals["duplicates"],
                totals["acknowledged"], {reason: totals[reason] for reason in DROPS},
            )  # fmt: skip

    def close(self) -> None:
        """Lets go of the file. What is out and not acknowledged comes back when it is opened again."""
        with self._lock:
            self._shelf.close()

    def __enter__(self) -> TrajectoryInbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_take(limit: int, max_staleness: int | None, current: int | None, order: str, at_least: int) -> None:
    if limit < 1 or not 1 <= at_least <= limit:
        raise InputError("not a batch size", field="limit, at_least", found=(limit, at_least),
                         expected="1 or more, and at_least not above limit")  # fmt: skip
    if order not in ("arrival", "freshest"):
        raise InputError("no such order", field="order", found=order, expected="arrival or freshest")
    if max_staleness is not None and (max_staleness < 0 or current is None):
        raise InputError("staleness needs the trainer's version", field="max_staleness, current_version",
                         found=(max_staleness, current), expected="0 or more, and a version number")  # fmt: skip
