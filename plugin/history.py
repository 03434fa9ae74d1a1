"""Reading versions: from a transport's end to checked, decoded changes and dense pieces.

Owns fetch, hash checks, one refetch, decoding over threads, and the walk from what is held to what is wanted. Owns no
engine and no policy when to move. Publishers that restart, replicas, and the command line all read through here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TypeVar

import numpy as np
from blake3 import blake3

from weight_sync import version as rules
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.codec.fold import fold_changes, on_dense
from weight_sync.codec.frame import decode_frame, hash16
from weight_sync.codec.shard import ShardHead, parse_head
from weight_sync.codec.threads import ordered_map
from weight_sync.errors import (
    CorruptionError,
    VersionError,
    VersionExpiredError,
    VersionMissingError,
    WrongBaseError,
)
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece, ReplicaEnd, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec

__all__ = ["History", "view_of"]

_R = TypeVar("_R")
_HEAD_LIMIT = 1 << 30


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


@dataclass
class History:
    """The versions of one view of one run.

    Args:
        end: a transport's reading end.
        view: name of the view.
        threads: that decode.
        base: folder of the base checkpoint, for anchors by reference; None to use the manifest's own hint.
        progress: called with (bytes done, bytes in all) while objects are read.
    """

    end: ReplicaEnd
    view: str
    threads: int = 1
    base: str | None = None
    progress: Callable[[int, int], None] | None = None

    # --- the log ---

    def manifest(self, number: int) -> manifest_pb2.VersionManifest:
        """A version's manifest. Raises VersionMissingError or VersionExpiredError with the reason."""
        manifest = self.end.manifest(number)
        if not rules.is_version(manifest.kind):
            raise VersionMissingError(
                f"entry {number} is {rules.kind_name(manifest.kind)}, not a version", field="number", found=number,
                expected=f"a version; the newest is {self.end.head()}",
            )  # fmt: skip
        return manifest

    def entry(self, number: int) -> rules.Entry | None:
        """Summary for the planner; None for a number that has none."""
        try:
            return rules.Entry.of(self.end.manifest(number), self.view)
        except VersionExpiredError:
            return rules.Entry(number, 0, rules.EXPIRED)
        except VersionMissingError:
            return None

    def plan(self, have: int | None, target: int) -> rules.Path:
        """The cheapest way. Raises VersionExpiredError or VersionMissingError with the reason when there is none."""
        found = rules.plan(self.entry, have, target, by_reference=self.resolve_base(None) is not None)
        if isinstance(found, rules.NoPath):
            kind = VersionExpiredError if found.expired else VersionMissingError
            raise kind(
                found.reason, field="version", found=target, do="follow the newest version, or ask for an anchor"
            )
        return found

    def resolve_base(self, manifest: manifest_pb2.VersionManifest | None) -> str | None:
        """Folder that holds the bits of an anchor by reference, None when it cannot be found here."""
        if self.base is not None:
            return self.base
        hints = [manifest] if manifest is not None else self._anchors()
        for hint in hints:
            if hint.HasField("base") and hint.base.uri and FilePath(hint.base.uri).exists():
                return hint.base.uri
        return None

    def _anchors(self) -> list[manifest_pb2.VersionManifest]:
        try:
            return [self.end.manifest(0)]
        except VersionError:
            return []

    # --- objects ---

    def _fetched(self, what: str, read: Callable[[], memoryview], check: Callable[[memoryview], _R]) -> _R:
        """Reads and checks; once more when the bytes are bad, for they may have been hurt on the way."""
        try:
            return check(read())
        except CorruptionError:
            try:
                return check(read())
            except CorruptionError as error:
                raise type(error)(f"{what}: {error.what}", field=error.field, found=error.found, expected=error.expected,
                                  do="the store itself is bad: publish an anchor, or restore the object") from error  # fmt: skip

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

    def _patch_shards(self, manifest: manifest_pb2.VersionManifest) -> list[tuple[manifest_pb2.ShardRef, ShardHead]]:
        """The shards of the patch in the step form (or absolute)."""
        view = view_of(manifest, self.view)
        usable = (common_pb2.FORM_STEP, common_pb2.FORM_ABSOLUTE)
        return [(ref, self.head(manifest, ref)) for ref in view.shards if ref.form in usable]

    def changes(self, number: int, wanted: Callable[[TensorSpec], bool] | None = None) -> list[Changes]:
        """All changes of one version's patch, decoded. Raises CorruptionError naming object and version."""
        manifest = self.manifest(number)
        jobs: list[tuple[manifest_pb2.ShardRef, ShardHead, int]] = []
        for ref, head in self._patch_shards(manifest):
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
        manifest = self.manifest(number)
        view = view_of(manifest, self.view)
        refs = [ref for ref in view.shards if (ref.form == common_pb2.FORM_RAW) == anchor]
        total, done = sum(ref.size for ref in refs), 0
        for ref in refs:
            if ref.form == common_pb2.FORM_COMPACT:
                continue
            head = self.head(manifest, ref)
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
        if any(ref.form == common_pb2.FORM_RAW for ref in view_of(manifest, self.view).shards):
            yield from self.pieces(number, anchor=True)
            return
        folder = self.resolve_base(manifest)
        if folder is None:
            raise VersionMissingError(
                f"the bits of anchor {number} are not in the store and its base is not here", field="base",
                found=manifest.base.uri or manifest.base.hf_id, do="set base to the folder of that checkpoint",
            )  # fmt: skip
        yield from self.base_pieces(Checkpoint(folder), table_of(view_of(manifest, self.view)))

    @staticmethod
    def base_pieces(checkpoint: Checkpoint, table: Sequence[TensorSpec]) -> Iterator[DensePiece]:
        """A checkpoint's tensors as pieces. Raises WrongBaseError when it lacks one or has another one."""
        for spec in table:
            if spec.name not in checkpoint or _plain(checkpoint.spec(spec.name)) != _plain(spec):
                found = checkpoint.spec(spec.name) if spec.name in checkpoint else None
                raise WrongBaseError(
                    "the checkpoint is not the run's base", field=spec.name, found=found, expected=spec,
                    do=f"set base to the checkpoint that the run started from, not {checkpoint.path}",
                )  # fmt: skip
            yield DensePiece(spec, Box.run(0, spec.elements), checkpoint.bits(spec.name))

    def update(self, have: int | None, target: int) -> Update:
        """What takes a state from version ``have`` (None: whatever it is) to ``target``, folded into one."""
        path = self.plan(have, target)
        manifest = self.manifest(target)
        view = view_of(manifest, self.view)
        table = table_of(view)
        number = have if path.anchor is None else path.anchor
        before = () if number is None else table_of(view_of(self.manifest(number), self.view))
        folded, whole = self.fold(path.patches, table)
        full = path.anchor is not None

        def dense() -> Iterator[DensePiece]:
            if path.anchor is None:
                yield from whole.values()
                return
            for piece in self.full(path.anchor):
                if piece.spec.name not in whole and piece.spec in table:
                    yield piece
            yield from whole.values()

        return Update(
            target=common_pb2.VersionId(run_id=manifest.run_id, number=target),
            digest=Digest.from_proto(view.digest), tensors=table, changes=folded, dense=dense,
            removed=tuple(spec.name for spec in before if spec.name not in {s.name for s in table}),
            full=full, manifest=manifest, extra={"path": path},
        )  # fmt: skip

    def fold(
        self, numbers: Sequence[int], table: Sequence[TensorSpec]
    ) -> tuple[list[Changes], dict[str, DensePiece]]:
        """Patches of consecutive versions as one: changes, and by name the tensors that travelled whole, brought up to date.

        Args:
            numbers: of the versions, ascending.
            table: of the last one; what it lacks is left out.
        """
        alive = set(table)
        versions: list[list[Changes]] = []
        whole: dict[str, DensePiece] = {}
        for number in numbers:
            changes = self.changes(number)
            arrived = assemble(self.pieces(number, anchor=False))
            for name in whole.keys() - arrived.keys():
                later = [item for item in changes if item.spec.name == name]
                old = whole[name]
                whole[name] = DensePiece(old.spec, old.coords, on_dense(old.bits, old.coords, later))
            whole |= arrived
            versions = [[item for item in old if item.spec.name not in arrived] for old in versions]
            versions.append([item for item in changes if item.spec.name not in whole])
        kept = [[item for item in version if item.spec in alive] for version in versions]
        return fold_changes(kept) if kept else [], {k: p for k, p in whole.items() if p.spec in alive}


def assemble(pieces: Iterable[DensePiece]) -> dict[str, DensePiece]:
    """Whole tensors from the pieces of their ranks. Raises CorruptionError when a tensor is not covered exactly once."""
    parts: dict[str, list[DensePiece]] = {}
    for piece in pieces:
        parts.setdefault(piece.spec.name, []).append(piece)
    out: dict[str, DensePiece] = {}
    for name, found in parts.items():
        spec = found[0].spec
        if len(found) == 1 and found[0].coords == Box.run(0, spec.elements):
            out[name] = found[0]
            continue
        if sum(piece.coords.count for piece in found) != spec.elements or len({piece.spec for piece in found}) != 1:
            raise CorruptionError("pieces do not make up their tensor", field=name, found=len(found), expected=spec)
        bits = np.empty(spec.elements, spec.type.uint)
        for piece in found:
            piece.coords.view(bits)[...] = piece.bits.reshape(piece.coords.sizes)
        out[name] = DensePiece(spec, Box.run(0, spec.elements), bits)
    return out


def _plain(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtype, spec.shape


def _checked(data: memoryview, want: bytes) -> memoryview:
    if hash16([data]) != want:
        raise CorruptionError("piece differs from its hash", field="blake3", found=f"{len(data)} bytes")
    return data
