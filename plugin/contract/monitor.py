"""The mismatch monitor: how far rollout logprobs are from the trainer's own, where that comes from, and when to alarm.

Owns the comparison, by engine and version, the diagnosis and what metrics and alarms say. Owns no forward pass: whoever
calls brings the trainer's logprobs, and a way to score by an older version where one is at hand.

Two things make the numbers differ, and they call for different cures. An engine may have sampled by another *version*
than the trainer's: staleness, which importance sampling is there for. Or it computes other *numbers* from the same
version: kernels, precision, or weights that are not what it says. So each token is scored by the version that sampled it,
as its trajectory says: what is left then is numeric. When that is too much, the versions around it are tried: an engine
whose logprobs are those of another version than it says is not wrong in its numbers but in its weights.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.contract.mismatch import Numbers, measure, tokens_by_version
from weight_sync.errors import InputError, TrajectoryError, VersionError
from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["Alarm", "Cause", "Finding", "MismatchMonitor", "MismatchReport", "Scorer"]

_LOG = logging.getLogger("weight_sync.contract")
_PREFIX = "weight_sync/mismatch_"
_KEPT = 1000  # findings, for the plot

Floats = npt.NDArray[np.float64]
Scorer = Callable[[int, Sequence[trajectory_pb2.Trajectory]], Sequence[Any]]
"""(version, trajectories) -> per trajectory the logprobs of its output tokens by that version, under the sampling's
temperature. Raises VersionError for a version that cannot be had."""


class Cause(Enum):
    """Why an engine's logprobs differ from the trainer's."""

    AGREES = "agrees"  # at its own version, within the bound
    STALE = "stale"  # sampled by an older version, as it says; at that version it agrees
    OTHER_VERSION = "other version"  # its logprobs are those of another version than it says
    NUMERIC = "numeric"  # no version explains them: kernels, precision or weights differ
    UNKNOWN = "unknown"  # sampled by another version than the trainer's, which could not be scored


@dataclass(frozen=True)
class Finding:
    """One engine and one version that it says to have sampled by, in one batch.

    Attributes:
        engine, version: as the trajectories say.
        contract_ids: of the trajectories.
        current: the trainer's version.
        total: rollout against the trainer's current logprobs.
        own: against the logprobs of ``version``; None when that could not be scored.
        cause: with ``held``, the version that the logprobs are those of, for OTHER_VERSION.
    """

    engine: str
    version: int
    contract_ids: tuple[str, ...]
    current: int
    total: Numbers
    own: Numbers | None
    cause: Cause
    held: int | None = None

    @property
    def staleness(self) -> int:
        """The trainer's version minus the one that sampled."""
        return self.current - self.version


@dataclass(frozen=True)
class Alarm:
    """A finding that is beyond the bound, with a line that says so."""

    finding: Finding
    text: str


@dataclass(frozen=True)
class MismatchReport:
    """Of one batch; ``batch`` is over all tokens, against the trainer's current logprobs."""

    batch: Numbers
    findings: tuple[Finding, ...]
    alarms: tuple[Alarm, ...]
    skipped: int  # trajectories without logprobs

    def metrics(self) -> dict[str, float]:
        """For the host's logger; ``numeric`` is the largest mean at an engine's own version."""
        out = {_PREFIX + name: value for name, value in self.batch.as_dict().items()}
        own = [f.own.mean for f in self.findings if f.own is not None]
        out |= {_PREFIX + "alarms": float(len(self.alarms)), _PREFIX + "skipped": float(self.skipped)}
        return out | ({_PREFIX + "numeric": max(own)} if own else {})


