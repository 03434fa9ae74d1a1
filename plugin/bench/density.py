"""How sparse served updates are, and what they cost in each form: measured on real optimizer steps.

Owns the rows of ``weight-sync bench density`` and their plot. Owns no training (bench/train.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.bench.codec import Encoding
from weight_sync.bench.entropy import bound_bits
from weight_sync.bench.traces import Trace, TracedTensor
from weight_sync.codec.ordered import steps_between
from weight_sync.dtypes import dtype_of
from weight_sync.errors import InputError
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from weight_sync.bench.train import Trainer

__all__ = ["ULP_EDGES", "DensityRow", "bench_density", "check_plot", "plot_density"]

ULP_EDGES = (1, 2, 4, 8, 16)
"""Steps are counted up to and with each edge, and above the last."""

_BF16 = dtype_of("BF16")


@dataclass(frozen=True)
class DensityRow:
    """One optimizer step: version ``step`` against the one before.

    Attributes:
        density, density_hidden: changed elements over all of the served view, and of the hidden matrices.
        ulp: share of the changes by distance in ulp ("1", "2", "4", ... up to and with; ">16").
        sign_flips: share of the changes that change the sign.
        step_bits, compact_bits: bits per changed element, whole object; None when nothing changed.
        step_bound_bits, compact_bound_bits: see `weight_sync.bench.entropy`.
        nonzero_gradients: share of all gradients.
        seconds: of the training step.
    """

    step: int
    optimizer: str
    objective: str
    lr: float
    loss: float
    reward: float | None
    elements: int
    changed: int
    density: float
    density_hidden: float
    ulp: dict[str, float]
    sign_flips: float
    step_bits: float | None
    compact_bits: float | None
    step_bound_bits: float
    compact_bound_bits: float
    nonzero_gradients: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """As it is printed."""
        return asdict(self)


def bench_density(trainer: Trainer, steps: int) -> Iterator[DensityRow]:
    """One row per step, as they are made. Raises InputError when ``steps`` is below 1."""
    if steps < 1:
        raise InputError("nothing to measure", field="steps", found=steps, expected="1 or more")
    old = _bits(trainer.served())
    for number in range(1, steps + 1):
        started = time.perf_counter()
        report = trainer.step()
        seconds = time.perf_counter() - started
        served = trainer.served()
        new = _bits(served)
        shapes = {name: tuple(tensor.shape) for name, tensor in served.items()}
        pairs = (TracedTensor(TensorSpec(n, "BF16", shapes[n]), old[n], new[n]) for n in sorted(new))
        trace = Trace(f"step-{number}", "bf16", tuple(pairs))
        yield DensityRow(
            step=number,
            optimizer=trainer.optimizer,
            objective=trainer.objective,
            lr=trainer.lr,
            loss=report.loss,
            reward=report.reward,
            elements=trace.elements,
            changed=trace.changed,
            density=trace.density,
            density_hidden=_density(trace, trainer.hidden),
            **_histogram(trace),
            step_bits=_bits_per_changed(trace, "step"),
            compact_bits=_bits_per_changed(trace, "compact"),
            step_bound_bits=bound_bits(trace, "step"),
            compact_bound_bits=bound_bits(trace, "compact"),
            nonzero_gradients=report.nonzero_gradients,
            seconds=seconds,
        )
        old = new


def _bits(served: Mapping[str, Tensor]) -> dict[str, npt.NDArray[np.uint16]]:
    import torch

    return {name: tensor.reshape(-1).view(torch.int16).numpy().view(np.uint16) for name, tensor in served.items()}


def _density(trace: Trace, names: frozenset[str]) -> float:
    some = [t for t in trace.tensors if t.spec.name in names]
    changed = sum(int(np.count_nonzero(t.old != t.new)) for t in some)
    return changed / max(1, sum(t.spec.elements for t in some))


def _histogram(trace: Trace) -> dict[str, Any]:
    counts = np.zeros(len(ULP_EDGES) + 1, np.int64)
    flips = 0
    for tensor in trace.tensors:
        at = np.flatnonzero(tensor.old != tensor.new)
        before, after = tensor.old[at], tensor.new[at]
        steps = steps_between(before, after, _BF16).view(np.int16).astype(np.int64)
        counts += np.bincount(np.searchsorted(ULP_EDGES, np.abs(steps)), minlength=len(counts))
        flips += int(np.count_nonzero((before ^ after) >> 15))
    total = max(1, int(counts.sum()))
    names = [*map(str, ULP_EDGES), f">{ULP_EDGES[-1]}"]
    return {"ulp": dict(zip(names, (counts / total).tolist(), strict=True)), "sign_flips": flips / total}


def _bits_per_changed(trace: Trace, name: str) -> float | None:
    if not trace.changed:
        return None
    encoding = Encoding(trace, name)
    encoding.encode()
    return 8 * len(encoding.shard) / trace.changed


def check_plot() -> None:
    """Raises InputError when plots cannot be drawn; asked before the training starts."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError("a plot needs matplotlib", field="matplotlib", do="pip install 'weight-sync[plot]'") from error


def plot_density(rows: Sequence[DensityRow], path: Path) -> None:
    """Density and bits by step, and the histogram of all steps, as one picture."""
    check_plot()
    from matplotlib.figure import Figure

    first = rows[0]
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(f"{first.objective}, {first.optimizer}, lr {first.lr:g}, {first.elements / 1e6:.3g} M elements")
    left, middle, right = figure.subplots(1, 3)
    at = [row.step for row in rows]
    left.plot(at, [100 * row.density for row in rows], "o-", label="whole view")
    left.plot(at, [100 * row.density_hidden for row in rows], "s-", label="hidden matrices")
    left.set(xlabel="step", ylabel="changed elements, %", ylim=(0, None), title="density")
    for form, style in (("step", "o-"), ("compact", "s-")):
        (line,) = middle.plot(at, [getattr(row, f"{form}_bits") or np.nan for row in rows], style, label=form)
        middle.plot(at, [getattr(row, f"{form}_bound_bits") for row in rows], ":", color=line.get_color())
    middle.set(xlabel="step", ylabel="bits per changed element", ylim=(0, None), title="size (dotted: entropy)")
    changed = max(1, sum(row.changed for row in rows))
    shares = [sum(row.ulp[name] * row.changed for row in rows) / changed for name in first.ulp]
    bars = right.bar(list(first.ulp), 100 * np.array(shares))
    right.bar_label(bars, fmt="%.2g", fontsize=8)
    right.set(xlabel="distance, ulp (up to and with)", ylabel="changes, %", yscale="log", title="steps")
    for panel in (left, middle):
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.legend()
    figure.savefig(path, dpi=120)
