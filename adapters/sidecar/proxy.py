"""The proxy: one request in, let in under a version, handed to the engine, its answer back as it comes.

Owns the HTTP of it: limits, hop-by-hop headers, streaming, disconnects. Owns no decision (admission.py), no waiting
(gate.py) and no wording (answers.py).
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import aiohttp
from yarl import URL

from weight_sync.adapters.sidecar.admission import Answer, Situation, Verdict
from weight_sync.adapters.sidecar.answers import (
    Headers,
    Refusal,
    end_headers,
    end_of_stream,
    malformed,
    start_headers,
    too_late,
)
from weight_sync.adapters.sidecar.balance import Balance
from weight_sync.adapters.sidecar.constraint import Constraint, cut_constraint, read_headers
from weight_sync.adapters.sidecar.exchange import (
    Exchange,
    Receive,
    Scope,
    Send,
    request_headers,
    response_headers,
)
from weight_sync.adapters.sidecar.gate import Gate, Ticket
from weight_sync.adapters.sidecar.lanes import Lane, Lanes
from weight_sync.adapters.sidecar.paths import Blocklist
from weight_sync.errors import InputError

__all__ = ["Proxy"]

_SAFE = {"GET", "HEAD", "OPTIONS"}
_DECISIVE = {b"content-encoding", b"content-length", b"content-type", b"host"}
_CONNECT_S = 5.0
_IDLE_S = 2.0  # servers close idle connections after 5 s or more; a request must not meet that
_LATER_S = 30
_LARGE = 1 << 20  # bytes that a client writes at once
_DOUBT = "the engine was lost while it answered"
_PATH = re.compile(rb"/[!-\"$->@-~]*")  # printable ASCII without # and ?
_QUERY = re.compile(rb"[!-\"$-~]*")


@dataclass(frozen=True)
class Entry:
    """A request that was let in: where, and under what."""

    gate: Gate
    ticket: Ticket


class _Gone(Exception):
    """The client has left."""


class Proxy:
    """An ASGI application for everything that is not the sidecar's own.

    Args:
        balance: chooses the engine that answers.
        blocked: paths that are not for clients.
        body_limit: bytes of a request's body, and of a response that is held to tell its last version in a header.
        on_broken: called when the engine cannot be reached, or breaks off.
        count: called once per request with what became of it.
        identify_s: how long an answer waits for the end when it is not known what the engine holds.
        lanes: the adapters that are followed beside the engine's own weights.
    """

    def __init__(
        self, gate: Gate, balance: Balance, blocked: Blocklist, body_limit: int, on_broken: Callable[[], None],
        count: Callable[[str], None], identify_s: float, lanes: Lanes,
    ) -> None:  # fmt: skip
        self._gate, self._blocked, self._limit, self._lanes = gate, blocked, body_limit, lanes
        self._balance = balance
        self._on_broken, self._count, self._identify_s = on_broken, count, identify_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Before the first request, in the event loop that serves."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False, trust_env=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )  # fmt: skip

    async def close(self) -> None:
        """Drops the connections to the engine."""
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(send)
        watch: asyncio.Task[None] | None = None
        try:
            body = await self._body(scope, receive)
            watch = asyncio.create_task(_end_at_disconnect(receive, exchange))
            await self._answer(scope, body, exchange)
        except Refusal as refusal:
            await exchange.refuse(refusal)
        except _Gone:
            exchange.outcome = "disconnected"
        except asyncio.CancelledError:
            if not exchange.ended_by:
                raise
            await exchange.was_ended()
        finally:
            if watch is not None:
                watch.cancel()
            self._count(exchange.outcome)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """All of it. Raises Refusal above the limit."""
        for name, value in scope["headers"]:
            if name == b"content-length" and int(value) > self._limit:
                raise self._too_large()
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
            size += len(parts[-1])
            if size > self._limit:
                raise self._too_large()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _too_large(self) -> Refusal:
        return Refusal(413, "body_too_large", f"the body is longer than {self._limit} bytes")

    async def _answer(self, scope: Scope, body: bytes, exchange: Exchange) -> None:
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        if not _PATH.fullmatch(path) or not _QUERY.fullmatch(scope["query_string"]):
            raise Refusal(400, "bad_path", "not a path")
        if self._blocked.covers(path):
            raise Refusal(403, "route_blocked", "this route of the engine is not for clients")
        want, wait_s, body = read_demand(scope["headers"], body)
        if scope["method"] in _SAFE and want is None:
            if self._gate.now.down:
                raise too_late(None, Verdict(Answer.DOWN, self._gate.now.down), self._gate.now)
            await self._forward(scope, path, body, exchange, None)
            return
        lane = self._lanes.named(body)
        gate = self._gate if lane is None else lane.gate
        entered = await gate.enter(want, wait_s, exchange.canceller("fenced"))
        if not isinstance(entered, Ticket):
            raise too_late(want, entered, gate.now)
        try:
            async with AsyncExitStack() as inside:
                if lane is not None:
                    await self._stand_on_base(lane, exchange, inside)
                await self._forward(scope, path, body, exchange, Entry(gate, entered))
        finally:
            gate.leave(entered)

    async def _stand_on_base(self, lane: Lane, exchange: Exchange, inside: AsyncExitStack) -> None:
        """The base cannot move while an adapter answers. Raises Refusal when it is not the one that the adapter is for."""
        base = await self._gate.enter(None, None, exchange.canceller("fenced"))
        if not isinstance(base, Ticket):
            raise too_late(None, base, self._gate.now)
        inside.callback(self._gate.leave, base)
        if reason := lane.unfit():
            raise Refusal(
                409, "adapter_base_changed", reason, _LATER_S, current={"run": base.run, "version": base.version}
            )

    # --- to the engine and back ---

    async def _forward(self, scope: Scope, path: bytes, body: bytes, exchange: Exchange, entry: Entry | None) -> None:
        assert self._session is not None
        query: bytes = scope["query_string"]
        rest = f"{path.decode()}{'?' if query else ''}{query.decode()}"
        data = None if not body else body if len(body) < _LARGE else io.BytesIO(body)
        headers = request_headers(scope["headers"])
        try:
            with self._balance.engine() as base:
                async with self._session.request(
                    scope["method"], URL(base + rest, encoded=True), data=data, headers=headers, allow_redirects=False
                ) as upstream:
                    await self._relay(scope["method"], upstream, exchange, entry)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError) as error:
            self._on_broken()
            raise Refusal(503, "engine_unreachable", "the engine cannot be reached", 1) from error
        except aiohttp.ClientError as error:
            self._on_broken()
            raise Refusal(502, "engine_broke_off", "the engine broke off its answer") from error

    async def _relay(
        self, method: str, upstream: aiohttp.ClientResponse, exchange: Exchange, entry: Entry | None
    ) -> None:
        headers = response_headers(upstream.raw_headers)
        if entry is None:
            await exchange.start(upstream.status, headers)
            async for chunk in upstream.content.iter_any():
                await exchange.send_part(chunk)
            await exchange.finish(b"")
            return
        ticket = entry.ticket
        headers += start_headers(ticket)
        is_events = upstream.content_type == "text/event-stream" and "Content-Encoding" not in upstream.headers
        length = upstream.content_length
        if not is_events and length is not None and length <= self._limit and method != "HEAD":
            body = await upstream.read()
            now = await self._over(entry)
            await exchange.start(upstream.status, headers + end_headers(ticket, now))
            await exchange.finish(body)
            return
        if is_events:
            headers = [item for item in headers if item[0] != b"content-length"]
        await exchange.start(upstream.status, headers, is_events)
        async for chunk in upstream.content.iter_any():
            await exchange.send_part(chunk)
        now = await self._over(entry)
        await exchange.finish(end_of_stream(ticket, now, exchange.tail) if is_events else b"")

    async def _over(self, entry: Entry) -> Situation:
        """What is served at the end; the engine has nothing more to say, and from here on the client may be slow.

        An engine that was only slow to say that it lives is being identified again: that is waited for. Raises Refusal
        when nobody can tell what it holds.
        """
        gate, now = entry.gate, entry.gate.now
        gate.leave(entry.ticket)
        if now.version is not None:
            return now
        again = await gate.enter(None, self._identify_s, entry.ticket.cancel)
        if not isinstance(again, Ticket):
            raise too_late(None, Verdict(Answer.ATTACHING, _DOUBT), now)
        gate.leave(again)
        return replace(now, run=again.run, version=again.version)


async def _end_at_disconnect(receive: Receive, exchange: Exchange) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
    exchange.end("disconnected")


def read_demand(headers: Headers, body: bytes) -> tuple[Constraint | None, float | None, bytes]:
    """What a request demands, how long it waits for it, and the body to forward. Raises Refusal that names the field."""
    try:
        facts = _facts(headers)
        demand = read_headers(headers)
        want, body = _cut(body, facts.get(b"content-type", b"").lower())
        if want is not None and demand.constraint is not None:
            raise InputError("constraints in header and body", field="weight_version", expected="one of them")
    except InputError as error:
        raise malformed(error) from error
    return want or demand.constraint, demand.wait_s, body


def _cut(body: bytes, kind: bytes) -> tuple[Constraint | None, bytes]:
    """`cut_constraint` of what is JSON: what says so, and what engines may take for it all the same."""
    is_json = b"json" in kind
    if not body or not (is_json or body.lstrip()[:1] == b"{"):
        return None, body
    try:
        return cut_constraint(body)
    except InputError as error:
        if is_json or error.field != "body":
            raise
        return None, body


def _facts(headers: Headers) -> dict[bytes, bytes]:
    """Headers that decide how a request is read. Raises InputError when two readers might disagree about them."""
    facts: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _DECISIVE:
            if name in facts:
                raise InputError("header given twice", field=name.decode())
            facts[name] = value
    if facts.get(b"content-encoding", b"identity").lower() != b"identity":
        raise InputError("a body that cannot be read", field="content-encoding", expected="identity",
                         found=facts[b"content-encoding"].decode("latin-1"))  # fmt: skip
    return facts
