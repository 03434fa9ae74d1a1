"""What the tests of the sidecar share: a real engine process, a real sidecar process, and a plain HTTP client."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import sidecar_upstream
import waiting
from loop import Child, checkpoint, config, context, digest_of, model

from weight_sync import Publisher
from weight_sync.cli import main
from weight_sync.config import Config

context.set_forkserver_preload(["loop_warm", "sidecar_warm"])
LIMIT_S = 150.0
until = partial(waiting.until, limit=LIMIT_S)


@dataclass
class Answer:
    """One HTTP response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]

    def versions(self) -> tuple[int, int]:
        """Declared version at start and end."""
        return int(self.headers["x-weight-version-start"]), int(self.headers["x-weight-version-end"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """A child process that answers HTTP; what it prints goes to files."""

    def __init__(
        self, folder: Path, name: str, port: int, target: Callable[..., None], *args: Any, crash_at: str = ""
    ) -> None:
        self.port = port
        count = len(list(folder.glob(f"{name}-*.out")))
        self.out, self.log = folder / f"{name}-{count}.out", folder / f"{name}-{count}.log"
        self.process = Child(folder, _redirected, str(self.out), str(self.log), target, args, crash_at=crash_at)

    @property
    def pid(self) -> int:
        pid = self.process._process.pid
        assert pid is not None
        return pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self.process._process.exitcode

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, also for a stopped process."""
        self.process.kill()

    def started(self) -> None:
        """Returns once it answers."""

        def answers() -> bool:
            assert self.exit_code is None, self.log.read_text()
            with suppress(ConnectionError):
                return self.ask("GET", "/health").status > 0
            return False

        until(answers, "the first answer")

    def connect(self, timeout: float = LIMIT_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, raw: bool = False
    ) -> Answer:
        """One request; ``body`` is sent as JSON unless it is bytes."""
        sent = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body, sent = json.dumps(body).encode(), {"Content-Type": "application/json", **sent}
        connection = self.connect()
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def post(self, body: Any, **headers: str) -> Answer:
        """A completion."""
        return self.ask("POST", "/v1/completions", body, {k.replace("_", "-"): v for k, v in headers.items()})


class Upstream(Process):
    """The engine; its weights lie in ``folder/weights``."""

    def __init__(self, folder: Path, port: int, step: int = 0, weights: str = "weights") -> None:
        super().__init__(folder, "engine", port, _engine, folder / weights, step, port)

    def facts(self, verb: str = "facts") -> Any:
        return self.ask("POST", f"/test/{verb}").json


class Sidecar(Process):
    """``weight-sync sidecar`` in front of an engine."""

    def __init__(self, folder: Path, keys: Config, engine_port: int, *words: str, crash_at: str = "") -> None:
        site = folder / "site" / "door_engine-1.dist-info"
        site.mkdir(parents=True, exist_ok=True)
        (site / "METADATA").write_text("Metadata-Version: 2.1\nName: door-engine\nVersion: 1\n")
        (site / "entry_points.txt").write_text("[weight_sync.engines]\ndoor = sidecar_upstream:DoorEngine\n")
        port = free_port()
        command = [
            "weight-sync", "sidecar", "--engine", "door", "--engine-url", f"http://127.0.0.1:{engine_port}",
            "--from", keys.uri, "--listen", f"127.0.0.1:{port}", "--watch", "0.1", "--watch-timeout", "3", "--json",
            "--set=poll_s=0.02", "--set=threads=1", "--set=replica_id=sidecar", f"--base={keys.base}", *words,
        ]  # fmt: skip
        super().__init__(folder, "sidecar", port, _sidecar, str(site.parent), command, crash_at=crash_at)

    def lines(self) -> list[Any]:
        """The JSON that it printed."""
        return [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []

    @property
    def status(self) -> Any:
        return self.ask("GET", "/weight_sync/status").json

    def is_ready(self) -> bool:
        return self.ask("GET", "/readyz").status == 200

    def await_version(self, number: int) -> None:

        def is_there() -> bool:
            try:
                status = self.status
            except ConnectionError:
                assert self.exit_code is None, self.log.read_text()
                return False
            return status["ready"] and status["open"] and status["version"] == number

        until(is_there, f"version {number}")


def _redirected(
    say: Callable[[str], None], out: str, log: str, target: Callable[..., None], args: tuple[Any, ...]
) -> None:
    for path, number in ((out, 1), (log, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    target(*args)


def _engine(weights: Path, step: int, port: int) -> None:
    asyncio.run(sidecar_upstream.main(weights, step, port))


def _sidecar(site: str, command: list[str]) -> None:
    sys.path.insert(0, site)
    sys.argv = command
    main()


class Scene:
    """A store with a trainer, an engine and a sidecar. Version n is the state after step n."""

    def __init__(self, folder: Path, *words: str, crash_at: str = "") -> None:
        self.folder, self.words = folder, words
        self.keys = config(folder, base=str(checkpoint(folder / "base")))
        self.publisher = Publisher.open(self.keys)
        self.head = 0
        self.engine_port = free_port()
        self.engine = Upstream(folder, self.engine_port)
        self.sidecar = self.new_sidecar(crash_at=crash_at)

    def new_sidecar(self, *words: str, crash_at: str = "") -> Sidecar:
        return Sidecar(self.folder, self.keys, self.engine_port, *self.words, *words, crash_at=crash_at)

    def publish(self) -> int:
        """The next version."""
        self.head += 1
        report = self.publisher.publish(model(self.head), step=self.head)
        assert report is not None and report.version == self.head
        return self.head

    def advance(self) -> int:
        """The next version, served."""
        self.sidecar.await_version(self.publish())
        return self.head

    def check(self, answer: Answer) -> int:
        """An answer is made by exactly the version that it declares; returns that."""
        assert answer.status == 200, answer.body
        start, end = answer.versions()
        assert start == end, "nothing but a whole answer of one version in mode wait"
        made_by = {token["token"] for token in answer.json["choices"][0]["tokens"]}
        assert made_by == {digest_of(model(start))}
        return start

    def close(self) -> None:
        self.publisher.close()
        for process in (self.sidecar, self.engine):
            process.kill()


@contextmanager
def scene(folder: Path, *words: str, crash_at: str = "") -> Iterator[Scene]:
    """Everything runs and serves version 1."""
    made = Scene(folder, *words, crash_at=crash_at)
    try:
        made.advance()
        yield made
    finally:
        made.close()


def raw(port: int, data: bytes) -> bytes:
    """What comes back for these bytes until the other side closes, as ``Connection: close`` asks it to."""
    parts = []
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(data)
        with suppress(ConnectionResetError):  # closed before it had read everything
            while part := connection.recv(65536):
                parts.append(part)
    return b"".join(parts)


def read_event(stream: http.client.HTTPResponse) -> bytes:
    """The next server-sent event of a response, without the empty line; empty at the end."""
    lines = []
    while (line := stream.readline()) not in (b"\n", b"\r\n", b""):
        lines.append(line)
    return b"".join(lines)
