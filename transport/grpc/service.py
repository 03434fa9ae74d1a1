"""The service: each call, put together from what the other rooms of this transport do.

Owns what a call answers. Owns no authentication and no limit (server.py has seen to both before a call gets here), no
store and no connection. Errors of ours go up; server.py makes them a status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from weight_sync.config import check_name
from weight_sync.errors import CorruptionError, InputError
from weight_sync.ports import PublisherEnd, ReplicaEnd
from weight_sync.proto.v1 import events_pb2, manifest_pb2, replica_pb2, service_pb2, trajectory_pb2
from weight_sync.transport.grpc.blobs import Blob
from weight_sync.transport.grpc.folds import Folds
from weight_sync.transport.grpc.metrics import Metrics
from weight_sync.transport.grpc.publishing import FATES, Publishing
from weight_sync.transport.grpc.reading import Reading
from weight_sync.transport.grpc.returns import Registered, Returns
from weight_sync.transport.grpc.wire import CHUNK, write_chunk

__all__ = ["Service"]

_MOST_PARTS = 256
_MOST_REGIONS = 1 << 20
_ENTRIES = 16  # read from the log at a time


class Service:
    """The calls of ``weight_sync.v1.WeightSync``, by name.

    Args:
        publishing: None where nobody may publish: a relay.
    """

    def __init__(
        self,
        reading: Reading,
        folds: Folds,
        returns: Returns,
        publishing: Publishing | None,
        open_end: Callable[[str], ReplicaEnd],
        metrics: Metrics,
    ) -> None:
        self._reading, self._folds, self._returns, self._publishing = reading, folds, returns, publishing
        self._open_end = open_end
        self._registered = Registered()
        self._events: dict[tuple[str, bool], tuple[int, bytes]] = {}  # of the version told last, by run and kind
        self.metrics = metrics

    # --- reading ---

    async def GetRun(self, request: service_pb2.RunRequest, context: Any) -> service_pb2.RunInfo:
        if request.run_id:
            check_name("run_id", request.run_id)
        return await self._reading.look(request.run_id)

    async def GetEntry(self, request: service_pb2.EntryRequest, context: Any) -> bytes:
        run = await self._run(request.run_id)
        return (await self._reading.known(run, request.number, current=True)).data

    async def Entries(
        self, request: service_pb2.EntriesRequest, context: Any
    ) -> AsyncIterator[manifest_pb2.VersionManifest]:
        run = await self._run(request.run_id)
        number, left = request.first, request.limit or 1 << 63
        while left > 0:
            page = await self._reading.entries(run, number, min(left, _ENTRIES))
            for entry in page:
                yield entry
            number, left = number + len(page), left - len(page)
            if len(page) < _ENTRIES:
                return

    async def Watch(self, request: service_pb2.WatchRequest, context: Any) -> AsyncIterator[events_pb2.Event | bytes]:
        """Where the run stands, then what is new; a slow watcher gets the newest version and none of those between."""
        if request.run_id:
            check_name("run_id", request.run_id)
        told: str | None = None
        run = (await self._reading.look(request.run_id)).run_id
        while not run:
            news = self._reading.news()
            state = news.state
            run = (await self._reading.look(request.run_id)).run_id
            if not run:
                if told != (state.newest or ""):
                    told = state.newest or ""
                    yield _started(told)
                await news.changed(state)
        feed = self._reading.feed(run)
        info = await self._reading.look(run)
        head = request.after if request.HasField("after") else None
        with self.metrics.watcher():
            while True:
                state = feed.state
                newest = state.newest or info.newest_run
                now = max((n for n in (state.head, info.head if info.HasField("head") else None) if n is not None),
                          default=None)  # fmt: skip
                if newest != told:
                    told = newest
                    yield _started(newest)
                if now is not None and (head is None or now > head):
                    head = now
                    yield await self._committed(run, now, request.manifests)
                await feed.changed(state)

    async def _committed(self, run: str, number: int, with_manifest: bool) -> bytes:
        """The event of a version, encoded once for all who watch."""
        made = self._events.get((run, with_manifest))
        if made is not None and made[0] == number:
            return made[1]
        known = (await self._reading.known(run, number)).manifest
        entry = events_pb2.EntryCommitted(kind=known.kind, epoch=known.epoch)
        entry.version.run_id, entry.version.number = run, number
        if known.HasField("parent"):
            entry.parent = known.parent
        if with_manifest:
            entry.manifest.CopyFrom(known)
        data = events_pb2.Event(entry_committed=entry).SerializeToString()
        self._events[run, with_manifest] = (number, data)
        return data

    async def Fetch(self, request: service_pb2.FetchRequest, context: Any) -> AsyncIterator[bytes]:
        run = await self._run(request.run_id)
        first = service_pb2.Chunk()
        if request.HasField("fold"):
            if request.fold.next:
                request.fold.target = first.target = await self._after(run, request.fold.have)
            blob = await self._fold(run, request.fold, first)
            if blob is None:
                first.absent = True
                yield first.SerializeToString()
                return
        else:
            blob = await self._reading.open(run, await self._reading.ref(run, request.object.object))
        try:
            begin, end = _part(request, blob.size)
            at, end = _range(request, begin, end)
            if request.HasField("fold"):
                first.size, first.start = blob.size, at
                yield first.SerializeToString()
            with self.metrics.sending():
                while at < end:
                    data = await blob.read(at, min(CHUNK, end - at))
                    at += len(data)
                    self.metrics.sent_bytes += len(data)
                    yield write_chunk(data)
        finally:
            blob.close()

    async def _after(self, run: str, have: int) -> int:
        """The newest version, once there is one above ``have``."""
        feed = self._reading.feed(run)
        info = await self._reading.look(run)
        head = info.head if info.HasField("head") else None
        with self.metrics.expected():
            while head is None or head <= have:
                state = feed.state
                head = state.head
                if head is None or head <= have:
                    await feed.changed(state)
        return head

    async def _fold(self, run: str, request: service_pb2.FoldRequest, first: service_pb2.Chunk) -> Blob | None:
        check_name("view", request.view)
        if request.have >= request.target:
            raise InputError("nothing to fold", field="have, target", found=(request.have, request.target))
        if len(request.regions) > _MOST_REGIONS:
            raise InputError("too many regions", field="regions", found=len(request.regions), expected=_MOST_REGIONS)
        choice, blob = await self._folds.get(lambda: self._open_end(run), run, request)
        if choice.stored is None:
            return blob
        first.stored.CopyFrom(choice.stored)
        return await self._reading.open(run, choice.stored)

    async def _run(self, run_id: str) -> str:
        if run_id:
            check_name("run_id", run_id)
        return await self._reading.run(run_id)

    # --- replicas ---

    async def Register(self, request: service_pb2.RegisterRequest, context: Any) -> service_pb2.RegisterReply:
        run = await self._run(request.run_id)
        check_name("replica_id", request.replica_id)
        await self._check_contract(run, request)
        self._registered.note(run, request.replica_id, request.description, request.ttl_s)
        return service_pb2.RegisterReply(ttl_s=request.ttl_s)

    async def _check_contract(self, run: str, request: service_pb2.RegisterRequest) -> None:
        """An engine that does not compute as the newest version's terms demand is not registered: ContractError."""
        info = await self._reading.look(run)
        if info.HasField("head"):
            manifest = (await self._reading.known(run, info.head)).manifest
            self._registered.check(request.replica_id, request.description.contract, manifest)

    async def Heartbeat(self, request: replica_pb2.Lease, context: Any) -> service_pb2.Done:
        run = await self._run(request.version.run_id)
        check_name("replica_id", request.replica_id)
        await self._returns.lease(run, request.replica_id, request.version.number, request.ttl_s)
        return service_pb2.Done()

    async def Release(self, request: service_pb2.ReplicaRequest, context: Any) -> service_pb2.Done:
        run = await self._run(request.run_id)
        await self._returns.release(run, check_name("replica_id", request.replica_id))
        return service_pb2.Done()

    async def Want(self, request: replica_pb2.Lease, context: Any) -> service_pb2.Done:
        run = await self._run(request.version.run_id)
        await self._returns.want(run, check_name("replica_id", request.replica_id), request.version.number)
        return service_pb2.Done()

    async def Acknowledge(self, request: service_pb2.AcknowledgeRequest, context: Any) -> service_pb2.Done:
        run = await self._run(request.run_id)
        check_name("replica_id", request.acknowledgement.replica_id)
        await self._returns.acknowledge(run, request.acknowledgement)
        self.metrics.acknowledged(request.acknowledgement)
        return service_pb2.Done()

    async def GetFleet(self, request: service_pb2.FleetRequest, context: Any) -> service_pb2.Fleet:
        run = await self._run(request.run_id)
        publisher: PublisherEnd | None = None
        if request.HasField("session") and self._publishing is not None:
            publisher = self._publishing.end(request.session).end
        fleet = await self._returns.fleet(run, publisher)
        info = await self._reading.look(run)
        if info.HasField("head"):
            fleet.head = info.head
        self._registered.add_to(fleet)
        return fleet

    async def ReturnTrajectories(
        self, requests: AsyncIterator[service_pb2.TrajectoriesRequest], context: Any
    ) -> AsyncIterator[service_pb2.TrajectoryReceipts]:
        """A receipt per trajectory, in order, once it is durable."""
        async for request in requests:
            run = await self._run(request.run_id)
            batch = list(request.batch.trajectories)
            receipts = await self._returns.trajectories(run, batch)
            self.metrics.trajectories += len(receipts)
            yield service_pb2.TrajectoryReceipts(receipts=receipts)

    # --- publishing ---

    def _may_publish(self) -> Publishing:
        if self._publishing is None:
            raise InputError("nobody publishes through a relay", field="uri", do="publish to the trainer's own server")
        return self._publishing

    async def OpenRun(self, request: service_pb2.OpenRunRequest, context: Any) -> service_pb2.PublisherSession:
        return await self._may_publish().open_run(request)

    async def PutShard(
        self, requests: AsyncIterator[service_pb2.PutShardRequest], context: Any
    ) -> manifest_pb2.ShardRef:
        return await self._may_publish().put_shard(requests)

    async def Commit(self, request: service_pb2.CommitRequest, context: Any) -> service_pb2.Done:
        await self._may_publish().commit(request)
        return service_pb2.Done()

    async def Abort(self, request: service_pb2.NumberRequest, context: Any) -> service_pb2.FateReply:
        fate = await self._may_publish().use(request.session, lambda end: end.abort(request.number, request.reason))
        return service_pb2.FateReply(fate=FATES[fate])

    async def GetFate(self, request: service_pb2.NumberRequest, context: Any) -> service_pb2.FateReply:
        fate = await self._may_publish().use(request.session, lambda end: end.fate(request.number))
        return service_pb2.FateReply(fate=FATES[fate])

    async def NextNumber(self, request: service_pb2.NumberRequest, context: Any) -> service_pb2.NumberReply:
        number = await self._may_publish().use(request.session, lambda end: end.next_number())
        return service_pb2.NumberReply(number=number)

    async def TakeTrajectories(self, request: service_pb2.TakeRequest, context: Any) -> trajectory_pb2.TrajectoryBatch:
        return trajectory_pb2.TrajectoryBatch(trajectories=await self._may_publish().take(request))

    async def Collect(self, request: service_pb2.RunRequest, context: Any) -> service_pb2.Counts:
        counts = await self._may_publish().collect(await self._run(request.run_id))
        return service_pb2.Counts(counts=counts)


def _started(run_id: str) -> events_pb2.Event:
    return events_pb2.Event(run_started=events_pb2.RunStarted(run=manifest_pb2.RunRecord(run_id=run_id)))


def _part(request: service_pb2.FetchRequest, size: int) -> tuple[int, int]:
    """First and last byte plus one of the part of an object that is asked for."""
    parts = request.parts or 1
    if parts > _MOST_PARTS or request.part >= parts:
        raise InputError("no such part", field="part", found=f"{request.part} of {parts}", expected=_MOST_PARTS)
    return size * request.part // parts, size * (request.part + 1) // parts


def _range(request: service_pb2.FetchRequest, begin: int, end: int) -> tuple[int, int]:
    """The bytes of the part that are asked for. Raises CorruptionError when they leave it."""
    at = begin + request.offset
    stop = at + request.length if request.HasField("length") else end
    if at > end or stop > end:
        raise CorruptionError("shard is shorter than its manifest says", field=request.object.object or "fold",
                              found=f"{end - begin} bytes", expected=f"{stop - begin} bytes",
                              do="restore the object from a copy of the store, or wait for the next anchor")  # fmt: skip
    return at, stop
