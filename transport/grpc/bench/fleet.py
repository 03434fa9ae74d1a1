"""Simulated replicas, many in one process: each watches, fetches what is new as one object, and acknowledges.

Owns what one does on the wire, which is what `GrpcReplicaEnd` does. Owns no engine: bytes are counted and dropped.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from weight_sync.config import Config
from weight_sync.errors import DeadlineError
from weight_sync.proto.v1 import common_pb2, replica_pb2, service_pb2
from weight_sync.transport.grpc import wire
from weight_sync.transport.grpc.address import parse

__all__ = ["Fleet"]

_RAMP = 50  # connections begun at a time


class Fleet:
    """``count`` replicas that follow the newest run of a server, from the version that is newest when they come.

    Attributes:
        fetched: bytes of objects that arrived, over all.
        arrived: per version, monotonic times at which each replica had acknowledged it.
    """

    def __init__(self, config: Config, count: int, prefix: str = "sim", view: str = "default") -> None:
        self._target = parse(config.uri).target
        self._count, self._prefix, self._view = count, prefix, view
        self.fetched = 0
        self.arrived: dict[int, list[float]] = {}
        self._errors: list[str] = []
        self._changed = threading.Condition()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> Fleet:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    def wait(self, version: int, timeout: float) -> list[float]:
        """When each replica had acknowledged ``version`` or a newer one. Raises DeadlineError."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while len(self.arrived.get(version, ())) < self._count:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise DeadlineError("replicas did not get there", field=f"version {version}",
                                        found=f"{len(self.arrived.get(version, ()))} of {self._count}; "
                                              f"{self._errors[-1:]}")  # fmt: skip
        return self.arrived[version]

    # --- the thread ---

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        ramp = asyncio.Semaphore(_RAMP)
        tasks = [asyncio.create_task(self._replica(k, ramp)) for k in range(self._count)]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _replica(self, index: int, ramp: asyncio.Semaphore) -> None:
        options = [*wire.OPTIONS, ("grpc.use_local_subchannel_pool", 1)]
        async with grpc.aio.insecure_channel(self._target, options=options) as channel:
            while True:
                try:
                    await self._follow(channel, f"{self._prefix}-{index}", ramp)
                except grpc.RpcError as error:
                    self._errors.append(str(error.details()))
                    await asyncio.sleep(0.2)

    async def _follow(self, channel: grpc.aio.Channel, name: str, ramp: asyncio.Semaphore) -> None:
        def call(kind: str, method: Callable[..., Any]) -> Any:
            entry = wire.CALLS[kind]
            return method(entry.path, entry.encode_request, entry.decode_reply)

        async with ramp:
            info = await call("GetRun", channel.unary_unary)(service_pb2.RunRequest(), timeout=60)
        have: int | None = None
        request = service_pb2.WatchRequest(run_id=info.run_id, manifests=True)
        async for event in call("Watch", channel.unary_stream)(request):
            if event.WhichOneof("event") != "entry_committed":
                continue
            target = event.entry_committed.version.number
            run = event.entry_committed.version.run_id
            size = 0
            if have is not None:
                fold = service_pb2.FoldRequest(view=self._view, have=have, target=target, form=common_pb2.FORM_STEP)
                fetch = service_pb2.FetchRequest(run_id=run, fold=fold)
                async for data, _ in call("Fetch", channel.unary_stream)(fetch, timeout=600):
                    size += len(data)
            ack = replica_pb2.Acknowledgement(
                replica_id=name, view=self._view, state=replica_pb2.REPLICA_STATE_SERVING, fetched_bytes=size
            )
            ack.version.run_id, ack.version.number = run, target
            async with ramp:
                await call("Acknowledge", channel.unary_unary)(
                    service_pb2.AcknowledgeRequest(run_id=run, acknowledgement=ack), timeout=60
                )
            self._note(have, target, size)
            have = target

    def _note(self, have: int | None, target: int, size: int) -> None:
        now = time.monotonic()
        with self._changed:
            self.fetched += size
            for version in range(target if have is None else have + 1, target + 1):
                self.arrived.setdefault(version, []).append(now)
            self._changed.notify_all()
