"""Replica: the engine's side. Follow -> fetch -> stage -> fence -> apply -> verify -> acknowledge.

Owns the state machine of one engine and its promises: everything is prepared while the engine serves; a version is
announced only after its digest matched; any failure before that restores the version before; an engine whose bits
match no version serves nothing until it has been rebuilt. Owns no bits (the engine does), no reading (history.py) and
no wire.

States: ATTACHING -> SERVING -> STAGING -> FENCED -> SERVING; from FENCED also IN_DOUBT, which only a rebuild leaves.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from weight_sync import config as configuration
from weight_sync import version as rules
from weight_sync.codec.digest import Digest
from weight_sync.config import Config, crash_point
from weight_sync.errors import (
    CorruptionError,
    DeadlineError,
    DigestMismatchError,
    EngineError,
    EngineInDoubtError,
    StoreError,
    VersionError,
    VersionMissingError,
    VersionNotReadyError,
    WeightSyncError,
)
from weight_sync.history import History, table_of, view_of
from weight_sync.ports import Engine, PauseMode, ReplicaEnd, Transport, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.registry import open_transport
from weight_sync.tensors import TensorSpec

__all__ = ["Replica", "SyncReport", "choose_target", "table_difference"]

State = replica_pb2.ReplicaState


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    Attributes:
        version: served now.
        previous: served before; None when it was none.
        changed: False when nothing had to be done.
        staleness: newest version seen minus the one served, in numbers.
        path: how it got there, in words.
        seconds: prepare (fetch, check, decode, fold), stage, pause (all of the fence), apply, total.
        ack_error: why the trainer could not be told; "" when it was.
    """

    version: int
    previous: int | None
    changed: bool
    staleness: int = 0
    path: str = ""
    digest: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    ack_error: str = ""

    @property
    def pause_s(self) -> float:
        """Length of the fence in seconds."""
        return self.seconds.get("pause", 0.0)


def choose_target(
    have: int | None, head: int | None, min_version: int | None, exact: int | None
) -> tuple[int | None, str]:
    """The version to serve next and why; None while it is not there yet."""
    if exact is not None:
        if head is None or exact > head:
            return None, f"version {exact} has not been published, the newest is {head}"
        return exact, f"exactly {exact} was asked for"
    if head is None:
        return None, "the run has no version yet"
    if min_version is not None and head < min_version:
        return None, f"version {min_version} has not been published, the newest is {head}"
    if have is not None and have >= head:
        return have, f"{have} is the newest"
    return head, f"{head} is the newest"


def table_difference(engine: Sequence[TensorSpec], run: Sequence[TensorSpec]) -> list[str]:
    """How an engine's tensors differ from a run's, a line each; [] when the engine can serve the run."""
    mine, theirs = {s.name: s for s in engine}, {s.name: s for s in run}
    lines = [f"the engine lacks {name!r}" for name in sorted(theirs.keys() - mine.keys())]
    lines += [f"the run lacks {name!r}" for name in sorted(mine.keys() - theirs.keys())]
    for name in sorted(mine.keys() & theirs.keys()):
        a, b = mine[name], theirs[name]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            lines.append(f"{name!r} is {a.dtype} {list(a.shape)} in the engine, {b.dtype} {list(b.shape)} in the run")
    return lines


