"""A pipeline of FIFO stages under a limit of temporary memory.

Owns the order of tasks, how many are in flight, and the seconds of each stage. Owns no stage: a stage is a function
that begins its work and returns None when that is done, or a function that tells whether it is done. So a stage on a
GPU returns its event's ``query``, and nobody waits for the device.

A task begins when its temporary memory fits below the watermark and the task it comes after is done; tasks end in order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weight_sync.errors import DeadlineError, InputError

__all__ = ["Pipeline", "StageSeconds", "Task"]

Done = Callable[[], bool]
Start = Callable[[], Done | None]
_POLL_S = 0.0002


@dataclass(frozen=True)
class Task:
    """One tensor, or part of one, on its way.

    Attributes:
        name: for messages.
        nbytes: temporary memory from the first stage's beginning to the last one's end.
        stages: by name, in order; a task may skip stages.
        after: index of a task that must be done before, because it uses the same memory; -1 for none.
    """

    name: str
    nbytes: int
    stages: Sequence[tuple[str, Start]]
    after: int = -1


@dataclass
class StageSeconds:
    """Of one stage: seconds at work, and how many tasks passed."""

    busy: float = 0.0
    tasks: int = 0


@dataclass
class _Moving:
    index: int
    task: Task
    at: int = 0


class Pipeline:
    """Named stages, each with a thread of its own while `run` runs.

    Args:
        stages: names in order, each with the number of tasks that it may have under way at once.
        watermark: most temporary bytes; a task that is larger runs alone.
    """

    def __init__(self, stages: Sequence[tuple[str, int]], watermark: int) -> None:
        self._stages, self._watermark = list(stages), watermark
        self._order = {name: i for i, (name, _) in enumerate(stages)}
        self.peak = 0
        self.seconds: dict[str, StageSeconds] = {}

    def run(self, tasks: Sequence[Task], timeout: float) -> None:
        """Carries all tasks through. Raises what a stage raised first, after the others have ended, and DeadlineError."""
        for task in tasks:
            order = [self._order.get(name, -1) for name, _ in task.stages]
            if -1 in order or order != sorted(order):
                raise InputError("stages out of order", field=task.name, found=[name for name, _ in task.stages],
                                 expected=list(self._order))  # fmt: skip
        self.seconds = {name: StageSeconds() for name, _ in self._stages}
        _Run(self, self._stages, self._watermark, tasks, time.monotonic() + timeout).go()


@dataclass
class _Run:
    owner: Pipeline
    stages: Sequence[tuple[str, int]]
    watermark: int
    tasks: Sequence[Task]
    deadline: float
    queues: dict[str, queue.SimpleQueue[_Moving | None]] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)
    finished: list[bool] = field(default_factory=list)
    prefix: int = 0  # tasks that are done with all before them
    held: int = 0
    error: BaseException | None = None

    def go(self) -> None:
        self.queues = {name: queue.SimpleQueue() for name, _ in self.stages}
        self.finished = [False] * len(self.tasks)
        threads = [
            threading.Thread(target=self._work, args=(name, most), name=f"weight_sync-{name}", daemon=True)
            for name, most in self.stages
        ]
        for thread in threads:
            thread.start()
        try:
            for index, task in enumerate(self.tasks):
                if not self._admit(index, task):
                    break
                self._forward(_Moving(index, task))
            self._wait(lambda: self.prefix == len(self.tasks))
        finally:
            for name, _ in self.stages:
                self.queues[name].put(None)
            for thread in threads:
                thread.join(max(1.0, self.deadline - time.monotonic()))
        if self.error is not None:
            raise self.error
        if self.prefix < len(self.tasks):
            late = self.tasks[self.prefix].name
            raise DeadlineError("the pipeline has not ended", field=late, expected="in the time given")

    def _wait(self, ready: Callable[[], bool]) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.error is not None or ready(), max(0.0, self.deadline - time.monotonic()))
            return self.error is None and ready()

    def _admit(self, index: int, task: Task) -> bool:
        def fits() -> bool:
            free = self.held == 0 or self.held + task.nbytes <= self.watermark
            return free and task.after < self.prefix

        if not self._wait(fits):
            return False
        with self.changed:
            self.held += task.nbytes
            self.owner.peak = max(self.owner.peak, self.held)
        return True

    def _forward(self, moving: _Moving) -> None:
        if moving.at < len(moving.task.stages):
            self.queues[moving.task.stages[moving.at][0]].put(moving)
            return
        with self.changed:
            self.finished[moving.index] = True
            while self.prefix < len(self.tasks) and self.finished[self.prefix]:
                self.prefix += 1
            self.held -= moving.task.nbytes
            self.changed.notify_all()

    def _work(self, name: str, most: int) -> None:
        """One stage: begins tasks in order, keeps up to ``most`` under way."""
        waiting, under_way = self.queues[name], deque[tuple[_Moving, Done]]()
        spent = self.owner.seconds[name]
        ended = False
        try:
            while not ended or under_way:
                moving = None
                if not ended and len(under_way) < most and self.error is None:
                    moving, ended = self._next(waiting, bool(under_way))
                began = time.perf_counter()
                if moving is not None:
                    done = moving.task.stages[moving.at][1]()
                    if done is None:
                        self._passed(moving, name)
                    else:
                        under_way.append((moving, done))
                progress = self._poll(under_way, name)
                if moving is not None or under_way:
                    spent.busy += time.perf_counter() - began
                if under_way and not progress and moving is None:
                    time.sleep(_POLL_S)
                    spent.busy += _POLL_S
                if time.monotonic() > self.deadline or (self.error is not None and not under_way):
                    return
        except BaseException as error:
            with self.changed:
                self.error = self.error or error
                self.changed.notify_all()

    def _next(self, waiting: queue.SimpleQueue[_Moving | None], busy: bool) -> tuple[_Moving | None, bool]:
        try:
            moving = waiting.get(block=not busy, timeout=None if busy else 0.05)
        except queue.Empty:
            return None, False
        return moving, moving is None

    def _poll(self, under_way: deque[tuple[_Moving, Done]], name: str) -> bool:
        progress = False
        while under_way and under_way[0][1]():
            self._passed(under_way.popleft()[0], name)
            progress = True
        return progress

    def _passed(self, moving: _Moving, name: str) -> None:
        self.owner.seconds[name].tasks += 1
        moving.at += 1
        self._forward(moving)
