"""Claims about adapters in servers that load them by their own API: all servers or none, the way back, foreign bases.

The servers are stand-ins that keep what they were told; tests/engines has real ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import adapted, save_base, step

import weight_sync
from weight_sync.adapters.engines.adapter import AdapterEngine, HeldBase
from weight_sync.adapters.sidecar.answers import Refusal
from weight_sync.adapters.sidecar.lanes import Lane, Lanes, check_adapters
from weight_sync.adapters.sidecar.settings import Settings
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.config import load
from weight_sync.errors import ConfigError, EngineError, WrongBaseError
from weight_sync.proto.v1 import common_pb2

pytest.importorskip("peft")


class Standin:
    """What a server was told; refuses folders whose name ends as ``refuse`` says."""

    rank_option = "--max-lora-rank"

    def __init__(self, most: int | None = 16) -> None:
        self.adapters: dict[str, Path] = {}
        self.loads: list[str] = []
        self.cleared = 0
        self.refuse: str | None = None
        self._most = most

    def most(self, limit: float) -> int | None:
        return self._most

    def load(self, name: str, folder: Path, limit: float) -> None:
        self.loads.append(folder.name)
        if self.refuse is not None and folder.name.endswith(self.refuse):
            raise EngineError("refused", field=name)
        self.adapters[name] = folder

    def unload(self, name: str, limit: float) -> None:
        self.adapters.pop(name, None)

    def holds(self, name: str, folder: Path, limit: float) -> bool:
        return self.adapters.get(name) == folder

    def clear(self, limit: float) -> None:
        self.cleared += 1


class Case:
    """A run of adapters, two servers, and the base that they hold."""

    def __init__(self, base: Path, root: Path) -> None:
        self.root, self.store, self.model = root, root / "lora", adapted(base)
        self.servers = [Standin(), Standin()]
        version = common_pb2.VersionId(run_id="base-run", number=3)
        self.base = HeldBase(version, Checkpoint(base).digest())
        self.publisher = weight_sync.Publisher.open(str(self.store), adapter={"base": str(base)})

    def publish(self, seed: int = 0) -> int:
        report = self.publisher.publish(step(self.model, seed))
        assert report is not None
        return report.version

    @contextmanager
    def following(self) -> Iterator[tuple[AdapterEngine, Any]]:
        engine = AdapterEngine(self.servers, "tutor", self.root / "current", lambda: self.base)
        try:
            with weight_sync.Replica.open(str(self.store), engine) as replica:
                yield engine, replica
        finally:
            engine.close()

    @property
    def names(self) -> set[str]:
        """Of the folders that the servers have."""
        return {server.adapters["tutor"].name.rpartition("-")[2] for server in self.servers if server.adapters}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def case(base: Path, tmp_path: Path) -> Iterator[Case]:
    made = Case(base, tmp_path)
    yield made
    made.publisher.close()


def test_every_version_has_a_folder_of_its_own_and_caches_are_dropped(case: Case) -> None:
    with case.following() as (engine, replica):
        for k in range(3):
            number = case.publish(k)
            replica.sync()
            assert case.names == {str(number)} and engine.unfit() == ""
        assert all(len(set(server.loads)) == 3 and server.cleared == 3 for server in case.servers)


def test_a_server_that_refuses_takes_no_other_along(case: Case) -> None:
    with case.following() as (_, replica):
        first = case.publish()
        replica.sync()
        second = case.publish(1)
        case.servers[1].refuse = f"-{second}"
        with pytest.raises(EngineError, match=f"version {first} is served again"):
            replica.sync()
        assert case.names == {str(first)} and replica.version == first
        third = case.publish(2)
        replica.sync()
        assert case.names == {str(third)}


def test_a_first_version_that_is_refused_is_nowhere_and_the_next_one_is_tried(case: Case) -> None:
    first = case.publish()
    case.servers[1].refuse = f"-{first}"
    with case.following() as (_, replica):
        with pytest.raises(EngineError, match="nothing is served"):
            replica.sync()
        assert not case.servers[0].adapters and replica.version is None
    second = case.publish(1)
    with case.following() as (_, replica):
        replica.sync()
        assert case.names == {str(second)}


def test_a_rank_above_the_servers_largest_is_refused_before_the_fence(case: Case) -> None:
    case.servers[1] = Standin(most=2)
    case.publish()
    with case.following() as (_, replica), pytest.raises(EngineError, match=r"found 4.*at most 2.*--max-lora-rank 4"):
        replica.sync()
    assert not case.servers[0].loads and not case.servers[1].loads


def test_an_adapter_is_recognised_after_a_restart_and_loaded_where_it_is_gone(case: Case) -> None:
    number = case.publish()
    with case.following() as (_, replica):
        replica.sync()
    case.servers[1].adapters.clear()  # the server was started anew
    loads = [len(server.loads) for server in case.servers]
    with case.following() as (_, replica):
        report = replica.sync()
        assert report.version == number and "apply" not in report.seconds
        assert case.names == {str(number)} and len(case.servers[1].loads) == loads[1] + 1


def test_a_base_that_moves_makes_it_unfit_and_is_named(case: Case) -> None:
    with case.following() as (engine, replica):
        case.publish()
        replica.sync()
        case.base = HeldBase(common_pb2.VersionId(run_id="base-run", number=4), Digest(1, 2))
        reason = engine.unfit()
        assert "version 4 of run base-run" in reason and Digest(1, 2).hex() in reason and "to fix it" in reason
        case.publish(1)
        with pytest.raises(WrongBaseError):
            replica.sync()
    before = [list(server.loads) for server in case.servers]
    with case.following() as (engine, replica):
        with pytest.raises(WrongBaseError):
            replica.sync()
        assert replica.version is None and [server.loads for server in case.servers] == before
    case.base = HeldBase()
    with case.following() as (engine, replica), pytest.raises(WrongBaseError, match="unknown"):
        replica.sync()


def test_requests_go_by_the_lane_that_they_name() -> None:
    lane: Any = type("L", (), {"name": "tutor"})()
    lanes = Lanes([lane])
    found: list[tuple[bytes, Lane | None]] = [
        (b'{"model": "tutor"}', lane), (b'{"model": "tiny"}', None), (b'{"model": "tiny:tutor"}', lane),
        (b'{"lora_path": "tutor", "text": ""}', lane), (b'{"lora_path": ["tutor", "tutor"]}', lane),
        (b'{"lora_path": [null, null]}', None), (b'{"model": 3}', None), (b"[1]", None), (b"", None),
        (b'{"model": "\\u0074utor"}', lane), (b"no json", None),
    ]  # fmt: skip
    for body, expected in found:
        assert lanes.named(body) is expected, body
    for body in (b'{"lora_path": ["tutor", "other"]}', b'{"lora_path": ["tutor", null]}', b"model=tutor&x"):
        with pytest.raises(Refusal) as caught:
            lanes.named(body)
        assert caught.value.status == 400
    assert Lanes(()).named(b'{"model": "tutor"}') is None


def test_adapters_cannot_outlive_their_base() -> None:
    config, settings = load({"uri": "x"}), Settings(("http://127.0.0.1:1",))
    check_adapters({"tutor": config}, config, settings)
    for one, other in ((config.replace(pause="keep"), settings),
                       (config, Settings(("http://127.0.0.1:1",), after_drain="keep"))):  # fmt: skip
        with pytest.raises(ConfigError, match="outlive"):
            check_adapters({"tutor": config}, one, other)
        check_adapters({}, one, other)
    with pytest.raises(ConfigError, match="usable name"):
        check_adapters({"../x": config}, config, settings)
