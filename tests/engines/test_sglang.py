"""Claims about a real SGLang server whose weights are written in place: exact bits, no stale cache, and faults."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import Run, engine_of, follow_apart, publish
from servers import TEXT
from sglang_servers import SglangServer
from sidecars import Sidecar

import weight_sync
from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import CorruptionError, DeadlineError, EngineError
from weight_sync.ports import PauseMode
from weight_sync.testing import check_engine

LAST = 4
LONG = 200  # tokens of an answer that a fence meets on its way
pytestmark = pytest.mark.timeout(2400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return publish(tmp_path_factory.mktemp("qwen3"), "qwen3", LAST)


@pytest.fixture(scope="module")
def server(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangServer]:
    with SglangServer(run.checkpoints[0], tmp_path_factory.mktemp("server")) as started:
        started.ready()
        yield started


@pytest.fixture(scope="module")
def answers(run: Run, server: SglangServer) -> dict[int, Any]:
    """What the server answers at each version, the bits of which are proven."""
    out: dict[int, Any] = {}
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(), engine) as replica:
        for number in range(LAST + 1):
            report = replica.sync(exact=number)
            out[number] = server.complete()
            assert report.digest == Checkpoint(run.checkpoints[number]).digest().hex() == engine.audit().hex()
        assert engine.copied == {}, "all of it is written in place"
    engine.close()
    return out


@pytest.fixture(scope="module")
def ids(server: SglangServer) -> list[int]:
    return list(server.post("/tokenize", {"model": "tiny", "prompt": TEXT})["tokens"])


def moved(run: Run, server: SglangServer, number: int, **keys: Any) -> None:
    engine = engine_of(run, server, **keys)
    with weight_sync.Replica.open(run.config(**keys), engine) as replica:
        assert replica.sync(exact=number).version == number
    engine.close()


def test_every_version_answers_as_a_fresh_engine_does(
    run: Run, answers: dict[int, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert len({str(answer) for answer in answers.values()}) == len(answers), "each version answers differently"
    assert all(None not in answer["logprobs"] for answer in answers.values())
    with SglangServer(run.checkpoints[LAST], tmp_path_factory.mktemp("fresh"), door="none") as fresh:
        fresh.ready()
        assert fresh.complete() == answers[LAST]
        for number in range(LAST):
            fresh.load(run.checkpoints[number])
            assert fresh.complete() == answers[number], f"version {number}"


def test_it_keeps_the_promises_of_the_port(run: Run, server: SglangServer, answers: dict[int, Any]) -> None:
    claims = ["describe_tells_what_is_held", "a_tensor_may_travel_whole", "rollback_may_be_repeated",
              "patches_of_several_ranks_give_exact_bits", "a_patch_for_another_base_is_noticed_and_undone",
              "other_tensors_are_taken_or_refused", "commit_without_stage_is_refused"]  # fmt: skip
    moved(run, server, 0)
    for claim in claims:
        check_engine(lambda: engine_of(run, server), run.checkpoints[0], only=[claim])
    moved(run, server, 1)
    assert server.complete() == answers[1]


def test_a_cached_prefix_is_not_used_across_a_commit(
    run: Run, server: SglangServer, answers: dict[int, Any], ids: list[int]
) -> None:
    moved(run, server, 1)
    server.generate(ids, 4)
    assert server.generate(ids, 4)["meta_info"]["cached_tokens"] > 0
    moved(run, server, 2)
    told = server.generate(ids, 12)["meta_info"]
    assert told["cached_tokens"] == 0
    assert [logprob for logprob, *_ in told["output_token_logprobs"]] == answers[2]["logprobs"]


class Stream:
    """One answer as it comes; each event tells all tokens so far."""

    def __init__(self, port: int, ids: list[int], count: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True, "return_logprob": True}
        self.connection.request("POST", "/generate", json.dumps(body), {"content-type": "application/json"})
        self.answer = self.connection.getresponse()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self.answer:
            if line.startswith(b"data: [DONE]"):  # where clients stop
                break
            if line.startswith(b"data: {"):
                yield json.loads(line.removeprefix(b"data: "))
        self.connection.close()


def test_an_answer_across_a_commit_goes_on_by_the_new_weights_alone(
    run: Run, server: SglangServer, ids: list[int]
) -> None:
    moved(run, server, 1)
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(pause="keep"), engine) as replica:
        replica.sync(exact=1)
        stream = iter(Stream(server.port, ids, LONG))
        next(stream)
        replica.sync(exact=2)
        *_, last = stream
    engine.close()
    told = last["meta_info"]
    spans = [(span["version"].rpartition(":")[2], span["start"], span["end"]) for span in told["weight_versions"]]
    assert [number for number, *_ in spans] == ["1", "2"], spans
    cut = spans[0][2]
    assert 0 < cut < LONG == spans[1][2]
    made = told["output_token_logprobs"]
    again = server.generate([*ids, *(token for _, token, *_ in made[:cut])], LONG - cut)["meta_info"]
    assert again["output_token_logprobs"] == made[cut:], "keys and values of old weights were used"


def test_an_aborted_answer_says_so_and_the_version_comes(
    run: Run, server: SglangServer, answers: dict[int, Any], ids: list[int]
) -> None:
    moved(run, server, 1)
    engine = engine_of(run, server)
    with weight_sync.Replica.open(run.config(pause="abort"), engine) as replica:
        replica.sync(exact=1)
        stream = iter(Stream(server.port, ids, LONG))
        next(stream)
        replica.sync(exact=2)
        *_, last = stream
    engine.close()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.complete() == answers[2]


# --- bad input and faults ---------------------------------------------------------------------------------------------


def test_another_model_is_refused_with_the_differences(
    server: SglangServer, run: Run, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = publish(tmp_path_factory.mktemp("other"), "llama-tied", 1)
    engine = engine_of(other, server)
    before = server.complete()
    with weight_sync.Replica.open(other.config(), engine) as replica, pytest.raises(EngineError) as refusal:
        replica.sync()
    assert "q_norm.weight" in str(refusal.value) and "lm_head.weight" in str(refusal.value)
    assert server.complete() == before


def test_a_version_of_another_lineage_comes_whole_and_the_way_back_too(
    run: Run, server: SglangServer, answers: dict[int, Any], tmp_path: Path
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


def test_a_corrupted_shard_changes_nothing(run: Run, server: SglangServer, answers: dict[int, Any]) -> None:
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
def test_a_driver_that_dies_leaves_a_version(
    run: Run, server: SglangServer, answers: dict[int, Any], step: str
) -> None:
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


def test_requests_that_a_dead_driver_kept_are_answered_in_the_end(
    run: Run, server: SglangServer, ids: list[int]
) -> None:
    moved(run, server, 1)
    stream = iter(Stream(server.port, ids, LONG))
    next(stream)
    died = follow_apart(run, server, 2, "keep", WEIGHT_SYNC_CRASH_AT="replica:paused")
    said, _ = died.communicate(timeout=120)
    assert died.returncode == -signal.SIGKILL, said
    moved(run, server, 2)  # in mode wait: it waits for nobody who waits for it
    *_, last = stream
    assert last["meta_info"]["completion_tokens"] == LONG


def test_an_engine_that_stands_still_costs_a_deadline_and_nothing_else(
    run: Run, server: SglangServer, answers: dict[int, Any]
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


def test_a_fence_that_cannot_be_closed_opens_again(
    run: Run, server: SglangServer, answers: dict[int, Any], ids: list[int]
) -> None:
    moved(run, server, 1)
    stream = iter(Stream(server.port, ids, LONG))
    next(stream)
    engine = engine_of(run, server)
    with pytest.raises(DeadlineError):
        engine.pause(PauseMode.WAIT, 0.01)
    *_, last = stream
    assert last["meta_info"]["completion_tokens"] == LONG
    assert server.complete() == answers[1]
    engine.close()


def test_weights_are_written_inside_a_fence_only(run: Run, server: SglangServer, answers: dict[int, Any]) -> None:
    """A scheduler that somebody resumed behind the driver's back is not written into; the driver is told."""
    moved(run, server, 1)
    engine = engine_of(run, server, fence_s=2)
    with weight_sync.Replica.open(run.config(fence_s=2), engine) as replica:
        replica.sync(exact=1)
        resume, control = engine.resume, engine._control
        pause = control.pause

        def paused_and_resumed(mode: PauseMode, limit: float) -> None:
            pause(mode, limit)
            resume()

        control.pause = paused_and_resumed  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            replica.sync(exact=2)
        control.pause = pause  # type: ignore[method-assign]
    engine.close()
    assert server.complete() == answers[1]
    moved(run, server, 2)
    assert server.complete() == answers[2]


