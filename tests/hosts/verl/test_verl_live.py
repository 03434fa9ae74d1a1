"""Claims about versions that are written in place under verl: when they are, what a rollout does when they are not, and that
all rollout workers of a replica go one way. Engine and server are doubles; test_verl_vllm.py has the real ones.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from worker_cases import LocalControl, engine_of
from worker_cases import checkpoint as small

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.worker.remote import RemoteEngine
from weight_sync.config import Config, load
from weight_sync.ports import Group, PauseMode

pytest.importorskip("verl", reason="verl is not installed here; make test-hosts builds its environment")
pytestmark = pytest.mark.timeout(300)

State = dict[str, torch.Tensor]


@pytest.fixture
def keys(tmp_path: Path, request: pytest.FixtureRequest) -> Config:
    """``param`` False: without the tensor that no loader takes."""
    base = small(tmp_path / "base")
    if not getattr(request, "param", True):
        path = base / "model.safetensors"
        kept = {name: tensor.clone() for name, tensor in load_file(path).items() if name != "rotary.inv_freq"}
        save_file(kept, path)
    return load({"uri": str(tmp_path / "store"), "base": str(base), "poll_s": 0.02, "timeout_s": 30, "fence_s": 30,
                 "threads": 1, "anchor_share": 0, "cache_dir": str(tmp_path / "cache")})  # fmt: skip


@pytest.fixture
def publisher(keys: Config) -> Iterator[Publisher]:
    with Publisher.open(keys) as publisher:
        yield publisher


def state(keys: Config, step: int) -> State:
    """After ``step`` steps: the checkpoint's, but for one element of each tensor and step."""
    found = load_file(Path(str(keys.base)) / "model.safetensors")
    for tensor in found.values():
        for k in range(step):
            tensor.view(torch.int16).view(-1)[k % tensor.numel()] ^= 1
    return found


def publish(publisher: Publisher, keys: Config, step: int) -> int:
    """Version 0 is the checkpoint's."""
    report = publisher.publish(state(keys, step), step=step)
    assert report is not None and report.version == step + 1
    return step + 1


class Unpaused(LocalControl):
    """Admission is somebody else's."""

    def pause(self, mode: PauseMode, limit: float) -> None: ...

    def resume(self, limit: float) -> None: ...


def adapter(**other: Any) -> Any:
    """verl's client of a server, with verl's own configuration of a rollout that may be written in place."""
    from verl.workers.config import RolloutConfig

    given = {"name": "vllm", "free_cache_engine": False, "tensor_model_parallel_size": 1, **other}
    return SimpleNamespace(config=RolloutConfig(**given), replica_rank=0, _has_server=True)


def live_of(keys: Config, control: LocalControl, client: Any = None, variables: dict[str, str] | None = None) -> Any:
    """The adapter, but for the way to the workers."""
    from weight_sync.adapters.trainers.verl.live import Live

    class Driven(Live):
        opened = 0

        def _open(self, run_id: str) -> Replica:
            self.opened += 1
            config = self._config.replace(run_id=run_id)
            return Replica.open(config, RemoteEngine(control, config, "driven"))

    return Driven(client or adapter(), keys, variables or {})


def engine(keys: Config, step: int | None = 0, pack: bool = False) -> Unpaused:
    """One that has booted from a version; None: from no checkpoint at all."""
    control = Unpaused(engine_of(Path(str(keys.base)), pack=pack)[1].hosts)
    host = control.hosts[0]
    if step is None:
        host.checkpoint = lambda: None  # type: ignore[method-assign]
        for parameter in host.model().parameters():
            parameter.data.fill_(0.5)
    return control


def loaded(control: LocalControl, tensors: State) -> None:
    """verl's own load."""
    control.hosts[0].load(control.hosts[0].model(), iter(tensors.items()))


def holds(control: LocalControl, tensors: State) -> bool:
    """Whether the model computes with these."""
    other = engine_of_state(tensors)
    mine = dict(control.hosts[0].model().named_parameters())
    return all(torch.equal(mine[name].view(torch.int16), want.view(torch.int16)) for name, want in other.items())


def engine_of_state(tensors: State) -> State:
    from worker_cases import Model

    model = Model(0, 1)
    model.load_weights(tensors.items())
    return dict(model.named_parameters())


# --- one replica ------------------------------------------------------------------------------------------------------


