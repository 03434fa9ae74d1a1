"""The rules of a run's log: which entry may follow which, how a reader gets to a version, what is kept.

Owns the decisions, as pure functions that say why. Owns no I/O: transports hand in summaries of the entries
and act on the answer.

A run's log is numbered from 0 without holes. Entry 0 is the first anchor, which claims epoch 0; from then on
the epoch changes only at an EPOCH entry, whose epoch is its own number. ANCHOR and PATCH entries are versions
and stay so in history when they become EXPIRED; the line of versions is straight: a patch's parent is the
newest version before it. A publisher writes entry N+1 only after it has seen entry N in its own epoch, so
no rival can slip in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weight_sync.proto.v1 import common_pb2, manifest_pb2

__all__ = [
    "ABORTED",
    "ANCHOR",
    "EPOCH",
    "EXPIRED",
    "PATCH",
    "Entry",
    "NoPath",
    "Path",
    "is_version",
    "kept",
    "kind_name",
    "may_follow",
    "plan",
]

ANCHOR = manifest_pb2.ENTRY_KIND_ANCHOR
PATCH = manifest_pb2.ENTRY_KIND_PATCH
EPOCH = manifest_pb2.ENTRY_KIND_EPOCH
ABORTED = manifest_pb2.ENTRY_KIND_ABORTED
EXPIRED = manifest_pb2.ENTRY_KIND_EXPIRED


def is_version(kind: int) -> bool:
    """True for the kinds whose weights can be read."""
    return kind in (ANCHOR, PATCH)


def kind_name(kind: int) -> str:
    """ANCHOR, PATCH, ...; the number when this build does not know it."""
    if kind in manifest_pb2.EntryKind.values():
        return manifest_pb2.EntryKind.Name(kind).removeprefix("ENTRY_KIND_")
    return str(kind)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the rules need to know of one entry.

    Attributes:
        number: of the entry; numbers of versions are numbers of entries.
        epoch: number of the EPOCH entry under which it was written.
        kind: one of the constants of this module.
        parent: number of the version that its patch applies to, None when it has no patch.
        anchor_bytes: stored bytes of the full state; None when none are stored (patch, anchor by reference); 0 when no tensor
            has an element.
        patch_bytes: stored bytes of the patch, one form of it (the smallest).
        objects: keys of all its objects, below the run's prefix.
    """

    number: int
    epoch: int
    kind: int
    parent: int | None = None
    anchor_bytes: int | None = None
    patch_bytes: int = 0
    objects: tuple[str, ...] = ()

    @classmethod
    def of(cls, manifest: manifest_pb2.VersionManifest, view: str | None = None) -> Entry:
        """Summary of ``manifest``; byte counts of one ``view``, or of all."""
        raw, has_raw = 0, False
        patch: dict[int, int] = {}
        for part in manifest.views:
            if view is not None and part.name != view:
                continue
            for ref in part.shards:
                if ref.form == common_pb2.FORM_RAW:
                    raw, has_raw = raw + ref.size, True
                else:
                    patch[ref.form] = patch.get(ref.form, 0) + ref.size
        is_empty = (
            manifest.kind == ANCHOR and bool(manifest.views) and not any(part.elements for part in manifest.views)
        )
        return cls(
            number=manifest.number,
            epoch=manifest.epoch,
            kind=manifest.kind,
            parent=manifest.parent if manifest.HasField("parent") else None,
            anchor_bytes=raw if has_raw or is_empty else None,
            patch_bytes=min(patch.values(), default=0),
            objects=tuple(ref.object for part in manifest.views for ref in part.shards),
        )


# --- the log ------------------------------------------------------------------------------------------------


def may_follow(previous: Entry | None, head: int | None, new: Entry) -> str | None:
    """Why ``new`` cannot stand in the log right after ``previous``; None when it can.

    Args:
        previous: entry ``new.number - 1``; None for entry 0.
        head: number of the newest version up to ``previous``, expired ones too; None when there is none.
        new: the entry in question.
    """
    if new.kind not in (ANCHOR, PATCH, EPOCH, ABORTED, EXPIRED):
        return f"entry {new.number} has unknown kind {new.kind}"
    if previous is None:
        return _may_start(new)
    if new.number != previous.number + 1:
        return f"entry {new.number} does not follow {previous.number}: the log has no holes"
    if new.kind == EPOCH:
        if new.epoch != new.number:
            return f"EPOCH entry {new.number} carries epoch {new.epoch}, not its own number"
    elif new.epoch != previous.epoch:
        return f"entry {new.number} is of epoch {new.epoch}, but epoch {previous.epoch} owns the log there"
    return _line_broken(head, new)


def _may_start(new: Entry) -> str | None:
    if new.number != 0:
        return f"entry {new.number} is not the first, and no entry before it is known"
    if new.epoch != 0:
        return f"entry 0 is of epoch {new.epoch}, not 0"
    if new.kind in (PATCH, EPOCH):
        return f"entry 0 is {kind_name(new.kind)}; a run starts with an ANCHOR"
    return _line_broken(None, new)


