"""What replicas tell: leases, wants, acknowledgements, descriptions, trajectories, on their way to the trainer.

Owns where they go: into the store that is served (here), or summed up to a server far away (relay.py). Owns no call.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from weight_sync.contract import ContractCheck
from weight_sync.ports import OpenedRun, PublisherEnd, Transport
from weight_sync.proto.v1 import contract_pb2, manifest_pb2, replica_pb2, service_pb2, trajectory_pb2
from weight_sync.transport.grpc.reading import Reading

__all__ = ["Inbox", "Receipts", "Registered", "Returns", "StoreReturns"]

Receipts = list[trajectory_pb2.TrajectoryReceipt]
_MOST_REGISTERED = 100_000


class Inbox(Protocol):
    """Where trajectories end up; what ``weight_sync.TrajectoryInbox`` offers of itself to a transport."""

    def put(self, batch: Sequence[trajectory_pb2.Trajectory]) -> Receipts:
        """Keeps a batch durably. Raises InboxFullError when the trainer is behind."""


class Registered:
    """Descriptions of engines, while their leases last. Lost with the process: replicas tell them again."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[float, replica_pb2.EngineDescription]] = {}
        self._checks: dict[str, ContractCheck] = {}

    def check(
        self, replica_id: str, contract: contract_pb2.ExecutionContract, manifest: manifest_pb2.VersionManifest
    ) -> None:
        """Raises ContractError for an engine that may not serve a version; warns once about one that differs."""
        if len(self._checks) >= _MOST_REGISTERED:
            self._checks.clear()  # some are warned about twice
        check = self._checks.setdefault(replica_id, ContractCheck("none", f"replica {replica_id}"))
        check.present(contract)
        check.check(manifest)

    def note(self, run_id: str, replica_id: str, description: replica_pb2.EngineDescription, ttl_s: int) -> None:
        """One engine; its tensors, which may be many, are not kept."""
        kept = replica_pb2.EngineDescription()
        kept.CopyFrom(description)
        kept.ClearField("tensors")
        now = time.monotonic()
        if len(self._known) >= _MOST_REGISTERED:
            self._known = {key: (end, what) for key, (end, what) in self._known.items() if end > now}
        self._known[run_id, replica_id] = (now + ttl_s, kept)

    def add_to(self, fleet: service_pb2.Fleet) -> None:
        """Descriptions of the replicas of a fleet."""
        for replica in fleet.replicas:
            found = self._known.get((fleet.run_id, replica.replica_id))
            if found is not None:
                replica.description.CopyFrom(found[1])


class Returns(Protocol):
    """Where a service takes what comes back. Run ids are those of runs that exist."""

    async def lease(self, run_id: str, replica_id: str, number: int, ttl_s: int) -> None: ...

    async def release(self, run_id: str, replica_id: str) -> None: ...

    async def want(self, run_id: str, replica_id: str, number: int) -> None: ...

    async def acknowledge(self, run_id: str, message: replica_pb2.Acknowledgement) -> None: ...

    async def trajectories(self, run_id: str, batch: Sequence[trajectory_pb2.Trajectory]) -> Receipts: ...

    async def fleet(self, run_id: str, publisher: PublisherEnd | None) -> service_pb2.Fleet: ...

    async def close(self) -> None: ...


class StoreReturns(Returns):
    """Everything goes into the store as it comes."""

    def __init__(self, reading: Reading, transport: Transport) -> None:
        self._reading = reading
        self._transport = transport
        self.inbox: Inbox | None = None  # of a trainer in this process
        self._put = asyncio.Lock()  # trajectories in order of arrival, one batch at a time
        self._ends: dict[str, PublisherEnd] = {}
        self._lock = threading.Lock()

    async def lease(self, run_id: str, replica_id: str, number: int, ttl_s: int) -> None:
        await self._reading.use(run_id, lambda end: end.lease(replica_id, number, ttl_s))

    async def release(self, run_id: str, replica_id: str) -> None:
        await self._reading.use(run_id, lambda end: end.release(replica_id))

    async def want(self, run_id: str, replica_id: str, number: int) -> None:
        await self._reading.use(run_id, lambda end: end.want(replica_id, number))

    async def acknowledge(self, run_id: str, message: replica_pb2.Acknowledgement) -> None:
        await self._reading.use(run_id, lambda end: end.acknowledge(message))

    async def trajectories(self, run_id: str, batch: Sequence[trajectory_pb2.Trajectory]) -> Receipts:
        if self.inbox is not None:
            return await self._reading.blocking(self.inbox.put, batch)
        async with self._put:
            return await self._reading.use(run_id, lambda end: end.send_trajectories(batch))

    async def fleet(self, run_id: str, publisher: PublisherEnd | None) -> service_pb2.Fleet:
        return await self._reading.blocking(self._fleet, run_id, publisher)

    def _fleet(self, run_id: str, publisher: PublisherEnd | None) -> service_pb2.Fleet:
        with self._lock:
            end = publisher or self._looker(run_id)
            replicas: dict[str, service_pb2.Replica] = {}

            def row(replica_id: str) -> service_pb2.Replica:
                return replicas.setdefault(replica_id, service_pb2.Replica(replica_id=replica_id))

            for message in end.acknowledgements():
                row(message.replica_id).acknowledgement.CopyFrom(message)
            for replica_id, number in end.leases().items():
                row(replica_id).leased = number
            for replica_id, number in end.wants().items():
                row(replica_id).wants = number
        return service_pb2.Fleet(run_id=run_id, replicas=[replicas[name] for name in sorted(replicas)])

    def _looker(self, run_id: str) -> PublisherEnd:
        """A publisher's end that looks and claims nothing."""
        end = self._ends.get(run_id)
        if end is None:
            end = self._ends[run_id] = self._transport.publisher_end(0, 1)
            end.attach(OpenedRun(run_id, 0, None, False))
        return end

    async def close(self) -> None:
        for end in self._ends.values():
            await self._reading.blocking(end.close)
