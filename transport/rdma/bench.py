"""``weight-sync bench rdma``: this transport against the bare library, on this machine.

Owns what is measured and how. Owns no options and no printing (weight_sync.cli.bench). Two processes, UCX over TCP and
shared memory; what is compared alternates in one run, and medians count.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np

from weight_sync.config import load
from weight_sync.errors import DeadlineError
from weight_sync.layout.box import Box
from weight_sync.transport.rdma.lowering import STAGES, Staging, lower
from weight_sync.transport.rdma.memory import MemoryMap
from weight_sync.transport.rdma.nixl import NixlAgent, open_agent
from weight_sync.transport.rdma.onesided import Post, Span
from weight_sync.transport.rdma.pipeline import Pipeline
from weight_sync.transport.rdma.runs import RUN
from weight_sync.transport.rdma.writes import Write

__all__ = ["bench_rdma"]

_GAP = 64  # bytes between tensors, so that nothing merges
_LIMIT_S = 120.0
_LAYERS, _MATRICES = 24, 7


def _engine(pipe: Pipe, nbytes: int, poll_s: float) -> None:
    """Registered memory that looks for notes; says when one has come, and the share of a core it used since asked."""
    agent = open_agent(load({"uri": "rdma://127.0.0.1:1"}), "engine")
    memory = np.zeros(nbytes, np.uint8)
    agent.register([Span(int(memory.ctypes.data), memory.nbytes)])
    pipe.send((agent.metadata(), int(memory.ctypes.data)))
    while True:
        wanted = pipe.recv()
        if wanted is None:
            return
        cpu, wall = time.process_time(), time.perf_counter()
        notes: list[tuple[str, bytes]] = []
        while not notes and time.perf_counter() - wall < _LIMIT_S:
            notes = agent.notes()
            if not notes:
                time.sleep(poll_s)
        pipe.send((time.process_time() - cpu) / (time.perf_counter() - wall))


class _Pair:
    """This process's agent and the engine's."""

    def __init__(self, nbytes: int, poll_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self._process = context.Process(target=_engine, args=(other, nbytes, poll_s), daemon=True)
        self._process.start()
        self.agent: NixlAgent = open_agent(load({"uri": "rdma://127.0.0.1:1"}), "trainer")
        if not self.pipe.poll(_LIMIT_S):
            raise DeadlineError("the engine process does not start", field="bench rdma", expected=f"{_LIMIT_S:g} s")
        metadata, self.address = self.pipe.recv()
        self.peer = self.agent.connect(metadata)
        self.kept: list[Any] = []  # registered memory

    def timed(self, work: Callable[[], None]) -> tuple[float, float]:
        """Seconds until the engine has the note that follows ``work``, and the engine's share of a core meanwhile."""
        self.pipe.send("note")
        began = time.perf_counter()
        work()
        self.agent.notify(self.peer, b"end")
        while not self.pipe.poll(0.0005):
            self.agent.notes()
            if time.perf_counter() - began > _LIMIT_S:
                raise DeadlineError("a transfer has not ended", field="bench rdma", expected=f"{_LIMIT_S:g} s")
        return time.perf_counter() - began, float(self.pipe.recv())

    def staging(self, nbytes: int) -> Staging:
        import torch

        memory = torch.zeros(nbytes, dtype=torch.uint8)
        self.agent.register([Span(memory.data_ptr(), nbytes)])
        self.kept.append(memory)
        return Staging(memory, Span(memory.data_ptr(), nbytes))

    def close(self) -> None:
        self.pipe.send(None)
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
        self.agent.close()


def _post_all(posts: Sequence[Post]) -> None:
    for post in posts:
        done = post.start()
        while not done:
            done = post.done()


def bench_rdma(mebibytes: int, rounds: int, tensors: Sequence[int] = (1, 4, 2000)) -> dict[str, Any]:
    """Dense throughput by number of tensors, the engine's CPU, and the pipeline's efficiency.

    Raises ConfigError without NIXL, DeadlineError when a transfer hangs.
    """
    nbytes = mebibytes << 20
    room = nbytes + _GAP * (max(tensors) + 1)
    pair = _Pair(room, 0.002)
    try:
        import torch

        source = torch.randint(0, 255, (room,), dtype=torch.uint8)
        pair.agent.register([Span(source.data_ptr(), room)])
        pair.kept.append(source)
        rows = [_row(pair, source, nbytes, count, rounds) for count in tensors]
        return {"rows": rows, "pipeline": _pipeline(pair, mebibytes), "model": _fit(rows, nbytes)}
    finally:
        pair.close()


