"""What a sidecar costs: latency and throughput of calls through it against direct calls, in one run.

Owns the measurement: an engine process that answers after a fixed time, a sidecar process in front of it with a real
replica on a real store, and a client that keeps requests in flight on open connections. Owns no model: what an engine
computes is the same on both ways.

    python benchmarks/sidecar.py [--in-flight 50] [--seconds 5] [--service-ms 200] [--rounds 3]

Prints JSON. ``calls`` are plain JSON answers after a time around ``service_ms``, ``streams`` are 32 server-sent events at
intervals around ``interval_ms``, ``saturated`` is an engine that answers at once. Latencies are in milliseconds, beyond
the engine's own time; of a stream they are those of every event. ``added`` is the difference of the two percentiles.
The two ways alternate within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvloop
from safetensors.torch import save_file

from weight_sync import Publisher
from weight_sync.adapters.sidecar import serve
from weight_sync.config import Config
from weight_sync.testing import MemoryEngine

_EVENTS = 32
_PROMPT = json.dumps({"model": "m", "prompt": "x" * 2000, "max_tokens": _EVENTS, "logprobs": 1}).encode()
_ANSWER = json.dumps({"choices": [{"text": "y" * 500, "logprobs": [-0.1] * 256}]}).encode()
_EVENT = b"data: " + json.dumps({"choices": [{"text": "y", "logprobs": [-0.1] * 8}]}).encode() + b"\n\n"


# --- the engine ---


class _Engine(asyncio.Protocol):
    """HTTP/1.1 as thin as it can be, so that the engine takes no time from what is measured."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        lower = head.lower()
        length = int(lower.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        path = head.split(b" ", 2)[1].decode()
        seconds = float(path.rpartition("/")[2]) / 1000
        loop = asyncio.get_running_loop()
        if path.startswith("/streams"):
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                                  b"transfer-encoding: chunked\r\n\r\n")  # fmt: skip
            for k in range(_EVENTS):
                loop.call_later(seconds * (k + 1) / _EVENTS, self._event, k)
        else:
            loop.call_later(seconds, self._answer)

    def _answer(self) -> None:
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
            % (len(_ANSWER), _ANSWER)
        )

    def _event(self, k: int) -> None:
        event = _EVENT if k < _EVENTS - 1 else b"data: [DONE]\n\n"
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event) + (b"0\r\n\r\n" if k == _EVENTS - 1 else b""))


async def _engine_main() -> None:
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class _HeldEngine(MemoryEngine):
    """The port's side of the engine above."""

    control_routes = ("/pause", "/resume", "/update_weights")

    def __init__(self, url: str, config: Config) -> None:
        super().__init__({"w": torch.zeros(4096, dtype=torch.bfloat16)})

    def alive(self, timeout: float) -> bool:
        return True


def _sidecar_main(port: str, store: str) -> None:
    serve(_HeldEngine, Config(uri=store, threads=1), lambda address: print(address, flush=True), lambda report: None,
          lambda error: print(error, file=sys.stderr), engine_url=(f"http://127.0.0.1:{port}",),
          listen="127.0.0.1:0")  # fmt: skip


# --- the client ---


def _await_ready(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/readyz")
        status = connection.getresponse().status
        connection.close()
        if status == 200:
            return
        if time.monotonic() > end:
            raise RuntimeError("the sidecar does not become ready")
        time.sleep(0.05)


async def _call(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, note: Callable[[float], None]
) -> None:
    """One request on an open connection; notes when each event, or the whole body, arrived after the start."""
    began = time.perf_counter()
    writer.write(b"POST %s HTTP/1.1\r\nhost: e\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
                 % (path.encode(), len(_PROMPT), _PROMPT))  # fmt: skip
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(head.decode() + (await reader.read(1000)).decode())
    if b"chunked" not in head:
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
        note(time.perf_counter() - began)
        return
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + 2)
        for _ in range(chunk.count(b'data: {"choices') + chunk.count(b"[DONE]")):
            note(time.perf_counter() - began)
    await reader.readline()


async def _load(port: int, kind: str, period_ms: float, in_flight: int, seconds: float) -> tuple[list[float], float]:
    """Keeps requests in flight for a while, of half to one and a half times the period.

    Lateness in milliseconds of everything that arrived, against when the engine was to send it; requests per second.
    """
    late: list[float] = []
    done = [0]
    dice = random.Random(0)
    end = time.perf_counter() + seconds

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            mine: list[float] = []
            period = period_ms * dice.uniform(0.5, 1.5)
            await _call(reader, writer, f"/{kind}/{period:.3f}", mine.append)
            late.extend(1000 * t - period * (k + 1) / len(mine) for k, t in enumerate(mine))
            done[0] += 1
        writer.close()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(in_flight)))
    return late, done[0] / (time.perf_counter() - began)


def _figures(runs: list[tuple[list[float], float]]) -> dict[str, float]:
    cuts = statistics.quantiles([value for late, _ in runs for value in late], n=100, method="inclusive")
    return {"p50": cuts[49], "p99": cuts[98], "per_s": statistics.median(per_s for _, per_s in runs)}


async def _measure(direct: int, proxied: int, arguments: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, kind, period in (
        ("calls", "calls", arguments.service_ms),
        ("streams", "streams", _EVENTS * arguments.interval_ms),
        ("saturated", "calls", 0.0),
    ):
        runs: dict[str, list[tuple[list[float], float]]] = {"direct": [], "sidecar": []}
        for port in (direct, proxied):
            await _load(port, kind, period, arguments.in_flight, 0.5)
        for _ in range(arguments.rounds):
            for way, port in (("direct", direct), ("sidecar", proxied)):
                runs[way].append(await _load(port, kind, period, arguments.in_flight, arguments.seconds))
        figures = {way: _figures(found) for way, found in runs.items()}
        added = {key: figures["sidecar"][key] - figures["direct"][key] for key in ("p50", "p99")}
        result[name] = {way: _rounded(found) for way, found in figures.items()} | {
            "added": _rounded(added), "throughput_ratio": round(figures["sidecar"]["per_s"] / figures["direct"]["per_s"], 3)
        }  # fmt: skip
    return result


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {key: round(value, 3) for key, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--in-flight", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each way in each round")
    parser.add_argument("--service-ms", type=float, default=200.0, help="time in the engine of a plain call")
    parser.add_argument("--interval-ms", type=float, default=40.0, help="between two events of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        base.mkdir()
        save_file({"w": torch.zeros(4096, dtype=torch.bfloat16)}, base / "model.safetensors")
        store = f"{folder}/store"
        Publisher.open(store, base=str(base), threads=1).close()
        me = [sys.executable, __file__]
        engine = subprocess.Popen([*me, "engine"], stdout=subprocess.PIPE, text=True)
        assert engine.stdout is not None
        direct = engine.stdout.readline().strip()
        sidecar = subprocess.Popen([*me, "sidecar", direct, store], stdout=subprocess.PIPE, text=True)
        try:
            assert sidecar.stdout is not None
            proxied = int(sidecar.stdout.readline().rpartition(":")[2])
            _await_ready(proxied)
            figures = uvloop.run(_measure(int(direct), proxied, arguments))
        finally:
            sidecar.send_signal(signal.SIGTERM)
            sidecar.wait(30)
            engine.kill()
            engine.wait()
    where = {"python": platform.python_version(), "cpus": len(os.sched_getaffinity(0))}
    print(json.dumps({"in_flight": arguments.in_flight, **where, **figures}, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        uvloop.run(_engine_main())
    elif sys.argv[1:2] == ["sidecar"]:
        _sidecar_main(*sys.argv[2:])
    else:
        main()
