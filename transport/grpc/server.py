"""A server: grpc.aio on an event loop in a thread of its own, beside whatever blocking code the process runs.

Owns start and end, listening, authentication, limits, and errors as status. Owns no call (service.py).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio

from weight_sync.config import Config
from weight_sync.errors import ConfigError, DeadlineError, WeightSyncError
from weight_sync.ports import ReplicaEnd, Transport
from weight_sync.transport.grpc import wire
from weight_sync.transport.grpc.address import Address, bind_address, refuse_listening
from weight_sync.transport.grpc.blobs import BlockCache, Quota
from weight_sync.transport.grpc.cached_end import CachedEnd
from weight_sync.transport.grpc.folds import Folds
from weight_sync.transport.grpc.limits import RateLimit, machine_of
from weight_sync.transport.grpc.metrics import Metrics, Page
from weight_sync.transport.grpc.publishing import Publishing
from weight_sync.transport.grpc.reading import Reading
from weight_sync.transport.grpc.relay import RelayReturns, relay_name
from weight_sync.transport.grpc.returns import Inbox, Returns, StoreReturns
from weight_sync.transport.grpc.security import Guard, server_credentials
from weight_sync.transport.grpc.service import Service
from weight_sync.transport.grpc.site import SiteCopy

__all__ = ["Server"]

_START_S = 30.0
_GRACE_S = 1.0
_THREADS = 8  # for the store; as many for what is far away
_MOST_CALLS = 20_000  # at once
_log = logging.getLogger("weight_sync.grpc")


class Server:
    """Serves what ``transport`` holds, from `start` to `close`.

    Args:
        config: of the server: listen, tls, auth, limits, cache.
        transport: what is served; its reading ends may block.
        relay: the transport is another server, far away: objects are cached, what replicas tell is summed up.
    """

    def __init__(self, config: Config, transport: Transport, relay: bool = False) -> None:
        self._config, self._transport, self._relay = config, transport, relay
        self._guard = Guard(config)
        self._credentials = server_credentials(config)
        self._asked = bind_address(config)
        tls = self._credentials is not None and self._asked.secure
        known = self._guard.asks or (tls and config.tls.client_ca is not None)
        reason = refuse_listening(self._asked, tls, known, config.insecure)
        if reason is not None:
            raise ConfigError(f"not listening: {reason}", field="weight_sync.listen", found=str(self._asked),
                              do="set tls.cert, tls.key and auth.tokens, or insecure: true in a trusted network")  # fmt: skip
        if relay and config.replica_id is None:
            self._config = config.replace(replica_id=relay_name(socket.gethostname(), self._asked.port, os.getpid()))
        self.address: Address = self._asked
        self.metrics = Metrics()
        self.page: Page | None = None
        self.reading: Reading | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._store_returns: StoreReturns | None = None
        self._started = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weight_sync-server", daemon=True)

    # --- from any thread ---

    def start(self) -> Address:
        """Listens; returns where. Raises ConfigError when it cannot, and whatever opening the store raises."""
        if self._config.metrics is not None:
            self.page = Page(self.metrics, self._config.metrics)
        self._thread.start()
        if not self._started.wait(_START_S):
            raise DeadlineError("the server did not start", field="weight_sync.listen", found=str(self._asked))
        if self._failed is not None:
            self.close()
            raise self._failed
        return self.address

    def note(self, run_id: str, head: int | None) -> None:
        """A publisher in this process opened a run, or committed a version of it."""
        if self._loop is not None and self.reading is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.reading.note, run_id, head)

    def use_inbox(self, inbox: Inbox | None) -> None:
        """Trajectories go there from now on; None: into the store."""
        if self._store_returns is not None:
            self._store_returns.inbox = inbox

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server has ended; False at the limit."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Ends all calls and the thread."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        if self._thread.is_alive():
            self._thread.join(_GRACE_S + 10)
        if self.page is not None:
            self.page.close()
            self.page = None

    # --- the thread ---

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._failed = error
            if self._started.is_set():
                _log.exception("the server ended")
        finally:
            self._started.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        with tempfile.TemporaryDirectory(prefix="weight_sync-") as made:
            folder = Path(self._config.cache_dir or made) / "server"
            shutil.rmtree(folder / "objects", ignore_errors=True)  # blocks of an earlier process are not known any more
            pool = ThreadPoolExecutor(_THREADS, "weight_sync-store")
            far = ThreadPoolExecutor(_THREADS, "weight_sync-far")
            quota = Quota(folder / "objects", self._config.cache_bytes)
            cache = BlockCache(quota, far, self.metrics)
            self.reading = Reading(self._transport, self._config.run_id, cache, pool, self._relay)
            folds = Folds(quota, pool, self._config.threads)
            if self._relay and self._config.mirror is not None:
                folds.site = SiteCopy(self._config, self._transport, folds.add)
            returns = self._returns(self.reading, folder)
            publishing = None if self._relay else Publishing(self.reading, self._transport, folder / "incoming")
            service = Service(self.reading, folds, returns, publishing, self._reader, self.metrics)
            server = self._listening(service)
            try:
                await server.start()
                if folds.site is not None:
                    folds.site.start()
                self._started.set()
                await self._stop.wait()
                await server.stop(_GRACE_S)
            finally:
                await returns.close()
                if folds.site is not None:
                    await asyncio.to_thread(folds.site.close)
                folds.close()
                await asyncio.to_thread(self.reading.close)
                pool.shutdown(wait=False, cancel_futures=True)
                far.shutdown(wait=False, cancel_futures=True)

    def _reader(self, run_id: str) -> ReplicaEnd:
        """For the folds. A relay's go through its own cache, as everybody's do."""
        if not self._relay:
            return self._transport.replica_end(run_id)
        assert self.reading is not None
        return cast(ReplicaEnd, CachedEnd(self.reading, run_id, self._config.timeout_s))

    def _returns(self, reading: Reading, folder: Path) -> Returns:
        if self._relay:
            return RelayReturns(reading, self._config, folder / "spool")
        self._store_returns = StoreReturns(reading, self._transport)
        return self._store_returns

    def _listening(self, service: Service) -> grpc.aio.Server:
        options = [*wire.OPTIONS, ("grpc.so_reuseport", 0)]
        server = grpc.aio.server(
            options=options, interceptors=[_Door(self._guard)], maximum_concurrent_rpcs=_MOST_CALLS
        )
        limit = RateLimit(self._config.calls_per_s)
        handlers = {name: _handler(service, call, limit) for name, call in wire.CALLS.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(wire.SERVICE, handlers),))
        target = self._asked.target
        try:
            if self._credentials is not None and self._asked.secure:
                port = server.add_secure_port(target, self._credentials)
            else:
                port = server.add_insecure_port(target)
        except RuntimeError as error:
            raise ConfigError("cannot listen", field="weight_sync.listen", found=f"{self._asked}: {error}",
                              do="end the server that has the port, or choose another one") from error  # fmt: skip
        if port == 0:
            raise ConfigError("cannot listen", field="weight_sync.listen", found=str(self._asked),
                              do="end the server that has the port, or choose another one")  # fmt: skip
        self.address = Address(self._asked.host, port, self._asked.secure)
        return server


class _Door(grpc.aio.ServerInterceptor):
    """Turns away who may not make a call, before a byte of its message is read."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        if details.method != f"/{wire.SERVICE}/{name}" or name not in wire.CALLS:
            return await continuation(details)
        refused = self._guard.refuse(name, details.invocation_metadata or ())
        if refused is None:
            return await continuation(details)

        async def turn_away(requests: Any, context: Any) -> None:
            await context.abort(*refused)

        return grpc.stream_stream_rpc_method_handler(turn_away)


