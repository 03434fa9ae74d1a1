"""What the core asks of the outside: Transport, Engine, TrainerAdapter, Quantizer, Group.

Owns the shapes that meet at a port. Owns no behaviour: nothing here does I/O or arithmetic. Third parties implement
these protocols, register under the entry points ``weight_sync.transports`` and ``weight_sync.engines``, and prove
themselves with ``weight_sync.testing``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from weight_sync.layout.box import Box, Regions
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, trajectory_pb2
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    from weight_sync.codec.digest import Digest
    from weight_sync.quantize.weights import QuantizedWeight
    from weight_sync.trajectory import TrajectoryInbox

__all__ = [
    "Changes", "DensePiece", "Engine", "Fate", "Folded", "Group", "OpenedRun", "PauseMode", "PublisherEnd", "Quantizer",
    "ReplicaEnd", "ShardBytes", "TrainerAdapter", "Transport", "Update",
]  # fmt: skip


# --- transport: how a version travels ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardBytes:
    """One shard, ready to be stored or sent, as buffers to be written one after the other.

    Attributes:
        label: short file-name-safe word that tells shards of one rank apart ("patch-bf16", "anchor-bf16").
        rank: publisher rank.
        form: RAW for a part of an anchor.
        head: the safetensors header and the shard index.
        body: the rest, in order; none of them is copied.
    """

    label: str
    rank: int
    form: common_pb2.Form
    head: bytes
    body: Sequence[bytes | memoryview] = ()

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.head) + sum(len(part) for part in self.body)


@dataclass(frozen=True)
class Folded:
    """One object that leads from one version to another.

    Attributes:
        data: a shard in STEP form, whole.
        stored: when it is one that the target's manifest lists: which; its hashes are there. A fold that was made for
            the reader has none: its frames carry hashes, and the digest of the target tells the rest.
    """

    data: memoryview
    stored: manifest_pb2.ShardRef | None = None


class Fate(Enum):
    """What became of a number."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"  # no entry yet: it may still become either


@dataclass(frozen=True)
class OpenedRun:
    """What a publisher owns after it has opened a run.

    Attributes:
        run_id: of the run.
        epoch: number of the EPOCH entry that this publisher wrote; every older publisher is fenced.
        head: manifest of the newest version (ANCHOR or PATCH), None in a new run.
        created: True when this call made the run.
    """

    run_id: str
    epoch: int
    head: manifest_pb2.VersionManifest | None
    created: bool


