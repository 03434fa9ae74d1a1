"""CheckpointEngine: any engine that can only load a checkpoint, driven from outside.

Owns the order of mirror, reload and proof, and the way back when a reload fails. Owns no folder (weight_sync.mirror)
and no request (hook.py). With neither ``on_commit`` nor ``check`` it just keeps a folder current.

The engine is told after the folder has been switched, inside the fence; it must load the whole folder and drop what it
computed from older weights before it answers. A version is served once the engine answered and ``check`` proved it. A
reload that fails is undone: the folder is the old one again and the engine loads that.
"""

from __future__ import annotations

import math
import os
import re
import socket
import time
from contextlib import suppress

from weight_sync.adapters.engines.hook import Hook
from weight_sync.canonical import Bits
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.config import default_threads
from weight_sync.errors import (
    ConfigError,
    CorruptionError,
    DeadlineError,
    EngineError,
    EngineInDoubtError,
    InputError,
    StoreError,
    VersionMissingError,
    WeightSyncError,
)
from weight_sync.mirror import Kept, Mirror
from weight_sync.ports import PauseMode, Update
from weight_sync.proto.v1 import common_pb2, replica_pb2

__all__ = ["CheckpointEngine"]

_FAILED = (StoreError, EngineError, DeadlineError)
_LOOK_S = (0.05, 1.0)  # first and longest pause between two looks whether the engine serves


