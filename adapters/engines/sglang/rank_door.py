"""The socket of one rank, in its scheduler's process: calls of the server's door into the rank's core.

Owns the socket and in which thread a call runs. Owns no call (worker/core.py). What writes weights runs in the
scheduler's own thread, between two turns of its loop, and only while the scheduler is paused; everything else runs beside
it. A call that waits for the pause is dropped when its caller has given up, or when another attempt begins: none may run
inside a fence that is not its own.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weight_sync.adapters.engines.sglang.host import SglangHost
from weight_sync.adapters.engines.worker.core import WorkerCore
from weight_sync.adapters.engines.worker.door import private_folder
from weight_sync.adapters.engines.worker.wire import Reply, encode_error
from weight_sync.config import default_threads, runtime_dir
from weight_sync.errors import DeadlineError

__all__ = ["RankDoor", "socket_of"]

_SUFFIX = ".sglang-rank.sock"
_WRITING = ("commit", "rollback")
_BEGINNING = ("attach", "stage", "stage_landed")  # of another attempt, or of another driver


def socket_of(group: str, rank: int) -> Path:
    """Where the rank of a server listens."""
    return runtime_dir() / f"{group}-{rank}{_SUFFIX}"


class _Job:
    """One call for the scheduler's thread; dropped when it has not started at ``end`` (of the monotonic clock)."""

    def __init__(self, run: Callable[[], Reply], paused: bool, end: float) -> None:
        self.run, self.paused, self.end = run, paused, end
        self.reply: Reply | None = None
        self.started = self.dropped = False
        self.done = threading.Event()

    def drop(self) -> None:
        """It will not run."""
        self.dropped = True
        self.done.set()


class RankDoor:
    """One rank's core behind a socket."""

    def __init__(self, scheduler: Any, group: str) -> None:
        self._scheduler = scheduler
        self._host = SglangHost(scheduler)
        self._path = socket_of(group, self._host.rank)
        self._core = WorkerCore(self._host, default_threads())
        self._calling = threading.Lock()  # the core takes one call at a time
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._working = False

    def open(self) -> None:
        """Listens, until the process ends. Raises ConfigError, OSError."""
        _sweep(private_folder())
        server = _Server(os.fspath(self._path), self.answer)
        os.chmod(self._path, 0o600)
        threading.Thread(target=server.serve_forever, name="weight_sync-rank-door", daemon=True).start()

    # --- in the socket's threads ---

    def answer(self, verb: str, arguments: Mapping[str, Any], within: float) -> Reply:
        """A call of `WorkerCore.call`, or ``alive`` and ``paused``, which say that the scheduler's loop turns."""
        if verb == "alive" and self._working:
            return {}  # it is at a call of ours
        if verb in ("alive", "paused"):
            return self._in_loop(dict, verb == "paused", within)
        if verb not in _WRITING:
            if verb in _BEGINNING:
                self._drop_waiting()
            return self._call(verb, arguments)
        try:
            return self._in_loop(lambda: self._call(verb, arguments), True, within)
        except DeadlineError as error:  # as the core's own answer: nothing was written
            return self._core.signed(encode_error(error))

    def _drop_waiting(self) -> None:
        with self._lock:
            for job in self._jobs:
                if job.paused:
                    job.drop()

    def _call(self, verb: str, arguments: Mapping[str, Any]) -> Reply:
        with self._calling:
            return self._core.call(verb, arguments)

    def _in_loop(self, run: Callable[[], Reply], paused: bool, within: float) -> Reply:
        job = _Job(run, paused, time.monotonic() + within)
        with self._lock:
            self._jobs.append(job)
        if not job.done.wait(within):
            with self._lock:
                if not job.started:
                    job.drop()
        if job.dropped:
            raise DeadlineError("the scheduler did not get to it", field="paused" if paused else "alive",
                                expected=f"within {within:g} s",
                                do="look whether the server hangs, or was resumed")  # fmt: skip
        job.done.wait()
        assert job.reply is not None
        return job.reply

    # --- in the scheduler's thread ---

    def work(self) -> None:
        """Runs what waits and may run now; costs nothing otherwise."""
        while self._jobs and (job := self._next()) is not None:
            self._run(job)

    def _next(self) -> _Job | None:
        """One that may run now."""
        with self._lock:
            for job in list(self._jobs):
                if job.dropped or time.monotonic() > job.end:
                    job.drop()
                elif not job.paused or self._scheduler._engine_paused:
                    job.started = True
                else:
                    continue
                self._jobs.remove(job)
                if job.started:
                    return job
        return None

    def _run(self, job: _Job) -> None:
        self._working = True
        try:
            if job.paused:  # else nothing is written, and nobody need wait for the device
                self._host.settle()
            job.reply = job.run()
            if job.paused:
                self._host.settle()
        except Exception as error:  # nothing may be raised into SGLang's loop
            job.reply = encode_error(error)
        finally:
            self._working = False
            job.done.set()


def _sweep(folder: Path) -> None:
    """Removes the sockets that dead ranks left."""
    for path in folder.glob(f"*{_SUFFIX}"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # another one removed it, or it is busy


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: str, answer: Callable[..., Reply]) -> None:
        super().__init__(path, _Handler)
        self.answer = answer


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """One request."""
        try:
            reply = self.server.answer(**json.loads(self.rfile.readline()))
        except Exception as error:
            reply = encode_error(error)
        with suppress(OSError):  # the caller is gone; the next one reads off what was done
            self.wfile.write(json.dumps(reply).encode() + b"\n")
