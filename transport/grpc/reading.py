"""What a service reads from: any transport's reading ends, with the answers that many ask for kept.

Owns the ends by run, the manifests in memory, looks that are shared, and the way from a reference to bytes. Owns no
call of the service. Blocking ends are used in threads; everything here runs on the service's loop.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from weight_sync.errors import (
    CorruptionError,
    StoreUnavailableError,
    VersionError,
    VersionExpiredError,
    VersionMissingError,
)
from weight_sync.ports import ReplicaEnd, Transport
from weight_sync.proto.v1 import manifest_pb2, service_pb2
from weight_sync.transport.grpc.blobs import Blob, BlockCache, FileBlob
from weight_sync.transport.grpc.feed import Feed

__all__ = ["Known", "Reading"]

_R = TypeVar("_R")
_Look = asyncio.Task[service_pb2.RunInfo]
_Page = list[manifest_pb2.VersionManifest]
_KEPT_BYTES = 128 << 20  # of manifests
_PAGE_S = 5.0  # how old may be what is remembered from far away
_PAGES = 64
_NUMBER = re.compile(r"data/([0-9]{20})/[A-Za-z0-9][A-Za-z0-9._-]{0,400}\.safetensors")


@dataclass
class Known:
    """A version's manifest, as it is sent."""

    manifest: manifest_pb2.VersionManifest
    data: bytes
    refs: dict[str, manifest_pb2.ShardRef]
    at: float


@dataclass
class _Run:
    """One run: an end that one thread at a time may use."""

    end: ReplicaEnd
    lock: threading.Lock = field(default_factory=threading.Lock)


