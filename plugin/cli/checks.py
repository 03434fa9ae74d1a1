"""Checks of a store, object by object: the log, the manifests, the heads, and on request every stored byte.

Owns what is compared, and goes on after a fault. Owns no replay of states (replay.py) and no rule of the log
(version.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from blake3 import blake3

from weight_sync import version as rules
from weight_sync.codec.digest import Digest
from weight_sync.codec.shard import ShardHead
from weight_sync.errors import CorruptionError, VersionExpiredError, WeightSyncError
from weight_sync.history import History, table_of
from weight_sync.ports import ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import sorted_table

__all__ = ["Fault", "Findings", "blame", "check_log", "check_objects", "check_version"]

Manifest = manifest_pb2.VersionManifest
_SLICE = 8 << 20


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        version: number of the entry, None when it is about the whole run.
        object: key of the object below the run, None when it is about the entry.
        kind: name of the error's class.
        what: for people.
    """

    version: int | None
    object: str | None
    kind: str
    what: str

    def __str__(self) -> str:
        place = "log" if self.version is None else f"version {self.version}"
        return f"{place}{'' if self.object is None else f', object {self.object}'}: {self.what}"


@dataclass
class Findings:
    """What was found.

    Attributes:
        faults: in the order of the log.
        notes: what could not be checked, and why.
        versions, objects, bytes: checked.
        replayed: versions whose whole state was rebuilt and compared, per view.
    """

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: int = 0
    objects: int = 0
    bytes: int = 0
    replayed: dict[str, list[int]] = field(default_factory=dict)

    def add(self, version: int | None, object_: str | None, error: WeightSyncError) -> None:
        """A fault from an error."""
        self.faults.append(Fault(version, object_, type(error).__name__, str(error)))

    def bad(self, number: int) -> bool:
        """True when a fault of this version is known."""
        return any(fault.version == number for fault in self.faults)


# --- the log ---


def check_log(end: ReplicaEnd, findings: Findings) -> list[Manifest]:
    """Walks the log; returns the versions up to the first entry that cannot be trusted."""
    entries: list[Manifest] = []
    try:
        for entry in end.entries():
            entries.append(entry)
        head = end.head()  # asked last: a damaged newest entry hides none of those before it
    except CorruptionError as error:
        findings.add(len(entries), None, error)
        findings.notes.append(f"entries from {len(entries)} on were not checked")
        head = None
    versions = [entry for entry in entries if rules.is_version(entry.kind)]
    if head is not None and head >= len(entries):
        hole = CorruptionError("the log has a hole", found=f"no entry {len(entries)}",
                               expected=f"entries up to version {head}", do="do not trust this store")  # fmt: skip
        findings.add(len(entries), None, hole)
    findings.versions = len(versions)
    _check_reach([rules.Entry.of(entry) for entry in versions], findings)
    return versions


def _check_reach(versions: Iterable[rules.Entry], findings: Findings) -> None:
    """Every version has a full state, or a patch on a version that can be reached."""
    reached: set[int] = set()
    for entry in versions:
        if entry.kind == rules.ANCHOR or entry.parent in reached:
            reached.add(entry.number)
            continue
        error = CorruptionError("version cannot be reached", field="parent", found=entry.parent,
                                expected="a version that is still there, or a full state")  # fmt: skip
        findings.add(entry.number, None, error)


# --- one version ---


def check_version(history: History, manifest: Manifest, view: manifest_pb2.ViewManifest, findings: Findings) -> None:
    """One view of one version: its table and sums, the size and the head of each object, and the counts in them."""
    number = manifest.number
    try:
        table = sorted_table(table_of(view))
        if [spec.name for spec in table] != [entry.spec.name for entry in view.tensors]:
            raise CorruptionError("tensors are not sorted by name", field=view.name)
        _equal("digest of the tensors", Digest.sum(Digest.from_proto(e.digest) for e in view.tensors).hex(),
               Digest.from_proto(view.digest).hex())  # fmt: skip
        _equal("elements of the tensors", sum(spec.elements for spec in table), view.elements)
        _equal("changes of the tensors", sum(entry.changed for entry in view.tensors), view.changed)
    except WeightSyncError as error:
        findings.add(number, None, error)
    heads: dict[int, list[ShardHead]] = {}
    for ref in view.shards:
        try:
            _check_size(history.end, ref)
            head = history.head(manifest, ref)
            _equal("view of the shard", head.index.view, view.name)
            heads.setdefault(ref.form, []).append(head)
        except WeightSyncError as error:
            if not blame(history.end, findings, number, ref.object, error):
                return
        findings.objects += 1
        findings.bytes += ref.size
    if not findings.bad(number):
        _check_counts(manifest, view, heads, findings)


