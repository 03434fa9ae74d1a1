"""What the RDMA tests share: a model with dense, fused and expert weights, engines that hold it in their own way, ranks.

Owns no claim. An engine of several ranks is one process for each, driven over pipes as hosts do it.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from loop import Child, digest_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from waiting import until

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.inplace import InPlaceStore
from weight_sync.codec.digest import Digest, header_digest
from weight_sync.config import Config
from weight_sync.errors import WeightSyncError
from weight_sync.layout.box import Box
from weight_sync.layout.link import row_major
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.ports import DensePiece, Engine, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, replica_pb2
from weight_sync.push import LAND, Placed, Receiver
from weight_sync.tensors import TensorSpec, sorted_table
from weight_sync.transport.rdma.receiver import LocalReceiver

Say = Callable[[str], None]
HIDDEN, EXPERTS, LAYERS = 32, 4, 2


def _shapes() -> dict[str, tuple[tuple[int, ...], str]]:
    """Name to shape and how engines split it."""
    found: dict[str, tuple[tuple[int, ...], str]] = {"embed": ((48, HIDDEN), "rows"), "norm": ((HIDDEN,), "")}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        found |= {
            at + "q_proj": ((HIDDEN, HIDDEN), "rows"), at + "k_proj": ((16, HIDDEN), "rows"),
            at + "v_proj": ((16, HIDDEN), "rows"), at + "o_proj": ((HIDDEN, HIDDEN), "columns"), at + "norm": ((HIDDEN,), ""),
        }  # fmt: skip
        for expert in range(EXPERTS):
            found |= {f"{at}experts.{expert}.up": ((24, HIDDEN), ""), f"{at}experts.{expert}.down": ((HIDDEN, 24), "")}
    return found


SHAPES = _shapes()
TABLE = sorted_table(TensorSpec(name, "BF16", shape) for name, (shape, _) in SHAPES.items())


def state(step: int, scale: int = 1) -> dict[str, torch.Tensor]:
    """The state after ``step``: every tensor changes. ``scale`` multiplies the rows."""
    generator = torch.Generator().manual_seed(1000 + step)
    return {
        name: torch.randn((shape[0] * scale, *shape[1:]), generator=generator).to(torch.bfloat16)
        for name, (shape, _) in SHAPES.items()
    }


def _fused(name: str) -> str:
    for piece in ("q_proj", "k_proj", "v_proj"):
        if name.endswith(piece):
            return name.replace(piece, "qkv")
    head, found, tail = name.partition(".experts.")
    return f"{head}.experts.{tail.split('.')[1]}" if found else name


def engine_layout(rank: int, tp: int) -> Layout:
    """Rows and columns split, norms on all ranks, qkv fused, experts stacked and split over the ranks."""
    placements: list[Placement] = []
    sizes: dict[str, int] = {}
    for spec in TABLE:
        split = SHAPES[spec.name][1]
        expert = int(spec.name.split(".")[3]) if ".experts." in spec.name else None
        if expert is not None and expert * tp // EXPERTS != rank:
            continue
        whole = row_major(spec.shape)
        local, offset = list(spec.shape), 0
        if split:
            dim = 0 if split == "rows" else 1
            local[dim] //= tp
            offset = rank * local[dim] * whole.strides[dim]
        key = _fused(spec.name)
        base, count = sizes.get(key, 0), int(np.prod(local))
        place = Box(base, tuple(local), row_major(local).strides)
        placements.append(Placement(spec.name, Box(offset, tuple(local), whole.strides), key, place))
        sizes[key] = base + count
    return Layout(TABLE, tuple(placements), {key: StorageSpec(n, "BF16") for key, n in sizes.items()})


def storages(layout: Layout) -> dict[str, torch.Tensor]:
    return {key: torch.zeros(spec.elements, dtype=torch.bfloat16) for key, spec in layout.storages.items()}


def right(layout: Layout, held: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether storages hold exactly what these tensors have there."""
    for item in layout.placements:
        flat = tensors[item.tensor].reshape(-1).view(torch.int16)
        want = flat.as_strided(item.coords.sizes, item.coords.strides, item.coords.offset)
        found = held[item.storage].view(torch.int16).as_strided(item.place.sizes, item.place.strides, item.place.offset)
        if not torch.equal(want, found):
            return False
    return True


