"""The inbox's file: one SQLite database, opened, checked and asked in transactions.

Owns the schema, what makes a transaction durable, who may hold the file, and which error a fault of the file becomes.
Owns no policy: what is kept, given out and dropped is inbox.py's.

Durability: the journal is a write-ahead log with ``synchronous=FULL``, so that a transaction's pages are in the log and
the log is fsynced before COMMIT returns. ``NORMAL`` would fsync at checkpoints only: a receipt would survive the death
of the process and not that of the machine. The log's name and the file's are made durable by an fsync of the folder.

One process: ``locking_mode=EXCLUSIVE`` keeps the file locked from opening to closing. The kernel drops the lock with the
process, so that a killed trainer's successor needs no clean-up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from weight_sync.errors import (
    CorruptionError,
    FormatError,
    InputError,
    StoreError,
    StoreFullError,
    StoreReadOnlyError,
    StoreUnavailableError,
    WeightSyncError,
)
from weight_sync.folder import sync_path

__all__ = ["Disk"]

_APPLICATION = 0x57534942  # "WSIB"
_SCHEMA = 1
_PAGE_BYTES = 8192
_SETTINGS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "wal_autocheckpoint=2048",  # pages, 16 MiB of log between two checkpoints
    "journal_size_limit=67108864",  # bytes, to which the log shrinks after a burst
    "cache_size=-65536",  # KiB
    "temp_store=MEMORY",
    "secure_delete=OFF",  # else every used trajectory is overwritten with zeros, in the log and in the file
)
_LOCK_S = 1.0  # a process that was just killed may not have let go yet

_TABLES = """
CREATE TABLE items(
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL, run TEXT NOT NULL, oldest INTEGER NOT NULL,
    size INTEGER NOT NULL, sum INTEGER NOT NULL, payload BLOB NOT NULL);
CREATE INDEX items_oldest ON items(oldest DESC, seq);
CREATE TABLE used(seq INTEGER PRIMARY KEY, id TEXT NOT NULL);
CREATE TABLE counts(name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
"""
_OWN = "CREATE TEMP TABLE taken(seq INTEGER PRIMARY KEY);"  # in memory: what is given out is not, after a crash


class Disk:
    """An open file. Not thread-safe: the inbox locks.

    Raises StoreUnavailableError when another process, or another inbox in this one, holds the file; CorruptionError
    when it is damaged; FormatError when it is no inbox, or one of a later version; StoreError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, _LOCK_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise self._translated(error) from error
        try:
            self._open()
        except BaseException:
            self._connection.close()
            raise

    def _open(self) -> None:
        empty = not self.path.stat().st_size
        self.ask("PRAGMA locking_mode=EXCLUSIVE")
        if empty:
            self.ask(f"PRAGMA page_size={_PAGE_BYTES}")
        else:
            self._check_kind()
        for pragma in _SETTINGS:
            self.ask(f"PRAGMA {pragma}")
        with self.transaction():
            if not self.value("PRAGMA user_version"):  # empty, or its creation was cut short
                for statement in _TABLES.split(";\n"):
                    self.ask(statement)
                self.ask(f"PRAGMA application_id={_APPLICATION}")
                self.ask(f"PRAGMA user_version={_SCHEMA}")
        self.ask(_OWN)
        found = self.value("PRAGMA quick_check(1)")
        if found != "ok":
            raise CorruptionError("the inbox is damaged", field=str(self.path), found=found, expected="ok",
                                  do="move it away; engines send again what they have no receipt for")  # fmt: skip
        if empty:
            sync_path(self.path.parent)

    def _check_kind(self) -> None:
        application, version = self.value("PRAGMA application_id"), self.value("PRAGMA user_version")
        if (application, version) == (0, 0) and not self.value("SELECT count(*) FROM sqlite_master"):
            return
        if application != _APPLICATION:
            raise FormatError("not an inbox", field=str(self.path), found=f"application id {application}",
                              expected=_APPLICATION, do="give the inbox a file of its own")  # fmt: skip
        if version != _SCHEMA:
            raise FormatError("inbox of another version of weight_sync", field=str(self.path), found=version,
                              expected=_SCHEMA, do="drain it with the version that wrote it")  # fmt: skip

    # --- asking ---

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; durable when the block has ended. Raises StoreFullError, StoreError: then nothing changed."""
        self.ask("BEGIN IMMEDIATE")
        try:
            yield
            self.ask("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # some errors roll back by themselves
                self.ask("ROLLBACK")
            raise

    def ask(self, statement: str, *values: Any) -> list[Any]:
        """All rows of one statement."""
        try:
            with closing(self._connection.execute(statement, values)) as cursor:
                return cursor.fetchall()
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def value(self, statement: str, *values: Any) -> Any:
        """The one value of one row."""
        [(found,)] = self.ask(statement, *values)
        return found

    def each(self, statement: str, rows: Iterable[Sequence[Any]]) -> int:
        """One statement for many rows; returns how many rows of the file it changed."""
        try:
            with closing(self._connection.executemany(statement, rows)) as cursor:
                return max(0, cursor.rowcount)
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def close(self) -> None:
        """Moves the log into the file and lets go of it. Raises nothing: what was committed is in one of the two."""
        self._connection.close()

    def _translated(self, error: sqlite3.Error | OSError) -> WeightSyncError:
        """What a caller can act on."""
        code = getattr(error, "sqlite_errorcode", None)
        name = str(self.path)
        primary = None if code is None else code & 0xFF
        if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreUnavailableError(
                "another process, or another inbox in this one, holds the inbox", field=name, found=str(error),
                do="stop that trainer (fuser names it), or give this one an inbox of its own")  # fmt: skip
        if primary == sqlite3.SQLITE_FULL:
            return StoreFullError("no space left for the inbox", field=name, do="free space; nothing was lost")
        if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM) or isinstance(error, PermissionError):
            return StoreReadOnlyError("the inbox cannot be written", field=name, found=str(error))
        if primary == sqlite3.SQLITE_NOTADB:
            return FormatError("not an inbox", field=name, found=str(error), do="give the inbox a file of its own")
        if primary == sqlite3.SQLITE_CORRUPT:
            return CorruptionError("the inbox is damaged", field=name, found=str(error),
                                   do="move it away; engines send again what they have no receipt for")  # fmt: skip
        if isinstance(error, sqlite3.ProgrammingError) and "closed" in str(error):
            return InputError("the inbox is closed", field=name)
        return StoreError("the inbox failed", field=name, found=str(error))
