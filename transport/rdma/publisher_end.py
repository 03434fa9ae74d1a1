"""The trainer's end: rank 0 hosts the controller, every rank a sender; the log lies in a store.

Owns their lives and where shards go. Owns no rule of the log: all of them are the store's end's. With the key ``store``
the store is durable, and other replicas can follow it beside the engines that are pushed to. Without, the log lives in
rank 0's memory, no shard is kept, and a trainer that restarts begins a new run.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from blake3 import blake3

from weight_sync.config import Config
from weight_sync.errors import ConfigError, InputError
from weight_sync.holding import Holding
from weight_sync.ports import Fate, OpenedRun, PublisherEnd, ReplicaEnd, ShardBytes, Transport
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.registry import open_transport
from weight_sync.transport.file import keys
from weight_sync.transport.rdma.controller import Controller
from weight_sync.transport.rdma.replica_end import RdmaReplicaEnd
from weight_sync.transport.rdma.sender import Sender
from weight_sync.transport.rdma.wire import parse_address

__all__ = ["RdmaPublisherEnd", "store_transport"]


def store_transport(config: Config, name: str) -> Transport:
    """The transport of the log: the key ``store``, else this process's memory."""
    uri = f"memory://rdma-{name}" if config.store is None else config.store
    if uri.startswith(("rdma:", "grpc:", "grpcs:")):
        raise ConfigError("a server is no store", field="weight_sync.store", found=uri, expected="a folder or a bucket")
    return open_transport(config.replace(uri=uri, store=None, backend="file"))


class RdmaPublisherEnd(PublisherEnd):
    """One rank's end."""

    def __init__(self, config: Config, rank: int, world_size: int, store: Transport | None) -> None:
        if not 0 <= rank < world_size:
            raise InputError("not a rank", field="rank", found=rank, expected=f"0 to {world_size - 1}")
        self.keeps_history = config.store is not None
        self.inbox = None
        self._config, self._rank, self._world_size = config, rank, world_size
        self._end = None if store is None else store.publisher_end(rank, world_size)
        self._store = store
        self._controller: Controller | None = None
        self._sender: Sender | None = None
        self._run: OpenedRun | None = None

    @property
    def port(self) -> int:
        """That the controller listens on; 0 where there is none."""
        return 0 if self._controller is None else self._controller.port

    # --- opening ---

    def open_run(self, run_id: str | None, *, fork_of: common_pb2.VersionId | None, writer: str) -> OpenedRun:
        """Listens, then claims the run: who cannot listen fences nobody."""
        if self._controller is None:
            assert self._store is not None
            self._controller = Controller(self._config, self._world_size, self._store.replica_end)
            self._controller.start()
        opened = self._inner().open_run(run_id, fork_of=fork_of, writer=writer)
        self._run = opened
        self._controller.note(opened.run_id, None)
        host, _ = parse_address(self._config.uri)
        self._sender = Sender(self._config, (_reachable(host), self._controller.port), self._rank, self._world_size)
        return opened

    def attach(self, run: OpenedRun) -> None:
        """Ranks other than 0 connect when they have something to offer."""
        self._run = run
        if self._end is not None:
            self._end.attach(run)
        if self._sender is None:
            self._sender = Sender(self._config, parse_address(self._config.uri), self._rank, self._world_size)

    def _inner(self) -> PublisherEnd:
        if self._end is None:
            raise InputError("no log on this rank", field="rank", found=self._rank, expected=0)
        return self._end

    # --- one version ---

    def offer(self, holding: Holding) -> None:
        """What engines are written from."""
        if self._sender is None:
            raise InputError("no run is open", do="call open_run on rank 0, then attach on the others")
        self._sender.offer(holding)

    def put_shard(self, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        """Into the store, where there is one; a patch is also kept for engines until the next version."""
        if self._run is None:
            raise InputError("no run is open", do="call open_run on rank 0, then attach on the others")
        keeps = self._config.store is not None and self._end is not None
        ref = self._inner().put_shard(number, shard) if keeps else _reference(self._run, number, shard)
        if self._sender is not None:
            self._sender.keep(number, ref, shard)
        return ref

    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        """As the store's; engines hear of it at once."""
        self._inner().commit(manifest)
        if self._controller is not None:
            self._controller.note(manifest.run_id, manifest.number)

    def abort(self, number: int, reason: str) -> Fate:
        """As the store's."""
        return self._inner().abort(number, reason)

    def fate(self, number: int) -> Fate:
        """As the store's."""
        return self._inner().fate(number)

    def next_number(self) -> int:
        """As the store's."""
        return self._inner().next_number()

    def reader(self) -> ReplicaEnd:
        """The store's on rank 0, through the controller elsewhere."""
        if self._store is not None:
            return self._store.replica_end(None if self._run is None else self._run.run_id)
        return RdmaReplicaEnd(self._config, None if self._run is None else self._run.run_id)

    # --- what comes back ---

    def acknowledgements(self) -> list[replica_pb2.Acknowledgement]:
        """As the store's."""
        return self._inner().acknowledgements()

    def wants(self) -> Mapping[str, int]:
        """As the store's. Without history nobody is helped by a full state: engines are written the head's bits."""
        return self._inner().wants() if self.keeps_history else {}

    def leases(self) -> Mapping[str, int]:
        """As the store's."""
        return self._inner().leases()

    def take_trajectories(self, limit: int) -> list[trajectory_pb2.Trajectory]:
        """As the store's."""
        return self._inner().take_trajectories(limit)

    def collect(self) -> Mapping[str, int]:
        """As the store's."""
        return self._inner().collect()

    def close(self) -> None:
        """Sender first: nobody is told to write any more."""
        if self._sender is not None:
            self._sender.close()
        if self._controller is not None:
            self._controller.close()
        if self._end is not None:
            self._end.close()


def _reachable(host: str) -> str:
    """An address of this host that rank 0's own sender can use."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _reference(run: OpenedRun, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
    """Of a shard that no store keeps. A full state is not hashed: its bits travel by themselves, under the digest."""
    raw = shard.form == common_pb2.FORM_RAW
    whole = blake3()
    for part in () if raw else (shard.head, *shard.body):
        whole.update(part)
    key = keys.shard(number, run.epoch, shard.rank, shard.label, secrets.token_hex(8))
    return manifest_pb2.ShardRef(
        object=key, size=shard.size, blake3=bytes(32) if raw else whole.digest(), head_size=len(shard.head),
        head_blake3=blake3(shard.head).digest(), rank=shard.rank, form=shard.form,
    )  # fmt: skip
