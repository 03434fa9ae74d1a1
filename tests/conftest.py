"""Fixtures that more than one room needs: a real S3 server process, a real small disk."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# A gate gives the same answer twice; on a developer's machine every run tries other examples.
settings.register_profile("ci", derandomize=True, deadline=None)
if os.environ.get("CI"):
    settings.load_profile("ci")


@contextlib.contextmanager
def moto_server() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Endpoint of moto's S3 server, in a process of its own on a free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{endpoint}/moto-api/data.json", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, "moto server died"
                assert time.monotonic() < deadline, "moto server did not start"
                time.sleep(0.02)
        yield endpoint, server
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait(timeout=30)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The server that most tests share."""
    with moto_server() as (endpoint, _):
        yield endpoint


def s3_bucket(endpoint: str) -> tuple[str, dict[str, str]]:
    """(uri, store_options) of an empty prefix in a bucket of its own."""
    bucket = f"b{uuid.uuid4().hex[:12]}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{bucket}", method="PUT"), timeout=30).close()
    options = {
        "endpoint": endpoint,
        "allow_http": "true",
        "region": "us-east-1",
        "access_key_id": "test",
        "secret_access_key": "test",
    }
    return f"s3://{bucket}/some/prefix", options


@pytest.fixture
def s3_uri(s3_server: str) -> tuple[str, dict[str, str]]:
    """(uri, store_options) of an empty prefix in a bucket of its own, on the shared server."""
    return s3_bucket(s3_server)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    mount = tmp_path / "disk"
    mount.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, text=True
    )
    if done.returncode != 0:
        pytest.skip(f"this machine does not let root mount: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models so small that more threads only slow them down."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
