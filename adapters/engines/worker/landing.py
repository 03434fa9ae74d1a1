"""Versions that a push transport writes into the memory of an engine's ranks.

Owns both ends of the calls: a rank's receiver inside the engine, and what the driver shows the transport of all ranks.
Owns no memory (the transport's receiver does), no fence and no version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from weight_sync.adapters.engines.worker.wire import Reply, decode_bytes, decode_error, encode_bytes, encode_error
from weight_sync.config import Config
from weight_sync.errors import EngineError, WeightSyncError
from weight_sync.ports import DensePiece
from weight_sync.push import Placed, Receiver, receiver_of
from weight_sync.registry import open_transport

__all__ = ["Landing", "Landings", "RankReceiver"]

_KEYS = {"backend", "uri", "timeout_s", "rdma"}
"""Of the configuration that a rank gets: what a receiver needs, and no secret."""

_GRACE_S = 5.0


class Landing:
    """The receiver of one rank, inside the engine. ``wait`` runs in the background; the rest is called in turn."""

    def __init__(self, placed: Callable[[], Placed]) -> None:
        self._placed = placed
        self._receiver: Receiver | None = None
        self._made_of: Mapping[str, Any] = {}

    def offer(self, keys: Mapping[str, Any], rank: int, world: int) -> Reply:
        """Registers memory, once. Raises ConfigError when the transport is not installed here, EngineError."""
        if self._receiver is None or keys != self._made_of:
            self.close()
            self._receiver = receiver_of(open_transport(Config(**keys)), self._placed())
            self._made_of = dict(keys)
        return {"offer": encode_bytes(self._receiver.offer(rank, world))}

    def _held(self) -> Receiver:
        if self._receiver is None:
            raise EngineError("no memory was offered", do="sync again")
        return self._receiver

    def expect(self, going: str) -> Reply:
        """A transfer begins."""
        self._held().expect(decode_bytes(going))
        return {}

    def wait(self, within: float) -> Reply:
        """Until it has ended. Raises DeadlineError."""
        self._held().arrived(within)
        return {}

    def abort(self, nonce: int, error: Reply) -> Reply:
        """`wait` ends with this error."""
        self._held().abort(nonce, decode_error(error, "trainer"))
        return {}

    def pieces(self) -> Iterator[DensePiece]:
        """What has landed beside the weights of this rank."""
        return self._held().pieces()

    def close(self) -> None:
        """Takes the memory out of reach."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()


class _Ask(Protocol):
    def __call__(self, verb: str, limit: float, **arguments: Any) -> list[Reply]:
        """Every rank's answer."""


class _Wait(Protocol):
    def __call__(self, verb: str, limit: float, between: Callable[[], None], **arguments: Any) -> list[Reply]:
        """Every rank's answer to work in the background; ``between`` is called before each look."""


class Landings:
    """All ranks as receivers. One call reaches all of them: the first receiver makes it, the others know the answer."""

    def __init__(self, ask: _Ask, wait: _Wait, config: Config, ranks: int) -> None:
        self._ask, self._wait, self._limit = ask, wait, config.timeout_s
        keys = config.model_dump(mode="json", exclude_unset=True, include=_KEYS)
        self._keys = {**keys, "backend": config.backend, "uri": config.uri}
        self._offers: list[bytes] = []
        self._failed: tuple[int, WeightSyncError] | None = None  # set from the transport's thread
        self.receivers: Sequence[Receiver] = tuple(RankReceiver(self, rank) for rank in range(ranks))

    def offer(self, rank: int) -> bytes:
        if rank == 0:
            replies = self._ask("land_offer", self._limit, keys=self._keys)
            self._offers = [decode_bytes(reply["offer"]) for reply in replies]
        return self._offers[rank]

    def expect(self, going: bytes) -> None:
        self._failed = None
        self._ask("land_expect", self._limit, going=encode_bytes(going))

    def arrived(self, timeout: float) -> None:
        # the ranks keep the limit, for they can tell who is missing; ours is longer
        self._wait("land_wait", timeout + _GRACE_S, self._pass_on, within=timeout)

    def abort(self, nonce: int, error: WeightSyncError) -> None:
        self._failed = nonce, error

    def _pass_on(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            self._ask("land_abort", self._limit, nonce=failed[0], error=encode_error(failed[1]))

    def close(self) -> None:
        """Never raises."""
        try:
            self._ask("land_close", _GRACE_S)
        except WeightSyncError:
            return  # the engine is gone, and its memory with it


class RankReceiver(Receiver):
    """One rank, as the transport's end sees it."""

    def __init__(self, all_ranks: Landings, rank: int) -> None:
        self._all, self._rank = all_ranks, rank

    def offer(self, rank: int, world_size: int) -> bytes:
        """What the rank's receiver offers."""
        return self._all.offer(self._rank)

    def expect(self, going: bytes) -> None:
        """A transfer to all ranks begins."""
        if self._rank == 0:
            self._all.expect(going)

    def arrived(self, timeout: float) -> None:
        """Waits for all ranks, on behalf of all."""
        if self._rank == 0:
            self._all.arrived(timeout)

    def abort(self, nonce: int, error: WeightSyncError) -> None:
        """Told to the ranks by whoever waits for them."""
        if self._rank == 0:
            self._all.abort(nonce, error)

    def pieces(self) -> Iterator[DensePiece]:
        """Nothing: they stay in the rank."""
        return iter(())

    def close(self) -> None:
        """Takes the memory of all ranks out of reach."""
        if self._rank == 0:
            self._all.close()
