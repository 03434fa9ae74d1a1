"""Rank 0's end of a publisher that hosts the service: its store, and a server beside it that hears of each commit.

Owns the server's life. Owns no rule of the log: every call goes to the store's own end.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weight_sync.config import Config
from weight_sync.errors import ConfigError
from weight_sync.ports import Fate, OpenedRun, PublisherEnd, ReplicaEnd, ShardBytes, Transport
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.registry import open_transport
from weight_sync.trajectory import Batch, TrajectoryInbox
from weight_sync.transport.file.location import locate
from weight_sync.transport.grpc.server import Server
from weight_sync.transport.grpc.telemetry import span

__all__ = ["HostingPublisherEnd", "store_transport"]


def store_transport(config: Config) -> Transport:
    """The transport of the key ``store``. Raises ConfigError without one, or when it is a server."""
    if config.store is None:
        raise ConfigError("missing key", field="weight_sync.store", do="name the store that is served")
    if config.store.startswith(("grpc:", "grpcs:")):
        raise ConfigError("a server is no store", field="weight_sync.store", found=config.store,
                          do="use weight-sync relay for a server behind a server")  # fmt: skip
    return open_transport(config.replace(uri=config.store, store=None, backend="file"))


class HostingPublisherEnd(PublisherEnd):
    """The store's end, with the service from ``open_run`` to ``close``."""

    def __init__(self, config: Config, world_size: int) -> None:
        transport = store_transport(config)
        self._end = transport.publisher_end(0, world_size)
        self.keeps_history = self._end.keeps_history
        self.server = Server(config, transport)
        self._config = config
        self._serving = False
        self.inbox: TrajectoryInbox | None = None
        self._taken: Batch | None = None

    def open_run(self, run_id: str | None, *, fork_of: common_pb2.VersionId | None, writer: str) -> OpenedRun:
        """Listens, then claims the run: who cannot listen fences nobody."""
        if not self._serving:
            self.server.start()
            self._serving = True
        opened = self._end.open_run(run_id, fork_of=fork_of, writer=writer)
        self.server.note(opened.run_id, None)
        self._open_inbox(opened.run_id)
        return opened

    def _open_inbox(self, run_id: str) -> None:
        """The durable inbox of the key ``inbox``, else beside the run's objects; None in a store that is no folder."""
        path = self._config.inbox
        if path is None:
            location = locate(self._config.store or "")
            if location.root is None:
                return
            path = str(location.root / run_id / "inbox.sqlite")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self.inbox = TrajectoryInbox(
            path, run_id=run_id, max_count=self._config.inbox_count, max_bytes=self._config.inbox_bytes
        )
        self.inbox.draw_from(self._end.take_trajectories, self._config.poll_s)
        self.server.use_inbox(self.inbox)

    def attach(self, run: OpenedRun) -> None:
        """As the store's."""
        self._end.attach(run)

    def put_shard(self, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        """As the store's."""
        return self._end.put_shard(number, shard)

    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        """As the store's; whoever watches hears of it at once."""
        with span("commit", manifest.run_id, manifest.number):
            self._end.commit(manifest)
        self.server.note(manifest.run_id, manifest.number)

    def abort(self, number: int, reason: str) -> Fate:
        """As the store's."""
        return self._end.abort(number, reason)

    def fate(self, number: int) -> Fate:
        """As the store's."""
        return self._end.fate(number)

    def next_number(self) -> int:
        """As the store's."""
        return self._end.next_number()

    def reader(self) -> ReplicaEnd:
        """As the store's."""
        return self._end.reader()

    def acknowledgements(self) -> list[replica_pb2.Acknowledgement]:
        """As the store's."""
        return self._end.acknowledgements()

    def wants(self) -> Mapping[str, int]:
        """As the store's."""
        return self._end.wants()

    def leases(self) -> Mapping[str, int]:
        """As the store's."""
        return self._end.leases()

    def take_trajectories(self, limit: int) -> list[trajectory_pb2.Trajectory]:
        """Up to ``limit`` that nobody took yet, at least once each: out of the inbox when there is one."""
        if self.inbox is None:
            return self._end.take_trajectories(limit)
        if self._taken is not None:
            self._taken.acknowledge()
        self._taken = self.inbox.take(limit) if limit else None
        return list(self._taken or ())

    def collect(self) -> Mapping[str, int]:
        """As the store's."""
        return self._end.collect()

    def close(self) -> None:
        """Ends the service."""
        if self._serving:
            self.server.close()
            self._serving = False
        if self.inbox is not None:
            if self._taken is not None:
                self._taken.acknowledge()
            self.inbox.close()
            self.inbox = None
        self._end.close()
