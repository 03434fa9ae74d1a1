"""What an encoding cannot go below on a trace, computed exactly by counting.

Owns the bounds. Owns no coding.

Bits per changed element, under each encoding's own model of the data:
    step      which elements changed, each with the same probability, and the distribution of the steps
    compact   the same given the class of the old element: its exponent, or the whole code of 8- and 4-bit formats
    absolute  which elements changed, and the distribution of the new bits
Tables, headers, the container and the integer lengths of real codes come on top.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.bench.traces import Trace
from weight_sync.codec.ordered import steps_between

__all__ = ["bound_bits"]


def bound_bits(trace: Trace, encoding: str) -> float:
    """Bits per changed element that ``encoding`` cannot go below; 0 without changes. The trace has one dtype."""
    dtype = trace.tensors[0].spec.type
    old, new = [], []
    classes = np.zeros(256, np.int64)
    by_class = encoding == "compact"
    shift, mask = (dtype.class_shift, (1 << dtype.class_bits) - 1) if by_class else (0, 0)
    for tensor in trace.tensors:
        at = np.flatnonzero(tensor.old != tensor.new)
        old.append(tensor.old[at])
        new.append(tensor.new[at])
        classes += _count_classes(tensor.old, shift, mask)
    before, after = np.concatenate(old), np.concatenate(new)
    what = after if encoding == "absolute" else steps_between(before, after, dtype)
    kinds = _class_of(before, shift, mask)
    hits = np.bincount(kinds, minlength=256)
    bits = sum(_choice_bits(int(total), int(hit)) for total, hit in zip(classes, hits, strict=True))
    bits += sum(_entropy_bits(np.unique(what[kinds == c], return_counts=True)[1]) for c in np.flatnonzero(hits))
    return bits / len(what) if len(what) else 0.0


def _class_of(bits: npt.NDArray[Any], shift: int, mask: int) -> npt.NDArray[np.int64]:
    classes: npt.NDArray[np.int64] = ((bits >> bits.dtype.type(shift)) & bits.dtype.type(mask)).astype(np.int64)
    return classes


def _count_classes(bits: npt.NDArray[Any], shift: int, mask: int) -> npt.NDArray[np.int64]:
    if not mask:
        return np.bincount([0], [len(bits)], 256).astype(np.int64)
    out = np.zeros(256, np.int64)
    for start in range(0, len(bits), 1 << 22):  # the classes of a chunk take 8 bytes per element
        out += np.bincount(_class_of(bits[start : start + (1 << 22)], shift, mask), minlength=256)
    return out


def _choice_bits(total: int, chosen: int) -> float:
    """Entropy of which of ``total`` elements are the ``chosen`` ones, each with probability chosen / total."""
    return _entropy_bits(np.array([chosen, total - chosen]))


def _entropy_bits(counts: npt.NDArray[np.int64]) -> float:
    """Sum over all symbols of -log2 of their relative frequency."""
    some = counts[counts > 0].astype(np.float64)
    return float((some * (np.log2(some.sum()) - np.log2(some))).sum()) if len(some) else 0.0