def test_an_engine_that_booted_from_the_first_version_takes_every_version_in_place(
    keys: Config, publisher: Publisher
) -> None:
    control = engine(keys)
    live, before = live_of(keys, control), [p.data_ptr() for p in control.hosts[0].model().parameters()]
    for step in range(4):
        assert live.reach(publisher.run_id, publish(publisher, keys, step)) == ""
        assert holds(control, state(keys, step))
    assert live.reach(publisher.run_id, 4) == "", "a sync that failed ends with the version before"
    assert [p.data_ptr() for p in control.hosts[0].model().parameters()] == before and live.opened == 1
    live.loads()


@pytest.mark.parametrize("keys", [False], indirect=True)
def test_an_engine_without_a_version_is_loaded_once_and_patched_from_then_on(
    keys: Config, publisher: Publisher
) -> None:
    control = engine(keys, None)
    live = live_of(keys, control)
    assert "hold no version" in live.reach(publisher.run_id, publish(publisher, keys, 0))
    live.loads()
    loaded(control, state(keys, 0))
    for step in (1, 2):
        assert live.reach(publisher.run_id, publish(publisher, keys, step)) == ""
        assert holds(control, state(keys, step))
    live.loads()


def test_packed_weights_are_loaded_whole_for_good(keys: Config, publisher: Publisher) -> None:
    live = live_of(keys, engine(keys, pack=True))
    version = publish(publisher, keys, 0)
    for _ in range(2):
        assert (
            live.reach(publisher.run_id, version) == "vLLM does not compute with what it loaded: attn.k: laid out anew"
        )
        live.loads()
    assert live.opened == 1, "it is not asked again"


@pytest.mark.parametrize("keys", [False], indirect=True)
def test_parameters_that_are_not_what_was_loaded_are_loaded_whole_for_good(keys: Config, publisher: Publisher) -> None:
    control = engine(keys, None)
    live = live_of(keys, control)
    live.reach(publisher.run_id, publish(publisher, keys, 0))
    live.loads()
    loaded(control, state(keys, 0))
    control.hosts[0].model().attn.o.data.neg_()  # type: ignore[union-attr, operator]
    assert "not known to be what verl has loaded" in live.reach(publisher.run_id, publish(publisher, keys, 1))
    assert live.lasting


@pytest.mark.parametrize("verb", ["stage", "commit"])
def test_a_step_that_fails_is_a_reason_and_the_next_version_is_in_place_again(
    keys: Config, publisher: Publisher, verb: str
) -> None:
    control = engine(keys)
    live = live_of(keys, control)
    assert live.reach(publisher.run_id, publish(publisher, keys, 0)) == ""
    control.lose = verb
    assert "lost" in live.reach(publisher.run_id, publish(publisher, keys, 1)) and not live.lasting
    live.loads()
    loaded(control, state(keys, 1))
    assert live.reach(publisher.run_id, publish(publisher, keys, 2)) == "" and holds(control, state(keys, 2))
    live.loads()


def test_an_engine_that_cannot_be_driven_is_not_asked_again(keys: Config, publisher: Publisher) -> None:
    control = engine(keys)
    control.hosts[0].rank = 1
    live = live_of(keys, control)
    version = publish(publisher, keys, 0)
    first = live.reach(publisher.run_id, version)
    assert "not all ranks" in first and live.reach(publisher.run_id, version) == first and live.opened == 1


# --- all rollout workers of a replica -----------------------------------------------------------------------------------


class ThreadGroup:
    """Two ranks in two threads."""

    size = 2

    def __init__(self, rank: int, barrier: threading.Barrier, board: dict[int, bytes]) -> None:
        self.rank, self._barrier, self._board = rank, barrier, board

    def gather(self, data: bytes) -> list[bytes]:
        self._board[self.rank] = data
        self._barrier.wait(60)
        return [self._board[0], self._board[1]] if self.rank == 0 else []

    def broadcast(self, data: bytes | None) -> bytes:
        if data is not None:
            self._board[2] = data
        self._barrier.wait(60)
        answer = self._board[2]
        self._barrier.wait(60)
        return answer


