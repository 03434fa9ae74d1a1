"""Shards as objects: stored with their hashes, read by range.

Owns the way between ``ShardBytes``/``ShardRef`` and objects. Owns no content: what a shard holds is the codec's.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from blake3 import blake3

from weight_sync.config import crash_point
from weight_sync.errors import CorruptionError, VersionExpiredError
from weight_sync.ports import OpenedRun, ShardBytes
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.transport.file import keys
from weight_sync.transport.file.store import Store

__all__ = ["read_shard", "store_shard"]

_SLICE = 8 << 20


def store_shard(store: Store, run: OpenedRun, number: int, shard: ShardBytes) -> manifest_pb2.ShardRef:
    """Stores ``shard`` under a fresh name, hashing what is sent; durable on return."""
    crash_point("put_shard:before")
    key = keys.shard(number, run.epoch, shard.rank, shard.label, secrets.token_hex(8))
    stream = _HashedStream([shard.head, *shard.body])
    store.upload(keys.under(run.run_id, key), shard.size, stream.chunks)
    crash_point("put_shard:after")
    return manifest_pb2.ShardRef(
        object=key,
        size=shard.size,
        blake3=stream.digest(),
        head_size=len(shard.head),
        head_blake3=blake3(shard.head).digest(),
        rank=shard.rank,
        form=shard.form,
    )


def read_shard(store: Store, run_id: str, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
    """``length`` bytes from ``offset``, unchecked but for their number.

    Raises VersionExpiredError when the object is gone, CorruptionError when it is shorter than ``ref`` says or the
    range leaves it, FormatError when ``ref`` points outside the run.
    """
    name = store.name(keys.under(run_id, keys.check_object(ref.object, None, f"a manifest of run {run_id}")))
    if offset < 0 or length < 0 or offset + length > ref.size:
        raise CorruptionError(
            "range leaves the shard", field=name, found=f"[{offset}, {offset + length})", expected=f"[0, {ref.size})"
        )
    if length == 0:
        return memoryview(b"")
    data = store.read(keys.under(run_id, ref.object), offset, length)
    if data is None:
        raise VersionExpiredError(
            "shard is gone",
            field=name,
            do=f"plan again from the log; if version {keys.number_in(ref.object)} has not expired there, "
            "somebody deleted the object",
        )
    if len(data) < length:
        raise CorruptionError(
            "shard is shorter than its manifest says",
            field=name,
            found=f"{offset + len(data)} bytes",
            expected=f"{ref.size} bytes",
            do="restore the object from a copy of the store, or wait for the next anchor",
        )
    return data


class _HashedStream:
    """The bytes of some buffers in slices, from the start at each call, with the hash of what the last call gave."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = parts
        self._hash = blake3()

    def chunks(self) -> Iterator[memoryview]:
        self._hash = blake3()
        for part in self._parts:
            flat = memoryview(part).cast("B")
            for start in range(0, len(flat), _SLICE):
                piece = flat[start : start + _SLICE]
                self._hash.update(piece)
                yield piece

    def digest(self) -> bytes:
        return self._hash.digest()
