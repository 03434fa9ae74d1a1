"""The picture of a comparison: steps on the left, densities by kind on the right.

Owns the drawing, for `weight-sync diff --plot`. Owns no number in it. matplotlib comes with the extra ``plot``.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from weight_sync.cli.output import printable
from weight_sync.errors import ConfigError, InputError

if TYPE_CHECKING:
    from weight_sync.compare import Comparison

__all__ = ["check", "draw"]

_KINDS = 20
_SUFFIXES = (".png", ".svg", ".pdf")


def check(target: Path) -> None:
    """Raises ConfigError, before any work is done, when the picture could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("plots need matplotlib", field="--plot", do="pip install 'weight-sync[plot]'")
    if target.suffix.lower() not in _SUFFIXES:
        raise ConfigError("no such picture format", field="--plot", found=target.name, expected=", ".join(_SUFFIXES))
    if not target.absolute().parent.is_dir():
        raise ConfigError("no such folder", field="--plot", found=str(target.absolute().parent), do="make it first")


def draw(found: Comparison, title: str, target: Path) -> None:
    """Draws into ``target``. Raises InputError when it cannot be written."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    from weight_sync.compare import step_bins

    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(_plain(title))
    steps, kinds = figure.subplots(1, 2)
    bins = [(low, high, int(count)) for (low, high), count in zip(step_bins(), found.total.steps, strict=True) if count]
    labels = [str(low) if low == high else f"{low}-{high}" for low, high, _ in bins]
    steps.bar(labels, [count for *_, count in bins])
    steps.set(xlabel="size of the step in ulp", ylabel="elements", yscale="log" if bins else "linear",
              title=f"{found.total.changed} of {found.total.elements} elements changed")  # fmt: skip
    steps.tick_params(axis="x", rotation=60)
    rows = found.kinds()[:_KINDS][::-1]
    kinds.barh([_plain(row.kind) for row in rows], [100 * row.counts.density for row in rows])
    kinds.set(xlabel="changed elements, %", title="density by kind")
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise InputError("cannot write the picture", field=str(target), found=error.strerror) from error


def _plain(text: str) -> str:
    """Text that is drawn as it is: no formula, no control character."""
    return printable(text).replace("$", r"\$")