class PublisherEnd(Protocol):
    """The trainer's end. Every rank holds one; only rank 0 calls ``open_run``, ``commit``, ``abort`` and ``collect``.

    All methods raise StoreError when the store fails, and leave what is visible unchanged then.
    """

    keeps_history: bool
    """False for a push transport, which cannot serve a version twice: only readers that are there get its bits."""
    inbox: TrajectoryInbox | None = None
    """On rank 0 of a server that puts trajectories into an inbox as they come: that inbox, once the run is open."""

    def open_run(self, run_id: str | None, *, fork_of: common_pb2.VersionId | None, writer: str) -> OpenedRun:
        """Claims the run for this publisher: the newest run (``run_id`` None), a named one, or a fork of a version.

        Raises ForkRequiredError when ``run_id`` names a run that is not there and the store holds others.
        """

    def attach(self, run: OpenedRun) -> None:
        """Tells a rank other than 0 what rank 0 opened."""

    def put_shard(self, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
        """Stores one shard of the version ``number``; durable on return, visible to nobody yet."""

    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        """Writes entry ``manifest.number`` if it is absent: from here on readers see the version.

        Raises EpochFencedError when another publisher owns the number, naming it and its epoch.
        """

    def abort(self, number: int, reason: str) -> Fate:
        """Closes ``number`` for good unless it was committed; returns its fate (COMMITTED or ABORTED)."""

    def fate(self, number: int) -> Fate:
        """What became of ``number``, as far as this epoch's own put is concerned."""

    def next_number(self) -> int:
        """The first number without an entry."""

    def reader(self) -> ReplicaEnd:
        """The history, for a publisher that restarts."""

    def acknowledgements(self) -> list[replica_pb2.Acknowledgement]:
        """The last one of each replica."""

    def wants(self) -> Mapping[str, int]:
        """Replicas that need a full state: replica id to the number that they could not reach."""

    def leases(self) -> Mapping[str, int]:
        """Fresh leases: replica id to the number of the version that it keeps. Works without ``open_run``, too."""

    def take_trajectories(self, limit: int) -> list[trajectory_pb2.Trajectory]:
        """Up to ``limit`` trajectories that nobody took yet.

        At least once: they are removed by the next call or ``close``, so a crash in between delivers them again.
        """

    def collect(self) -> Mapping[str, int]:
        """Deletes what no lease and no retained version needs; returns counts by kind."""

    def close(self) -> None:
        """Releases everything; never raises."""


class ReplicaEnd(Protocol):
    """A reader's end: engines, relays, the command line, a publisher that restarts."""

    def run_id(self) -> str:
        """The run that is followed; never changes once known. Raises VersionMissingError while there is none."""

    def newest_run(self) -> str | None:
        """The store's newest run now, None while there is none. Another one than ``run_id()`` means that the trainer
        forked: whoever follows the newest run closes this end and opens one on that run.
        """

    def head(self) -> int | None:
        """Number of the newest version; None while there is none."""

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """Entry ``number``. Raises VersionMissingError, or VersionExpiredError when its payload was collected."""

    def entries(self, first: int = 0) -> Iterator[manifest_pb2.VersionManifest]:
        """All entries from ``first`` on, in order, EPOCH, ABORTED and EXPIRED ones too."""

    def wait(self, after: int | None, timeout: float) -> int | None:
        """The newest version above ``after`` (None: any), waiting up to ``timeout`` seconds; None when none came."""

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        """Bytes of a shard. Raises VersionExpiredError when it is gone, CorruptionError when it is shorter."""

    def lease(self, replica_id: str, number: int, ttl_s: int) -> None:
        """Keeps ``number`` and what it needs while renewed."""

    def release(self, replica_id: str) -> None:
        """Drops the lease."""

    def want(self, replica_id: str, number: int) -> None:
        """Asks the publisher for a full state: this replica cannot reach ``number`` from what the store holds, because the
        anchor's base is not here or an object is damaged.
        """

    def acknowledge(self, message: replica_pb2.Acknowledgement) -> None:
        """Tells the trainer what this replica serves."""

    def send_trajectories(self, batch: Sequence[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.TrajectoryReceipt]:
        """Hands trajectories to the trainer; a receipt means that it survives a crash of this process."""

    def close(self) -> None:
        """Releases everything; never raises."""

    # What follows is optional: an end that inherits from this class and leaves it out does without.

    def fold(
        self, view: str, have: int, target: int, compact: bool = False, regions: Regions | None = None
    ) -> Folded | None:
        """One object that leads from ``have`` to ``target``, for less than the patches between cost to read.

        None: another way is better. ``compact``: the reader holds every bit of ``have``; ``regions``: what it holds, None: all.
        """
        return None

    def local(self, ref: manifest_pb2.ShardRef) -> Path | None:
        """Where a shard lies as a plain file on this machine; None when it does not."""
        return None

    def register(self, replica_id: str, description: replica_pb2.EngineDescription, ttl_s: int) -> None:
        """Tells what engine a replica drives, for whoever looks at the fleet."""
        return


class Transport(Protocol):
    """How a version travels. Built from its configuration: ``Transport(config: weight_sync.config.Config)``."""

    def publisher_end(self, rank: int, world_size: int) -> PublisherEnd:
        """The trainer's end of one rank."""

    def replica_end(self, run_id: str | None = None) -> ReplicaEnd:
        """A reader's end; ``run_id`` None follows the newest run of the store."""


# --- engine: how a version gets into a model --------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """The changed elements of one box of one tensor.

    Attributes:
        spec: of the tensor.
        coords: the box, in checkpoint coordinates of the tensor.
        positions: (n,) uint32, ascending positions in the box's enumeration.
        steps: (n,) unsigned of the element's width: distance on the ordered line modulo 2^(8 width); None for
            absolute changes.
        bits: (n,) unsigned of the element's width: new bits; None for step changes.
    """

    spec: TensorSpec
    coords: Box
    positions: npt.NDArray[np.uint32]
    steps: npt.NDArray[Any] | None
    bits: npt.NDArray[Any] | None = None


@dataclass(frozen=True)
class DensePiece:
    """All elements of one box of one tensor.

    Attributes:
        bits: (coords.count,) unsigned of the element's width, in the box's enumeration order.
    """

    spec: TensorSpec
    coords: Box
    bits: npt.NDArray[Any]


@dataclass
class Update:
    """What takes an engine from the version it holds to another one.

    Attributes:
        target: the version reached.
        digest: of the target's whole state.
        tensors: the target's table, sorted by name.
        changes: sparse part, already decoded and checked; applied after the dense part, which it continues.
        dense: yields whole tensors that appeared or changed shape; for ``full`` updates all tensors. May read the
            store each time it is called; may be called again.
        removed: names that the target lacks.
        full: True when the state before does not matter.
        manifest: of the target.
    """

    target: common_pb2.VersionId
    digest: Digest
    tensors: tuple[TensorSpec, ...]
    changes: Sequence[Changes]
    dense: Any  # Callable[[], Iterator[DensePiece]]
    removed: tuple[str, ...]
    full: bool
    manifest: manifest_pb2.VersionManifest
    extra: dict[str, Any] = field(default_factory=dict)


class PauseMode(Enum):
    """What happens to requests in flight at a fence."""

    KEEP = "keep"  # frozen, then continued by the new version
    WAIT = "wait"  # drained first
    ABORT = "abort"  # cancelled


class Engine(Protocol):
    """How versions get into one model. The replica calls, in this order: describe, then per version stage (while
    serving), pause, commit, and either clear_caches and resume, or rollback and resume.
    """

    def describe(self) -> replica_pb2.EngineDescription:
        """What it holds now; ``digest`` is recomputed from the bits, unset when it cannot be told."""

    def stage(self, update: Update) -> None:
        """Prepares while it serves; drops the previous undo log. Raises EngineError; then nothing has changed."""

    def commit(self) -> Digest:
        """Inside the fence: writes the staged update; returns the digest of the bits now in place.

        Raises EngineError after having restored the old bits, EngineInDoubtError when it could not.
        """

    def rollback(self) -> Digest:
        """Inside the fence: restores the bits before the last commit; returns their digest. May be called again.

        Raises EngineInDoubtError when the undo log is gone.
        """

    def audit(self) -> Digest:
        """Recomputes the digest of the whole state from the bits in place."""

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Closes admission and settles requests in flight; an engine that is paused stays so.

        Raises DeadlineError; admission is as before then.
        """

    def resume(self) -> None:
        """Opens admission."""

    def clear_caches(self) -> None:
        """Drops everything computed from old weights: KV, prefix cache."""

    def announce(self, version: common_pb2.VersionId) -> None:
        """Called after a verified commit: the version that responses carry from now on."""

    def close(self) -> None:
        """Releases everything; never raises."""


# --- trainer ------------------------------------------------------------------------------------------------------


class Group(Protocol):
    """The publisher's ranks. Moves small byte strings only; every call has a limit and raises DeadlineError."""

    rank: int
    size: int

    def gather(self, data: bytes) -> list[bytes]:
        """On rank 0 everyone's bytes by rank, elsewhere []."""

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, everywhere."""


@runtime_checkable
class TrainerAdapter(Protocol):
    """Where a host's weight update hooks in. ``weight_sync.adapters.trainers.base`` has what hosts share."""

    def source(self) -> Any:
        """This rank's part of the served view as it is now: whatever `Publisher.publish` takes."""

    def group(self) -> Group:
        """The ranks that publish together."""


class Quantizer(Protocol):
    """From 16-bit weights to codes and scales. Made as ``Quantizer(quantization_config, dtype)``; docs/views.md."""

    scheme: str

    def weights(self, table: Mapping[str, TensorSpec]) -> Sequence[QuantizedWeight]:
        """The quantised weights of a base. Raises TensorError when codes and scales do not fit each other."""

    def constants(self, table: Mapping[str, TensorSpec]) -> Collection[str]:
        """Tensors of a base that no trainer holds, such as scales of activations: served as the base has them."""

    def project(
        self, weight: QuantizedWeight, values: torch.Tensor, extrema: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Mapping[str, torch.Tensor]:
        """Outputs by role, (cells down, cells across) each. ``values``: (rows, columns), whole blocks of the last level;
        zeros stand where the rank holds none. ``extrema``: per level (low, high) of its blocks, over all ranks.
        """
