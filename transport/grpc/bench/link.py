"""Publish to acknowledged over a long thin link, against bare TCP that moves the same bytes over as many connections.

Owns the order of the measurement: warm up, idle, measure, on both sides alike. Owns no wire: benchmarks/link/ emulates
one, in a checkout, for root.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from weight_sync.errors import InputError, StoreError

__all__ = ["LinkRow", "bench_link", "why_not"]

_EMULATOR = Path("benchmarks/link/emulator.py")
_WORKER = "weight_sync.transport.grpc.bench.link_worker"
_LIMIT_S = 300.0


@dataclass(frozen=True)
class LinkRow:
    """One arrangement. Times in seconds; ``*_each`` are the measured rounds, the others their medians.

    ``bound_s`` is 1.3 times bare TCP, plus one round trip.
    """

    what: str
    rate_mbit_s: float
    rtt_ms: float
    loss_percent: float
    connections: int
    idle_s: float
    bytes: int
    grpc_s: float
    tcp_s: float
    ratio: float
    bound_s: float
    grpc_each: list[float]
    tcp_each: list[float]

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        return asdict(self)


def why_not() -> str | None:
    """Why this machine cannot emulate a link; None when it can."""
    if _find() is None:
        return "no checkout: benchmarks/link/emulator.py is not here"
    if os.geteuid() != 0:
        return "namespaces need root"
    if not os.path.exists("/dev/net/tun"):
        return "the kernel has no /dev/net/tun"
    return None


def _find() -> Path | None:
    for folder in (Path.cwd(), *Path(__file__).resolve().parents):
        if (folder / _EMULATOR).exists():
            return folder / _EMULATOR
    return None


def bench_link(
    rate: float = 100.0, rtt: float = 80.0, loss: float = 0.1, elements: int = 134_515_008, density: float = 0.005,
    connections: int = 4, rounds: int = 5, idle_s: float = 3.0, full: bool = False,
) -> list[LinkRow]:  # fmt: skip
    """A step of a model of SmolLM2-135M's size, ``rounds`` times; with ``full`` also its whole state, once.

    Raises InputError when the machine cannot emulate a link.
    """
    reason = why_not()
    if reason is not None:
        raise InputError("no link can be emulated here", field="link", found=reason)
    shape = {"rate_mbit_s": rate, "rtt_ms": rtt, "loss_percent": loss, "connections": connections, "idle_s": idle_s}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="weight_sync-bench-"))
        near, far = stack.enter_context(_link(rate, rtt, loss))
        given = {"host": near[1], "port": 50071, "elements": elements, "density": density, "store": f"{folder}/store",
                 "connections": connections, "limit_s": _LIMIT_S, "holds_base": not full}  # fmt: skip
        trainer = stack.enter_context(_worker(near[0], "trainer", given))
        engine = stack.enter_context(_worker(far[0], "engine", given))
        sender = stack.enter_context(_worker(near[0], "tcp-send", {**given, "port": 50072}))
        stack.enter_context(_worker(far[0], "tcp-receive", {**given, "port": 50072}))
        rows = []
        if full:
            size = 2 * elements
            tcp = [sender.ask(str(size))["seconds"]]
            rows.append(_row("full state", shape, rtt, size, [engine.hello["seconds"]], tcp))
        found: list[dict[str, Any]] = []
        tcp = []
        for number in range(rounds + 1):
            told = trainer.ask("step")
            time.sleep(idle_s)
            bare = sender.ask(str(told["bytes"] + told["manifest_bytes"]))
            time.sleep(idle_s)
            if number:  # the first round warms both up
                found.append(told)
                tcp.append(bare["seconds"])
        size = found[0]["bytes"] + found[0]["manifest_bytes"]
        rows.append(_row("step", shape, rtt, size, [told["seconds"] for told in found], tcp))
    return rows


def _row(what: str, shape: dict[str, Any], rtt: float, size: int, grpc: list[float], tcp: list[float]) -> LinkRow:
    def median(times: list[float]) -> float:
        return sorted(times)[len(times) // 2]

    return LinkRow(what=what, bytes=size, grpc_s=median(grpc), tcp_s=median(tcp), ratio=median(grpc) / median(tcp),
                   bound_s=1.3 * median(tcp) + rtt / 1000, grpc_each=grpc, tcp_each=tcp, **shape)  # fmt: skip


@contextmanager
def _link(rate: float, rtt: float, loss: float) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    words = [sys.executable, str(_find()), "--rate", str(rate), "--rtt", str(rtt), "--loss", str(loss)]
    running = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        document = _read(running.stdout, "the emulator")
        yield tuple(document["near"]), tuple(document["far"])
    finally:
        _end(running)


class _Worker:
    """A process in a namespace that answers lines with documents."""

    def __init__(self, running: subprocess.Popen[str], role: str) -> None:
        self._running, self._role = running, role
        self.hello = _read(running.stdout, role)

    def ask(self, line: str) -> dict[str, Any]:
        assert self._running.stdin is not None
        self._running.stdin.write(line + "\n")
        self._running.stdin.flush()
        answer = _read(self._running.stdout, self._role)
        if answer.get("error"):
            raise StoreError("the measurement failed", field=self._role, found=answer["error"])
        return answer


@contextmanager
def _worker(namespace: str, role: str, given: dict[str, Any]) -> Iterator[_Worker]:
    words = ["ip", "netns", "exec", namespace, sys.executable, "-m", _WORKER, role, json.dumps(given)]
    running = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield _Worker(running, role)
    finally:
        _end(running)


def _read(stream: IO[str] | None, who: str) -> dict[str, Any]:
    assert stream is not None
    line = stream.readline()
    if not line:
        raise StoreError("a process of the measurement ended", field=who)
    document: dict[str, Any] = json.loads(line)
    return document


def _end(running: subprocess.Popen[str]) -> None:
    for pipe in (running.stdin, running.stdout):
        if pipe is not None:
            pipe.close()
    try:
        running.wait(15)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait(15)
