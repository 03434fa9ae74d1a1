"""Two trainer ranks write every version straight into the memory of two engines: all processes of one machine."""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.inplace import InPlaceStore
from weight_sync.layout import Layout
from weight_sync.layout.learn import learn_named
from weight_sync.layout.storage import flat_storage
from weight_sync.push import Placed
from weight_sync.tensors import TensorSpec
from weight_sync.testing import MemoryEngine

VERSIONS, RANKS = 3, 2


def model(step: int) -> dict[str, torch.Tensor]:
    """Something that looks like a checkpoint: 8.4 M elements in bf16; every one of them changes at each step."""
    draw = torch.Generator().manual_seed(step)
    names = [f"layers.{i}.{part}.weight" for i in range(2) for part in ("q", "k", "up", "down")]
    return {name: torch.randn(1024, 1024, generator=draw).mul_(0.02).bfloat16() for name in names}


def train(uri: str, meeting: str, rank: int, settings: dict[str, Any]) -> None:
    """One rank of the trainer: its half of every tensor."""
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cpu", (RANKS,))
    with Publisher.open(uri, rdma=settings) as publisher:
        for step in range(VERSIONS):
            shards = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in model(step).items()}
            report = publisher.publish(shards, step=step)
            assert report is not None
            if rank == 0:
                print(f"trainer: version {report.version}, digest {report.digest}", flush=True)
                served: list[int] = []
                while len(served) < 2:  # a training loop would go on; here every version is shown
                    acks = publisher.acknowledgements()
                    served = [1 for ack in acks if ack.HasField("version") and ack.version.number >= report.version]
                    time.sleep(0.01)
        dist.barrier()
    dist.destroy_process_group()


class InPlace(MemoryEngine):
    """An engine that says where its weights lie, so that ``commit: direct`` may write into them."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights, changes_tensors=False)
        table = [TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in sorted(weights.items())]
        self._weights, self._layout = weights, learn_named(weights, table)
        store = InPlaceStore(self._layout, self.storages)
        self.stage, self.commit, self.rollback, self.audit = store.stage, store.commit, store.rollback, store.audit  # type: ignore[method-assign, assignment]

    def storages(self) -> dict[str, torch.Tensor]:
        """As they lie now."""
        return {name: flat_storage(tensor) for name, tensor in self._weights.items()}

    def placed(self) -> Placed:
        """What the transport asks for."""
        layout: Layout = self._layout
        return Placed(layout, self.storages)


def serve(uri: str, name: str, settings: dict[str, Any]) -> None:
    """One engine."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in model(0).items()}
    with Replica.open(uri, InPlace(weights), replica_id=name, rdma=settings) as replica:
        for step in range(VERSIONS):
            report = replica.sync(min_version=step)
            right = all(torch.equal(weights[key], tensor) for key, tensor in model(report.version).items())
            print(f"{name}: {report.path}, {'right' if right else 'WRONG'}, prepared in "
                  f"{report.seconds['prepare'] * 1e3:.0f} ms, fence {report.pause_s * 1e3:.1f} ms", flush=True)  # fmt: skip
            if not right:
                sys.exit(1)


def listening(port: int) -> None:
    """Until the controller is there."""
    deadline = time.monotonic() + 120
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    """Starts all processes and waits for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", choices=("shadow", "direct"), default="shadow")
    settings = {"commit": parser.parse_args().commit}
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        port = plain.getsockname()[1]
    uri = f"rdma://127.0.0.1:{port}"
    start = multiprocessing.get_context("spawn").Process
    meeting = tempfile.mktemp(prefix="weight_sync-")
    ranks = [start(target=train, args=(uri, meeting, rank, settings)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    listening(port)
    engines = [start(target=serve, args=(uri, name, settings)) for name in ("left", "right")]
    for process in engines:
        process.start()
    for process in (*engines, *ranks):
        process.join(300)
    if any(process.exitcode != 0 for process in (*engines, *ranks)):
        sys.exit("a process failed")
    print("trainer and engines agree")


if __name__ == "__main__":
    main()
