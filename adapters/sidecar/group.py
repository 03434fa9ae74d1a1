"""Several engines as one: all of them take a version, or none announces it.

Owns the order of the members at each step, and what becomes of all when one fails. Owns no member, no gate and no
choice who answers a request (balance.py).

The group serves while every member holds the same version. A member that dies or differs makes the whole group not
ready until it is back: whoever wants the others to go on gives each engine a sidecar of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from weight_sync.adapters.sidecar.engine import ServedEngine
from weight_sync.codec.digest import Digest
from weight_sync.errors import EngineError, EngineInDoubtError, WeightSyncError
from weight_sync.ports import Engine, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, replica_pb2

__all__ = ["EngineGroup"]

_R = TypeVar("_R")


class EngineGroup(Engine):
    """An engine that is several. Driven by one thread, except ``alive``.

    Args:
        members: by URL, one or more, of one kind.
    """

    def __init__(self, members: dict[str, ServedEngine]) -> None:
        self._urls, self._members = list(members), list(members.values())
        self.control_routes = self._members[0].control_routes
        self._pool = ThreadPoolExecutor(len(members), thread_name_prefix="weight-sync-group")
        self._paused = False

    def _all(self, call: Callable[[ServedEngine], _R]) -> list[_R | WeightSyncError]:
        """What each member answered or raised; all have ended on return. What the port does not allow is raised."""
        tasks = [self._pool.submit(call, member) for member in self._members]
        failed = [task.exception() for task in tasks]  # waits for all
        for error in failed:
            if error is not None and not isinstance(error, WeightSyncError):
                raise error
        return [task.result() if error is None else error for task, error in zip(tasks, failed, strict=True)]  # type: ignore[misc]

    def _need(self, call: Callable[[ServedEngine], _R]) -> list[_R]:
        """Every member's answer. Raises what one raised, EngineInDoubtError before anything else."""
        return self._good(self._all(call))

    def _good(self, found: Sequence[_R | WeightSyncError]) -> list[_R]:
        errors = [(url, item) for url, item in zip(self._urls, found, strict=True) if isinstance(item, WeightSyncError)]
        for _, error in sorted(errors, key=lambda pair: not isinstance(pair[1], EngineInDoubtError)):
            raise error
        return [item for item in found if not isinstance(item, WeightSyncError)]

    # --- the port ---

    def describe(self) -> replica_pb2.EngineDescription:
        """Of the first; without a digest unless all hold the same bits. Raises EngineError when they are not alike."""
        found = self._need(lambda member: member.describe())
        first = found[0]
        for url, other in zip(self._urls, found, strict=True):
            if list(other.tensors) != list(first.tensors) or other.contract != first.contract:
                raise EngineError("the engines of the group are not alike", field=url,
                                  expected=f"tensors and contract of {self._urls[0]}",
                                  do="start them with the same options from one checkpoint")  # fmt: skip
        if any(not other.HasField("digest") or other.digest != first.digest for other in found):
            first.ClearField("digest")
        first.engine_id = ",".join(self._urls)
        return first

    def stage(self, update: Update) -> None:
        """All, while they serve. Raises EngineError; then nothing has changed."""
        self._need(lambda member: member.stage(update))

    def commit(self) -> Digest:
        """All or none; see `_one` for the digest. Raises EngineError after having restored the old bits everywhere."""
        found = self._all(lambda member: member.commit())
        failed = [item for item in found if isinstance(item, WeightSyncError)]
        if failed and not any(isinstance(error, EngineInDoubtError) for error in failed):
            done = [member for member, item in zip(self._members, found, strict=True) if isinstance(item, Digest)]
            try:
                for member in done:
                    member.rollback()
            except WeightSyncError as error:
                raise EngineInDoubtError("one engine of the group failed, and another could not be taken back",
                                         found=f"{failed[0]}; then: {error}", do="sync again") from error  # fmt: skip
            cause = failed[0]
            raise EngineError("commit failed, the old bits are back on all engines", found=str(cause)) from cause
        return self._one(self._good(found))

    def rollback(self) -> Digest:
        """All of them."""
        return self._one(self._need(lambda member: member.rollback()))

    def audit(self) -> Digest:
        """Of all of them."""
        return self._one(self._need(lambda member: member.audit()))

    @staticmethod
    def _one(digests: Sequence[Digest]) -> Digest:
        """The digest that all have; when they differ, their sum, which is the one of no version."""
        return digests[0] if all(digest == digests[0] for digest in digests) else Digest.sum(digests)

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """All of them; when one cannot, those that were open are opened again. Raises DeadlineError, EngineError."""
        was_paused = self._paused
        found = self._all(lambda member: member.pause(mode, timeout))
        try:
            self._good(found)
        except WeightSyncError:
            if not was_paused:
                self._all(lambda member: member.resume())
            raise
        self._paused = True

    def resume(self) -> None:
        """All of them."""
        self._need(lambda member: member.resume())
        self._paused = False

    def clear_caches(self) -> None:
        """Of all of them."""
        self._need(lambda member: member.clear_caches())

    def announce(self, version: common_pb2.VersionId) -> None:
        """To all of them."""
        self._need(lambda member: member.announce(version))

    def alive(self, timeout: float) -> bool:
        """Whether all answer within ``timeout`` seconds; any thread may ask."""
        end = time.monotonic() + timeout
        return all(member.alive(max(0.01, end - time.monotonic())) for member in self._members)

    def close(self) -> None:
        """All of them."""
        for member in self._members:
            with suppress(WeightSyncError):  # the port promises that it raises nothing
                member.close()
        self._pool.shutdown(wait=False)
