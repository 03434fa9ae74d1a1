"""The trainer's end of a store: opening a run, storing shards, committing and closing numbers.

Owns who may write what next. Owns no diff and no encoding (the core hands in finished shards and manifests), no
retention (collect.py) and no inbox (inbox.py).

How fencing works: a publisher writes entry N only after it has seen every entry below N, and accepts only entries of
its own epoch above its claim. A newer publisher claims the next number with an EPOCH entry; from then on the older
one either finds that entry when it looks, or loses the put. Either way it raises EpochFencedError and stops.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from weight_sync.config import Config, crash_point
from weight_sync.errors import CorruptionError, DeadlineError, InputError, LineageError, StoreError
from weight_sync.ports import Fate, OpenedRun, PublisherEnd, ShardBytes
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.transport.file import keys
from weight_sync.transport.file.collect import Collector, fresh_leases
from weight_sync.transport.file.entries import check_own, fenced, new_entry, put_entry
from weight_sync.transport.file.inbox import Inbox, reject
from weight_sync.transport.file.log import Log, decode
from weight_sync.transport.file.replica_end import FileReplicaEnd
from weight_sync.transport.file.runs import Register, check_parent, choose, new_record
from weight_sync.transport.file.shards import store_shard
from weight_sync.transport.file.store import Store
from weight_sync.version import ABORTED, EPOCH, EXPIRED, Entry, is_version, may_follow

__all__ = ["FilePublisherEnd"]


class FilePublisherEnd(PublisherEnd):
    """One rank's end. Not thread-safe, but ``put_shard`` may run in several threads at once."""

    keeps_history = True

    def __init__(self, store: Store, config: Config, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise InputError("not a rank", field="rank", found=rank, expected=f"0 to {world_size - 1}")
        self._store = store
        self._config = config
        self._register = Register(store)
        self._run: OpenedRun | None = None
        self._log = Log(store, "")
        self._inbox = Inbox(store, "")
        self._collector: Collector | None = None
        self._writer = ""
        self._last: Entry | None = None  # the newest entry seen, None before entry 0
        self._head: int | None = None  # the newest version up to _last
        self._shipped: int | None = None  # the newest anchor of this epoch whose bits are stored
        self._commits = False  # True on the rank that opened the run
        self._attempt: tuple[int, bytes] | None = None  # number and nonce of the newest commit that was tried
        self._shards: tuple[int, frozenset[str]] = (-1, frozenset())  # keys stored for the newest number

    # --- opening ---

    def open_run(self, run_id: str | None, *, fork_of: common_pb2.VersionId | None, writer: str) -> OpenedRun:
        """Claims the newest run, a named one, or a new one (the store is empty, or ``fork_of`` is given).

        A new run has no entry yet and epoch 0; whoever commits its entry 0 owns the epoch. The same is returned for
        a run whose publisher died before entry 0. Else an EPOCH entry is written at the next number. ``head`` is
        None, with ``created`` False, in a run whose numbers were all aborted.

        Raises ForkRequiredError when ``run_id`` is not there but other runs are, InputError when a fork names a run
        that exists, VersionMissingError when ``fork_of`` does not, DeadlineError when rivals win all the time.
        """
        self._writer = writer
        deadline = time.monotonic() + self._config.timeout_s
        made: str | None = None
        while time.monotonic() < deadline:
            known = self._register.refresh()
            if made is not None and self._register.find(made) is not None:
                chosen: str | None = made
            else:
                chosen = choose(known, run_id, fork_of)
            if chosen is None:
                if fork_of is not None:
                    check_parent(self._store, self._register, fork_of)
                record = new_record(run_id, fork_of, writer)
                self._register.append(record)  # if somebody else was first, or the answer was lost, look again
                made = record.run_id
                continue
            opened = self._claim(chosen)
            if opened is not None:
                self.attach(opened)
                self._commits = True
                return opened
        raise DeadlineError(
            "rivals keep writing to the store", field="weight_sync.timeout_s", do="stop the other publishers"
        )

    def attach(self, run: OpenedRun) -> None:
        """Tells a rank other than 0 what rank 0 opened."""
        self._run = run
        self._log = Log(self._store, keys.check_run_id(run.run_id))
        self._inbox = Inbox(self._store, run.run_id)
        self._collector = None
        self._commits = False
        self._attempt = None
        self._shards = (-1, frozenset())
        self._head = None if run.head is None else run.head.number
        self._shipped = None
        self._last = None if run.created else Entry(run.epoch, run.epoch, EPOCH)

    def _claim(self, run_id: str) -> OpenedRun | None:
        """One try to own the run; None when a rival took the number."""
        log = Log(self._store, run_id)
        number = log.follow()
        if number == 0:
            return OpenedRun(run_id, 0, None, True)
        head = log.head()
        manifest = None if head is None else log.read(head)
        claim = new_entry(run_id, number, number, EPOCH, self._writer, "publisher opened the run")
        return OpenedRun(run_id, number, manifest, False) if put_entry(self._store, log, claim) else None

    def _opened(self) -> OpenedRun:
        if self._run is None:
            raise InputError("no run is open", do="call open_run on rank 0, then attach on the others")
        return self._run

    # --- one version ---

    def put_shard(self, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        """Stores one shard under a fresh name; durable on return, visible to nobody until a manifest names it."""
        ref = store_shard(self._store, self._opened(), number, shard)
        mine = self._shards[1] if self._shards[0] == number else frozenset()
        self._shards = (number, mine | {ref.object})
        return ref

    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        """Writes entry ``manifest.number``. Committing the same manifest (the same nonce) again is fine.

        Raises EpochFencedError naming the winner when a rival owns the number or a newer epoch the run,
        LineageError when the number was aborted or the entry does not continue the log, InputError when the
        manifest is not this publisher's, FormatError or CorruptionError when readers would refuse it, StoreError
        when the outcome is unknown: ``abort`` settles it.
        """
        run = self._opened()
        check_own(manifest, run)
        self._log.parse(manifest.number, manifest.SerializeToString())
        if manifest.number >= self.next_number():
            reason = may_follow(self._last, self._head, Entry.of(manifest))
            if reason is not None:
                raise LineageError(
                    "entry does not continue the log", field=self._log.name(manifest.number), found=reason
                )
        self._attempt = (manifest.number, manifest.nonce)
        crash_point("commit:before")
        won = put_entry(self._store, self._log, manifest)
        crash_point("commit:after")
        if not won:
            raise self._lost(manifest.number)
        self._accept(manifest)
        with suppress(StoreError):  # the version is committed; the hint only spares readers a listing
            hint = common_pb2.VersionId(run_id=run.run_id, number=manifest.number)
            self._store.put(keys.LATEST, hint.SerializeToString())

    def abort(self, number: int, reason: str) -> Fate:
        """Closes ``number`` with an ABORTED entry unless it has one; returns COMMITTED or ABORTED.

        ABORTED also when a rival holds the number: this epoch's version will never be there.
        Raises EpochFencedError when a rival has written below ``number``, LineageError when nobody has.
        """
        run = self._opened()
        entry = self._log.read(number)
        if entry is None:
            expected = self.next_number()
            if number != expected:
                raise LineageError("not the next number", field="number", found=number, expected=expected)
            closing = new_entry(run.run_id, number, run.epoch, ABORTED, self._writer, reason)
            if put_entry(self._store, self._log, closing):
                self._accept(closing)
                return Fate.ABORTED
            entry = self._log.read(number)  # a put of ours that was slow, or a rival's
            assert entry is not None  # entries are never removed
        return self._fate_by(entry)

    def fate(self, number: int) -> Fate:
        """What the log says about this epoch's put of ``number``. OPEN: no entry yet, it may still become either."""
        self._opened()
        entry = self._log.read(number)
        return Fate.OPEN if entry is None else self._fate_by(entry)

    def next_number(self) -> int:
        """The first number without an entry. Raises EpochFencedError when a rival has written to the log."""
        self._opened()
        while True:
            number = 0 if self._last is None else self._last.number + 1
            entry = self._log.read(number)
            if entry is None:
                return number
            self._accept(entry)

    def _accept(self, entry: manifest_pb2.VersionManifest) -> None:
        """Takes note of the entry after _last. Raises EpochFencedError unless this publisher wrote it."""
        if self._last is not None and entry.number <= self._last.number:
            return
        run = self._opened()
        if not (self._is_own_version(entry) or (entry.kind == ABORTED and entry.epoch == run.epoch)):
            raise fenced(entry, self._log.name(entry.number), run)
        self._last = Entry.of(entry)
        if is_version(entry.kind):
            self._head = entry.number
        if self._last.anchor_bytes is not None:
            self._shipped = entry.number

    def _fate_by(self, entry: manifest_pb2.VersionManifest) -> Fate:
        return Fate.COMMITTED if self._is_own_version(entry) else Fate.ABORTED

    def _is_own_version(self, entry: manifest_pb2.VersionManifest) -> bool:
        """True when ``entry`` is a version that this publisher, be it another rank of it, has written.

        The epoch tells, but for epoch 0: two publishers may have opened the new run. There the nonce of our commit
        tells, and on ranks that commit nothing the shards that they stored.
        """
        if entry.epoch != self._opened().epoch or not (is_version(entry.kind) or entry.kind == EXPIRED):
            return False
        if self._last is not None and entry.number <= self._last.number:
            return True  # accepted before
        if self._commits:
            return self._attempt == (entry.number, entry.nonce)
        number, mine = self._shards
        return number != entry.number or not mine.isdisjoint(Entry.of(entry).objects)

    def _lost(self, number: int) -> LineageError:
        run = self._opened()
        winner = self._log.read(number)
        assert winner is not None  # entries are never removed
        if winner.kind == ABORTED and winner.epoch == run.epoch:
            return LineageError(
                "number was aborted",
                field=self._log.name(number),
                found=winner.reason,
                do="publish under the next number",
            )
        if self._is_own_version(winner):
            return LineageError("number was committed already", field=self._log.name(number), do="publish the next one")
        return fenced(winner, self._log.name(number), run)

    # --- the other direction ---

    def reader(self) -> FileReplicaEnd:
        """The history of the run."""
        return FileReplicaEnd(self._store, self._config, self._opened().run_id)

    def acknowledgements(self) -> list[replica_pb2.Acknowledgement]:
        """The last one of each replica. One that cannot be read has only an id and the reason, in ``error``."""
        found = []
        for meta in self._store.list(keys.acks(self._opened().run_id)):
            replica_id = keys.stem(meta.key)
            try:
                data = self._store.get(meta.key)
                message = decode(replica_pb2.Acknowledgement, data or b"", self._store.name(meta.key))
            except CorruptionError as error:
                message = replica_pb2.Acknowledgement(error=str(error))
            message.replica_id = replica_id  # the key, which its writer was allowed to write, tells whose it is
            found.append(message)
        return found

    def wants(self) -> Mapping[str, int]:
        """Replicas that cannot resolve an anchor by reference: replica id to the number of that anchor.

        A want is answered by an anchor with stored bits above it. Raises CorruptionError once per unreadable one.
        """
        run = self._opened()
        found = {}
        for meta in self._store.list(keys.wants(run.run_id)):
            try:
                data = self._store.get(meta.key)
                want = decode(replica_pb2.Lease, data or b"", self._store.name(meta.key))
            except CorruptionError as error:
                reject(self._store, run.run_id, meta.key, error)
            if data is not None and (self._shipped is None or want.version.number >= self._shipped):
                found[keys.stem(meta.key)] = want.version.number
        return found

    def leases(self) -> Mapping[str, int]:
        """Fresh leases: replica id to number. Writes the run's probe, whose time is the store's.

        Works without ``open_run``, like `collect`. Raises VersionMissingError when the store holds no run.
        """
        run_id = self._reading().run_id()
        return fresh_leases(self._store, run_id, self._store.now(keys.probe(run_id)))[0]

    def take_trajectories(self, limit: int) -> list[trajectory_pb2.Trajectory]:
        """Up to ``limit`` of them, oldest first by the senders' clocks; inbox.py says what is promised.

        Raises CorruptionError once per batch that cannot be read; the next call goes on.
        """
        self._opened()
        return self._inbox.take(limit)

    def collect(self) -> Mapping[str, int]:
        """Deletes what no lease and no retained version needs; counts by kind as collect.py names them.

        Works without ``open_run`` too, on the configured run or the newest one, beside a live publisher.
        Raises VersionMissingError when the store holds no run.
        """
        if self._collector is None:
            self._collector = Collector(self._store, self._reading().run_id(), self._config.keep_versions)
        return self._collector.collect()

    def _reading(self) -> FileReplicaEnd:
        """A reader of the open run, else of the configured or the newest one."""
        return FileReplicaEnd(self._store, self._config, None if self._run is None else self._run.run_id)

    def close(self) -> None:
        """Removes trajectories that were handed out and forgets the run."""
        with suppress(StoreError):  # what stays is delivered again, as promised
            self._inbox.close()
        self._run = None
