"""Fan-out: one version to many simulated replicas, straight from a server or behind relays.

Owns the arrangement and the counting. Owns no replica (fleet.py).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weight_sync import Publisher
from weight_sync.config import Config, load
from weight_sync.proto.v1 import common_pb2
from weight_sync.transport.grpc.bench.copy import serving
from weight_sync.transport.grpc.bench.fleet import Fleet

__all__ = ["FanRow", "bench_fan"]

_PATIENCE_S = 300.0


@dataclass(frozen=True)
class FanRow:
    """One arrangement: bytes and CPU seconds of the publisher's side per version, seconds until all had acknowledged."""

    replicas: int
    relays: int
    versions: int
    patch_bytes: int
    server_bytes_per_version: float
    copies_per_direct_child: float
    server_cpu_s_per_version: float
    seconds_to_all: float

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        return asdict(self)


def bench_fan(replicas: int, relays: int, versions: int = 3, elements: int = 4 << 20) -> FanRow:
    """``replicas`` on one server, or spread over ``relays`` of it.

    The server is a process of its own, and each relay with its replicas, too, unless there are many; then relays share
    this process, which is not counted.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weight_sync-bench-")))
        pid, uri, metrics = stack.enter_context(serving(folder))
        config = load({"uri": uri, "timeout_s": 120, "calls_per_s": 100_000, "anchor_every": 0, "anchor_share": 0})
        publisher = stack.enter_context(Publisher.open(config))
        state = torch.zeros(elements, dtype=torch.bfloat16)
        publisher.publish({"w": state}, step=0)
        fleets = [stack.enter_context(fleet) for fleet in _fleets(stack, config, folder, replicas, relays)]
        _all(fleets, 0)
        publisher.publish({"w": _changed(state, 1)}, step=1)  # connections and code are warm from here on
        _all(fleets, 1)
        sent, used, seconds, size = metrics("sent_bytes_total"), _cpu_of(pid), 0.0, 0
        for version in range(2, 2 + versions):
            publisher.publish({"w": _changed(state, version)}, step=version)
            began = time.monotonic()
            _all(fleets, version)
            seconds += time.monotonic() - began
            view = publisher._end.reader().manifest(version).views[0]
            size += sum(ref.size for ref in view.shards if ref.form == common_pb2.FORM_STEP)
        time.sleep(0.5)  # the relays' last acknowledgements
        sent, used = metrics("sent_bytes_total") - sent, _cpu_of(pid) - used
    children = relays or replicas
    return FanRow(replicas, relays, versions, size // versions, sent / versions, sent / size / children,
                  used / versions, seconds / versions)  # fmt: skip


def _fleets(stack: ExitStack, config: Config, folder: Path, replicas: int, relays: int) -> Iterator[Fleet]:
    from weight_sync.transport.grpc import GrpcTransport

    if not relays:
        yield Fleet(config, replicas)
        return
    for k in range(relays):
        mine = config.replace(listen="127.0.0.1:0", replica_id=f"relay-{k}", cache_dir=str(folder / f"relay-{k}"))
        relay = GrpcTransport(mine).relay()
        stack.callback(relay.close)
        address = relay.start()
        count = replicas * (k + 1) // relays - replicas * k // relays
        if count:
            yield Fleet(config.replace(uri=str(address)), count, f"sim-{k}")


def _all(fleets: list[Fleet], version: int) -> None:
    for fleet in fleets:
        fleet.wait(version, _PATIENCE_S)


def _changed(state: torch.Tensor, version: int) -> torch.Tensor:
    """About one element in a hundred changes."""
    generator = torch.Generator().manual_seed(version)
    at = torch.randint(0, len(state), (len(state) // 100,), generator=generator)
    state[at] += 0.125
    return state


def _cpu_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
