"""Claims about the rollout client, against real HTTP servers in processes of their own that refuse, hang and die.

Owns no claim about the pure parts (test_rollout_rules).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import until

import weight_sync
from weight_sync.adapters.rollout import Prompt, RolloutClient
from weight_sync.errors import ConfigError, DeadlineError, InputError
from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory import TrajectoryInbox

MODULE = Path(__file__).with_name("rollout_engine.py")


class Engine:
    """One server process."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen([sys.executable, str(MODULE), str(self.port)])

    def ready(self) -> Engine:
        deadline = time.monotonic() + 60
        while True:
            try:
                self.set()
                return self
            except httpx.TransportError:
                assert self.process.poll() is None and time.monotonic() < deadline, "the engine did not start"
                time.sleep(0.02)

    def set(self, **state: Any) -> list[dict[str, Any]]:
        """Changes its behaviour; returns the requests so far."""
        found: list[dict[str, Any]] = httpx.post(f"{self.url}/test", json=state, timeout=10).json()
        return found

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)


@pytest.fixture(scope="module")
def idle() -> Iterator[list[Engine]]:
    """Engines that have been started already."""
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.close()


@pytest.fixture
def engines(idle: list[Engine]) -> Callable[..., list[Engine]]:
    """Gives fresh engines that serve these versions."""
    waiting = [engine for engine in idle if engine.alive()]

    def start(*versions: int) -> list[Engine]:
        given = [waiting.pop() if waiting else Engine() for _ in versions]
        idle.extend(engine for engine in given if engine not in idle)
        for engine, version in zip(given, versions, strict=True):
            engine.ready().set(reset=version)
        return given

    return start


def prompts(count: int, samples: int = 1) -> list[Prompt]:
    return [Prompt([k + 1, 5], id=f"p{k}", samples=samples, metadata={"k": str(k)}) for k in range(count)]


def client(engines: list[Engine], **options: Any) -> RolloutClient:
    return RolloutClient([engine.url for engine in engines], **{"deadline_s": 30.0, **options})


def names(found: list[trajectory_pb2.Trajectory]) -> Counter[str]:
    return Counter(trajectory.id for trajectory in found)


def test_every_flavour_gives_the_same_trajectory(engines: Any) -> None:
    [engine] = engines(4)
    for flavour, path in (
        ("completions", "/v1/completions"),
        ("vllm", "/inference/v1/generate"),
        ("sglang", "/generate"),
    ):
        asked = client([engine], flavour=flavour, model="m", sampling={"max_tokens": 9, "top_p": 0.5})
        [found] = asked.generate([Prompt([11, 12], id="p", metadata={"a": "b"})])
        replay = b"\0\1\2" if flavour == "vllm" else b""
        assert found == trajectory_pb2.Trajectory(
            id="p-0", run_id="run", prompt_token_ids=[11, 12], output_token_ids=[4, 11, 7], router_replay=replay,
            output_logprobs=[-0.25, -0.5, -1.0], finish_reason="stop", metadata={"a": "b"}, group="p",
            engine_id=found.engine_id, spans=[trajectory_pb2.VersionSpan(number=4, begin=0, end=3)],
        ), flavour  # fmt: skip
        assert found.engine_id in (engine.url, f"engine-{engine.port}")
        request = engine.set()[-1]
        assert request["path"] == path
        body = request["body"]
        limits = body if flavour == "completions" else body["sampling_params"]
        assert limits["max_new_tokens" if flavour == "sglang" else "max_tokens"] == 9 and limits["top_p"] == 0.5


@pytest.mark.parametrize("flavour", ["vllm", "sglang"])
def test_spans_per_token_are_the_engines_own(flavour: str, engines: Any) -> None:
    [engine] = engines(4)
    engine.set(end=6, labels=[["run:4", 0, 1], ["run:6", 1, 3]])
    [found] = client([engine], flavour=flavour).generate(prompts(1))
    assert [(s.number, s.begin, s.end) for s in found.spans] == [(4, 0, 1), (6, 1, 3)]
    assert found.metadata["weight_sync.versions"] == "4..6"


