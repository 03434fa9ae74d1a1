"""How dense the updates of a checkpoint will be: each weight's rounding floor against the optimizer's push.

Owns the model and its formats. Owns no measurement and no printing (cli/forecast.py).

A weight changes when its master crosses a rounding boundary. Masters lie anywhere between two, so an update of size d
crosses one with probability min(1, d / ulp), where the ulp is twice the floor (half an ulp). Updates of one step are
taken as N(0, rms) in units of the learning rate: density = mean over weights of E min(1, lr |u| / ulp).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import erfc, exp, pi, sqrt

import numpy as np
import numpy.typing as npt

from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import InputError
from weight_sync.tensors import TensorSpec

__all__ = ["FLOOR_BINS", "FORMATS", "OPTIMIZERS", "Forecast", "forecast"]

_SAMPLE = 1 << 20  # weights of a tensor that are looked at
_LOWEST = -60
FLOOR_BINS = np.arange(_LOWEST, 12)
"""log2 of the floors of `Forecast.floors`, each bin from one to the next."""


@dataclass(frozen=True)
class _Format:
    """A number format: mantissa bits and lowest exponent, or evenly spaced; and what shares a scale.

    Attributes:
        largest: number of the format that the largest weight of a block is scaled to; 0 without scales.
        block: rows and columns that share a scale.
        even: all numbers have the same distance.
    """

    mantissa: int
    lowest: int
    largest: float = 0.0
    block: tuple[int, int] = (1, 1)
    even: bool = False


FORMATS = {
    "bf16": _Format(7, -126),
    "fp16": _Format(10, -14),
    "fp32": _Format(23, -126),
    "fp8": _Format(3, -6, 448.0, (128, 128)),
    "mxfp4": _Format(1, 0, 6.0, (1, 32)),
    "nvfp4": _Format(1, 0, 6.0, (1, 16)),
    "int4": _Format(0, 0, 7.0, (1, 128), even=True),
}
OPTIMIZERS = {"adam": 0.25, "muon": 0.2}
"""RMS of one update in units of the learning rate, measured after warm-up; Adam's is about 0.95 in its first step."""


@dataclass(frozen=True)
class Forecast:
    """Of one tensor.

    Attributes:
        density: expected share of elements that change in one step.
        floor: median of half an ulp.
        push: lr times the RMS of an update.
        floors: (len(FLOOR_BINS),) elements by log2 of their floor.
    """

    spec: TensorSpec
    format: str
    density: float
    floor: float
    push: float
    floors: npt.NDArray[np.float64]


def forecast(
    checkpoint: Checkpoint, lr: float, format: str, rms: float, progress: Callable[[int, int], None] | None = None
) -> Iterator[Forecast]:
    """One tensor after the other; those that are no 16- or 32-bit floats are left out.

    Args:
        lr: learning rate.
        format: key of `FORMATS`. Formats with scales hold matrices; other tensors are served as bf16.
        rms: of one update, in units of ``lr``.

    Raises InputError on an unknown format or a number that is none.
    """
    if format not in FORMATS:
        raise InputError("unknown format", field="format", found=format, expected=", ".join(FORMATS))
    for name, value in (("lr", lr), ("rms", rms)):
        if not (np.isfinite(value) and value > 0):
            raise InputError("not a size of updates", field=name, found=value, expected="above 0")
    floats = [spec for spec in checkpoint.table if spec.dtype in ("BF16", "F16", "F32") and spec.elements]
    for done, spec in enumerate(floats):
        kept = format if not FORMATS[format].largest or len(spec.shape) > 1 else "bf16"
        ulps = _ulps(_sampled(checkpoint, spec), FORMATS[kept])
        bins = np.clip(np.floor(np.log2(ulps / 2)), FLOOR_BINS[0], FLOOR_BINS[-1]).astype(int) - _LOWEST
        floors = np.bincount(bins, minlength=len(FLOOR_BINS)).astype(np.float64) * (spec.elements / len(ulps))
        yield Forecast(spec, kept, expected_density(ulps, lr * rms), float(np.median(ulps) / 2), lr * rms, floors)
        if progress is not None:
            progress(done + 1, len(floats))


def expected_density(ulps: npt.NDArray[np.float64], push: float) -> float:
    """Mean over weights of E min(1, push |z| / ulp), z ~ N(0, 1); ulps are few different numbers, or are made so."""
    sizes, counts = np.unique(np.exp2(np.round(np.log2(ulps) * 16) / 16), return_counts=True)
    return float(sum(n * _crossing(push / ulp) for ulp, n in zip(sizes, counts, strict=True)) / len(ulps))


def _crossing(a: float) -> float:
    """E min(1, a |z|), z ~ N(0, 1)."""
    if a < 0.01:
        return a * sqrt(2 / pi)
    return a * sqrt(2 / pi) * (1 - exp(-0.5 / a**2)) + erfc(1 / (a * sqrt(2)))


def _sampled(checkpoint: Checkpoint, spec: TensorSpec) -> npt.NDArray[np.float32]:
    """(rows, columns) of some of a tensor's weights: all, or blocks of 128 rows at even distances."""
    bits = checkpoint.bits(spec.name)
    cols = spec.shape[-1] if len(spec.shape) > 1 else spec.elements
    rows = spec.elements // cols
    grid = bits.reshape(rows, cols)
    wanted = max(1, _SAMPLE // (128 * cols))
    if rows > 128 * wanted:
        starts = np.linspace(0, rows // 128 - 1, wanted).astype(int) * 128
        grid = np.concatenate([grid[at : at + 128] for at in starts])
    if spec.dtype == "BF16":
        return (grid.astype(np.uint32) << 16).view(np.float32)
    return grid.view(np.float16 if spec.dtype == "F16" else np.float32).astype(np.float32)


def _ulps(weights: npt.NDArray[np.float32], form: _Format) -> npt.NDArray[np.float64]:
    """(n,) distance of neighbouring numbers of the format at each weight."""
    scale = np.ones(weights.shape)
    if form.largest:
        height, width = (min(b, n) for b, n in zip(form.block, weights.shape, strict=True))
        rows, cols = weights.shape[0] // height * height, weights.shape[1] // width * width
        weights = weights[:rows, :cols]  # what does not fill a block is left out of the sample
        blocks = np.abs(weights).reshape(rows // height, height, cols // width, width).max((1, 3))
        scale = np.repeat(np.repeat(np.maximum(blocks, 2.0**-100) / form.largest, height, 0), width, 1)
    sizes = np.abs(weights.astype(np.float64)) / scale
    exponents = np.floor(np.log2(np.maximum(sizes, 2.0**form.lowest)))
    steps = np.ones_like(sizes) if form.even else np.exp2(exponents - form.mantissa)
    return np.asarray((steps * scale).ravel())
