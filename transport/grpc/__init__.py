"""The gRPC transport: a store's versions as a service, between sites.

Owns GrpcTransport and everything below ``transport/grpc``; docs/grpc.md is for people. Owns no codec, no decision of a
publisher or a replica, and no store: what is served lies in another transport, which the key ``store`` names.

Steps at which the fault tests kill the process (``weight_sync.config.crash_point``):
    put_shard:before, put_shard:after, commit:before, commit:after    as in the store transport, on the caller's side
"""

from __future__ import annotations

from types import ModuleType

from weight_sync.config import Config
from weight_sync.errors import ConfigError
from weight_sync.ports import PublisherEnd, ReplicaEnd, Transport
from weight_sync.transport.grpc.address import bind_address, parse
from weight_sync.transport.grpc.client import Client
from weight_sync.transport.grpc.hosting import HostingPublisherEnd, store_transport
from weight_sync.transport.grpc.remote_publisher import RemotePublisherEnd
from weight_sync.transport.grpc.replica_end import GrpcReplicaEnd
from weight_sync.transport.grpc.server import Server

__all__ = ["GrpcTransport"]


class GrpcTransport(Transport):
    """A client of a server; and with the key ``store``, for rank 0 of a publisher, the server itself.

    Raises ConfigError when the address, TLS files or tokens are no good.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._address = parse(config.uri)
        self._hosting = config.store is not None and self._address.wildcard

    def publisher_end(self, rank: int, world_size: int) -> PublisherEnd:
        """The trainer's end of one rank: with ``store``, rank 0 hosts the service as soon as it opens a run.

        Other ranks store their shards through it; directly when the store is a bucket, or when the address says that
        all ranks are on this machine.
        """
        if self._config.store is None:
            return RemotePublisherEnd(self._config, rank, world_size)
        if rank == 0:
            bind_address(self._config)
            self._hosting = True
            return HostingPublisherEnd(self._config, world_size)
        bucket = not self._config.store.startswith(("file:", "/", "."))
        if bucket or self._address.wildcard or self._address.loopback:
            return store_transport(self._config).publisher_end(rank, world_size)
        return RemotePublisherEnd(self._config, rank, world_size)

    @staticmethod
    def benchmarks() -> ModuleType:
        """What ``weight-sync bench transport`` measures."""
        from weight_sync.transport.grpc import bench

        return bench

    def server(self) -> Server:
        """A server of the key ``store``, not started: ``weight-sync serve``."""
        return Server(self._config, store_transport(self._config))

    def relay(self) -> Server:
        """A server of what the server at ``uri`` holds, on ``listen``, not started: ``weight-sync relay``."""
        if self._config.listen is None:
            raise ConfigError("missing key", field="weight_sync.listen", do="say where the relay listens")
        return Server(self._config, GrpcTransport(self._config.replace(store=None)), relay=True)

    def replica_end(self, run_id: str | None = None) -> ReplicaEnd:
        """A reader's end; None follows the run of the configuration, or the newest run. The host reads its own store."""
        if self._hosting:
            return store_transport(self._config).replica_end(run_id)
        return GrpcReplicaEnd(Client(self._config), self._config, run_id)
