"""Publisher: the trainer's side. View -> diff -> encode -> send -> commit -> promote.

Owns the order of those steps, over one rank or many, and the promise that nothing moves forward until it is safe: the
diff base is promoted only after the manifest has been committed. Owns no comparison (codec/), no storage of the base
(snapshot.py), no wire (transport/), no model.

Every rank of a torch.distributed job calls every method; ranks publish their own shards and no rank gathers the model.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from weight_sync import config as configuration
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.config import Config, crash_point
from weight_sync.consensus import pack_error, raise_packed, unpack_error, writer_name
from weight_sync.errors import (
    DeadlineError,
    EpochFencedError,
    ForkRequiredError,
    StoreError,
    StoreUnavailableError,
    WeightSyncError,
)
from weight_sync.group import default_group
from weight_sync.history import view_of
from weight_sync.lineage import Ledger, anchor_due, check_step
from weight_sync.opening import base_digests, check_base, open_run, ship_base
from weight_sync.ports import Fate, Group, OpenedRun, PublisherEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, report_pb2, trajectory_pb2
from weight_sync.proving import learn_proven
from weight_sync.registry import open_transport
from weight_sync.reports import PublishReport
from weight_sync.served import ServedView, named_source, storages_of, view_fingerprint
from weight_sync.work import Prepared, RankWork

if TYPE_CHECKING:
    import torch

    from weight_sync.served import Source

__all__ = ["PublishReport", "Publisher"]


class Publisher:
    """Publishes versions of one view. Made by `Publisher.open`; a context manager.

    Attributes:
        config: the keys in force.
        run_id: of the run.
        version: number of the version committed last, None before the first.
        failed: the last publish's error until it is settled; None when all is well.
    """

    def __init__(self, config: Config, end: PublisherEnd, run: OpenedRun, group: Group) -> None:
        self.config, self.group = config, group
        self._end, self._run = end, run
        self._work = RankWork(config)
        self._view: ServedView | None = None
        self._ledger = Ledger.of(run.head, config.view)
        self._pending: Future[PublishReport] | None = None
        self._background = ThreadPoolExecutor(1, thread_name_prefix="weight_sync-publish") if config.overlap else None
        self._last: PublishReport | None = None
        self._unknown: int | None = None  # a number whose fate the store would not tell

    # --- opening ---

    @classmethod
    def open(
        cls, uri: str | Config, base: str | os.PathLike[str] | None = None, *, group: Group | None = None, **keys: Any
    ) -> Publisher:
        """Opens the newest run of a store, or a new one, and fences every older publisher of it.

        Args:
            uri: where versions go; or a whole `Config`.
            base: checkpoint that engines boot from; becomes version 0 by reference. Without one, the first publish
                writes a full state.
            group: the ranks that publish together; default: all of torch.distributed, else this process.
            keys: any key of `Config`.

        Raises ConfigError, StoreError, and ForkRequiredError when ``base`` is not the base of the run.
        """
        if base is not None:
            keys["base"] = os.fspath(base)
        config = uri.replace(**keys) if isinstance(uri, Config) else configuration.load({"uri": uri, **keys})
        ranks = group if group is not None else default_group(config.timeout_s)
        end = open_transport(config).publisher_end(ranks.rank, ranks.size)
        try:
            publisher = cls(config, end, open_run(config, end, ranks), ranks)
            publisher._start()
        except BaseException:
            end.close()
            raise
        return publisher

    @property
    def run_id(self) -> str:
        """Of the run."""
        return self._run.run_id

    @property
    def epoch(self) -> int:
        """Number of the entry by which this publisher owns the run."""
        return self._run.epoch

    @property
    def version(self) -> int | None:
        """Number of the version committed last; None in a run without any."""
        return self._ledger.head

    @property
    def step(self) -> int | None:
        """The trainer's step of that version; None when it was not given."""
        return self._ledger.step

    def _start(self) -> None:
        """Version 0 of a new run, by reference; in an old run the check that its base is ours."""
        if self.config.base is None:
            return
        checkpoint = Checkpoint(self.config.base)
        digests = base_digests(checkpoint, self.config.threads, self.group)
        if not self._run.created:
            check_base(self._end, self.config, digests)
            return
        entries = [(spec, digests[spec.name]) for spec in checkpoint.table]
        manifest = self._ledger.base_manifest(self._run, self.config, entries, writer_name())
        if self.config.ship_base == "always":
            manifest.views[0].shards.extend(ship_base(checkpoint, self._end, self.run_id, self.config.view, self.group))
        self._conclude(manifest)

    # --- publishing ---

    def publish(
        self, source: Source, step: int | None = None, metadata: Mapping[str, str] | None = None, *, cast: bool = True
    ) -> PublishReport | None:
        """Publishes what ``source`` holds now as the next version.

        Args:
            source: a module, or (this rank's) tensors by checkpoint name; plain tensors or DTensors.
            step: the trainer's own counter; must be above the head's.
            metadata: free text that travels with the version.
            cast: serve float tensors in the dtype of the version before (fp32 masters as bf16). False carries a change
                of dtype.

        Returns the report; None with ``overlap: true``, where `settle` returns it once sending has ended.

        Raises InputError for what is wrong with the source, ForkRequiredError when the step does not continue the head,
        EpochFencedError when a newer publisher owns the run, StoreError. After any of them the head, the base and the
        store's visible state are as before, and the changes are part of the next version.
        """
        self.settle()
        started = time.perf_counter()
        named, storages, why = self._guarded(lambda: _opened(source, self._ledger, step))
        plan = self._round(named, why)
        if plan.learn:
            self._view = learn_proven(
                named, storages, cast, self._ledger, self._work, self._end.reader(), self.config, self.group
            )
        assert self._view is not None
        made, why = self._work_of(self._view, storages)
        seconds = {"diff": time.perf_counter() - started}
        job = _Round(plan, made, step, dict(metadata or {}), why, started, seconds)
        if self._background is None:
            return self._finish(job)
        self._pending = self._background.submit(self._finish, job)
        return None

    def settle(self, timeout: float | None = None) -> PublishReport | None:
        """Waits for the version in flight; returns the last report. Raises its error, once, and DeadlineError."""
        pending, self._pending = self._pending, None
        if pending is None:
            return self._last
        limit = self.config.timeout_s if timeout is None else timeout
        try:
            return pending.result(limit)
        except TimeoutError as error:
            if pending.done():
                raise
            self._pending = pending
            raise DeadlineError(
                "the version in flight has not ended", field="settle", expected=f"within {limit:g} s"
            ) from error

    @staticmethod
    def _guarded(work: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any, WeightSyncError | None]:
        """A rank's own fault is told to the others at the next collective call instead of leaving them waiting."""
        try:
            return (*work(), None)
        except WeightSyncError as error:
            return None, None, error

    def _round(self, named: Any, why: WeightSyncError | None) -> report_pb2.RoundPlan:
        """Number, whether to learn the view again and whether to write a full state: one answer for all ranks."""
        if why is not None:
            mine = b"!" + pack_error(why).encode("utf-8", "replace")
        else:
            stale = self._view is None or view_fingerprint(named) != self._view.fingerprint
            mine = b"L" if stale else b"S"
        parts = self.group.gather(mine)
        plan = report_pb2.RoundPlan()
        if parts:
            self._plan(plan, parts)
        plan = report_pb2.RoundPlan.FromString(self.group.broadcast(plan.SerializeToString() if parts else None))
        raise_packed(plan.error, why)
        return plan

    def _plan(self, plan: report_pb2.RoundPlan, parts: Sequence[bytes]) -> None:
        try:
            failed = next((part for part in parts if part[:1] == b"!"), None)
            if failed is not None:
                raise unpack_error(failed[1:].decode("utf-8", "replace"))
            self._settle_unknown()
            plan.number = self._end.next_number()
            plan.learn = any(part == b"L" for part in parts)
            ledger = self._ledger
            plan.anchor_reason = anchor_due(self.config, ledger.head, ledger.since, ledger.patch_bytes,
                                            ledger.state_bytes, list(self._end.wants()))  # fmt: skip
        except WeightSyncError as error:
            plan.error = pack_error(error)

    def _settle_unknown(self) -> None:
        """A number whose fate is unknown is closed before the next one is begun, on rank 0."""
        if self._unknown is None:
            return
        number = self._unknown
        if self._end.abort(number, "the publisher could not learn whether it was committed") is Fate.COMMITTED:
            raise StoreUnavailableError(
                "an earlier version turned out to be committed", field="number", found=number,
                do="open the publisher again: it goes on from that version",
            )  # fmt: skip
        self._unknown = None

    def _work_of(
        self, view: ServedView, storages: Mapping[str, torch.Tensor]
    ) -> tuple[Prepared | None, WeightSyncError | None]:
        try:
            made = self._work.prepare(view, storages, self._ledger.table)
        except WeightSyncError as error:
            return None, error
        crash_point("publish:encoded")
        return made, None

    def _finish(self, job: _Round) -> PublishReport:
        """Send, commit, promote; collective, possibly in the background."""
        number, made, why = job.plan.number, job.made, job.why
        begun = time.perf_counter()
        report = report_pb2.RankReport()
        if made is not None:
            try:
                report = self._work.send(
                    self._end, self.run_id, number, self.group.rank, made, bool(job.plan.anchor_reason)
                )
                crash_point("publish:sent")
            except WeightSyncError as error:
                why = error
        if why is not None:
            report.error = pack_error(why)
        job.seconds["send"] = time.perf_counter() - begun
        begun = time.perf_counter()
        committed = False
        try:
            manifest = self._conclude_round(job, report, why)
            committed = True
        finally:
            if made is not None and not committed:
                self._work.settle(made, False)
        job.seconds["commit"] = time.perf_counter() - begun
        begun = time.perf_counter()
        assert made is not None
        self._work.settle(made, True)
        crash_point("publish:promoted")
        job.seconds["promote"] = time.perf_counter() - begun
        job.seconds["total"] = time.perf_counter() - job.started
        self._last = self._report(manifest, job)
        self._collect_if_due()
        return self._last

    def _conclude_round(
        self, job: _Round, report: report_pb2.RankReport, why: WeightSyncError | None
    ) -> manifest_pb2.VersionManifest:
        parts = self.group.gather(report.SerializeToString())
        manifest = manifest_pb2.VersionManifest()
        failure: WeightSyncError | None = None
        if parts:
            reports = [report_pb2.RankReport.FromString(part) for part in parts]
            failed = next((r.error for r in reports if r.error), None)
            if failed is not None:
                failure = unpack_error(failed)
            else:
                assert job.made is not None
                manifest = self._ledger.manifest(self._run, job.plan.number, job.step, job.metadata,
                                                 bool(job.plan.anchor_reason), writer_name())  # fmt: skip
                self._ledger.add_view(manifest, job.made.view.table, reports)
        return self._conclude(manifest, failure, why)

    def _conclude(
        self,
        manifest: manifest_pb2.VersionManifest,
        failure: WeightSyncError | None = None,
        own: WeightSyncError | None = None,
    ) -> manifest_pb2.VersionManifest:
        """Rank 0 commits, everyone hears how it went and raises the same error."""
        outcome = report_pb2.RoundOutcome()
        if self.group.rank == 0:
            try:
                if failure is not None:
                    raise failure
                crash_point("publish:commit")
                self._commit(manifest)
                outcome.manifest.CopyFrom(manifest)
            except WeightSyncError as error:
                failure = error
                outcome.error = pack_error(error)
        outcome = report_pb2.RoundOutcome.FromString(
            self.group.broadcast(outcome.SerializeToString() if self.group.rank == 0 else None)
        )
        raise_packed(outcome.error, own or failure)
        self._ledger.committed(outcome.manifest)
        return outcome.manifest

    def _commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        """Commits, and settles the number when the store's answer is lost."""
        try:
            self._end.commit(manifest)
        except EpochFencedError:
            raise
        except StoreError as error:
            try:
                fate = self._end.abort(manifest.number, f"commit failed: {error.what}")
            except WeightSyncError:
                self._unknown = manifest.number
                raise error from None
            if fate is not Fate.COMMITTED:
                raise

    def _report(self, manifest: manifest_pb2.VersionManifest, job: _Round) -> PublishReport:
        view = view_of(manifest, self.config.view)
        raw = common_pb2.FORM_RAW
        return PublishReport(
            version=manifest.number, run_id=self.run_id,
            kind="ANCHOR" if manifest.kind == manifest_pb2.ENTRY_KIND_ANCHOR else "PATCH", step=job.step,
            elements=view.elements, changed=view.changed,
            patch_bytes=sum(ref.size for ref in view.shards if ref.form != raw),
            anchor_bytes=sum(ref.size for ref in view.shards if ref.form == raw),
            digest=Digest.from_proto(view.digest).hex(), seconds=dict(job.seconds), reason=job.plan.anchor_reason,
        )  # fmt: skip

    # --- what comes back ---

    def acknowledgements(self) -> list[replica_pb2.Acknowledgement]:
        """The last one of each replica. Rank 0 only."""
        return self._end.acknowledgements()

    def take_trajectories(self, limit: int = 1024) -> list[trajectory_pb2.Trajectory]:
        """Up to ``limit`` trajectories that were not taken yet, at least once each. Rank 0 only."""
        return self._end.take_trajectories(limit)

    def collect(self) -> Mapping[str, int]:
        """Deletes what no lease and no retained version needs; counts by kind. Rank 0 only."""
        return self._end.collect()

    def _collect_if_due(self) -> None:
        every = self.config.collect_every
        if every and self.group.rank == 0 and self._last is not None and self._last.version % every == 0:
            self._end.collect()

    def close(self) -> None:
        """Settles the version in flight and releases everything; a failure of that version is raised after it."""
        try:
            self.settle()
        finally:
            if self._background is not None:
                self._background.shutdown(wait=True)
            self._end.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        with suppress(WeightSyncError):  # the first error is the one to see
            self.close()


@dataclass
class _Round:
    """One publish on its way."""

    plan: report_pb2.RoundPlan
    made: Prepared | None
    step: int | None
    metadata: dict[str, str]
    why: WeightSyncError | None
    started: float
    seconds: dict[str, float]


def _opened(source: Source, ledger: Ledger, step: int | None) -> tuple[Any, Any]:
    """Source and storages, after the checks that need no other rank."""
    reason = check_step(ledger.step, step)
    if reason:
        raise ForkRequiredError(reason, field="step", found=step, expected=f"above {ledger.step}",
                                do="resume the trainer from the head, or fork: true to start a new run")  # fmt: skip
    named = named_source(source)
    return named, storages_of(named)
