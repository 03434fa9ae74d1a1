"""The fence: one engine from version to version, or exactly back, and never open on bits of no version.

Owns what is served, whether admission is open, and the order of pause, commit, compare, clear, announce and resume.
Owns no store and no choice of versions (replica.py), and no bits (the engine does).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from weight_sync.codec.digest import Digest
from weight_sync.config import crash_point
from weight_sync.errors import DigestMismatchError, EngineError, EngineInDoubtError, WeightSyncError
from weight_sync.history import table_of, view_of
from weight_sync.ports import Engine, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2
from weight_sync.tensors import TensorSpec

__all__ = ["Fence", "Served"]

State = replica_pb2.ReplicaState


@dataclass(frozen=True)
class Served:
    """A version whose bits the engine holds, by digest."""

    manifest: manifest_pb2.VersionManifest
    view: str | None

    @property
    def id(self) -> common_pb2.VersionId:
        """Run and number."""
        return common_pb2.VersionId(run_id=self.manifest.run_id, number=self.manifest.number)

    @property
    def digest(self) -> Digest:
        """Of the whole state."""
        return Digest.from_proto(view_of(self.manifest, self.view).digest)

    @property
    def table(self) -> Sequence[TensorSpec]:
        """The tensors."""
        return table_of(view_of(self.manifest, self.view))


class Fence:
    """Keeps admission to an engine shut while its bits are not known to be a version's.

    Attributes:
        served: what the engine holds; None before that is known, and in doubt.
        state: ATTACHING, SERVING, STAGING, FENCED or IN_DOUBT.
        doubts: how often the engine's bits came to be in doubt.
    """

    def __init__(self, engine: Engine, view: str | None, mode: PauseMode, limit_s: float) -> None:
        self.served: Served | None = None
        self.state: int = State.REPLICA_STATE_ATTACHING
        self.doubts = 0
        self._engine, self._view, self._mode, self._limit_s = engine, view, mode, limit_s
        self._closed = False  # admission, by us

    def take(self, manifest: manifest_pb2.VersionManifest) -> None:
        """The engine was found to hold this version.

        Whoever drove it before may have died inside a fence: caches may be of older weights and admission shut.
        Raises EngineError and DeadlineError; nothing is served then, unless a version was before.
        """
        found = Served(manifest, self._view)
        if self.served is None:
            self.shut()
            self._engine.clear_caches()
        self._engine.announce(found.id)
        self.served = found
        self.reopen()

    def shut(self) -> None:
        """Closes admission. Raises DeadlineError; it is open again then, if it was."""
        if self._closed:
            return
        before, self.state = self.state, State.REPLICA_STATE_FENCED
        try:
            self._engine.pause(self._mode, self._limit_s)
        except BaseException:
            self.state = before
            raise
        self._closed = True
        if self.served is None:
            self.state = before

    def reopen(self) -> None:
        """Opens admission to the version that is served, if it is shut; also after a resume that failed."""
        if self.served is None:
            return
        if self._closed:
            self._engine.resume()
            self._closed = False
        self.state = State.REPLICA_STATE_SERVING

    def move(self, update: Update) -> dict[str, float]:
        """Commits what the engine has staged; seconds by phase.

        Raises DigestMismatchError, EngineError or DeadlineError when the version before is served again (or, where there
        was none, nothing is), EngineInDoubtError when the engine has to be rebuilt. Admission is shut then.
        """
        began = time.perf_counter()
        self.shut()
        crash_point("replica:paused")
        clock = time.perf_counter()
        try:
            digest = self._engine.commit()
        except EngineInDoubtError:
            self._doubt()
            raise
        except EngineError:
            self.reopen()  # the old bits are back
            raise
        except BaseException:  # not what the port allows, so nobody knows what is in place
            self._doubt()
            raise
        seconds = {"apply": time.perf_counter() - clock}
        crash_point("replica:committed")
        self._announce(update, digest)
        crash_point("replica:verified")
        self.reopen()
        seconds["pause"] = time.perf_counter() - began
        return seconds

    def _announce(self, update: Update, digest: Digest) -> None:
        number = update.target.number
        try:
            if digest != update.digest:
                raise DigestMismatchError(
                    f"version {number} came out with other bits", field="digest", found=digest.hex(),
                    expected=update.digest.hex(), do="the version before is served; audit the engine if it happens again",
                )  # fmt: skip
            self._engine.clear_caches()
            self._engine.announce(update.target)
        except WeightSyncError as error:
            raise self._taken_back(number, error) from error
        except BaseException:
            self._doubt()
            raise
        self.served = Served(update.manifest, self._view)

    def _taken_back(self, number: int, error: WeightSyncError) -> WeightSyncError:
        """Restores the version before; what to raise: ``error``, or that this could not be done."""
        expected = None if self.served is None else self.served.digest
        try:
            self._engine.rollback()
            held = self._engine.audit()
            if self.served is not None and held == expected:
                self._engine.announce(self.served.id)
                self.reopen()
                return error
        except WeightSyncError as doubt:
            self._doubt()
            return EngineInDoubtError(
                f"version {number} could not be undone",
                found=str(doubt),
                do="sync again: it rebuilds from a full state",
            )
        except BaseException:
            self._doubt()
            raise
        self._doubt()  # the state before was not what we thought, or there was none
        return EngineInDoubtError(
            f"the engine holds the bits of no version after version {number} failed", field="digest", found=held.hex(),
            expected="none" if expected is None else expected.hex(), do="sync again: it rebuilds from a full state",
        )  # fmt: skip

    @contextmanager
    def staging(self) -> Iterator[None]:
        """While the next version is prepared. An engine that tells that it lost what was served is in doubt after it."""
        before = self.state
        if self.served is not None:
            self.state = State.REPLICA_STATE_STAGING
        try:
            yield
        except EngineInDoubtError:
            self._doubt()
            before = self.state
            raise
        finally:
            self.state = before

    def _doubt(self) -> None:
        """Admission stays shut until a full state is in place."""
        self.served = None
        self.state = State.REPLICA_STATE_IN_DOUBT
        self.doubts += 1

    def forget(self) -> None:
        """Somebody else may have changed the engine or replaced it: bits and admission are as unknown as at first."""
        self.served, self._closed = None, False
        self.state = State.REPLICA_STATE_ATTACHING
        self.doubts += 1

    def audit(self) -> None:
        """Recomputes the digest of what is served. Raises EngineInDoubtError, with admission shut, on other bits."""
        if self.served is None:
            return
        held, expected = self._engine.audit(), self.served.digest
        if held == expected:
            return
        self._doubt()
        what = "the audit found other bits than were committed"
        try:
            self.shut()
        except WeightSyncError as error:
            what += f", and admission could not be closed ({error})"
        raise EngineInDoubtError(what, field="digest", found=held.hex(), expected=expected.hex(),
                                 do="sync again: it rebuilds from a full state")  # fmt: skip
