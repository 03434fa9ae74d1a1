"""The RDMA transport: trainer ranks write a version straight into the memory of engine ranks.

Owns RdmaTransport and everything below ``transport/rdma``; docs/rdma.md is for people. Owns no codec, no fence and no
log: entries lie in a store, whose ends decide.

    side.py, atoms.py, balance.py, links.py, schedule.py    who writes what where: pure, no I/O
    writes.py, runs.py, lowering.py, pipeline.py            one rank's part, down to descriptors and stages
    model.py, presets.py, layouts.py, planning.py           ``weight-sync plan``
    onesided.py, nixl.py, blocks.py, memory.py              the library that moves bytes, behind a small port
    wire.py, controller.py, logbook.py                      rank 0: who is there, and when to go
    sender.py, publisher_end.py, receiver.py, replica_end.py    the two ends

Steps at which the fault tests kill the process (``weight_sync.config.crash_point``):
    rdma:go         a trainer rank was told to write, and has written nothing
    rdma:written    it has written everything, and said nothing
    rdma:note       it is about to send its end notes
"""

from __future__ import annotations

import uuid

from weight_sync.config import Config
from weight_sync.ports import ReplicaEnd, Transport
from weight_sync.push import Placed, Receiver
from weight_sync.transport.rdma.nixl import load_nixl
from weight_sync.transport.rdma.publisher_end import RdmaPublisherEnd, store_transport
from weight_sync.transport.rdma.receiver import LocalReceiver
from weight_sync.transport.rdma.replica_end import RdmaReplicaEnd
from weight_sync.transport.rdma.wire import parse_address

__all__ = ["RdmaPublisherEnd", "RdmaReplicaEnd", "RdmaTransport"]


class RdmaTransport(Transport):
    """One side of a transfer. Raises ConfigError when the address is no good, or NIXL is not installed."""

    def __init__(self, config: Config) -> None:
        parse_address(config.uri)
        load_nixl()
        self._config = config
        self._store: Transport | None = None
        self._name = uuid.uuid4().hex

    def _log(self) -> Transport:
        if self._store is None:
            self._store = store_transport(self._config, self._name)
        return self._store

    def publisher_end(self, rank: int, world_size: int) -> RdmaPublisherEnd:
        """The trainer's end of one rank; rank 0's hosts the controller once it opens a run."""
        if rank == 0:
            return RdmaPublisherEnd(self._config, rank, world_size, self._log())
        return RdmaPublisherEnd(self._config, rank, world_size, self._log() if self._config.store is not None else None)

    def replica_end(self, run_id: str | None = None) -> ReplicaEnd:
        """A reader's end. Rank 0, which has the log, reads it where it is."""
        return RdmaReplicaEnd(self._config, run_id) if self._store is None else self._store.replica_end(run_id)

    def receiver(self, placed: Placed) -> Receiver:
        """For a process of an engine that is driven from another process."""
        return LocalReceiver(self._config, placed)
