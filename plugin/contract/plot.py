"""The picture of a mismatch: what is numeric on the left, what staleness adds on the right.

Owns the drawing. Owns no number in it. matplotlib comes with the extra ``plot``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from weight_sync.cli.plot import check
from weight_sync.errors import InputError

if TYPE_CHECKING:
    from weight_sync.contract.monitor import Finding

__all__ = ["draw"]


def draw(findings: Sequence[Finding], bound: float, target: Path) -> None:
    """One line per engine over the findings in their order. Raises ConfigError and InputError."""
    check(target)
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    figure = Figure(figsize=(12, 5), layout="constrained")
    own, total = figure.subplots(1, 2, sharey=True)
    for engine in sorted({finding.engine for finding in findings}):
        mine = [finding for finding in findings if finding.engine == engine]
        label = (engine or "(unnamed)").replace("$", r"\$")
        known = [(f.version, f.own.mean) for f in mine if f.own is not None]
        own.plot([x for x, _ in known], [y for _, y in known], "o-", label=label)
        total.scatter([f.staleness for f in mine], [f.total.mean for f in mine], label=label)
    own.axhline(bound, linestyle="--", color="gray", label="bound")
    own.set(xlabel="version that sampled, as the engine says", ylabel="mean |logprob difference|",
            title="scored by the same version: numeric")  # fmt: skip
    total.axhline(bound, linestyle="--", color="gray")
    total.set(xlabel="versions behind the trainer", title="scored by the trainer's version: with staleness")
    own.legend(fontsize="small")
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise InputError("cannot write the picture", field=str(target), found=error.strerror) from error
