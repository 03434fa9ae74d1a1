"""What push transports and engines may have beside their ports, to write versions into an engine's memory.

Owns the shapes, and asking for them: an end or an engine that lacks a method does without. Owns no transport.

A push transport's ends have these methods beside those of ``weight_sync.ports``:
    PublisherEnd.offer(holding)              on every rank, before its shards of a version are stored
    ReplicaEnd.place(replica_id, view, engine)   which engine versions are written into; registers nothing yet
    ReplicaEnd.pushed(view, have, target)    has a version written; a Pushed, or None when it does not, or not this one
and the transport itself, for an engine whose processes cannot be reached from the replica's:
    Transport.receiver(placed)               a Receiver, made in the process where the memory is
An engine whose memory can be written into has one of these beside those of its port:
    Engine.placed()                          a Placed; without it bits land in a copy of the table beside the engine
    Engine.receivers()                       of an engine of several processes: a Receiver for each, in order of ranks
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weight_sync.errors import ConfigError, WeightSyncError
from weight_sync.ports import DensePiece, Engine, PublisherEnd, ReplicaEnd, Transport

if TYPE_CHECKING:
    import torch

    from weight_sync.holding import Holding
    from weight_sync.layout.placement import Layout

__all__ = [
    "LAND", "LANDED", "Placed", "Pushed", "Receiver", "offer", "offers", "place", "placed_of", "pushed", "receiver_of",
    "receivers_of",
]  # fmt: skip

LAND = "land"
"""Key of ``Update.extra``: a function without arguments, for bits that go straight into live weights. Called inside the
fence, it lets them in and returns when all are there. There is no undo: whatever it raises, the state is in doubt."""


LANDED = "landed"
"""Key of ``Update.extra``: the bits lie in the receivers of the engine's own processes, and ``dense`` yields nothing."""


@dataclass(frozen=True)
class Placed:
    """Where one process of an engine holds what it serves.

    Attributes:
        layout: of this process.
        storages: its flat storages as they lie now.
    """

    layout: Layout
    storages: Callable[[], Mapping[str, torch.Tensor]]


class Receiver(Protocol):
    """Memory of one engine process that a push transport writes into. Made where the memory is."""

    def offer(self, rank: int, world_size: int) -> bytes:
        """Registers the memory, once, and describes it; the same bytes again while nothing has moved."""

    def expect(self, going: bytes) -> None:
        """A transfer begins."""

    def arrived(self, timeout: float) -> None:
        """Waits for its end. Raises DeadlineError naming who has not finished."""

    def abort(self, nonce: int, error: WeightSyncError) -> None:
        """A sender of the transfer ``nonce`` has failed: `arrived` raises this. From any thread."""

    def pieces(self) -> Iterator[DensePiece]:
        """What has landed beside the live weights, not copied; nothing where bits go straight into them."""

    def close(self) -> None:
        """Takes the memory out of reach; never raises."""


@dataclass(frozen=True)
class Pushed:
    """A version that a push transport brings.

    Attributes:
        dense: yields what has landed beside the live weights; may be called again until the next version lands.
        land: see `LAND`; then ``dense`` yields nothing. None when the bits have landed.
        reason: which way it came, for people.
        inside: it has landed in receivers of the engine's own processes, and ``dense`` yields nothing.
    """

    dense: Callable[[], Iterator[DensePiece]]
    land: Callable[[], None] | None
    reason: str
    inside: bool = False


def offer(end: PublisherEnd, holding: Holding) -> None:
    """Tells a publisher's end what this rank holds."""
    method = getattr(end, "offer", None)
    if method is not None:
        method(holding)


def offers(end: PublisherEnd) -> bool:
    """True for an end that pushes what the ranks hold."""
    return getattr(end, "offer", None) is not None


def place(end: ReplicaEnd, replica_id: str, view: str | None, engine: Engine) -> None:
    """Tells a replica's end which engine it is for."""
    method = getattr(end, "place", None)
    if method is not None:
        method(replica_id, view, engine)


def pushed(end: ReplicaEnd, view: str | None, have: int | None, target: int) -> Pushed | None:
    """Version ``target`` by a push. Raises VersionExpiredError when the trainer has moved on, StoreError, DeadlineError."""
    method = getattr(end, "pushed", None)
    found: Pushed | None = None if method is None else method(view, have, target)
    return found


def placed_of(engine: Engine) -> Placed | None:
    """Where an engine's weights lie, when it says so."""
    method = getattr(engine, "placed", None)
    found: Placed | None = None if method is None else method()
    return found


def receivers_of(engine: Engine) -> Sequence[Receiver]:
    """The receivers of an engine of several processes; () of any other."""
    method = getattr(engine, "receivers", None)
    found: Sequence[Receiver] = () if method is None else method()
    return found


def receiver_of(transport: Transport, placed: Placed) -> Receiver:
    """A receiver for memory of this process. Raises ConfigError when the transport writes into no memory."""
    method = getattr(transport, "receiver", None)
    if method is None:
        raise ConfigError(
            "this transport writes into no engine's memory", field="backend", found=type(transport).__name__
        )
    made: Receiver = method(placed)
    return made
