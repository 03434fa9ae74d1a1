"""One rank's part of a schedule, as writes that can be carried out and sent.

Owns Write and its message. Owns no choice (schedule.py) and no addresses (runs.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from weight_sync.dtypes import dtype_of
from weight_sync.errors import FormatError
from weight_sync.layout.box import Box
from weight_sync.proto.v1 import rdma_pb2
from weight_sync.transport.rdma.schedule import Schedule

__all__ = ["Write", "decode_writes", "encode_writes", "hash_of", "writes_of"]

_MOST_DIMENSIONS = 32


@dataclass(frozen=True, slots=True)
class Write:
    """One write.

    Attributes:
        rank: of the destination.
        group: mesh group.
        tensor: for error messages.
        source, target: keys of the storages.
        place, target_place: boxes of elements in them, of equal sizes.
        dtypes: of the source's storage, of the tensor, of the destination's storage: bits are converted along this way.
    """

    rank: int
    group: int
    tensor: str
    source: str
    place: Box
    target: str
    target_place: Box
    dtypes: tuple[str, str, str]

    @property
    def nbytes(self) -> int:
        """Bytes that cross the link."""
        return self.place.count * dtype_of(self.dtypes[2]).width

    @property
    def converts(self) -> bool:
        """True when the bits have to be made before they are written."""
        return len(set(self.dtypes)) > 1


def writes_of(schedule: Schedule, rank: int) -> Iterator[Write]:
    """What ``rank`` writes, in the order of the schedule."""
    sources, targets = schedule.sources, schedule.targets
    for row in schedule.writes[schedule.source_ranks == rank].tolist():
        group, atom_index, source_index, target_index, choice = row
        atom = schedule.atoms[atom_index]
        _, part, _, storage, base = sources.holdings[source_index].tolist()
        tensor, target_part, target_rank, target_storage, target_base = targets.holdings[target_index].tolist()
        spec = targets.tensors[tensor]
        dtypes = (sources.parts[part].dtype or spec.dtype, spec.dtype, targets.parts[target_part].dtype or spec.dtype)
        yield Write(
            target_rank, group, spec.name, sources.storages[storage][1], _moved(atom.places[choice], base),
            targets.storages[target_storage][1], _moved(atom.place, target_base), dtypes,
        )  # fmt: skip


def _moved(box: Box, base: int) -> Box:
    return Box(box.offset + base, box.sizes, box.strides)


# --- as a message ---


def encode_writes(writes: Iterable[Write]) -> rdma_pb2.Writes:
    """As a message; names are spelled once."""
    message = rdma_pb2.Writes()
    names: dict[str, int] = {}

    def number(name: str) -> int:
        if name not in names:
            names[name] = len(names)
            message.names.append(name)
        return names[name]

    for item in writes:
        message.writes.add(
            rank=item.rank, group=item.group, tensor=number(item.tensor), source=number(item.source),
            target=number(item.target), dtypes=[number(name) for name in item.dtypes], sizes=item.place.sizes,
            offset=item.place.offset, strides=item.place.strides,
            target_offset=item.target_place.offset, target_strides=item.target_place.strides,
        )  # fmt: skip
    return message


def decode_writes(message: rdma_pb2.Writes) -> list[Write]:
    """From a message. Raises FormatError on numbers that lead nowhere; whether boxes fit is for their user to check."""
    names = message.names
    out: list[Write] = []
    for item in message.writes:
        sizes = tuple(item.sizes)
        indices = (item.tensor, item.source, item.target, *item.dtypes)
        if len(item.dtypes) != 3 or max(indices) >= len(names) or len(sizes) > _MOST_DIMENSIONS:
            raise FormatError("malformed write", field="writes", found=len(out), expected="names and three dtypes")
        if len(item.strides) != len(sizes) or len(item.target_strides) != len(sizes):
            raise FormatError("write has unequal ranks", field="strides", found=len(item.strides), expected=len(sizes))
        a, b, c = (names[i] for i in item.dtypes)
        out.append(
            Write(
                item.rank, item.group, names[item.tensor], names[item.source],
                Box(item.offset, sizes, tuple(item.strides)), names[item.target],
                Box(item.target_offset, sizes, tuple(item.target_strides)), (a, b, c),
            )
        )  # fmt: skip
    return out


def hash_of(message: rdma_pb2.Writes) -> bytes:
    """16 bytes that tell parts of schedules apart."""
    return hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()


def ranks_written(schedule: Schedule) -> list[tuple[int, int]]:
    """(source rank, destination rank) pairs that have writes, ascending."""
    pairs = np.stack([schedule.source_ranks, schedule.target_ranks], axis=1)
    return [(a, b) for a, b in np.unique(pairs, axis=0).tolist()] if len(pairs) else []
