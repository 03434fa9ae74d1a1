"""The real sidecar before a real server, and clients that never stop asking it.

Owns the processes and what clients saw. Owns no claim.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import waiting
from servers import Server, free_port

LIMIT_S = 300.0
BIN = Path(sys.executable).parent


until = partial(waiting.until, limit=LIMIT_S)


@dataclass
class Answer:
    """One response; header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def start(self) -> int:
        return int(self.headers["x-weight-version-start"])

    @property
    def end(self) -> int:
        return int(self.headers["x-weight-version-end"])


class Sidecar:
    """``weight-sync sidecar`` as a user starts it. A context manager that leaves no process behind."""

    def __init__(self, store: Path, server: Server, *words: str, engine: str = "vllm", **variables: str) -> None:
        self.port = free_port()
        self.log = server.folder / f"sidecar-{self.port}.log"
        command = [
            str(BIN / "weight-sync"), "sidecar", "--engine", engine, "--engine-url", server.url, "--from", str(store),
            "--listen", f"127.0.0.1:{self.port}", "--watch", "0.2", "--watch-timeout", "60", "--wait", "120",
            "--set=threads=2", "--json", *words,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                            env={**os.environ, **variables})  # fmt: skip

    def ready(self, version: int | None = None) -> Sidecar:
        """Waits until it serves, that version if one is named."""
        until(lambda: self._serves(version), f"version {version}")
        return self

    def _serves(self, version: int | None) -> bool:
        assert self.process.poll() is None, self.log.read_text(errors="replace")[-4000:]
        try:
            status = self.status
        except OSError:
            return False
        return bool(status["ready"] and status["open"]) and version in (None, status["version"])

    @property
    def status(self) -> dict[str, Any]:
        return dict(self.ask("GET", "/weight_sync/status", timeout=30).json)

    def ask(self, method: str, path: str, body: Any = None, timeout: float = LIMIT_S, **headers: str) -> Answer:
        """One request; underscores in names of headers are dashes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            data = None if body is None else json.dumps(body).encode()
            connection.request(
                method, path, data, sent if body is None else {"content-type": "application/json", **sent}
            )
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def complete(self, prompt: str, tokens: int = 12, stream: bool = False, **headers: str) -> Answer:
        return self.ask("POST", "/v1/completions", completion(prompt, tokens, stream), **headers)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.kill()


def completion(prompt: str, tokens: int, stream: bool = False) -> dict[str, Any]:
    """Greedy; without logprobs of the prompt, for which vLLM would not look into its prefix cache."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": 1,
            "return_token_ids": True, "ignore_eos": True, "stream": stream}  # fmt: skip


def generation(tokens: Sequence[int], count: int) -> dict[str, Any]:
    """For the route that tells versions by token."""
    return {"model": "tiny", "token_ids": list(tokens),
            "sampling_params": {"max_tokens": count, "temperature": 0, "ignore_eos": True, "logprobs": 0}}  # fmt: skip


@dataclass
class Made:
    """What a response holds: token ids with their logprobs."""

    tokens: list[int]
    logprobs: list[float]

    @staticmethod
    def of(choice: Mapping[str, Any]) -> Made:
        """From a choice of either route."""
        words = choice["logprobs"]
        likely = words["token_logprobs"] if "token_logprobs" in words else [w["logprob"] for w in words["content"]]
        return Made(list(choice["token_ids"]), list(likely))


@dataclass
class Reply:
    """What one client saw.

    Attributes:
        prompt: which one.
        made: None for what was refused.
        spans: (version, begin, end) as the engine told them.
        least: the version that was demanded, None without a demand.
    """

    prompt: int
    answer: Answer
    least: int | None
    made: Made | None = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)


class Load:
    """Clients that ask one after the other, until the block ends. What any of them raised is raised there."""

    def __init__(self, ask: Callable[[int], Reply], clients: int) -> None:
        self.replies: list[Reply] = []
        self._ask, self._ended = ask, threading.Event()
        self._failed: list[BaseException] = []
        self._numbers = itertools.count()
        self._threads = [threading.Thread(target=self._client) for _ in range(clients)]

    def _client(self) -> None:
        try:
            while not self._ended.is_set():
                self.replies.append(self._ask(next(self._numbers)))
        except BaseException as error:
            self._failed.append(error)

    def made_at(self, version: int) -> int:
        """How many answers began at a version."""
        assert not self._failed, self._failed
        return sum(reply.made is not None and reply.answer.start == version for reply in list(self.replies))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(LIMIT_S)
        assert not self._failed, self._failed
