"""Claims about the sidecar when something dies, hangs or lies: what is served stays true, and it comes back by itself.

Real processes that are killed and stopped. Owns no claim about requests that all goes well for (test_sidecar).
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from loop import digest_of, model
from sidecar_cases import Answer, Scene, Upstream, read_event, scene, until

from weight_sync import Publisher


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("faults"), "--drain=0.3") as made:
        yield made


def restart_engine(served: Scene, step: int = 0, weights: str = "weights") -> None:
    """Another process at the same address; with ``weights`` of its own it holds the state after ``step``."""
    served.engine = Upstream(served.folder, served.engine_port, step, weights)
    served.engine.started()


def in_engine(served: Scene, count: int = 1) -> None:
    until(lambda: served.engine.facts()["inside"] == count, f"{count} requests in the engine")


# --- requests that hang --------------------------------------------------------------------------------------------


def test_a_request_that_hangs_does_not_hold_up_a_version(served: Scene) -> None:
    with ThreadPoolExecutor(2) as pool:
        hangs = pool.submit(served.sidecar.post, {"hang": "hard"})
        ends = pool.submit(served.sidecar.post, {"hang": "soft"})
        in_engine(served, 2)
        before = served.head
        served.advance()
        assert hangs.result().status == 503 and hangs.result().error["code"] == "weight_version_fenced"
        aborted = ends.result()
        assert aborted.status == 200 and aborted.versions() == (before, before), "the engine ended this one itself"
        assert aborted.json["choices"][0]["finish_reason"] == "abort"
    until(lambda: served.engine.facts()["inside"] == 0, "the end of both in the engine")
    assert served.check(served.sidecar.post({})) == served.head
    assert served.sidecar.status["aborted"] == 1


def test_a_stream_that_is_ended_at_a_fence_says_so_and_breaks_off(served: Scene) -> None:
    connection = served.sidecar.connect()
    body = json.dumps({"stream": True, "hold": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert b'"token"' in read_event(answer)
    served.advance()
    error = read_event(answer)
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "weight_version_fenced"
    with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
        answer.read()
    connection.close()


# --- an engine that goes away --------------------------------------------------------------------------------------


def test_an_engine_that_was_killed_is_not_served_and_recognised_when_it_returns(served: Scene) -> None:
    served.engine.kill()
    until(lambda: not served.sidecar.is_ready(), "not ready")
    answer = served.sidecar.post({})
    assert answer.status == 503 and "retry-after" in answer.headers
    assert served.sidecar.ask("GET", "/healthz").status == 200
    assert served.sidecar.status["version"] in (None, served.head)
    restart_engine(served)
    served.sidecar.await_version(served.head)
    assert "stage" not in served.engine.facts()["calls"], "its weights outlived it, and were recognised"
    assert served.check(served.sidecar.post({})) == served.head


def test_an_engine_that_returns_with_other_weights_is_never_taken_for_what_it_was(served: Scene) -> None:
    answers: list[Answer] = []
    ended = threading.Event()

    def client() -> None:
        while not ended.is_set():
            answers.append(served.sidecar.post({"max_tokens": 2}))

    with ThreadPoolExecutor(2) as pool:
        clients = [pool.submit(client) for _ in range(2)]
        for step, weights in ((0, "older"), (9, "of no version")):
            shutil.rmtree(served.folder / weights, ignore_errors=True)
            served.engine.kill()
            restart_engine(served, step, weights)
            served.sidecar.await_version(served.head)
        until(lambda: answers[-1].status == 200, "an answer")
        ended.set()
        for done in clients:
            done.result()
    assert {answer.status for answer in answers} <= {200, 502, 503}
    versions = {served.check(answer) for answer in answers if answer.status == 200}
    assert served.head in versions <= {0, served.head}, "version 0 was recognised and served as such for a moment"
    served.advance()


def test_an_engine_that_is_stopped_is_seen_and_goes_on_where_it_was(served: Scene) -> None:
    until(served.sidecar.is_ready, "ready")
    served.engine.signal(signal.SIGSTOP)
    until(lambda: not served.sidecar.is_ready(), "not ready")
    assert served.sidecar.post({}).status == 503
    served.engine.signal(signal.SIGCONT)
    served.sidecar.await_version(served.head)
    assert served.check(served.sidecar.post({})) == served.head
    served.advance()


def test_an_answer_of_an_engine_that_stood_still_for_a_while_waits_until_it_is_known_again(tmp_path: Path) -> None:
    with scene(tmp_path) as made, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(made.sidecar.post, {"max_tokens": 3, "delay": 1.0})
        in_engine(made)
        made.engine.signal(signal.SIGSTOP)
        until(lambda: not made.sidecar.is_ready(), "not ready")
        made.engine.signal(signal.SIGCONT)
        assert made.check(slow.result()) == made.head, "one process made it, and it holds what it held"


def test_an_engine_that_is_killed_inside_a_fence_takes_the_version_when_it_returns(served: Scene) -> None:
    with ThreadPoolExecutor(1) as pool:
        hangs = pool.submit(served.sidecar.post, {"hang": "soft", "max_tokens": 1})
        in_engine(served)
        served.publish()
        until(lambda: not served.sidecar.status["open"], "a fence")
        served.engine.kill()
        assert hangs.result().status in (502, 503)
    restart_engine(served, weights="of no version")
    served.sidecar.await_version(served.head)
    assert served.check(served.sidecar.post({})) == served.head


# --- a store that goes away or lies --------------------------------------------------------------------------------


def test_a_version_that_cannot_be_taken_leaves_the_proxy_serving_the_one_before(served: Scene) -> None:
    before = served.head
    served.sidecar.signal(signal.SIGSTOP)  # so that the shard is bad when it is first read
    number = served.publish()
    shard = next(Path(served.keys.uri).glob(f"*/data/{number:020d}/*.safetensors"))
    good = shard.read_bytes()
    shard.write_bytes(good[:-8] + bytes(8))
    served.sidecar.signal(signal.SIGCONT)
    status = until(lambda: (status := served.sidecar.status)["error"] and status, "an error")
    assert status["version"] == before and status["staleness"] == 1 and status["ready"]
    assert served.check(served.sidecar.post({})) == before
    refused = served.sidecar.post({"weight_version": {"max_staleness": 0}})
    assert refused.status == 409 and refused.error["current"]["head"] == number
    shard.write_bytes(good)
    served.sidecar.await_version(number)
    until(lambda: not served.sidecar.status["error"], "the end of the error")
    assert "CorruptionError" in served.sidecar.status["last_error"] and served.sidecar.status["errors"] >= 1


def test_a_store_that_is_gone_leaves_the_proxy_serving(served: Scene) -> None:
    store = Path(served.keys.uri)
    away = store.with_name("away")
    store.rename(away)
    store.touch()
    try:
        until(lambda: served.sidecar.status["error"] and served.sidecar.status["head_age_s"] > 1.5, "a sign of it")
        assert served.check(served.sidecar.post({})) == served.head and served.sidecar.is_ready()
    finally:
        store.unlink()
        away.rename(store)
    served.advance()


def test_a_fork_is_followed_and_its_run_told(served: Scene) -> None:
    old = served.publisher.run_id
    with Publisher.open(served.keys.replace(fork=True)) as fork:
        report = fork.publish(model(9), step=9)
        assert report is not None and fork.run_id != old
        answer = until(
            lambda: (answer := served.sidecar.post({})).headers.get("x-weight-version-run") == fork.run_id and answer,
            "an answer of the new run",
        )
        served.sidecar.await_version(report.version)
        answer = served.sidecar.post({"weight_version": {"exact": report.version, "run": fork.run_id}})
        assert answer.status == 200 and answer.headers["x-weight-version-run"] == fork.run_id
        assert answer.json["choices"][0]["tokens"][0]["token"] == digest_of(model(9))
        until(lambda: served.sidecar.status["staleness"] == 0, "the head of the new run")
        assert served.sidecar.post({"weight_version": {"min": 0, "run": old}}).status == 409


# --- the sidecar itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["replica:paused", "replica:committed"])
def test_a_sidecar_killed_inside_a_fence_goes_on_after_its_restart(tmp_path: Path, step: str) -> None:
    with scene(tmp_path, crash_at=f"{step}#2") as made:
        made.publish()
        assert made.sidecar.process.wait() == -signal.SIGKILL
        calls = made.engine.facts()["calls"]
        assert calls[-1] == ("pause" if step == "replica:paused" else "commit"), "admission is shut in the engine"
        made.sidecar = made.new_sidecar()
        made.sidecar.await_version(made.head)
        again = made.engine.facts()["calls"][len(calls):]  # fmt: skip
        assert again[0] == "describe" and again.count("commit") == (step == "replica:paused")
        assert made.check(made.sidecar.post({})) == made.head


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_after_the_requests_in_flight(tmp_path: Path, number: int, code: int) -> None:
    with scene(tmp_path) as made, ThreadPoolExecutor(2) as pool:
        slow = pool.submit(made.sidecar.post, {"stream": True, "hold": True, "max_tokens": 2})
        waits = pool.submit(made.sidecar.post, {"weight_version": {"min": 99}}, X_Weight_Version_Wait="60")
        in_engine(made)
        until(lambda: made.sidecar.status["waiting"] == 1, "one who waits")
        made.sidecar.signal(number)
        assert waits.result().status == 503
        made.engine.facts("go")
        assert slow.result().body.count(b'"token"') == 2 and b"event: weight_version" in slow.result().body
        assert made.sidecar.process.wait() == code
        assert made.engine.facts()["calls"][-1] == "resume", "the engine is left open"
        assert made.engine.post({}).status == 200
        assert "Traceback" not in made.sidecar.log.read_text()


def test_a_sidecar_may_start_before_engine_and_trainer(tmp_path: Path) -> None:
    with scene(tmp_path) as made:
        made.sidecar.kill()
        made.engine.kill()
        made.sidecar = made.new_sidecar()
        made.sidecar.started()
        until(lambda: made.sidecar.post({}).status == 503, "an answer")
        restart_engine(made)
        made.sidecar.await_version(made.head)
