"""Whether a request may be answered now: a pure function of the demand and of what is served.

Owns the decision and its reason. Owns no waiting and no counting (gate.py), and no grammar (constraint.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from weight_sync.adapters.sidecar.constraint import Constraint

__all__ = ["Answer", "Situation", "Verdict", "decide"]

_SOON_S, _LATER_S = 1, 30


class Answer(Enum):
    """What becomes of a request."""

    ADMIT = "admit"
    BEHIND = "behind"  # the version is too old: waiting may help
    FENCED = "fenced"  # the next version is being written: waiting helps soon
    ATTACHING = "attaching"  # no version is served yet: waiting may help
    REFUSE = "refuse"  # waiting does not help
    DOWN = "down"  # the engine does not answer


@dataclass(frozen=True)
class Situation:
    """What is served, and what is known of the run, at one moment.

    Attributes:
        run, version: served, verified by digest; None when nothing is.
        head_run, head: the newest run and its newest version, None when they are not known.
        head_age_s: seconds since the head was looked at.
        open: False inside a fence.
        down: why nothing can be served, "" when something can.
    """

    run: str | None = None
    version: int | None = None
    head_run: str | None = None
    head: int | None = None
    head_age_s: float = 0.0
    open: bool = False
    down: str = ""

    @property
    def staleness(self) -> int | None:
        """Newest version minus the one served; None when the two are not known, or not of one run."""
        if self.version is None or self.head is None or self.head_run != self.run:
            return None
        return max(0, self.head - self.version)


@dataclass(frozen=True)
class Verdict:
    """A decision with its reason; ``retry_s`` is when to ask again."""

    answer: Answer
    reason: str
    retry_s: int = _SOON_S


def decide(want: Constraint | None, now: Situation, head_trust_s: float) -> Verdict:
    """What becomes of a request with this demand.

    Args:
        head_trust_s: how long ago the head may have been looked at for a demand about staleness.
    """
    if now.down:
        return Verdict(Answer.DOWN, now.down)
    if now.run is None or now.version is None:
        return Verdict(Answer.ATTACHING, "no version is served yet")
    if want is not None and want.run not in (None, now.run):
        return Verdict(Answer.REFUSE, f"run {now.run} is served", _LATER_S)
    if not now.open:
        return Verdict(Answer.FENCED, "the engine is taking another version")
    if want is None:
        return Verdict(Answer.ADMIT, "no constraint")
    served = f"version {now.version} is served"
    if want.kind == "max_staleness":
        return _fresh(want.number, now.version, now, head_trust_s)
    if now.version == want.number or (now.version > want.number and want.kind == "min"):
        return Verdict(Answer.ADMIT, served)
    if now.version > want.number:
        return Verdict(Answer.REFUSE, f"{served}, {want.number} has passed", _LATER_S)
    return Verdict(Answer.BEHIND, served)


def _fresh(most: int, version: int, now: Situation, head_trust_s: float) -> Verdict:
    served = f"version {version} is served"
    if now.head is None:
        return Verdict(Answer.BEHIND, f"{served}; the newest is not known")
    if now.head_run != now.run:
        return Verdict(Answer.BEHIND, f"{served}, of run {now.run}; {now.head_run} is newer")
    if now.head_age_s > head_trust_s:
        return Verdict(Answer.BEHIND, f"{served}; the store was last seen {now.head_age_s:.0f} s ago")
    behind = now.staleness
    assert behind is not None
    return Verdict(Answer.ADMIT if behind <= most else Answer.BEHIND, f"{served}, {behind} behind {now.head}")
