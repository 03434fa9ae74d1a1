"""What differs between two checkpoints: counts per tensor and per kind, steps, signs, zeros, NaN.

Owns the statistics, as a pure function of two checkpoints. Owns no versions, no patches and no printing. Elements are
compared by bits; the size of a step is the distance on the dtype's ordered line, so one bf16 ulp is 1. (Patches hold
steps modulo the width; here they are what they seem.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.diff import ChangeBuffer, diff_run
from weight_sync.codec.threads import ordered_map
from weight_sync.dtypes import DType, dtype_of
from weight_sync.tensors import TensorSpec

__all__ = ["STEP_BINS", "Comparison", "Counts", "KindDiff", "TensorDiff", "compare", "kind_of", "step_bins"]

STEP_BINS = 65
_CHUNK = 16 << 20  # elements per task: bounds memory, shares big tensors among threads
_CHANGES = 1 << 20  # changes looked at together
_EDGES = np.array([1 << k for k in range(STEP_BINS - 1)], np.uint64)
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")

# (mask, infinity): NaN when (bits & mask) > infinity. E4M3 has no infinity, its largest number stands in.
_EXPONENTS = {
    "F64": ((1 << 63) - 1, 0x7FF << 52),
    "F32": (0x7FFFFFFF, 0x7F800000),
    "F16": (0x7FFF, 0x7C00),
    "BF16": (0x7FFF, 0x7F80),
    "F8_E5M2": (0x7F, 0x7C),
    "F8_E4M3": (0x7F, 0x7E),
}
_SIGNED = {"I8", "I16", "I32", "I64"}
_ONE_NAN = {"F8_E4M3FNUZ": 0x80, "F8_E5M2FNUZ": 0x80, "F8_E8M0": 0xFF}


def kind_of(name: str) -> str:
    """The name with the numbers of layers and experts replaced by ``*``.

    >>> kind_of("model.layers.11.mlp.experts.3.w1.weight")
    'model.layers.*.mlp.experts.*.w1.weight'
    """
    return _NUMBER.sub("*", name)


def step_bins() -> Iterator[tuple[int, int]]:
    """(smallest, largest) size of the steps in each bin: 1, 2, 3 to 4, 5 to 8, ..."""
    yield 1, 1
    for k in range(1, STEP_BINS):
        yield (1 << (k - 1)) + 1, 1 << k


@dataclass
class Counts:
    """What was counted over some elements. Counts add up.

    Attributes:
        elements: compared; of a tensor that only one side has, or has with another dtype or shape: those of B.
        changed: elements with other bits; all of a tensor that was added or has another dtype or shape.
        sign_flips: changed sign of numbers that are not both zero; floats only.
        zero_swaps: +0.0 became -0.0 or the reverse.
        nan_a, nan_b: NaN in A and in B.
        largest_step: size of the largest step.
        steps: (STEP_BINS,) int64: how many steps fall into each bin of `step_bins`.
    """

    elements: int = 0
    changed: int = 0
    sign_flips: int = 0
    zero_swaps: int = 0
    nan_a: int = 0
    nan_b: int = 0
    largest_step: int = 0
    steps: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(STEP_BINS, np.int64))

    @property
    def density(self) -> float:
        """Changed elements over all elements."""
        return self.changed / self.elements if self.elements else 0.0

    def add(self, other: Counts) -> None:
        """Takes another count in."""
        self.elements += other.elements
        self.changed += other.changed
        self.sign_flips += other.sign_flips
        self.zero_swaps += other.zero_swaps
        self.nan_a += other.nan_a
        self.nan_b += other.nan_b
        self.largest_step = max(self.largest_step, other.largest_step)
        self.steps = self.steps + other.steps


@dataclass(frozen=True)
class TensorDiff:
    """One tensor of B. ``status`` is "same", "changed", "added" or "respecified" (another dtype or shape in A)."""

    spec: TensorSpec
    status: str
    counts: Counts


@dataclass(frozen=True)
class KindDiff:
    """All tensors of one kind."""

    kind: str
    tensors: int
    counts: Counts


@dataclass(frozen=True)
class Comparison:
    """The result.

    Attributes:
        tensors: of B, by name.
        removed: tensors that only A has, by name.
        total: over all tensors.
    """

    tensors: tuple[TensorDiff, ...]
    removed: tuple[TensorSpec, ...]
    total: Counts

    @property
    def equal(self) -> bool:
        """True when both hold the same tensors with the same bits."""
        return not self.removed and all(tensor.status == "same" for tensor in self.tensors)

    def kinds(self) -> list[KindDiff]:
        """By kind, most changed elements first."""
        found: dict[str, tuple[int, Counts]] = {}
        for tensor in self.tensors:
            kind = kind_of(tensor.spec.name)
            number, counts = found.get(kind, (0, Counts()))
            counts.add(tensor.counts)
            found[kind] = number + 1, counts
        rows = [KindDiff(kind, number, counts) for kind, (number, counts) in found.items()]
        return sorted(rows, key=lambda row: (-row.counts.changed, row.kind))


def compare(
    a: Checkpoint, b: Checkpoint, threads: int = 1, progress: Callable[[int, int], None] | None = None
) -> Comparison:
    """Compares all tensors of two checkpoints, by name.

    Args:
        threads: that share the work.
        progress: called with (bytes of B done, bytes of B in all).
    """
    counts = {spec.name: Counts(elements=spec.elements) for spec in b.table}
    status = {spec.name: "same" for spec in b.table}
    for spec in b.table:
        if spec.name not in a or a.spec(spec.name) != spec:
            status[spec.name] = "respecified" if spec.name in a else "added"
            counts[spec.name].changed = spec.elements
    total_bytes = sum(spec.nbytes for spec in b.table)
    done = 0

    def work(job: tuple[TensorSpec, int, int]) -> tuple[TensorSpec, int, Counts]:
        spec, start, stop = job
        new = b.bits(spec.name)[start:stop]
        if status[spec.name] != "same":
            return spec, new.nbytes, Counts(nan_b=count_nan(new, spec.type))
        return spec, new.nbytes, compare_run(a.bits(spec.name)[start:stop], new, spec.type)

    for spec, nbytes, found in ordered_map(work, _jobs(b.table), threads):
        counts[spec.name].add(found)
        done += nbytes
        if progress is not None:
            progress(done, total_bytes)
    tensors = tuple(
        TensorDiff(spec, "changed" if status[spec.name] == "same" and counts[spec.name].changed else status[spec.name],
                   counts[spec.name])
        for spec in b.table
    )  # fmt: skip
    total = Counts()
    for tensor in tensors:
        total.add(tensor.counts)
    return Comparison(tensors, tuple(spec for spec in a.table if spec.name not in b), total)


def _jobs(table: Iterable[TensorSpec]) -> Iterator[tuple[TensorSpec, int, int]]:
    for spec in table:
        for start in range(0, spec.elements, _CHUNK):
            yield spec, start, min(start + _CHUNK, spec.elements)


def compare_run(old: npt.NDArray[Any], new: npt.NDArray[Any], dtype: DType) -> Counts:
    """Counts of a run of elements, ``elements`` left at 0; ``old``, ``new``: (n,) unsigned of the element's width."""
    out = Counts(nan_a=count_nan(old, dtype), nan_b=count_nan(new, dtype))
    buffer = ChangeBuffer(dtype, min(_CHANGES, len(old)))
    at = 0
    while at < len(old):
        buffer.count = 0
        seen = diff_run(old[at:], new[at:], 0, buffer)
        positions, _ = buffer.view()
        if len(positions):
            out.add(_count_changes(old[at:][positions], new[at:][positions], dtype))
        at += seen
    return out


