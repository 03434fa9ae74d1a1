"""A push transport for weight_sync: shards travel as gloo broadcasts, the log stands on a board in the trainer's memory.

Owns the way from the configuration to the two ends. ``uri: gloo://host:port`` names the board, a
``torch.distributed.TCPStore``: rank 0 of the trainer hosts it, unless somebody does already. The bits of a version go to
the readers that are there when it is published, and nowhere else: ``keeps_history`` is False.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from weight_sync.config import Config
from weight_sync.errors import ConfigError
from weight_sync.ports import Transport
from weight_sync_gloo.board import Board
from weight_sync_gloo.publisher_end import GlooPublisherEnd
from weight_sync_gloo.replica_end import GlooReplicaEnd

__all__ = ["GlooTransport"]


class GlooTransport(Transport):
    """Built from its configuration, like every transport."""

    def __init__(self, config: Config) -> None:
        parts = urlsplit(config.uri)
        if parts.scheme != "gloo" or not parts.hostname or not parts.port:
            raise ConfigError("not the address of a board", field="uri", found=config.uri, expected="gloo://host:port")
        self._address = (parts.hostname, parts.port)
        self._config = config

    def _board(self, may_host: bool) -> Board:
        return Board(*self._address, timeout_s=min(30.0, self._config.timeout_s), may_host=may_host)

    def publisher_end(self, rank: int, world_size: int) -> GlooPublisherEnd:
        """The trainer's end of one rank. Raises StoreUnavailableError when there is no board."""
        return GlooPublisherEnd(self._board(may_host=rank == 0), self._config)

    def replica_end(self, run_id: str | None = None) -> GlooReplicaEnd:
        """A reader's end, which receives from now on. Raises StoreUnavailableError when there is no board."""
        named = run_id if run_id is not None else self._config.run_id
        return GlooReplicaEnd(self._board(may_host=False), self._config, named)
