"""Imported once by the process that the tests' children are forked from: they find all kernels compiled.

Starts no thread and opens no store, since neither survives a fork.
"""

from __future__ import annotations

import torch.distributed.fsdp
import torch.distributed.tensor

import loop
from weight_sync.codec.apply import apply_changes, restore_changes
from weight_sync.codec.digest import state_digest
from weight_sync.codec.fold import fold_changes
from weight_sync.codec.patch import DiffPiece, encode_patch
from weight_sync.layout.box import Box
from weight_sync.proto.v1 import common_pb2


def warm() -> None:
    old = dict(loop.entries(loop.model(0)))
    new = dict(loop.entries(loop.model(1)))
    pieces = [
        DiffPiece(spec, Box.run(0, spec.elements), lambda n=name: old[n][1], lambda a, b, n=name: new[n][1][a:b])  # type: ignore[misc]
        for name, (spec, _) in new.items()
        if spec.elements
    ]
    frames = encode_patch(pieces, [common_pb2.FORM_STEP], 1).frames[common_pb2.FORM_STEP]
    changes = [item for frame in frames for item in frame.changes()]
    for item in fold_changes([changes, changes]):
        bits = old[item.spec.name][1]
        restore_changes(item, bits, item.coords, apply_changes(item, bits, item.coords)[0])
    state_digest(old.values())


assert torch.distributed.tensor and torch.distributed.fsdp  # imported for the children
warm()