class MismatchMonitor:
    """Compares batch after batch; not thread-safe.

    Args:
        bound: mean |difference| at an engine's own version above which it alarms.
        outlier: |difference| above which a token counts as one.
        around: versions before and after the stated one that are tried when an engine is beyond the bound.

    Attributes:
        last: the report of the last batch, None before.
    """

    def __init__(self, bound: float = 0.01, outlier: float = 0.1, around: int = 2) -> None:
        if not (bound > 0 and outlier > 0 and around >= 0):
            raise InputError("not usable limits", field="bound, outlier, around", found=(bound, outlier, around),
                             expected="above 0, above 0, 0 or more")  # fmt: skip
        self.bound, self.outlier, self.around = bound, outlier, around
        self.last: MismatchReport | None = None
        self._history: list[Finding] = []
        self._alarmed: set[tuple[str, Cause]] = set()

    def observe(
        self,
        trajectories: Sequence[trajectory_pb2.Trajectory],
        logprobs: Sequence[Any],
        version: int,
        score: Scorer | None = None,
    ) -> MismatchReport:
        """Compares one batch.

        Args:
            trajectories: as the inbox gave them; those without logprobs are counted and left out.
            logprobs: per trajectory the trainer's own logprobs of its output tokens, (tokens,) floats.
            version: that they were computed by.
            score: for tokens that another version sampled, and to find out whose numbers an engine's are.

        Raises TrajectoryError when lengths do not fit or a number is not finite.
        """
        if len(logprobs) != len(trajectories):
            raise TrajectoryError("logprobs do not match the trajectories", field="logprobs", found=len(logprobs),
                                  expected=len(trajectories))  # fmt: skip
        pairs = [(t, _row(t, row)) for t, row in zip(trajectories, logprobs, strict=True) if t.output_logprobs]
        groups: dict[str, list[int]] = defaultdict(list)
        for index, (trajectory, _) in enumerate(pairs):
            groups[trajectory.engine_id].append(index)
        findings: list[Finding] = []
        for engine in sorted(groups):
            findings += self._engine(engine, [pairs[i] for i in groups[engine]], version, score)
        every = measure(np.concatenate([_told(t) for t, _ in pairs] or [np.empty(0)]),
                        np.concatenate([row for _, row in pairs] or [np.empty(0)]), self.outlier)  # fmt: skip
        alarms = tuple(Alarm(f, text) for f in findings if (text := self._beyond(f)))
        self.last = MismatchReport(every, tuple(findings), alarms, len(trajectories) - len(pairs))
        self._history = [*self._history, *findings][-_KEPT:]
        self._tell(alarms, findings)
        return self.last

    # --- one engine ---

    def _engine(
        self, engine: str, pairs: Sequence[tuple[trajectory_pb2.Trajectory, Floats]], current: int, score: Scorer | None
    ) -> list[Finding]:
        """One finding per version that sampled, oldest first."""
        batch = [trajectory for trajectory, _ in pairs]
        scored: dict[int, list[Floats] | None] = {current: [row for _, row in pairs]}

        def at(version: int) -> list[Floats] | None:
            if version not in scored:
                scored[version] = _scores(score, version, batch)
            return scored[version]

        ids = tuple(sorted({trajectory.contract_id for trajectory in batch}))
        out = []
        for version, masks in sorted(tokens_by_version(batch).items()):
            told = _pick([_told(trajectory) for trajectory in batch], masks)

            def numbers(of: int, told: Floats = told, masks: Any = masks) -> Numbers | None:
                rows = at(of)
                return None if rows is None else measure(told, _pick(rows, masks), self.outlier)

            total, own = numbers(current), numbers(version)
            assert total is not None
            cause, held = self._cause(version, current, own, numbers)
            out.append(Finding(engine, version, ids, current, total, own, cause, held))
        return out

    def _cause(
        self, version: int, current: int, own: Numbers | None, numbers: Callable[[int], Numbers | None]
    ) -> tuple[Cause, int | None]:
        if own is None:
            return Cause.UNKNOWN, None
        if own.mean <= self.bound:
            return (Cause.AGREES if version == current else Cause.STALE), None
        near = range(max(0, version - self.around), version + self.around + 1)
        tried = {other: numbers(other) for other in {*near, current} - {version}}
        best = min((n.mean, other) for other, n in [*tried.items(), (version, own)] if n is not None)
        if best[1] != version and best[0] <= self.bound:
            return Cause.OTHER_VERSION, best[1]
        return Cause.NUMERIC, None

    def _beyond(self, finding: Finding) -> str:
        """Why a finding is an alarm; "" when it is none."""
        if finding.cause not in (Cause.OTHER_VERSION, Cause.NUMERIC) or finding.own is None:
            return ""
        who = f"engine {finding.engine or '(unnamed)'} says version {finding.version}"
        gap = f"mean |logprob difference| {finding.own.mean:.4g}, bound {self.bound:g}"
        if finding.cause is Cause.OTHER_VERSION:
            return f"{who}, but its logprobs are those of version {finding.held}: it holds other weights ({gap})"
        return f"{who}, and no version explains its logprobs: kernels, precision or weights differ ({gap})"

    def _tell(self, alarms: Iterable[Alarm], findings: Iterable[Finding]) -> None:
        """Once per engine and cause, until it agrees again."""
        for finding in findings:
            if finding.cause in (Cause.AGREES, Cause.STALE):
                self._alarmed = {key for key in self._alarmed if key[0] != finding.engine}
        for alarm in alarms:
            key = (alarm.finding.engine, alarm.finding.cause)
            if key not in self._alarmed:
                self._alarmed.add(key)
                _LOG.warning("%s", alarm.text)

    # --- what is told ---

    def metrics(self) -> dict[str, float]:
        """Of the last batch, for the host's logger; {} before the first."""
        return {} if self.last is None else self.last.metrics()

    def prometheus(self) -> str:
        """The newest finding of each engine and version of the last batch, in Prometheus' text format."""
        lines: list[str] = []
        findings = () if self.last is None else self.last.findings
        for name in ("mean", "max", "k1", "k2", "k3", "share", "tokens"):
            metric = f"weight_sync_mismatch_{name}"
            lines.append(f"# TYPE {metric} gauge")
            for finding in findings:
                for at, found in (("current", finding.total), ("own", finding.own)):
                    if found is not None:
                        labels = _labels(engine=finding.engine, version=finding.version, scored_at=at)
                        lines.append(f"{metric}{labels} {found.as_dict()[name]!r}")
        lines.append("# TYPE weight_sync_mismatch_alarm gauge")
        for finding in findings:
            labels = _labels(engine=finding.engine, version=finding.version, cause=finding.cause.value)
            lines.append(f"weight_sync_mismatch_alarm{labels} {int(bool(self._beyond(finding)))}")
        return "\n".join(lines) + "\n"

    def plot(self, target: str | Path) -> None:
        """Draws what was found so far: the mean at each engine's own version, and against the trainer's current one.

        Raises ConfigError without matplotlib or for an unknown format, InputError when it cannot be written.
        """
        from weight_sync.contract.plot import draw

        draw(self._history, self.bound, Path(target))


