"""One object over loopback: this transport against ``sendall`` and ``recv_into`` in the same run.

Owns both sides of the comparison, each with its sender in a process of its own. Owns no judgement.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weight_sync.config import Config, load
from weight_sync.errors import StoreError
from weight_sync.ports import ShardBytes
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.transport.grpc.client import Client
from weight_sync.transport.grpc.remote_publisher import RemotePublisherEnd
from weight_sync.transport.grpc.replica_end import GrpcReplicaEnd
from weight_sync.transport.grpc.wire import CHUNK

__all__ = ["CopyRow", "bench_copy", "serving"]

_SEND = """
import os, resource, socket, sys
path, size = sys.argv[1], int(sys.argv[2])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    peer, _ = listener.accept()
    with peer, open(path, "rb") as file:
        if peer.recv(1) == b"c":
            used = resource.getrusage(resource.RUSAGE_SELF)
            peer.sendall(f"{used.ru_utime + used.ru_stime}".encode())
            continue
        left = size
        buffer = bytearray(1 << 20)
        while left:
            count = file.readinto(buffer)
            peer.sendall(memoryview(buffer)[:count])
            left -= count
"""


@dataclass(frozen=True)
class CopyRow:
    """Rates in GB/s of the best round, CPU seconds per GB of both processes together, over all rounds."""

    bytes: int
    chunk_bytes: int
    rounds: int
    connections: int
    grpc_gb_per_s: float
    socket_gb_per_s: float
    grpc_fetch_share_of_socket_copy: float
    grpc_cpu_s_per_gb: float
    socket_cpu_s_per_gb: float

    def to_json(self) -> dict[str, Any]:
        """As the command prints it."""
        return asdict(self)


def bench_copy(mebibytes: int, rounds: int) -> CopyRow:
    """Reads one stored object of ``mebibytes``, rounds of both ways in turn."""
    size = mebibytes << 20
    with tempfile.TemporaryDirectory(prefix="weight_sync-bench-") as folder, serving(Path(folder)) as (pid, uri, _):
        config = load({"uri": uri, "timeout_s": 120})
        ref = _stored(config, size)
        path = next(Path(folder).rglob("*.safetensors"))
        with closing(GrpcReplicaEnd(Client(config), config, None)) as end, _sending(path, ref.size) as (other, port):
            end.run_id()
            ways: list[tuple[Callable[[], None], int]] = [
                (lambda: _by_socket(port, ref.size), other), (lambda: _by_grpc(end, ref), pid)
            ]  # fmt: skip
            seconds: list[list[float]] = [[], []]
            cpu = [0.0, 0.0]
            for number in range(rounds + 1):
                for k, (way, sender) in enumerate(ways):
                    used, began = _cpu(sender), time.perf_counter()
                    way()
                    if number:  # the first round warms up
                        seconds[k].append(time.perf_counter() - began)
                        cpu[k] += _cpu(sender) - used
    rates = [ref.size / min(times) / 1e9 for times in seconds]
    moved = ref.size * rounds / 1e9
    return CopyRow(ref.size, CHUNK, rounds, 1, rates[1], rates[0], rates[1] / rates[0], cpu[1] / moved, cpu[0] / moved)


def _by_grpc(end: GrpcReplicaEnd, ref: manifest_pb2.ShardRef) -> None:
    assert len(end.read(ref, 0, ref.size)) == ref.size


def _by_socket(port: int, size: int) -> None:
    buffer = memoryview(bytearray(size))
    with socket.create_connection(("127.0.0.1", port), timeout=60) as peer:
        peer.sendall(b"g")
        done = 0
        while done < size:
            count = peer.recv_into(buffer[done:])
            if not count:
                raise StoreError("the sender closed", field="bytes", found=done, expected=size)
            done += count


def _cpu(pid: int) -> float:
    """CPU seconds used so far by this process and another one."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return mine.ru_utime + mine.ru_stime + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stored(config: Config, size: int) -> manifest_pb2.ShardRef:
    """One version with one shard of random bytes."""
    with closing(RemotePublisherEnd(config, 0, 1)) as end:
        run = end.open_run("bench", fork_of=None, writer="bench")
        block = os.urandom(1 << 20)
        shard = ShardBytes("anchor", 0, common_pb2.FORM_RAW, block, [block] * ((size >> 20) - 1))
        ref = end.put_shard(0, shard)
        manifest = manifest_pb2.VersionManifest(
            format=1, run_id="bench", epoch=run.epoch, kind=manifest_pb2.ENTRY_KIND_ANCHOR, nonce=os.urandom(16)
        )
        manifest.views.add(name="default", scheme="cast").shards.append(ref)
        end.commit(manifest)
    return ref


@contextmanager
def serving(folder: Path) -> Iterator[tuple[int, str, Callable[[], dict[str, float]]]]:
    """A server process over a store below ``folder``: its id, its address, and its counters as on its page."""
    code = "from weight_sync.cli import main; main()"
    page = _free_port()
    words = ["serve", "--store", str(folder / "store"), "--listen", "127.0.0.1:0", "--json", "--set",
             f"cache_dir={folder / 'cache'}", "--set", "calls_per_s=100000", "--metrics", f"127.0.0.1:{page}"]  # fmt: skip

    def counters() -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name.removeprefix("weight_sync_"): float(value) for name, _, value in map(_last_word, lines)}

    with _process([sys.executable, "-c", code, *words]) as (pid, line):
        yield pid, json.loads(line)["listening"], counters


def _last_word(line: str) -> tuple[str, str, str]:
    return line.rpartition(" ")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _sending(path: Path, size: int) -> Iterator[tuple[int, int]]:
    with _process([sys.executable, "-c", _SEND, str(path), str(size)]) as (pid, line):
        yield pid, int(line)


@contextmanager
def _process(words: list[str]) -> Iterator[tuple[int, str]]:
    """A process, and the first line that it prints; ended in the end."""
    running = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        if not line:
            raise StoreError("the other side of the measurement did not start", field=words[-1])
        yield running.pid, line
    finally:
        running.terminate()
        running.wait(30)
        if running.stdout is not None:
            running.stdout.close()
