"""Watching a run: one long call in a thread of its own, whose news the reader's thread waits for.

Owns the call, its renewal after a break, and the manifests that came along. Owns no meaning of the news.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from weight_sync.errors import StoreUnavailableError, WeightSyncError
from weight_sync.proto.v1 import manifest_pb2, service_pb2
from weight_sync.transport.grpc import wire
from weight_sync.transport.grpc.client import Client

__all__ = ["Look", "Watcher"]

_FRESH_S = 0.05  # a look that was pushed just now stands for one that would be asked for
_LONGEST_PAUSE_S = 2.0


@dataclass
class Look:
    """Where a run stands.

    Attributes:
        run_id: the run; None while there is none.
        newest_run: of the server.
        head: newest version of the run.
        at: monotonic time of the look in seconds.
    """

    run_id: str | None
    newest_run: str | None
    head: int | None
    at: float = field(default_factory=time.monotonic)
    _used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, info: service_pb2.RunInfo) -> Look:
        """Of a GetRun."""
        return cls(info.run_id or None, info.newest_run or None, info.head if info.HasField("head") else None)

    def fresh(self, what: str) -> bool:
        """True the first time it is asked for ``what``, while it is young."""
        if what in self._used or time.monotonic() - self.at > _FRESH_S:
            return False
        self._used.add(what)
        return True


class Watcher:
    """Follows one run (``run_id`` empty: the newest at the first connection) until closed."""

    def __init__(self, client: Client, run_id: str) -> None:
        self._client = client
        self._run = run_id  # empty while the server holds none
        self._newest: str | None = None
        self._head: int | None = None
        self._manifest: manifest_pb2.VersionManifest | None = None  # of the head
        self._live = False  # connected, and the state at the connection is known
        self._error: WeightSyncError | None = None
        self._closed = False
        self._call: Any = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._follow, name="weight_sync-watch", daemon=True)
        self._thread.start()

    def wait(self, after: int | None, timeout: float) -> Look | None:
        """The state once it has a version above ``after``, or at the limit; None when it cannot be told.

        Raises what the server refused with, and StoreUnavailableError when it could not be reached until the limit.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._closed:
                if self._head is not None and (after is None or self._head > after):
                    return self._look()
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            if self._closed:
                return None
            if self._live:
                return self._look()
            error = self._error
        if error is None:
            return None
        raise type(error)(error.what, field=error.field, found=error.found, do=error.do)

    def _look(self) -> Look:
        return Look(self._run if self._head is not None else None, self._newest, self._head)

    @property
    def run_id(self) -> str:
        """The run that is watched; empty while there is none."""
        return self._run

    def manifest(self, number: int) -> manifest_pb2.VersionManifest | None:
        """The head's manifest, when it was pushed; every other one may have been collected since."""
        with self._changed:
            found = self._manifest
            return found if self._live and found is not None and found.number == number == self._head else None

    # --- the thread ---

    def _follow(self) -> None:
        pause = 0.05
        while not self._closed:
            request = service_pb2.WatchRequest(run_id=self._run, after=self._head, manifests=True)
            try:
                self._call = self._client.start("Watch", request, None)
                for event in self._call:
                    pause = 0.05
                    self._take(event)
                self._broken(StoreUnavailableError("the server ended the watch", field=str(self._client.address)))
            except grpc.RpcError as error:
                self._broken(wire.error_of(error, str(self._client.address)))
            except (WeightSyncError, ValueError) as error:  # the channel was closed
                self._broken(StoreUnavailableError(str(error), field=str(self._client.address)))
            with self._changed:
                self._changed.wait_for(lambda: self._closed, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _take(self, event: Any) -> None:
        with self._changed:
            self._live, self._error = True, None
            kind = event.WhichOneof("event")
            if kind == "run_started":
                self._newest = event.run_started.run.run_id or None
                if not self._run and self._newest:
                    self._run = self._newest
            elif kind == "entry_committed":
                entry = event.entry_committed
                self._head = entry.version.number
                manifest = entry.manifest
                fits = (manifest.run_id, manifest.number) == (self._run, self._head)
                self._manifest = manifest if fits else None
            self._changed.notify_all()

    def _broken(self, error: WeightSyncError) -> None:
        with self._changed:
            self._live, self._error = False, error
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(5.0)
