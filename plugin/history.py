"""Reading versions: from a transport's end to checked, decoded changes and dense pieces.

Owns fetch, hash checks, one refetch, decoding over threads, and the walk from what is held to what is wanted. Owns no
engine and no policy when to move. Publishers that restart, replicas, and the command line all read through here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, TypeVar

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from weight_sync import version as rules
from weight_sync.bases import base_of, base_pieces
from weight_sync.canonical import Bits, compact_way, old_of
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.codec.fold import fold_changes, on_dense
from weight_sync.codec.frame import FrameBox, decode_frame, hash16
from weight_sync.codec.shard import ShardHead, parse_head
from weight_sync.codec.threads import ordered_map
from weight_sync.errors import (
    CorruptionError,
    VersionExpiredError,
    VersionMissingError,
    WrongBaseError,
)
from weight_sync.pieces import assemble, unfold
from weight_sync.ports import Changes, DensePiece, Folded, ReplicaEnd, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.push import LAND, LANDED, Pushed, pushed
from weight_sync.tensors import TensorSpec

__all__ = ["History", "view_of"]

_R = TypeVar("_R")
Shards = list[tuple[manifest_pb2.ShardRef, ShardHead]]
Old = Callable[[FrameBox], NDArray[Any]]
_PATCH = (common_pb2.FORM_STEP, common_pb2.FORM_ABSOLUTE)
_HEAD_LIMIT = 1 << 30
_REMEMBERED = 4  # manifests; of a large model each has megabytes


def view_of(manifest: manifest_pb2.VersionManifest, name: str | None) -> manifest_pb2.ViewManifest:
    """One view of a manifest; None: the only one. Raises VersionMissingError that lists the views there are."""
    found = [view for view in manifest.views if name is None or view.name == name]
    if len(found) == 1:
        return found[0]
    names = [view.name for view in manifest.views]
    what = "version has several views" if name is None and names else "version has no such view"
    raise VersionMissingError(what, field="view", found=name, expected=names, do="set view to one of them")


def table_of(view: manifest_pb2.ViewManifest) -> tuple[TensorSpec, ...]:
    """The view's tensors."""
    return tuple(TensorSpec.from_proto(entry.spec) for entry in view.tensors)


def first_version(end: ReplicaEnd) -> manifest_pb2.VersionManifest | None:
    """The entry that a run's line begins with, or its tombstone; None while there is none."""
    for entry in end.entries():
        if rules.is_version(entry.kind) or entry.kind == rules.EXPIRED:
            return entry
    return None


