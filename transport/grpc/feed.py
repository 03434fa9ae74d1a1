"""What is newest in a run: one thread per run that looks, any number of coroutines that wait.

Owns the looking and the telling. Owns no call of the service. News of a publisher in this process, or behind this
service, is handed in by `Feed.note` and need not be looked for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass

from weight_sync.errors import WeightSyncError
from weight_sync.ports import ReplicaEnd
from weight_sync.proto.v1 import manifest_pb2

__all__ = ["Feed", "State"]

_log = logging.getLogger("weight_sync.grpc")
_LOOK_S = 1.0
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class State:
    """Where a run stands.

    Attributes:
        newest: newest run of the store; None while there is none.
        head: newest version of the run that is followed; None while there is none.
        error: why the last look failed; empty when it did not.
    """

    newest: str | None = None
    head: int | None = None
    error: str = ""


class Feed:
    """Follows one end, which becomes its own."""

    def __init__(self, end: ReplicaEnd, loop: asyncio.AbstractEventLoop) -> None:
        self._end = end
        self._loop = loop
        self._stop = threading.Event()
        self._waiting: set[asyncio.Future[None]] = set()
        self._retired = False
        self._noted = False  # somebody tells of versions before they could be seen
        self.state = State()
        self._thread = threading.Thread(target=self._follow, name="weight_sync-feed", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        pause = 0.05
        while True:
            noted = self._noted  # then a look is for what another publisher does, which is rare
            if self._stop.wait(_LOOK_S if noted else 0):
                return
            state = self.state
            try:
                head = self._end.wait(state.head, 0 if noted else _LOOK_S)
                newest = self._end.newest_run()
                found = State(newest, state.head if head is None else head)
                pause = 0.05
            except WeightSyncError as error:
                found = State(state.newest, state.head, str(error))
                self._stop.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take, found)

    def _take(self, found: State) -> None:
        """On the loop."""
        head = found.head
        if self.state.head is not None and (head is None or head < self.state.head):
            head = self.state.head
        state = State(found.newest or self.state.newest, head, found.error)
        if bool(state.error) != bool(self.state.error):
            _log.warning("%s", f"no news from what is served here: {state.error}" if state.error else "news come again")
        if state != self.state:
            self.state = state
            self._wake()

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def note(self, newest: str | None, head: int | None) -> None:
        """News from whoever made it; on the loop."""
        self._noted = self._noted or head is not None
        self._take(State(newest, head))

    async def changed(self, seen: State) -> State:
        """The state once it is not ``seen`` any more, or once nothing more is told here."""
        while self.state == seen and not self._retired:
            future: asyncio.Future[None] = self._loop.create_future()
            self._waiting.add(future)
            try:
                await future
            finally:
                self._waiting.discard(future)
        return self.state

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """A version of the run; of an end far away, whose news bring the newest one along. Blocks; any thread may call."""
        return self._end.manifest(number)

    def retire(self) -> None:
        """Sends away who waits here: another feed tells more. On the loop."""
        self._retired = True
        self._wake()

    def stop(self) -> None:
        """Asks the thread to end."""
        self._stop.set()
        self._end.close()

    def join(self) -> None:
        """Waits until it has."""
        self._thread.join(5.0)
