"""Reading versions: from a transport's end to checked, decoded changes and dense pieces.

Owns fetch, hash checks, one refetch, decoding over threads, and the walk from what is held to what is wanted. Owns no
engine and no policy when to move. Publishers that restart, replicas, and the command line all read through here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TypeVar

import numpy as np
from blake3 import blake3

from weight_sync import version as rules
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest, digest_tensor
from weight_sync.codec.fold import fold_changes, on_dense
from weight_sync.codec.frame import decode_frame, hash16
from weight_sync.codec.shard import ShardHead, parse_head
from weight_sync.codec.threads import ordered_map
from weight_sync.errors import (
    CorruptionError,
    VersionExpiredError,
    VersionMissingError,
    WrongBaseError,
)
from weight_sync.layout.box import Box
from weight_sync.pieces import assemble, unfold
from weight_sync.ports import Changes, DensePiece, Folded, ReplicaEnd, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.push import LAND, Pushed, pushed
from weight_sync.tensors import TensorSpec

__all__ = ["History", "view_of"]

_R = TypeVar("_R")
Shards = list[tuple[manifest_pb2.ShardRef, ShardHead]]
_PATCH = (common_pb2.FORM_STEP, common_pb2.FORM_ABSOLUTE)
_HEAD_LIMIT = 1 << 30
_REMEMBERED = 4  # manifests; of a large model each has megabytes


def view_of(manifest: manifest_pb2.VersionManifest, name: str) -> manifest_pb2.ViewManifest:
    """One view of a manifest. Raises VersionMissingError that lists the views there are."""
    for view in manifest.views:
        if view.name == name:
            return view
    raise VersionMissingError("version has no such view", field="view", found=name,
                              expected=[view.name for view in manifest.views], do="set view to one of them")  # fmt: skip


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
        view: name of the view.
        threads: that decode.
        base: folder of the base checkpoint, for anchors by reference; None to use the manifest's own hint.
        progress: called with (bytes done, bytes in all) while objects are read.
        check: raises for a manifest that is not to be trusted (weight_sync.signing).
    """

    end: ReplicaEnd
    view: str
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
            found=manifest.base.uri or manifest.base.hf_id, do="set base to the folder of that checkpoint",
        )  # fmt: skip

    def resolve_base(self, manifest: manifest_pb2.VersionManifest | None) -> str | None:
        """Folder that holds the bits of an anchor by reference, None when it cannot be found here."""
        if self.base is not None:
            return self.base
        hint = manifest if manifest is not None else self._first()
        uri = "" if hint is None or not hint.HasField("base") else hint.base.uri
        return uri if uri and FilePath(uri).exists() else None

    def _first(self) -> manifest_pb2.VersionManifest | None:
        """Only the first version of a run is kept by reference; what it says does not change until it is collected."""
        if self._first_seen is None:
            self._first_seen = first_version(self.end)
        return self._first_seen

    # --- objects ---

    def _fetched(self, what: str, read: Callable[[], memoryview], check: Callable[[memoryview], _R]) -> _R:
        """Reads and checks; once more when the bytes are bad, for they may have been hurt on the way."""
        try:
            return check(read())
        except CorruptionError:
            try:
                return check(read())
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
        return self._fetched(f"version {manifest.number}", lambda: self.end.read(ref, 0, size), check)

    def _shards(self, number: int, forms: Collection[int]) -> Shards:
        manifest = self.manifest(number)
        return [(ref, self.head(manifest, ref)) for ref in view_of(manifest, self.view).shards if ref.form in forms]

    def changes(self, number: int, wanted: Callable[[TensorSpec], bool] | None = None) -> list[Changes]:
        """All changes of one version's patch, decoded. Raises CorruptionError naming object and version."""
        return self.decoded(number, self._shards(number, _PATCH), wanted)

    def decoded(self, number: int, shards: Shards, wanted: Callable[[TensorSpec], bool] | None) -> list[Changes]:
        """Changes of some shards of a version."""
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
                lambda: self.end.read(ref, offset, length),
                lambda data: decode_frame(ref.form, head.index.frames[k], data, head.specs),
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
                    what, lambda o=offset, n=length, r=ref: self.end.read(r, o, n),  # type: ignore[misc]
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
        yield from self._base_pieces(Checkpoint(folder), view)

    def _base_pieces(self, checkpoint: Checkpoint, view: manifest_pb2.ViewManifest) -> Iterator[DensePiece]:
        """A checkpoint's tensors as pieces, each compared with the version's digest of it."""
        for entry in view.tensors:
            spec = TensorSpec.from_proto(entry.spec)
            found = checkpoint.spec(spec.name) if spec.name in checkpoint else None
            if found is None or _plain(found) != _plain(spec):
                raise self._wrong_base(checkpoint, spec, found, spec)
            bits = checkpoint.bits(spec.name)
            digest, expected = digest_tensor(spec, bits, self.threads), Digest.from_proto(entry.digest)
            if digest != expected:
                raise self._wrong_base(checkpoint, spec, digest.hex(), expected.hex())
            if spec.elements:
                yield DensePiece(spec, Box.run(0, spec.elements), bits)

    @staticmethod
    def _wrong_base(checkpoint: Checkpoint, spec: TensorSpec, found: object, expected: object) -> WrongBaseError:
        return WrongBaseError(
            "the checkpoint is not the run's base", field=spec.name, found=found, expected=expected,
            do=f"set base to the checkpoint that the run started from, not {checkpoint.path}",
        )  # fmt: skip

    def update(self, have: int | None, target: int, held: Sequence[TensorSpec] | None = None) -> Update:
        """What takes a state from version ``have`` (None: whatever it is) to ``target``, folded into one.

        ``held`` is the table of ``have``; without it, it is read from the log, where it may have been collected.
        """
        self._recent.clear()  # a version may have been collected since
        landed = pushed(self.end, self.view, have, target)
        if landed is not None:
            return self._landed(landed, target)
        offered = self._offered(have, target)
        path = self.plan(have, target) if offered is None else _in_one(offered, have, target)
        manifest = self.manifest(target)
        view = view_of(manifest, self.view)
        table = table_of(view)
        if held is None:
            held = () if have is None or path.anchor is not None else table_of(view_of(self.manifest(have), self.view))
        try:
            found = self.fold(path.patches, table) if offered is None else unfold(self, offered, manifest, view, table)
        except CorruptionError:
            if offered is None:
                raise
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
        extra = {"path": rules.Path(None, (), 0, landed.reason)} | ({} if landed.land is None else {LAND: landed.land})
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

    def _offered(self, have: int | None, target: int) -> Folded | None:
        """One object for the whole way. Signatures cover what is stored, so who checks them takes no fold of several."""
        if have is None or have >= target:
            return None
        if self.check is not None and self.manifest(target).parent != have:
            return None
        offered = self.end.fold(self.view, have, target)
        return None if offered is not None and offered.stored is None and self.check is not None else offered


def _in_one(offered: Folded, have: int | None, target: int) -> rules.Path:
    return rules.Path(None, (target,), len(offered.data), f"one object from version {have}")


def _plain(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtype, spec.shape


def _checked(data: memoryview, want: bytes) -> memoryview:
    if hash16([data]) != want:
        raise CorruptionError("piece differs from its hash", field="blake3", found=f"{len(data)} bytes")
    return data