class Shard1:
    """One rank of an engine: weights, store and receiver."""

    def __init__(self, config: Config, rank: int, tp: int) -> None:
        self.layout = engine_layout(rank, tp)
        self.weights = storages(self.layout)
        self.store = InPlaceStore(self.layout, lambda: self.weights, partial=tp > 1)
        self.placed = Placed(self.layout, lambda: self.weights)
        self.receiver = LocalReceiver(config, self.placed)
        self.held = frozenset(item.tensor for item in self.layout.placements)
        self.rank, self.tp = rank, tp

    def call(self, verb: str, *given: Any) -> Any:
        return (
            getattr(self, "do_" + verb, None)(*given)
            if hasattr(self, "do_" + verb)
            else getattr(self.receiver, verb)(*given)
        )

    def do_audit(self) -> dict[str, Digest]:
        self.store.audit()
        return {
            name: part
            for name, part in self.store.parts.items()
            if self.rank == 0 or SHAPES[name][1] or ".experts." in name
        }

    def do_stage(self, target: bytes, number: int) -> None:
        update = Update(common_pb2.VersionId(run_id="r", number=number), Digest(), TABLE, (), self.receiver.pieces, (), True,
                        None)  # type: ignore[arg-type]  # fmt: skip
        self.store.stage(update)

    def do_commit(self) -> dict[str, Digest]:
        self.store.commit()
        return self.do_audit()

    def do_rollback(self) -> dict[str, Digest]:
        self.store.rollback()
        return self.do_audit()

    def do_right(self, step: int) -> bool:
        return right(self.layout, self.weights, state(step))


def _serve(pipe: Connection, keys: dict[str, Any], rank: int, tp: int) -> None:
    torch.set_num_threads(1)
    shard = Shard1(Config(**keys), rank, tp)
    while True:
        verb, given = pipe.recv()
        if verb == "end":
            os._exit(0)
        try:
            found = shard.call(verb, *given)
            pipe.send(("ok", list(found) if isinstance(found, Iterator) else found))
        except WeightSyncError as error:
            pipe.send(("error", str(error)))


class Remote(Receiver):
    """A rank in another process."""

    def __init__(self, keys: dict[str, Any], rank: int, tp: int) -> None:
        self._pipe, other = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(other, keys, rank, tp), daemon=True
        )
        self.process.start()
        other.close()

    def call(self, verb: str, *given: Any) -> Any:
        self._pipe.send((verb, given))
        if not self._pipe.poll(60):
            raise AssertionError(f"rank does not answer {verb}")
        kind, found = self._pipe.recv()
        assert kind == "ok", found
        return found

    def offer(self, rank: int, world_size: int) -> bytes:
        return self.call("offer", rank, world_size)  # type: ignore[no-any-return]

    def expect(self, going: bytes) -> None:
        self.call("expect", going)

    def arrived(self, timeout: float) -> None:
        self.call("arrived", timeout)

    def abort(self, nonce: int, error: WeightSyncError) -> None:
        """It waits for its limit."""

    def pieces(self) -> Iterator[DensePiece]:
        return iter(())

    def close(self) -> None:
        """The process goes with its parent."""


class TpEngine(Engine):
    """An engine over ``tp`` ranks, the first of which is in this process."""

    def __init__(self, keys: dict[str, Any], tp: int) -> None:
        self.remote = [Remote(keys, rank, tp) for rank in range(1, tp)]  # before anything of NIXL is here
        self.near = Shard1(Config(**keys), 0, tp)
        self.tp = tp
        self.announced: int | None = None
        self._landing: Callable[[], None] | None = None
        self._update: Update | None = None

    def all(self, verb: str, *given: Any) -> list[Any]:
        return [self.near.call(verb, *given), *(rank.call(verb, *given) for rank in self.remote)]

    def _total(self, found: Sequence[dict[str, Digest]]) -> Digest:
        return Digest.sum([*map(header_digest, TABLE), *(part for parts in found for part in parts.values())])

    def placed(self) -> Placed | None:
        return self.near.placed if self.tp == 1 else None

    def receivers(self) -> Sequence[Receiver]:
        return () if self.tp == 1 else (self.near.receiver, *self.remote)

    def describe(self) -> replica_pb2.EngineDescription:
        message = replica_pb2.EngineDescription(engine_id="tp", kind="test", view="default", complete=True,
                                                tensors=[spec.to_proto() for spec in TABLE])  # fmt: skip
        message.digest.CopyFrom(self.audit().to_proto())
        return message

    def audit(self) -> Digest:
        return self._total(self.all("audit"))

    def stage(self, update: Update) -> None:
        self._landing, self._update = update.extra.get(LAND), update
        if self.tp == 1:
            self.near.store.stage(update)
        elif self._landing is None:
            self.all("stage", b"", update.target.number)

    def commit(self) -> Digest:
        if self.tp == 1:
            return self.near.store.commit()
        if self._landing is not None:
            self._landing()
            return self.audit()
        return self._total(self.all("commit"))

    def rollback(self) -> Digest:
        if self.tp == 1:
            return self.near.store.rollback()
        return self._total(self.all("rollback"))

    def pause(self, mode: PauseMode, timeout: float) -> None:
        """Nobody asks anything."""

    def resume(self) -> None:
        """Nor here."""

    def clear_caches(self) -> None:
        """There are none."""

    def announce(self, version: common_pb2.VersionId) -> None:
        self.announced = version.number

    def close(self) -> None:
        """Nothing is held."""


