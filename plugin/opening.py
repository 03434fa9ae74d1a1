"""Opening a run: which run, whose epoch, and the base checkpoint as the first version.

Owns what happens before the first publish, over all ranks. Owns no publish (publisher.py) and no rule of the log
(version.py, transports).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.codec.shard import build_shard, identity
from weight_sync.config import Config
from weight_sync.consensus import together, writer_name
from weight_sync.errors import ForkRequiredError, VersionMissingError
from weight_sync.history import first_version, view_of
from weight_sync.layout.box import Box
from weight_sync.ports import DensePiece, Group, OpenedRun, PublisherEnd, ReplicaEnd, Transport
from weight_sync.proto.v1 import common_pb2, manifest_pb2, report_pb2
from weight_sync.signing import signer

__all__ = ["base_digests", "open_run", "ship_base"]


def open_run(config: Config, transport: Transport, end: PublisherEnd, group: Group) -> OpenedRun:
    """Rank 0 claims the run, the others are told. Raises the same error on every rank."""
    mine: list[OpenedRun] = []
    signer(config.signing)  # a bad key must not fence the publisher that has a good one

    def claim(_: Sequence[bytes]) -> bytes:
        opened = end.open_run(config.run_id, fork_of=_fork_of(config, transport), writer=writer_name())
        mine.append(opened)
        return report_pb2.OpenedReport(
            run_id=opened.run_id, epoch=opened.epoch, head=opened.head, created=opened.created
        ).SerializeToString()

    report = report_pb2.OpenedReport.FromString(together(group, bytes, claim))
    if mine:
        return mine[0]
    head = report.head if report.HasField("head") else None
    opened = OpenedRun(report.run_id, report.epoch, head, report.created)
    end.attach(opened)
    return opened


def _fork_of(config: Config, transport: Transport) -> common_pb2.VersionId | None:
    """The version that a fork starts from: the head of the newest run; None when there is nothing to fork.

    That is without ``fork``, in an empty store, and when the run that ``run_id`` names is there: it was forked before.
    """
    if not config.fork:
        return None
    with closing(transport.replica_end(config.run_id)) as reader:
        newest = reader.newest_run()
        if newest is None or (config.run_id is not None and _holds_run(reader)):
            return None
    with closing(transport.replica_end(newest)) as reader:
        head = reader.head()
    return None if head is None else common_pb2.VersionId(run_id=newest, number=head)


def _holds_run(reader: ReplicaEnd) -> bool:
    try:
        reader.run_id()
    except VersionMissingError:
        return False
    return True


def base_digests(config: Config, transport: Transport, group: Group) -> dict[str, Digest]:
    """Digest of every tensor of the base, the ranks sharing the work; nothing without one.

    Raises ForkRequiredError when the run that is to be opened started from another base, VersionMissingError when it
    lacks the view. Called before the run is claimed: who may not go on must not stop the publisher that does.
    """

    def mine() -> bytes:
        if config.base is None:
            return b""
        checkpoint = Checkpoint(config.base)
        names = [spec.name for spec in checkpoint.table][group.rank :: group.size]
        view = manifest_pb2.ViewManifest()
        for spec, digest in checkpoint.digests(names, config.threads):
            view.tensors.add(spec=spec.to_proto(), digest=digest.to_proto())
        return view.SerializeToString()

    def join(parts: Sequence[bytes]) -> bytes:
        joint = manifest_pb2.ViewManifest()
        for part in parts:
            joint.MergeFromString(part)
        with closing(transport.replica_end(config.run_id)) as reader:
            if not (config.fork and config.run_id is None) and _holds_run(reader):
                _check_run(reader, config, joint)
        return joint.SerializeToString()

    everyone = manifest_pb2.ViewManifest.FromString(together(group, mine, join))
    return {entry.spec.name: Digest.from_proto(entry.digest) for entry in everyone.tensors}


def _check_run(reader: ReplicaEnd, config: Config, base: manifest_pb2.ViewManifest) -> None:
    head = reader.head()
    if head is not None:
        view_of(reader.manifest(head), config.view)
    first = first_version(reader)
    if first is None or not first.HasField("base") or config.base is None:
        return  # collected meanwhile, or the run started from a full state
    expected = Digest.from_proto(view_of(first, config.view).digest)
    found = Digest.sum(Digest.from_proto(entry.digest) for entry in base.tensors)
    if expected != found:
        raise ForkRequiredError(
            "base is not the base of this run",
            field="base",
            found=f"{config.base} with digest {found}",
            expected=expected.hex(),
            do="set base to the run's own base, or fork: true to start a new run",
        )


def ship_base(
    config: Config, end: PublisherEnd, run_id: str, number: int, group: Group
) -> Sequence[manifest_pb2.ShardRef]:
    """The base's bits into the store as part of version ``number``, the ranks sharing the work; all references."""

    def mine() -> bytes:
        assert config.base is not None
        checkpoint = Checkpoint(config.base)
        specs = checkpoint.table[group.rank :: group.size]
        report = report_pb2.RankReport()
        if specs:
            pieces = [DensePiece(spec, Box.run(0, spec.elements), checkpoint.bits(spec.name)) for spec in specs]
            who = identity(run_id, number, group.rank, config.view, common_pb2.FORM_RAW)
            report.shards.append(end.put_shard(number, build_shard(f"anchor-{config.view}", who, (), pieces)))
        return report.SerializeToString()

    return report_pb2.RankReport.FromString(together(group, mine, _joined)).shards


def _joined(parts: Sequence[bytes]) -> bytes:
    joint = report_pb2.RankReport()
    for part in parts:
        joint.MergeFromString(part)
    return joint.SerializeToString()
