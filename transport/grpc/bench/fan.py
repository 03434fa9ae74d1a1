"""Fan-out: one version to many simulated replicas, straight from a server or behind relays.

Owns the arrangement and the counting. Owns no replica (fleet.py).
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from weight_sync import Publisher
from weight_sync.config import Config, load
from weight_sync.errors import DeadlineError
from weight_sync.proto.v1 import common_pb2
from weight_sync.transport.grpc.bench.copy import serving
from weight_sync.transport.grpc.bench.fleet import Fleet

__all__ = ["FanRow", "bench_fan"]

_PATIENCE_S = 300.0
_IDLE_S = 4.0
_PAUSE_S = 0.5


@dataclass(frozen=True)
class FanRow:
    """One arrangement, per version, from publish until half a second after the last replica had acknowledged.

    In that time relays pass acknowledgements on; where one was late, ``Acknowledge`` is less than one per direct child.

    Attributes:
        server_cpu_s_per_version: all that the server's process used.
        server_idle_cpu_s_per_s: what it uses while nothing is published and everybody is connected.
        server_cpu_s_per_version_above_idle: the first less the second over ``window_s``, which is long where simulated
            replicas share the machine.
        seconds_to_all: until all replicas had acknowledged, to their relay where there is one.
        server_calls_per_version: of the server, by name, those of the publisher included.
    """

    replicas: int
    relays: int
    versions: int
    patch_bytes: int
    server_bytes_per_version: float
    copies_per_direct_child: float
    server_cpu_s_per_version: float
    server_cpu_s_per_version_above_idle: float
    server_idle_cpu_s_per_s: float
    window_s: float
    seconds_to_all: float
    server_calls_per_version: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        return asdict(self)


def bench_fan(replicas: int, relays: int, versions: int = 3, elements: int = 4 << 20) -> FanRow:
    """``replicas`` on one server, or spread over ``relays`` of it.

    The server is a process of its own. Relays and replicas share this one, which is not counted.
    """
    children = relays or replicas
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weight_sync-bench-")))
        pid, uri, counters = stack.enter_context(serving(folder))
        config = load({"uri": uri, "timeout_s": 120, "calls_per_s": 100_000, "anchor_every": 0, "anchor_share": 0})
        publisher = stack.enter_context(Publisher.open(config))
        state = torch.zeros(elements, dtype=torch.bfloat16)
        publisher.publish({"w": state}, step=0)
        fleets = [stack.enter_context(fleet) for fleet in _fleets(stack, config, folder, replicas, relays)]
        _all(fleets, 0)
        publisher.publish({"w": _changed(state, 1)}, step=1)  # connections and code are warm from here on
        _all(fleets, 1)
        _told(publisher, children, 1)
        idle, began = _cpu_of(pid), time.monotonic()
        time.sleep(_IDLE_S)
        idle = (_cpu_of(pid) - idle) / (time.monotonic() - began)
        used = window = seconds = 0.0
        size = 0
        calls: Counter[str] = Counter()
        sent = counters()["sent_bytes_total"]
        for version in range(2, 2 + versions):
            changed, before, cpu, began = _changed(state, version), _calls(counters()), _cpu_of(pid), time.monotonic()
            publisher.publish({"w": changed}, step=version)
            published = time.monotonic()
            _all(fleets, version)
            seconds += time.monotonic() - published
            time.sleep(_PAUSE_S)  # in which relays pass on the last acknowledgement
            used, window = used + _cpu_of(pid) - cpu, window + time.monotonic() - began
            calls.update(_calls(counters()))
            calls.subtract(before)
            _told(publisher, children, version)
            view = publisher._end.reader().manifest(version).views[0]
            size += sum(ref.size for ref in view.shards if ref.form == common_pb2.FORM_STEP)
        sent = counters()["sent_bytes_total"] - sent
    return FanRow(
        replicas, relays, versions, size // versions, sent / versions, sent / size / children, used / versions,
        (used - idle * window) / versions, idle, window / versions, seconds / versions,
        {name: count / versions for name, count in sorted(calls.items()) if count},
    )  # fmt: skip


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


def _told(publisher: Publisher, children: int, version: int) -> None:
    """Waits until the trainer has heard of ``version`` from every direct child. Raises DeadlineError."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := sum(ack.version.number >= version for ack in publisher.acknowledgements())) < children:
        if time.monotonic() > deadline:
            raise DeadlineError("acknowledgements did not get there", field=f"version {version}",
                                found=f"{found} of {children}")  # fmt: skip
        time.sleep(_PAUSE_S)


def _calls(counters: dict[str, float]) -> dict[str, float]:
    """Calls by name, whatever came of them."""
    calls: Counter[str] = Counter()
    for name, count in counters.items():
        if name.startswith("calls_total{"):
            calls[name.split('"')[1]] += count  # type: ignore[assignment]
    return dict(calls)


def _changed(state: torch.Tensor, version: int) -> torch.Tensor:
    """About one element in a hundred changes."""
    generator = torch.Generator().manual_seed(version)
    at = torch.randint(0, len(state), (len(state) // 100,), generator=generator)
    state[at] += 0.125
    return state


def _cpu_of(pid: int) -> float:
    """CPU seconds of another process so far, to the microsecond: the ticks of /proc are 10 ms."""
    return time.clock_gettime(~pid << 3 | 2)  # how Linux numbers the clock of a process
