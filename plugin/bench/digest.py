"""Speed of the digest: recomputation against memcpy, and the cost of keeping it up.

Owns the rows of ``weight-sync bench digest``. Owns no stopwatch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.bench.timing import Job, alternate
from weight_sync.codec.apply import apply_changes
from weight_sync.codec.digest import digest_tensor
from weight_sync.errors import InputError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.tensors import TensorSpec

__all__ = ["DTYPES_MEASURED", "MODEL_BYTES", "DigestRow", "bench_digest"]

DTYPES_MEASURED = ("BF16", "F32", "F8_E4M3", "I64")
MODEL_BYTES = 128 << 20
_GROWTH = 4
_DENSITY = 1 / 512


@dataclass(frozen=True)
class DigestRow:
    """One dtype. Speeds: GB (1e9 bytes) per CPU-second; memcpy counts bytes copied once.

    Attributes:
        share_of_memcpy: recomputation over memcpy.
        update_ns_per_changed: applying changes to a model, their digest included, per change.
        update_ns_per_changed_large_model: the same number of changes in a model four times as large.
        update_ns_per_changed_many: four times as many changes in that one.
        changed: number of changes of the first two.
    """

    dtype: str
    width: int
    model_bytes: int
    threads: int
    digest_gb_per_cpu_s: float
    memcpy_gb_per_s: float
    share_of_memcpy: float
    changed: int
    update_ns_per_changed: float
    update_ns_per_changed_large_model: float
    update_ns_per_changed_many: float

    def to_json(self) -> dict[str, Any]:
        """As it is printed."""
        return asdict(self)


def bench_digest(dtype: str, model_bytes: int, threads: int, rounds: int) -> DigestRow:
    """One row.

    Args:
        dtype: safetensors spelling.
        model_bytes: of the smaller model; at least 64 KiB.
        threads: of the recomputation.

    Memory: five times ``model_bytes``.
    """
    if model_bytes < 1 << 16:
        raise InputError("model is too small to measure", field="bytes", found=model_bytes, expected="65536 or more")
    width = TensorSpec("", dtype, ()).type.width
    elements = model_bytes // width
    spec = TensorSpec("model.weight", dtype, (elements,))
    large_spec = TensorSpec("model.weight", dtype, (_GROWTH * elements,))
    dice = np.random.default_rng(0)
    bits = dice.integers(0, 256, _GROWTH * model_bytes, np.uint8).view(spec.type.uint)
    copy = np.empty(elements, spec.type.uint)
    count = max(1, int(elements * _DENSITY))
    small, large = bits[:elements], bits
    jobs = [
        Job("memcpy", lambda: np.copyto(copy, small)),
        Job("digest", lambda: digest_tensor(spec, small, threads)),
        _update("update", spec, small, count),
        _update("large", large_spec, large, count),
        _update("many", large_spec, large, _GROWTH * count),
    ]
    seconds = alternate(jobs, rounds)
    digest = model_bytes / 1e9 / seconds["digest"].cpu
    memcpy = model_bytes / 1e9 / seconds["memcpy"].cpu
    return DigestRow(
        dtype=dtype,
        width=width,
        model_bytes=model_bytes,
        threads=threads,
        digest_gb_per_cpu_s=digest,
        memcpy_gb_per_s=memcpy,
        share_of_memcpy=digest / memcpy,
        changed=count,
        update_ns_per_changed=1e9 * seconds["update"].cpu / count,
        update_ns_per_changed_large_model=1e9 * seconds["large"].cpu / count,
        update_ns_per_changed_many=1e9 * seconds["many"].cpu / (_GROWTH * count),
    )


def _update(name: str, spec: TensorSpec, flat: npt.NDArray[Any], count: int) -> Job:
    """Steps of one at ``count`` evenly spread elements."""
    positions = np.linspace(0, len(flat) - 1, count).astype(np.uint32)
    box = Box.run(0, len(flat))
    changes = Changes(spec, box, positions, np.ones(count, spec.type.uint))
    return Job(name, lambda: apply_changes(changes, flat, box))