def _line_broken(head: int | None, new: Entry) -> str | None:
    if new.kind in (EPOCH, ABORTED):
        return None
    if new.parent is None:
        return f"PATCH {new.number} names no parent" if new.kind == PATCH else None
    if new.parent != head:
        return f"version {new.number} has parent {new.parent}, but the newest version before it is {head}"
    return None


# --- reading ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Path:
    """How to get to a version: load ``anchor`` (None: start from what is held), then apply ``patches``.

    Attributes:
        anchor: number of the full state to load first, None to go on from the version held.
        patches: numbers whose patch is applied, ascending; empty when nothing is left to do.
        size: stored bytes to be fetched; an anchor by reference counts 0.
        reason: why this way, for people.
    """

    anchor: int | None
    patches: tuple[int, ...]
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class NoPath:
    """Why a version cannot be reached.

    Attributes:
        number: the entry that stands in the way.
        expired: True when it was there and has been collected; else it never was a version.
        reason: for people.
    """

    number: int
    expired: bool
    reason: str


def plan(
    lookup: Callable[[int], Entry | None], have: int | None, target: int, *, by_reference: bool = True
) -> Path | NoPath:
    """The cheapest way from version ``have`` (None: nothing held) to ``target``.

    Patches from ``have`` win unless a stored anchor on the way costs fewer bytes; going back in history takes
    an anchor. Looks up entries from ``target`` backwards, and no further than needed.

    Args:
        lookup: the log; None for a number without an entry.
        have: version held now, verified; 0 is a version.
        target: version wanted.
        by_reference: False when the reader cannot resolve anchors whose bits were not stored.
    """
    if have == target:
        return Path(None, (), 0, f"version {target} is held already")
    chain: list[int] = []
    cost = 0
    anchored: Path | None = None
    stored: int | None = None  # bytes of that way, None when its anchor is not in the store: then patches win
    number = target
    while number != have:
        entry = lookup(number)
        blocked = _blocked(number, entry)
        if blocked is not None:
            return anchored or blocked
        assert entry is not None  # _blocked has seen to it
        if anchored is None and entry.kind == ANCHOR and (by_reference or entry.anchor_bytes is not None):
            size = cost + (entry.anchor_bytes or 0)
            stored = None if entry.anchor_bytes is None else size
            anchored = Path(number, tuple(reversed(chain)), size, f"anchor {number} and {_patches(len(chain))}")
        patches_may_win = have is not None and have < number and (stored is None or cost <= stored)
        if anchored is not None and not patches_may_win:
            return anchored
        if entry.parent is None:
            return anchored or NoPath(number, False, f"version {number} has neither a full state nor a parent")
        chain.append(number)
        cost += entry.patch_bytes
        number = entry.parent
    if anchored is not None and stored is not None and stored < cost:
        return anchored
    return Path(None, tuple(reversed(chain)), cost, f"{_patches(len(chain))} from version {have}")


def _patches(count: int) -> str:
    return f"{count} patch{'' if count == 1 else 'es'}"


def _blocked(number: int, entry: Entry | None) -> NoPath | None:
    if entry is None:
        return NoPath(number, False, f"version {number} has not been published")
    if entry.kind == EXPIRED:
        return NoPath(number, True, f"version {number} has been collected")
    if not is_version(entry.kind):
        return NoPath(number, False, f"entry {number} is {kind_name(entry.kind)}, not a version")
    if entry.parent is not None and entry.parent >= number:
        return NoPath(number, False, f"version {number} names parent {entry.parent}, which does not precede it")
    return None


# --- retention ----------------------------------------------------------------------------------------------


def kept(entries: Iterable[Entry], keep_versions: int, leased: Iterable[int]) -> dict[int, str]:
    """The versions that retention keeps, each with the reason; every other version may expire.

    Kept are the newest ``keep_versions`` (the head always), every leased version, and for each of them the
    chain of patches back to the nearest anchor.

    Args:
        entries: the whole log, in any order; entries that are no versions (any more) are ignored.
        keep_versions: 1 or more.
        leased: numbers under a fresh lease; numbers that are no versions are ignored.
    """
    versions = {entry.number: entry for entry in entries if is_version(entry.kind)}
    newest = sorted(versions)[-max(1, keep_versions) :]
    reasons = dict.fromkeys(newest, f"one of the newest {keep_versions}")
    if newest:
        reasons[newest[-1]] = "the head"
    for number in set(leased) & set(versions):
        reasons[number] = "leased"
    for wanted in sorted(reasons):
        entry = versions[wanted]
        while entry.kind == PATCH and entry.parent is not None and entry.parent in versions:
            entry = versions[entry.parent]
            if entry.number in reasons:
                break  # its own chain is walked in its own turn
            reasons[entry.number] = f"needed by version {wanted}"
    return reasons
