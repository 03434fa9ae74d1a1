"""Claims about a vLLM server that packs what it loads (experts and linears, on a CPU), through the worker's extension.

Versions are reloaded from host copies then, by vLLM's own reload; exact all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Run, engine_of, publish
from servers import Server

import weight_sync
from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import EngineError, EngineInDoubtError

LAST = 3
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return publish(tmp_path_factory.mktemp("qwen3moe"), "qwen3moe", LAST)


@pytest.fixture(scope="module")
def server(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One whose worker kills itself in its third commit."""
    with Server(run.checkpoints[0], tmp_path_factory.mktemp("server"), door="extension",
                WEIGHT_SYNC_CRASH_AT="rank:committing#3") as started:  # fmt: skip
        yield started.ready()


def test_packed_modules_follow_exactly_and_survive_a_crash_inside_a_commit(
    run: Run, server: Server, tmp_path: Path
) -> None:
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(), engine) as replica:
        replica.sync(exact=0)
        experts = "model.layers.0.mlp.experts.3.up_proj.weight"
        assert "experts" in engine.copied[experts] and "packed" in engine.copied["lm_head.weight"]
        assert "model.norm.weight" not in engine.copied, "what is not packed is written in place"
        for number in (1, 2):
            assert replica.sync(exact=number).digest == Checkpoint(run.checkpoints[number]).digest().hex()
        second = server.complete()
        with pytest.raises(EngineInDoubtError):
            replica.sync(exact=3)
        assert replica.version is None
        server.kill()
        server.variables.clear()
        server.start()
        server.ready()
        report = _synced(replica, 3)
        assert report.path == "3 patches from version 0" and engine.audit().hex() == report.digest
        third = server.complete()
        assert third != second
        replica.sync(exact=2)
        assert server.complete() == second, "there and back again"
        replica.sync(exact=3)
    engine.close()
    with Server(run.checkpoints[3], tmp_path, door="none") as fresh:
        assert fresh.ready().complete() == third == server.complete()


def _synced(replica: weight_sync.Replica, number: int) -> Any:
    """Looks again until the engine that was started anew is known."""
    for _ in range(5):
        try:
            return replica.sync(exact=number)
        except EngineError:
            continue
    return replica.sync(exact=number)
