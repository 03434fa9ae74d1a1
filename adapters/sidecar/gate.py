"""The gate between clients and the engine: who is let in under which version, who waits, who is still in there.

Owns the counts, the waiting and what is known of the engine, for two threads: requests come from the event loop, fences
from the replica's thread. Owns no decision (admission.py) and no engine.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from weight_sync.adapters.sidecar.admission import Answer, Situation, Verdict, decide
from weight_sync.adapters.sidecar.constraint import Constraint

__all__ = ["Gate", "Ticket"]


@dataclass(eq=False)
class Ticket:
    """One request that was let in.

    Attributes:
        run, version: what was served then.
        cancel: ends the request; called from any thread.
        contract: id of how the engine computes; "" when it does not say.
    """

    run: str
    version: int
    cancel: Callable[[], object]
    contract: str = ""


@dataclass(eq=False)
class _Waiter:
    want: Constraint | None
    patient: bool
    cancel: Callable[[], object]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    outcome: Ticket | Verdict | None = None  # set under the lock; the future only wakes


class Gate:
    """Thread-safe. Shut, and serving nothing, until it is told otherwise.

    Args:
        head_trust_s: how long ago the head may have been looked at for a demand about staleness.
        fence_wait_s: how long a request that does not say so waits for the end of a fence.

    Attributes:
        on_behind: called, from the event loop, when a request wants a version that is not served yet.
        contract: id of how the engine computes, told when it is described; "" before.
    """

    def __init__(self, head_trust_s: float, fence_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._now = Situation()
        self._ended = False
        self._seen: float | None = None  # when the head was looked at
        self._inside: set[Ticket] = set()
        self._waiting: set[_Waiter] = set()
        self._head_trust_s, self._fence_wait_s, self._clock = head_trust_s, fence_wait_s, clock
        self.on_behind: Callable[[], None] = lambda: None
        self.contract = ""

    # --- what is known, told by the replica's threads ---

    def announce(self, run: str, version: int) -> None:
        """The version that requests are admitted under from now on."""
        self._change(run=run, version=version)

    def saw(self, run: str, head: int | None) -> None:
        """The newest version of the newest run, just looked at."""
        self._seen = self._clock()
        self._change(head_run=run, head=head)

    def doubt(self) -> None:
        """What the engine holds is not known: nothing is served until a version is announced."""
        self._change(run=None, version=None, open=False)

    def returned(self) -> None:
        """The engine answers again: as `doubt`, and those who wait for a version may wait."""
        self._change(run=None, version=None, open=False, down="")

    def down(self, reason: str) -> None:
        """Nothing is let in, and those who wait are sent away, until ``reason`` is "" again."""
        self._change(down=reason)

    def end(self) -> None:
        """As `down`, for good."""
        self._ended = True
        self._change()

    def close(self) -> bool:
        """Nobody is let in any more. Returns whether it was open."""
        with self._lock:
            was, self._now = self._now.open, replace(self._now, open=False)
            return was

    def open(self) -> None:
        """Requests are let in again; those who waited for just this version are inside on return."""
        self._change(open=True)

    def drain(self, timeout: float) -> bool:
        """Waits until nobody is inside. Returns whether that happened."""
        with self._left:
            return self._left.wait_for(lambda: not self._inside, timeout)

    def cancel(self) -> int:
        """Ends every request that is inside; returns how many."""
        with self._lock:
            inside = list(self._inside)
        for ticket in inside:
            ticket.cancel()
        return len(inside)

    def _change(self, **changes: object) -> None:
        with self._lock:
            if self._ended:
                changes["down"] = "the sidecar is ending"
            self._now = replace(self._now, **changes)  # type: ignore[arg-type]
            for waiter in list(self._waiting):
                self._settle(waiter, self._decide(waiter.want))

    def _settle(self, waiter: _Waiter, verdict: Verdict) -> None:
        if _may_wait(verdict, waiter.patient):
            return
        self._waiting.discard(waiter)
        waiter.outcome = self._ticket(waiter.cancel) if verdict.answer is Answer.ADMIT else verdict
        waiter.loop.call_soon_threadsafe(_wake, waiter.done)

    # --- requests ---

    @property
    def now(self) -> Situation:
        """What is served, and what is known of the run."""
        with self._lock:
            return self._aged()

    @property
    def inside(self) -> int:
        """Requests in flight."""
        return len(self._inside)

    @property
    def waiting(self) -> int:
        """Requests that wait for a version or for the end of a fence."""
        return len(self._waiting)

    def wanted(self) -> int | None:
        """The lowest version above the one served, and at most the head, that somebody waits for exactly."""
        with self._lock:
            version, head = self._now.version, self._now.head
            if version is None or head is None or self._now.head_run != self._now.run:
                return None
            numbers = [w.want.number for w in self._waiting if w.want is not None and w.want.kind == "exact"]
            return min((number for number in numbers if version < number <= head), default=None)

    async def enter(
        self, want: Constraint | None, wait_s: float | None, cancel: Callable[[], object]
    ) -> Ticket | Verdict:
        """Lets a request in, at the latest after ``wait_s`` seconds, or says why not.

        Without ``wait_s`` only the end of a fence is waited for. ``cancel`` ends the request, from any thread. Who got
        a ticket calls `leave`, whatever happens.
        """
        patient = wait_s is not None
        with self._lock:
            verdict = self._decide(want)
            if verdict.answer is Answer.ADMIT:
                return self._ticket(cancel)
            if not _may_wait(verdict, patient):
                return verdict
            loop = asyncio.get_running_loop()
            waiter = _Waiter(want, patient, cancel, loop, loop.create_future())
            self._waiting.add(waiter)
        self.on_behind()
        try:
            async with asyncio.timeout(self._fence_wait_s if wait_s is None else wait_s):
                await waiter.done
        except TimeoutError:
            return self._give_up(waiter)
        except BaseException:
            outcome = self._give_up(waiter)
            if isinstance(outcome, Ticket):
                self.leave(outcome)
            raise
        assert waiter.outcome is not None
        return waiter.outcome

    def _give_up(self, waiter: _Waiter) -> Ticket | Verdict:
        """The outcome at the end of the wait, which may have come at the last moment."""
        with self._lock:
            self._waiting.discard(waiter)
            if waiter.outcome is None:
                verdict = self._decide(waiter.want)
                waiter.outcome = self._ticket(waiter.cancel) if verdict.answer is Answer.ADMIT else verdict
            return waiter.outcome

    def leave(self, ticket: Ticket) -> None:
        """The request is over."""
        with self._left:
            self._inside.discard(ticket)
            if not self._inside:
                self._left.notify_all()

    def _decide(self, want: Constraint | None) -> Verdict:
        return decide(want, self._aged(), self._head_trust_s)

    def _aged(self) -> Situation:
        if self._seen is None:
            return self._now
        return replace(self._now, head_age_s=self._clock() - self._seen)

    def _ticket(self, cancel: Callable[[], object]) -> Ticket:
        run, version = self._now.run, self._now.version
        assert run is not None and version is not None
        ticket = Ticket(run, version, cancel, self.contract)
        self._inside.add(ticket)
        return ticket


def _may_wait(verdict: Verdict, patient: bool) -> bool:
    """Whether to keep a request: to the end of a fence always, for a version only if it said how long."""
    return verdict.answer is Answer.FENCED or (patient and verdict.answer in (Answer.BEHIND, Answer.ATTACHING))


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
