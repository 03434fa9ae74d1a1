"""AdapterEngine: a LoRA adapter that running servers load by their own adapter API, from a folder that is kept current.

Owns the order of folder, load and proof for one adapter, and which base it may be served on. Owns no folder
(weight_sync.mirror), no request (a `ServerAdapters` makes them) and no base: whoever drives that one tells what it is.

Each version is loaded from a folder of its own, under the adapter's one name, and the servers' prefix caches are dropped
before the version is announced: nothing that was computed with another version can be found again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weight_sync.adapter import AdapterConfig, adapter_of, check_base, check_rank, pairs_of
from weight_sync.adapters.engines.checkpoint import CheckpointEngine
from weight_sync.codec.digest import Digest
from weight_sync.errors import DeadlineError, EngineError, InputError, WeightSyncError, WrongBaseError
from weight_sync.mirror import Kept
from weight_sync.ports import PauseMode, Update
from weight_sync.proto.v1 import common_pb2, contract_pb2, replica_pb2

__all__ = ["AdapterEngine", "HeldBase", "ServerAdapters"]


class ServerAdapters(Protocol):
    """The adapter API of one server. Methods raise EngineError when it refused, DeadlineError at the limit in seconds."""

    rank_option: str
    """Of the server's command line, that sets the largest rank."""

    def most(self, limit: float) -> int | None:
        """The largest rank that it takes; None when it does not say. Raises EngineError when it takes no adapters."""

    def load(self, name: str, folder: Path, limit: float) -> None:
        """``name`` is this folder's adapter from now on, whatever it was before."""

    def unload(self, name: str, limit: float) -> None:
        """``name`` is no adapter any more; nothing happens when it is none."""

    def holds(self, name: str, folder: Path, limit: float) -> bool:
        """Whether ``name`` is this folder's adapter now."""

    def clear(self, limit: float) -> None:
        """Drops KV and prefix caches."""


@dataclass(frozen=True)
class HeldBase:
    """What the servers' own weights are now; no version and no digest while that is not known."""

    version: common_pb2.VersionId | None = None
    digest: Digest | None = None
    contract: contract_pb2.ExecutionContract | None = None


class AdapterEngine(CheckpointEngine):
    """An implementation of ``weight_sync.ports.Engine`` for a run of adapters.

    Args:
        servers: that serve it, all of them the same version.
        name: of the adapter, by which requests name it.
        folder: becomes a link to the newest version's folder, in PEFT's format; servers read it.
        base: tells what the servers' own weights are; called at every step.
        limit_s: of one request to a server.
        threads: that patch files and compute digests.
    """

    def __init__(
        self, servers: Sequence[ServerAdapters], name: str, folder: str | os.PathLike[str],
        base: Callable[[], HeldBase], limit_s: float = 600.0, threads: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder, reload_s=limit_s, threads=threads)
        self.name = name
        self._servers, self._base = tuple(servers), base

    # --- what is in place ---

    def unfit(self) -> str:
        """Why the adapter may not answer now: it is for another base than the servers hold; "" when it may."""
        kept, held = self.mirror.current, self._base()
        if kept is None or kept.adapter is None:
            return "no version of the adapter is in place"
        try:
            check_base(kept.adapter, held.version, held.digest)
        except WrongBaseError as error:
            return str(error)
        return ""

    def describe(self) -> replica_pb2.EngineDescription:
        """The version in the folder, when it is for the servers' base and they have it or load it; else none."""
        contract = self._base().contract
        description = replica_pb2.EngineDescription(engine_id=self.name, kind="adapter", complete=True)
        if not self.unfit():
            with suppress(EngineError, DeadlineError):  # then nothing is held, and the next version may be better
                description = super().describe()
        if contract is not None:
            description.contract.CopyFrom(contract)
        return description

    def _prove(self, kept: Kept) -> None:
        if not all(server.holds(self.name, kept.folder, self._reload_s) for server in self._servers):
            self._load(kept)

    def _load(self, kept: Kept) -> None:
        self._served = None
        for server in self._servers:
            server.load(self.name, kept.folder, self._reload_s)
        self._served = kept

    # --- one version ---

    def stage(self, update: Update) -> None:
        """Writes the version's folder while the servers serve.

        Raises WrongBaseError for an adapter to another base, EngineError when its rank is above a server's largest or it
        is no adapter.
        """
        adapter, held = adapter_of(update.manifest), self._base()
        check_base(adapter, held.version, held.digest)
        try:
            config = AdapterConfig.read(adapter.config)
            pairs_of(update.tensors)
        except InputError as error:
            raise EngineError("not an adapter", field=error.field, found=str(error)) from error
        for server in self._servers:
            check_rank(config, server.most(self._reload_s), server.rank_option)
        super().stage(update)

    def _go_back(self, staged: Kept, served: Kept | None, error: WeightSyncError) -> None:
        """The first version has none to go back to: then the name is no adapter, and that is known."""
        if self.mirror.current is not staged or self.mirror.previous is not None:
            super()._go_back(staged, served, error)
        for server in self._servers:
            with suppress(EngineError, DeadlineError):  # it never had it, or is gone
                server.unload(self.name, self._reload_s)
        raise EngineError(f"version {staged.number} was not loaded; nothing is served", found=str(error)) from error

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Nothing to do: whoever lets requests in has closed admission, and they have ended."""

    def clear_caches(self) -> None:
        """Drops the servers' prefix caches. Raises EngineError."""
        for server in self._servers:
            server.clear(self._reload_s)
