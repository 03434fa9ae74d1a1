"""Claims about a vLLM server of two tensor-parallel ranks, with a tied head and a padded vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import Run, engine_of, publish
from servers import Server

import weight_sync
from weight_sync.checkpoint import Checkpoint

LAST = 2
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return publish(tmp_path_factory.mktemp("llama"), "llama-tied", LAST)


@pytest.mark.parametrize("options", [
    pytest.param(("--additional-config", '{"weight_sync": {"in_place": true}}'), id="in place"),
    pytest.param((), id="packed", marks=pytest.mark.full),
])  # fmt: skip
def test_every_rank_applies_its_part_and_the_sum_is_the_versions(
    run: Run, options: tuple[str, ...], tmp_path: Path
) -> None:
    with Server(run.checkpoints[0], tmp_path, "--tensor-parallel-size", "2", *options,
                VLLM_SERVER_DEV_MODE="1") as server:  # fmt: skip
        server.ready()
        engine = engine_of(run, server)
        with weight_sync.Replica.open(run.config(), engine) as replica:
            replica.sync(exact=0)
            assert engine.describe().world_size == 2
            for number in (1, 2):
                assert replica.sync(exact=number).digest == Checkpoint(run.checkpoints[number]).digest().hex()
            ours = server.complete()
            assert bool(engine.copied) != bool(options)
        path = str(run.checkpoints[LAST])
        server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        server.post("/reset_prefix_cache", {})
        engine.close()
        if options:  # vLLM's own reload leaves the packed copy of a tied head as it was
            assert server.complete() == ours