def _row(pair: _Pair, source: Any, nbytes: int, count: int, rounds: int) -> dict[str, Any]:
    size = nbytes // count
    offsets = np.arange(count) * (size + _GAP)
    table = np.empty(count, RUN)
    table["source"], table["target"], table["nbytes"] = source.data_ptr() + offsets, pair.address + offsets, size
    one = table[:1].copy()
    one["nbytes"] = size * count
    began = time.perf_counter()
    bare = pair.agent.prepare(pair.peer, table, None, None, [count])
    single = pair.agent.prepare(pair.peer, one, None, None, [1])
    memory = MemoryMap({"w": Span(pair.address, nbytes + _GAP * (count + 1))})
    kinds = ("U8", "U8", "U8")
    writes = [Write(0, 0, "w", "s", Box.run(at, size), "w", Box.run(at, size), kinds) for at in offsets.tolist()]
    done = lower(pair.agent, writes, {"s": source}, {0: (pair.peer, memory)}, pair.staging, staging_bytes=1 << 20,
                 gather_bytes=0)  # fmt: skip
    prepared = time.perf_counter() - began
    ways: dict[str, Callable[[], None]] = {
        "bare": lambda: _post_all(bare),
        "dense": lambda: Pipeline([("make", 1), ("write", 4)], 1 << 20).run(done.tasks, _LIMIT_S),
        "one": lambda: _post_all(single),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    cpu: list[float] = []
    for number in range(rounds + 1):
        for name, work in ways.items():
            took, share = pair.timed(work)
            if number:  # the first round sets connections up
                seconds[name].append(took)
                if name == "dense":
                    cpu.append(share)
    middle = {name: statistics.median(found) for name, found in seconds.items()}
    moved = size * count
    for post in (*bare, *single):
        post.release()
    done.release()
    return {
        "tensors": count, "bytes": moved, "gib_per_s": moved / middle["dense"] / 2**30,
        "bare_gib_per_s": moved / middle["bare"] / 2**30, "share_of_bare_write": middle["bare"] / middle["dense"],
        "share_of_one_descriptor": middle["one"] / middle["dense"], "engine_cpu": statistics.median(cpu),
        "prepare_s": prepared, "dense_s": middle["dense"], "bare_s": middle["bare"], "one_s": middle["one"],
        "rounds": rounds,
    }  # fmt: skip


def _pipeline(pair: _Pair, mebibytes: int) -> dict[str, Any]:
    """A model of 24 layers, every matrix converted from bf16 to fp8 on its way."""
    import torch

    count = _LAYERS * _MATRICES
    elements = max(1024, min(mebibytes, 128) * (1 << 20) // count)
    source = torch.randn(count * elements).to(torch.bfloat16)
    memory = MemoryMap({"w": Span(pair.address, mebibytes << 20)})
    kinds = ("BF16", "F8_E4M3", "F8_E4M3")
    writes = [
        Write(0, 0, f"matrix {k}", "s", Box.run(k * elements, elements), "w", Box.run(k * elements, elements), kinds)
        for k in range(count)
    ]
    watermark = 16 * (elements + 256)
    done = lower(pair.agent, writes, {"s": source}, {0: (pair.peer, memory)}, pair.staging, staging_bytes=watermark,
                 gather_bytes=0)  # fmt: skip
    ratios, peak, stages = [], 0, {}
    for number in range(4):
        pipeline = Pipeline([(name, 1 if name == "make" else 4) for name in STAGES], watermark)
        began = time.perf_counter()
        pair.timed(lambda: pipeline.run(done.tasks, _LIMIT_S))  # noqa: B023
        total = time.perf_counter() - began
        spent = {name: found.busy for name, found in pipeline.seconds.items()}
        if number:
            ratios.append(total / max(spent.values()))
            peak, stages = max(peak, pipeline.peak), spent
    done.release()
    return {"layers": _LAYERS, "tasks": count, "total_over_slowest_stage": statistics.median(ratios),
            "stage_seconds": stages, "peak_bytes": peak, "watermark": watermark}  # fmt: skip


def _fit(rows: Sequence[dict[str, Any]], nbytes: int) -> dict[str, float]:
    """Constants of `model.Calibration`: what many tensors cost beyond one, and how near one comes to the bare write."""
    first, last = rows[0], rows[-1]
    more = max(1, last["tensors"] - first["tensors"])
    return {
        "share": min(1.0, first["share_of_one_descriptor"]),
        "write_s": max(0.0, (last["dense_s"] - first["dense_s"]) / more),
        "fixed_s": 0.02,
    }
