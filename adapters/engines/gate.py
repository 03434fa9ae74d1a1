"""Admission to a model that is updated in place: requests, their steps, and the fence that stops them.

Owns the counts and the waiting. Owns no model and no version.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from weight_sync.errors import DeadlineError
from weight_sync.ports import PauseMode

__all__ = ["Gate"]


class Gate:
    """A request is admitted once, then asks before each step (one forward pass) whether it may go on.

    Closed, the gate admits no request. Those in flight, by mode: KEEP stops them before their next step, WAIT lets them
    finish, ABORT tells them to end. No step runs while ``pause`` has returned and ``resume`` has not been called.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed: PauseMode | None = None
        self._requests = 0
        self._steps = 0

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted."""
        return self._closed is None

    @contextmanager
    def request(self, timeout: float) -> Iterator[None]:
        """Admission of one request. Raises DeadlineError when the gate stays closed for ``timeout`` seconds."""
        with self._changed:
            self._await(lambda: self._closed is None, timeout, "admission to the engine")
            self._requests += 1
        try:
            yield
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    @contextmanager
    def step(self, timeout: float) -> Iterator[bool]:
        """One step of an admitted request; yields False when the request must end. Raises DeadlineError as above."""
        with self._changed:
            self._await(lambda: self._closed is not PauseMode.KEEP, timeout, "the end of a fence")
            goes_on = self._closed is not PauseMode.ABORT
            self._steps += goes_on
        try:
            yield goes_on
        finally:
            with self._changed:
                self._steps -= goes_on
                self._changed.notify_all()

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Closes the gate and settles requests in flight. Raises DeadlineError; the gate is as before then."""
        with self._changed:
            before, self._closed = self._closed, mode
            self._changed.notify_all()
            try:
                if mode is PauseMode.KEEP:
                    self._await(lambda: not self._steps, timeout, "steps in flight")
                else:
                    self._await(lambda: not self._requests, timeout, "requests in flight")
            except DeadlineError:
                self._closed = before
                self._changed.notify_all()
                raise

    def resume(self) -> None:
        """Opens the gate."""
        with self._changed:
            self._closed = None
            self._changed.notify_all()

    def _await(self, settled: Callable[[], bool], timeout: float, what: str) -> None:
        if not self._changed.wait_for(settled, timeout):
            raise DeadlineError(
                f"{what} took too long",
                field="timeout",
                found=f"{self._requests} requests, {self._steps} steps",
                expected=f"within {timeout:g} s",
                do="allow more time, or pause in another mode",
            )
