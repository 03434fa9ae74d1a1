"""CPU and wall seconds of jobs that take turns.

Owns the stopwatch. Owns no jobs. On a shared machine a neighbour slows whatever runs at that moment, so jobs to be
compared alternate in one process and each counts its best round; ratios are then steadier than the seconds themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Job", "Seconds", "alternate"]


@dataclass(frozen=True)
class Job:
    """Something to be timed.

    Attributes:
        run: what is timed.
        prepare: called before each run, not timed.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Seconds:
    """Best round of a job. ``cpu`` counts all threads of this process."""

    cpu: float
    wall: float


def alternate(jobs: Sequence[Job], rounds: int) -> dict[str, Seconds]:
    """Runs all jobs ``rounds`` times in turn, after one round that warms buffers and compiles kernels."""
    best = {job.name: Seconds(float("inf"), float("inf")) for job in jobs}
    for number in range(rounds + 1):
        for job in jobs:
            job.prepare()
            wall, cpu = time.perf_counter(), time.process_time()
            job.run()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if number:
                before = best[job.name]
                best[job.name] = Seconds(min(before.cpu, cpu), min(before.wall, wall))
    return best
