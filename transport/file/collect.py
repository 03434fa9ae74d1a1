"""Collection: what retention lets go becomes a tombstone in the log, then its objects are deleted.

Owns the order of steps, so that a crash between any two is finished by the next collection and a reader is never
misled. Owns no rule: ``weight_sync.version.kept`` decides what stays.

1. List the data objects. Only these can be deleted later: what is uploaded from here on is not touched.
2. Read the log, then the leases and the store's clock.
3. Replace each version that nothing keeps by a small EXPIRED entry. Its number stays taken for ever.
4. Delete the listed objects that no version refers to: of expired versions, of aborted numbers, of losers. Objects of
   the number in flight stay; above it, which only a broken publisher writes, they stay for STALE_S.
5. Sweep what only time ends: files in the making, and small objects of replicas that have been silent for long.
"""

from __future__ import annotations

from collections.abc import Mapping

from weight_sync.config import crash_point
from weight_sync.errors import CorruptionError
from weight_sync.proto.v1 import manifest_pb2, replica_pb2
from weight_sync.transport.file import keys
from weight_sync.transport.file.log import Log, decode
from weight_sync.transport.file.store import Meta, Store
from weight_sync.version import EXPIRED, Entry, is_version, kept, kind_name

__all__ = ["FORGET_S", "LONGEST_LEASE_S", "MAKING_S", "STALE_S", "Collector", "fresh_leases"]

STALE_S = 24 * 3600.0
"""Age in seconds at which objects above the number in flight are leftovers."""
MAKING_S = 3600.0
"""Seconds since the last write after which a file in the making is a leftover."""
FORGET_S = 7 * 24 * 3600.0
"""Age in seconds at which leases, acknowledgements, wants and rejected objects of silent replicas go."""
LONGEST_LEASE_S = 24 * 3600.0
"""A lease must be renewed at least this often, whatever its ttl says."""


class Collector:
    """Collects one run, again and again; remembers the entries, which hardly change once they are written."""

    def __init__(self, store: Store, run_id: str, keep_versions: int) -> None:
        self._store = store
        self._log = Log(store, run_id)
        self._keep_versions = keep_versions
        self._entries: list[Entry] = []

    def collect(self) -> Mapping[str, int]:
        """Collects once. May run beside the publisher, readers and other collections.

        Returns:
            ``expired``: versions that became EXPIRED. ``objects`` and ``bytes``: data deleted. ``small``: leases,
            acknowledgements, wants and rejected objects deleted. ``leftovers``: files in the making swept.
            ``kept``: versions that stay. ``unreadable_leases``: leases that kept nothing because they are garbage.
        """
        store, run_id = self._store, self._log.run_id
        listed = store.list(keys.under(run_id, "data"))
        while (entry := self._log.summary(len(self._entries))) is not None:
            self._entries.append(entry)
        now = store.now(keys.probe(run_id))
        leased, unreadable = fresh_leases(store, run_id, now)
        reasons = kept(self._entries, self._keep_versions, leased.values())
        doomed = [e.number for e in self._entries if is_version(e.kind) and e.number not in reasons]
        expired = sum(self._bury(number) for number in doomed)
        live = {keys.under(run_id, key) for number in reasons for key in self._entries[number].objects}
        waste = [meta for meta in listed if _is_waste(meta, live, len(self._entries), now)]
        for meta in waste:
            store.delete(meta.key)
            crash_point("collect:delete")
        return {
            "expired": expired,
            "objects": len(waste),
            "bytes": sum(meta.size for meta in waste),
            "small": _forget(store, run_id, now),
            "leftovers": store.sweep(now - MAKING_S),
            "kept": len(reasons),
            "unreadable_leases": unreadable,
        }

    def _bury(self, number: int) -> bool:
        """Replaces a version by its tombstone; False when another collection was here first."""
        manifest = self._log.read(number)
        assert manifest is not None  # entries are never removed
        if not is_version(manifest.kind):
            self._entries[number] = Entry.of(manifest)
            return False
        tomb = _tombstone(manifest, f"outside the newest {self._keep_versions} versions, and no lease needs it")
        self._store.replace(keys.entry(self._log.run_id, number), tomb.SerializeToString())
        self._entries[number] = Entry.of(tomb)
        crash_point("collect:tombstone")
        return True


def _tombstone(manifest: manifest_pb2.VersionManifest, why: str) -> manifest_pb2.VersionManifest:
    """What stays of a version: its place in the log, and digests and counts, so that old states are recognised."""
    tomb = manifest_pb2.VersionManifest(
        format=manifest.format,
        run_id=manifest.run_id,
        number=manifest.number,
        epoch=manifest.epoch,
        kind=EXPIRED,
        writer=manifest.writer,
        reason=f"was {kind_name(manifest.kind)}: {why}",
        created_unix_ms=manifest.created_unix_ms,
        nonce=manifest.nonce,
    )
    if manifest.HasField("parent"):
        tomb.parent = manifest.parent
    if manifest.HasField("step"):
        tomb.step = manifest.step
    for view in manifest.views:
        tomb.views.add(
            name=view.name, scheme=view.scheme, elements=view.elements, changed=view.changed
        ).digest.CopyFrom(view.digest)
    return tomb


def fresh_leases(store: Store, run_id: str, now: float) -> tuple[dict[str, int], int]:
    """Numbers under a fresh lease by replica, and how many leases cannot be read; ``now`` is the store's time."""
    numbers: dict[str, int] = {}
    unreadable = 0
    for meta in store.list(keys.leases(run_id)):
        try:
            data = store.get(meta.key)
            lease = decode(replica_pb2.Lease, data or b"", store.name(meta.key))
        except CorruptionError:
            unreadable += 1  # reported in the counts: garbage must not stop collections, nor keep anything
            continue
        life = min(lease.ttl_s, LONGEST_LEASE_S)
        if data is not None and lease.version.run_id == run_id and now - meta.modified <= life:
            numbers[keys.stem(meta.key)] = lease.version.number
    return numbers, unreadable


def _is_waste(meta: Meta, live: set[str], next_number: int, now: float) -> bool:
    number = keys.number_in(meta.key)
    if meta.key in live or number is None or number == next_number:
        return False
    return number < next_number or now - meta.modified > STALE_S


def _forget(store: Store, run_id: str, now: float) -> int:
    """Deletes small objects that nobody has renewed for FORGET_S; their number."""
    folders = (keys.leases(run_id), keys.acks(run_id), keys.wants(run_id), keys.under(run_id, "rejected"))
    old = [meta for folder in folders for meta in store.list(folder) if now - meta.modified > FORGET_S]
    for meta in old:
        store.delete(meta.key)
    return len(old)
