"""The trainer's end: the log by put-if-absent, shards by broadcast.

Owns who may write what next, and the broadcast of what is put. Owns no diff and no encoding, and keeps nothing: a shard
is with the readers when ``put_shard`` returns, or nowhere.

Fencing: a publisher writes entry N after it has seen all before it, and knows its own by their nonces. Who opens a run
that has entries claims the next number with an EPOCH entry; the older publisher then finds that entry and stops.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping

import numpy as np
import torch
from blake3 import blake3

from weight_sync.config import Config
from weight_sync.errors import (
    DeadlineError,
    EpochFencedError,
    ForkRequiredError,
    InputError,
    LineageError,
    StoreUnavailableError,
    VersionMissingError,
)
from weight_sync.ports import Fate, OpenedRun, PublisherEnd, ShardBytes
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.version import ABORTED, EPOCH, Entry, is_version, kind_name, may_follow
from weight_sync_gloo import push
from weight_sync_gloo.board import Board, read_entries, read_runs
from weight_sync_gloo.replica_end import GlooReplicaEnd

__all__ = ["GlooPublisherEnd"]


class GlooPublisherEnd(PublisherEnd):
    """One rank's end."""

    keeps_history = False

    def __init__(self, board: Board, config: Config) -> None:
        self._board, self._config = board, config
        self._readers = push.Readers(board)
        self._push_s = float(config.store_options.get("push_timeout_s", 30))
        self._run: OpenedRun | None = None
        self._writer = ""
        self._mine: set[bytes] = set()  # nonces of what we have written, or tried to
        self._last: Entry | None = None
        self._head: int | None = None
        self._shipped = -1  # the newest version with a full state
        self._place = 0
        self._taken: list[str] = []

    # --- opening ---

    def open_run(self, run_id: str | None, *, fork_of: common_pb2.VersionId | None, writer: str) -> OpenedRun:
        """See the port."""
        self._writer = writer
        deadline = time.monotonic() + self._config.timeout_s
        while time.monotonic() < deadline:
            runs = read_runs(self._board)
            chosen = self._choose(runs, run_id, fork_of)
            if chosen is None:
                run_id = run_id or time.strftime("run-%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)
                record = manifest_pb2.RunRecord(format=1, run_id=run_id, parent=fork_of, created_by=writer)
                self._board.set_item("runs", len(runs), record.SerializeToString())  # a rival may be faster: look again
                continue
            opened = self._claim(chosen)
            if opened is not None:
                self.attach(opened)
                return opened
        raise DeadlineError("rivals keep writing to the board", field="timeout_s", do="stop the other publishers")

    def _choose(
        self, runs: list[manifest_pb2.RunRecord], run_id: str | None, fork_of: common_pb2.VersionId | None
    ) -> str | None:
        """The run to claim; None when it has to be made."""
        same = next((run for run in runs if run.run_id == run_id), None)
        if fork_of is not None:
            if same is not None and same.parent != fork_of:
                raise InputError("run exists already", field="run_id", found=run_id, do="name the fork differently")
            parent = self._board.item(f"log/{fork_of.run_id}", fork_of.number)
            if parent is None or not is_version(manifest_pb2.VersionManifest.FromString(parent).kind):
                raise VersionMissingError("no version to fork from", field="fork_of", found=str(fork_of))
        elif run_id is None:
            return runs[-1].run_id if runs else None
        elif same is None and runs:
            raise ForkRequiredError("the board holds other runs", field="run_id", found=run_id,
                                    expected=runs[-1].run_id, do="correct run_id, or fork")  # fmt: skip
        return None if same is None else same.run_id

    def _claim(self, run_id: str) -> OpenedRun | None:
        """None when a rival took the number."""
        entries = list(read_entries(self._board, run_id))
        if not entries:
            return OpenedRun(run_id, 0, None, True)
        head = next((entry for entry in reversed(entries) if is_version(entry.kind)), None)
        number = len(entries)
        claim = self._entry(run_id, number, number, EPOCH, "publisher opened the run")
        if not self._board.set_item(f"log/{run_id}", number, claim.SerializeToString()):
            return None
        return OpenedRun(run_id, number, head, False)

    def _entry(
        self, run_id: str, number: int, epoch: int, kind: manifest_pb2.EntryKind, reason: str
    ) -> manifest_pb2.VersionManifest:
        nonce = secrets.token_bytes(16)
        self._mine.add(nonce)
        return manifest_pb2.VersionManifest(format=1, run_id=run_id, number=number, epoch=epoch, kind=kind, nonce=nonce,
                                            writer=self._writer, reason=reason)  # fmt: skip

    def attach(self, run: OpenedRun) -> None:
        """See the port."""
        self._run = run
        self._last = None if run.created else Entry(run.epoch, run.epoch, EPOCH)
        self._head = None if run.head is None else run.head.number

    def _opened(self) -> OpenedRun:
        if self._run is None:
            raise InputError("no run is open", do="call open_run on rank 0, then attach on the others")
        return self._run

    # --- one version ---

    def put_shard(self, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        """On return every reader that is alive holds it, for when the version is committed."""
        run = self._opened()
        data = np.frombuffer(b"".join([shard.head, *shard.body]), np.uint8)
        name = f"{run.run_id}/data/{number:020d}/{run.epoch}-{shard.rank}-{shard.label}-{secrets.token_hex(8)}"
        deadline = time.monotonic() + self._config.timeout_s
        while readers := self._readers.alive():
            announcement = push.Announcement(name, len(data), readers)
            self._place = push.announce(self._board, announcement, self._place)
            try:
                push.send(self._board, self._place, announcement, torch.from_numpy(data.copy()), self._push_s)
                break
            except RuntimeError as error:  # somebody has gone; who it was shows by its silence
                if time.monotonic() > deadline:
                    raise StoreUnavailableError("readers do not take part", field=name, found=", ".join(readers),
                                                do="look at them; those that are dead are left out") from error  # fmt: skip
        return manifest_pb2.ShardRef(
            object=name.removeprefix(f"{run.run_id}/"), size=len(data), blake3=blake3(data).digest(),
            head_size=len(shard.head), head_blake3=blake3(shard.head).digest(), rank=shard.rank, form=shard.form,
        )  # fmt: skip

    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        """See the port."""
        run = self._opened()
        found = (manifest.format, manifest.run_id, manifest.epoch, len(manifest.nonce), is_version(manifest.kind))
        if found != (1, run.run_id, run.epoch, 16, True):
            raise InputError("not a version of the open run", field="format, run_id, epoch, nonce, kind", found=found)
        if manifest.number >= self.next_number():
            reason = may_follow(self._last, self._head, Entry.of(manifest))
            if reason is not None:
                raise LineageError("entry does not continue the log", field="number", found=reason)
        known = manifest.nonce in self._mine
        self._mine.add(manifest.nonce)
        if not self._board.set_item(f"log/{run.run_id}", manifest.number, manifest.SerializeToString()):
            winner = self._read(manifest.number)
            assert winner is not None
            if winner.nonce != manifest.nonce:
                if not known:
                    self._mine.discard(manifest.nonce)
                raise self._lost(winner)
        self._accept(manifest)

    def _read(self, number: int) -> manifest_pb2.VersionManifest | None:
        data = self._board.item(f"log/{self._opened().run_id}", number)
        return None if data is None else manifest_pb2.VersionManifest.FromString(data)

    def _lost(self, winner: manifest_pb2.VersionManifest) -> LineageError:
        told = f"{kind_name(winner.kind)} {winner.number} of epoch {winner.epoch} by {winner.writer}"
        if winner.nonce in self._mine:
            return LineageError("the number is closed", field="number", found=told, do="publish under the next number")
        return EpochFencedError(f"another publisher owns run {winner.run_id}", field="number", found=told,
                                expected=f"epoch {self._opened().epoch}", do="stop this one")  # fmt: skip

    def _accept(self, entry: manifest_pb2.VersionManifest) -> None:
        """Takes note of the next entry. Raises EpochFencedError unless it is ours."""
        if self._last is not None and entry.number <= self._last.number:
            return
        if entry.nonce not in self._mine:
            raise self._lost(entry)
        self._last = Entry.of(entry)
        if is_version(entry.kind):
            self._head = entry.number
        if self._last.anchor_bytes is not None:
            self._shipped = entry.number

    def abort(self, number: int, reason: str) -> Fate:
        """See the port."""
        run = self._opened()
        entry = self._read(number)
        if entry is None:
            if number != (expected := self.next_number()):
                raise LineageError("not the next number", field="number", found=number, expected=expected)
            closing = self._entry(run.run_id, number, run.epoch, ABORTED, reason)
            if self._board.set_item(f"log/{run.run_id}", number, closing.SerializeToString()):
                self._accept(closing)
                return Fate.ABORTED
            entry = self._read(number)
            assert entry is not None
        return self._fate_of(entry)

    def _fate_of(self, entry: manifest_pb2.VersionManifest) -> Fate:
        return Fate.COMMITTED if is_version(entry.kind) and entry.nonce in self._mine else Fate.ABORTED

    def fate(self, number: int) -> Fate:
        """See the port."""
        entry = self._read(number)
        return Fate.OPEN if entry is None else self._fate_of(entry)

    def next_number(self) -> int:
        """See the port."""
        while (entry := self._read(number := 0 if self._last is None else self._last.number + 1)) is not None:
            self._accept(entry)
        return number

    def reader(self) -> GlooReplicaEnd:
        """The log; no bits."""
        return GlooReplicaEnd(self._board, self._config, self._opened().run_id, receives=False)

    # --- the other direction ---

    def acknowledgements(self) -> list[replica_pb2.Acknowledgement]:
        """See the port."""
        return [replica_pb2.Acknowledgement.FromString(data) for data in self._values("ack").values()]

    def wants(self) -> Mapping[str, int]:
        """Those that asked after the last full state went out: who came later has not got it."""
        asked = {key: replica_pb2.Lease.FromString(data) for key, data in self._values("want").items()}
        return {want.replica_id: want.version.number for want in asked.values() if want.ttl_s > self._shipped}

    def _values(self, kind: str) -> dict[str, bytes]:
        found = {key: self._board.get(key) for key in self._board.keys(f"{kind}/{self._opened().run_id}/")}
        return {key: data for key, data in found.items() if data is not None}

    def leases(self) -> Mapping[str, int]:
        """None: nothing is kept that a lease could keep longer."""
        return {}

    def take_trajectories(self, limit: int) -> list[trajectory_pb2.Trajectory]:
        """See the port. Each stands on the board by itself."""
        self._forget_taken()
        self._taken = self._board.keys(f"trajectory/{self._opened().run_id}/")[:limit]
        found = [self._board.get(key) for key in self._taken]
        return [trajectory_pb2.Trajectory.FromString(data) for data in found if data is not None]

    def _forget_taken(self) -> None:
        for key in self._taken:
            self._board.delete(key)
        self._taken = []

    def collect(self) -> Mapping[str, int]:
        """Nothing to collect."""
        return {}

    def close(self) -> None:
        """See the port."""
        try:
            self._forget_taken()
        except StoreUnavailableError:
            self._taken = []  # the board has gone, and they with it