def test_without_spans_of_the_engine_all_tokens_count_as_the_start_versions(engines: Any) -> None:
    [engine] = engines(4)
    engine.set(end=6)
    [found] = client([engine]).generate(prompts(1))
    assert [(s.number, s.begin, s.end) for s in found.spans] == [(4, 0, 3)]
    assert found.metadata["weight_sync.versions"] == "4..6"


def test_every_sample_comes_once_over_a_fleet_and_load_is_shared(engines: Any, tmp_path: Path) -> None:
    fleet = engines(1, 1, 1)
    for engine in fleet:
        engine.set(delay=0.02)
    asked = client(fleet, concurrency=12)
    found = list(asked.generate(prompts(30, samples=2)))
    assert names(found) == Counter(f"p{k}-{j}" for k in range(30) for j in range(2))
    shares = [len(engine.set()) for engine in fleet]
    assert sum(shares) == 60 and min(shares) >= 10
    assert asked.counts["delivered"] == 60
    with TrajectoryInbox(tmp_path / "inbox.sqlite", run_id="run") as inbox:
        assert not any(receipt.duplicate for receipt in inbox.put(found))


def test_only_engines_at_an_acceptable_version_are_asked_when_there_are_any(engines: Any) -> None:
    old, new = engines(2, 5)
    asked = client([old, new], min_version=5, poll_s=0.05)
    asked.fleet.set([old.url, new.url])
    asked.fleet.seats[0].saw("run", 2)
    found = list(asked.generate(prompts(10)))
    assert {trajectory.output_token_ids[0] for trajectory in found} == {5}
    assert not old.set(), "an engine that is known to be behind was asked"


def test_a_409_is_tried_elsewhere_and_again_after_its_time(engines: Any) -> None:
    old, new = engines(2, 5)
    for engine in (old, new):
        engine.set(retry_after="0.2")
    found = list(client([old, new], exact=5, concurrency=1).generate(prompts(4)))
    assert {t.output_token_ids[0] for t in found} == {5} and len(found) == 4

    async def overtake() -> list[trajectory_pb2.Trajectory]:
        late = client([old], min_version=9)
        task = asyncio.create_task(_all(late.stream(prompts(2))))
        while not late.counts["retried"]:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(old.set, version=9)
        return await task

    assert {t.output_token_ids[0] for t in asyncio.run(overtake())} == {9}


async def _all(stream: AsyncIterator[trajectory_pb2.Trajectory]) -> list[trajectory_pb2.Trajectory]:
    return [trajectory async for trajectory in stream]


def test_a_busy_engine_is_given_the_time_it_asks_for(engines: Any) -> None:
    [engine] = engines(3)
    engine.set(busy=2, retry_after="0.3")
    began = time.monotonic()
    [found] = client([engine]).generate(prompts(1))
    assert found.id == "p0-0" and time.monotonic() - began >= 0.6
    assert len(engine.set()) == 3, "it was asked before its time, or more than once"


def test_an_engine_killed_mid_request_costs_no_sample_and_doubles_none(engines: Any) -> None:
    dying, alive = engines(1, 1)
    dying.set(die_at=5, delay=0.05)
    alive.set(delay=0.01)
    asked = client([dying, alive], concurrency=16)
    found = list(asked.generate(prompts(40)))
    assert names(found) == Counter(f"p{k}-0" for k in range(40))
    assert dying.process.wait(30) == -signal.SIGKILL
    assert asked.counts["retried"] >= 1


def test_a_hung_engine_is_left_after_a_while(engines: Any) -> None:
    hung, alive = engines(1, 1)
    hung.set(hang=1000)
    found = list(client([hung, alive], request_s=0.3, concurrency=4).generate(prompts(8)))
    assert names(found) == Counter(f"p{k}-0" for k in range(8))


def test_a_stopped_process_is_no_reason_to_wait_for_it(engines: Any) -> None:
    stopped, alive = engines(1, 1)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    found = list(client([stopped, alive], request_s=0.3, concurrency=4).generate(prompts(8)))
    assert len(found) == 8
    os.kill(stopped.process.pid, signal.SIGCONT)


