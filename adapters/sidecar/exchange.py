"""One HTTP exchange as ASGI sees it: what was sent so far, how it may be ended, which headers pass.

Owns the messages to the client and the hop-by-hop rules. Owns no engine and no version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from typing import Any, TypeAlias

from weight_sync.adapters.sidecar.answers import Headers, Refusal, error_event, malformed
from weight_sync.errors import InputError

__all__ = ["Exchange", "Receive", "Scope", "Send", "request_headers", "response_headers"]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_HOP = frozenset({b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
                  b"te", b"trailer", b"transfer-encoding", b"upgrade"})  # fmt: skip
_OURS = b"x-weight-version-"
_OF_REQUEST = _HOP | {b"content-length", b"expect", b"accept-encoding"}
_TAIL = 64  # bytes in which the end mark of a stream lies


class Exchange:
    """The answer to one request; made in the task that serves it.

    Attributes:
        outcome: what became of it, for the metrics.
        ended_by: why it was ended from outside, "" when it was not.
        tail: the last bytes sent of a body.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._started = self._is_events = self._finished = False
        self.outcome, self.ended_by, self.tail = "error", "", b""

    # --- ending it from outside ---

    def end(self, why: str) -> None:
        """Cancels the task, unless the answer is complete. In the event loop."""
        if not self._finished and not self.ended_by:
            assert self._task is not None
            self.ended_by = why
            self._task.cancel()

    def canceller(self, why: str) -> Callable[[], object]:
        """`end` for any thread."""
        return partial(self._loop.call_soon_threadsafe, self.end, why)

    async def was_ended(self) -> None:
        """After the cancellation: tells the client, if it is still there."""
        assert self._task is not None
        self._task.uncancel()
        self.outcome = self.ended_by
        if self.ended_by == "fenced":
            await self.refuse(Refusal(503, "weight_version_fenced", "ended at a fence: the engine took another version "
                                                                    "before this request was done", 1))  # fmt: skip

    # --- messages ---

    async def start(self, status: int, headers: Headers, is_events: bool = False) -> None:
        """Status line and headers."""
        self.outcome = f"{status // 100}xx"
        self._started, self._is_events = True, is_events
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def send_part(self, chunk: bytes) -> None:
        """A part of the body, at once."""
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})
        self.tail = chunk[-_TAIL:] if len(chunk) >= _TAIL else (self.tail + chunk)[-_TAIL:]

    async def finish(self, rest: bytes) -> None:
        """The last part of the body."""
        self._finished = True
        await self._send({"type": "http.response.body", "body": rest})

    async def refuse(self, refusal: Refusal) -> None:
        """The refusal as the answer. After the start it is an event of a stream, and the connection breaks."""
        self.outcome = refusal.code
        if not self._started:
            await self.start(refusal.status, refusal.headers)
            self.outcome = refusal.code
            await self.finish(refusal.body)
        elif self._is_events:
            await self.send_part(error_event(refusal, self.tail))


def request_headers(headers: Headers) -> list[tuple[str, str]]:
    """Those that the engine gets. Raises Refusal for what cannot be forwarded."""
    dropped = _OF_REQUEST | _named(headers)
    passed = []
    try:
        for name, value in headers:
            if name not in dropped and not name.startswith(_OURS):
                passed.append((name.decode("ascii"), value.decode("utf-8")))
    except UnicodeDecodeError as error:
        raise malformed(InputError("not text", field=name.decode("latin-1"), expected="UTF-8")) from error
    passed.append(("Accept-Encoding", "identity"))  # bytes pass as they are, and events must be readable
    return passed


def response_headers(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Those that the client gets."""
    lower = [(name.lower(), value) for name, value in headers]
    dropped = _HOP | _named(lower)
    return [item for item in lower if item[0] not in dropped and not item[0].startswith(_OURS)]


def _named(headers: Headers) -> frozenset[bytes]:
    """Headers that ``Connection`` names as hop-by-hop."""
    names = [value for name, value in headers if name == b"connection"]
    return frozenset(word.strip().lower() for value in names for word in value.split(b","))
