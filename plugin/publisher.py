"""Publisher: the trainer's side. View -> diff -> encode -> send -> commit -> promote.

Owns the order of those steps, over one rank or many, and the promise that nothing moves forward until it is safe: the
diff base is promoted only after the manifest has been committed. Owns no comparison (codec/), no storage of the base
(snapshot.py), no wire (transport/), no model.

Every rank of a torch.distributed job calls every method; ranks publish their own shards and no rank gathers the model.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from weight_sync import config as configuration
from weight_sync.adapting import AdapterLine
from weight_sync.codec.digest import Digest
from weight_sync.config import Config, crash_point
from weight_sync.consensus import together, writer_name
from weight_sync.contract import Declaration
from weight_sync.errors import (
    CorruptionError,
    DeadlineError,
    InputError,
    LineageError,
    StoreError,
    WeightSyncError,
)
from weight_sync.group import default_group
from weight_sync.lineage import Ledger, anchor_due
from weight_sync.opening import base_digests, base_manifest, open_run, ship_base
from weight_sync.ports import Fate, Group, OpenedRun, PublisherEnd
from weight_sync.proto.v1 import contract_pb2, manifest_pb2, replica_pb2, report_pb2, trajectory_pb2
from weight_sync.registry import open_transport
from weight_sync.reports import PublishReport, publish_report
from weight_sync.round import LEARN, Offer, Round
from weight_sync.signing import signer
from weight_sync.trajectory.intake import Intake
from weight_sync.views import Views

if TYPE_CHECKING:
    import torch

    from weight_sync.adapting import Offered

__all__ = ["PublishReport", "Publisher"]


class Publisher:
    """Publishes versions of one or several views. Made by `Publisher.open`; a context manager.

    Attributes:
        config: the keys in force.
        group: the ranks that publish together.
        inbox: the durable inbox on rank 0, where the key ``inbox`` names one or the transport has one; else None.
    """

    def __init__(
        self, config: Config, end: PublisherEnd, run: OpenedRun, group: Group, views: Views, declared: Declaration,
        line: AdapterLine | None = None,
    ) -> None:  # fmt: skip
        self.config, self.group = config, group
        self._end, self._run, self._line = end, run, line
        self._views, self._declared = views, declared
        lookup = end.reader().manifest if group.rank == 0 else None  # rank 0 decides when a full state is due
        self._ledger = Ledger.of(run.head, views.schemes, lookup)
        self._pending: concurrent.futures.Future[PublishReport] | None = None
        pool = concurrent.futures.ThreadPoolExecutor
        self._background = pool(1, thread_name_prefix="weight_sync-publish") if config.overlap else None
        self._flying: int | None = None
        self._last: PublishReport | None = None
        self._in_doubt: int | None = None  # on rank 0: a number that may have been committed without our knowledge
        self._since_collection = 0
        self._is_closed = False
        self._intake = Intake(end)
        self.inbox = self._intake.inbox

    # --- opening ---

    @classmethod
    def open(
        cls, uri: str | Config, base: str | os.PathLike[str] | None = None, *, group: Group | None = None,
        execution: contract_pb2.ExecutionContract | None = None, **keys: Any,
    ) -> Publisher:  # fmt: skip
        """Opens the newest run of a store, or a new one, and fences every older publisher of it.

        Args:
            uri: where versions go; or a whole `Config`.
            base: checkpoint that engines boot from; becomes version 0 by reference. Without one, the first publish
                writes a full state.
            group: the ranks that publish together; default: all of torch.distributed, else this process.
            execution: how this trainer computes; travels with every version.
            keys: any key of `Config`.

        Raises ConfigError, StoreError, and ForkRequiredError when ``base`` is not the base of the run.
        """
        if base is not None:
            keys["base"] = os.fspath(base)
        config = uri.replace(**keys) if isinstance(uri, Config) else configuration.load({"uri": uri, **keys})
        declared = Declaration(config.contract, execution)
        ranks = group if group is not None else default_group(config.timeout_s)
        transport = open_transport(config)
        end = transport.publisher_end(ranks.rank, ranks.size)
        try:
            views = Views(config)
            views.check_end(end)
            digests = base_digests(config, transport, ranks)
            line = AdapterLine.open(config, transport, ranks)
            publisher = cls(config, end, open_run(config, transport, end, ranks), ranks, views, declared, line)
            publisher._start(digests)
            publisher.inbox = publisher._intake.open(config, publisher.run_id, ranks.rank)
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
    def pending(self) -> int | None:
        """Number of the version in flight, which may yet fail; None when there is none."""
        return self._flying

    @property
    def step(self) -> int | None:
        """The trainer's step of that version; None when it was not given."""
        return self._ledger.step

    def _start(self, digests: Mapping[str, Mapping[str, Digest]]) -> None:
        """The first version of a run, by reference, unless it has one."""
        if self._views.parts[0].base is None or self._ledger.head is not None:
            return
        number = int(together(self.group, bytes, lambda _: str(self._end.next_number()).encode()))
        manifest = base_manifest(self.config, self._run, self._ledger, number, digests)
        if self.config.ship_base == "always":
            ship_base(self.config, self._end, manifest, self.group)
        committed = together(self.group, bytes, lambda _: self._commit(manifest))
        self._concluded(manifest_pb2.VersionManifest.FromString(committed))

    # --- publishing ---

    def publish(
        self, source: Offered, step: int | None = None, metadata: Mapping[str, str] | None = None, *, cast: bool = True
    ) -> PublishReport | None:
        """Publishes what ``source`` holds now as the next version.

        Args:
            source: a module, or (this rank's) tensors by checkpoint name; plain tensors or DTensors. A module must have
                the tensors of the version before; named tensors may appear, vanish and change shape. With
                ``adapter.base``: a model wrapped by peft, an `AdapterSource`, or a folder that PEFT saved.
            step: the trainer's own counter; must be above the head's.
            metadata: free text that travels with the version.
            cast: serve float tensors in the dtype of the version before (fp32 masters as bf16). False carries a change
                of dtype.

        Returns the report; None with ``overlap: true``, where `settle` returns it once sending has ended.

        Raises InputError for what is wrong with the source, ForkRequiredError when the step does not continue the head,
        EpochFencedError when a newer publisher owns the run, StoreError. After any of them the head, the base and the
        store's visible state are as before, and the changes are part of the next version.
        """
        self._settled()
        started = time.perf_counter()
        offer = Offer(source, step, metadata or {}, cast, self._line)
        job = Round(self._begin(offer), step, dict(metadata or {}), started)
        self._prepare(job, offer.storages)
        if self._background is None:
            return self._finish(job)
        self._pending = self._background.submit(self._finish, job)
        self._flying = job.plan.number
        return None

    def _settled(self) -> None:
        if self._is_closed:
            raise InputError("this publisher is closed", field="run_id", found=self.run_id, do="open another one")
        self.settle()

    def _begin(self, offer: Offer) -> report_pb2.RoundPlan:
        """The view is what this rank offers, and its base is the head. Collective."""
        answer = together(self.group, lambda: offer.open(self._ledger, self._views), self._plan)
        plan = report_pb2.RoundPlan.FromString(answer)
        if plan.HasField("adopted"):
            self._concluded(plan.adopted)
            self._views.forget()
        if plan.learn:
            self._views.learn(offer.named, offer.storages, offer.cast, self._ledger, self._end.reader, self.group)
        self._views.exchange(offer.storages, self.group)
        return plan

    def recognise(self, source: Offered) -> int | None:
        """The version whose bits ``source`` holds now; None for none. Publishes nothing; a collective call.

        For a trainer that resumes from a checkpoint of its own. Raises as `publish`; looks at the newest versions only.
        """
        self._settled()
        offer = Offer(source, None, {}, True, self._line)
        self._begin(offer)

        def gained() -> bytes:
            return self._views.gained(self._views.prepare(offer.storages, self._ledger))

        def find(parts: Sequence[bytes]) -> bytes:
            found = self._views.recognise(self._end.reader(), self._ledger, parts)
            return b"" if found is None else str(found).encode()

        answer = together(self.group, gained, find)
        return int(answer) if answer else None

    def settle(self, timeout: float | None = None) -> PublishReport | None:
        """Waits for the version in flight; returns the last report. Raises its error, once, and DeadlineError."""
        if self._pending is None:
            return self._last
        limit = self.config.timeout_s if timeout is None else timeout
        if not concurrent.futures.wait([self._pending], limit).done:
            raise DeadlineError("the version in flight has not ended", field="settle", expected=f"within {limit:g} s")
        pending, self._pending, self._flying = self._pending, None, None
        return pending.result()

    def _plan(self, parts: Sequence[bytes]) -> bytes:
        """On rank 0: number, whether to learn the view again, and whether to write a full state."""
        plan = report_pb2.RoundPlan(learn=any(part == LEARN for part in parts))
        self._settle_doubt(plan)
        plan.number = self._end.next_number()
        try:
            wanted = list(self._end.wants())
        except CorruptionError:
            wanted = []  # a replica wrote garbage, which the transport has set aside: no reason to stop the trainer
        ledger = self._ledger
        plan.anchor_reason = anchor_due(
            self.config, ledger.head, ledger.since, ledger.patch_bytes, ledger.state_bytes, wanted
        )
        return plan.SerializeToString()

    def _settle_doubt(self, plan: report_pb2.RoundPlan) -> None:
        """A number whose fate is unknown is closed, or adopted by all ranks, before the next one is begun."""
        number = self._in_doubt
        if number is None:
            return
        if self._end.abort(number, "the publisher could not learn whether it was committed") is Fate.COMMITTED:
            plan.adopted.CopyFrom(self._end.reader().manifest(number))
            plan.learn = True  # the base is loaded again: ours is of the version before
        else:
            self._in_doubt = None

    def _prepare(self, job: Round, storages: Mapping[str, torch.Tensor]) -> None:
        try:
            job.made = self._views.prepare(storages, self._ledger)
            if self._line is not None and self.group.rank == 0:
                job.adapter = self._line.message(job.made[0].view.table)
            crash_point("publish:encoded")
        except Exception as error:  # told to the other ranks where they next meet
            job.why = error
        job.seconds["diff"] = time.perf_counter() - job.started

    def _finish(self, job: Round) -> PublishReport:
        """Send, commit, promote; collective, possibly in the background."""
        begun = time.perf_counter()
        try:
            answer = together(self.group, lambda: self._send(job), lambda parts: self._commit_round(job, parts))
        except BaseException:
            if job.made is not None:
                self._views.settle(job.made, False)
            raise
        manifest = manifest_pb2.VersionManifest.FromString(answer)
        self._concluded(manifest)
        assert job.made is not None
        job.seconds["commit"] = time.perf_counter() - begun - job.seconds["send"]
        begun = time.perf_counter()
        self._views.settle(job.made, True)
        crash_point("publish:promoted")
        job.seconds["promote"] = time.perf_counter() - begun
        job.seconds["total"] = time.perf_counter() - job.started
        names = self._ledger.views
        self._last = publish_report(manifest, names, job.seconds, job.plan.anchor_reason, self._collect_if_due())
        return self._last

    def _send(self, job: Round) -> bytes:
        if job.why is not None:
            raise job.why
        assert job.made is not None
        begun = time.perf_counter()
        full = bool(job.plan.anchor_reason)
        report = self._views.send(self._end, self.run_id, job.plan.number, self.group.rank, job.made, full)
        crash_point("publish:sent")
        job.seconds["send"] = time.perf_counter() - begun
        return report.SerializeToString()

    def _commit_round(self, job: Round, parts: Sequence[bytes]) -> bytes:
        """On rank 0."""
        assert job.made is not None
        full = bool(job.plan.anchor_reason)
        manifest = self._ledger.manifest(self._run, job.plan.number, job.step, job.metadata, full, writer_name())
        if job.adapter is not None:
            manifest.adapter.CopyFrom(job.adapter)
        self._views.add_to(manifest, self._ledger, job.made, parts)
        return self._commit(manifest)

    def _commit(self, manifest: manifest_pb2.VersionManifest) -> bytes:
        """On rank 0: commits, and settles the number when the store's answer is lost. Returns the manifest."""
        self._declared.write(manifest)
        signer(self.config.signing)(manifest)
        crash_point("publish:commit")
        self._in_doubt = manifest.number
        try:
            self._end.commit(manifest)
        except (InputError, LineageError):
            self._in_doubt = None  # refused: it is not there
            raise
        except WeightSyncError as error:
            try:
                fate = self._end.abort(manifest.number, f"commit failed: {error.what}")
            except WeightSyncError:
                raise error from None  # the next round asks again
            if fate is not Fate.COMMITTED:
                self._in_doubt = None
                raise
        return manifest.SerializeToString()

    def _concluded(self, manifest: manifest_pb2.VersionManifest) -> None:
        """This rank knows that the version is committed."""
        self._ledger.committed(manifest)
        self._in_doubt = None

    # --- what comes back ---

    def acknowledgements(self) -> list[replica_pb2.Acknowledgement]:
        """The last one of each replica. Rank 0 only."""
        return self._end.acknowledgements()

    def take_trajectories(self, limit: int = 1024) -> list[trajectory_pb2.Trajectory]:
        """Up to ``limit`` that were not taken yet; those of the call before count as used. Rank 0 only. See `inbox`."""
        return self._intake.take(limit)

    def collect(self) -> Mapping[str, int]:
        """Deletes what no lease and no retained version needs; counts by kind. Rank 0 only."""
        return self._end.collect()

    def _collect_if_due(self) -> str:
        """Why it failed: the version is out all the same."""
        self._since_collection += 1
        if self.group.rank != 0 or not self.config.collect_every or self._since_collection < self.config.collect_every:
            return ""
        self._since_collection = 0
        try:
            self._end.collect()
        except (StoreError, CorruptionError) as error:
            return str(error)
        return ""

    def close(self) -> None:
        """Settles the version in flight and releases everything; a failure of that version is raised after it."""
        try:
            self.settle()
        finally:
            if self._background is not None:
                self._background.shutdown(wait=True)
            self._is_closed = True
            self._intake.close()

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