def test_a_deadline_ends_with_what_every_engine_said(engines: Any) -> None:
    old, gone = engines(2, 2)
    gone.close()
    failures: list[tuple[str, Exception]] = []
    asked = client([old, gone], min_version=9, deadline_s=0.5, on_failure=lambda p, e: failures.append((p.id, e)))
    assert list(asked.generate(prompts(2))) == []
    assert sorted(name for name, _ in failures) == ["p0", "p1"] and asked.counts["failed"] == 2
    assert all(isinstance(error, DeadlineError) for _, error in failures)
    text = str(failures[0][1])
    assert f"{old.url}: HTTP 409: not now" in text and f"{gone.url}: Connect" in text
    with pytest.raises(DeadlineError):
        list(client([old], min_version=9, deadline_s=0.2).generate(prompts(2)))


def test_what_no_engine_would_take_is_not_tried_again(engines: Any) -> None:
    [engine] = engines(2)
    engine.set(status=400)
    with pytest.raises(InputError, match="HTTP 400: as told"):
        list(client([engine]).generate(prompts(1)))
    assert len(engine.set()) == 1


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"status": 500}, "HTTP 500"),
        ({"plain": True}, "put a sidecar in front"),
        ({"finish": "abort"}, "aborted"),
        ({"end_run": "fork"}, "changed runs"),
        ({"broken": True}, "not the answer of"),
    ],
)
def test_an_answer_that_cannot_be_used_is_tried_elsewhere(state: dict[str, Any], reason: str, engines: Any) -> None:
    bad, good = engines(2, 2)
    bad.set(**state)
    asked = client([bad, good], concurrency=4)
    assert len(list(asked.generate(prompts(8)))) == 8
    with pytest.raises(DeadlineError, match=reason):
        list(client([bad], deadline_s=2).generate(prompts(1)))


def test_what_becomes_too_stale_on_its_way_is_dropped_and_counted(engines: Any) -> None:
    [engine] = engines(5)
    current = 6
    asked = client([engine], max_staleness=1, current_version=lambda: current)
    assert len(list(asked.generate(prompts(3)))) == 3
    engine.set(delay=1.0)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lambda: list(asked.generate(prompts(3))))
        until(lambda: len(engine.set()) == 6, "the requests")
        current = 7
        assert late.result(30) == [] and asked.counts["too_stale"] == 3
    assert {r["headers"]["x-weight-version-min"] for r in engine.set()} == {"5"}


def test_an_engine_that_is_too_far_behind_the_trainer_makes_no_tokens(engines: Any) -> None:
    [engine] = engines(5)
    asked = client([engine], max_staleness=1, current_version=lambda: 7)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(lambda: list(asked.generate(prompts(3))))
        until(lambda: asked.counts["retried"], "a refusal")
        engine.set(version=6)
        assert [found.spans[0].number for found in late.result(30)] == [6] * 3
    assert asked.counts["too_stale"] == 0


def test_staleness_is_counted_from_the_newest_version_that_sidecars_have_seen(engines: Any) -> None:
    [engine] = engines(5)
    engine.set(head=7, delay=0.2)
    asked = client([engine], max_staleness=1)
    assert list(asked.generate(prompts(2))) == [] and asked.counts["too_stale"] == 2
    assert asked.newest("run") == asked.newest(None) == 7 and asked.newest("other") is None
    engine.set(head=6)
    assert len(list(client([engine], max_staleness=1).generate(prompts(2)))) == 2


def test_coroutines_of_one_loop_ask_at_once_and_wait_for_what_is_not_there_yet(engines: Any) -> None:
    [engine] = engines(5)
    current = 5
    asked = client([engine], max_staleness=0, current_version=lambda: current)

    async def together() -> list[trajectory_pb2.Trajectory]:
        nonlocal current
        try:
            found = await asyncio.gather(*(asked.ask(prompt) for prompt in prompts(20)))
            current = 6
            late = asyncio.create_task(asked.ask(Prompt([9], id="late")))
            while not asked.counts["retried"]:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(engine.set, version=6)
            return [*found, await late]
        finally:
            await asked.aclose()

    found = asyncio.run(together())
    assert names(found) == Counter([f"p{k}-0" for k in range(20)] + ["late-0"])
    assert [t.spans[0].number for t in found] == [5] * 20 + [6]
    current = 6
    again = asyncio.run(together())  # in another event loop
    assert again[0].spans[0].number == 6
    with pytest.raises(DeadlineError):
        asyncio.run(client([engine], min_version=9, deadline_s=0.2).ask(Prompt([1])))