class Reading:
    """The reading half of a service, over ``transport``.

    Args:
        run_id: the run of those who name none; None: the newest.
        cache: for objects that are no local files.
        far: the transport is a server far away: looks are answered by what it pushes.
    """

    def __init__(
        self, transport: Transport, run_id: str | None, cache: BlockCache, pool: ThreadPoolExecutor, far: bool
    ) -> None:
        self._transport = transport
        self._named = run_id
        self._cache = cache
        self._far = far
        self.pool = pool
        self.loop = asyncio.get_running_loop()
        self._base = _Run(transport.replica_end(None))
        self._runs: dict[str, _Run] = {}
        self._feeds: dict[str, Feed] = {}
        self._looks: dict[str, tuple[_Look, _Look | None]] = {}
        self._known: OrderedDict[tuple[str, int], Known] = OrderedDict()
        self._coming: dict[tuple[str, int], asyncio.Task[Known]] = {}
        self._heads: dict[str, int] = {}  # newest version seen, by run
        self._bytes = 0
        self._pages: dict[tuple[str, int, int], tuple[float, _Page]] = {}
        self._turning: dict[tuple[str, int, int], asyncio.Task[_Page]] = {}

    async def blocking(self, function: Callable[..., _R], *given: object) -> _R:
        """Runs a blocking function in a thread."""
        return await self.loop.run_in_executor(self.pool, function, *given)

    # --- runs ---

    async def run(self, run_id: str) -> str:
        """The run that is meant, which exists. Raises VersionMissingError."""
        if (run_id or self._named) in self._runs:
            return run_id or self._named or ""  # a run that began does not end
        info = await self.look(run_id)
        if not info.run_id:
            raise VersionMissingError("the server holds no such run" if run_id else "the server holds no run",
                                      field="run_id", found=info.newest_run or None, expected=run_id or "a run",
                                      do="start the publisher, or correct run_id")  # fmt: skip
        return info.run_id

    async def look(self, run_id: str) -> service_pb2.RunInfo:
        """Where a run stands, from a look that began after this call; all who wait for one share the next."""
        run_id = run_id or self._named or ""
        pushed = self._pushed(run_id) if self._far else None
        if pushed is not None:
            return pushed
        try:
            info = await self._shared(run_id)
        except StoreUnavailableError:
            if not self._far or run_id not in self._runs:
                raise
            newest = self._newest() or run_id  # the far side is away: what is here goes on being served
            return service_pb2.RunInfo(run_id=run_id, newest_run=newest, head=self._heads.get(run_id))
        if self._far and info.run_id:
            self.feed(info.run_id)  # the next look is answered by what it hears
        return info

    async def _shared(self, run_id: str) -> service_pb2.RunInfo:
        running, waiting = self._looks.get(run_id, (None, None))
        if running is None:
            running = self.loop.create_task(self._look(run_id, None))
            self._looks[run_id] = (running, None)
            return await asyncio.shield(running)
        if waiting is None:  # the one under way may have looked before what we want to see
            waiting = self.loop.create_task(self._look(run_id, running))
            self._looks[run_id] = (running, waiting)
        return await asyncio.shield(waiting)

    async def _look(self, run_id: str, before: _Look | None) -> service_pb2.RunInfo:
        if before is not None:
            await asyncio.wait([before])
        try:
            info = await self.blocking(self._look_now, run_id)
            if info.run_id and info.HasField("head"):
                self._heads[info.run_id] = max(info.head, self._heads.get(info.run_id, 0))
            return info
        finally:
            waiting = self._looks[run_id][1]
            if waiting is None or waiting is asyncio.current_task():
                del self._looks[run_id]
            else:
                self._looks[run_id] = (waiting, None)

    def _pushed(self, run_id: str) -> service_pb2.RunInfo | None:
        """What a server far away has pushed; None while it has not said enough."""
        newest = self._newest()
        chosen = run_id or newest
        if newest is None or chosen is None or chosen not in self._runs:
            return None
        state = self.feed(chosen).state
        if state.newest is None:
            return None
        self._heads[chosen] = state.head or 0
        return service_pb2.RunInfo(run_id=chosen, newest_run=newest, head=state.head)

    def _look_now(self, run_id: str) -> service_pb2.RunInfo:
        """In a thread."""
        with self._base.lock:
            newest = self._base.end.newest_run()
        chosen = run_id or newest
        if chosen is None:
            return service_pb2.RunInfo()
        run = self._end(chosen)
        with run.lock:
            try:
                chosen = run.end.run_id()
            except VersionMissingError:
                return service_pb2.RunInfo(newest_run=newest or "")
            return service_pb2.RunInfo(run_id=chosen, newest_run=newest or "", head=run.end.head())

    def _end(self, run_id: str) -> _Run:
        """An end of a run that may not exist; such ends are not kept for long."""
        run = self._runs.get(run_id)
        if run is None:
            run = _Run(self._transport.replica_end(run_id))
            try:
                run.end.run_id()
            except VersionMissingError:
                return run  # no name of a run: keep nothing that a stranger makes up
            run = self._runs.setdefault(run_id, run)
        return run

    async def use(self, run_id: str, function: Callable[[ReplicaEnd], _R]) -> _R:
        """``function`` of the end of a run, in a thread, alone."""
        chosen = await self.run(run_id) if run_id not in self._runs else run_id

        def work() -> _R:
            run = self._end(chosen)
            with run.lock:
                return function(run.end)

        return await self.blocking(work)

    def feed(self, run_id: str) -> Feed:
        """What is newest in a run."""
        found = self._feeds.get(run_id)
        if found is None:
            found = self._feeds[run_id] = Feed(self._transport.replica_end(run_id or None), self.loop)
            first = self._feeds.pop("", None) if run_id else None
            if first is not None:  # one feed is enough to hear of the newest run, and each costs looks
                first.retire()
                self.pool.submit(first.stop)
        return found

    def news(self) -> Feed:
        """A feed that hears of the newest run of the store; every one does."""
        return next(iter(self._feeds.values()), None) or self.feed("")

    def _newest(self) -> str | None:
        return next((feed.state.newest for feed in self._feeds.values() if feed.state.newest is not None), None)

    def note(self, run_id: str, head: int | None) -> None:
        """A publisher of ours opened a run, or committed; on the loop."""
        if head is not None:
            self._heads[run_id] = max(head, self._heads.get(run_id, 0))
        for name, feed in self._feeds.items():
            feed.note(run_id if head is None else None, head if name == run_id else None)

    # --- the log ---

    async def known(self, run_id: str, number: int, current: bool = False) -> Known:
        """A version. Raises VersionMissingError, VersionExpiredError.

        Args:
            current: it must not have been collected meanwhile; else what is remembered will do.
        """
        key = (run_id, number)
        found = self._known.get(key)
        if found is not None and not (current and self._may_be_gone(found, run_id, number)):
            self._known.move_to_end(key)
            return found
        task = self._coming.get(key)
        if task is None:
            task = self.loop.create_task(self._bring(run_id, number))
            self._coming[key] = task
            task.add_done_callback(lambda _: self._coming.pop(key, None))
        try:
            return await asyncio.shield(task)
        except StoreUnavailableError:
            if found is None or not self._far:
                raise
            return found  # the far side is away: what is here goes on being served

    def _may_be_gone(self, found: Known, run_id: str, number: int) -> bool:
        """The head is never collected; from far away, some seconds do not matter."""
        if number >= self._heads.get(run_id, 0):
            return False
        return not self._far or self.loop.time() - found.at > _PAGE_S

    async def _bring(self, run_id: str, number: int) -> Known:
        try:
            if self._far:
                manifest = await self.blocking(self.feed(run_id).manifest, number)
            else:
                manifest = await self.use(run_id, lambda end: end.manifest(number))
        except VersionError:
            self.forget(run_id, number)
            raise
        data = manifest.SerializeToString()
        refs = {ref.object: ref for view in manifest.views for ref in view.shards}
        self.forget(run_id, number)
        found = self._known[run_id, number] = Known(manifest, data, refs, self.loop.time())
        self._bytes += len(data)
        while self._bytes > _KEPT_BYTES and len(self._known) > 1:
            self._bytes -= len(self._known.popitem(last=False)[1].data)
        return found

    def forget(self, run_id: str, number: int) -> None:
        """A version turned out to be gone."""
        found = self._known.pop((run_id, number), None)
        if found is not None:
            self._bytes -= len(found.data)

    async def entries(self, run_id: str, first: int, limit: int) -> _Page:
        """Entries of a run from ``first`` on, at most ``limit``. From far away, they may be some seconds old."""

        def some() -> _Page:
            return list(islice(self._end(run_id).end.entries(first), limit))

        if not self._far:
            return await self.blocking(some)
        key = (run_id, first, limit)
        at, kept = self._pages.get(key, (0.0, None))
        if kept is not None and self.loop.time() - at < _PAGE_S:
            return kept
        task = self._turning.get(key)
        if task is None:
            task = self._turning[key] = self.loop.create_task(self._turn(key, some))
            task.add_done_callback(lambda _: self._turning.pop(key, None))
        try:
            return await asyncio.shield(task)
        except StoreUnavailableError:
            if kept is None:
                raise
            return kept  # the far side is away

    async def _turn(self, key: tuple[str, int, int], some: Callable[[], _Page]) -> _Page:
        page = await self.blocking(some)
        self._pages[key] = (self.loop.time(), page)
        while len(self._pages) > _PAGES:
            del self._pages[next(iter(self._pages))]
        return page

    # --- bytes ---

    async def ref(self, run_id: str, name: str) -> manifest_pb2.ShardRef:
        """What a committed manifest says about an object; a name that none lists is not readable.

        Raises CorruptionError for a name that cannot be, VersionExpiredError for one that is not there.
        """
        match = _NUMBER.fullmatch(name)
        if match is None or ".." in name:
            raise CorruptionError("shard outside its version's folder", field="object", found=name[:200])
        number = int(match[1])
        found = (await self.known(run_id, number)).refs.get(name)
        if found is None:
            raise VersionExpiredError("no version lists this shard", field="object", found=name,
                                      do="plan again from the log")  # fmt: skip
        return found

    async def open(self, run_id: str, ref: manifest_pb2.ShardRef) -> Blob:
        """The bytes of a shard. Raises VersionExpiredError."""
        end = (await self.blocking(self._end, run_id)).end
        path = end.local(ref)
        if path is not None:
            try:
                return FileBlob(path, self.pool)
            except VersionExpiredError:
                match = _NUMBER.fullmatch(ref.object)
                assert match is not None
                self.forget(run_id, int(match[1]))
                raise
        name = f"{run_id}-{ref.object}".replace("/", "-")
        return self._cache.open(name, ref.size, ref.blake3, lambda offset, length: end.read(ref, offset, length))

    def close(self) -> None:
        """Releases all ends."""
        for feed in self._feeds.values():
            feed.stop()
        for feed in self._feeds.values():
            feed.join()
        for run in (self._base, *self._runs.values()):
            run.end.close()
