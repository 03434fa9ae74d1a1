"""Claims about the measurements of the gRPC transport: they run, and count what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from weight_sync.transport.grpc.bench import bench_copy, bench_fan, bench_link, why_not

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_a_copy_is_measured_against_a_socket_in_the_same_run() -> None:
    row = bench_copy(4, 1)
    assert row.grpc_fetch_share_of_socket_copy == row.grpc_gb_per_s / row.socket_gb_per_s > 0
    assert row.bytes == 4 << 20


@pytest.mark.slow
def test_a_server_sends_one_copy_per_direct_child() -> None:
    straight, behind = bench_fan(6, 0, 1, 1 << 14), bench_fan(6, 2, 1, 1 << 14)
    assert (straight.copies_per_direct_child, behind.copies_per_direct_child) == (1.0, 1.0)
    assert straight.server_bytes_per_version == 6 * straight.patch_bytes
    assert behind.server_bytes_per_version == 2 * behind.patch_bytes
    assert [row.server_calls_per_version["Acknowledge"] for row in (straight, behind)] == [6, 2]
    for row in (straight, behind):
        assert 0 < row.server_cpu_s_per_version_above_idle <= row.server_cpu_s_per_version


@pytest.mark.full
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_link_is_measured_against_bare_tcp_over_as_many_connections() -> None:
    rows = bench_link(rtt=20.0, elements=1 << 18, rounds=1, idle_s=0.2, connections=2, full=True)
    assert [row.what for row in rows] == ["full state", "step"]
    assert all(row.grpc_s > 0.02 and row.tcp_s > 0.02 for row in rows)  # a round trip at least


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_the_emulated_link_has_the_delay_that_was_asked_for() -> None:
    emulator = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks" / "link" / "emulator.py"), "--rtt", "60", "--loss", "0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert emulator.stdin is not None and emulator.stdout is not None
    try:
        link = json.loads(emulator.stdout.readline())
        near, far = (["ip", "netns", "exec", link[side][0], sys.executable, "-c"] for side in ("near", "far"))
        listen = f"import socket; s = socket.create_server(({link['near'][1]!r}, 9)); print(1, flush=True); s.accept()"
        connect = (
            "import socket, time; t = time.monotonic(); "
            f"socket.create_connection(({link['near'][1]!r}, 9), timeout=30); print(time.monotonic() - t)"
        )
        listening = subprocess.Popen([*near, listen], stdout=subprocess.PIPE, text=True)
        assert listening.stdout is not None
        listening.stdout.readline()
        done = subprocess.run([*far, connect], capture_output=True, text=True, timeout=60, check=True)
        listening.wait(30)
        listening.stdout.close()
        assert float(done.stdout) >= 0.06  # a handshake is one round trip, and nothing is faster than the link
    finally:
        emulator.stdin.close()
        emulator.stdout.close()
        emulator.wait(30)
