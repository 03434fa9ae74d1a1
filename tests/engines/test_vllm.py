"""Claims about a real vLLM server whose weights are written in place: exact bits, no stale cache, and faults."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from runs import Run, engine_of, follow_apart, publish
from safetensors.torch import load_file
from servers import TEXT, Server

import weight_sync
from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import CorruptionError, DeadlineError, EngineError, EngineInDoubtError
from weight_sync.ports import PauseMode
from weight_sync.testing import check_engine

IN_PLACE = ("--additional-config", '{"weight_sync": {"in_place": true}}')
LAST = 4
LONG = 200  # tokens of an answer that a fence meets on its way
TRIES = 20  # of an answer that may be over too soon
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return publish(tmp_path_factory.mktemp("qwen3"), "qwen3", LAST)


@pytest.fixture(scope="module")
def server(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(run.checkpoints[0], tmp_path_factory.mktemp("server"), *IN_PLACE) as started:
        yield started.ready()


@pytest.fixture(scope="module")
def answers(run: Run, server: Server) -> dict[int, Any]:
    """What the server answers at each version; asked twice, so that the second answer comes from the prefix cache."""
    out: dict[int, Any] = {}
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(), engine) as replica:
        for number in range(LAST + 1):
            report = replica.sync(exact=number)
            first, out[number] = server.complete(), server.complete()
            assert first["logprobs"] == out[number]["logprobs"]
            assert report.digest == Checkpoint(run.checkpoints[number]).digest().hex() == engine.audit().hex()
    engine.close()
    return out


def moved(run: Run, server: Server, number: int, **keys: Any) -> None:
    engine = engine_of(run, server, **keys)
    with weight_sync.Replica.open(run.config(**keys), engine) as replica:
        assert replica.sync(exact=number).version == number
    engine.close()


def test_every_version_answers_as_a_fresh_engine_does(
    run: Run, answers: dict[int, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert len({str(answer) for answer in answers.values()}) == len(answers), "each version answers differently"
    with Server(run.checkpoints[LAST], tmp_path_factory.mktemp("fresh"), *IN_PLACE, door="none",
                VLLM_SERVER_DEV_MODE="1") as fresh:  # fmt: skip
        assert fresh.ready().complete() == answers[LAST]
        for number in range(LAST):  # moved by vLLM's own full reload, which is exact for such a model
            path = str(run.checkpoints[number])
            fresh.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
            fresh.post("/reset_prefix_cache", {})
            assert fresh.complete() == answers[number], f"version {number}"


@pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="needs nixl-cu12 in vLLM's environment")
@pytest.mark.parametrize("commit", ["shadow", "direct"])
def test_rdma_writes_land_in_the_workers_own_memory(
    run: Run, server: Server, answers: dict[int, Any], commit: str
) -> None:
    moved(run, server, 0)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    keys = {"uri": f"rdma://127.0.0.1:{port}", "rdma": {"commit": commit}, "cache_dir": None}
    with weight_sync.Publisher.open(run.config(**keys), base=str(run.checkpoints[0])) as publisher:
        engine = engine_of(run, server, **keys)
        with weight_sync.Replica.open(run.config(**keys), engine) as replica:
            for number in (1, 2):
                publisher.publish(load_file(run.checkpoints[number] / "model.safetensors"), step=number)
                report = replica.sync(min_version=number)
                assert "in 1 engine ranks" in report.path or "straight into place" in report.path, report.path
                assert report.digest == Checkpoint(run.checkpoints[number]).digest().hex() == engine.audit().hex()
                assert server.complete() == answers[number]
        engine.close()


def test_it_keeps_the_promises_of_the_port(run: Run, server: Server, answers: dict[int, Any]) -> None:
    claims = ["describe_tells_what_is_held", "a_tensor_may_travel_whole", "rollback_may_be_repeated",
              "patches_of_several_ranks_give_exact_bits", "a_patch_for_another_base_is_noticed_and_undone",
              "other_tensors_are_taken_or_refused", "commit_without_stage_is_refused"]  # fmt: skip
    moved(run, server, 0)
    for claim in claims:
        check_engine(lambda: engine_of(run, server), run.checkpoints[0], only=[claim])
    moved(run, server, 1)
    assert server.complete() == answers[1]


def test_an_answer_across_a_commit_goes_on_by_the_new_weights_alone(run: Run, server: Server) -> None:
    moved(run, server, 1)
    tokens = server.post("/tokenize", {"model": "tiny", "prompt": TEXT})["tokens"]
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(pause="keep"), engine) as replica:
        for _ in range(TRIES):
            replica.sync(exact=1)
            asked, out = _asked(server, tokens)
            replica.sync(exact=2)
            asked.join(120)
            spans = [
                (span["version"].rpartition(":")[2], span["start"], span["end"]) for span in out["weight_versions"]
            ]
            if len(spans) > 1:
                break
    engine.close()
    assert [number for number, *_ in spans] == ["1", "2"], spans
    cut = spans[0][2]
    assert 0 < cut < LONG
    again = server.generate([*tokens, *out["token_ids"][:cut]], LONG - cut)
    assert again["token_ids"] == out["token_ids"][cut:], "keys and values of old weights were used"


def _asked(server: Server, tokens: list[int]) -> tuple[threading.Thread, dict[str, Any]]:
    """A long answer that the server is at, and where it will be; another one when it was over before it was seen."""
    for _ in range(TRIES):
        out: dict[str, Any] = {}
        asked = threading.Thread(target=lambda: out.update(server.generate(tokens, LONG)))  # noqa: B023
        asked.start()
        while asked.is_alive():
            if _running(server):
                return asked, out
    pytest.fail("every answer was over before it was seen")


def _running(server: Server) -> bool:
    text = server.get_text("/metrics")
    return any(
        line.startswith("vllm:num_requests_running") and float(line.split()[-1]) > 0 for line in text.splitlines()
    )


# --- bad input and faults ---------------------------------------------------------------------------------------------


def test_another_model_is_refused_with_the_differences(
    server: Server, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = publish(tmp_path_factory.mktemp("other"), "llama-tied", 1)
    engine = engine_of(other, server)
    before = server.complete()
    with weight_sync.Replica.open(other.config(), engine) as replica, pytest.raises(EngineError) as refusal:
        replica.sync()
    assert "q_norm.weight" in str(refusal.value) and "lm_head.weight" in str(refusal.value)
    assert server.complete() == before


def test_a_version_of_another_lineage_comes_whole_and_the_way_back_too(
    run: Run, server: Server, answers: dict[int, Any], tmp_path: Path
) -> None:
    other = publish(tmp_path, "qwen3", 1, seed=1)
    moved(run, server, 1)
    engine = engine_of(other, server)
    with weight_sync.Replica.open(other.config(), engine) as replica:
        report = replica.sync(exact=1)
        assert report.digest == Checkpoint(other.checkpoints[1]).digest().hex() == engine.audit().hex()
        assert report.previous is None, "what the engine held is no version of this run"
    engine.close()
    assert server.complete() not in answers.values()
    moved(run, server, 1)
    assert server.complete() == answers[1]


def test_a_corrupted_shard_changes_nothing(run: Run, server: Server, answers: dict[int, Any]) -> None:
    moved(run, server, 1)
    (shard,) = run.store.glob("*/data/*2/*.safetensors")
    good = shard.read_bytes()
    shard.write_bytes(good[:-100] + bytes([good[-100] ^ 1]) + good[-99:])
    try:
        with pytest.raises(CorruptionError):
            moved(run, server, 2)
        assert server.complete() == answers[1]
    finally:
        shard.write_bytes(good)
    moved(run, server, 2)
    assert server.complete() == answers[2]


@pytest.mark.parametrize("step", ["replica:staged", "replica:paused", "replica:committed"])
def test_a_driver_that_dies_leaves_a_version(run: Run, server: Server, answers: dict[int, Any], step: str) -> None:
    moved(run, server, 1)
    died = follow_apart(run, server, 2, WEIGHT_SYNC_CRASH_AT=step)
    said, _ = died.communicate(timeout=120)
    assert died.returncode == -signal.SIGKILL, said
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(), engine) as replica:
        held = replica.sync(exact=2)
        assert held.previous in (None, 1, 2)
        assert server.complete() == answers[2]
    engine.close()


def test_an_engine_that_stands_still_costs_a_deadline_and_nothing_else(
    run: Run, server: Server, answers: dict[int, Any]
) -> None:
    moved(run, server, 1)
    engine = engine_of(run, server, fence_s=3, timeout_s=3)
    with weight_sync.Replica.open(run.config(fence_s=3, timeout_s=3), engine) as replica:
        replica.sync(exact=1)
        assert engine.alive(10.0)
        server.signal(signal.SIGSTOP)
        try:
            assert not engine.alive(1.0)
            with pytest.raises((DeadlineError, EngineError)):
                replica.sync(exact=2)
        finally:
            server.signal(signal.SIGCONT)
        assert server.complete() == answers[1]
        assert engine.alive(30.0)
        assert replica.sync(exact=2).version == 2
        assert server.complete() == answers[2]
    engine.close()


def test_a_fence_that_cannot_be_closed_opens_again(run: Run, server: Server, answers: dict[int, Any]) -> None:
    moved(run, server, 1)
    tokens = server.post("/tokenize", {"model": "tiny", "prompt": TEXT})["tokens"]
    engine = engine_of(run, server)
    asked, _ = _asked(server, tokens)
    with pytest.raises(DeadlineError):
        engine.pause(PauseMode.WAIT, 0.01)
    asked.join(120)
    assert server.complete() == answers[1]
    engine.close()


@pytest.mark.full
def test_an_engine_that_was_killed_is_recognised_and_brought_up_to_date(
    run: Run, server: Server, answers: dict[int, Any]
) -> None:
    moved(run, server, 1)
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(), engine) as replica:
        replica.sync(exact=1)
        server.kill()
        assert not engine.alive(5.0)
        with pytest.raises(EngineError):
            replica.sync(exact=2)
        server.start()
        server.ready()
        with pytest.raises(EngineInDoubtError, match="anew"):
            replica.sync(exact=2)
        report = replica.sync(exact=2)
        assert report.path == "2 patches from version 0", "it started from the base checkpoint"
    engine.close()
    assert server.complete() == answers[2]


def test_the_folder_of_the_sockets_is_this_users_alone(server: Server) -> None:
    import os

    folder = Path(os.environ["WEIGHT_SYNC_RUNTIME_DIR"])
    sockets = list(folder.glob("*.vllm.sock"))
    assert sockets and all(path.stat().st_mode & 0o077 == 0 for path in (folder, *sockets))
