"""What the quick start shows: a live table, a closing summary, a plot.

Owns the rows and how they look. Owns no numbers of its own: they come from weight_sync's reports.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

COLUMNS = {
    "step": "{0.step}",
    "version": "{0.version}",
    "density": "{0.density:.3%}",
    "patch": "{0.patch_bytes:,} B",
    "bits/change": "{0.bits_per_changed:.2f}",
    "publish": "{0.publish_s:.2f} s",
    "pause": "{0.pause_ms:.1f} ms",
    "staleness": "{0.staleness:.2f}",
    "reward": "{0.reward:.3f}",
    "step time": "{0.seconds:.1f} s",
}


@dataclass
class Row:
    """One step. ``pause_ms`` is the longest of the replicas; it comes later, with their acknowledgements."""

    step: int
    version: int
    density: float
    patch_bytes: int
    bits_per_changed: float
    publish_s: float
    staleness: float
    reward: float
    seconds: float
    pause_ms: float | None = None

    def cells(self) -> list[str]:
        """As text, a column each."""
        return ["..." if name == "pause" and self.pause_ms is None else f.format(self) for name, f in COLUMNS.items()]


class LiveTable:
    """The newest rows, redrawn as they change on a terminal, printed once elsewhere."""

    def __init__(self, title: str, shown: int = 20) -> None:
        self.rows: list[Row] = []
        self.note = ""
        self._title, self._shown = title, shown
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._printed = 0

    def __enter__(self) -> LiveTable:
        if self._live is not None:
            self._live.start()
        else:
            print("  ".join(f"{name:>11}" for name in COLUMNS), flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.note = ""
        self.refresh(final=True)
        if self._live is not None:
            self._live.stop()

    def refresh(self, final: bool = False) -> None:
        """Shows what changed. Without a terminal a row is printed when its pause is known, or two more follow."""
        if self._live is not None:
            table = Table(title=self._title, caption=self.note)
            for name in COLUMNS:
                table.add_column(name, justify="right")
            for row in self.rows[-self._shown :]:
                table.add_row(*row.cells())
            self._live.update(table, refresh=True)
            return
        for number in range(self._printed, len(self.rows)):
            if final or self.rows[number].pause_ms is not None or number + 2 < len(self.rows):
                print("  ".join(f"{cell:>11}" for cell in self.rows[number].cells()), flush=True)
                self._printed = number + 1


def read_rows(path: Path) -> list[Row]:
    """The rows of all sessions of a run; [] before the first."""
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """One line each; the file appears complete or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    os.replace(fresh, path)


def print_summary(summary: Mapping[str, Any], rows: Sequence[Row], folder: Path) -> None:
    """What was done and where it lies."""
    print(
        f"\n{summary['run_id']}: step {summary['step']} is version {summary['version']}, after {summary['seconds']} s"
    )
    for name, digest in sorted(summary["served"].items()):
        print(f"  {name} serves it: digest {digest}")
    if rows:
        first, last = (mean(row.reward for row in part) for part in (rows[:3], rows[-3:]))
        print(f"  reward {first:.3f} in the first steps of the run, {last:.3f} in the last")
    print(f"  {folder / 'quickstart.png'} shows it; weight-sync log {folder / 'store'} lists the versions")
    print("  run it again to go on")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Density and patch size, pause, reward, by step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(8, 9), sharex=True)
    steps = [row.step for row in rows]
    known = [row for row in rows if row.pause_ms is not None]
    curve(top, steps, [100 * row.density for row in rows], "changed weights, %", "tab:blue")
    curve(top.twinx(), steps, [row.patch_bytes / 1e6 for row in rows], "patch, MB", "tab:orange")
    curve(middle, [row.step for row in known], [row.pause_ms or 0.0 for row in known], "longest pause, ms", "tab:red")
    curve(bottom, steps, [row.reward for row in rows], "mean reward", "tab:green")
    bottom.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def curve(axes: Any, x: Sequence[float], y: Sequence[float], label: str, color: str) -> None:
    """One quantity, from 0 on."""
    axes.plot(x, y, "o-", color=color)
    axes.set_ylabel(label, color=color)
    axes.set_ylim(0, 1.1 * max(y, default=0.0) or 1.0)
