"""The replica's thread: takes the engine from version to version while the proxy serves.

Owns when to sync, what follows an error, and what the status tells about it. Owns no move (the core's replica does),
no admission (gate.py) and no look at the engine (watch.py).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weight_sync.adapters.sidecar.gate import Gate
from weight_sync.errors import ContractError, VersionError, VersionNotReadyError
from weight_sync.proto.v1 import replica_pb2
from weight_sync.replica import Replica
from weight_sync.reports import SyncReport

__all__ = ["Driver", "Progress"]

_LOG = logging.getLogger("weight_sync.sidecar")
_LOOK_S = 1.0  # longest pause between two syncs that nobody asked for
_LONGEST_PAUSE_S = 30.0  # between two tries after errors


@dataclass
class Progress:
    """What came of the syncs so far.

    Attributes:
        report: of the last one that changed something, None before.
        error: of the last try, "" when it succeeded.
        last_error, error_unix_ms: the last one ever, and when that was; "" and 0 without one.
        commits, errors: how many versions were put in place, and how many tries failed.
        refused: why the engine may not serve, since it does not compute as the trainer demands; "" when it may.
    """

    report: SyncReport | None = None
    error: str = ""
    last_error: str = ""
    error_unix_ms: int = 0
    commits: int = 0
    errors: int = 0
    refused: str = ""


@dataclass
class Listeners:
    """Told, in the driver's thread, about versions and about errors (each told once in a row)."""

    commit: list[Callable[[SyncReport], None]] = field(default_factory=list)
    error: list[Callable[[Exception], None]] = field(default_factory=list)


class Driver(threading.Thread):
    """Syncs until `stop`; whatever the replica raises is told and tried again.

    An engine is identified by digest when it is first seen, and again each time that it was away. Nothing is done while
    ``may_begin`` says no.
    """

    def __init__(self, replica: Replica, gate: Gate, may_begin: Callable[[], bool] = lambda: True) -> None:
        super().__init__(name="weight-sync-replica", daemon=True)
        self.progress, self.listeners = Progress(), Listeners()
        self._replica, self._gate, self._may_begin = replica, gate, may_begin
        self._lock = threading.Lock()
        self._up = False  # the engine answers
        self._losses = self._known_losses = 0
        self._wake = threading.Event()
        self._ended = threading.Event()

    # --- from other threads ---

    @property
    def replica(self) -> Replica:
        """Only its ``version``, ``state`` and ``run_id`` may be read from other threads."""
        return self._replica

    def wake(self) -> None:
        """Looks for a new version now."""
        self._wake.set()

    def engine_lost(self, reason: str) -> None:
        """Nothing is served until the engine is back and has been identified."""
        with self._lock:
            self._losses += 1
            self._up = False
            self._gate.down(reason)

    def engine_back(self) -> None:
        """The engine answers; it may be another process."""
        with self._lock:
            self._up = True
        self.wake()

    def stop(self, timeout: float) -> bool:
        """Ends after the move that is under way. Returns whether it ended in time."""
        self._ended.set()
        self.wake()
        if self.is_alive():
            self.join(timeout)
        return not self.is_alive()

    # --- the thread ---

    def run(self) -> None:
        """Until `stop`."""
        pause = 0.0
        while not self._ended.is_set():
            self._wake.clear()
            if not self._ready():
                self._wake.wait(_LOOK_S)
                continue
            failed, changed = self._sync()
            if failed:
                least = self._replica.config.poll_s  # whoever wakes us does not know that it failed
                pause = min(max(2 * pause, least), _LONGEST_PAUSE_S)
                self._ended.wait(least)
                self._wake.wait(pause - least)
                continue
            pause = 0.0
            if not changed:
                self._wake.wait(_LOOK_S)
        self._replica.close()

    def _ready(self) -> bool:
        """Whether the engine is there; one that was away is not taken for what it was."""
        with self._lock:
            if not (self._up and self._may_begin()):
                return False
            if self._losses != self._known_losses:
                self._known_losses = self._losses
                self._gate.returned()
                self._replica.forget()
            return True

    def _sync(self) -> tuple[bool, bool]:
        """One try: whether it failed, and whether something changed."""
        try:
            report = self._step()
        except VersionNotReadyError:
            self.progress.error = ""
            return False, False
        except Exception as error:
            self._failed(error)
            return True, False
        self.progress.error = self.progress.refused = ""
        if report.changed:
            self.progress.report = report
            self.progress.commits += "apply" in report.seconds
            _tell(self.listeners.commit, report)
        return False, report.changed

    def _step(self) -> SyncReport:
        """To the version that somebody waits for exactly, if there is one on the way, else to the newest."""
        exact = self._gate.wanted()
        try:
            if exact is not None:
                with suppress(VersionError):  # it cannot be had: collected, or no version
                    return self._replica.sync(exact=exact, timeout=0)
            return self._replica.sync(timeout=0)
        finally:
            if self._replica.version is None:
                self._gate.doubt()

    def _failed(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        again = text == self.progress.error
        self.progress.error = self.progress.last_error = text
        if isinstance(error, ContractError):
            self.progress.refused = str(error)
        self.progress.error_unix_ms = time.time_ns() // 1_000_000
        self.progress.errors += 1
        if not again:
            _LOG.warning("trying again: %s", text, exc_info=not hasattr(error, "what"))
            _tell(self.listeners.error, error)

    @property
    def state(self) -> str:
        """Of the replica, in lower case: "serving", "fenced", ..."""
        name = replica_pb2.ReplicaState.Name(self._replica.state)
        return name.removeprefix("REPLICA_STATE_").lower()


def _tell(listeners: Iterable[Callable[[Any], None]], news: object) -> None:
    """What a listener raises is its own affair: the thread goes on."""
    for listener in listeners:
        try:
            listener(news)
        except Exception:
            _LOG.exception("a listener failed")
