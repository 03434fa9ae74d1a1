"""How long a schedule takes and what it needs, from a few measured constants.

Owns the model and the summary of a schedule. Owns no measurement: ``weight-sync bench rdma`` fits the constants.

A version is in place when the busiest link is done: its bytes at a share of its rate, plus a time for each write that
its ranks post, plus what every version costs whatever its size (go, end notes, fence).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.transport.rdma.links import Nics
from weight_sync.transport.rdma.schedule import Schedule

__all__ = ["Calibration", "summarise"]

_PAIRS = 5  # that are listed by name


@dataclass(frozen=True)
class Calibration:
    """The constants.

    Attributes:
        share: of a link's rate that large writes reach.
        write_s: seconds that one write costs its sender beside its bytes.
        fixed_s: seconds per version.
    """

    share: float = 0.9
    write_s: float = 2e-6
    fixed_s: float = 0.02


def summarise(schedule: Schedule, gbps: float, calibration: Calibration = Calibration()) -> dict[str, Any]:
    """The schedule in numbers, as JSON. ``gbps`` is the rate of one NIC in 10^9 bits per second."""
    sides = []
    for ranks, nics in ((schedule.source_ranks, schedule.nics[0]), (schedule.target_ranks, schedule.nics[1])):
        sides.append(_links(ranks, nics, schedule.nbytes, gbps, calibration))
    worst = max(sides, key=lambda found: found["seconds"].max(initial=0))
    at = int(worst["seconds"].argmax()) if len(worst["seconds"]) else 0
    expected = calibration.fixed_s + float(worst["seconds"].max(initial=0))
    total = int(schedule.nbytes.sum())
    received = _sums(schedule.target_ranks, schedule.nbytes)
    return {
        "trainer_ranks": len(schedule.sources.ranks), "engine_ranks": len(schedule.targets.ranks),
        "tensors": len(schedule.targets.tensors), "bytes": total, "writes": len(schedule.writes),
        "templates": len(schedule.atoms), "mesh_groups": schedule.groups, "hash": schedule.hash.hex(),
        "largest_write": int(schedule.nbytes.max(initial=0)),
        "pairs": _pairs(schedule),
        "busiest_link": {
            "side": "trainer" if worst is sides[0] else "engine", "link": at,
            "bytes": int(worst["bytes"][at]) if len(worst["bytes"]) else 0,
            "writes": int(worst["writes"][at]) if len(worst["writes"]) else 0,
        },
        "links": {name: found["bytes"].tolist() for name, found in zip(("trainer", "engine"), sides, strict=True)},
        "imbalance": {
            name: _imbalance(found["bytes"]) for name, found in zip(("trainer", "engine"), sides, strict=True)
        },
        "expected_seconds": expected,
        "bytes_per_second": total / expected if expected else 0.0,
        "memory": {
            "engine_shadow": int(received.max(initial=0)), "engine_direct": 0,
            "trainer_in_flight": int(schedule.nbytes.max(initial=0)),
        },
        "model": {"gbps": gbps, "share": calibration.share, "write_s": calibration.write_s,
                  "fixed_s": calibration.fixed_s},
    }  # fmt: skip


def _sums(ranks: npt.NDArray[Any], nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.bincount(ranks, nbytes).astype(np.int64) if len(ranks) else np.zeros(0, np.int64)


def _links(
    ranks: npt.NDArray[Any], nics: Nics, nbytes: npt.NDArray[np.int64], gbps: float, calibration: Calibration
) -> dict[str, npt.NDArray[Any]]:
    links = nics.of(ranks)
    carried = _sums(links, nbytes)
    writes = np.bincount(links, minlength=len(carried)) if len(links) else np.zeros(0, np.int64)
    rate = gbps * 1e9 / 8 * nics.nics_per_link * calibration.share
    return {"bytes": carried, "writes": writes, "seconds": carried / rate + writes * calibration.write_s}


def _imbalance(loads: npt.NDArray[np.int64]) -> float:
    """The busiest link over the mean of the links that carry anything; 1 is even."""
    used = loads[loads > 0]
    return float(used.max() / used.mean()) if len(used) else 1.0


def _pairs(schedule: Schedule) -> dict[str, Any]:
    """Bytes by pair of ranks: how many pairs, their spread, and the largest."""
    if not len(schedule.writes):
        return {"count": 0, "smallest": 0, "median": 0, "largest": 0, "top": []}
    width = int(schedule.target_ranks.max()) + 1
    keys = schedule.source_ranks.astype(np.int64) * width + schedule.target_ranks
    found, index = np.unique(keys, return_inverse=True)
    loads = np.bincount(index, schedule.nbytes).astype(np.int64)
    order = np.argsort(-loads, kind="stable")[:_PAIRS]
    return {
        "count": len(found), "smallest": int(loads.min()), "median": int(np.median(loads)), "largest": int(loads.max()),
        "top": [{"trainer": int(found[k] // width), "engine": int(found[k] % width), "bytes": int(loads[k])}
                for k in order],
    }  # fmt: skip