def test_a_run_is_asked_for_by_name(engines: Any) -> None:
    other, mine = engines(8, 2)
    other.set(run="other")
    found = list(client([other, mine], run_id="run", concurrency=2).generate(prompts(6)))
    assert {t.run_id for t in found} == {"run"}


def test_no_more_than_allowed_is_in_flight_and_prompts_are_drawn_as_room_appears(engines: Any) -> None:
    [engine] = engines(1)
    engine.set(delay=0.02)
    drawn = 0

    def source() -> Iterator[Prompt]:
        nonlocal drawn
        for prompt in prompts(20):
            drawn += 1
            yield prompt

    asked = client([engine], concurrency=4, per_engine=2)
    seen = 0
    for _ in asked.generate(source()):
        seen += 1
        assert drawn <= seen + 2 * 4 + 1
        assert all(seat.in_flight <= 2 for seat in asked.fleet.seats)
    assert seen == 20


def test_an_iteration_may_be_left_and_another_begun(engines: Any) -> None:
    [engine] = engines(1)
    asked = client([engine], concurrency=4)
    for trajectory in asked.generate(prompts(50)):
        assert trajectory.run_id == "run"
        break
    assert len(list(asked.generate(prompts(5)))) == 5
    assert all(seat.in_flight == 0 for seat in asked.fleet.seats)


def test_prompts_may_come_asynchronously(engines: Any) -> None:
    [engine] = engines(1)

    async def run() -> list[str]:
        told: asyncio.Queue[Prompt] = asyncio.Queue()

        async def source() -> AsyncIterator[Prompt]:
            for _ in range(3):
                yield await told.get()

        found = []
        told.put_nowait(Prompt([1], id="first"))
        async for trajectory in client([engine]).stream(source()):
            found.append(trajectory.id)
            told.put_nowait(Prompt([1], id=f"after-{len(found)}"))  # the next prompt depends on the answer
        return found

    assert asyncio.run(run()) == ["first-0", "after-1-0", "after-2-0"]


def test_the_fleet_may_grow_while_it_is_asked(engines: Any) -> None:
    [first] = engines(1)
    urls = [first.url]
    asked = RolloutClient(lambda: urls, min_version=3, deadline_s=60.0, poll_s=0.05)

    async def run() -> list[trajectory_pb2.Trajectory]:
        task = asyncio.create_task(_all(asked.stream(prompts(2))))
        while not asked.counts["retried"]:
            await asyncio.sleep(0.01)
        [second] = await asyncio.to_thread(engines, 3)
        urls.append(second.url)
        return await task

    assert {t.output_token_ids[0] for t in asyncio.run(run())} == {3}


def test_a_seed_differs_between_the_samples_of_a_prompt(engines: Any) -> None:
    [engine] = engines(1)
    list(client([engine], sampling={"seed": 10}).generate(prompts(1, samples=3)))
    assert sorted(request["body"]["seed"] for request in engine.set()) == [10, 11, 12]


def test_the_public_name_leads_here() -> None:
    assert weight_sync.RolloutClient is RolloutClient


def test_options_that_make_no_sense_are_refused() -> None:
    for options in ({"flavour": "telepathy"}, {"min_version": 1, "exact": 1}, {"exact": -1}, {"concurrency": 0},
                    {"deadline_s": 0}):  # fmt: skip
        with pytest.raises(ConfigError):
            RolloutClient(["http://127.0.0.1:1"], **options)  # type: ignore[arg-type]
    for engines_ in ([], "http://127.0.0.1:1"):
        with pytest.raises(ConfigError):
            RolloutClient(engines_)
    with pytest.raises(InputError):
        Prompt([])
    with pytest.raises(InputError):
        list(RolloutClient(["http://127.0.0.1:1"]).generate(["text"]))  # type: ignore[list-item]