class Replica:
    """Keeps one engine at versions of one view. Made by `Replica.open`; a context manager.

    Not thread-safe, except ``version``, ``state`` and ``send_trajectories``.

    Attributes:
        config: the keys in force.
        replica_id: of this replica.
        version: number of the version that is served; None before the first sync and while in doubt.
        state: one of the proto's ReplicaState.
    """

    def __init__(self, config: Config, transport: Transport, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self.replica_id = config.replica_id or f"{socket.gethostname()}-{os.getpid()}".replace("_", "-")
        self.version: int | None = None
        self.state: int = State.REPLICA_STATE_ATTACHING
        self._transport = transport
        self._end: ReplicaEnd = transport.replica_end(config.run_id)
        self._history = History(self._end, config.view, config.threads, config.base)
        self._run: str | None = None
        self._digest: Digest | None = None
        self._tables: tuple[TensorSpec, ...] | None = None
        self._leased = (-1, 0.0)
        self._commits = 0
        self._last_error = ""

    @classmethod
    def open(cls, uri: str | Config, engine: Engine, **keys: Any) -> Replica:
        """Attaches to an engine; the store may still be empty.

        Args:
            uri: where versions come from; or a whole `Config`.
            engine: an implementation of ``weight_sync.ports.Engine``.
            keys: any key of `Config`.

        Raises ConfigError and StoreError. Nothing is fetched before `sync`.
        """
        config = uri.replace(**keys) if isinstance(uri, Config) else configuration.load({"uri": uri, **keys})
        return cls(config, open_transport(config), engine)

    @property
    def run_id(self) -> str | None:
        """The run that is followed; None before the store holds one."""
        return self._run

    # --- following ---

    def sync(
        self, min_version: int | None = None, exact: int | None = None, timeout: float | None = None
    ) -> SyncReport:
        """Brings the engine to the newest version, or to the one asked for.

        Args:
            min_version: wait until a version with at least this number is there.
            exact: this version and no other, older ones included.
            timeout: limit of all waiting in seconds; default: ``timeout_s``. With 0 nothing is waited for.

        Raises VersionNotReadyError at the limit, VersionError when it cannot be had, CorruptionError,
        DigestMismatchError, EngineError; the engine then serves what it served before. EngineInDoubtError when it does
        not serve any more.
        """
        started = time.monotonic()
        deadline = started + (self.config.timeout_s if timeout is None else timeout)
        try:
            return self._sync(min_version, exact, started, deadline)
        except VersionNotReadyError:  # nothing went wrong here, so there is nothing to tell
            raise
        except WeightSyncError as error:
            self._last_error = str(error)
            self._acknowledge()
            raise

    def _sync(self, min_version: int | None, exact: int | None, started: float, deadline: float) -> SyncReport:
        previous = self.version
        asked_for_base = False
        while True:
            self._attach(deadline)
            if self.state == State.REPLICA_STATE_FENCED:  # admission could not be opened after the last commit
                self._resume()
            head = self._end.head()
            target, reason = choose_target(self.version, head, min_version, exact)
            if target is not None and target == self.version:
                self._renew()
                return self._unchanged(target, previous, head, reason, started)
            if target is not None:
                try:
                    seconds, path = self._move(target, started)
                    break
                except VersionMissingError as error:
                    if asked_for_base or error.field != "base":
                        raise
                    reason, asked_for_base = str(error), True
                    self._end.want(self.replica_id, target)
            self._renew()
            if self._end.wait(head, max(0.0, deadline - time.monotonic())) is None:
                raise VersionNotReadyError(
                    reason, field="version", found=self.version, expected=exact if exact is not None else min_version,
                    do="wait longer, or look whether the trainer still publishes",
                )  # fmt: skip
        head = self._end.head()
        assert self.version is not None and self._digest is not None
        seconds["total"] = time.monotonic() - started
        ack_error = self._acknowledge(seconds)
        stale = max(0, (head or 0) - self.version)
        return SyncReport(self.version, previous, True, stale, path, self._digest.hex(), seconds, ack_error)

    def _unchanged(
        self, version: int, previous: int | None, head: int | None, reason: str, started: float
    ) -> SyncReport:
        changed = previous != version  # attached to an engine that held it already
        ack_error = self._acknowledge() if changed else ""
        assert self._digest is not None
        return SyncReport(version, previous, changed, max(0, (head or 0) - version), reason, self._digest.hex(),
                          {"total": time.monotonic() - started}, ack_error)  # fmt: skip

    def follow(
        self,
        on_commit: Callable[[SyncReport], None] | None = None,
        stop: threading.Event | None = None,
        on_error: Callable[[WeightSyncError], None] | None = None,
    ) -> None:
        """Syncs until ``stop`` is set. Errors that may pass go to ``on_error`` and the acknowledgement; it goes on.

        Raises EngineInDoubtError, InputError and LineageError at once: they do not pass.
        """
        stop = stop or threading.Event()
        while not stop.is_set():
            try:
                report = self.sync(min_version=None if self.version is None else self.version + 1, timeout=1.0)
            except VersionNotReadyError:
                continue
            except EngineInDoubtError:
                raise
            except (StoreError, VersionError, CorruptionError, DigestMismatchError, DeadlineError, EngineError) as error:
                if on_error is not None:
                    on_error(error)
                stop.wait(self.config.poll_s)
                continue
            if report.changed and on_commit is not None:
                on_commit(report)

    # --- attaching ---

    def _attach(self, deadline: float) -> None:
        """Finds the run, checks that the engine can serve it, and recognises what the engine holds."""
        newest = self._end.newest_run() if self.config.run_id is None else self.config.run_id
        if newest is None:
            self._await_run(deadline)
        elif self._run is not None and newest != self._run:  # the trainer forked
            self._end.close()
            self._end = self._transport.replica_end(newest)
            self._history.end = self._end
            self._run, self.version = None, None
        if self._run is not None and self.version is not None:
            return
        self._run = self._end.run_id()
        head = self._end.head()
        if head is None or self.version is not None:
            return
        view = view_of(self._end.manifest(head), self.config.view)
        description = self.engine.describe()
        self._check_table(description, table_of(view))
        self._digest = Digest.from_proto(description.digest) if description.HasField("digest") else None
        if self._digest is not None:
            self.version = self._recognise(self._digest)
            if self.version is not None:
                self._announce(self.version)
                self._resume()  # a fence that was closed by whoever drove the engine before, or by a doubt

    def _await_run(self, deadline: float) -> None:
        self._end.wait(None, max(0.0, deadline - time.monotonic()))
        if self._end.newest_run() is None:
            raise VersionNotReadyError("the store holds no run yet", field="uri", found=self.config.uri,
                                       do="start the trainer, or check the uri")  # fmt: skip

    def _check_table(self, description: replica_pb2.EngineDescription, run: Sequence[TensorSpec]) -> None:
        mine = tuple(TensorSpec.from_proto(spec) for spec in description.tensors)
        if not mine or not description.digest.ByteSize() and not len(mine):
            return  # an engine that holds nothing yet takes any table
        lines = table_difference(mine, run)
        if lines:
            raise EngineError(
                "the engine holds another model than the run", field="tensors",
                found="; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else ""),
                do="start the engine from the run's base checkpoint",
            )  # fmt: skip

    def _recognise(self, digest: Digest) -> int | None:
        """The newest version with this digest."""
        wanted = digest.to_proto()
        found = None
        for entry in self._end.entries():
            if rules.is_version(entry.kind):
                for view in entry.views:
                    if view.name == self.config.view and view.digest == wanted:
                        found = entry.number
        return found

    # --- one move ---

    def _move(self, target: int, started: float) -> tuple[dict[str, float], str]:
        """Prepares while the engine serves, then fences."""
        clock = time.perf_counter()
        seconds: dict[str, float] = {}
        self._renew(target)
        if self.version is not None:
            self.state = State.REPLICA_STATE_STAGING
        try:
            update = self._history.update(self.version, target)
            seconds["prepare"] = time.perf_counter() - clock
            clock = time.perf_counter()
            self.engine.stage(update)
            seconds["stage"] = time.perf_counter() - clock
        except BaseException:
            self.state = State.REPLICA_STATE_ATTACHING if self.version is None else State.REPLICA_STATE_SERVING
            raise
        crash_point("replica:staged")
        clock = time.perf_counter()
        self._fence(update, seconds)
        seconds["pause"] = time.perf_counter() - clock
        self._commits += 1
        if self.config.audit_every and self._commits % self.config.audit_every == 0:
            self._audit(update)
        return seconds, update.extra["path"].reason

    def _fence(self, update: Update, seconds: dict[str, float]) -> None:
        """Pause, commit, compare, announce, resume; or back to where it was."""
        self.engine.pause(PauseMode(self.config.pause), self.config.fence_s)
        self.state = State.REPLICA_STATE_FENCED
        crash_point("replica:paused")
        clock = time.perf_counter()
        try:
            digest = self.engine.commit()
        except EngineInDoubtError:
            self._doubt()
            raise
        except EngineError:
            self._resume()
            raise
        seconds["apply"] = time.perf_counter() - clock
        crash_point("replica:committed")
        if digest != update.digest:
            self._undo(update, digest)
        self.version, self._digest = update.target.number, digest
        self.engine.clear_caches()
        self._announce(update.target.number)
        crash_point("replica:verified")
        self._resume()
        self._last_error = ""

    def _undo(self, update: Update, digest: Digest) -> None:
        """The bits are not the version's: restores the version before and raises."""
        number = update.target.number
        error = DigestMismatchError(
            f"version {number} came out with other bits", field="digest", found=digest.hex(), expected=update.digest.hex(),
            do="the version before is served again; audit the engine, or rebuild it from an anchor",
        )  # fmt: skip
        try:
            self.engine.rollback()
            held = self.engine.audit()
        except EngineError as doubt:
            self._doubt()
            raise EngineInDoubtError(
                f"version {number} could not be undone", found=str(doubt), do="sync again: it rebuilds"
            ) from error
        if self.version is None or held != self._digest:
            self._doubt()  # the state before was not what we thought, or there was none
            raise EngineInDoubtError(
                f"the engine holds the bits of no version after version {number} failed", field="digest", found=held.hex(),
                expected="none" if self._digest is None else self._digest.hex(), do="sync again: it rebuilds from an anchor",
            ) from error  # fmt: skip
        self._resume()
        raise error

    def _resume(self) -> None:
        self.engine.resume()
        self.state = State.REPLICA_STATE_ATTACHING if self.version is None else State.REPLICA_STATE_SERVING

    def _doubt(self) -> None:
        """Admission stays closed; the next sync starts from a full state."""
        self.state = State.REPLICA_STATE_IN_DOUBT
        self.version, self._digest = None, None

    def _audit(self, update: Update) -> None:
        held = self.engine.audit()
        if held != update.digest:
            self.engine.pause(PauseMode(self.config.pause), self.config.fence_s)
            self._doubt()
            raise EngineInDoubtError("the audit found other bits than were committed", field="digest", found=held.hex(),
                                     expected=update.digest.hex(), do="sync again: it rebuilds from an anchor")  # fmt: skip

    def _announce(self, number: int) -> None:
        assert self._run is not None
        self.engine.announce(common_pb2.VersionId(run_id=self._run, number=number))

    # --- the trainer ---

    def _renew(self, number: int | None = None) -> None:
        """Keeps the version held and what is on its way from being collected; at most every third of the lease."""
        held = self.version if self.version is not None else number
        if held is None:
            return
        now = time.monotonic()
        if self._leased[0] == held and now - self._leased[1] < self.config.lease_ttl_s / 3:
            return
        with suppress(StoreError):  # reading may still work, and a lease is only a courtesy to the collector
            self._end.lease(self.replica_id, held, self.config.lease_ttl_s)
            self._leased = (held, now)

    def _acknowledge(self, seconds: Mapping[str, float] | None = None) -> str:
        """Tells the trainer; returns why it could not be told."""
        message = replica_pb2.Acknowledgement(
            replica_id=self.replica_id, view=self.config.view, state=self.state, error=self._last_error,  # type: ignore[arg-type]
            sent_unix_ms=time.time_ns() // 1_000_000,
        )  # fmt: skip
        if self._run is not None and self.version is not None and self._digest is not None:
            message.version.run_id, message.version.number = self._run, self.version
            message.digest.CopyFrom(self._digest.to_proto())
        for name, key in (("fetch", "prepare"), ("decode", "stage"), ("pause", "pause"), ("apply", "apply")):
            setattr(message.timings, name, (seconds or {}).get(key, 0.0))
        try:
            if self._run is not None:
                self._end.acknowledge(message)
                self._renew()
        except WeightSyncError as error:
            return str(error)
        return ""

    def send_trajectories(self, batch: Sequence[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.TrajectoryReceipt]:
        """Hands trajectories to the trainer; a receipt means that they survive a crash of this process."""
        return self._end.send_trajectories(batch)

    def manifest(self) -> manifest_pb2.VersionManifest:
        """Of the version that is served. Raises VersionMissingError when it is none."""
        if self.version is None:
            raise VersionMissingError("no version is served", field="version", found=None, do="call sync")
        return self._end.manifest(self.version)

    def close(self) -> None:
        """Drops the lease and releases the store; the engine keeps serving and stays the caller's."""
        self.state = State.REPLICA_STATE_CLOSED
        with suppress(WeightSyncError):  # nothing is lost: the lease runs out by itself
            self._acknowledge()
            self._end.release(self.replica_id)
        self._end.close()

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
