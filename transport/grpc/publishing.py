"""The publishing half of a service: publishers on other hosts, each with a session, onto the transport that is served.

Owns the sessions, and shards on their way through a file. Owns no rule of the log (the transport's publisher end has
them all) and no call.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import secrets
import tempfile
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from weight_sync.errors import InputError, StoreError, StoreFullError
from weight_sync.ports import Fate, OpenedRun, PublisherEnd, ShardBytes, Transport
from weight_sync.proto.v1 import manifest_pb2, report_pb2, service_pb2, trajectory_pb2
from weight_sync.transport.grpc.reading import Reading

__all__ = ["FATES", "Publishing", "opened_of", "report_of"]

_R = TypeVar("_R")
_SESSIONS = 1024  # ends that are kept; an older one is attached again when it is needed
FATES = {
    Fate.OPEN: service_pb2.FATE_OPEN,
    Fate.COMMITTED: service_pb2.FATE_COMMITTED,
    Fate.ABORTED: service_pb2.FATE_ABORTED,
}


def report_of(run: OpenedRun) -> report_pb2.OpenedReport:
    """An opened run as a message."""
    return report_pb2.OpenedReport(run_id=run.run_id, epoch=run.epoch, head=run.head, created=run.created)


def opened_of(report: report_pb2.OpenedReport) -> OpenedRun:
    """The other way."""
    return OpenedRun(report.run_id, report.epoch, report.head if report.HasField("head") else None, report.created)


@dataclass
class _Session:
    end: PublisherEnd
    lock: asyncio.Lock


class Publishing:
    """Sessions by token and rank; a session that is not known, of a service that restarted, is attached again."""

    def __init__(self, reading: Reading, transport: Transport, folder: Path) -> None:
        self._reading = reading
        self._transport = transport
        self._folder = folder
        self._sessions: OrderedDict[tuple[str, int], _Session] = OrderedDict()

    async def open_run(self, request: service_pb2.OpenRunRequest) -> service_pb2.PublisherSession:
        """A run, claimed for whoever calls."""
        end = self._transport.publisher_end(0, 1)
        fork_of = request.fork_of if request.HasField("fork_of") else None
        opened = await self._reading.blocking(
            lambda: end.open_run(request.run_id or None, fork_of=fork_of, writer=request.writer)
        )
        token = secrets.token_hex(16)
        self._keep((token, 0), _Session(end, asyncio.Lock()))
        self._reading.note(opened.run_id, None)
        return service_pb2.PublisherSession(run=report_of(opened), token=token, rank=0, world_size=1)

    def _keep(self, key: tuple[str, int], session: _Session) -> None:
        self._sessions[key] = session
        while len(self._sessions) > _SESSIONS:
            self._sessions.popitem(last=False)  # not closed: that would forget trajectories that were handed out

    def end(self, session: service_pb2.PublisherSession) -> _Session:
        """The end of a session. Raises InputError when it is none."""
        if not session.token or not session.run.run_id:
            raise InputError("no session", field="session", do="open a run first, or attach to one")
        found = self._sessions.get((session.token, session.rank))
        if found is None:
            end = self._transport.publisher_end(session.rank, max(session.world_size, session.rank + 1))
            end.attach(opened_of(session.run))
            found = _Session(end, asyncio.Lock())
            self._keep((session.token, session.rank), found)
        return found

    async def use(self, session: service_pb2.PublisherSession, function: Callable[[PublisherEnd], _R]) -> _R:
        """``function`` of the session's end, in a thread, one call after the other."""
        found = self.end(session)
        async with found.lock:
            return await self._reading.blocking(function, found.end)

    async def commit(self, request: service_pb2.CommitRequest) -> None:
        """A version; watchers hear of it before the answer goes out."""
        await self.use(request.session, lambda end: end.commit(request.manifest))
        self._reading.note(request.manifest.run_id, request.manifest.number)

    async def take(self, request: service_pb2.TakeRequest) -> list[trajectory_pb2.Trajectory]:
        """Trajectories that nobody took."""
        return await self.use(request.session, lambda end: end.take_trajectories(request.limit))

    async def collect(self, run_id: str) -> Mapping[str, int]:
        """What no lease and no retained version needs goes."""

        def work() -> Mapping[str, int]:
            end = self._transport.publisher_end(0, 1)
            end.attach(OpenedRun(run_id, 0, None, False))
            return end.collect()

        return await self._reading.blocking(work)

    async def put_shard(self, requests: AsyncIterator[service_pb2.PutShardRequest]) -> manifest_pb2.ShardRef:
        """A shard, through a file: it may be as large as memory, and is read twice when the store has to be tried again."""
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("session"):
            raise InputError("shard without a head", field="session", do="begin with what it is")
        session = self.end(first.session)
        if first.head_size > first.size:
            raise InputError("head is larger than the shard", field="head_size", found=first.head_size,
                             expected=f"at most {first.size}")  # fmt: skip
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder) as file:
                got = len(first.data)
                await self._reading.blocking(file.write, first.data)
                async for part in requests:
                    got += len(part.data)
                    if got > first.size:
                        break
                    await self._reading.blocking(file.write, part.data)
                if got != first.size:
                    raise InputError("shard has another size than was announced", field="size", found=got,
                                     expected=first.size)  # fmt: skip
                file.flush()
                return await self._reading.blocking(_store, session.end, first, file.fileno())
        except OSError as error:
            kind = StoreFullError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StoreError
            raise kind("cannot keep a shard on its way", field=str(self._folder), found=error.strerror,
                       do="free space where cache_dir is") from error  # fmt: skip


def _store(end: PublisherEnd, first: service_pb2.PutShardRequest, file: int) -> manifest_pb2.ShardRef:
    """In a thread; the file is mapped, not read into memory."""
    if not first.size:
        return end.put_shard(first.number, ShardBytes(first.label, first.session.rank, first.form, b""))
    with mmap.mmap(file, first.size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        head, body = bytes(view[: first.head_size]), view[first.head_size :]
        try:
            shard = ShardBytes(first.label, first.session.rank, first.form, head, [body])
            return end.put_shard(first.number, shard)
        finally:
            body.release()
