"""What one publish did, in numbers.

Owns PublishReport. Owns no measurement: the publisher fills it in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["PublishReport"]


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

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def bits_per_changed(self) -> float:
        """Stored bits of the patch per changed element; 0 when nothing changed."""
        return 8 * self.patch_bytes / self.changed if self.changed else 0.0
