"""Claims about examples/custom_transport: a transport of a third party installs, conforms, and carries versions.

Owns no claim about the transports of this package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from weight_sync import registry
from weight_sync.config import Config
from weight_sync.errors import ConfigError
from weight_sync.ports import ShardBytes
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.testing import check_transport, transport_claims

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "custom_transport"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder into which pip has installed the example, on the module search path."""
    copy, target = tmp_path_factory.mktemp("copy") / "example", tmp_path_factory.mktemp("site")
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, str(copy)], check=True, timeout=120)
    sys.path.insert(0, str(target))
    yield target
    sys.path.remove(str(target))
    for name in [name for name in sys.modules if name.partition(".")[0] == "weight_sync_gloo"]:
        del sys.modules[name]


@pytest.fixture
def board() -> Iterator[int]:
    """The port of a board that this process hosts."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    yield store.port


def make(port: int, **keys: Any) -> Any:
    config = Config(backend="gloo", uri=f"gloo://127.0.0.1:{port}", poll_s=0.02, timeout_s=30, keep_versions=2, **keys)
    return registry.open_transport(config)


HISTORY = {"older_versions_stay_readable", "a_lease_keeps_a_version_and_what_it_needs", "a_fork_is_a_run_of_its_own"}


@pytest.mark.parametrize("claim", transport_claims())
def test_it_keeps_every_promise_of_a_transport_without_history(claim: str, installed: Path, board: int) -> None:
    assert check_transport(lambda: make(board), only=[claim]) == ([] if claim in HISTORY else [claim])


def test_its_entry_point_makes_it_a_backend(installed: Path) -> None:
    assert "gloo" in registry.names("transports")
    for uri in ("gloo://host", "file:///x", "gloo://"):
        with pytest.raises(ConfigError):
            registry.open_transport(Config(backend="gloo", uri=uri))


def test_a_reader_that_was_killed_is_left_out(installed: Path, board: int) -> None:
    code = f"""if True:
        import time
        from weight_sync import registry
        from weight_sync.config import Config
        end = registry.open_transport(Config(backend="gloo", uri="gloo://127.0.0.1:{board}")).replica_end()
        print("there", flush=True)
        time.sleep(600)
    """
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as victim:
        assert victim.stdout is not None and victim.stdout.readline() == "there\n"
        transport = make(board, store_options={"push_timeout_s": "1"})
        with closing(transport.publisher_end(0, 1)) as end, closing(transport.replica_end()) as reader:
            run = end.open_run(None, fork_of=None, writer="test")
            shard = ShardBytes("anchor", 0, common_pb2.FORM_RAW, b"head", [b"body"])
            end.put_shard(0, shard)
            victim.kill()
            ref = end.put_shard(1, shard)
            end.commit(
                manifest_pb2.VersionManifest(
                    format=1, run_id=run.run_id, number=0, kind=manifest_pb2.ENTRY_KIND_ANCHOR, nonce=bytes(16)
                )
            )
            assert bytes(reader.read(ref, 0, ref.size)) == b"headbody"


@pytest.mark.slow
def test_two_processes_publish_and_follow_with_equal_bits(installed: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(installed), "WEIGHT_SYNC_THREADS": "1"}
    command = [sys.executable, str(EXAMPLE / "run.py"), "--versions", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    served = re.findall(r"(early|late): version (\d+) digest ([0-9a-f]+) bits equal", done.stdout)
    assert {number for name, number, _ in served if name == "early"} >= {"4", "5"}
    assert [number for name, number, _ in served if name == "late"] == ["5"]
    assert len({(number, digest) for _, number, digest in served}) == len({number for _, number, _ in served})
    assert "a reader that came late asked for a full state and has it" in done.stdout
