"""The register of runs: which there are, and which one a publisher claims or a reader follows.

Owns the records ``runs/<sequence>.pb``, a log of its own: record N+1 is put, if absent, by somebody who has seen N.
Owns no entry of any run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from weight_sync.errors import ConfigError, ForkRequiredError, FormatError, InputError, VersionMissingError
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.transport.file import keys
from weight_sync.transport.file.log import FORMAT, Log, check_format, decode
from weight_sync.transport.file.store import Store
from weight_sync.version import EXPIRED, is_version

__all__ = ["Register", "check_parent", "choose", "new_record"]


class Register:
    """The runs of a store, in order of creation."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.records: list[manifest_pb2.RunRecord] = []

    def refresh(self) -> list[manifest_pb2.RunRecord]:
        """All records; reads only those that are new, and asks once for the next. Raises CorruptionError."""
        while True:
            name = self._store.name(keys.run_record(len(self.records)))
            data = self._store.get(keys.run_record(len(self.records)))
            if data is None:
                return self.records
            record = decode(manifest_pb2.RunRecord, data, name)
            check_format(record.format, name)
            try:
                keys.check_run_id(record.run_id)
            except ConfigError as error:
                raise FormatError("unusable run id", field=name, found=record.run_id) from error
            self.records.append(record)

    def append(self, record: manifest_pb2.RunRecord) -> None:
        """Puts a record after those seen so far, unless another one is there; ``refresh`` tells which."""
        self._store.create(keys.run_record(len(self.records)), record.SerializeToString())

    def find(self, run_id: str) -> manifest_pb2.RunRecord | None:
        """The record of a run, among those seen so far."""
        return next((record for record in self.records if record.run_id == run_id), None)


def choose(
    known: Sequence[manifest_pb2.RunRecord], run_id: str | None, fork_of: common_pb2.VersionId | None
) -> str | None:
    """The run that a publisher claims, None when it has to be created. Pure.

    Raises ForkRequiredError when ``run_id`` is not among the runs of a store that holds some, InputError when a fork
    names a run that exists.
    """
    if run_id is not None:
        keys.check_run_id(run_id)
    same = next((record for record in known if record.run_id == run_id), None)
    if fork_of is not None:
        if same is None or same.parent == fork_of:  # an earlier try made the record and died, or lost a race
            return None if same is None else same.run_id
        raise InputError("run exists already", field="run_id", found=run_id, do="name the fork differently")
    if run_id is None:
        return known[-1].run_id if known else None
    if same is None and known:
        raise ForkRequiredError(
            "store holds other runs, but not this one",
            field="run_id",
            found=run_id,
            expected=known[-1].run_id,
            do="correct weight_sync.run_id, or fork to start a new run in this store",
        )
    return None if same is None else run_id


def new_record(run_id: str | None, fork_of: common_pb2.VersionId | None, writer: str) -> manifest_pb2.RunRecord:
    """The record of a run to be created; ``run_id`` None gets a name from the time and chance."""
    if run_id is None:
        run_id = time.strftime("run-%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(3)
    return manifest_pb2.RunRecord(
        format=FORMAT,
        run_id=run_id,
        parent=fork_of,
        created_by=writer,
        created_unix_ms=time.time_ns() // 1_000_000,
    )


def check_parent(store: Store, register: Register, fork_of: common_pb2.VersionId) -> None:
    """Raises VersionMissingError unless ``fork_of`` is, or was, a version of this store."""
    found = None
    if register.find(fork_of.run_id) is not None:
        found = Log(store, fork_of.run_id).read(fork_of.number)
    if found is None or not (is_version(found.kind) or found.kind == EXPIRED):
        raise VersionMissingError(
            "version to fork from is not in the store",
            field="fork_of",
            found=f"{fork_of.run_id}/{fork_of.number}",
            do="name a version that weight-sync log lists",
        )
