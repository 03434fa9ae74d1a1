"""The engine behind the gate: what a sidecar asks of an engine, and how fences of the engine become fences of the gate.

Owns the protocol `ServedEngine`, and the order of gate and engine at a fence. Owns no bits and no request.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Protocol, runtime_checkable

from weight_sync.adapters.sidecar.gate import Gate
from weight_sync.codec.digest import Digest
from weight_sync.contract import contract_id
from weight_sync.errors import WeightSyncError
from weight_sync.ports import Engine, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, contract_pb2, replica_pb2

__all__ = ["GatedEngine", "ServedEngine"]

_SETTLE_S = 0.5  # for requests that the engine has ended to come back


@runtime_checkable
class ServedEngine(Engine, Protocol):
    """An engine that answers HTTP requests.

    Built as ``cls(url, config)``, which opens nothing: the engine may start later. Driven by one thread, except
    ``alive``. A call that finds another process than the one described last raises EngineInDoubtError.
    """

    control_routes: tuple[str, ...]
    """Prefixes of paths that change weights, memory or admission: the sidecar forwards nothing there."""

    def alive(self, timeout: float) -> bool:
        """Whether the engine answers within ``timeout`` seconds; from any thread, at any time, also inside a fence."""


class GatedEngine(Engine):
    """Closes the gate before the engine pauses, opens it after the engine has resumed.

    Args:
        drain_s: in mode WAIT, how long requests in flight may take at most.
        fallback: what happens to those that take longer: ABORT or KEEP.

    Attributes:
        aborted: requests that were ended at a fence.
        contract: how the engine computes; None before it was described.
    """

    def __init__(self, engine: Engine, gate: Gate, drain_s: float, fallback: PauseMode) -> None:
        self._engine, self._gate, self._drain_s, self._fallback = engine, gate, drain_s, fallback
        self.aborted = 0
        self.contract: contract_pb2.ExecutionContract | None = None

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Lets nobody in, and settles those who are in there. Raises what the engine does; the gate is as before then.

        A request that hangs holds nothing up: after ``drain_s``, or half of ``timeout``, the fallback settles it.
        """
        deadline = time.monotonic() + timeout
        was_open = self._gate.close()
        try:
            if mode is PauseMode.WAIT and not self._gate.drain(min(self._drain_s, timeout / 2)):
                mode = self._fallback
            self._engine.pause(mode, max(0.0, deadline - time.monotonic()))
            if mode is PauseMode.ABORT and not self._gate.drain(_SETTLE_S):
                self.aborted += self._gate.cancel()  # the engine ended them, or does not know them at all
        except BaseException:
            if was_open:
                self._gate.open()
            raise

    def resume(self) -> None:
        """Lets requests in again."""
        self._engine.resume()
        self._gate.open()

    def announce(self, version: common_pb2.VersionId) -> None:
        """The version that requests are admitted under from now on."""
        self._engine.announce(version)
        self._gate.announce(version.run_id, version.number)

    def describe(self) -> replica_pb2.EngineDescription:
        description = self._engine.describe()
        self._gate.contract, self.contract = contract_id(description.contract), description.contract
        return description

    def stage(self, update: Update) -> None:
        self._engine.stage(update)

    def commit(self) -> Digest:
        return self._engine.commit()

    def rollback(self) -> Digest:
        return self._engine.rollback()

    def audit(self) -> Digest:
        return self._engine.audit()

    def clear_caches(self) -> None:
        self._engine.clear_caches()

    def close(self) -> None:
        with suppress(WeightSyncError):  # the port promises that it raises nothing
            self._engine.close()
