"""Entries as a publisher writes them: made, checked, put once, and lost to a rival with a reason.

Owns the compare-and-swap on one number. Owns no state: who has seen what is publisher_end.py's.
"""

from __future__ import annotations

import secrets
import time

from weight_sync.errors import EpochFencedError, InputError, StoreUnavailableError
from weight_sync.ports import OpenedRun
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.transport.file import keys
from weight_sync.transport.file.log import FORMAT, Log
from weight_sync.transport.file.store import Store
from weight_sync.version import is_version, kind_name

__all__ = ["check_own", "fenced", "new_entry", "put_entry"]


def new_entry(
    run_id: str, number: int, epoch: int, kind: manifest_pb2.EntryKind, writer: str, reason: str
) -> manifest_pb2.VersionManifest:
    """An entry that is no version: EPOCH, ABORTED."""
    return manifest_pb2.VersionManifest(
        format=FORMAT,
        run_id=run_id,
        number=number,
        epoch=epoch,
        kind=kind,
        reason=reason,
        writer=writer,
        created_unix_ms=time.time_ns() // 1_000_000,
        nonce=secrets.token_bytes(16),
    )


def check_own(manifest: manifest_pb2.VersionManifest, run: OpenedRun) -> None:
    """Raises InputError unless ``manifest`` is a version that the publisher of ``run`` may commit."""
    found = (manifest.format, manifest.run_id, manifest.epoch)
    if found != (FORMAT, run.run_id, run.epoch):
        raise InputError(
            "manifest is not of the open run",
            field="format, run_id, epoch",
            found=found,
            expected=(FORMAT, run.run_id, run.epoch),
        )
    if not is_version(manifest.kind):
        raise InputError("not a version", field="kind", found=kind_name(manifest.kind), expected="ANCHOR or PATCH")
    if len(manifest.nonce) != 16:
        raise InputError("bad nonce", field="nonce", found=f"{len(manifest.nonce)} bytes", expected="16 random bytes")


def put_entry(store: Store, log: Log, manifest: manifest_pb2.VersionManifest) -> bool:
    """Put-if-absent; True when the entry there is ours, be it from an earlier try whose answer was lost.

    Raises StoreUnavailableError when the store refuses the put and has no entry, as S3 may while a rival puts.
    """
    if store.create(keys.entry(log.run_id, manifest.number), manifest.SerializeToString()):
        return True
    found = log.read(manifest.number)
    if found is None:
        raise StoreUnavailableError(
            "conditional put was refused, but nothing is there", field=log.name(manifest.number), do="try again"
        )
    return found.nonce == manifest.nonce


def fenced(winner: manifest_pb2.VersionManifest, name: str, run: OpenedRun) -> EpochFencedError:
    """The error of a publisher that finds an entry of another one, called ``name``, where its own should go."""
    return EpochFencedError(
        f"another publisher owns run {run.run_id}",
        field=name,
        found=f"{kind_name(winner.kind)} {winner.number} of epoch {winner.epoch} by {winner.writer or 'unknown'}",
        expected=f"epoch {run.epoch}",
        do="stop this publisher; the other one goes on",
    )
