"""A reader's end of a store: following a run, reading shards, leases, acknowledgements, trajectories.

Owns the watching. Owns no decision of a replica, and deletes nothing but its own lease and want.
"""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from weight_sync.config import Config
from weight_sync.errors import CorruptionError, VersionExpiredError, VersionMissingError
from weight_sync.ports import ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.transport.file import keys
from weight_sync.transport.file.inbox import Outbox
from weight_sync.transport.file.log import Log
from weight_sync.transport.file.runs import Register
from weight_sync.transport.file.shards import read_shard
from weight_sync.transport.file.store import Store
from weight_sync.version import EXPIRED, Entry, is_version, kind_name, may_follow

__all__ = ["FileReplicaEnd"]


class FileReplicaEnd(ReplicaEnd):
    """A reader's end. ``read`` may run in several threads; the rest belongs to one. ``close`` ends a ``wait``.

    Follows one run for life: the named one, else that of the configuration, else the newest when it first looked. A
    store that is empty, or a folder that is not there yet, holds no run: methods that need one raise
    VersionMissingError, ``wait`` and ``head`` go on looking.
    """

    def __init__(self, store: Store, config: Config, run_id: str | None) -> None:
        self._store = store
        self._config = config
        named = run_id if run_id is not None else config.run_id
        self._named = None if named is None else keys.check_run_id(named)
        self._register = Register(store)
        self._log: Log | None = None
        self._outbox: Outbox | None = None
        self._wanted: int | None = None
        self._closed = threading.Event()

    # --- the run ---

    def run_id(self) -> str:
        """The run that is followed; never changes once known. Raises VersionMissingError while there is none."""
        return self._followed().run_id

    def newest_run(self) -> str | None:
        """The store's newest run now: one request when nothing is new. None while there is none.

        Another one than ``run_id()`` means that the trainer forked. Whoever follows the newest run asks now and
        then (after a ``wait`` that came back empty, say), closes this end and opens one on that run.
        """
        records = self._register.refresh()
        return records[-1].run_id if records else None

    def _look(self) -> Log | None:
        if self._log is None:
            self._register.refresh()
            records = self._register.records
            if self._named is not None and self._register.find(self._named) is not None:
                self._log = Log(self._store, self._named)
            elif self._named is None and records:
                self._log = Log(self._store, records[-1].run_id)
        return self._log

    def _followed(self) -> Log:
        log = self._look()
        if log is None:
            raise VersionMissingError(
                "store holds no such run" if self._named is not None else "store holds no run",
                field=self._store.location.uri,
                found=[record.run_id for record in self._register.records][-5:],
                expected=self._named or "a run",
                do="start the publisher, or correct weight_sync.uri and weight_sync.run_id",
            )
        return log

    # --- the log ---

    def head(self) -> int | None:
        """Number of the newest version; None while there is none."""
        log = self._look()
        if log is None:
            return None
        log.follow()
        return log.head()

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """Version ``number``.

        Raises VersionMissingError when there is no entry or it is no version, VersionExpiredError when it was
        collected, CorruptionError or FormatError when the entry cannot be trusted.
        """
        log = self._followed()
        found = log.read(number)
        if found is None:
            raise VersionMissingError(f"version {number} has not been published", field="version", found=number,
                                      expected=f"at most {self.head()}, the newest of run {self.run_id()}")  # fmt: skip
        if found.kind == EXPIRED:
            raise VersionExpiredError(
                "version was collected",
                field=log.name(number),
                found=found.reason,
                do="go to a newer version; a lease keeps a version that is in use",
            )
        if not is_version(found.kind):
            raise VersionMissingError(
                "number is no version", field=log.name(number), found=f"{kind_name(found.kind)}: {found.reason}",
                do="weight-sync log lists the versions: a trainer that opens the run takes a number, too",
            )  # fmt: skip
        return found

    def entries(self, first: int = 0) -> Iterator[manifest_pb2.VersionManifest]:
        """All entries from ``first`` on, in order, EPOCH, ABORTED and EXPIRED ones too.

        Raises CorruptionError at an entry that may not follow the one before it.
        """
        log = self._followed()
        previous = log.summary(first - 1) if first > 0 else None
        if first > 0 and previous is None:
            return
        head = log.newest_before(first)
        number = first
        while (manifest := log.read(number)) is not None:
            entry = Entry.of(manifest)
            reason = may_follow(previous, head, entry)
            if reason is not None:
                raise CorruptionError(
                    "log is inconsistent", field=log.name(number), found=reason, do="do not trust this store"
                )
            if is_version(manifest.kind) or manifest.kind == EXPIRED:
                head = number
            yield manifest
            previous, number = entry, number + 1

    def wait(self, after: int | None, timeout: float) -> int | None:
        """The newest version above ``after`` (None: any), waiting up to ``timeout`` seconds; None when none came.

        Asks for the next entry every ``poll_s``, give or take half, so that many followers do not ask at once.
        """
        deadline = time.monotonic() + timeout
        while True:
            head = self.head()
            if head is not None and (after is None or head > after):
                return head
            left = deadline - time.monotonic()
            pause = self._config.poll_s * random.uniform(0.5, 1.5)
            if left <= 0 or self._closed.wait(min(left, pause)):
                return None

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        """``length`` bytes of a shard from ``offset``; their hash is the caller's to check.

        Raises VersionExpiredError when the object is gone, CorruptionError when it is shorter or the range leaves
        it, FormatError when ``ref`` points outside the run.
        """
        return read_shard(self._store, self.run_id(), ref, offset, length)

    def local(self, ref: manifest_pb2.ShardRef) -> Path | None:
        """The shard's file, of a store that is a folder; None of others. It may be gone. Raises FormatError."""
        root = self._store.location.root
        run_id = self.run_id()
        key = keys.under(run_id, keys.check_object(ref.object, None, f"a manifest of run {run_id}"))
        return None if root is None else root / key

    # --- the other direction ---

    def lease(self, replica_id: str, number: int, ttl_s: int) -> None:
        """Keeps version ``number`` and what it needs for ``ttl_s`` seconds from now by the store's clock.

        One lease per replica: a new one replaces the old. A collection may already have chosen the version, so take
        the lease first and read the manifest afterwards.
        """
        version = common_pb2.VersionId(run_id=self.run_id(), number=number)
        message = replica_pb2.Lease(replica_id=replica_id, version=version, ttl_s=ttl_s)
        self._store.put(keys.lease(self.run_id(), replica_id), message.SerializeToString())

    def release(self, replica_id: str) -> None:
        """Drops the lease."""
        self._store.delete(keys.lease(self.run_id(), replica_id))

    def want(self, replica_id: str, number: int) -> None:
        """Asks the publisher for a full state: version ``number`` cannot be reached from what lies in the store.

        Withdrawn when the replica acknowledges that it serves that version or a newer one.
        """
        self._wanted = number
        version = common_pb2.VersionId(run_id=self.run_id(), number=number)
        message = replica_pb2.Lease(replica_id=replica_id, version=version)
        self._store.put(keys.want(self.run_id(), replica_id), message.SerializeToString())

    def acknowledge(self, message: replica_pb2.Acknowledgement) -> None:
        """Tells the trainer what this replica serves; replaces its last one."""
        serves = message.state == replica_pb2.REPLICA_STATE_SERVING
        if self._wanted is not None and serves and message.version.number >= self._wanted:
            self._store.delete(keys.want(self.run_id(), message.replica_id))
            self._wanted = None
        self._store.put(keys.ack(self.run_id(), message.replica_id), message.SerializeToString())

    def send_trajectories(self, batch: Sequence[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.TrajectoryReceipt]:
        """Hands trajectories to the trainer; they are durable on return. inbox.py says what is promised.

        Raises InputError when one has no id or the batch is too large.
        """
        if self._outbox is None:
            sender = self._config.replica_id
            self._outbox = Outbox(self._store, self.run_id(), _process_name() if sender is None else sender)
        return self._outbox.send(batch)

    def close(self) -> None:
        """Ends a wait in another thread. The lease stays until released or expired."""
        self._closed.set()


def _process_name() -> str:
    """Host and process as a usable name."""
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:64] or "host"
    return f"{host}-{os.getpid()}"
