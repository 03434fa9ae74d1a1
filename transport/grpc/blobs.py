"""Bytes of objects for the sender: from files, chunk by chunk, and a cache on disk of what comes from far away.

Owns the reading, the quota and the promise that each byte is fetched once. Owns no meaning of a byte.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from weight_sync.errors import CorruptionError, StoreError, StoreFullError, VersionExpiredError
from weight_sync.transport.grpc.metrics import Metrics

__all__ = ["BLOCK", "Blob", "BlockCache", "FileBlob", "Quota"]

BLOCK = 1 << 20
"""Bytes that are fetched from far away, or not, at once."""

_RUN = 16  # blocks in one request to the far side

Fetch = Callable[[int, int], memoryview]


class Blob(Protocol):
    """An object that is being sent."""

    size: int

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """1 to ``length`` bytes from ``offset``, which lies inside."""

    def close(self) -> None:
        """Ends the reading."""


class FileBlob:
    """A file. What is in the page cache is read on the loop, what is not by a thread, so that no reader waits for
    another one's disk.
    """

    def __init__(self, path: Path, pool: Executor, done: Callable[[], None] | None = None) -> None:
        """Raises VersionExpiredError when the file is gone."""
        try:
            self._file = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise VersionExpiredError("shard is gone", field=path.name, do="plan again from the log") from error
        self.size = os.fstat(self._file).st_size
        self._pool = pool
        self._done = done
        self._buffer = bytearray()

    async def read(self, offset: int, length: int) -> memoryview:
        """Up to ``length`` bytes, valid until the next call."""
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        view = memoryview(self._buffer)[:length]
        try:
            count = os.preadv(self._file, [view], offset, os.RWF_NOWAIT)
        except OSError:  # not in memory, or a file system that cannot tell
            count = 0
        if not count:
            loop = asyncio.get_running_loop()
            count = await loop.run_in_executor(self._pool, os.preadv, self._file, [view], offset)
        if not count:
            raise CorruptionError("shard is shorter than its manifest says", field="object", found=f"{offset} bytes",
                                  do="restore the object from a copy of the store, or wait for the next anchor")  # fmt: skip
        return view[:count]

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
        if self._done is not None:
            self._done()


class Quota:
    """Files below one folder that may be deleted again, least recently used first. Threads may share it."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._users: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def used(self) -> int:
        """Bytes accounted for."""
        with self._lock:
            return sum(self._sizes.values())

    def take(self, name: str, size: int) -> None:
        """Accounts for ``name`` and holds it; makes room. Raises StoreFullError when what is in use fills the quota."""
        with self._lock:
            self._sizes[name] = size
            self._sizes.move_to_end(name)
            self._users[name] = self._users.get(name, 0) + 1
            over = sum(self._sizes.values()) - self._limit
            for other in [n for n in self._sizes if not self._users.get(n)]:
                if over <= 0:
                    break
                over -= self._sizes.pop(other)
                (self.folder / other).unlink(missing_ok=True)
            if over > 0:
                self._drop(name)
                if not self._users.get(name):
                    self._sizes.pop(name, None)
                raise StoreFullError("the cache is full of what is being sent", field="weight_sync.cache_bytes",
                                     found=self._limit, do="raise cache_bytes")  # fmt: skip

    def free(self, name: str) -> None:
        """The holder is done; the file may go when room is needed."""
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]

    def holds(self, name: str) -> bool:
        """Whether the file is there."""
        with self._lock:
            return name in self._sizes

    def forget(self, name: str) -> None:
        """Deletes a file that turned out bad."""
        with self._lock:
            self._sizes.pop(name, None)
            (self.folder / name).unlink(missing_ok=True)


