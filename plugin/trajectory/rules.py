"""What a trajectory must be like, how stale one is, and when a sender may try again: pure, no I/O.

Owns the checks, the limits and the one definition of staleness. Owns no storage and no counting (inbox.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weight_sync.errors import LineageError, TrajectoryError
from weight_sync.proto.v1 import trajectory_pb2

__all__ = [
    "MAX_BYTES",
    "MAX_TEXT",
    "check",
    "check_batch",
    "check_run",
    "check_size",
    "oldest_version",
    "retry_after",
    "staleness",
]

MAX_TEXT = 256
"""Bytes of an id, and of each other short text of a trajectory."""

MAX_BYTES = 64 << 20
"""Bytes of one trajectory, as a message."""

_TEXTS = ("run_id", "finish_reason", "engine_id", "contract_id", "group")
_LAST_VERSION = (1 << 63) - 1  # what a file can hold
_SHORTEST_S, _LONGEST_S, _UNKNOWN_S = 0.05, 30.0, 1.0


def oldest_version(trajectory: trajectory_pb2.Trajectory) -> int:
    """Number of the oldest version that sampled one of its tokens. ``check`` makes sure that there is one."""
    return min(span.number for span in trajectory.spans)


def staleness(trajectory: trajectory_pb2.Trajectory, current_version: int) -> int:
    """The trainer's current version minus the *oldest* version that sampled one of the tokens.

    One token of an old version makes the whole trajectory as stale as that token. Negative for a trajectory that is
    ahead of the trainer, which can be after the trainer went back to a checkpoint.
    """
    return current_version - oldest_version(trajectory)


def check(trajectory: trajectory_pb2.Trajectory, where: str = "trajectory") -> None:
    """Raises TrajectoryError, which names the field below ``where``, unless a trainer can learn from the trajectory."""
    given: object = trajectory
    if not isinstance(given, trajectory_pb2.Trajectory):
        raise TrajectoryError("not a trajectory", field=where, found=type(given).__name__,
                              expected="weight_sync.proto.v1.trajectory_pb2.Trajectory")  # fmt: skip
    _check_text(f"{where}.id", trajectory.id, least=1)
    for name in _TEXTS:
        _check_text(f"{where}.{name}", getattr(trajectory, name), least=0)
    tokens = len(trajectory.output_token_ids)
    if not tokens:
        raise TrajectoryError("no output tokens, so no version has sampled it", field=f"{where}.output_token_ids",
                              found=0, expected="1 or more", do="drop what was aborted before its first token")  # fmt: skip
    _check_spans(trajectory, tokens, where)
    logprobs = trajectory.output_logprobs
    if len(logprobs) not in (0, tokens):
        raise TrajectoryError("logprobs do not match the tokens", field=f"{where}.output_logprobs",
                              found=len(logprobs), expected=f"0 or {tokens}")  # fmt: skip
    finite = np.isfinite(np.asarray(logprobs, np.float64))
    if not finite.all():
        place = int(np.flatnonzero(~finite)[0])
        raise TrajectoryError("not a finite number", field=f"{where}.output_logprobs[{place}]",
                              found=logprobs[place], expected="a logprob of a sampled token")  # fmt: skip
    if trajectory.HasField("reward") and not math.isfinite(trajectory.reward):
        raise TrajectoryError("not a finite number", field=f"{where}.reward", found=trajectory.reward,
                              expected="a finite number, or no reward")  # fmt: skip


def check_size(size: int, where: str = "trajectory") -> None:
    """Raises TrajectoryError when the message is too large."""
    if size > MAX_BYTES:
        raise TrajectoryError("too large", field=where, found=f"{size} bytes", expected=f"at most {MAX_BYTES}")


def _check_text(field: str, value: str, least: int) -> None:
    if least <= len(value) <= MAX_TEXT // 4:  # however it is encoded
        return
    size = len(value.encode())
    if not least <= size <= MAX_TEXT:
        raise TrajectoryError("text of a wrong length", field=field, found=f"{size} bytes",
                              expected=f"{least} to {MAX_TEXT} bytes")  # fmt: skip


def _check_spans(trajectory: trajectory_pb2.Trajectory, tokens: int, where: str) -> None:
    at = 0
    for k, span in enumerate(trajectory.spans):
        if span.begin != at or span.end <= span.begin:
            raise TrajectoryError("spans must follow one another without holes", field=f"{where}.spans[{k}]",
                                  found=f"[{span.begin}, {span.end})", expected=f"[{at}, more)")  # fmt: skip
        if span.number > _LAST_VERSION:
            raise TrajectoryError("not a version", field=f"{where}.spans[{k}].number", found=span.number,
                                  expected=f"0 to {_LAST_VERSION}")  # fmt: skip
        at = span.end
    if at != tokens:
        raise TrajectoryError("spans do not cover the output tokens", field=f"{where}.spans",
                              found=f"[0, {at})", expected=f"[0, {tokens})")  # fmt: skip


def check_run(trajectory: trajectory_pb2.Trajectory, run_id: str | None, where: str = "trajectory") -> None:
    """Raises LineageError when the inbox is of a run and the trajectory of another."""
    if run_id is not None and trajectory.run_id != run_id:
        raise LineageError("trajectory of another run", field=f"{where}.run_id", found=trajectory.run_id,
                           expected=run_id, do="drop it: the trainer has gone on as another run")  # fmt: skip


def check_batch(batch: Sequence[trajectory_pb2.Trajectory], run_id: str) -> None:
    """What an inbox of this run would refuse, so that nobody gives a receipt for it. Raises TrajectoryError, LineageError."""
    for k, trajectory in enumerate(batch):
        check(trajectory, f"batch[{k}]")
        check_run(trajectory, run_id, f"batch[{k}]")
        check_size(trajectory.ByteSize(), f"batch[{k}]")


def retry_after(settled: Sequence[tuple[float, int]], needed: int) -> float:
    """Seconds until ``needed`` places are free, by the pace of the last batches that the trainer confirmed.

    Args:
        settled: (when in seconds, how many) of the last confirmed batches, oldest first.
    """
    if len(settled) < 2 or settled[-1][0] <= settled[0][0]:
        return _UNKNOWN_S
    pace = sum(count for _, count in settled[1:]) / (settled[-1][0] - settled[0][0])
    return min(_LONGEST_S, max(_SHORTEST_S, needed / pace)) if pace > 0 else _LONGEST_S
