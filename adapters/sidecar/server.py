"""Runs a sidecar: builds its parts, listens, and takes everything down again.

Owns start and end of the process's sockets and threads. Owns no option (settings.py) and no request.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from weight_sync.adapters.sidecar.app import App
from weight_sync.adapters.sidecar.balance import Balance
from weight_sync.adapters.sidecar.driver import Driver
from weight_sync.adapters.sidecar.engine import GatedEngine, ServedEngine
from weight_sync.adapters.sidecar.gate import Gate
from weight_sync.adapters.sidecar.group import EngineGroup
from weight_sync.adapters.sidecar.lanes import base_facts, check_adapters, open_lanes
from weight_sync.adapters.sidecar.paths import Blocklist
from weight_sync.adapters.sidecar.proxy import Proxy
from weight_sync.adapters.sidecar.settings import Settings
from weight_sync.adapters.sidecar.status import Status
from weight_sync.adapters.sidecar.watch import HeadWatch, Watchdog
from weight_sync.config import Config
from weight_sync.errors import ConfigError, DeadlineError
from weight_sync.replica import Replica
from weight_sync.reports import SyncReport

__all__ = ["serve"]

_BACKLOG = 2048
_SWITCH_S = 0.0005  # the replica's thread may hold a request up for so long, while it works in Python
_KEEP_ALIVE_S = 75  # longer than clients keep connections, so that none is closed under a request
_HEAD_LIMIT = 64 << 10  # bytes of a request line and its headers


def serve(
    engine_class: Callable[[str, Config], Any],
    config: Config,
    on_listen: Callable[[str], None],
    on_commit: Callable[[SyncReport], None],
    on_error: Callable[[Exception], None],
    adapters: Mapping[str, Config] | None = None,
    **options: Any,
) -> None:
    """Serves until SIGINT or SIGTERM, which are raised again in the end. In the main thread.

    Args:
        engine_class: of an engine that answers HTTP requests (`ServedEngine`), from ``weight_sync.engines``.
        on_listen: told the address once clients can connect.
        on_commit, on_error: told in the replica's thread, errors once in a row.
        adapters: by the name that requests give as their model: where versions of a LoRA adapter come from.
        options: of `Settings`.

    Raises ConfigError for an option that cannot be used, an engine that cannot be served and an address that is taken;
    DeadlineError when the replica did not end in time.
    """
    settings = Settings(**options)
    members = _members(engine_class, settings, config)
    check_adapters(adapters or {}, config, settings)
    engine = EngineGroup(members) if len(members) > 1 else next(iter(members.values()))
    with ExitStack() as stack:
        stack.callback(engine.close)
        gate = Gate(settings.head_trust_s, settings.wait_s)
        gated = GatedEngine(engine, gate, settings.drain_s, settings.fallback)
        driver = Driver(Replica.open(config, gated), gate)
        gate.on_behind = driver.wake
        lanes = open_lanes(
            adapters or {}, list(members.values()), settings, base_facts(driver, gated, config.view), stack
        )
        status = Status(driver, gate, gated, lanes)
        drivers, gates = [driver, *(lane.driver for lane in lanes)], [gate, *(lane.gate for lane in lanes)]
        for one in drivers:
            one.listeners.commit.append(on_commit)
            one.listeners.error.append(on_error)
        watchdog = Watchdog(engine, drivers, settings)
        heads = [HeadWatch(config, driver, gate), *(HeadWatch(lane.config, lane.driver, lane.gate) for lane in lanes)]
        proxy = Proxy(
            gate, Balance(settings.engine_url), Blocklist(engine.control_routes), settings.body_limit, watchdog.look_now,
            status.count, settings.wait_s, lanes,
        )  # fmt: skip
        server = _Server(_uvicorn_config(App(proxy, status, lambda: _wake(drivers)), settings), gates)
        listening = stack.enter_context(_listening(settings))
        _start(drivers, [watchdog, *heads], settings, stack)
        on_listen(_spelt(listening, settings))
        gc.freeze()  # what was imported stays: looking through it again would hold requests up
        sys.setswitchinterval(_SWITCH_S)
        logging.getLogger("uvicorn.error").addFilter(_is_news)
        server.run(sockets=[listening])


def _start(
    drivers: Sequence[Driver], watches: Sequence[Watchdog | HeadWatch], settings: Settings, stack: ExitStack
) -> None:
    """The threads, which end with ``stack``."""
    for driver in drivers:
        stack.callback(_stop, driver, settings.stop_s)
    for thread in (*drivers, *watches):
        thread.start()
    for watch in watches:
        stack.callback(watch.stop, settings.watch_timeout_s)


def _wake(drivers: Sequence[Driver]) -> None:
    for driver in drivers:
        driver.wake()


def _members(engine_class: Callable[[str, Config], Any], settings: Settings, config: Config) -> dict[str, ServedEngine]:
    """The engines by their URLs."""
    if not callable(getattr(engine_class, "alive", None)):
        raise ConfigError("this engine answers no HTTP requests", field="engine",
                          found=getattr(engine_class, "__name__", engine_class),
                          expected="an engine with control_routes and alive()")  # fmt: skip
    return {url: engine_class(url, config) for url in settings.engine_url}


def _stop(driver: Driver, timeout: float) -> None:
    if not driver.stop(timeout):
        raise DeadlineError("the replica did not end in time", field="stop_s", expected=f"within {timeout:g} s",
                            do="look whether the engine is paused")  # fmt: skip


def _is_news(record: logging.LogRecord) -> bool:
    """Answers that break off do so on purpose, and are counted."""
    return not str(record.msg).startswith("ASGI callable returned without completing response")


class _Server(uvicorn.Server):
    """Sends away who waits at the gate as soon as a signal arrives, so that the end need not wait for them."""

    def __init__(self, config: uvicorn.Config, gates: Sequence[Gate]) -> None:
        super().__init__(config)
        self._gates = gates
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In the event loop."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """At SIGINT and SIGTERM: interrupts whatever the thread does, so the gate's lock may be held right now."""
        if self._loop is not None:
            for gate in self._gates:
                self._loop.call_soon_threadsafe(gate.end)
        super().handle_exit(sig, frame)


