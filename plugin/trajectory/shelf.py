"""What lies in the inbox's file, changed only inside transactions: rows in, rows out, room, and counts.

Owns the statements and the accounts that must agree with them. Owns no threads, no checks of trajectories and no
waiting (inbox.py), and no opening of the file (disk.py). Not thread-safe.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory.disk import Disk

__all__ = ["Limits", "Row", "Shelf", "Taken"]

_FREE = "seq NOT IN (SELECT seq FROM taken)"
_THESE = "seq IN (SELECT value FROM json_each(?))"  # one statement for many rows
_ORDERS = {"arrival": "seq", "freshest": "oldest DESC, seq"}


@dataclass(frozen=True)
class Limits:
    """How much may be pending, what happens then, and how many used ids are known."""

    count: int
    bytes: int
    when_full: Literal["refuse", "evict"]
    remember: int


class Row(NamedTuple):
    """One trajectory on its way in."""

    id: str
    run: str
    oldest: int
    size: int
    sum: int
    payload: bytes


class Taken(NamedTuple):
    """One trajectory on its way out."""

    seq: int
    id: str
    sum: int
    payload: bytes


@dataclass
class _Accounts:
    """Of what is pending, and totals by name that the file does not have yet."""

    count: int
    bytes: int
    next_seq: int
    fresh: Counter[str] = field(default_factory=Counter)


class Shelf:
    """The rows of one file. Knows the ids of all pending and used ones in memory, at about 150 bytes each."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.limits = limits
        self._disk = Disk(path)
        count, size = self._disk.ask("SELECT count(*), coalesce(sum(size), 0) FROM items")[0]
        last = self._disk.value(
            "SELECT max(coalesce((SELECT max(seq) FROM items), 0), coalesce(max(seq), 0)) FROM used"
        )
        self._now = _Accounts(count, size, last + 1)
        self._taken = 0
        self._known = {name for (name,) in self._disk.ask("SELECT id FROM used UNION ALL SELECT id FROM items")}
        self._added: list[str] = []  # by the change under way
        self._forgotten: list[str] = []

    @contextmanager
    def change(self) -> Iterator[None]:
        """All changes in the block become durable together, or none of them happened, in the file and in memory."""
        before, taken = replace(self._now, fresh=Counter(self._now.fresh)), self._taken
        self._added, self._forgotten = [], []
        try:
            with self._disk.transaction():
                yield
                self._disk.each(
                    "INSERT INTO counts VALUES(?,?) ON CONFLICT(name) DO UPDATE SET n = n + excluded.n",
                    self._now.fresh.items(),
                )
        except BaseException:
            self._now, self._taken = before, taken
            self._known.difference_update(self._added)
            raise
        self._now.fresh.clear()
        self._known.difference_update(self._forgotten)

    # --- counts ---

    @property
    def count(self) -> int:
        """Pending, taken ones included."""
        return self._now.count

    @property
    def bytes(self) -> int:
        """Of the pending messages."""
        return self._now.bytes

    @property
    def taken(self) -> int:
        """Given out."""
        return self._taken

    def tell(self, name: str, n: int = 1) -> None:
        """Counts something that needs no transaction; it reaches the file with the next one, or with `close`."""
        self._now.fresh[name] += n

    def totals(self) -> Counter[str]:
        """By name, since the file was made."""
        return Counter(dict(self._disk.ask("SELECT name, n FROM counts"))) + self._now.fresh

    # --- rows in ---

    def insert(self, rows: Sequence[Row]) -> list[trajectory_pb2.TrajectoryReceipt] | int:
        """Keeps what is new of ``rows``. Returns one receipt each; or how many places are missing, and keeps nothing."""
        fresh: dict[str, Row] = {}
        receipts = []
        for row in rows:
            duplicate = row.id in self._known or row.id in fresh
            receipts.append(trajectory_pb2.TrajectoryReceipt(id=row.id, duplicate=duplicate))
            if not duplicate:
                fresh[row.id] = row
        size = sum(row.size for row in fresh.values())
        if not self._has_room(len(fresh), size):
            if self.limits.when_full == "evict":
                self._evict(len(fresh), size)
            if not self._has_room(len(fresh), size):  # what is taken cannot be evicted
                return max(1, self._now.count + len(fresh) - self.limits.count)
        numbered = ((self._now.next_seq + k, *row) for k, row in enumerate(fresh.values()))
        self._disk.each("INSERT INTO items VALUES(?,?,?,?,?,?,?)", numbered)
        self._known.update(fresh)
        self._added += fresh
        self._now.next_seq += len(fresh)
        self._now.count += len(fresh)
        self._now.bytes += size
        self.tell("received", len(fresh))
        self.tell("duplicates", len(receipts) - len(fresh))
        return receipts

    def _has_room(self, count: int, size: int) -> bool:
        return self._now.count + count <= self.limits.count and self._now.bytes + size <= self.limits.bytes

    def _evict(self, count: int, size: int) -> None:
        """Drops the stalest, oldest arrivals first among equals, until there is room or nothing is left to drop."""
        places = self._now.count + count - self.limits.count
        room = self._now.bytes + size - self.limits.bytes
        out = []
        for seq, of in self._disk.ask(f"SELECT seq, size FROM items WHERE {_FREE} ORDER BY oldest, seq"):
            if places <= 0 and room <= 0:
                break
            out.append(seq)
            places, room = places - 1, room - of
        self._remove(out, "evicted")

    def forget(self, at_most: int) -> None:
        """Drops the ids of the longest past that are beyond ``remember``, a few at a time."""
        old = self._disk.ask("SELECT seq, id FROM used WHERE seq < ? ORDER BY seq LIMIT ?",
                             self._now.next_seq - self.limits.remember, at_most)  # fmt: skip
        if old:
            self._disk.ask("DELETE FROM used WHERE seq <= ?", old[-1][0])
            self._forgotten += [name for _, name in old]

    # --- rows out ---

    def free(self) -> int:
        """Pending and not given out."""
        return self._now.count - self._taken

    def take(self, limit: int, order: str) -> list[Taken]:
        """Marks up to ``limit`` as given out: in memory alone, so that a crash brings them back."""
        rows = self._disk.ask(
            f"SELECT seq, id, sum, payload FROM items WHERE {_FREE} ORDER BY {_ORDERS[order]} LIMIT ?", limit
        )
        self._disk.each("INSERT INTO taken VALUES(?)", ((row[0],) for row in rows))
        self._taken += len(rows)
        return [Taken(*row) for row in rows]

    def give_back(self, seqs: Sequence[int]) -> None:
        """Not given out any more."""
        self._taken -= self._disk.each("DELETE FROM taken WHERE seq=?", ((seq,) for seq in seqs))

    def settle(self, seqs: Sequence[int], name: str) -> None:
        """Removes what was given out, counted under ``name``."""
        self._remove(seqs, name)
        self.give_back(seqs)

    def drop_stale(self, oldest: int) -> bool:
        """Drops what has tokens of a version before ``oldest``; False when there is none."""
        return self._drop("too_stale", "oldest < ?", oldest)

    def drop_others(self, run_id: str) -> bool:
        """Drops what is of another run; False when there is none."""
        return self._drop("other_run", "run != ?", run_id)

    def _drop(self, name: str, where: str, value: int | str) -> bool:
        found = [seq for (seq,) in self._disk.ask(f"SELECT seq FROM items WHERE {where} AND {_FREE}", value)]
        if found:
            with self.change():
                self._remove(found, name)
        return bool(found)

    def _remove(self, seqs: Sequence[int], name: str) -> None:
        these = json.dumps(list(seqs))
        count, size = self._disk.ask(f"SELECT count(*), coalesce(sum(size), 0) FROM items WHERE {_THESE}", these)[0]
        self._disk.ask(f"INSERT INTO used SELECT seq, id FROM items WHERE {_THESE}", these)
        self._disk.ask(f"DELETE FROM items WHERE {_THESE}", these)
        self._now.count -= count
        self._now.bytes -= size
        self.tell(name, count)

    def close(self) -> None:
        """Writes what was only told, and lets go of the file."""
        try:
            if self._now.fresh:
                with self.change():  # writes the counts alone
                    self._taken = 0
        finally:
            self._disk.close()