class BlockCache:
    """Objects from far away, cut into blocks; each block is fetched by whoever needs it first and is there for all."""

    def __init__(self, quota: Quota, pool: Executor, metrics: Metrics) -> None:
        self._quota = quota
        self._pool = pool
        self._metrics = metrics
        self._objects: dict[str, _Object] = {}

    def open(self, name: str, size: int, digest: bytes, fetch: Fetch) -> Blob:
        """The object ``name``, which ``fetch(offset, length)`` reads from far away, in a thread.

        Once it is complete it is compared with its hash; one that is bad is fetched again.
        """
        if not self._quota.holds(name):
            self._objects.pop(name, None)
        self._quota.take(name, size)
        found = self._objects.get(name)
        if found is None:
            try:
                found = _Object(self._quota.folder / name, size, digest)
            except OSError as error:
                self._quota.free(name)
                raise StoreFullError("cannot write the cache", field=str(self._quota.folder),
                                     found=error.strerror) from error  # fmt: skip
            self._objects[name] = found
            self._objects = {n: o for n, o in self._objects.items() if n == name or self._quota.holds(n)}
        return _CachedBlob(self, found, fetch, FileBlob(found.path, self._pool, lambda: self._quota.free(name)))

    async def need(self, item: _Object, fetch: Fetch, offset: int, end: int) -> None:
        """Returns once the block of ``offset`` is there; begins those up to ``end`` as well."""
        first, last = offset // BLOCK, (end - 1) // BLOCK
        if first not in item.there and first not in item.coming:
            run = [first]
            while run[-1] < last and len(run) < _RUN and not (
                run[-1] + 1 in item.there or run[-1] + 1 in item.coming
            ):  # fmt: skip
                run.append(run[-1] + 1)
            task = asyncio.get_running_loop().create_task(self._bring(item, fetch, run))
            task.add_done_callback(_seen)
            for block in run:
                item.coming[block] = task
        if first not in item.there:
            await asyncio.shield(item.coming[first])

    async def _bring(self, item: _Object, fetch: Fetch, run: list[int]) -> None:
        begin, end = run[0] * BLOCK, min(item.size, (run[-1] + 1) * BLOCK)
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, _fill, item.path, begin, end, fetch)
            item.there.update(run)
            self._metrics.far_bytes += end - begin
            if len(item.there) * BLOCK >= item.size and not await loop.run_in_executor(self._pool, item.good):
                item.there.clear()
        finally:
            for block in run:
                item.coming.pop(block, None)


class _Object:
    """What is here of an object."""

    def __init__(self, path: Path, size: int, digest: bytes) -> None:
        self.path, self.size, self._digest = path, size, digest
        self.there: set[int] = set()
        self.coming: dict[int, asyncio.Task[None]] = {}
        with path.open("wb") as file:
            file.truncate(size)

    def good(self) -> bool:
        """Whether the whole file has its hash; in a thread."""
        hasher = blake3()
        with self.path.open("rb") as file:
            while data := file.read(4 << 20):
                hasher.update(data)
        return hasher.digest() == self._digest


def _seen(task: asyncio.Task[None]) -> None:
    """Those who wait get the error; when nobody does any more, it is not worth a word."""
    if not task.cancelled():
        task.exception()


def _fill(path: Path, begin: int, end: int, fetch: Fetch) -> None:
    data = fetch(begin, end - begin)
    try:
        with path.open("r+b") as file:
            file.seek(begin)
            file.write(data)
    except OSError as error:
        raise StoreError("cannot write the cache", field=str(path), found=error.strerror) from error


class _CachedBlob:
    def __init__(self, cache: BlockCache, item: _Object, fetch: Fetch, file: FileBlob) -> None:
        self._cache, self._item, self._fetch, self._file = cache, item, fetch, file
        self.size = item.size
        self.end = item.size  # of what will be asked for

    async def read(self, offset: int, length: int) -> memoryview:
        await self._cache.need(self._item, self._fetch, offset, self.end)
        inside = BLOCK - offset % BLOCK
        return await self._file.read(offset, min(length, inside))

    def close(self) -> None:
        self._file.close()
