"""Anchors by reference: where the bits of a run's base lie, and reading them, each tensor against its digest.

Owns the check that a checkpoint is the base. Owns no choice of the folder (history.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest, digest_tensor
from weight_sync.errors import WrongBaseError
from weight_sync.layout.box import Box
from weight_sync.ports import DensePiece
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.tensors import TensorSpec

__all__ = ["base_of", "base_pieces"]


def base_of(manifest: manifest_pb2.VersionManifest, view: str | None) -> manifest_pb2.BaseReference:
    """Where the bits of an anchor by reference are, of one view; empty when it names none."""
    own = [part.base for part in manifest.views if part.HasField("base") and view in (None, part.name)]
    return own[0] if own else manifest.base


def base_pieces(checkpoint: Checkpoint, view: manifest_pb2.ViewManifest, threads: int) -> Iterator[DensePiece]:
    """A checkpoint's tensors as pieces, each compared with the version's digest of it. Raises WrongBaseError."""
    for entry in view.tensors:
        spec = TensorSpec.from_proto(entry.spec)
        found = checkpoint.spec(spec.name) if spec.name in checkpoint else None
        if found is None or _plain(found) != _plain(spec):
            raise _wrong_base(checkpoint, spec, found, spec)
        bits = checkpoint.bits(spec.name)
        digest, expected = digest_tensor(spec, bits, threads), Digest.from_proto(entry.digest)
        if digest != expected:
            raise _wrong_base(checkpoint, spec, digest.hex(), expected.hex())
        if spec.elements:
            yield DensePiece(spec, Box.run(0, spec.elements), bits)


def _wrong_base(checkpoint: Checkpoint, spec: TensorSpec, found: object, expected: object) -> WrongBaseError:
    return WrongBaseError(
        "the checkpoint is not the run's base", field=spec.name, found=found, expected=expected,
        do=f"set base to the checkpoint that the run started from, not {checkpoint.path}",
    )  # fmt: skip


def _plain(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtype, spec.shape
