"""The trainer's view of its rollouts: their processes, and the batches that come from them.

Owns starting and ending the processes, and grouping trajectories. Owns no training and no sampling.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import weight_sync

CLOSING_S = 10.0  # that long a process has for a clean end


class RolloutError(Exception):
    """A rollout does not do its part."""


class Rollouts:
    """The rollout processes. They end when this object is closed, and when this process is gone.

    Attributes:
        processes: by name.
    """

    def __init__(self, count: int, logs: Path, **arguments: object) -> None:
        """``arguments`` are options of rollout.py."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = str(max(1, cores // (2 * count)))
        command = [sys.executable, str(Path(__file__).with_name("rollout.py")), "--threads", threads]
        for key, value in arguments.items():
            command += [f"--{key}", str(value)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs = logs
        logs.mkdir(exist_ok=True)
        for number in range(count):
            name = f"rollout-{number}"
            with self._log(name).open("wb") as log:
                # A session of its own: Ctrl-C reaches the trainer alone, which ends the others by closing the pipe.
                self.processes[name] = subprocess.Popen(
                    [*command, "--name", name],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "OMP_NUM_THREADS": threads, "WEIGHT_SYNC_THREADS": threads},
                )

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def check(self) -> None:
        """Raises RolloutError with the end of the log when a process has ended."""
        for name, process in self.processes.items():
            if process.poll() is not None:
                tail = "\n".join(self._log(name).read_text(errors="replace").splitlines()[-15:])
                raise RolloutError(f"{name} ended with code {process.returncode}; {self._log(name)} ends with:\n{tail}")

    def close(self) -> None:
        """Asks all to end, and makes them after a while."""
        for process in self.processes.values():
            assert process.stdin is not None
            process.stdin.close()
        deadline = time.monotonic() + CLOSING_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Inbox:
    """Trajectories as they come in, until enough groups are full.

    Attributes:
        dropped: trajectories that were too old.
    """

    def __init__(self, prompts: int, group: int, max_staleness: int) -> None:
        self.dropped = 0
        self._prompts, self._group, self._max_staleness = prompts, group, max_staleness
        self._groups: dict[str, dict[str, Any]] = defaultdict(dict)

    def take(self, publisher: weight_sync.Publisher) -> list[Any] | None:
        """One batch of trajectories; None while there is none."""
        for trajectory in publisher.take_trajectories():
            self._groups[trajectory.group][trajectory.id] = trajectory  # one that comes twice counts once
        assert publisher.version is not None
        for name, group in list(self._groups.items()):
            if any(staleness(t, publisher.version) > self._max_staleness for t in group.values()):
                self.dropped += len(self._groups.pop(name))
        full = [name for name, group in self._groups.items() if len(group) == self._group]
        if len(full) < self._prompts:
            return None
        return [t for name in full[: self._prompts] for t in self._groups.pop(name).values()]


def staleness(trajectory: Any, version: int) -> int:
    """How far the oldest version that sampled one of its tokens lies behind ``version``."""
    return version - min((span.number for span in trajectory.spans), default=version)
