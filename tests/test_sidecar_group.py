"""Claims about a sidecar in front of several engines: all of them serve one version, or nobody is served.

Real processes. Owns no claim about one engine (test_sidecar, test_sidecar_faults).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loop import digest_of, model
from sidecar_cases import Answer, Scene, Upstream, free_port, until

from weight_sync.adapters.sidecar.balance import Balance
from weight_sync.adapters.sidecar.group import EngineGroup
from weight_sync.codec.digest import Digest
from weight_sync.errors import DeadlineError, EngineError, EngineInDoubtError
from weight_sync.ports import PauseMode
from weight_sync.proto.v1 import replica_pb2


class Group(Scene):
    """Two engines, each with weights of its own."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.second_port = free_port()
        self.second = Upstream(folder, self.second_port, weights="second")
        super().__init__(folder, f"--engine-url=http://127.0.0.1:{self.second_port}", *words)

    @property
    def engines(self) -> tuple[Upstream, Upstream]:
        return self.engine, self.second

    def close(self) -> None:
        super().close()
        self.second.kill()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    made = Group(tmp_path_factory.mktemp("group"), "--drain=5")
    try:
        made.advance()
        yield made
    finally:
        made.close()


def test_requests_go_to_all_engines_and_all_answer_with_one_version(served: Group) -> None:
    before = [engine.facts()["made"] for engine in served.engines]
    answers: list[Answer] = []
    ended = threading.Event()

    def client() -> None:
        while not ended.is_set():
            answers.append(served.sidecar.post({"max_tokens": 2}))

    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(client) for _ in range(4)]
        for _ in range(5):
            number = served.advance()
            until(lambda: any(answer.versions()[0] == number for answer in answers), "an answer")  # noqa: B023
        ended.set()
        for done in clients:
            done.result()
    versions = {served.check(answer) for answer in answers}
    assert served.head in versions and len(versions) >= 5
    made = [engine.facts()["made"] - old for engine, old in zip(served.engines, before, strict=True)]
    assert min(made) > len(answers) // 4, "both have their share"


def test_a_request_that_takes_long_sends_the_others_to_the_other_engine(served: Group) -> None:
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(served.sidecar.post, {"stream": True, "hold": True, "max_tokens": 2})
        until(lambda: sum(engine.facts()["inside"] for engine in served.engines) == 1, "a request in flight")
        (free,) = [engine for engine in served.engines if not engine.facts()["inside"]]
        before = free.facts()["made"]
        for _ in range(3):
            served.check(served.sidecar.post({}))
        assert free.facts()["made"] == before + 3
        for engine in served.engines:
            engine.facts("go")
        assert b"event: weight_version" in slow.result().body


@pytest.mark.parametrize("which", [0, 1])
def test_an_engine_of_a_group_that_dies_inside_a_fence_keeps_the_version_from_being_announced(
    served: Group, which: int
) -> None:
    served.advance()
    with ThreadPoolExecutor(2) as pool:
        hangs = [pool.submit(served.sidecar.post, {"hang": "soft", "max_tokens": 1}) for _ in range(2)]
        until(lambda: all(engine.facts()["inside"] for engine in served.engines), "a request in each")
        served.publish()
        until(lambda: not served.sidecar.status["open"], "a fence")
        served.engines[which].kill()
        until(lambda: not served.sidecar.is_ready(), "not ready")
        assert {done.result().status for done in hangs} <= {200, 502, 503}
    assert served.sidecar.post({}).status == 503, "the one that is left serves nothing alone"
    if which:
        served.second = Upstream(served.folder, served.second_port, weights=f"new{which}")
    else:
        served.engine = Upstream(served.folder, served.engine_port, weights=f"new{which}")
    served.engines[which].started()
    served.sidecar.await_version(served.head)
    for engine in served.engines:
        tokens = engine.post({}).json["choices"][0]["tokens"]
        assert {token["token"] for token in tokens} == {digest_of(model(served.head))}
    assert served.check(served.sidecar.post({})) == served.head


# --- the group alone ---------------------------------------------------------------------------------------------------


class Member:
    """An engine that does as it is told."""

    control_routes = ("/door",)

    def __init__(self, **does: Callable[[], Any]) -> None:
        self.does, self.calls = does, list[str]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return self.does.get(name, lambda: Digest(1, 1))()

        return call


def raising(error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        raise error

    return call


def group(*members: Member) -> EngineGroup:
    return EngineGroup({f"http://{k}": member for k, member in enumerate(members)})  # type: ignore[misc]


def test_a_commit_that_one_engine_refuses_is_taken_back_on_the_others() -> None:
    good, bad = Member(), Member(commit=raising(EngineError("full")))
    with pytest.raises(EngineError, match="all engines"):
        group(good, bad).commit()
    assert good.calls == ["commit", "rollback"] and bad.calls == ["commit"]


def test_doubt_about_one_engine_is_doubt_about_the_group() -> None:
    good, lost = Member(), Member(commit=raising(EngineInDoubtError("gone")))
    with pytest.raises(EngineInDoubtError, match="gone"):
        group(Member(commit=raising(EngineError("full"))), good, lost).commit()
    stuck = Member(rollback=raising(EngineInDoubtError("stuck")))
    with pytest.raises(EngineInDoubtError, match="taken back"):
        group(stuck, Member(commit=raising(EngineError("full")))).commit()


def test_digests_that_differ_are_the_digest_of_no_version() -> None:
    one, other = Digest(1, 1), Digest(2, 2)
    both = group(Member(audit=lambda: one), Member(audit=lambda: other)).audit()
    assert both not in (one, other)
    assert group(Member(), Member()).audit() == Digest(1, 1)
    described = [replica_pb2.EngineDescription(digest=digest.to_proto()) for digest in (one, other)]
    members = [Member(describe=lambda d=d: d) for d in described]  # type: ignore[misc]
    assert not group(*members).describe().HasField("digest")
    described[1].contract.tensor_parallel = 2
    with pytest.raises(EngineError, match="not alike"):
        group(*members).describe()


def test_a_pause_that_one_engine_refuses_opens_the_others_again() -> None:
    good, busy = Member(), Member(pause=raising(DeadlineError("busy")))
    both = group(good, busy)
    with pytest.raises(DeadlineError):
        both.pause(PauseMode.WAIT, 1.0)
    assert good.calls == ["pause", "resume"]
    del busy.does["pause"]
    both.pause(PauseMode.WAIT, 1.0)
    busy.does["pause"] = raising(DeadlineError("busy"))
    with pytest.raises(DeadlineError):
        both.pause(PauseMode.WAIT, 1.0)
    assert good.calls[-1] == "pause", "what was shut stays shut"


def test_equals_take_turns_and_the_idle_one_goes_first() -> None:
    balance = Balance(["http://a/", "http://b", "http://c"])
    with balance.engine() as first, balance.engine() as second:
        assert [first, second] == ["http://a", "http://b"]
        for _ in range(3):
            with balance.engine() as third:
                assert third == "http://c"
    with balance.engine() as after:
        assert after == "http://a"
