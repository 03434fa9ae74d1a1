"""The log of one run, as readers see it.

Owns finding and decoding entries, defensively: everything in a store may have been written by somebody hostile or
newer. Owns no decision about what may be written (publisher_end.py) or deleted (collect.py).
"""

from __future__ import annotations

import re
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from weight_sync.errors import CorruptionError, FormatError, StoreError
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.transport.file import keys
from weight_sync.transport.file.store import Store
from weight_sync.version import EXPIRED, Entry, is_version

__all__ = ["FORMAT", "Log", "check_format", "decode"]

FORMAT = 1
"""Format of the records and entries that this build writes, and the newest that it reads."""

_LIST_AFTER = 8  # entries followed one by one before a listing is cheaper
_KINDS = frozenset(manifest_pb2.EntryKind.values()) - {manifest_pb2.ENTRY_KIND_UNSPECIFIED}
_VIEW = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

M = TypeVar("M", bound=Message)


def decode(kind: type[M], data: bytes, name: str) -> M:
    """Parses a message. Raises CorruptionError naming the object."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise CorruptionError(
            f"not a {kind.__name__}", field=name, found=f"{len(data)} bytes", do="do not trust this object"
        ) from error


def check_format(found: int, name: str) -> None:
    """Refuses a newer format with FormatError, none at all with CorruptionError."""
    if found > FORMAT:
        raise FormatError(
            "written by a newer weight_sync",
            field=name,
            found=f"format {found}",
            expected=f"format {FORMAT} or older",
            do=f"install a weight_sync that reads format {found}",
        )
    if found == 0:
        raise CorruptionError("object has no format", field=name, do="do not trust this object")


class Log:
    """The log of one run. Follows it forward and remembers how far it has seen; not thread-safe."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self.run_id = run_id
        self._next = 0  # every number below has an entry
        self._scanned = 0  # the newest version below this number is _head
        self._head: int | None = None

    def name(self, number: int) -> str:
        """Entry ``number`` for messages."""
        return self._store.name(keys.entry(self.run_id, number))

    def read(self, number: int) -> manifest_pb2.VersionManifest | None:
        """Entry ``number``, checked; None when absent. Raises CorruptionError or FormatError naming the object."""
        data = self._store.get(keys.entry(self.run_id, number))
        return None if data is None else self.parse(number, data)

    def parse(self, number: int, data: bytes) -> manifest_pb2.VersionManifest:
        """Decodes entry ``number`` and checks all that this transport relies on."""
        name = self.name(number)
        manifest = decode(manifest_pb2.VersionManifest, data, name)
        check_format(manifest.format, name)
        if (manifest.run_id, manifest.number) != (self.run_id, number):
            raise CorruptionError(
                "entry is not of this place in the log",
                field=name,
                found=f"{manifest.run_id}/{manifest.number}",
                expected=f"{self.run_id}/{number}",
                do="do not trust this store",
            )
        if manifest.kind not in _KINDS:
            raise FormatError(
                "unknown kind of entry", field=name, found=manifest.kind, do="install a newer weight_sync"
            )
        if manifest.epoch > number or (manifest.HasField("parent") and manifest.parent >= number):
            raise CorruptionError(
                "entry refers to its future",
                field=name,
                found=f"epoch {manifest.epoch}, parent {manifest.parent}",
                expected=f"epoch at most {number}, parent below {number}",
            )
        _check_views(manifest, name)
        return manifest

    def follow(self) -> int:
        """The first number without an entry, from what the store holds now."""
        if self._next == 0:
            self._next = self._by_listing(self._hint())
        steps = 0
        while self._store.head(keys.entry(self.run_id, self._next)) is not None:
            self._next += 1
            steps += 1
            if steps == _LIST_AFTER:
                self._next = self._by_listing(self._next)
        return self._next

    def head(self) -> int | None:
        """Number of the newest version among the entries seen by ``follow``; None when there is none."""
        for number in range(self._next - 1, self._scanned - 1, -1):
            manifest = self.read(number)
            if manifest is not None and is_version(manifest.kind):
                self._head = number
                break
        self._scanned = self._next
        return self._head

    def newest_before(self, number: int) -> int | None:
        """Number of the newest version below ``number``, expired ones included; None when there is none."""
        for earlier in range(number - 1, -1, -1):
            manifest = self.read(earlier)
            if manifest is not None and (is_version(manifest.kind) or manifest.kind == EXPIRED):
                return earlier
        return None

    def summary(self, number: int) -> Entry | None:
        """What the rules need to know of entry ``number``; None when absent."""
        manifest = self.read(number)
        return None if manifest is None else Entry.of(manifest)

    def advance(self, number: int) -> None:
        """Notes that entry ``number`` is there and that nothing below it is unknown."""
        self._next = max(self._next, number + 1)

    # --- finding the end ---

    def _hint(self) -> int:
        """Where to begin listing. Nothing is decided by the hint: entries are looked at from there on."""
        data = self._store.get(keys.LATEST)
        if data is None or len(data) > 1024:
            return 0
        try:
            hint = common_pb2.VersionId.FromString(data)
        except DecodeError:
            return 0
        known = hint.run_id == self.run_id and hint.number < 1 << 63
        if known and self._store.head(keys.entry(self.run_id, hint.number)) is not None:
            return hint.number
        return 0

    def _by_listing(self, first: int) -> int:
        """The first number from ``first`` on without an entry, from the names in the log's folder."""
        after = keys.entry(self.run_id, first - 1) if first else None
        found = [keys.number_in(meta.key) for meta in self._store.list(keys.log(self.run_id), after)]
        numbers = sorted(number for number in found if number is not None and number >= first)
        expected = first
        for number in numbers:
            # a folder may list N+1 and miss N, which was there first: ask for N itself
            while expected < number:
                if self._store.head(keys.entry(self.run_id, expected)) is None:
                    raise StoreError(
                        "the log has a hole",
                        field=self.name(expected),
                        found=f"entry {number} exists",
                        do="restore the entry from a copy of the store, or start a new run",
                    )
                expected += 1
            expected = number + 1
        return expected


def _check_views(manifest: manifest_pb2.VersionManifest, name: str) -> None:
    for view in manifest.views:
        if not _VIEW.fullmatch(view.name) or ".." in view.name:
            raise FormatError("unusable view name", field=name, found=view.name)
        for ref in view.shards:
            keys.check_object(ref.object, manifest.number, name)
            if len(ref.blake3) != 32 or len(ref.head_blake3) != 32 or ref.head_size > ref.size:
                raise CorruptionError(
                    "malformed shard reference",
                    field=f"{name}: {ref.object}",
                    found=f"hashes of {len(ref.blake3)} and {len(ref.head_blake3)} bytes, "
                    f"head {ref.head_size} of {ref.size}",
                    expected="hashes of 32 bytes, a head inside the object",
                )
