"""Opening a run: which run, whose epoch, and the base checkpoint as the first version.

Owns what happens before the first publish, over all ranks. Owns no publish (publisher.py) and no rule of the log
(version.py, transports).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

from weight_sync.adapter import named_base
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.codec.shard import build_shard, identity
from weight_sync.config import Config
from weight_sync.consensus import together, writer_name
from weight_sync.errors import ConfigError, ForkRequiredError, VersionMissingError
from weight_sync.history import first_version, view_of
from weight_sync.layout.box import Box
from weight_sync.lineage import Ledger
from weight_sync.ports import DensePiece, Group, OpenedRun, PublisherEnd, ReplicaEnd, Transport
from weight_sync.proto.v1 import common_pb2, manifest_pb2, report_pb2
from weight_sync.signing import signer

__all__ = ["base_digests", "base_manifest", "open_run", "ship_base"]


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


def base_digests(config: Config, transport: Transport, group: Group) -> dict[str, dict[str, Digest]]:
    """By view, the digest of every tensor of its base, the ranks sharing the work; nothing without one.

    Raises ForkRequiredError when the run that is to be opened started from another base or publishes other views,
    VersionMissingError when it lacks one. Called before the run is claimed: who may not go on must not stop the publisher
    that does.
    """

    def mine() -> bytes:
        found = manifest_pb2.VersionManifest()
        for keys in config.published:
            view = found.views.add(name=keys.name)
            if keys.base is None:
                continue
            checkpoint = Checkpoint(keys.base)
            names = [spec.name for spec in checkpoint.table][group.rank :: group.size]
            for spec, digest in checkpoint.digests(names, config.threads):
                view.tensors.add(spec=spec.to_proto(), digest=digest.to_proto())
        return found.SerializeToString()

    def join(parts: Sequence[bytes]) -> bytes:
        joint = manifest_pb2.VersionManifest.FromString(parts[0])
        for part in parts[1:]:
            for view, more in zip(joint.views, manifest_pb2.VersionManifest.FromString(part).views, strict=True):
                view.tensors.extend(more.tensors)
        with closing(transport.replica_end(config.run_id)) as reader:
            if not (config.fork and config.run_id is None) and _holds_run(reader):
                _check_run(reader, config, joint)
        return joint.SerializeToString()

    everyone = manifest_pb2.VersionManifest.FromString(together(group, mine, join))
    return {view.name: {entry.spec.name: Digest.from_proto(entry.digest) for entry in view.tensors}
            for view in everyone.views}  # fmt: skip


def _check_run(reader: ReplicaEnd, config: Config, bases: manifest_pb2.VersionManifest) -> None:
    head = reader.head()
    if head is not None:
        _check_views(reader.manifest(head), config)
    first = first_version(reader)
    if first is None or not first.HasField("base"):
        return  # collected meanwhile, or the run started from a full state
    for keys, base in zip(config.published, bases.views, strict=True):
        expected = Digest.from_proto(view_of(first, keys.name).digest)
        found = Digest.sum(Digest.from_proto(entry.digest) for entry in base.tensors)
        if keys.base is not None and expected != found:
            raise ForkRequiredError(
                "base is not the base of this run", field="base", found=f"{keys.base} with digest {found}",
                expected=expected.hex(), do="set base to the run's own base, or fork: true to start a new run",
            )  # fmt: skip


def _check_views(head: manifest_pb2.VersionManifest, config: Config) -> None:
    """A run keeps the views that it has: whoever follows one of them must find it in every version."""
    if head.HasField("adapter") and config.adapter.base is None:
        raise ConfigError("the run's versions are adapters", field="weight_sync.adapter.base", found=None,
                          expected=named_base(head.adapter), do="set it, or give the models a uri of their own")  # fmt: skip
    published = [keys.name for keys in config.published]
    for name in published:
        view_of(head, name)
    if left := sorted({view.name for view in head.views} - set(published)):
        raise ForkRequiredError("the run has further views", field="views", found=published,
                                expected=f"also {', '.join(left)}",
                                do="publish all views of the run, or fork: true to start a new one")  # fmt: skip


def base_manifest(
    config: Config, run: OpenedRun, ledger: Ledger, number: int, digests: Mapping[str, Mapping[str, Digest]]
) -> manifest_pb2.VersionManifest:
    """The first version of a run: the base checkpoints, by reference."""
    manifest = ledger.manifest(run, number, None, {}, True, writer_name())
    for keys in config.published:
        assert keys.base is not None  # all views have one, or none has
        entries = [(spec, digests[keys.name][spec.name]) for spec in Checkpoint(keys.base).table]
        ledger.views[keys.name].add_base_to(manifest, keys.base, entries)
    manifest.base.uri = manifest.views[0].base.uri
    manifest.base.hf_id, manifest.base.hf_revision = config.base_hf_id, config.base_hf_revision
    return manifest


def ship_base(config: Config, end: PublisherEnd, manifest: manifest_pb2.VersionManifest, group: Group) -> None:
    """The bases' bits into the store as part of the first version, the ranks sharing the work."""
    for keys, view in zip(config.published, manifest.views, strict=True):
        assert keys.base is not None
        view.shards.extend(_ship(config, Checkpoint(keys.base), end, keys.name, manifest, group))


def _ship(config: Config, checkpoint: Checkpoint, end: PublisherEnd, name: str,
          manifest: manifest_pb2.VersionManifest, group: Group) -> Sequence[manifest_pb2.ShardRef]:  # fmt: skip
    """One view's bits; all references."""

    def mine() -> bytes:
        specs = checkpoint.table[group.rank :: group.size]
        report = report_pb2.RankReport()
        if specs:
            pieces = [DensePiece(spec, Box.run(0, spec.elements), checkpoint.bits(spec.name)) for spec in specs]
            who = identity(manifest.run_id, manifest.number, group.rank, name, common_pb2.FORM_RAW)
            report.shards.append(end.put_shard(manifest.number, build_shard(f"anchor-{name}", who, (), pieces)))
        return report.SerializeToString()

    return report_pb2.RankReport.FromString(together(group, mine, _joined)).shards


def _joined(parts: Sequence[bytes]) -> bytes:
    joint = report_pb2.RankReport()
    for part in parts:
        joint.MergeFromString(part)
    return joint.SerializeToString()