# --- rows -------------------------------------------------------------------------------------------------------------


def _told(trajectory: trajectory_pb2.Trajectory) -> Floats:
    return np.asarray(trajectory.output_logprobs, np.float64)


def _row(trajectory: trajectory_pb2.Trajectory, row: Any) -> Floats:
    """A trainer's logprobs of one trajectory, checked."""
    plain = (
        row.detach().double().cpu() if hasattr(row, "detach") else row
    )  # a tensor, of whatever dtype, on whatever device
    found: Floats = np.asarray(plain, np.float64).reshape(-1)
    if len(found) != len(trajectory.output_logprobs):
        raise TrajectoryError("logprobs do not match the tokens", field=f"logprobs of {trajectory.id}",
                              found=len(found), expected=len(trajectory.output_logprobs))  # fmt: skip
    if not (np.isfinite(found).all() and np.isfinite(_told(trajectory)).all()):
        raise TrajectoryError("not a finite number", field=f"logprobs of {trajectory.id}", expected="finite logprobs")
    return found


def _scores(score: Scorer | None, version: int, batch: Sequence[trajectory_pb2.Trajectory]) -> list[Floats] | None:
    """None when that version cannot be scored."""
    if score is None:
        return None
    try:
        return [_row(t, row) for t, row in zip(batch, score(version, batch), strict=True)]
    except VersionError as error:
        _LOG.info("version %d cannot be scored: %s", version, error)
        return None


def _pick(rows: Sequence[Floats], masks: Mapping[int, npt.NDArray[np.bool_]]) -> Floats:
    """The chosen tokens of the chosen rows, one after the other."""
    return np.concatenate([rows[index][mask] for index, mask in sorted(masks.items())])


def _labels(**pairs: object) -> str:
    def escaped(value: object) -> str:
        return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(value)}"' for name, value in pairs.items()) + "}"