def _handler(service: Service, call: wire.Call, limit: RateLimit) -> Any:
    """One call as grpc wants it, with the limit per machine and the status of errors."""
    method = getattr(service, call.name)
    counts = service.metrics.calls

    async def admit(context: Any) -> None:
        if not limit.take(machine_of(context.peer())):
            counts[call.name, "limited"] += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many calls from this machine; slow down")

    async def fail(context: Any, error: WeightSyncError) -> None:
        counts[call.name, type(error).__name__] += 1
        await context.abort(wire.status_of(error), str(error)[:500], wire.trailer_of(error))

    async def one(request: Any, context: Any) -> Any:
        await admit(context)
        try:
            reply = await method(request, context)
        except WeightSyncError as error:
            return await fail(context, error)
        counts[call.name, "ok"] += 1
        return reply

    async def many(request: Any, context: Any) -> AsyncIterator[Any]:
        await admit(context)
        try:
            async for reply in method(request, context):
                yield reply
        except WeightSyncError as error:
            await fail(context, error)
        counts[call.name, "ok"] += 1

    assert inspect.isasyncgenfunction(method) == call.reply_streams, call.name
    make = {(False, False): grpc.unary_unary_rpc_method_handler, (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler, (True, True): grpc.stream_stream_rpc_method_handler}  # fmt: skip
    kind = make[call.request_streams, call.reply_streams]
    return kind(many if call.reply_streams else one, call.decode_request, call.encode_reply)
