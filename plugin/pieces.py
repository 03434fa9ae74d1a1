"""Whole tensors out of pieces, and changes out of an object that a transport's end offered for several versions.

Owns the putting together. Owns no fetch and no way through the log (history.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from weight_sync.codec.frame import FrameBox
from weight_sync.errors import CorruptionError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece, Folded, ReplicaEnd
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    from weight_sync.history import History

__all__ = ["assemble", "unfold"]


def unfold(
    history: History, offered: Folded, manifest: manifest_pb2.VersionManifest, view: manifest_pb2.ViewManifest,
    table: Sequence[TensorSpec], old: Callable[[FrameBox], NDArray[Any]] | None = None,
) -> tuple[list[Changes], dict[str, DensePiece]]:  # fmt: skip
    """Changes and whole tensors of an object that the end made, or chose from the store; ``old`` for a compact one."""
    end = cast(ReplicaEnd, _Offered(offered.data))
    ref = offered.stored
    if ref is None:
        size = len(offered.data)
        ref = manifest_pb2.ShardRef(object="fold", size=size, head_size=size, form=common_pb2.FORM_STEP,
                                    head_blake3=blake3(offered.data).digest())  # fmt: skip
    elif ref not in view.shards or blake3(offered.data).digest() != ref.blake3:
        raise CorruptionError("object is not the shard of the version", field=ref.object, found=len(offered.data),
                              expected=f"{ref.size} bytes of version {manifest.number}")  # fmt: skip
    inner = type(history)(end, history.view, history.threads)
    head = inner.head(manifest, ref)
    changes = inner.decoded(manifest.number, [(ref, head)], None, old)
    whole = assemble(inner.dense(manifest.number, [(ref, head)]))
    alive = set(table)
    return [item for item in changes if item.spec in alive], {k: p for k, p in whole.items() if p.spec in alive}


class _Offered:
    """An object in memory, read like a stored one."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def read(self, ref: manifest_pb2.ShardRef, offset: int, length: int) -> memoryview:
        return self._data[offset : offset + length]


def assemble(pieces: Iterable[DensePiece]) -> dict[str, DensePiece]:
    """Whole tensors from the pieces of their ranks. Raises CorruptionError when a tensor is not covered exactly once."""
    parts: dict[str, list[DensePiece]] = {}
    for piece in pieces:
        parts.setdefault(piece.spec.name, []).append(piece)
    out: dict[str, DensePiece] = {}
    for name, found in parts.items():
        spec = found[0].spec
        if len(found) == 1 and found[0].coords == Box.run(0, spec.elements):
            out[name] = found[0]
            continue
        if sum(piece.coords.count for piece in found) != spec.elements or len({piece.spec for piece in found}) != 1:
            raise CorruptionError("pieces do not make up their tensor", field=name, found=len(found), expected=spec)
        bits = np.empty(spec.elements, spec.type.uint)
        for piece in found:
            piece.coords.view(bits)[...] = piece.bits.reshape(piece.coords.sizes)
        out[name] = DensePiece(spec, Box.run(0, spec.elements), bits)
    return out
