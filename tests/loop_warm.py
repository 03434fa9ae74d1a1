"""Imported once by the process that the tests' children are forked from: they find all kernels compiled.

Starts no thread and opens no store, since neither survives a fork.
"""

from __future__ import annotations

import loop
import torch.distributed.fsdp
import torch.distributed.tensor

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


def warm_ranks() -> None:
    """The first DTensor of a process imports a lot; here over a group of one that exists on paper."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    torch.distributed.tensor.distribute_tensor(
        torch.zeros(4, 4), mesh, [torch.distributed.tensor.Shard(0)], src_data_rank=None
    )
    torch.distributed.fsdp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
    torch.distributed.destroy_process_group()


warm()
warm_ranks()
