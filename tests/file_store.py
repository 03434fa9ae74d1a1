"""What the tests of the store transport share: small versions, and a worker process that can be killed.

Run as a program it is the worker: ``file_store.py COMMAND CONFIG_JSON``.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence

from blake3 import blake3

from weight_sync.config import Config
from weight_sync.errors import EpochFencedError
from weight_sync.ports import ShardBytes
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.transport.file import FilePublisherEnd, FileReplicaEnd, FileTransport
from weight_sync.transport.file.store import Store
from weight_sync.version import ANCHOR, PATCH


def shard(label: str = "patch", rank: int = 0, body: bytes = b"body") -> ShardBytes:
    form = common_pb2.FORM_RAW if label.startswith("anchor") else common_pb2.FORM_STEP
    return ShardBytes(label, rank, form, b"head", [body])


def version(
    end: FilePublisherEnd,
    number: int,
    kind: manifest_pb2.EntryKind,
    parent: int | None,
    shards: Sequence[manifest_pb2.ShardRef] = (),
) -> manifest_pb2.VersionManifest:
    """A manifest as the core would hand it in."""
    run = end._opened()
    manifest = manifest_pb2.VersionManifest(
        format=1, run_id=run.run_id, number=number, epoch=run.epoch, kind=kind, parent=parent, writer="test"
    )
    manifest.nonce = secrets.token_bytes(16)
    manifest.views.add(name="default", scheme="cast", elements=10, changed=1).shards.extend(shards)
    return manifest


def publish(end: FilePublisherEnd, kind: manifest_pb2.EntryKind = PATCH, body: bytes = b"body") -> int:
    """Publishes the next version; the first one is an anchor. Returns its number."""
    number = end.next_number()
    parent = end._head
    kind = ANCHOR if parent is None else kind
    refs = [end.put_shard(number, shard("anchor" if kind == ANCHOR else "patch", body=body))]
    end.commit(version(end, number, kind, parent if kind == PATCH else None, refs))
    return number


def opened(config: Config, writer: str = "test", run_id: str | None = "r") -> FilePublisherEnd:
    end = FileTransport(config).publisher_end(0, 1)
    end.open_run(run_id, fork_of=None, writer=writer)
    return end


def reader(config: Config, run_id: str | None = None) -> FileReplicaEnd:
    return FileTransport(config).replica_end(run_id)


def check_everything_readable(end: FileReplicaEnd) -> list[int]:
    """Reads every version of the log whole and checks it against its hashes; returns their numbers."""
    numbers = []
    for manifest in end.entries():
        if manifest.kind in (ANCHOR, PATCH):
            numbers.append(manifest.number)
            for ref in manifest.views[0].shards:
                assert blake3(end.read(ref, 0, ref.size)).digest() == ref.blake3
    return numbers


def objects(config: Config, run_id: str = "r") -> set[str]:
    """Keys of all data objects, below the run's prefix."""
    return {meta.key.removeprefix(f"{run_id}/") for meta in Store(config).list(f"{run_id}/data")}


def referenced(end: FileReplicaEnd) -> set[str]:
    return {ref.object for manifest in end.entries() for view in manifest.views for ref in view.shards}


# --- the worker ---


def start(command: str, config: Config, crash_at: str = "") -> subprocess.Popen[str]:
    """Starts the worker; it goes on when a line is written to its stdin."""
    return subprocess.Popen(
        [sys.executable, __file__, command, config.model_dump_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "WEIGHT_SYNC_CRASH_AT": crash_at},
    )


def run_until_killed(command: str, config: Config, crash_at: str) -> list[str]:
    """Runs the worker, which must die by SIGKILL at ``crash_at``; returns the lines it printed."""
    worker = start(command, config, crash_at)
    printed, _ = worker.communicate("go\n", timeout=120)
    assert worker.returncode == -signal.SIGKILL
    return printed.splitlines()


def _publish_forever(config: Config) -> None:
    end = opened(config)
    for _ in range(100):
        print(publish(end), flush=True)


def _race(config: Config) -> None:
    """Fights for the run until the log is long enough: claims, publishes until fenced, claims again."""
    won: list[str] = []
    number = 0
    while number < 12:
        end = FileTransport(config).publisher_end(0, 1)
        end.open_run("r", fork_of=None, writer=f"process {os.getpid()}")
        try:
            while number < 12:
                number = publish(end)
                assert end._attempt is not None
                won.append(f"{number} {end._attempt[1].hex()}")
        except EpochFencedError:
            number = reader(config).head() or 0
    print("\n".join(won), flush=True)


def _upload_forever(config: Config) -> None:
    end = opened(config)
    block = memoryview(bytes(8 << 20))
    end.put_shard(0, ShardBytes("big", 0, common_pb2.FORM_RAW, b"head", [block] * 256))


def _collect(config: Config) -> None:
    FileTransport(config).publisher_end(0, 1).collect()


if __name__ == "__main__":
    commands = {"publish": _publish_forever, "race": _race, "upload": _upload_forever, "collect": _collect}
    print("ready", flush=True)
    sys.stdin.readline()
    commands[sys.argv[1]](Config(**json.loads(sys.argv[2])))