def test_rollout_workers_of_one_replica_are_told_the_same_and_one_of_them_drives(
    keys: Config, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weight_sync.adapters.trainers.verl import live as module

    control, barrier, board = engine(keys), threading.Barrier(2), dict[int, bytes]()
    client, both = adapter(tensor_model_parallel_size=2), {"WORLD_SIZE": "2", "RAY_LOCAL_WORLD_SIZE": "2"}
    lives = [live_of(keys, control, client, both) for _ in range(2)]
    groups: dict[int, Group] = {}
    monkeypatch.setattr(module, "default_group", lambda _: groups[threading.get_ident()])

    def reach(rank: int, version: int, told: list[str]) -> None:
        groups[threading.get_ident()] = ThreadGroup(rank, barrier, board)
        told[rank] = lives[rank].reach(publisher.run_id, version)

    def all_reach(version: int) -> list[str]:
        told = ["", ""]
        threads = [threading.Thread(target=reach, args=(rank, version, told)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return told

    assert all_reach(publish(publisher, keys, 0)) == ["", ""]
    control.lose = "commit"
    told = all_reach(publish(publisher, keys, 1))
    assert told[0] == told[1] and "lost" in told[0]
    assert [bool(live.opened) for live in lives] == [True, False]


@pytest.mark.parametrize(("given", "ranks", "local", "words"), [
    ({}, 1, 1, ""),
    ({"tensor_model_parallel_size": 2}, 2, 2, ""),
    ({"free_cache_engine": True}, 1, 1, "set rollout.free_cache_engine=false"),
    ({"data_parallel_size": 2}, 2, 2, "data-parallel"),
    ({"tensor_model_parallel_size": 2}, 2, 1, "several hosts"),
    ({"tensor_model_parallel_size": 2}, 4, 4, "share their group"),
    ({"engine_kwargs": {"vllm": {"speculative_config": {"method": "mtp"}}}}, 1, 1, "draft model"),
])  # fmt: skip
def test_why_versions_are_loaded_whole_is_a_reason_in_words(
    given: dict[str, Any], ranks: int, local: int, words: str
) -> None:
    from weight_sync.adapters.trainers.verl.live import why_whole

    found = why_whole(adapter(**given).config, "grpc://trainer:1", ranks, local)
    assert words in found and bool(words) == bool(found)
    assert "RDMA" in why_whole(adapter().config, "rdma://trainer:1", 1, 1)


# --- one sync of a rollout worker -----------------------------------------------------------------------------------------


class Remote:
    """A method of an actor."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def remote(self, *args: Any) -> Any:
        return self._function(*args)


def test_verl_loads_nothing_that_is_in_place_and_everything_else_whole(
    keys: Config, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from weight_sync.adapters.trainers.verl import arrival
    from weight_sync.adapters.trainers.verl.notice import Board, Notice

    calls: list[Any] = []

    class ServerAdapter:
        config, replica_rank, _has_server = adapter().config, 0, True
        model_config = SimpleNamespace(local_path=keys.base)
        server_handle = SimpleNamespace(clear_kv_cache=Remote(lambda: calls.append("clear")),
                                        set_global_steps=Remote(lambda step: calls.append(step)))  # fmt: skip

        def _ensure_server_handle(self) -> bool:
            return True

        async def update_weights(self, weights: Any, global_steps: int | None = None) -> None:
            got = {name: tensor.clone() async for name, tensor in weights}
            loaded(control, got)
            calls.append(sorted(got))

    monkeypatch.setitem(sys.modules, arrival._CLIENT, SimpleNamespace(ServerAdapter=ServerAdapter))  # type: ignore[arg-type]
    monkeypatch.setattr(arrival, "_to_device", lambda tensor: tensor)
    for _ in range(2):
        arrival.hook_rollout()
    control = engine(keys)
    rollout, board, server = arrival.Rollout(dict(keys.model_dump())), Board("127.0.0.1", 30), ServerAdapter()
    rollout._live = live_of(keys, control)
    seen = []
    try:
        for step in range(4):
            control.lose = "commit" if step == 2 else ""
            where = board.begin()
            board.post(Notice(publisher.run_id, publish(publisher, keys, step), False))
            asyncio.run(server.update_weights(arrival.Arrival(rollout, where, step), global_steps=step))
            assert holds(control, state(keys, step))
            seen.append(board.paths())
    finally:
        rollout._live.loads()
        if rollout.copy is not None:
            rollout.copy.close()
        board.close()
    names = sorted(state(keys, 0))
    assert calls == ["clear", 0, "clear", 1, names, "clear", 3]
    one, other = {"in_place": 1.0, "whole": 0.0}, {"in_place": 0.0, "whole": 1.0}
    expected = [{}, one, one, other]  # each is told with the next sync
    assert seen == [{f"weight_sync/rollouts_{way}": count for way, count in ways.items()} for ways in expected]
    said = [record.message for record in caplog.records if "by a full load" in record.message]
    assert len(said) == 1 and "lost" in said[0]
    assert rollout.copy is None, "nobody keeps a copy that is older than what is in place"
