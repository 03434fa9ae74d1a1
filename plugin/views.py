"""The views that are published together: one RankWork each, driven as one.

Owns that nothing is done for one view and left undone for another. Owns no step of one view (work.py) and no order of
steps (publisher.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from weight_sync.codec.digest import Digest
from weight_sync.config import Config
from weight_sync.consensus import together
from weight_sync.errors import ConfigError
from weight_sync.following import recognise
from weight_sync.history import History
from weight_sync.lineage import Ledger
from weight_sync.ports import Group, PublisherEnd, ReplicaEnd
from weight_sync.proto.v1 import manifest_pb2, report_pb2
from weight_sync.proving import learn_proven
from weight_sync.push import offers
from weight_sync.quantize.extrema import Ranges, merge_ranges
from weight_sync.work import Prepared, RankWork

if TYPE_CHECKING:
    import torch

    from weight_sync.served import Named

__all__ = ["Views"]


class Views:
    """Base, diff, shards and promotion of this rank's part of every view.

    Attributes:
        parts: one per view, in the order of the configuration.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.parts = tuple(RankWork(config, keys) for keys in config.published)

    @property
    def schemes(self) -> dict[str, str]:
        """By name of the view."""
        return {part.name: part.scheme for part in self.parts}

    def check_end(self, end: PublisherEnd) -> None:
        """Raises ConfigError when the transport cannot carry so many views."""
        if len(self.parts) > 1 and offers(end):
            raise ConfigError("this transport pushes one view", field="weight_sync.views", found=list(self.schemes),
                              expected="one view", do="publish several views to a store or by grpc")  # fmt: skip

    def know(self, fingerprint: bytes) -> bool:
        """True when all views were learnt from a source with this fingerprint."""
        return all(part.view is not None and part.view.fingerprint == fingerprint for part in self.parts)

    def forget(self) -> None:
        """Drops bases that may not be the head's."""
        for part in self.parts:
            part.forget()

    def learn(
        self, named: Named, storages: Mapping[str, torch.Tensor], cast: bool, ledger: Ledger,
        reader: Callable[[], ReplicaEnd], group: Group,
    ) -> None:  # fmt: skip
        """Learns every view and proves its base. Collective. Raises as `learn_proven`."""
        for part in self.parts:
            history = History(reader(), part.name, self.config.threads, part.base)
            learn_proven(named, storages, cast, ledger.head, ledger.views[part.name], part, history, group)

    def exchange(self, storages: Mapping[str, torch.Tensor], group: Group) -> None:
        """Extrema of blocks that shards cut, so that every rank makes the same scales. Collective where a view needs it."""
        if all(part.plan is None for part in self.parts):
            return

        def mine() -> bytes:
            found = [
                report_pb2.BlockRanges() if part.view is None or part.view.projection is None
                else part.view.projection.ranges(storages)
                for part in self.parts
            ]  # fmt: skip
            return report_pb2.RoundRanges(views=found).SerializeToString()

        def join(data: Sequence[bytes]) -> bytes:
            rounds = [report_pb2.RoundRanges.FromString(part) for part in data]
            views = [merge_ranges([one.views[k] for one in rounds]) for k in range(len(self.parts))]
            return report_pb2.RoundRanges(views=views).SerializeToString()

        joint = report_pb2.RoundRanges.FromString(together(group, mine, join))
        for part, ranges in zip(self.parts, joint.views, strict=True):
            part.ranges = Ranges(ranges)

    def prepare(self, storages: Mapping[str, torch.Tensor], ledger: Ledger) -> list[Prepared]:
        """Diffs and encodes; nothing that the head needs changes."""
        made: list[Prepared] = []
        for part in self.parts:
            assert part.view is not None  # learnt in this round, or known
            made.append(part.prepare(part.view, storages, ledger.views[part.name].table))
        return made

    def send(
        self, end: PublisherEnd, run_id: str, number: int, rank: int, made: Sequence[Prepared], full: bool
    ) -> report_pb2.RoundReport:
        """Stores this rank's shards of all views."""
        report = report_pb2.RoundReport()
        for part, one in zip(self.parts, made, strict=True):
            report.views.append(part.send(end, run_id, number, rank, one, full))
        return report

    def add_to(self, manifest: manifest_pb2.VersionManifest, ledger: Ledger, made: Sequence[Prepared],
               data: Sequence[bytes]) -> None:  # fmt: skip
        """Adds all views to a manifest, from what the ranks reported."""
        reports = [report_pb2.RoundReport.FromString(part) for part in data]
        for k, (part, one) in enumerate(zip(self.parts, made, strict=True)):
            ledger.views[part.name].add_to(manifest, one.view.table, [report.views[k] for report in reports])

    def settle(self, made: Sequence[Prepared], committed: bool) -> None:
        """The end of a round: the new version is the base of every view, or the old one is again."""
        failed: list[BaseException] = []
        for part, one in zip(self.parts, made, strict=True):
            try:
                part.settle(one, committed)
            except BaseException as error:  # its base is dropped; the others still have to move
                failed.append(error)
        if failed:
            raise failed[0]

    # --- which version is it ---

    def gained(self, made: Sequence[Prepared]) -> bytes:
        """What this rank's digests gain over the head, for `recognise`; b"" when tensors travel whole."""
        if any(one.whole for one in made):
            return b""
        report = report_pb2.RoundReport()
        for one in made:
            view = report.views.add()
            view.tensors.add(digest=Digest.sum(part.digest for part in one.patch.sums.values()).to_proto())
        return b"=" + report.SerializeToString()

    def recognise(self, reader: ReplicaEnd, ledger: Ledger, parts: Sequence[bytes]) -> int | None:
        """The version whose digests the ranks' gains lead to, in every view."""
        if ledger.head is None or not all(parts):
            return None
        wanted: dict[str | None, Digest] = {name: held.total for name, held in ledger.views.items()}
        for part in parts:
            report = report_pb2.RoundReport.FromString(part[1:])
            for name, view in zip(ledger.views, report.views, strict=True):
                wanted[name] += Digest.from_proto(view.tensors[0].digest)
        found = recognise(reader, wanted, ledger.head)
        return None if found is None else found.number
