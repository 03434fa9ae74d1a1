"""What a host's metric stream gets to see, under ``weight_sync/``.

Owns the names and the arithmetic; pure. Owns no measurement and no stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weight_sync.proto.v1 import replica_pb2
from weight_sync.reports import PublishReport

__all__ = ["PREFIX", "fleet_metrics", "percentile", "publish_metrics"]

PREFIX = "weight_sync/"
_GONE = replica_pb2.REPLICA_STATE_CLOSED


def publish_metrics(report: PublishReport) -> dict[str, float]:
    """Of the version committed last."""
    out = {
        "version": float(report.version),
        "density": report.density,
        "changed": float(report.changed),
        "elements": float(report.elements),
        "bytes": float(report.patch_bytes + report.anchor_bytes),
    }
    out |= {f"seconds_{phase}": spent for phase, spent in report.seconds.items()}
    return {PREFIX + name: value for name, value in out.items()}


def fleet_metrics(acks: Iterable[replica_pb2.Acknowledgement], run_id: str, version: int | None) -> dict[str, float]:
    """Who serves what: ``replicas`` that have reported and are not closed, ``acknowledged`` of them at ``version``,
    and by how many version numbers the others are behind (p50 and p95, over all that serve a version of this run).
    Replicas behind a relay count one by one.
    """
    behind: list[int] = []
    replicas = 0
    for ack in acks:
        groups = [(ack.version, ack.state, 1)]
        if ack.followers:
            groups = [(group.version, group.state, group.count) for group in ack.followers]
        for served, state, count in groups:
            if state == _GONE:
                continue
            replicas += count
            if version is not None and served.run_id == run_id:
                behind += [max(0, version - served.number)] * count
    out = {"replicas": float(replicas), "acknowledged": float(behind.count(0))}
    if behind:
        out |= {"staleness_p50": percentile(behind, 0.5), "staleness_p95": percentile(behind, 0.95)}
    return {PREFIX + name: value for name, value in out.items()}


def percentile(values: Sequence[int], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed.

    >>> percentile([0, 0, 1, 9], 0.5), percentile([3], 0.95)
    (0.0, 3.0)
    """
    ordered = sorted(values)
    return float(ordered[max(0, -int(-share * len(ordered) // 1) - 1)])
