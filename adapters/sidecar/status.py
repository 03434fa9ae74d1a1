"""What a sidecar tells about itself: the status document and Prometheus metrics.

Owns their names (docs/sidecar.md). Owns none of the facts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from weight_sync.adapters.sidecar.driver import Driver
from weight_sync.adapters.sidecar.engine import GatedEngine
from weight_sync.adapters.sidecar.gate import Gate
from weight_sync.adapters.sidecar.lanes import Lane, Lanes
from weight_sync.reports import SyncReport

__all__ = ["Status"]

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Status:
    """Of one sidecar."""

    def __init__(self, driver: Driver, gate: Gate, engine: GatedEngine, lanes: Lanes | None = None) -> None:
        self._driver, self._gate, self._engine = driver, gate, engine
        self._lanes = lanes or Lanes(())
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "weight_sync_requests", "Requests by what became of them", ["outcome"], registry=self._registry
        )
        self._pause = Histogram(
            "weight_sync_pause_seconds", "Length of fences", buckets=_BUCKETS, registry=self._registry
        )
        self._prepare = Histogram(
            "weight_sync_prepare_seconds", "Fetching, checking and staging, while serving", buckets=_BUCKETS,
            registry=self._registry,
        )  # fmt: skip
        self._gauges()
        driver.listeners.commit.append(self._committed)

    def _gauges(self) -> None:
        now = lambda: self._gate.now  # noqa: E731
        gauges = {
            "weight_sync_version": ("Version that is served; -1 without one", lambda: _number(now().version)),
            "weight_sync_head": ("Newest version of the run; -1 when it is not known", lambda: _number(now().head)),
            "weight_sync_staleness": ("Newest version minus the one served; -1 when it is not known", self._staleness),
            "weight_sync_ready": ("1 while a verified version is served", lambda: float(not self.not_ready())),
            "weight_sync_in_flight": ("Requests in the engine", lambda: float(self._gate.inside)),
            "weight_sync_waiting": ("Requests that wait for a version or a fence", lambda: float(self._gate.waiting)),
            "weight_sync_commits": ("Versions taken so far", lambda: float(self._driver.progress.commits)),
            "weight_sync_errors": ("Syncs that failed so far", lambda: float(self._driver.progress.errors)),
            "weight_sync_aborted": ("Requests ended at a fence so far", lambda: float(self._engine.aborted)),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=self._registry).set_function(value)
        text = "Version of the adapter that is served; -1 without one"
        adapters = Gauge("weight_sync_adapter_version", text, ["adapter"], registry=self._registry)
        for lane in self._lanes:
            adapters.labels(lane.name).set_function(partial(_version_of, lane))

    def count(self, outcome: str) -> None:
        """One more request, and what became of it."""
        self._requests.labels(outcome).inc()

    def _committed(self, report: SyncReport) -> None:
        if "apply" not in report.seconds:
            return  # recognised, not written
        self._pause.observe(report.pause_s)
        self._prepare.observe(report.seconds.get("prepare", 0.0) + report.seconds.get("stage", 0.0))

    def _staleness(self) -> float:
        return _number(self._gate.now.staleness)

    def metrics(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def not_ready(self) -> str:
        """Why no verified version is served, "" when one is. Inside a fence the one before still counts."""
        return _why_not(self._driver, self._gate)

    def document(self) -> dict[str, Any]:
        """The status; keys may be added. ``adapters`` has one for each adapter that is followed, and what it is for."""
        found = _facts(self._driver, self._gate, self._engine, self.not_ready())
        return {**found, "adapters": {lane.name: _lane_facts(lane) for lane in self._lanes}}


def _version_of(lane: Lane) -> float:
    return _number(None if lane.unfit() else lane.gate.now.version)


def _lane_facts(lane: Lane) -> dict[str, Any]:
    base = lane.base
    reason = _why_not(lane.driver, lane.gate) or lane.unfit()
    return {**_facts(lane.driver, lane.gate, lane.gated, reason), "base": base}


def _why_not(driver: Driver, gate: Gate) -> str:
    now = gate.now
    return now.down or driver.progress.refused or ("" if now.version is not None else "no version is served yet")


def _facts(driver: Driver, gate: Gate, engine: GatedEngine, reason: str) -> dict[str, Any]:
    now, progress, replica = gate.now, driver.progress, driver.replica
    report = progress.report
    # the gate opens before the sync has returned its report: until then the report is of the version before
    current = report is not None and (report.run_id, report.version) == (now.run, now.version)
    return {
        "run_id": now.run,
        "version": now.version,
        "head_run_id": now.head_run,
        "head": now.head,
        "head_age_s": None if now.head is None else round(now.head_age_s, 3),
        "staleness": now.staleness,
        "state": driver.state,
        "ready": not reason,
        "reason": reason,
        "open": now.open,
        "digest": report.digest if report is not None and current else None,
        "replica_id": replica.replica_id,
        "contract": gate.contract,
        "error": progress.error,
        "last_error": progress.last_error,
        "last_error_unix_ms": progress.error_unix_ms,
        "commits": progress.commits,
        "errors": progress.errors,
        "path": None if report is None else report.path,
        "seconds": None if report is None else dict(report.seconds),
        "in_flight": gate.inside,
        "waiting": gate.waiting,
        "aborted": engine.aborted,
    }


def _number(value: int | None) -> float:
    return -1.0 if value is None else float(value)
