"""A trainer and a follower, two processes, over the gloo transport; their bits are compared after every version.

The follower's process checks each version that it serves against the trainer's parameters, which come to it by another
way (a file). Then a second follower comes late: what it missed is gone, so it asks for a full state.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import weight_sync
from weight_sync.errors import VersionExpiredError
from weight_sync.testing import MemoryEngine

PATIENCE_S = 120.0


def model(seed: int = 0) -> torch.nn.Module:
    """Small, with odd sizes and two dtypes."""
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = [torch.nn.Linear(37, 129), torch.nn.GELU(), torch.nn.Linear(129, 11)]
    return torch.nn.Sequential(*layers, torch.nn.LayerNorm(11)).to(torch.bfloat16)


def train(uri: str, folder: Path, versions: int) -> None:
    """Publishes versions, each once the followers of the one before have acknowledged it."""
    policy = model()
    save_file(policy.state_dict(), folder / "base" / "model.safetensors")
    with weight_sync.Publisher.open(uri, backend="gloo", base=str(folder / "base"), poll_s=0.05) as publisher:
        follower = start("follow", uri, folder, "early")
        wait_for(publisher, "early", 0)
        for step in range(1, versions + 1):
            publish(publisher, policy, step, folder)
            wait_for(publisher, "early", step)
        late = start("follow", uri, folder, "late")
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "asked").exists():  # a trainer would simply go on: its next version answers
            if time.monotonic() > deadline or late.poll() is not None:
                raise SystemExit("the late follower did not ask for a full state")
            time.sleep(0.05)
        publish(publisher, policy, versions + 1, folder)
        wait_for(publisher, "late", versions + 1)
        print("a reader that came late asked for a full state and has it")
        (folder / "done").touch()
        for process in (follower, late):
            if process.wait(PATIENCE_S) != 0:
                raise SystemExit("a follower failed")


def publish(publisher: weight_sync.Publisher, policy: torch.nn.Module, step: int, folder: Path) -> None:
    """One step: some of the weights move, and the version with them."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += (torch.rand(parameter.shape) < 0.05) * torch.randn(parameter.shape)
    save_file(policy.state_dict(), folder / f"{step}.safetensors")
    report = publisher.publish(policy, step=step)
    assert report is not None
    print(f"published {report.version}: {report.kind}, {report.changed} of {report.elements} changed", flush=True)


def wait_for(publisher: weight_sync.Publisher, name: str, version: int) -> None:
    """Until a follower serves a version."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(a.replica_id == name and a.version.number >= version for a in publisher.acknowledgements()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{name} does not serve version {version}")
        time.sleep(0.02)


def start(role: str, uri: str, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Another process of this program."""
    return subprocess.Popen(
        [sys.executable, __file__, "--role", role, "--uri", uri, "--dir", str(folder), "--name", name]
    )


def follow(uri: str, folder: Path, name: str) -> None:
    """Serves what comes, and compares it with what the trainer wrote down."""
    engine: Any = MemoryEngine(folder / "base")
    with weight_sync.Replica.open(
        uri, engine, backend="gloo", replica_id=name, base=str(folder / "base"), poll_s=0.05
    ) as replica:
        while not (folder / "done").exists():
            try:
                report = replica.sync(timeout=1.0)
            except VersionExpiredError as error:
                if not (folder / "asked").exists():
                    print(f"{name}: {error}", flush=True)
                (folder / "asked").touch()  # the replica has asked the publisher itself, through the transport
                time.sleep(0.2)
                continue
            if report.changed and report.version:
                expected = load_file(folder / f"{report.version}.safetensors")
                served = {key: bits for key, (_, bits) in engine.table.items()}
                assert served.keys() == expected.keys()
                assert all(served[k].tobytes() == bytes_of(expected[k]) for k in expected), "other bits are served"
                print(f"{name}: version {report.version} digest {report.digest} bits equal", flush=True)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Its bits."""
    return tensor.contiguous().view(torch.int16).numpy().tobytes()


def main() -> None:
    """Runs the trainer; it starts the followers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=3, help="before the late follower comes (default 3)")
    parser.add_argument("--uri", default="gloo://127.0.0.1:29517", help="where the board is")
    for hidden in ("--role", "--dir", "--name"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "follow":
        follow(options.uri, Path(options.dir), options.name)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "base").mkdir()
        train(options.uri, Path(folder), options.versions)


if __name__ == "__main__":
    main()
