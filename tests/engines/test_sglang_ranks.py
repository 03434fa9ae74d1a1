"""Claims about an SGLang server of two tensor-parallel ranks: packed weights, a crash inside a commit, and in place.

In fp16 the ranks hold no bits of the bf16 checkpoint: versions are reloaded from host copies then, exact all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Run, engine_of, publish
from sglang_servers import SglangServer

import weight_sync
from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import EngineError, EngineInDoubtError

LAST = 4
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return publish(tmp_path_factory.mktemp("qwen3moe"), "qwen3moe", LAST)


@pytest.fixture(scope="module")
def server(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    """One whose ranks kill themselves in their third commit."""
    with SglangServer(run.checkpoints[0], tmp_path_factory.mktemp("server"), "--tp-size", "2", "--dtype", "float16",
                      WEIGHT_SYNC_CRASH_AT="rank:committing#3") as started:  # fmt: skip
        started.ready()
        yield started


def test_every_rank_applies_its_part_packed_or_in_place_and_survives_a_crash(run: Run, server: SglangServer) -> None:
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(), engine) as replica:
        replica.sync(exact=0)
        assert engine.describe().world_size == 2
        assert "cast" in engine.copied["model.layers.0.mlp.experts.3.up_proj.weight"]
        for number in (1, 2):
            assert replica.sync(exact=number).digest == digest(run, number)
        second = server.complete()
        assert None not in second["logprobs"]
        server.load(run.checkpoints[2])
        assert server.complete() == second, "as by sglang's own full reload"
        with pytest.raises(EngineInDoubtError):
            replica.sync(exact=3)
        assert replica.version is None
        restart(server, run.checkpoints[2])
        report = synced(replica, 2)
        assert report.path.startswith("exactly 2") and engine.audit().hex() == digest(run, 2), "known by its digest"
        assert engine.copied == {}, "in bf16 it is written in place"
        for number in (3, 4, 3):
            assert replica.sync(exact=number).digest == digest(run, number)
        third = server.complete()
        server.load(run.checkpoints[3])
        assert server.complete() == third
    engine.close()


def restart(server: SglangServer, checkpoint: Path) -> None:
    """From another version, in bf16, and without the crash."""
    server.kill()
    server.variables.clear()
    server.options.remove("--dtype")
    server.options.remove("float16")
    server.model = checkpoint
    server.start()
    server.ready()


def digest(run: Run, number: int) -> str:
    return Checkpoint(run.checkpoints[number]).digest().hex()


def synced(replica: weight_sync.Replica, number: int) -> Any:
    """Looks again until the engine that was started anew is known."""
    for _ in range(5):
        try:
            return replica.sync(exact=number)
        except EngineError:
            continue
    return replica.sync(exact=number)
