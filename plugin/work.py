"""One rank's part of a version: its pieces, their base, their patch, their shards.

Owns what a rank does on its own between two collective calls. Owns no order of steps and no agreement (publisher.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from weight_sync.codec.diff import ChangeBuffer, diff_torch
from weight_sync.codec.digest import digest_box
from weight_sync.codec.patch import READ, DiffPiece, Patch, encode_patch, nonfinite
from weight_sync.codec.shard import build_shard, identity
from weight_sync.config import Config, View
from weight_sync.errors import TensorError
from weight_sync.history import History
from weight_sync.holding import Holding
from weight_sync.layout.link import normal, row_major
from weight_sync.layout.meet import meet
from weight_sync.ports import Changes, DensePiece, Group, PublisherEnd, Update
from weight_sync.projection import learn_projected
from weight_sync.proto.v1 import common_pb2, report_pb2
from weight_sync.push import offer
from weight_sync.quantize import scheme_of
from weight_sync.quantize.extrema import Ranges
from weight_sync.served import ServedPiece, ServedView, learn_view, read_bits, read_torch
from weight_sync.snapshot import Snapshot
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

    from weight_sync.served import Named

__all__ = ["Prepared", "RankWork"]

_FORMS = {"step": common_pb2.FORM_STEP, "compact": common_pb2.FORM_COMPACT}
_SHARD_BYTES = 1 << 30  # of one part of a full state


@dataclass
class Prepared:
    """What one rank found: encoded, not sent.

    Attributes:
        patch: changes of tensors that the head has, too.
        whole: pieces that travel whole; their bits are in the snapshot, where the head has nothing to lose.
        first: there is no version that a patch could apply to.
        promoted: the snapshot already holds the new version.
        number: under which it was sent; None before that.
    """

    view: ServedView
    patch: Patch
    whole: list[ServedPiece] = field(default_factory=list)
    first: bool = False
    promoted: bool = False
    number: int | None = None


class RankWork:
    """Base, diff, shards and promotion of this rank's pieces.

    Attributes:
        name, base, scheme: of the view.
        plan: how it comes from the trainer's tensors; None when a cast is all it takes.
        ranges: extrema of the blocks that shards cut, in the round that goes on.
        snapshot: the base.
        holding: the same, for transports that read it while the trainer goes on.
        view: what was published last; None when the base has to be loaded and proven anew.
    """

    def __init__(self, config: Config, view: View) -> None:
        self.config = config
        self.name, self.base = view.name, view.base
        self.scheme, self._floats, self.plan = scheme_of(view)
        self.ranges = Ranges()
        self.snapshot = Snapshot(config.snapshot, config.snapshot_dir)
        self.holding = Holding(self.snapshot, config.rdma.patience_s)
        self.view: ServedView | None = None

    def forget(self) -> None:
        """Drops a base that may not be the head's; the next round loads it from the store."""
        self.view = None
        self._let_go()
        self.snapshot.retain(())

    def _let_go(self) -> None:
        """Nobody reads the snapshot any more."""
        with self.holding.moving():
            self.holding.now(None, ())

    # --- the base ---

    def learn(self, named: Named, table: Sequence[TensorSpec], group: Group, cast: bool) -> ServedView:
        """What this rank publishes; ``table``: of the head. Collective. Raises LayoutError, TensorError."""
        if self.plan is not None:
            return learn_projected(named, self.plan, group)
        return learn_view(named, table, group, cast or bool(self._floats), self._floats)

    def load(self, view: ServedView, storages: Mapping[str, torch.Tensor], history: History, head: int | None,
             table: Iterable[TensorSpec]) -> report_pb2.RankReport:  # fmt: skip
        """Fills the snapshot's missing pieces with the bits of version ``head``; reports the digests of all, per tensor.

        The report holds nothing when there is no version.
        """
        known = set(table)
        self._let_go()
        self.snapshot.retain(view.pieces)  # no element may lie in two pieces: a promotion would find only one
        missing = [piece for piece in view.pieces if piece.spec in known and piece not in self.snapshot]
        report = report_pb2.RankReport()
        if head is None:
            return report
        if missing:
            self.snapshot.allocate(missing, view.projection.sources(storages) if view.projection else storages)
            self._fill(missing, history.update(None, head))
        # pieces that were here count, too: other ranks may hold other parts of the same tensors
        numbers = {spec.name: i for i, spec in enumerate(view.table)}
        for piece in view.pieces:
            if piece.spec in known:
                digest = digest_box(piece.spec, self.snapshot.array(piece), piece.coords, self.config.threads)
                report.tensors.add(tensor=numbers[piece.spec.name], digest=digest.to_proto())
        return report

    def _fill(self, missing: Iterable[ServedPiece], update: Update) -> None:
        homes: dict[TensorSpec, list[ServedPiece]] = {}
        for piece in missing:
            homes.setdefault(piece.spec, []).append(piece)
        for dense in update.dense():
            for piece in homes.get(dense.spec, ()):
                self._copy(dense, piece)
        for item in update.changes:
            for piece in homes.get(item.spec, ()):
                at = piece.coords.find(item.coords.indices(item.positions))
                pick = np.flatnonzero(at >= 0)
                if len(pick):
                    self.snapshot.change(piece, at[pick], item, pick)

    def _copy(self, dense: DensePiece, piece: ServedPiece) -> None:
        """The part of a dense piece that lies in ours."""
        if dense.coords.is_run and dense.coords.count == dense.spec.elements:
            self.snapshot.fill(piece, piece.coords.view(dense.bits).reshape(-1))
            return
        left = [normal((dense.coords, row_major(dense.coords.sizes)))]
        right = [normal((piece.coords, row_major(piece.coords.sizes)))]
        ours = self.snapshot.array(piece)
        for _, _, (_, source, target) in meet(left, right):
            target.view(ours)[...] = source.view(dense.bits)
        self.snapshot.fill(piece, ours)

    # --- the patch ---

    def prepare(self, view: ServedView, storages: Mapping[str, torch.Tensor], table: Iterable[TensorSpec]) -> Prepared:
        """Diffs and encodes; nothing that the head needs changes."""
        known = set(table)
        view.check(storages)
        if view.projection is not None:
            storages = view.projection.storages(storages, self.ranges, self.config.threads)
        old = _by_dtype(piece for piece in view.pieces if piece.spec in known)
        new = [piece for piece in view.pieces if piece.spec not in known]
        forms = [_FORMS[name] for name in self.config.forms]
        patch = encode_patch([self._diff_piece(piece, storages) for piece in old], forms,
                             self.config.threads, self.config.refuse_nonfinite)  # fmt: skip
        self.snapshot.allocate(new, storages)
        for piece in new:
            self._keep_whole(piece, storages[piece.placement.storage])
        return Prepared(view, patch, new, first=not known)

    def _diff_piece(self, piece: ServedPiece, storages: Mapping[str, torch.Tensor]) -> DiffPiece:
        """Storages are asked for when they are read: those of a projection are made then."""
        base, key = self.snapshot.tensor(piece), piece.placement.storage

        def diff(start: int, stop: int, at: int, out: ChangeBuffer) -> int:
            seen = 0
            while start + seen < stop:
                end = min(start + seen + READ, stop)
                assert base is not None
                took = diff_torch(
                    base[start + seen : end], read_torch(piece, storages[key], start + seen, end), at + seen, out
                )
                seen += took
                if out.full:
                    break
            return seen

        return DiffPiece(
            piece.spec,
            piece.coords,
            lambda: self.snapshot.array(piece),
            lambda start, stop: read_bits(piece, storages[key], start, stop),
            None if base is None else diff,
        )

    def _keep_whole(self, piece: ServedPiece, storage: torch.Tensor) -> None:
        """Copies a piece into the snapshot, since the trainer may go on while it is sent."""
        bad = 0
        for start in range(0, piece.coords.count, READ):
            bits = read_bits(piece, storage, start, min(start + READ, piece.coords.count))
            if self.config.refuse_nonfinite:
                bad += int(nonfinite(piece.spec, bits).sum())
            self.snapshot.fill(piece, bits, start)
        if bad:
            raise TensorError("tensor holds NaN or infinity", field=piece.spec.name, found=f"{bad} elements",
                              do="repair the step, or publish without refuse_nonfinite")  # fmt: skip

    # --- sending ---

    def send(
        self, end: PublisherEnd, run_id: str, number: int, rank: int, made: Prepared, full: bool
    ) -> report_pb2.RankReport:
        """Stores this rank's shards; on return they are durable and still visible to nobody."""
        made.number = number
        offer(end, self.holding)
        numbers = {spec.name: i for i, spec in enumerate(made.view.table)}
        report = report_pb2.RankReport()
        for name, total in made.patch.sums.items():
            report.tensors.add(tensor=numbers[name], changed=total.changed, digest=total.digest.to_proto())
        for piece in made.whole:
            digest = digest_box(piece.spec, self.snapshot.array(piece), piece.coords, self.config.threads)
            report.tensors.add(
                tensor=numbers[piece.spec.name], changed=piece.coords.count, digest=digest.to_proto(), whole=True
            )
        for spec in self._empty(made.view, rank):
            report.tensors.add(tensor=numbers[spec.name], whole=True)
        view = self.name
        for name in self.config.forms:
            form = _FORMS[name]
            frames = made.patch.frames.get(form, [])
            # beside a full state, too: readers that hold the parent take the patch
            whole = made.whole if form == common_pb2.FORM_STEP and not (full and made.first) else []
            if frames or whole:
                pieces = [DensePiece(piece.spec, piece.coords, self.snapshot.array(piece)) for piece in whole]
                shard = build_shard(f"patch-{name}-{view}", identity(run_id, number, rank, view, form), frames, pieces)
                report.shards.append(end.put_shard(number, shard))
        if full:
            self.promote(made)
            raw = common_pb2.FORM_RAW
            for k, pieces in enumerate(self._parts(made.view)):
                shard = build_shard(f"anchor-{view}-{k}", identity(run_id, number, rank, view, raw), (), pieces)
                report.shards.append(end.put_shard(number, shard))
        return report

    def _empty(self, view: ServedView, rank: int) -> Iterator[TensorSpec]:
        """Tensors without elements have no pieces; rank 0 speaks for them."""
        if rank == 0:
            yield from (spec for spec in view.table if not spec.elements)

    def _parts(self, view: ServedView) -> Iterator[list[DensePiece]]:
        """This rank's full state in parts, from the snapshot, not copied."""
        part: list[DensePiece] = []
        size = 0
        for piece in view.pieces:
            bits = self.snapshot.array(piece)
            if part and size + bits.nbytes > _SHARD_BYTES:
                yield part
                part, size = [], 0
            part.append(DensePiece(piece.spec, piece.coords, bits))
            size += bits.nbytes
        if part:
            yield part

    # --- promotion ---

    def promote(self, made: Prepared) -> None:
        """The snapshot moves to the new version, by our own encoded patch."""
        if not made.promoted:
            self._move(made, self.snapshot.promote)
            made.promoted = True

    def _move(self, made: Prepared, move: Callable[[Iterable[Changes]], None]) -> None:
        try:
            with self.holding.moving():
                for frame in made.patch.frames.get(common_pb2.FORM_STEP, []):
                    move(frame.changes())
        except BaseException:
            self.forget()  # half-way between two versions
            raise

    def settle(self, made: Prepared, committed: bool) -> None:
        """The end of a round: the new version is the base, or the old one is again."""
        if committed:
            self.promote(made)
            self.snapshot.retain(made.view.pieces)
            self.holding.now(made.number, made.view.pieces)
        elif made.promoted:
            self._move(made, self.snapshot.demote)
            made.promoted = False


def _by_dtype(pieces: Iterable[ServedPiece]) -> list[ServedPiece]:
    """Pieces of one dtype together, the most bytes first: frames hold one dtype, and large ones cost least per change."""
    found = list(pieces)
    sizes: Counter[str] = Counter()
    for piece in found:
        sizes[piece.spec.dtype] += piece.coords.count * piece.spec.type.width
    return sorted(found, key=lambda piece: (-sizes[piece.spec.dtype], piece.spec.dtype))
