"""What a relay passes on: acknowledgements and leases summed up, wants once, trajectories through a spool on disk.

Owns the site's replicas as the server far away sees them: one. Owns no reading (reading.py, blobs.py).
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from weight_sync.config import Config
from weight_sync.errors import CorruptionError, InboxFullError, InputError, LineageError, WeightSyncError
from weight_sync.ports import PublisherEnd
from weight_sync.proto.v1 import replica_pb2, service_pb2, trajectory_pb2
from weight_sync.transport.file.inbox import Inbox as Spooled
from weight_sync.transport.file.inbox import Outbox
from weight_sync.transport.file.store import Store
from weight_sync.transport.grpc.reading import Reading
from weight_sync.transport.grpc.returns import Receipts, Returns

__all__ = ["RelayReturns", "is_news", "relay_name", "summary", "told_in"]

_FORWARD_S = 0.25  # longest time that an acknowledgement which is news waits for others
_COUNTS_S = 10.0  # longest time that mere counts wait: the trainer need not hear of every replica of a site
_WANT_S = 1.0  # what one replica has asked for since need not be asked for by the next
_FORGET_S = 600.0
_BATCH = 256
_MOST_SPOOLED = 200_000
_PAUSE_S = 1.0
_log = logging.getLogger("weight_sync.grpc")


@dataclass
class _Child:
    """One replica of the site."""

    seen: float = 0.0
    ack: replica_pb2.Acknowledgement | None = None
    leased: int | None = None
    lease_ends: float = 0.0
    wants: int | None = None


@dataclass
class _Site:
    """The replicas that follow one run."""

    children: dict[str, _Child] = field(default_factory=dict)
    changed_at: float | None = None  # when the first acknowledgement came that the far side has not heard of
    told: replica_pb2.Acknowledgement | None = None
    lease_sent: tuple[int, float] = (-1, 0.0)
    leasing: asyncio.Task[None] | None = None  # the one renewal under way, for all who need it
    wanted: dict[int, float] = field(default_factory=dict)  # when each version was last asked for

    def needed(self) -> int | None:
        """The oldest version that a replica has leased."""
        now = time.monotonic()
        leased = (c.leased for c in self.children.values() if c.leased is not None and c.lease_ends > now)
        return min(leased, default=None)


def summary(
    relay_id: str, children: Iterable[replica_pb2.Acknowledgement], fetched_bytes: int
) -> replica_pb2.Acknowledgement:
    """Acknowledgements of a site as one: it serves the oldest version that any of its replicas serves. Pure.

    One that has closed serves nothing: it is counted, and speaks for the site only where all have.
    """
    children = list(children)
    closed = replica_pb2.REPLICA_STATE_CLOSED
    gone = all(ack.state == closed for ack in children)
    told = replica_pb2.Acknowledgement(replica_id=relay_id, state=replica_pb2.REPLICA_STATE_ATTACHING)
    groups: dict[tuple[str, int | None, int], replica_pb2.Followers] = {}
    oldest: replica_pb2.Acknowledgement | None = None
    for ack in children:
        number = ack.version.number if ack.HasField("version") else None
        key = (ack.version.run_id, number, int(ack.state))
        group = groups.get(key)
        if group is None:
            group = groups[key] = replica_pb2.Followers(state=ack.state)
            if number is not None:
                group.version.CopyFrom(ack.version)
        group.count += 1
        if ack.error:
            group.error = ack.error
        if ack.state == closed and not gone:
            continue
        if number is not None and (oldest is None or number < oldest.version.number):
            oldest = ack
        if ack.error:
            told.error = ack.error
        for phase in ("fetch", "decode", "pause", "apply", "verify"):
            slowest = max(getattr(told.timings, phase), getattr(ack.timings, phase))
            setattr(told.timings, phase, slowest)
    if oldest is not None:
        told.version.CopyFrom(oldest.version)
        told.digest.CopyFrom(oldest.digest)
        told.view, told.state = oldest.view, oldest.state
    told.followers.extend(groups[key] for key in sorted(groups, key=str))
    told.fetched_bytes = fetched_bytes
    told.sent_unix_ms = time.time_ns() // 1_000_000
    return told


def is_news(before: replica_pb2.Acknowledgement | None, told: replica_pb2.Acknowledgement) -> bool:
    """Whether the trainer should hear of it at once: the site's oldest version moved, or an error came or went. Pure."""
    if before is None:
        return True
    return (before.HasField("version"), before.version, before.digest, before.error) != (
        told.HasField("version"), told.version, told.digest, told.error
    )  # fmt: skip