# --- processes ---


def free_port() -> int:
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        return int(plain.getsockname()[1])


def keys(port: int, **given: Any) -> dict[str, Any]:
    """Configuration of all sides."""
    return {
        "uri": f"rdma://127.0.0.1:{port}", "timeout_s": 60, "threads": 1, "anchor_share": 0, "poll_s": 0.05,
        "fence_s": 20, **given,
    }  # fmt: skip


def train(say: Say, given: dict[str, Any], meeting: str, rank: int, world: int, steps: int, wanted: int) -> None:
    """A trainer rank: publishes ``steps`` versions, each once ``wanted`` replicas serve the one before.

    With ``rdma.barrier`` rank 0 alone holds the norms, so that there are two meshes.
    """
    if world > 1:
        dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=90))
    try:
        mesh = init_device_mesh("cpu", (world,)) if world > 1 else None
        with Publisher.open(Config(**given)) as publisher:
            for step in range(steps):
                tensors: dict[str, Any] = state(step)
                if mesh is not None:
                    whole = {n: t for n, t in tensors.items() if n.endswith("norm") and given["rdma"].get("barrier")}
                    tensors = {
                        name: distribute_tensor(tensor, mesh, [Shard(0)])
                        for name, tensor in tensors.items() if name not in whole
                    } | (whole if rank == 0 else {})  # fmt: skip
                report = publisher.publish(tensors, step=step)
                assert report is not None and report.digest == digest_of(state(step))
                say(f"published {report.version}")
                if rank == 0:
                    wait_acks(publisher, report.version, wanted)
            if world > 1:
                dist.barrier()
    except BaseException as error:
        say(f"died of {type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def wait_acks(publisher: Publisher, number: int, wanted: int, limit: float = 45) -> None:
    """Until so many replicas have acknowledged ``number``."""

    def there() -> bool:
        acks = [m for m in publisher.acknowledgements() if m.state in (2, 6) and m.version.number >= number]
        return len(acks) >= wanted

    until(there, f"{wanted} replicas at version {number}", limit)


def serve(say: Say, given: dict[str, Any], name: str, tp: int, steps: int) -> None:
    """An engine that takes ``steps`` versions and says for each whether its bits are right."""
    engine = TpEngine(given, tp)
    connected(given)
    try:
        with Replica.open(Config(**given), engine, replica_id=name) as replica:
            for step in range(steps):
                report = replica.sync(min_version=step)
                fine = all(engine.all("right", report.version))
                say(f"{name} {report.version} {fine} {report.path}")
    except BaseException as error:
        say(f"died of {type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


def connected(given: dict[str, Any], limit: float = 45) -> None:
    """Until the controller listens."""
    port = int(given["uri"].rpartition(":")[2])

    def listens() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    until(listens, "the controller", limit)


def trainers(
    folder: Path, given: dict[str, Any], world: int, steps: int, wanted: int, crash: Mapping[int, str] = {}
) -> list[Child]:
    """A trainer of ``world`` ranks."""
    meeting = tempfile.mktemp(dir=folder)
    return [
        Child(folder, train, given, meeting, rank, world, steps, wanted, crash_at=crash.get(rank, ""))
        for rank in range(world)
    ]
