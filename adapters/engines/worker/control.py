"""The driver's end of the control socket: finds the server's socket, asks, and keeps to its limits. And without a socket,
for a driver that lives in the server's own process.

Owns the discovery and the request. Owns no meaning of a call (the engine's door answers, core.py acts). Each call opens
a connection of its own, so threads do not meet and a server that was started anew is found again.
"""

from __future__ import annotations

import json
import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weight_sync.adapters.engines.worker.wire import Reply, decode_error
from weight_sync.config import runtime_dir
from weight_sync.errors import ConfigError, DeadlineError, EngineError
from weight_sync.ports import PauseMode

__all__ = ["DoorControl", "SocketControl"]

_HELLO_S = 5.0  # longest wait for a server that says who it is
_DEFAULT_PORTS = {"http": 80, "https": 443}


class DoorControl(ABC):
    """The calls of ``weight_sync.adapters.engines.worker.remote.Control`` in the words of a door."""

    @abstractmethod
    def _ask(self, call: str, limit: float, **arguments: Any) -> Reply:
        """The door's answer. Raises EngineError when it refused or cannot be reached, DeadlineError at the limit."""

    def ranks(self, verb: str, arguments: Mapping[str, Any], limit: float) -> list[Reply]:
        """Calls every rank's core."""
        replies = self._ask("ranks", limit, verb=verb, arguments=dict(arguments), within=limit)["ranks"]
        return list(replies)

    def pause(self, mode: PauseMode, limit: float) -> None:
        """Closes admission and settles requests in flight. Raises DeadlineError; admission is as before then."""
        # the server keeps the limit, for it must open admission again; ours is longer, so that it can tell
        self._ask("pause", limit + _HELLO_S, mode=mode.value, within=limit)

    def resume(self, limit: float) -> None:
        """Opens admission."""
        self._ask("resume", limit)

    def clear(self, limit: float) -> None:
        """Drops KV and prefix caches, of requests in flight, too."""
        self._ask("clear", limit)

    def announce(self, text: str, limit: float) -> None:
        """Sets the engine's own weight version."""
        self._ask("announce", limit, text=text)

    def lora(self, limit: float) -> Reply:
        """``enabled``, and ``max_rank`` (None: not said), of the engine's own adapters."""
        return self._ask("lora", limit)

    def alive(self, limit: float) -> bool:
        """Whether API process and scheduler answer in time."""
        try:
            self._ask("alive", limit)
        except (EngineError, DeadlineError):
            return False
        return True

    def close(self) -> None:  # noqa: B027  (not abstract: few have anything to do)
        """Nothing is kept open."""


class SocketControl(DoorControl):
    """Of the server at ``url``, on this host.

    Args:
        engine: as users call it.
        suffix: of the names of its sockets.
        hint: what to do when there is none.
    """

    def __init__(self, url: str, engine: str, suffix: str, hint: str) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
        except ValueError as error:
            raise ConfigError("not a URL", field="engine_url", found=url, expected="http://host:port") from error
        if port is None or not parts.hostname:
            raise ConfigError("not a URL", field="engine_url", found=url, expected="http://host:port")
        self._url, self._port = url, port
        self._engine, self._suffix, self._hint = engine, suffix, hint
        self._path: Path | None = None

    def _ask(self, call: str, limit: float, **arguments: Any) -> Reply:
        end = time.monotonic() + limit
        path = self._path
        if path is None or not path.exists():
            path = self._path = self._find(limit)
        reply = _request(path, {"call": call, **arguments}, max(0.001, end - time.monotonic()))
        if "error" in reply:
            raise decode_error(reply, self._engine)
        return reply

    def _find(self, limit: float) -> Path:
        """The socket of the server that listens on our port; sockets that dead servers left are removed."""
        folder = runtime_dir()
        seen = []
        for path in sorted(folder.glob(f"*{self._suffix}")):
            try:
                hello = _request(path, {"call": "hello"}, min(limit, _HELLO_S))
            except DeadlineError:
                seen.append("one that does not answer")  # it may be ours, but nobody can tell
                continue
            except EngineError:
                continue
            if self._port in hello.get("ports", ()):
                return path
            seen.append(f"ports {hello.get('ports')}")
        raise EngineError(f"no {self._engine} server with weight_sync listens there", field=self._url,
                          found=", ".join(seen) or f"no socket in {folder}", do=self._hint)  # fmt: skip


def _request(path: Path, message: Mapping[str, Any], limit: float) -> Reply:
    end = time.monotonic() + limit
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit)
        try:
            connection.connect(os.fspath(path))
            connection.sendall(json.dumps(message).encode() + b"\n")
            data = bytearray()
            while not data.endswith(b"\n"):
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError
                connection.settimeout(left)
                part = connection.recv(1 << 20)
                if not part:
                    raise ConnectionResetError("the server closed the connection")
                data += part
            reply = json.loads(data)
        except TimeoutError as error:
            raise DeadlineError("the engine did not answer in time", field=str(message["call"]),
                                expected=f"within {limit:g} s",
                                do="look at the engine, or allow more time") from error  # fmt: skip
        except ConnectionRefusedError as error:
            with suppress(OSError):  # another driver may have removed it
                path.unlink()
            raise EngineError("the engine is gone", field=str(path), do="start it again") from error
        except (OSError, ValueError) as error:
            raise EngineError("the engine cannot be asked", field=str(path), found=repr(error),
                              do="look whether it runs") from error  # fmt: skip
    if not isinstance(reply, dict):
        raise EngineError("the engine's answer is no object", field=str(path), found=type(reply).__name__)
    return reply