def test_the_sockets_are_this_users_alone(server: SglangServer) -> None:
    folder = Path(os.environ["WEIGHT_SYNC_RUNTIME_DIR"])
    sockets = list(folder.glob("*.sglang*.sock"))
    assert len(sockets) >= 2 and all(path.stat().st_mode & 0o077 == 0 for path in (folder, *sockets))


# --- the sidecar ------------------------------------------------------------------------------------------------------


def native(ids: list[int], count: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}


def test_the_sidecar_serves_both_kinds_of_requests_at_the_version_they_demand(
    run: Run, server: SglangServer, answers: dict[int, Any], ids: list[int]
) -> None:
    moved(run, server, 0)
    with Sidecar(run.store, server, engine="sglang") as sidecar:
        sidecar.ready()
        answer = sidecar.complete(TEXT, X_Weight_Version_Min=str(LAST), X_Weight_Version_Wait="120")
        assert answer.status == 200 and answer.start == answer.end == LAST
        assert answer.json["choices"][0]["logprobs"]["token_logprobs"] == answers[LAST]["logprobs"]
        assert answer.json["metadata"]["weight_version"].endswith(f":{LAST}")
        answer = sidecar.ask("POST", "/generate", {**native(ids, 12), "weight_version": {"exact": LAST}})
        assert answer.status == 200 and answer.start == answer.end == LAST
        (span,) = answer.json["meta_info"]["weight_versions"]
        assert (span["version"].rpartition(":")[2], span["start"], span["end"]) == (str(LAST), 0, 12)
        assert sidecar.status["digest"] == Checkpoint(run.checkpoints[LAST]).digest().hex()
        assert sidecar.ask("POST", "/generate", {**native(ids, 1), "weight_version": {"exact": 1}}).status == 409
        stream = sidecar.complete(TEXT, stream=True)
        end = json.loads(stream.body.decode().rstrip().splitlines()[-1].removeprefix("data: "))
        assert end == {"run": sidecar.status["run_id"], "start": LAST, "end": LAST}
        *_, last = Stream(sidecar.port, ids, 4)
        assert last["meta_info"]["completion_tokens"] == 4


