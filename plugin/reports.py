"""What one publish or one sync did, in numbers.

Owns PublishReport and SyncReport. Owns no measurement: the publisher and the replica fill them in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["PublishReport", "SyncReport"]


@dataclass(frozen=True)
class PublishReport:
    """What one publish did.

    Attributes:
        version: number of the version, with its run.
        kind: "PATCH" or "ANCHOR".
        step: the trainer's.
        elements, changed: of the whole view, all ranks.
        patch_bytes: stored bytes of the patch, all ranks, all forms.
        anchor_bytes: stored bytes of the full state, 0 without one.
        digest: of the state, 32 hex digits.
        seconds: by phase: diff, send, commit, promote, and total.
        reason: why a full state was written, "" for none.
        collect_error: why the collection after it failed, "" when it did not or was not due.
    """

    version: int
    run_id: str
    kind: str
    step: int | None
    elements: int
    changed: int
    patch_bytes: int
    anchor_bytes: int
    digest: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    collect_error: str = ""

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def bits_per_changed(self) -> float:
        """Stored bits of the patch per changed element; 0 when nothing changed."""
        return 8 * self.patch_bytes / self.changed if self.changed else 0.0


@dataclass(frozen=True)
class SyncReport:
    """What one sync did.

    Attributes:
        version: served now.
        previous: served before; None when it was none.
        changed: False when nothing had to be done.
        staleness: newest version seen minus the one served, in numbers.
        path: how it got there, in words.
        digest: of the state, 32 hex digits.
        seconds: prepare (fetch, check, decode, fold), stage, pause (all of the fence), apply, total.
        ack_error: why the trainer could not be told; "" when it was.
        run_id: of the version served now; versions of two runs have nothing in common.
    """

    version: int
    previous: int | None
    changed: bool
    staleness: int = 0
    path: str = ""
    digest: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    ack_error: str = ""
    run_id: str = ""

    @property
    def pause_s(self) -> float:
        """Length of the fence in seconds."""
        return self.seconds.get("pause", 0.0)
