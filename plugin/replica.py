"""Replica: the engine's side. Follow -> fetch -> stage -> fence -> apply -> verify -> acknowledge.

Owns the way of one engine through the versions of a run, and its promises: everything is prepared while the engine
serves; a version is announced only after its digest matched; any failure before that restores the version before; an
engine whose bits match no version serves nothing until it has been rebuilt. Owns no bits (the engine does), no
admission (fence.py), no reading (history.py) and no wire.

States: ATTACHING -> SERVING -> STAGING -> FENCED -> SERVING; from FENCED also IN_DOUBT, which only a rebuild leaves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from weight_sync import config as configuration
from weight_sync.canonical import held_bits
from weight_sync.codec.digest import Digest
from weight_sync.config import Config, crash_point
from weight_sync.contract import ContractCheck
from weight_sync.errors import (
    CorruptionError,
    InputError,
    StoreError,
    VersionExpiredError,
    VersionMissingError,
    VersionNotReadyError,
    WeightSyncError,
)
from weight_sync.fence import Fence
from weight_sync.following import check_fits, choose_target, history_of, may_pass, prepare, recognise
from weight_sync.history import table_of, view_of
from weight_sync.naming import give_back, take_name
from weight_sync.ports import Engine, PauseMode, ReplicaEnd, Transport
from weight_sync.proto.v1 import manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.registry import open_transport
from weight_sync.reports import SyncReport

__all__ = ["Replica", "SyncReport"]

State = replica_pb2.ReplicaState
_LOOK_S = 1.0  # longest wait before the newest run is looked for again
_REPLANS = 3  # when a version is collected while it is read
_LONGEST_PAUSE_S = 30.0  # between two tries of `follow`


class Replica:
    """Keeps one engine at versions of one view. Made by `Replica.open`; a context manager.

    Not thread-safe, except ``version``, ``state`` and ``send_trajectories``.

    Attributes:
        config: the keys in force.
        engine: as given.
        replica_id: of this replica.
    """

    def __init__(self, config: Config, transport: Transport, engine: Engine) -> None:
        self.config, self.engine = config, engine
        self.replica_id = config.replica_id or take_name()
        self._transport = transport
        self._end: ReplicaEnd = transport.replica_end(config.run_id)
        self._history = history_of(self._end, config, self.replica_id, engine)
        self._fence = Fence(engine, config.view, PauseMode(config.pause), config.fence_s)
        self._contract = ContractCheck(config.contract.enforce, f"replica {self.replica_id}")
        self._run: str | None = None
        self._looked: tuple[str, int] | None = None  # run, and doubts by then, when the engine was last identified
        self._leased: tuple[str | None, int, float] = (None, -1, 0.0)
        self._commits = 0
        self._last_error = ""
        self._is_closed = False

    @classmethod
    def open(cls, uri: str | Config, engine: Engine, **keys: Any) -> Replica:
        """Attaches to an engine; the store may still be empty.

        Args:
            uri: where versions come from; or a whole `Config`.
            engine: an implementation of ``weight_sync.ports.Engine``.
            keys: any key of `Config`.

        Raises ConfigError and StoreError. Nothing is fetched before `sync`.
        """
        if not all(callable(getattr(engine, verb, None)) for verb in ("describe", "stage", "commit", "rollback")):
            raise InputError("not an engine", field="engine", found=type(engine).__name__,
                             expected="an implementation of weight_sync.ports.Engine")  # fmt: skip
        config = uri.replace(**keys) if isinstance(uri, Config) else configuration.load({"uri": uri, **keys})
        return cls(config, open_transport(config), engine)

    @property
    def run_id(self) -> str | None:
        """The run that is followed; None before the store holds one."""
        return self._run

    @property
    def version(self) -> int | None:
        """Number of the version that is served; None before the first one and in doubt."""
        served = self._fence.served
        return None if served is None else served.manifest.number

    @property
    def state(self) -> int:
        """One of the proto's ReplicaState."""
        return State.REPLICA_STATE_CLOSED if self._is_closed else self._fence.state

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
        DigestMismatchError, EngineError, DeadlineError when a fence could not be closed; the engine then serves what it
        served before. EngineInDoubtError when it does not serve any more: the next call rebuilds it.
        """
        if self._is_closed:
            raise InputError("this replica is closed", field="replica_id", found=self.replica_id, do="open another one")
        started = time.monotonic()
        deadline = started + (self.config.timeout_s if timeout is None else timeout)
        try:
            return self._sync(min_version, exact, started, deadline)
        except VersionNotReadyError:
            raise  # waiting is no fault that the trainer would have to be told
        except WeightSyncError as error:
            self._last_error = str(error)
            self._acknowledge()
            raise

    def _sync(self, min_version: int | None, exact: int | None, started: float, deadline: float) -> SyncReport:
        before = self._fence.served
        replans = 0
        while True:
            self.identify()
            head = None if self._run is None else self._end.head()
            target, reason = choose_target(self._have(), head, min_version, exact)
            if self._run is None:
                reason = f"{self.config.uri} holds no run yet"
            if target is not None and target == self._have():
                self._renew()
                return self._told(before is not self._fence.served, before, reason, {}, started)
            if target is not None:
                try:
                    seconds, path = self._move(target)
                    return self._told(True, before, path, seconds, started)
                except VersionExpiredError:
                    replans += 1
                    if exact is not None or replans > _REPLANS:
                        self._ask(target)
                        raise
                    continue  # collected on the way: the head is newer by now
                except CorruptionError:
                    self._ask(target)
                    raise
                except VersionMissingError as error:
                    if error.field != "base":
                        raise
                    reason = str(error)
                    self._end.want(self.replica_id, target)
            self._renew()
            left = deadline - time.monotonic()
            if left <= 0:
                raise VersionNotReadyError(
                    reason, field="version", found=self.version, expected=exact if exact is not None else min_version,
                    do="wait longer, or look whether the trainer still publishes",
                )  # fmt: skip
            self._end.wait(head, min(left, _LOOK_S, self.config.lease_ttl_s / 3))

    def _ask(self, target: int) -> None:
        """Asks for a full state, since what leads to the target is damaged or gone."""
        with suppress(WeightSyncError):  # the damage is the news, and the next try asks again
            self._end.want(self.replica_id, target)

    def _have(self) -> int | None:
        """The version served, as a number of the run that is followed."""
        served = self._fence.served
        return served.manifest.number if served is not None and served.manifest.run_id == self._run else None

    def _told(self, changed: bool, before: Any, path: str, seconds: dict[str, float], started: float) -> SyncReport:
        """The report of a sync that succeeded, after the trainer has been told."""
        served = self._fence.served
        assert served is not None
        seconds["total"] = time.monotonic() - started
        recovered, self._last_error = bool(self._last_error), ""
        ack_error = self._acknowledge(seconds) if changed or recovered else ""
        number = served.manifest.number
        try:
            stale = max(0, (self._end.head() or 0) - number)
        except WeightSyncError:
            stale = 0  # the version is in place; how far behind it is will be told next time
        return SyncReport(
            version=number, previous=None if before is None else before.manifest.number, changed=changed,
            staleness=stale, path=path, digest=served.digest.hex(), seconds=seconds, ack_error=ack_error,
            run_id=served.manifest.run_id,
        )  # fmt: skip

    def follow(
        self,
        on_commit: Callable[[SyncReport], None] | None = None,
        stop: threading.Event | None = None,
        on_error: Callable[[WeightSyncError], None] | None = None,
    ) -> None:
        """Syncs until ``stop`` is set. Errors that may pass go to ``on_error`` and the acknowledgement; it goes on.

        Pauses between tries grow from ``poll_s`` to half a minute. Raises what does not pass: InputError, LineageError,
        EngineError while nothing is served, and EngineInDoubtError when the rebuild that follows it fails, too.
        """
        stop = stop or threading.Event()
        failed: type[WeightSyncError] | None = None
        pause = self.config.poll_s
        while not stop.is_set():
            try:
                report = self.sync(timeout=_LOOK_S)
            except VersionNotReadyError:
                continue
            except WeightSyncError as error:
                if not may_pass(error, self.version is not None, failed is type(error)):
                    raise
                if on_error is not None:
                    on_error(error)
                failed = type(error)
                stop.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                continue
            failed, pause = None, self.config.poll_s
            if report.changed and on_commit is not None:
                on_commit(report)
            if not report.changed and not stop.is_set():
                with suppress(StoreError):  # the next sync meets it, too, and tells
                    self._end.wait(self._have(), _LOOK_S)

    # --- attaching ---

    def forget(self) -> None:
        """The engine was away and may hold other bits: nothing is served until `sync` has identified it again."""
        self._fence.forget()

    def identify(self) -> int | None:
        """Finds the run, checks that the engine can serve it, and recognises by digest which version of the run it holds;
        None: none of them. No bits are moved. Raises as `sync`.
        """
        newest = self._newest_run()
        if newest is not None and newest != self._run:
            self._switch(newest)
        elif self._run is not None and self._fence.served is None:
            self._identify(self._end, self._run)
        self._fence.reopen()
        return self._have()

    def _newest_run(self) -> str | None:
        if self.config.run_id is None:
            return self._end.newest_run()
        with suppress(VersionMissingError):  # the store is empty
            return self._run or self._end.run_id()
        return None

    def _switch(self, newest: str) -> None:
        """Follows another run from its first version on; until then the run before is followed."""
        if self._run is None:
            self._run = self._end.run_id()
            self._identify(self._end, self._run)
            return
        end = self._transport.replica_end(newest)
        try:
            if end.head() is None:
                end.close()
                return
            self._identify(end, newest)
        except BaseException:
            end.close()
            raise
        with suppress(StoreError):  # the lease on the old run ends by itself
            self._end.release(self.replica_id)
        self._end.close()
        self._end, self._run, self._history = end, newest, history_of(end, self.config, self.replica_id, self.engine)

    def _identify(self, end: ReplicaEnd, run: str) -> None:
        """Finds out by digest which version the engine holds; once per run and doubt, since it reads all of its bits.

        Raises EngineError when it holds another model than the run, ContractError when the trainer refuses how it computes.
        """
        head = end.head()
        if head is None or self._looked == (run, self._fence.doubts):
            return
        doubts = self._fence.doubts
        newest = end.manifest(head)
        table = table_of(view_of(newest, self.config.view))
        description = self.engine.describe()
        description.contract.CopyFrom(self._contract.present(description.contract))
        with suppress(StoreError):  # for people who look at the fleet
            end.register(self.replica_id, description, self.config.lease_ttl_s)
        self._contract.check(newest)
        digest = Digest.from_proto(description.digest) if description.HasField("digest") else None
        found = None if digest is None else recognise(end, {self.config.view: digest}, head, description)
        if found is None and self._fence.state != State.REPLICA_STATE_IN_DOUBT:  # then it did fit, maybe half-way
            check_fits(description, table)
        if found is not None:
            self._fence.take(found)
        elif digest is not None and self._fence.served is None:
            self._fence.shut()
        self._looked = (run, doubts)

    # --- one move ---

    def _move(self, target: int) -> tuple[dict[str, float], str]:
        """Prepares while the engine serves, then fences."""
        clock = time.perf_counter()
        self._renew(target)
        served, have = self._fence.served, self._have()
        with self._fence.staging():
            held = None if have is None or served is None else served.table
            update = prepare(self._history, have, target, held, held_bits(self.engine, self.config))
            self._contract.check(update.manifest)
            seconds = {"prepare": time.perf_counter() - clock}
            clock = time.perf_counter()
            self.engine.stage(update)
            seconds["stage"] = time.perf_counter() - clock
        crash_point("replica:staged")
        seconds |= self._fence.move(update)
        self._commits += 1
        if self.config.audit_every and self._commits % self.config.audit_every == 0:
            self._fence.audit()
        return seconds, update.extra["path"].reason

    # --- the trainer ---

    def _renew(self, number: int | None = None) -> None:
        """Keeps the version held, or what is on its way, from being collected; at most every third of the lease."""
        have = self._have()
        held = have if have is not None else number
        if held is None or self._run is None:
            return
        now = time.monotonic()
        if self._leased[:2] == (self._run, held) and now - self._leased[2] < self.config.lease_ttl_s / 3:
            return
        with suppress(StoreError):  # reading may still work, and a lease is only a courtesy to the collector
            self._end.lease(self.replica_id, held, self.config.lease_ttl_s)
            self._leased = (self._run, held, now)

    def _acknowledge(self, seconds: Mapping[str, float] | None = None) -> str:
        """Tells the trainer; returns why it could not be told."""
        message = replica_pb2.Acknowledgement(
            replica_id=self.replica_id, view=self._view_name(), state=self.state, error=self._last_error,  # type: ignore[arg-type]
            sent_unix_ms=time.time_ns() // 1_000_000, contract=self._contract.contract,
        )  # fmt: skip
        served = self._fence.served
        if served is not None:
            message.version.CopyFrom(served.id)
            message.digest.CopyFrom(served.digest.to_proto())
        for name, key in (("fetch", "prepare"), ("decode", "stage"), ("pause", "pause"), ("apply", "apply")):
            setattr(message.timings, name, (seconds or {}).get(key, 0.0))
        try:
            if self._run is not None:
                self._end.acknowledge(message)
                self._renew()
        except WeightSyncError as error:
            return str(error)
        return ""

    def _view_name(self) -> str:
        """Of the view that is served, else of the one that was asked for; "" when neither is known."""
        served = self._fence.served
        return self.config.view or ("" if served is None else view_of(served.manifest, None).name)

    def send_trajectories(self, batch: Sequence[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.TrajectoryReceipt]:
        """Hands trajectories to the trainer; a receipt means that they survive a crash of this process."""
        return self._end.send_trajectories(batch)

    def manifest(self) -> manifest_pb2.VersionManifest:
        """Of the version that is served. Raises VersionMissingError when it is none."""
        served = self._fence.served
        if served is None:
            raise VersionMissingError("no version is served", field="version", found=None, do="call sync")
        return served.manifest

    def close(self) -> None:
        """Drops the lease and releases the store; the engine keeps serving and stays the caller's."""
        self._is_closed = True
        with suppress(WeightSyncError):  # nothing is lost: the lease runs out by itself
            self._acknowledge()
            self._end.release(self.replica_id)
        self._end.close()
        give_back(self.replica_id)

    def __enter__(self) -> Replica:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
