"""Opening a run: which run, whose epoch, and the base checkpoint as version 0.

Owns what happens before the first publish, over all ranks. Owns no publish (publisher.py) and no rule of the log
(version.py, transports).
"""

from __future__ import annotations

from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.codec.shard import build_shard, identity
from weight_sync.config import Config
from weight_sync.consensus import pack_error, raise_packed, writer_name
from weight_sync.errors import ForkRequiredError, VersionError, WeightSyncError
from weight_sync.history import view_of
from weight_sync.layout.box import Box
from weight_sync.ports import DensePiece, Group, OpenedRun, PublisherEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2, report_pb2

__all__ = ["base_digests", "check_base", "open_run", "ship_base"]


def open_run(config: Config, end: PublisherEnd, group: Group) -> OpenedRun:
    """Rank 0 claims the run, the others are told. Raises the same error on every rank."""
    report = report_pb2.OpenedReport()
    opened: OpenedRun | None = None
    failure: WeightSyncError | None = None
    if group.rank == 0:
        try:
            opened = end.open_run(config.run_id, fork_of=_fork_of(config, end), writer=writer_name())
            report = report_pb2.OpenedReport(
                run_id=opened.run_id, epoch=opened.epoch, head=opened.head, created=opened.created
            )
        except WeightSyncError as error:
            failure = error
            report.error = pack_error(error)
    report = report_pb2.OpenedReport.FromString(
        group.broadcast(report.SerializeToString() if group.rank == 0 else None)
    )
    raise_packed(report.error, failure)
    if opened is None:
        head = report.head if report.HasField("head") else None
        opened = OpenedRun(report.run_id, report.epoch, head, report.created)
        end.attach(opened)
    return opened


def _fork_of(config: Config, end: PublisherEnd) -> common_pb2.VersionId | None:
    """The version that a fork starts from: the head of the newest run; None without ``fork``."""
    if not config.fork:
        return None
    reader = end.reader()
    try:
        head = reader.head()
        return None if head is None else common_pb2.VersionId(run_id=reader.run_id(), number=head)
    except VersionError:
        return None  # an empty store: the run is new anyway
    finally:
        reader.close()


def base_digests(checkpoint: Checkpoint, threads: int, group: Group) -> dict[str, Digest]:
    """Digest of every tensor of a checkpoint; the ranks share the work."""
    names = [spec.name for spec in checkpoint.table][group.rank :: group.size]
    mine = manifest_pb2.ViewManifest()
    for spec, digest in checkpoint.digests(names, threads):
        mine.tensors.add(spec=spec.to_proto(), digest=digest.to_proto())
    parts = group.gather(mine.SerializeToString())
    joint = manifest_pb2.ViewManifest()
    for part in parts:
        joint.MergeFromString(part)
    everyone = manifest_pb2.ViewManifest.FromString(group.broadcast(joint.SerializeToString() if parts else None))
    return {entry.spec.name: Digest.from_proto(entry.digest) for entry in everyone.tensors}


def ship_base(
    checkpoint: Checkpoint, end: PublisherEnd, run_id: str, view: str, group: Group
) -> list[manifest_pb2.ShardRef]:
    """The base's bits into the store, the ranks sharing the work; all references, on rank 0."""
    specs = checkpoint.table[group.rank :: group.size]
    report = report_pb2.RankReport()
    pieces = [DensePiece(spec, Box.run(0, spec.elements), checkpoint.bits(spec.name)) for spec in specs]
    if pieces:
        who = identity(run_id, 0, group.rank, view, common_pb2.FORM_RAW)
        report.shards.append(end.put_shard(0, build_shard(f"anchor-{view}", who, (), pieces)))
    reports = group.gather(report.SerializeToString())
    return [ref for part in reports for ref in report_pb2.RankReport.FromString(part).shards]


def check_base(end: PublisherEnd, config: Config, digests: dict[str, Digest]) -> None:
    """Raises ForkRequiredError when the configured base is not what the run started from."""
    first = next(iter(end.reader().entries()), None)
    if first is None or first.kind != manifest_pb2.ENTRY_KIND_ANCHOR or not first.HasField("base"):
        return
    expected, found = Digest.from_proto(view_of(first, config.view).digest), Digest.sum(digests.values())
    if expected != found:
        raise ForkRequiredError(
            "base is not the base of this run",
            field="base",
            found=f"{config.base} with digest {found}",
            expected=expected.hex(),
            do="set base to the run's own base, or fork: true to start a new run",
        )