def test_routes_that_change_weights_memory_or_admission_are_for_nobody(run: Run, server: SglangServer) -> None:
    paths = server.get("/openapi.json")["paths"]
    words = ("weight", "pause", "continue_gen", "memory_occ", "flush", "lora", "abort", "hicache/", "profile",
             "elastic_ep", "role_switch", "expert_distribution", "internal_state", "slow_down", "remote_instance",
             "freeze", "configure")  # fmt: skip
    with Sidecar(run.store, server, engine="sglang") as sidecar:
        sidecar.ready()
        found = [path for path in paths if any(word in path for word in words) and "is_scaling" not in path]
        assert len(found) > 30
        for path in found:
            assert sidecar.ask("POST", path, {}).status == 403, path
        assert sidecar.ask("GET", "/v1/models").status == 200
        assert sidecar.ask("GET", "/model_info").status == 200


@pytest.mark.parametrize("step", ["replica:paused", "replica:committed"])
def test_a_sidecar_killed_inside_a_commit_goes_on_after_its_restart(
    run: Run, server: SglangServer, answers: dict[int, Any], step: str
) -> None:
    moved(run, server, 0)
    with Sidecar(run.store, server, engine="sglang", WEIGHT_SYNC_CRASH_AT=step) as sidecar:
        assert sidecar.process.wait(120) == -signal.SIGKILL
    asked: dict[str, Any] = {}
    client = threading.Thread(target=lambda: asked.update(server.complete()))
    client.start()  # admission is shut: it waits
    with Sidecar(run.store, server, engine="sglang") as sidecar:
        sidecar.ready(LAST)
        answer = sidecar.complete(TEXT)
        assert answer.status == 200 and answer.start == answer.end == LAST
        assert answer.json["choices"][0]["logprobs"]["token_logprobs"] == answers[LAST]["logprobs"]
    client.join(60)
    assert asked in answers.values()