def told_in(
    before: replica_pb2.Acknowledgement | None, told: replica_pb2.Acknowledgement, changed_at: float, now: float
) -> float:
    """Seconds until the trainer should hear ``told``, of which the first change came at ``changed_at``. Pure.

    Counts of one change are told together, however long ago the trainer was last told anything.
    """
    return 0.0 if is_news(before, told) else max(0.0, changed_at + _COUNTS_S - now)


def relay_name(host: str, port: int, process: int) -> str:
    """The name of a relay that was given none: of a machine's relays each has its own, and keeps it over restarts where it
    listens at a port that was chosen. Two of one name would overwrite each other's lease, and what one still reads could
    be collected. Pure.
    """
    plain = re.sub(r"[^A-Za-z0-9-]", "-", host).strip("-")[:64] or "host"
    return f"relay-{plain}-{port or f'p{process}'}"


class RelayReturns(Returns):
    """Children's leases and acknowledgements are this relay's own; the far side hears of one replica, now and then."""

    def __init__(self, reading: Reading, config: Config, spool: Path) -> None:
        self._reading = reading
        assert config.replica_id is not None, "a relay has a name"
        self.relay_id = config.replica_id
        self._ttl_s = config.lease_ttl_s
        self._sites: dict[str, _Site] = {}
        self._fresh = asyncio.Event()
        self._store = Store(config.replace(backend="file", uri=str(spool), store=None, store_options={}))
        self._boxes: dict[str, tuple[Outbox, Spooled]] = {}
        self._put = asyncio.Lock()
        self._spooled = 0
        self._arrived = asyncio.Event()
        self._tasks = [reading.loop.create_task(self._forward()), reading.loop.create_task(self._deliver())]
        for folder in spool.iterdir() if spool.is_dir() else ():
            self._box(folder.name)  # of an earlier process
            self._arrived.set()

    # --- replicas ---

    def _child(self, run_id: str, replica_id: str) -> _Child:
        site = self._sites.setdefault(run_id, _Site())
        child = site.children.setdefault(replica_id, _Child())
        child.seen = time.monotonic()
        return child

    async def lease(self, run_id: str, replica_id: str, number: int, ttl_s: int) -> None:
        child = self._child(run_id, replica_id)
        child.leased, child.lease_ends = number, time.monotonic() + ttl_s
        await self._lease(run_id, self._sites[run_id])

    async def release(self, run_id: str, replica_id: str) -> None:
        self._child(run_id, replica_id).leased = None

    async def want(self, run_id: str, replica_id: str, number: int) -> None:
        self._child(run_id, replica_id).wants = number
        wanted, now = self._sites[run_id].wanted, time.monotonic()
        if now - wanted.get(number, -_WANT_S) < _WANT_S:
            return  # for this one, too; one that still wants it asks again
        for old in [n for n, at in wanted.items() if now - at >= _WANT_S]:
            del wanted[old]
        wanted[number] = now
        try:
            await self._reading.use(run_id, lambda end: end.want(self.relay_id, number))
        except WeightSyncError:
            wanted.pop(number, None)
            raise

    async def acknowledge(self, run_id: str, message: replica_pb2.Acknowledgement) -> None:
        child = self._child(run_id, message.replica_id)
        child.ack = message
        if message.state == replica_pb2.REPLICA_STATE_SERVING:
            child.wants = None
            if child.leased is None and message.HasField("version"):  # this relay is new, and the replica renews later
                child.leased, child.lease_ends = message.version.number, time.monotonic() + self._ttl_s
        site = self._sites[run_id]
        if site.changed_at is None:
            site.changed_at = time.monotonic()
        self._fresh.set()

    async def fleet(self, run_id: str, publisher: PublisherEnd | None) -> service_pb2.Fleet:
        fleet = service_pb2.Fleet(run_id=run_id)
        now = time.monotonic()
        site = self._sites.get(run_id, _Site())
        for replica_id in sorted(site.children):
            child = site.children[replica_id]
            row = fleet.replicas.add(replica_id=replica_id, acknowledgement=child.ack)
            if child.leased is not None and child.lease_ends > now:
                row.leased = child.leased
            if child.wants is not None:
                row.wants = child.wants
        return fleet

    async def _lease(self, run_id: str, site: _Site) -> None:
        """The oldest version that a child needs is the one that the relay needs. One call, however many wait for it."""
        while (number := site.needed()) is not None:
            sent, at = site.lease_sent
            if sent == number and time.monotonic() - at < self._ttl_s / 3:
                return
            if site.leasing is None:
                site.leasing = self._reading.loop.create_task(self._renew(run_id, site, number))
            await asyncio.shield(site.leasing)

    async def _renew(self, run_id: str, site: _Site, number: int) -> None:
        now = time.monotonic()
        try:
            await self._reading.use(run_id, lambda end: end.lease(self.relay_id, number, self._ttl_s))
            site.lease_sent = (number, now)
        finally:
            site.leasing = None

    async def _forward(self) -> None:
        """Acknowledgements, each look at the sites at least _FORWARD_S after the one before."""
        wait = self._ttl_s / 3
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._fresh.wait(), wait)
            self._fresh.clear()
            wait = self._ttl_s / 3
            for run_id, site in list(self._sites.items()):
                try:
                    wait = min(wait, await self._tell(run_id, site) or wait)
                except WeightSyncError:  # the far side is away: the next round tells everything
                    wait = min(wait, _PAUSE_S)
            await asyncio.sleep(_FORWARD_S)

    async def _tell(self, run_id: str, site: _Site, last: bool = False) -> float | None:
        """Tells news at once, mere counts once for all that came within _COUNTS_S. Returns the seconds until they are due."""
        now = time.monotonic()
        site.children = {
            name: child for name, child in site.children.items()
            if now - child.seen < _FORGET_S or child.lease_ends > now
        }  # fmt: skip
        await self._lease(run_id, site)
        changed_at = site.changed_at
        if changed_at is None:
            return None
        told = summary(self.relay_id, [child.ack for child in site.children.values() if child.ack is not None], 0)
        due = told_in(site.told, told, changed_at, now)
        if due > 0 and not last:
            return due
        site.changed_at = None  # what comes while this is on its way has not been told
        try:
            await self._reading.use(run_id, lambda end: end.acknowledge(told))
        except WeightSyncError:
            site.changed_at = changed_at
            raise
        site.told = told
        return None

    # --- trajectories ---

    def _box(self, run_id: str) -> tuple[Outbox, Spooled]:
        if run_id not in self._boxes:
            self._boxes[run_id] = (Outbox(self._store, run_id, "relay"), Spooled(self._store, run_id))
        return self._boxes[run_id]

    async def trajectories(self, run_id: str, batch: Sequence[trajectory_pb2.Trajectory]) -> Receipts:
        """Durable in the spool on return; delivered from there, across restarts of both sides."""
        if self._spooled >= _MOST_SPOOLED:
            raise InboxFullError("the relay's spool is full", 5.0, field="trajectories", found=self._spooled,
                                 do="wait until the trainer takes more")  # fmt: skip
        async with self._put:
            receipts = await self._reading.blocking(self._box(run_id)[0].send, batch)
        self._spooled += sum(not receipt.duplicate for receipt in receipts)
        self._arrived.set()
        return receipts

    async def _deliver(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            for run_id in list(self._boxes):
                await self._drain(run_id)

    async def _drain(self, run_id: str) -> None:
        """Everything in one spool; what was handed over is deleted by the next look into it, never before."""
        spooled = self._box(run_id)[1]
        while True:
            try:
                batch = await self._reading.blocking(spooled.take, _BATCH)
            except CorruptionError:
                continue  # set aside, and told by the store
            except WeightSyncError:
                await asyncio.sleep(_PAUSE_S)
                continue
            if not batch:
                return
            await self._hand_over(run_id, batch)
            self._spooled = max(0, self._spooled - len(batch))

    async def _hand_over(self, run_id: str, batch: Sequence[trajectory_pb2.Trajectory]) -> None:
        """Until the far side has them, or refuses one for good: that one is dropped, and told, and holds up nobody."""
        while True:
            try:
                await self._reading.use(run_id, lambda end: end.send_trajectories(batch))
                return
            except InboxFullError as full:
                await asyncio.sleep(full.retry_after_s)
            except (InputError, LineageError) as error:
                if len(batch) == 1:
                    _log.warning("trajectory %r was refused and is dropped: %s", batch[0].id, error)
                    return
                for one in batch:
                    await self._hand_over(run_id, [one])
                return
            except WeightSyncError:
                await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for run_id, site in self._sites.items():
            with suppress(WeightSyncError):  # the last word, if the far side is there
                await self._tell(run_id, site, last=True)
