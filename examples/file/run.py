"""A trainer and two followers that meet only in a store: a folder, or any object store."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from weight_sync import Publisher, Replica
from weight_sync.checkpoint import Checkpoint
from weight_sync.registry import find

VERSIONS = 5


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    """Something that looks like a checkpoint: 8.4 M elements in bf16."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {f"layers.{i}.{part}.weight": (1024, 1024) for i in range(2) for part in ("q", "k", "up", "down")}
    weights = {name: torch.randn(shape, generator=draw).mul_(0.02).bfloat16() for name, shape in shapes.items()}
    return weights | {"norm.weight": torch.ones(1024, dtype=torch.bfloat16)}


def train(uri: str, options: dict[str, str], base: str) -> None:
    """The trainer: Adam-sized steps on fp32 masters, each published as a version."""
    draw = torch.Generator().manual_seed(1)
    masters = {name: tensor.float() for name, tensor in model().items()}
    with Publisher.open(uri, base=base, store_options=options) as publisher:
        for step in range(1, VERSIONS + 1):
            for tensor in masters.values():
                tensor.add_(torch.randn(tensor.shape, generator=draw), alpha=2e-6)
            report = publisher.publish(masters, step=step)  # served as bf16, like the base
            assert report is not None
            print(f"trainer: version {report.version}, {report.density:.2%} changed, {report.patch_bytes:,} bytes, "
                  f"{report.bits_per_changed:.1f} bits per change", flush=True)  # fmt: skip
        print(f"trainer: digest {report.digest}", flush=True)


def follow(name: str, uri: str, options: dict[str, str], base: str, out: str, after: int) -> None:
    """A follower: keeps ``out`` at the newest version; starts once version ``after`` is there."""
    engine = find("engines", "checkpoint")(out, base=base)
    with Replica.open(uri, engine=engine, base=base, replica_id=name, store_options=options) as replica:
        wanted = after
        while replica.version != VERSIONS:
            report = replica.sync(min_version=wanted, timeout=300)
            wanted = report.version + 1
            print(f"{name}: version {report.version} ({report.path}), fence {report.pause_s * 1e3:.1f} ms", flush=True)


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, dict[str, str]]]:
    """moto's S3 server in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/weights", method="PUT"), timeout=5).close()
                break
            if time.monotonic() > deadline or server.poll() is not None:
                raise SystemExit("the S3 server did not start; pip install 'moto[server]'")
        yield "s3://weights/run", {
            "endpoint": endpoint, "allow_http": "true", "region": "us-east-1", "access_key_id": "test",
            "secret_access_key": "test",
        }  # fmt: skip
    finally:
        server.terminate()
        server.wait(timeout=30)


def main() -> None:
    """Starts the three processes, waits for them and compares bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--s3", action="store_true", help="start an S3 server here and use it")
    parser.add_argument("--uri", help="a store; default: a temporary folder")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of the object store")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weight_sync-example-")))
        uri, options = args.uri or str(work / "store"), dict(pair.split("=", 1) for pair in args.option)
        if args.s3:
            uri, options = stack.enter_context(s3_server())
        base = work / "base"
        base.mkdir()
        save_file(model(), str(base / "model.safetensors"))
        start = multiprocessing.get_context("spawn").Process
        jobs = [
            start(target=train, args=(uri, options, str(base))),
            start(target=follow, args=("early", uri, options, str(base), str(work / "early"), 0)),
            start(target=follow, args=("late", uri, options, str(base), str(work / "late"), VERSIONS - 1)),
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(timeout=300)
        if any(job.exitcode != 0 for job in jobs):
            for job in jobs:
                job.kill()
            raise SystemExit(f"a process failed; exit codes {[job.exitcode for job in jobs]}")
        digests = {name: Checkpoint(work / name).digest() for name in ("early", "late")}
        if len(set(digests.values())) != 1:
            raise SystemExit(f"followers differ: {digests}; run `weight-sync verify --deep {uri}`")
        print(f"trainer and followers agree: {digests['early']}")


if __name__ == "__main__":
    main()