class CheckpointEngine:
    """An implementation of ``weight_sync.ports.Engine``; not thread-safe.

    Args:
        path: the folder that the engine loads; becomes a symbolic link (see `weight_sync.mirror.Mirror`).
        base: folder of configuration and tokenizer files, copied beside the weights.
        on_commit: reloads the engine. A URL gets a POST with ``{"path", "run_id", "version", "digest"}``; anything else
            is a shell command with WEIGHT_SYNC_PATH, _RUN_ID, _VERSION and _DIGEST set. It may be asked again for a
            version that the engine holds already, after a restart of this process. A URL that nobody listens at yet is
            waited for within ``reload_s``.
        check: tells whether the engine serves: a URL (GET), or a command with the same variables; asked until it
            succeeds, inside the fence.
        check_contains: what the answer of ``check`` must contain, with ``{version}``, ``{digest}`` or ``{run_id}`` for
            those of the version; digits at its ends must not go on in the answer, so 3 is not proven by 13.
        on_pause, on_resume: close and open admission; both or none. POST with ``{"mode"}``, or WEIGHT_SYNC_MODE. Either
            may be asked when it is so already.
        reload_s: limit of one reload, pause or resume in seconds.
        check_s: limit of all looks of one check in seconds.
        threads: that patch files and compute digests.

    Raises ConfigError for an option that cannot be used, and for a path that is taken.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, base: str | os.PathLike[str] | None = None, on_commit: str | None = None,
        check: str | None = None, check_contains: str | None = None, on_pause: str | None = None,
        on_resume: str | None = None, reload_s: float = 600.0, check_s: float = 60.0, threads: int | None = None,
    ) -> None:  # fmt: skip
        self._reload_hook = Hook.of("on_commit", on_commit)
        self._check_hook = Hook.of("check", check)
        self._contains = _checked_template(check, check_contains)
        self._pause_hook, self._resume_hook = Hook.of("on_pause", on_pause), Hook.of("on_resume", on_resume)
        if (on_pause is None) != (on_resume is None):
            raise ConfigError("one without the other", field="on_pause" if on_resume is None else "on_resume",
                              do="set both on_pause and on_resume, or none")  # fmt: skip
        self._reload_s, self._check_s = _seconds("reload_s", reload_s), _seconds("check_s", check_s)
        if threads is not None and threads < 1:
            raise ConfigError("not a thread count", field="threads", found=threads, expected="1 or more")
        self.mirror = Mirror(path, base, default_threads() if threads is None else threads)
        self._update: Update | None = None
        self._audited: Kept | None = None
        self._undone: Kept | None = None  # the folder is back at this version; a rollback may be asked for again
        self._served: Kept | None = None  # what the engine was last seen to serve by this process

    # --- the port ---

    def describe(self) -> replica_pb2.EngineDescription:
        """The version in the folder, proven to be what the engine serves: it is asked, else reloaded.

        No tensors are listed: a folder takes any table. Raises EngineError when the engine does not load the folder.
        """
        description = replica_pb2.EngineDescription(
            engine_id=str(self.mirror.path), kind="checkpoint", complete=True, host=socket.gethostname(),
            forms=[common_pb2.FORM_STEP, common_pb2.FORM_ABSOLUTE],
        )  # fmt: skip
        kept = self.mirror.current
        if kept is None:
            return description
        description.view = kept.view
        if self._audited is not kept and not self._intact(kept):
            return description
        self._audited = kept  # an engine that is down is asked often; the files need not be read each time
        self._prove(kept)
        self._audited = None
        description.digest.CopyFrom(kept.digest.to_proto())
        if kept.adapter is not None:
            description.adapter_base.CopyFrom(kept.adapter.base_digest)
        return description

    def _intact(self, kept: Kept) -> bool:
        """The files hold the bits that were written; else a full state is written anew."""
        try:
            return self.mirror.audit() == kept.digest
        except (InputError, CorruptionError, StoreError):
            return False

    def bits(self) -> Bits:
        """Of the folder that is served, mapped."""
        if self.mirror.current is None:
            raise EngineError("no version is served yet", do="sync the replica first")
        folder = Checkpoint(self.mirror.current.folder)
        return lambda spec: folder.bits(spec.name)

    def stage(self, update: Update) -> None:
        """Writes the version's folder while the engine serves. Raises what `Mirror.next` does."""
        self._update = self._undone = None
        self.mirror.next(update)
        self._update = update

    def commit(self) -> Digest:
        """Switches the folder, reloads the engine and sees that it serves.

        A folder whose digest is not the version's is never shown to the engine; its digest is returned all the same, so
        that the caller undoes the version and audits. Raises EngineError when the engine serves the old version again,
        EngineInDoubtError when it does not.
        """
        update, self._update = self._update, None
        staged = self.mirror.staged
        if update is None or staged is None:
            raise EngineError("nothing is staged", field="commit", do="stage a version first")
        if staged.digest != update.digest:
            return staged.digest
        served, self._served = self._served, None
        try:
            self.mirror.switch()
            self._load(staged)
        except _FAILED as error:
            self._go_back(staged, served, error)
        return staged.digest

    def _go_back(self, staged: Kept, served: Kept | None, error: WeightSyncError) -> None:
        """After a failed commit. Always raises."""
        number = staged.number
        if self.mirror.current is not staged:
            self._served = served
            raise EngineError(f"version {number} could not be put in place", found=str(error)) from error
        if self.mirror.previous is None:
            raise EngineInDoubtError(
                f"version {number} is in place but the engine did not load it, and there is none to go back to",
                field=str(self.mirror.path), found=str(error), do="see that the engine runs, then sync again",
            ) from error  # fmt: skip
        try:
            old = self._return()
        except _FAILED as second:
            raise EngineInDoubtError(
                f"version {number} was not loaded, and neither was the one before", field=str(self.mirror.path),
                found=f"{error}; then: {second}", do="see that the engine runs, then sync again",
            ) from error  # fmt: skip
        what = f"version {number} was not loaded; version {old.number} is served again"
        raise EngineError(what, found=str(error)) from error

    def _return(self) -> Kept:
        """The version before, in the folder and in the engine."""
        if self._undone is None:
            self._undone = self.mirror.rollback()
        if self._served is not self._undone:
            self._served = None
            self._load(self._undone)
        return self._undone

    def rollback(self) -> Digest:
        """The version before, in the folder and in the engine; returns its digest. May be repeated."""
        if self.mirror.staged is not None:  # the commit before held back a folder with wrong bits
            current = self.mirror.current
            self.mirror.discard()
            if current is not None:
                return current.digest
        try:
            return self._return().digest
        except (VersionMissingError, *_FAILED) as error:
            raise EngineInDoubtError("the version before cannot be served", field=str(self.mirror.path),
                                     found=str(error), do="sync again") from error  # fmt: skip

    def audit(self) -> Digest:
        """Recomputes the digest from the files. Raises EngineError when they are broken or there are none."""
        try:
            return self.mirror.audit()
        except (VersionMissingError, InputError, CorruptionError, StoreError) as error:
            raise EngineError("the folder cannot be read", field=str(self.mirror.path), found=str(error),
                              do="sync again: it starts from a full state") from error  # fmt: skip

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Asks ``on_pause``. Raises DeadlineError or EngineError; admission was asked to open again then."""
        if self._pause_hook is None:
            return
        try:
            self._pause_hook.run({"mode": mode.value}, min(timeout, self._reload_s))
        except (EngineError, DeadlineError):
            with suppress(EngineError, DeadlineError):  # the first reason is the one to tell
                self.resume()
            raise

    def resume(self) -> None:
        """Asks ``on_resume``; raises EngineError and DeadlineError."""
        if self._resume_hook is not None:
            self._resume_hook.run({}, self._reload_s)

    def clear_caches(self) -> None:
        """Nothing to do: an engine that loads a checkpoint drops its caches itself, as ``on_commit`` demands."""

    def announce(self, version: common_pb2.VersionId) -> None:
        """Says in weight_sync.json which version the folder is, where it was found to hold another one's bits."""
        served = self._served is self.mirror.current
        self.mirror.rename(version.run_id, version.number)
        if served:
            self._served = self.mirror.current

    def close(self) -> None:
        """Lets another process keep the folder; the engine keeps serving."""
        self.mirror.close()

    # --- the engine ---

    def _facts(self, kept: Kept) -> dict[str, str | int]:
        return {
            "path": str(self.mirror.path),
            "run_id": kept.run_id,
            "version": kept.number,
            "digest": kept.digest.hex(),
        }

    def _load(self, kept: Kept) -> None:
        """Reloads the engine and waits until it serves. Raises EngineError and DeadlineError."""
        if self._reload_hook is not None:
            self._reload_hook.run(self._facts(kept), self._reload_s, patient=True)  # it may just be starting
        end, pause = time.monotonic() + self._check_s, _LOOK_S[0]
        while (reason := self._look(kept, max(0.01, end - time.monotonic()))) is not None:
            left = end - time.monotonic()
            if left <= 0:
                raise EngineError("the engine does not prove the version", field="check", found=str(reason),
                                  do="look at the engine, or allow more time with check_s") from reason  # fmt: skip
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LOOK_S[1])
        self._served = kept

    def _look(self, kept: Kept, limit: float) -> WeightSyncError | None:
        """Why the engine does not serve the version; None when it does, or when nobody can tell."""
        if self._check_hook is None:
            return None
        facts = self._facts(kept)
        try:
            answer = self._check_hook.run(facts, limit, method="GET")
        except (EngineError, DeadlineError) as error:
            return error
        wanted = self._contains
        if wanted is None:
            return None
        for name in ("version", "digest", "run_id"):
            wanted = wanted.replace(f"{{{name}}}", str(facts[name]))
        if re.search(rf"(?<!\d){re.escape(wanted)}(?!\d)", answer):
            return None
        return EngineError("the answer names another version", field="check", found=answer[:200], expected=wanted)

    def _prove(self, kept: Kept) -> None:
        """At attach: the engine may have been restarted, or lost between two steps. Raises EngineError."""
        if self._served is kept:
            return
        if self._contains is not None and self._look(kept, self._check_s) is None:
            self._served = kept
            return
        try:
            self._load(kept)
        except DeadlineError as error:
            what = f"version {kept.number} is in place but the engine does not load it"
            raise EngineError(what, found=str(error), do="see that the engine runs") from error


def _seconds(option: str, value: float) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError) as error:
        raise ConfigError("not a number of seconds", field=option, found=value) from error
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError("not a usable limit", field=option, found=value, expected="seconds above 0")
    return seconds


def _checked_template(check: str | None, contains: str | None) -> str | None:
    if contains is None:
        return None
    if check is None:
        raise ConfigError("needs check", field="check_contains", do="set check to a URL or a command")
    if "{version}" not in contains and "{digest}" not in contains:
        raise ConfigError("cannot tell versions apart", field="check_contains", found=contains,
                          expected="{version} or {digest} in it")  # fmt: skip
    return contains
