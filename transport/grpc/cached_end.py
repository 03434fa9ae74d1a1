"""A reading end on top of what a service remembers, for a thread of the service itself: a relay's folds.

Owns the way from a thread to the service's loop and back. Owns no cache (reading.py, blobs.py) and no connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import TimeoutError as LateError
from typing import Any, TypeVar

from weight_sync.errors import StoreUnavailableError
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.transport.grpc.reading import Reading
from weight_sync.transport.grpc.wire import CHUNK

__all__ = ["CachedEnd"]

_R = TypeVar("_R")


class CachedEnd:
    """The part of ``weight_sync.ports.ReplicaEnd`` that reads one run. Its methods block; never call them on the loop."""

    def __init__(self, reading: Reading, run_id: str, timeout_s: float) -> None:
        self._reading = reading
        self._run = run_id
        self._timeout_s = timeout_s

    def _wait(self, work: Coroutine[Any, Any, _R]) -> _R:
        future = asyncio.run_coroutine_threadsafe(work, self._reading.loop)
        try:
            return future.result(self._timeout_s)
        except LateError as error:
            future.cancel()
            raise StoreUnavailableError("the far side does not answer", field="run_id", found=self._run) from error

    def run_id(self) -> str:
        """The run."""
        return self._run

    def head(self) -> int | None:
        """Number of the newest version."""
        info = self._wait(self._reading.look(self._run))
        return info.head if info.HasField("head") else None

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """A version's manifest."""
        return self._wait(self._reading.known(self._run, number)).manifest

    def entries(self, first: int = 0) -> Iterator[manifest_pb2.VersionManifest]:
        """Entries, one at a time."""
        while page := self._wait(self._reading.entries(self._run, first, 1)):
            yield from page
            first += 1

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        """Bytes of a shard, by way of the cache."""
        return self._wait(self._read(ref, offset, length))

    async def _read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        buffer = memoryview(bytearray(length))
        blob = await self._reading.open(self._run, ref)
        try:
            done = 0
            while done < length:
                data = await blob.read(offset + done, min(CHUNK, length - done))
                buffer[done : done + len(data)] = data
                done += len(data)
        finally:
            blob.close()
        return buffer

    def close(self) -> None:
        """Nothing is held."""
