"""A relay's own copy of the weights: a version crosses the link in the compact form, and the site is served the step form.

Owns the copy, the thread that keeps it at the newest version, and handing on what each move was. Owns no decoding
(history.py), no folder (mirror.py) and no object (folds.py).
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence

from weight_sync.canonical import Bits
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.config import Config
from weight_sync.errors import CorruptionError, EngineError, EngineInDoubtError, InputError, WeightSyncError
from weight_sync.mirror import Kept, Mirror
from weight_sync.ports import Changes, DensePiece, Engine, PauseMode, Transport, Update
from weight_sync.proto.v1 import common_pb2, replica_pb2
from weight_sync.replica import Replica

__all__ = ["SiteCopy"]

_log = logging.getLogger("weight_sync.grpc")

Made = Callable[[str, str, int, int, Sequence[Changes], Sequence[DensePiece]], None]
"""Is told run, view, version before, version, and what leads from the one to the other."""


class _Folder(Engine):
    """A mirror as an engine that serves nobody; ``made`` hears of each move between two versions of one run."""

    def __init__(self, mirror: Mirror, made: Made) -> None:
        self.mirror, self._made = mirror, made
        self._update: Update | None = None

    def describe(self) -> replica_pb2.EngineDescription:
        message = replica_pb2.EngineDescription(
            engine_id=str(self.mirror.path), kind="relay", complete=True, host=socket.gethostname(),
            forms=[common_pb2.FORM_COMPACT, common_pb2.FORM_STEP, common_pb2.FORM_ABSOLUTE], changes_tensors=True,
        )  # fmt: skip
        kept = self.mirror.current
        try:
            if kept is not None and self.mirror.audit() == kept.digest:
                message.view = kept.view
                message.digest.CopyFrom(kept.digest.to_proto())
        except (InputError, CorruptionError):
            return message  # another process hurt the files: a full state is written anew
        return message

    def bits(self) -> Bits:
        """Of the copy, mapped."""
        folder = Checkpoint(self._current().folder)
        return lambda spec: folder.bits(spec.name)

    def _current(self) -> Kept:
        if self.mirror.current is None:
            raise EngineError("the copy holds no version yet", field=str(self.mirror.path))
        return self.mirror.current

    def stage(self, update: Update) -> None:
        self._update = None
        self.mirror.next(update)
        self._update = update

    def commit(self) -> Digest:
        update, staged, before = self._update, self.mirror.staged, self.mirror.current
        if update is None or staged is None:
            raise EngineError("nothing is staged", do="stage a version first")
        if staged.digest != update.digest:
            return staged.digest  # never shown; the caller undoes it
        self.mirror.switch()
        if before is not None and not update.full and before.run_id == staged.run_id:
            self._made(staged.run_id, staged.view, before.number, staged.number, update.changes, list(update.dense()))
        return staged.digest

    def rollback(self) -> Digest:
        if self.mirror.staged is not None:
            self.mirror.discard()
            return self._current().digest
        try:
            return self.mirror.rollback().digest
        except WeightSyncError as error:
            raise EngineInDoubtError("the version before is gone", found=str(error), do="sync again") from error

    def audit(self) -> Digest:
        return self.mirror.audit()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Nobody asks anything."""

    def resume(self) -> None:
        """Nor here."""

    def clear_caches(self) -> None:
        """There are none."""

    def announce(self, version: common_pb2.VersionId) -> None:
        """Nobody hears it."""

    def close(self) -> None:
        self.mirror.close()


class SiteCopy:
    """Keeps a copy at the newest version, in a thread, from `start` to `close`.

    Args:
        config: of the relay; ``mirror`` is the folder.
        transport: the server far away.
        made: hears of each move; in the copy's thread.

    Raises ConfigError when the folder is taken.
    """

    def __init__(self, config: Config, transport: Transport, made: Made) -> None:
        assert config.mirror is not None
        self._made = made
        self._engine = _Folder(Mirror(config.mirror, config.base, config.threads), self._take)
        self._replica = Replica(
            config.replace(replica_id=f"{config.replica_id}-copy", take="compact"), transport, self._engine
        )
        self._at: tuple[str, int] | None = None  # run and number
        self._failing = False
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="weight_sync-copy", daemon=True)

    def start(self) -> None:
        """Begins to follow."""
        self._thread.start()

    def wait(self, run_id: str, have: int, target: int, limit: float) -> None:
        """Until the copy has moved on from ``have``, when that is what it holds and it is well; at most ``limit`` seconds."""
        deadline = time.monotonic() + limit
        with self._news:
            while self._at == (run_id, have) and have < target and not self._failing and not self._stop.is_set():
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                self._news.wait(left)

    # --- the thread ---

    def _follow(self) -> None:
        try:
            self._replica.follow(lambda report: self._moved(), self._stop, self._failed)
        except WeightSyncError as error:
            self._failed(error)

    def _take(
        self, run: str, view: str, have: int, target: int, changes: Sequence[Changes], whole: Sequence[DensePiece]
    ) -> None:
        try:
            self._made(run, view, have, target, changes, whole)
        except WeightSyncError as error:  # the copy is right; whoever wants the fold has it made from what is stored
            self._failed(error)

    def _moved(self) -> None:
        kept = self._engine.mirror.current
        with self._news:
            self._at = None if kept is None else (kept.run_id, kept.number)
            self._failing = False
            self._news.notify_all()

    def _failed(self, error: WeightSyncError) -> None:
        _log.warning("the relay's copy does not move: %s", error)
        with self._news:
            self._failing = True
            self._news.notify_all()

    def close(self) -> None:
        """Ends the thread; the folder stays."""
        self._stop.set()
        with self._news:
            self._news.notify_all()
        self._replica.close()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._engine.close()