@dataclass
class History:
    """The versions of one view of one run.

    Args:
        end: a transport's reading end.
        view: name of the view; None for the only one of a run that has one.
        threads: that decode.
        base: folder of the base checkpoint, for anchors by reference; None to use the manifest's own hint.
        progress: called with (bytes done, bytes in all) while objects are read.
        check: raises for a manifest that is not to be trusted (weight_sync.signing).
    """

    end: ReplicaEnd
    view: str | None
    threads: int = 1
    base: str | None = None
    progress: Callable[[int, int], None] | None = None
    check: Callable[[manifest_pb2.VersionManifest], None] | None = None
    _first_seen: manifest_pb2.VersionManifest | None = field(default=None, repr=False)
    _recent: dict[int, manifest_pb2.VersionManifest] = field(default_factory=dict, repr=False)

    # --- the log ---

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """A version's manifest. Raises VersionMissingError or VersionExpiredError with the reason."""
        manifest = self._read(number)
        if not rules.is_version(manifest.kind):
            raise VersionMissingError(
                f"entry {number} is {rules.kind_name(manifest.kind)}, not a version", field="number", found=number,
                expected=f"a version; the newest is {self.end.head()}",
            )  # fmt: skip
        return manifest

    def _read(self, number: int) -> manifest_pb2.VersionManifest:
        """Remembers the last few: one move asks for the same ones several times."""
        if number not in self._recent:
            manifest = self.end.manifest(number)
            if self.check is not None and rules.is_version(manifest.kind):
                self.check(manifest)
            while len(self._recent) >= _REMEMBERED:
                del self._recent[next(iter(self._recent))]
            self._recent[number] = manifest
        return self._recent[number]

    def entry(self, number: int) -> rules.Entry | None:
        """Summary for the planner; None for a number that has none."""
        try:
            return rules.Entry.of(self._read(number), self.view)
        except VersionExpiredError:
            return rules.Entry(number, 0, rules.EXPIRED)
        except VersionMissingError:
            return None

    def plan(self, have: int | None, target: int) -> rules.Path:
        """The cheapest way. Raises VersionExpiredError or VersionMissingError with the reason when there is none."""
        here = self.resolve_base(None) is not None
        found = rules.plan(self.entry, have, target, by_reference=here)
        if isinstance(found, rules.Path):
            return found
        if not here and isinstance(rules.plan(self.entry, have, target), rules.Path):
            raise self._no_base(self.manifest(found.number))
        if not found.expired:
            self.manifest(found.number)  # raises with a reason of its own where the number is there and no version
        kind = VersionExpiredError if found.expired else VersionMissingError
        raise kind(found.reason, field="version", found=target, do="follow the newest version, or ask for an anchor")

    def _no_base(self, manifest: manifest_pb2.VersionManifest) -> VersionMissingError:
        return VersionMissingError(
            f"the bits of anchor {manifest.number} are not in the store and its base is not here", field="base",
            found=base_of(manifest, self.view).uri or manifest.base.hf_id, do="set base to the folder of that checkpoint",
        )  # fmt: skip

    def resolve_base(self, manifest: manifest_pb2.VersionManifest | None) -> str | None:
        """Folder that holds the bits of an anchor by reference, None when it cannot be found here."""
        if self.base is not None:
            return self.base
        hint = manifest if manifest is not None else self._first()
        uri = "" if hint is None else base_of(hint, self.view).uri
        return uri if uri and FilePath(uri).exists() else None

    def _first(self) -> manifest_pb2.VersionManifest | None:
        """Only the first version of a run is kept by reference; what it says does not change until it is collected."""
        if self._first_seen is None:
            self._first_seen = first_version(self.end)
        return self._first_seen

    # --- objects ---

    def _fetched(
        self, what: str, ref: manifest_pb2.ShardRef, offset: int, length: int, check: Callable[[memoryview], _R]
    ) -> _R:
        """Reads and checks; once more when the bytes are bad, for they may have been hurt on the way."""
        try:
            return check(self.end.read(ref, offset, length))
        except CorruptionError:
            forget(self.end, ref)
            try:
                return check(self.end.read(ref, offset, length))
            except CorruptionError as error:
                raise type(error)(f"{what}: {error.what}", field=error.field, found=error.found,
                                  do="the store itself is bad: restore the object, or publish a full state (a trainer "
                                     "that opens the run anew cannot read it either: fork: true)") from error  # fmt: skip

    def head(self, manifest: manifest_pb2.VersionManifest, ref: manifest_pb2.ShardRef) -> ShardHead:
        """A shard's index, checked against the manifest."""

        def check(data: memoryview) -> ShardHead:
            if blake3(data).digest() != ref.head_blake3:
                raise CorruptionError("head differs from its hash", field=ref.object, found=f"{len(data)} bytes")
            head = parse_head(data, ref.size)
            index = head.index
            if (index.run_id, index.number, index.form) != (manifest.run_id, manifest.number, ref.form):
                raise WrongBaseError("shard belongs elsewhere", field=ref.object,
                                     found=(index.run_id, index.number), expected=(manifest.run_id, manifest.number))  # fmt: skip
            return head

        size = min(ref.head_size, _HEAD_LIMIT)
        return self._fetched(f"version {manifest.number}", ref, 0, size, check)

    def _shards(self, number: int, forms: Collection[int]) -> Shards:
        manifest = self.manifest(number)
        return [(ref, self.head(manifest, ref)) for ref in view_of(manifest, self.view).shards if ref.form in forms]

    def changes(self, number: int, wanted: Callable[[TensorSpec], bool] | None = None) -> list[Changes]:
        """All changes of one version's patch, decoded. Raises CorruptionError naming object and version."""
        return self.decoded(number, self._shards(number, _PATCH), wanted)

    def decoded(
        self, number: int, shards: Shards, wanted: Callable[[TensorSpec], bool] | None, old: Old | None = None
    ) -> list[Changes]:
        """Changes of some shards of a version; ``old`` for those in the compact form."""
        jobs: list[tuple[manifest_pb2.ShardRef, ShardHead, int]] = []
        for ref, head in shards:
            for k, frame in enumerate(head.index.frames):
                touched = (head.specs[region.tensor] for region in frame.regions if region.tensor < len(head.specs))
                if wanted is None or any(map(wanted, touched)):
                    jobs.append((ref, head, k))
        total = sum(head.frame_spans[k][1] for _, head, k in jobs)
        done = 0
        out: list[Changes] = []

        def work(job: tuple[manifest_pb2.ShardRef, ShardHead, int]) -> list[Changes]:
            ref, head, k = job
            offset, length = head.frame_spans[k]
            what = f"version {number}, object {ref.object}, frame {k}"
            return self._fetched(
                what,
                ref,
                offset,
                length,
                lambda data: decode_frame(ref.form, head.index.frames[k], data, head.specs, old),
            )

        for (_, head, k), items in zip(jobs, ordered_map(work, jobs, self.threads), strict=True):
            out.extend(items)
            done += head.frame_spans[k][1]
            if self.progress is not None:
                self.progress(done, total)
        return out

    def pieces(self, number: int, anchor: bool) -> Iterator[DensePiece]:
        """Dense pieces of the anchor, or of the patch (tensors that appeared or changed shape), one at a time."""
        return self.dense(number, self._shards(number, (common_pb2.FORM_RAW,) if anchor else _PATCH))

    def dense(self, number: int, shards: Shards) -> Iterator[DensePiece]:
        """Dense pieces of some shards of a version."""
        total = sum(length for _, head in shards for _, length in head.piece_spans)
        done = 0
        for ref, head in shards:
            for k, (offset, length) in enumerate(head.piece_spans):
                piece = head.index.pieces[k]
                spec = head.specs[piece.region.tensor]
                what = f"version {number}, object {ref.object}, tensor {spec.name!r}"
                data = self._fetched(
                    what, ref, offset, length,
                    lambda data, want=piece.blake3: _checked(data, want),  # type: ignore[misc]
                )  # fmt: skip
                yield DensePiece(spec, head.boxes[k], np.frombuffer(data, spec.type.uint))
                done += length
                if self.progress is not None:
                    self.progress(done, total)

    # --- states ---

    def full(self, number: int) -> Iterator[DensePiece]:
        """Every tensor of an anchor, from its own shards or from the base that it names."""
        manifest = self.manifest(number)
        view = view_of(manifest, self.view)
        if view.elements == 0 or any(ref.form == common_pb2.FORM_RAW for ref in view.shards):
            yield from self.pieces(number, anchor=True)
            return
        folder = self.resolve_base(manifest)
        if folder is None:
            raise self._no_base(manifest)
        yield from base_pieces(Checkpoint(folder), view, self.threads)

    def update(
        self, have: int | None, target: int, held: Sequence[TensorSpec] | None = None, bits: Bits | None = None
    ) -> Update:
        """What takes a state from version ``have`` (None: whatever it is) to ``target``, folded into one.

        ``held`` is the table of ``have``; without it, it is read from the log, where it may have been collected. With
        ``bits``, of ``have``, the patch is read in the compact form where the version has it.
        """
        self._recent.clear()  # a version may have been collected since
        landed = pushed(self.end, self.view, have, target)
        if landed is not None:
            return self._landed(landed, target)
        manifest = self.manifest(target)
        view = view_of(manifest, self.view)
        table = table_of(view)
        compact = bits is not None and bool(compact_way(manifest, view, have, held, table))
        offered = self._offered(have, manifest, view.name, compact)
        path = self.plan(have, target) if offered is None else _in_one(offered, have, target)
        compact = compact and path.anchor is None  # a full state that is cheaper to read has the change in it already
        if held is None:
            held = () if have is None or path.anchor is not None else table_of(view_of(self.manifest(have), self.view))
        try:
            old = old_of(bits) if compact and bits is not None else None
            if offered is not None:
                found = unfold(self, offered, manifest, view, table, old)
            elif old is not None:
                found = self.decoded(target, self._shards(target, (common_pb2.FORM_COMPACT,)), None, old), {}
            else:
                found = self.fold(path.patches, table)
        except (CorruptionError, WrongBaseError):
            if offered is None and not compact:
                raise
            forget(self.end, None)
            path = self.plan(have, target)  # hurt on the way, or where it was made: the stored patches decide
            found = self.fold(path.patches, table)
        folded, whole = found
        full = path.anchor is not None
        alive = set(table)

        def dense() -> Iterator[DensePiece]:
            if path.anchor is not None:
                for piece in self.full(path.anchor):
                    if piece.spec.name not in whole and piece.spec in alive:
                        yield piece
            yield from whole.values()

        return Update(
            target=common_pb2.VersionId(run_id=manifest.run_id, number=target),
            digest=Digest.from_proto(view.digest), tensors=table, changes=folded, dense=dense,
            removed=tuple(sorted({spec.name for spec in held} - {spec.name for spec in table})),
            full=full, manifest=manifest, extra={"path": path},
        )  # fmt: skip

    def _landed(self, landed: Pushed, target: int) -> Update:
        """A version that was written into the engine's memory."""
        manifest = self.manifest(target)
        view = view_of(manifest, self.view)
        extra: dict[str, Any] = {"path": rules.Path(None, (), 0, landed.reason)}
        if landed.land is not None:
            extra[LAND] = landed.land
        if landed.inside:
            extra[LANDED] = True
        return Update(
            target=common_pb2.VersionId(run_id=manifest.run_id, number=target), digest=Digest.from_proto(view.digest),
            tensors=table_of(view), changes=(), dense=landed.dense, removed=(), full=True, manifest=manifest, extra=extra,
        )  # fmt: skip

    def fold(self, numbers: Sequence[int], table: Sequence[TensorSpec]) -> tuple[list[Changes], dict[str, DensePiece]]:
        """Patches of consecutive versions as one: changes, and by name the tensors that travelled whole, brought up to date.

        Args:
            numbers: of the versions, ascending.
            table: of the last one; what it lacks is left out.
        """
        alive = set(table)
        versions: list[list[Changes]] = []
        whole: dict[str, DensePiece] = {}
        for number in numbers:
            shards = self._shards(number, _PATCH)
            changes = self.decoded(number, shards, None)
            arrived = assemble(self.dense(number, shards))
            for name, old in whole.items():
                later = [item for item in changes if item.spec.name == name]
                if later and name not in arrived:
                    whole[name] = DensePiece(old.spec, old.coords, on_dense(old.bits, old.coords, later))
            whole |= arrived
            versions = [[item for item in old if item.spec.name not in arrived] for old in versions]
            versions.append([item for item in changes if item.spec.name not in whole])
        kept = [[item for item in version if item.spec in alive] for version in versions]
        return fold_changes(kept) if kept else [], {k: p for k, p in whole.items() if p.spec in alive}

    def _offered(
        self, have: int | None, manifest: manifest_pb2.VersionManifest, view: str, compact: bool
    ) -> Folded | None:
        """One object for the whole way. Signatures cover what is stored, so who checks them takes no fold of several."""
        if have is None or have >= manifest.number or (self.check is not None and manifest.parent != have):
            return None
        offered = self.end.fold(view, have, manifest.number, compact)
        return None if offered is not None and offered.stored is None and self.check is not None else offered


def _in_one(offered: Folded, have: int | None, target: int) -> rules.Path:
    return rules.Path(None, (target,), len(offered.data), f"one object from version {have}")


def forget(end: ReplicaEnd, ref: manifest_pb2.ShardRef | None) -> None:
    """Tells an end that keeps what it reads (weight_sync.kept) that a shard, or its last fold, turned out bad."""
    method = getattr(end, "forget", None)
    if method is not None:
        method(ref)


def _checked(data: memoryview, want: bytes) -> memoryview:
    if hash16([data]) != want:
        raise CorruptionError("piece differs from its hash", field="blake3", found=f"{len(data)} bytes")
    return data
