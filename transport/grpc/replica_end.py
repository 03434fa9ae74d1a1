"""A reader's end over gRPC: following a run, reading shards and folds, and the other direction.

Owns the watching and the resumption of reads. Owns no decision of a replica and no connection (client.py).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from weight_sync.config import Config
from weight_sync.cutting import regions_to
from weight_sync.errors import CorruptionError, InputError, StoreUnavailableError, VersionMissingError
from weight_sync.history import table_of, view_of
from weight_sync.layout.box import Regions
from weight_sync.ports import Folded, ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, service_pb2, trajectory_pb2
from weight_sync.transport.grpc.ahead import Ahead
from weight_sync.transport.grpc.client import Client
from weight_sync.transport.grpc.parts import Parts
from weight_sync.transport.grpc.telemetry import span
from weight_sync.transport.grpc.watching import Look, Watcher

__all__ = ["GrpcReplicaEnd"]

_PART = 1 << 20  # a read is spread over connections when each gets at least this much
_PAGE = 64  # entries in one call, at most; most readers want the first one only
_BATCH = 4 << 20  # bytes of trajectories in one message
_OBJECT = re.compile(r"data/[0-9]{20}/[A-Za-z0-9][A-Za-z0-9._-]{0,400}\.safetensors")


class GrpcReplicaEnd(ReplicaEnd):
    """A reader's end. ``read`` may run in several threads; the rest belongs to one.

    Follows one run for life: the named one, else the newest when it first looked.
    """

    def __init__(self, client: Client, config: Config, run_id: str | None) -> None:
        self._client = client
        self._config = config
        self._run = run_id if run_id is not None else config.run_id
        self._known = False  # whether the server has confirmed the run
        self._watcher: Watcher | None = None
        self._pushed: list[Look] = []  # what a wait has just told, for one newest_run and one head
        self._fetched = 0
        self._reached: tuple[str, int, common_pb2.Form] | None = None  # the last fold that was read
        self._ahead: Ahead | None = None
        self._lock = threading.Lock()
        self._parallel: ThreadPoolExecutor | None = None

    # --- the run ---

    def _look(self) -> Look:
        info = self._client.again("GetRun", service_pb2.RunRequest(run_id=self._run or ""))
        look = Look.of(info)
        if look.run_id is not None:
            self._run, self._known = look.run_id, True
        return look

    def run_id(self) -> str:
        """The run that is followed; never changes once known. Raises VersionMissingError while there is none."""
        if not self._known:
            look = self._look()
            if look.run_id is None:
                raise VersionMissingError(
                    "the server holds no such run" if self._run is not None else "the server holds no run",
                    field=str(self._client.address), found=look.newest_run, expected=self._run or "a run",
                    do="start the publisher, or correct weight_sync.uri and weight_sync.run_id",
                )  # fmt: skip
        assert self._run is not None
        return self._run

    def newest_run(self) -> str | None:
        """The server's newest run now; None while there is none."""
        pushed = self._take_pushed("newest_run")
        return (pushed or self._look()).newest_run

    def head(self) -> int | None:
        """Number of the newest version; None while there is none."""
        pushed = self._take_pushed("head")
        return (pushed or self._look()).head

    def _take_pushed(self, what: str) -> Look | None:
        """What the last wait was told stands for the look that would follow it, once; on a long link that is a round trip."""
        if self._pushed and self._pushed[0].fresh(what):
            return self._pushed[0]
        self._pushed.clear()
        return None

    # --- the log ---

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """Version ``number``. Raises VersionMissingError, VersionExpiredError, CorruptionError."""
        run = self.run_id()
        pushed = self._watcher.manifest(number) if self._watcher is not None else None
        if pushed is not None:
            return pushed
        found = self._client.again("GetEntry", service_pb2.EntryRequest(run_id=run, number=number))
        return self._checked(found, number)

    def _checked(self, found: manifest_pb2.VersionManifest, number: int) -> manifest_pb2.VersionManifest:
        if (found.run_id, found.number) != (self.run_id(), number):
            raise CorruptionError("entry is not the one that was asked for", field=str(self._client.address),
                                  found=f"{found.run_id}/{found.number}", expected=f"{self.run_id()}/{number}",
                                  do="do not trust this server")  # fmt: skip
        return found

    def entries(self, first: int = 0) -> Iterator[manifest_pb2.VersionManifest]:
        """All entries from ``first`` on, in order, EPOCH, ABORTED and EXPIRED ones too."""
        run, number, limit = self.run_id(), first, 1
        while True:
            request = service_pb2.EntriesRequest(run_id=run, first=number, limit=limit)
            page = list(self._client.stream("Entries", request))
            yield from (self._checked(found, number + k) for k, found in enumerate(page))
            if len(page) < limit:
                return
            number += len(page)
            limit = min(2 * limit, _PAGE)

    def wait(self, after: int | None, timeout: float) -> int | None:
        """The newest version above ``after`` (None: any), waiting up to ``timeout`` seconds; None when none came.

        The server pushes; nothing is polled. While the server cannot be reached, raises StoreUnavailableError at the
        limit.
        """
        self._pushed.clear()
        if timeout <= 0:
            head = self._look().head
            return head if head is not None and (after is None or head > after) else None
        if self._watcher is not None and self._known and self._watcher.run_id not in ("", self._run):
            self._watcher.close()  # it met a run that began after ours was chosen
            self._watcher = None
        if self._watcher is None:
            self._watcher = Watcher(self._client, self._run or "")
        self._look_ahead(after)
        look = self._watcher.wait(after, timeout)
        if look is None:
            return None
        if look.run_id is not None:
            self._run, self._known = look.run_id, True
        self._pushed.append(look)
        return look.head if look.head is not None and (after is None or look.head > after) else None

    # --- objects ---

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        """``length`` bytes of a shard from ``offset``; their hash is the caller's to check."""
        if not _OBJECT.fullmatch(ref.object) or ".." in ref.object:
            raise CorruptionError("shard outside its version's folder", field="object", found=ref.object)
        if offset < 0 or length < 0 or offset + length > ref.size:
            raise CorruptionError("range leaves the shard", field=ref.object, found=f"[{offset}, {offset + length})",
                                  expected=f"[0, {ref.size})")  # fmt: skip
        if not length:
            return memoryview(b"")
        named = manifest_pb2.ShardRef(object=ref.object, size=ref.size)
        request = service_pb2.FetchRequest(run_id=self.run_id(), object=named, offset=offset, length=length)
        parts = max(1, min(self._client.connections, length // _PART))
        buffer = memoryview(bytearray(length))
        cuts = [length * k // parts for k in range(parts + 1)]

        def one(k: int) -> None:
            mine = service_pb2.FetchRequest()
            mine.CopyFrom(request)
            mine.offset, mine.length = offset + cuts[k], cuts[k + 1] - cuts[k]
            done = self._client.fetch(mine, _filler(buffer[cuts[k] : cuts[k + 1]], ref.object), k)
            if done != cuts[k + 1] - cuts[k]:
                raise CorruptionError("shard is shorter than its manifest says", field=ref.object,
                                      found=f"{offset + cuts[k] + done} bytes", expected=f"{ref.size} bytes")  # fmt: skip

        self._spread(one, parts)
        self._count(length)
        return buffer

    def fold(
        self, view: str, have: int, target: int, compact: bool = False, regions: Regions | None = None
    ) -> Folded | None:
        """One object that leads from ``have`` to ``target``, made or chosen by the server; None when it has none."""
        ahead, self._ahead = self._ahead, None
        self._reached = None
        with span("fetch", self.run_id(), target, have=have):
            if regions is not None:
                return self._fold(view, have, target, common_pb2.FORM_STEP, regions)
            form = common_pb2.FORM_COMPACT if compact else common_pb2.FORM_STEP
            offered = None if ahead is None else ahead.take(view, have, target, form, self._client.timeout_s)
            if offered is not None:
                self._count(len(offered.data))
            offered = offered or self._fold(view, have, target, form, {})
        if offered is not None:
            self._reached = (view, target, form)
        return offered

    def _fold(self, view: str, have: int, target: int, form: common_pb2.Form, regions: Regions) -> Folded | None:
        fold = service_pb2.FoldRequest(view=view, have=have, target=target, form=form)
        if regions:
            fold.regions.extend(regions_to(regions, table_of(view_of(self.manifest(target), view))))
        parts = self._client.connections
        made = Parts(self._config.staging_bytes, f"fold {have} to {target}")

        def one(k: int) -> None:
            request = service_pb2.FetchRequest(run_id=self.run_id(), fold=fold, part=k, parts=parts)
            made.arrived(self._client.fetch(request, made.filler(), k))

        self._spread(one, parts)
        if made.absent:
            return None
        self._count(len(made.whole()))
        return Folded(made.whole(), made.stored)

    def _look_ahead(self, after: int | None) -> None:
        """Asks for what leads on from ``after`` before it is there, when that was the last thing that was read."""
        if self._ahead is None and self._reached is not None and self._reached[1] == after:
            (view, have, form), self._reached = self._reached, None  # once: when it fails, `fold` asks
            self._ahead = Ahead(self._client, self.run_id(), view, have, form, self._config.staging_bytes)

    def _spread(self, one: Any, parts: int) -> None:
        if parts == 1:
            one(0)
            return
        with self._lock:
            if self._parallel is None:
                self._parallel = ThreadPoolExecutor(4 * self._client.connections, "weight_sync-fetch")
        for future in [self._parallel.submit(one, k) for k in range(parts)]:
            future.result()

    def _count(self, size: int) -> None:
        with self._lock:
            self._fetched += size

    # --- the other direction ---

    def lease(self, replica_id: str, number: int, ttl_s: int) -> None:
        """Keeps ``number`` and what it needs while renewed."""
        version = common_pb2.VersionId(run_id=self.run_id(), number=number)
        self._client.again("Heartbeat", replica_pb2.Lease(replica_id=replica_id, version=version, ttl_s=ttl_s))

    def release(self, replica_id: str) -> None:
        """Drops the lease."""
        self._client.again("Release", service_pb2.ReplicaRequest(run_id=self.run_id(), replica_id=replica_id))

    def want(self, replica_id: str, number: int) -> None:
        """Asks the publisher to ship the bits of anchor ``number``."""
        version = common_pb2.VersionId(run_id=self.run_id(), number=number)
        self._client.again("Want", replica_pb2.Lease(replica_id=replica_id, version=version))

    def register(self, replica_id: str, description: replica_pb2.EngineDescription, ttl_s: int) -> None:
        """Tells the server what engine this is, for whoever looks at the fleet."""
        self._client.again("Register", service_pb2.RegisterRequest(
            replica_id=replica_id, run_id=self.run_id(), description=description, ttl_s=ttl_s))  # fmt: skip

    def acknowledge(self, message: replica_pb2.Acknowledgement) -> None:
        """Tells the trainer what this replica serves, and what it read for that."""
        told = replica_pb2.Acknowledgement()
        told.CopyFrom(message)
        with self._lock:
            if not told.fetched_bytes:
                told.fetched_bytes, self._fetched = self._fetched, 0
        request = service_pb2.AcknowledgeRequest(run_id=self.run_id(), acknowledgement=told)
        with span("acknowledge", self.run_id(), told.version.number, replica_id=told.replica_id):
            self._client.again("Acknowledge", request)

    def send_trajectories(self, batch: Sequence[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.TrajectoryReceipt]:
        """Hands trajectories to the trainer; a receipt means that they are in its inbox durably.

        Sent again by the caller after an error: those that had arrived come back as duplicates. Raises InboxFullError
        when the trainer is behind.
        """
        for index, trajectory in enumerate(batch):
            if not trajectory.id:
                raise InputError("trajectory without id", field=f"batch[{index}].id", do="give each a unique id")
        run = self.run_id()
        requests = (
            service_pb2.TrajectoriesRequest(run_id=run, batch=trajectory_pb2.TrajectoryBatch(trajectories=part))
            for part in _split(batch)
        )
        receipts = [r for reply in self._client.stream("ReturnTrajectories", requests) for r in reply.receipts]
        if [receipt.id for receipt in receipts] != [trajectory.id for trajectory in batch]:
            raise StoreUnavailableError("the server acknowledged other trajectories than were sent",
                                        field=str(self._client.address), found=len(receipts), expected=len(batch),
                                        do="send them again")  # fmt: skip
        return receipts

    def close(self) -> None:
        """Ends a wait in another thread, and the connections."""
        if self._watcher is not None:
            self._watcher.close()
        if self._ahead is not None:
            self._ahead.cancel()
        self._client.close()
        if self._parallel is not None:
            self._parallel.shutdown(wait=False)


def _filler(buffer: memoryview, name: str) -> Any:
    def fill(at: int, data: memoryview, message: service_pb2.Chunk | None) -> None:
        if at + len(data) > len(buffer):
            raise CorruptionError("the server sent more than was asked for", field=name, found=at + len(data))
        buffer[at : at + len(data)] = data

    return fill


def _split(batch: Sequence[trajectory_pb2.Trajectory]) -> Iterator[list[trajectory_pb2.Trajectory]]:
    """Parts of about one message."""
    part: list[trajectory_pb2.Trajectory] = []
    size = 0
    for trajectory in batch:
        part.append(trajectory)
        size += trajectory.ByteSize()
        if size >= _BATCH:
            yield part
            part, size = [], 0
    if part:
        yield part
