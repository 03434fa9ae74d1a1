"""Patches in the compact form, for readers that hold every old bit: a third fewer bytes, decoded with what is held.

Owns the decision whether a reader may take it, and the way from held bits to what a frame needs. Owns no fetch (history.py)
and no coding (codec/compactform.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weight_sync.codec.frame import FrameBox
from weight_sync.ports import Engine
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    from weight_sync.config import Config

__all__ = ["Bits", "compact_way", "held_bits", "old_of"]

Bits: TypeAlias = Callable[[TensorSpec], npt.NDArray[Any]]
"""All elements of a tensor as they are served now: (elements,), unsigned of the element's width. May be a view."""


def held_bits(engine: Engine, config: Config) -> Bits | None:
    """Of an engine that can tell them (its method ``bits``), unless ``take: step`` forbids it. Asked at the first use."""
    method: Callable[[], Bits] | None = getattr(engine, "bits", None)
    if method is None or config.take != "compact":
        return None
    ask, told = method, list[Bits]()

    def bits(spec: TensorSpec) -> npt.NDArray[Any]:
        if not told:
            told.append(ask())
        return told[0](spec)

    return bits


def compact_way(
    manifest: manifest_pb2.VersionManifest, view: manifest_pb2.ViewManifest, have: int | None,
    held: Sequence[TensorSpec] | None, table: Sequence[TensorSpec],
) -> list[manifest_pb2.ShardRef]:  # fmt: skip
    """The shards that lead from ``have`` to this version in the compact form; [] when another form has to. Pure.

    Only from the parent, whose bits frames are made of, and only while no tensor travels whole: those are in the step form's
    shards. Every rank that stored the one form stored the other.
    """
    if have is None or not manifest.HasField("parent") or manifest.parent != have or held is None:
        return []
    if tuple(held) != tuple(table):
        return []
    compact = [ref for ref in view.shards if ref.form == common_pb2.FORM_COMPACT]
    ranks = {ref.rank for ref in view.shards if ref.form == common_pb2.FORM_STEP}
    return compact if compact and {ref.rank for ref in compact} == ranks else []


def old_of(bits: Bits) -> Callable[[FrameBox], npt.NDArray[Any]]:
    """What `decode_frame` asks for: the elements of a box before the change, contiguous."""

    def old(box: FrameBox) -> npt.NDArray[Any]:
        found = np.ascontiguousarray(box.coords.view(bits(box.spec))).reshape(-1)
        return found if found.flags.writeable else found.copy()  # else kernels are compiled anew, for read-only arrays

    return old
