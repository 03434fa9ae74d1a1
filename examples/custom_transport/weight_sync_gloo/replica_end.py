"""A reader's end: the log from the board, shards as they are broadcast, kept until their version is served.

Owns the thread that receives, and what it has received. Owns no decision of a replica.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Sequence

from weight_sync.config import Config
from weight_sync.errors import (
    CorruptionError,
    InputError,
    StoreUnavailableError,
    VersionExpiredError,
    VersionMissingError,
)
from weight_sync.ports import ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.version import is_version, kind_name
from weight_sync_gloo import push
from weight_sync_gloo.board import Board, read_entries, read_runs

__all__ = ["GlooReplicaEnd"]

_KEEP_BYTES = 4 << 30  # of shards that nobody acknowledged; then the oldest go


class GlooReplicaEnd(ReplicaEnd):
    """A reader; ``receives`` False makes one that reads the log alone."""

    def __init__(self, board: Board, config: Config, run_id: str | None, receives: bool = True) -> None:
        self._board, self._config, self._run_id = board, config, run_id
        self._closed = threading.Event()
        self._received: dict[str, memoryview] = {}  # by run and object, oldest first
        self._known: list[manifest_pb2.VersionManifest] = []  # entries never change
        self._sent: set[str] = set()
        self._wanted: int | None = None
        self._threads: list[threading.Thread] = []
        if receives:
            self._me = secrets.token_hex(8)
            place = self._join()
            self._threads = [threading.Thread(target=self._receive, args=[place], daemon=True),
                             threading.Thread(target=self._beat, daemon=True)]  # fmt: skip
            for thread in self._threads:
                thread.start()

    # --- receiving ---

    def _join(self) -> int:
        """From the place that it returns on, announcements may name this reader."""
        place = 0
        while self._board.item(push.LIST, place) is not None:
            place += 1
        self._board.put(f"{push.READERS}{self._me}", b"")
        return place

    def _beat(self) -> None:
        """Signs of life, for as long as the other thread receives."""
        count = 0
        while not self._closed.wait(push._BEAT_S) and self._threads[0].is_alive():
            count += 1
            try:
                self._board.put(f"{push.READERS}{self._me}", str(count).encode())
            except StoreUnavailableError:
                continue  # the next one may get through

    def _receive(self, place: int) -> None:
        while not self._closed.is_set():
            try:
                found = self._board.item(push.LIST, place)
                if found is None:
                    self._closed.wait(self._config.poll_s / 4)
                    continue
                self._take_part(place, push.Announcement.decode(found))
                place += 1
            except StoreUnavailableError:
                self._closed.wait(self._config.poll_s)

    def _take_part(self, place: int, announcement: push.Announcement) -> None:
        if self._me not in announcement.readers:
            return
        limit = float(self._config.store_options.get("push_timeout_s", 30))
        try:
            data, group = push.receive(self._board, place, announcement, self._me, limit)
            self._keep(announcement.name, memoryview(data.numpy()))
            group.barrier().wait()
        except RuntimeError:
            return  # somebody of the group has gone; the sender announces it anew for those that are left

    def _keep(self, name: str, data: memoryview) -> None:
        self._received[name] = data
        held = sum(len(part) for part in self._received.values())
        for oldest in list(self._received)[:-1]:
            if held <= _KEEP_BYTES:
                break
            held -= len(self._received.pop(oldest))

    # --- the log ---

    def run_id(self) -> str:
        """See the port."""
        if self._run_id is None:
            self._run_id = self.newest_run()
        if self._run_id is None or all(run.run_id != self._run_id for run in read_runs(self._board)):
            raise VersionMissingError("the board holds no such run yet", field="run_id", found=self._run_id)
        return self._run_id

    def newest_run(self) -> str | None:
        """See the port."""
        runs = read_runs(self._board)
        return runs[-1].run_id if runs else None

    def _log(self) -> list[manifest_pb2.VersionManifest]:
        """All entries; reads those that are new."""
        self._known.extend(read_entries(self._board, self.run_id(), len(self._known)))
        return self._known

    def head(self) -> int | None:
        """See the port."""
        try:
            entries = self._log()
        except VersionMissingError:
            return None
        return next((entry.number for entry in reversed(entries) if is_version(entry.kind)), None)

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """See the port."""
        entries = self._log()
        if not 0 <= number < len(entries):
            raise VersionMissingError("version has not been published", field="number", found=number)
        if not is_version(entries[number].kind):
            raise VersionMissingError("number is no version", field="number", found=kind_name(entries[number].kind))
        return entries[number]

    def entries(self, first: int = 0) -> Iterator[manifest_pb2.VersionManifest]:
        """See the port."""
        yield from self._log()[first:]

    def wait(self, after: int | None, timeout: float) -> int | None:
        """See the port."""
        deadline = time.monotonic() + timeout
        while True:
            head = self.head()
            if head is not None and (after is None or head > after):
                return head
            left = deadline - time.monotonic()
            if left <= 0 or self._closed.wait(min(left, self._config.poll_s)):
                return None

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        """From what was received. Raises VersionExpiredError for what was broadcast while this reader was not there."""
        if offset < 0 or length < 0 or offset + length > ref.size:
            raise CorruptionError("range leaves the shard", field=ref.object, found=f"[{offset}, {offset + length})",
                                  expected=f"[0, {ref.size})")  # fmt: skip
        data = self._received.get(f"{self.run_id()}/{ref.object}")
        if data is None:
            raise VersionExpiredError("the shard was broadcast while this reader was not there, or is used already",
                                      field=ref.object, do="ask for a full state")  # fmt: skip
        return data[offset : offset + length]

    # --- the other direction ---

    def lease(self, replica_id: str, number: int, ttl_s: int) -> None:
        """Keeps nothing: what was received stays until it is acknowledged."""

    def release(self, replica_id: str) -> None:
        """Nothing was kept."""

    def want(self, replica_id: str, number: int) -> None:
        """Asks for a full state that is broadcast from now on: ``ttl_s`` carries the number of the next entry."""
        self._wanted = number
        version = common_pb2.VersionId(run_id=self.run_id(), number=number)
        want = replica_pb2.Lease(replica_id=replica_id, version=version, ttl_s=len(self._log()))
        self._board.put(f"want/{self.run_id()}/{replica_id}", want.SerializeToString())

    def acknowledge(self, message: replica_pb2.Acknowledgement) -> None:
        """Tells the trainer; shards up to the version that is served are dropped."""
        self._board.put(f"ack/{self.run_id()}/{message.replica_id}", message.SerializeToString())
        if message.state != replica_pb2.REPLICA_STATE_SERVING:
            return
        served = message.version.number
        if self._wanted is not None and served >= self._wanted:
            self._board.delete(f"want/{self.run_id()}/{message.replica_id}")
            self._wanted = None
        last = f"{self.run_id()}/data/{served:020d}/~"
        for name in [name for name in self._received if name < last]:
            del self._received[name]

    def send_trajectories(self, batch: Sequence[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.TrajectoryReceipt]:
        """To the board, that is to the trainer's memory: they survive this process."""
        receipts = []
        for trajectory in batch:
            if not trajectory.id:
                raise InputError("trajectory without id", field="id", do="give each a unique id")
            fresh = trajectory.id not in self._sent
            if fresh:
                key = f"trajectory/{self.run_id()}/{time.time_ns():020d}-{secrets.token_hex(8)}"
                self._board.put(key, trajectory.SerializeToString())
                self._sent.add(trajectory.id)
            receipts.append(trajectory_pb2.TrajectoryReceipt(id=trajectory.id, duplicate=not fresh))
        return receipts

    def close(self) -> None:
        """See the port."""
        if self._closed.is_set():
            return
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * self._config.timeout_s)
        if self._threads:
            try:
                self._board.delete(f"{push.READERS}{self._me}")
            except StoreUnavailableError:
                self._received.clear()  # the board has gone, and our name with it