def _count_changes(old: npt.NDArray[Any], new: npt.NDArray[Any], dtype: DType) -> Counts:
    a, b = _places(old, dtype), _places(new, dtype)
    size = (np.maximum(a, b) - np.minimum(a, b)).astype(np.uint64)
    bins = np.searchsorted(_EDGES, size, side="left")
    out = Counts(changed=len(old), largest_step=int(size.max()), steps=np.bincount(bins, minlength=STEP_BINS))
    if dtype.signed_magnitude:
        sign = old.dtype.type(1 << (8 * dtype.width - 1))
        flipped = ((old ^ new) & sign) != 0
        zeros = flipped & (((old | new) & ~sign) == 0)
        out.zero_swaps = 0 if dtype.name in _ONE_NAN else int(zeros.sum())  # there, the sign bit alone is the NaN
        out.sign_flips = int((flipped & ~zeros).sum())
    return out


def _places(bits: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any]:
    """Where elements lie on the dtype's line, from its smallest number up: unsigned, of the element's width."""
    top = bits.dtype.type(1 << (8 * dtype.width - 1))
    if dtype.signed_magnitude:
        return np.where(bits >= top, ~bits, bits | top)  # -0.0 is next to 0.0
    return bits ^ top if dtype.name in _SIGNED else bits


def count_nan(bits: npt.NDArray[Any], dtype: DType) -> int:
    """NaN among (n,) unsigned elements; a complex number counts once per part. 0 for dtypes without NaN."""
    if dtype.name == "C64":
        return count_nan(bits.view(np.uint32), dtype_of("F32"))
    if dtype.name in _ONE_NAN:
        return int(np.count_nonzero(bits == bits.dtype.type(_ONE_NAN[dtype.name])))
    if dtype.name not in _EXPONENTS:
        return 0
    mask, infinity = _EXPONENTS[dtype.name]
    kind = bits.dtype.type
    return sum(
        int(np.count_nonzero((bits[at : at + (1 << 20)] & kind(mask)) > kind(infinity)))  # in cache-sized parts
        for at in range(0, len(bits), 1 << 20)
    )
