"""What one publish is made of: the offer of a rank, and the round that it becomes.

Owns the checks of an offer that need no other rank, and a round's state between its steps. Owns no step (publisher.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weight_sync.errors import ForkRequiredError
from weight_sync.lineage import Ledger, check_labels, check_step
from weight_sync.proto.v1 import manifest_pb2, report_pb2
from weight_sync.served import named_source, storages_of, view_fingerprint
from weight_sync.views import Views
from weight_sync.work import Prepared

if TYPE_CHECKING:
    import torch

    from weight_sync.adapting import AdapterLine

__all__ = ["LEARN", "Offer", "Round"]

LEARN, _KNOWN = b"L", b"K"


@dataclass
class Offer:
    """What this rank was handed. ``named`` and ``storages`` are there once it has been opened."""

    source: Any  # a Source; of a run of adapters, what `AdapterLine.take` takes
    step: int | None
    metadata: Mapping[str, str]
    cast: bool
    line: AdapterLine | None = None
    named: Any = None
    storages: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def open(self, ledger: Ledger, views: Views) -> bytes:
        """The checks that need no other rank; tells whether the views have to be learnt."""
        check_labels(self.step, self.metadata)
        reason = check_step(ledger.step, self.step)
        if reason:
            raise ForkRequiredError(reason, field="step", found=self.step, expected=f"above {ledger.step}",
                                    do="resume the trainer from the head, or fork: true to start a new run")  # fmt: skip
        self.named = named_source(self.source if self.line is None else self.line.take(self.source))
        self.storages = storages_of(self.named)
        return _KNOWN if views.know(view_fingerprint(self.named, self.cast)) else LEARN


@dataclass
class Round:
    """One publish on its way; ``why`` is what kept this rank from preparing its part."""

    plan: report_pb2.RoundPlan
    step: int | None
    metadata: dict[str, str]
    started: float
    made: list[Prepared] | None = None
    why: Exception | None = None
    adapter: manifest_pb2.Adapter | None = None  # on rank 0, of a version that is one
    seconds: dict[str, float] = field(default_factory=dict)
