"""A publisher's end onto a service somewhere else: shards stream out, everything else is one call each.

Owns the session. Owns no rule: the service's own transport decides.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress

from weight_sync.config import Config, crash_point
from weight_sync.errors import InputError, WeightSyncError
from weight_sync.ports import Fate, OpenedRun, PublisherEnd, ReplicaEnd, ShardBytes
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, service_pb2, trajectory_pb2
from weight_sync.transport.grpc.client import Client
from weight_sync.transport.grpc.publishing import FATES, opened_of, report_of
from weight_sync.transport.grpc.replica_end import GrpcReplicaEnd
from weight_sync.transport.grpc.telemetry import span
from weight_sync.transport.grpc.wire import CHUNK

__all__ = ["RemotePublisherEnd"]

_FATES = {wire: fate for fate, wire in FATES.items()}


class RemotePublisherEnd(PublisherEnd):
    """One rank's end. Not thread-safe, but ``put_shard`` may run in several threads at once."""

    keeps_history = True

    def __init__(self, config: Config, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise InputError("not a rank", field="rank", found=rank, expected=f"0 to {world_size - 1}")
        self._config = config
        self._client = Client(config)
        self._rank, self._world_size = rank, world_size
        self._session: service_pb2.PublisherSession | None = None
        self._took = False

    def open_run(self, run_id: str | None, *, fork_of: common_pb2.VersionId | None, writer: str) -> OpenedRun:
        """Claims the run for this publisher: the newest run (``run_id`` None), a named one, or a fork of a version."""
        request = service_pb2.OpenRunRequest(run_id=run_id or "", fork_of=fork_of, writer=writer)
        session = self._client.call("OpenRun", request)
        opened = opened_of(session.run)
        session.rank, session.world_size = self._rank, self._world_size
        self._session = _lighter(session)
        return opened

    def attach(self, run: OpenedRun) -> None:
        """Tells a rank other than 0 what rank 0 opened."""
        token = secrets.token_hex(16)
        self._session = _lighter(service_pb2.PublisherSession(
            run=report_of(run), token=token, rank=self._rank, world_size=self._world_size))  # fmt: skip

    def _opened(self) -> service_pb2.PublisherSession:
        if self._session is None:
            raise InputError("no run is open", do="call open_run on rank 0, then attach on the others")
        return self._session

    # --- one version ---

    def put_shard(self, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        """Stores one shard of the version ``number``; durable on return, visible to nobody yet."""
        crash_point("put_shard:before")
        ref: manifest_pb2.ShardRef = self._client.send("PutShard", self._parts(number, shard))
        crash_point("put_shard:after")
        return ref

    def _parts(self, number: int, shard: ShardBytes) -> Iterator[service_pb2.PutShardRequest]:
        yield service_pb2.PutShardRequest(
            session=self._opened(), number=number, label=shard.label, form=shard.form,
            head_size=len(shard.head), size=shard.size,
        )  # fmt: skip
        for part in (shard.head, *shard.body):
            flat = memoryview(part).cast("B")
            for start in range(0, len(flat), CHUNK):
                yield service_pb2.PutShardRequest(data=bytes(flat[start : start + CHUNK]))

    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        """Writes entry ``manifest.number`` if it is absent. Raises EpochFencedError naming who owns the number."""
        crash_point("commit:before")
        with span("commit", manifest.run_id, manifest.number):
            self._client.call("Commit", service_pb2.CommitRequest(session=self._opened(), manifest=manifest))
        crash_point("commit:after")

    def abort(self, number: int, reason: str) -> Fate:
        """Closes ``number`` for good unless it was committed; returns its fate (COMMITTED or ABORTED)."""
        request = service_pb2.NumberRequest(session=self._opened(), number=number, reason=reason)
        return _FATES[self._client.again("Abort", request).fate]

    def fate(self, number: int) -> Fate:
        """What became of ``number``, as far as this epoch's own put is concerned."""
        request = service_pb2.NumberRequest(session=self._opened(), number=number)
        return _FATES[self._client.again("GetFate", request).fate]

    def next_number(self) -> int:
        """The first number without an entry. Raises EpochFencedError when a rival has written to the log."""
        reply = self._client.again("NextNumber", service_pb2.NumberRequest(session=self._opened()))
        return int(reply.number)

    def reader(self) -> ReplicaEnd:
        """The history, for a publisher that restarts."""
        return GrpcReplicaEnd(Client(self._config), self._config, self._opened().run.run_id)

    # --- what comes back ---

    def _fleet(self) -> service_pb2.Fleet:
        request = service_pb2.FleetRequest(run_id=self._config.run_id or "")
        if self._session is not None:
            request.run_id = self._session.run.run_id
            request.session.CopyFrom(self._session)
        fleet: service_pb2.Fleet = self._client.again("GetFleet", request)
        return fleet

    def acknowledgements(self) -> list[replica_pb2.Acknowledgement]:
        """The last one of each replica."""
        return [r.acknowledgement for r in self._fleet().replicas if r.HasField("acknowledgement")]

    def wants(self) -> Mapping[str, int]:
        """Replicas that cannot resolve an anchor by reference: replica id to the number of that anchor."""
        return {r.replica_id: r.wants for r in self._fleet().replicas if r.HasField("wants")}

    def leases(self) -> Mapping[str, int]:
        """Fresh leases: replica id to the number of the version that it keeps."""
        return {r.replica_id: r.leased for r in self._fleet().replicas if r.HasField("leased")}

    def take_trajectories(self, limit: int) -> list[trajectory_pb2.Trajectory]:
        """Up to ``limit`` trajectories that nobody took yet, at least once each."""
        self._took = True
        reply = self._client.call("TakeTrajectories", service_pb2.TakeRequest(session=self._opened(), limit=limit))
        return list(reply.trajectories)

    def collect(self) -> Mapping[str, int]:
        """Deletes what no lease and no retained version needs; returns counts by kind."""
        run_id = self._config.run_id if self._session is None else self._session.run.run_id
        reply = self._client.again("Collect", service_pb2.RunRequest(run_id=run_id or ""))
        return dict(reply.counts)

    def close(self) -> None:
        """Forgets trajectories that were handed out, and ends the connection."""
        if self._session is not None and self._took:
            with suppress(WeightSyncError):  # what stays is delivered again, as promised
                request = service_pb2.TakeRequest(session=self._session, limit=0)
                self._client.call("TakeTrajectories", request, min(5.0, self._config.timeout_s))
        self._client.close()


def _lighter(session: service_pb2.PublisherSession) -> service_pb2.PublisherSession:
    """Of the head only its number stays: the session goes with every call, and a manifest may be large."""
    if session.run.HasField("head"):
        number = session.run.head.number
        session.run.ClearField("head")
        session.run.head.number = number
    return session