class _BoundedHead(HttpToolsProtocol):
    """Closes connections on which a request line and headers do not end: their bytes are held until they do."""

    _held = 0
    _in_head = True

    def data_received(self, data: bytes) -> None:
        """Bytes of a client."""
        self._held += len(data)
        super().data_received(data)
        if self._in_head and self._held > _HEAD_LIMIT:
            self.transport.close()

    def on_headers_complete(self) -> None:
        """Of a request."""
        self._in_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The next bytes are those of another request."""
        self._in_head, self._held = True, 0
        super().on_message_complete()


def _uvicorn_config(app: App, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=_BoundedHead, ws="none", lifespan="on", log_config=None, access_log=False, server_header=False,
        date_header=False, proxy_headers=False, backlog=_BACKLOG, timeout_graceful_shutdown=max(1, round(settings.stop_s)),
        timeout_keep_alive=_KEEP_ALIVE_S,        ssl_certfile=settings.tls_cert, ssl_keyfile=settings.tls_key,
    )  # fmt: skip


@contextmanager
def _listening(settings: Settings) -> Iterator[socket.socket]:
    """The bound socket; the file of a Unix socket goes in the end. Raises ConfigError."""
    address = settings.address
    try:
        if isinstance(address, str):
            bound = _bind_unix(address)
        else:
            family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
            bound = socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigError("cannot listen", field="listen", found=f"{settings.listen}: {error.strerror}",
                          do="choose another address, or end who listens there") from error  # fmt: skip
    with bound:
        try:
            yield bound
        finally:
            if isinstance(address, str) and os.path.exists(address):
                os.unlink(address)


def _bind_unix(path: str) -> socket.socket:
    """For this user alone. A socket that nobody listens at any more is replaced, nothing else is."""
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            if probe.connect_ex(path) != 0:
                os.unlink(path)
    before = os.umask(0o177)
    try:
        bound.bind(path)
    finally:
        os.umask(before)
    bound.listen(_BACKLOG)
    return bound


def _spelt(bound: socket.socket, settings: Settings) -> str:
    if isinstance(settings.address, str):
        return f"unix:{settings.address}"
    host, port = bound.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
