"""The store transport: versions as objects in a folder, an S3, Google or Azure bucket, or memory.

Owns FileTransport and everything below ``transport/file``; docs/store.md lists the objects. Owns no codec and no
decision of a publisher or a replica.

Steps at which the fault tests kill the process (``weight_sync.config.crash_point``):
    put_shard:before    nothing of the shard is stored
    put_shard:after     the shard is stored, nobody refers to it
    commit:before       all shards are stored, the entry is not
    commit:after        the entry is there, the publisher does not know
    collect:tombstone   a version has become EXPIRED, its objects are still there
    collect:delete      an object has been deleted, others are still there
"""

from __future__ import annotations

from weight_sync.config import Config
from weight_sync.ports import Transport
from weight_sync.transport.file.publisher_end import FilePublisherEnd
from weight_sync.transport.file.replica_end import FileReplicaEnd
from weight_sync.transport.file.store import Store

__all__ = ["FilePublisherEnd", "FileReplicaEnd", "FileTransport"]


class FileTransport(Transport):
    """Versions in an object store. Raises ConfigError when the URI or the store options are no good.

    ``memory://name`` stores live in this process and are shared by all transports of the same URI.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._store = Store(config)

    def publisher_end(self, rank: int, world_size: int) -> FilePublisherEnd:
        """The trainer's end of one rank."""
        return FilePublisherEnd(self._store, self._config, rank, world_size)

    def replica_end(self, run_id: str | None = None) -> FileReplicaEnd:
        """A reader's end; None follows the run of the configuration, or the newest run of the store."""
        return FileReplicaEnd(self._store, self._config, run_id)