def _equal(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise CorruptionError(f"{what}: not as in the manifest", found=found, expected=expected,
                              do="do not trust this store")  # fmt: skip


def _check_size(end: ReplicaEnd, ref: manifest_pb2.ShardRef) -> None:
    """The object is as long as its reference says: its last byte is there, and none after it."""
    try:
        end.read(ref, max(0, ref.size - 1), min(1, ref.size))
    except CorruptionError as error:
        raise CorruptionError("object is shorter than its manifest says", field=ref.object,
                              expected=f"{ref.size} bytes", do="restore it from a copy") from error  # fmt: skip
    longer = manifest_pb2.ShardRef()
    longer.CopyFrom(ref)
    longer.size += 1  # or the transport would refuse to look there
    try:
        end.read(longer, ref.size, 1)
    except CorruptionError:
        return  # "shorter than that": as it should be
    raise CorruptionError("object is longer than its manifest says", field=ref.object, expected=f"{ref.size} bytes")


def _check_counts(
    manifest: Manifest, view: manifest_pb2.ViewManifest, heads: dict[int, list[ShardHead]], findings: Findings
) -> None:
    """Frames and pieces hold as many changes, and as many elements of a full state, as the manifest lists."""
    raw = heads.pop(common_pb2.FORM_RAW, None)
    whole = sum(box.count for head in heads.get(common_pb2.FORM_STEP, ()) for box in head.boxes)
    try:
        if raw is not None:
            _equal("elements of the full state", sum(box.count for head in raw for box in head.boxes), view.elements)
        if not manifest.HasField("parent"):
            return  # nothing came before: the changes that it lists are those of the full state
        for form, found in heads.items():
            changes = sum(frame.changes for head in found for frame in head.index.frames)
            _equal(f"{common_pb2.Form.Name(form)} changes of the shards", changes + whole, view.changed)
    except CorruptionError as error:
        findings.add(manifest.number, None, error)


def blame(end: ReplicaEnd, findings: Findings, number: int, object_: str | None, error: WeightSyncError) -> bool:
    """True for a fault; False, and a note, when a collection took the version away while we were looking."""
    if isinstance(error, VersionExpiredError) and _collected(end, number):
        note = f"version {number} was collected meanwhile"
        if note not in findings.notes:
            findings.notes.append(note)
        return False
    findings.add(number, object_, error)
    return True


def _collected(end: ReplicaEnd, number: int) -> bool:
    try:
        end.manifest(number)
    except VersionExpiredError:
        return True
    return False


# --- all bytes ---


def check_objects(
    end: ReplicaEnd, versions: Iterable[Manifest], findings: Findings, progress: Callable[[int, int], None]
) -> None:
    """BLAKE3 of every object of the versions, against their manifests."""
    jobs = [(entry.number, ref) for entry in versions for view in entry.views for ref in view.shards]
    total, done = sum(ref.size for _, ref in jobs), 0
    for number, ref in jobs:
        hasher = blake3()
        try:
            for at in range(0, ref.size, _SLICE):
                hasher.update(end.read(ref, at, min(_SLICE, ref.size - at)))
            if hasher.digest() != ref.blake3:
                raise CorruptionError("object differs from its hash", field=ref.object, found=hasher.hexdigest(),
                                      expected=ref.blake3.hex(),
                                      do="restore it from a copy, or publish a full state")  # fmt: skip
        except WeightSyncError as error:
            if not any(fault.object == ref.object for fault in findings.faults):
                blame(end, findings, number, ref.object, error)
        done += ref.size
        progress(done, total)
