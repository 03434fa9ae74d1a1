"""Claims about the parts of the RDMA transport that need no engine: the pipeline, lowering, the wire, layouts files, plans.

Owns a real NIXL agent where bytes have to move, two sockets where calls do.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner
from waiting import until

from weight_sync.cli import app
from weight_sync.config import Config
from weight_sync.errors import (
    ConfigError,
    DeadlineError,
    FormatError,
    InputError,
    StoreUnavailableError,
    VersionExpiredError,
)
from weight_sync.holding import Holding
from weight_sync.layout.box import Box
from weight_sync.proto.v1 import rdma_pb2, service_pb2
from weight_sync.snapshot import Snapshot
from weight_sync.transport.rdma import nixl
from weight_sync.transport.rdma.blocks import blocks_of
from weight_sync.transport.rdma.layouts import read_sides, write_file
from weight_sync.transport.rdma.links import Nics
from weight_sync.transport.rdma.lowering import Staging, lower
from weight_sync.transport.rdma.memory import MemoryMap
from weight_sync.transport.rdma.model import Calibration, summarise
from weight_sync.transport.rdma.onesided import Span
from weight_sync.transport.rdma.pipeline import Pipeline, Task
from weight_sync.transport.rdma.presets import PRESETS, engine_rank, side, trainer_rank
from weight_sync.transport.rdma.schedule import plan
from weight_sync.transport.rdma.wire import Connection, parse_address
from weight_sync.transport.rdma.writes import Write

# --- the pipeline ---


def test_tasks_pass_every_stage_in_order_under_the_watermark() -> None:
    seen: list[tuple[str, int]] = []
    held = [0, 0]
    lock = threading.Lock()

    def made(k: int) -> None:
        with lock:
            seen.append(("make", k))
            held[0] += 10
            held[1] = max(held)

    def written(k: int) -> Any:
        answers = iter([False, False, True])

        def done() -> bool:
            if next(answers):
                with lock:
                    seen.append(("write", k))
                    held[0] -= 10
                return True
            return False

        return done

    pipeline = Pipeline([("make", 1), ("write", 2)], watermark=30)
    tasks = [Task(f"t{k}", 10, (("make", lambda k=k: made(k)), ("write", lambda k=k: written(k)))) for k in range(20)]
    pipeline.run(tasks, 30)
    for stage in ("make", "write"):
        assert [k for name, k in seen if name == stage] == list(range(20))
        assert pipeline.seconds[stage].tasks == 20
    assert pipeline.peak <= 30 and held[1] <= 30 and held[0] == 0


def test_a_task_waits_for_the_one_whose_memory_it_uses() -> None:
    first_may_end, order = threading.Event(), []

    def second() -> None:
        order.append("second")

    tasks = [
        Task("a", 1, (("write", lambda: first_may_end.is_set),)),
        Task("b", 0, (("make", first_may_end.set),)),
        Task("c", 1, (("make", second),), after=0),
    ]
    Pipeline([("make", 1), ("write", 4)], watermark=100).run(tasks, 30)
    assert order == ["second"]


def test_a_stage_that_fails_ends_the_run_with_its_error() -> None:
    def fail() -> None:
        raise StoreUnavailableError("peer is gone")

    tasks = [Task("a", 1, (("make", lambda: None),)), Task("b", 1, (("make", fail),)), Task("c", 1, (("make", fail),))]
    with pytest.raises(StoreUnavailableError, match="peer is gone"):
        Pipeline([("make", 1)], 10).run(tasks, 30)


def test_a_stage_that_never_ends_runs_into_the_limit() -> None:
    with pytest.raises(DeadlineError, match="stuck"):
        Pipeline([("write", 1)], 10).run([Task("stuck", 1, (("write", lambda: lambda: False),))], 0.2)
    with pytest.raises(InputError, match="stages out of order"):
        Pipeline([("make", 1), ("write", 1)], 10).run(
            [Task("t", 1, (("write", lambda: None), ("make", lambda: None)))], 1
        )


# --- the snapshot's handshake ---


def test_readers_are_told_when_the_bits_move_under_them() -> None:
    holding = Holding(Snapshot("memory"), patience_s=0.05)
    holding.now(3, ())
    with holding.reading(3):
        assert holding.state()[0] == 3
    with pytest.raises(VersionExpiredError, match="moved on while"), holding.reading(3), holding.moving():
        holding.now(4, ())
    with pytest.raises(VersionExpiredError, match="found 4; expected 3"), holding.reading(3):
        raise AssertionError("not reached")


# --- lowering ---


@pytest.fixture(scope="module")
def agents() -> Any:
    pytest.importorskip("nixl_cu12")
    pair = [nixl.open_agent(Config(uri="rdma://127.0.0.1:1"), name) for name in ("trainer", "engine")]
    yield pair
    for agent in pair:
        agent.close()


@pytest.mark.parametrize("staging_bytes", [1 << 20, 2048])
def test_gathered_and_converted_writes_arrive_right(agents: Any, staging_bytes: int) -> None:
    trainer, engine = agents
    source = torch.randn(64, 48).to(torch.bfloat16)
    target = {"o": torch.zeros(64 * 24, dtype=torch.bfloat16), "w": torch.zeros(64 * 48, dtype=torch.float32)}
    trainer.register([Span(source.data_ptr(), 2 * source.numel())])
    engine.register(blocks_of(Span(t.data_ptr(), t.numel() * t.element_size()) for t in target.values()))
    peer = trainer.connect(engine.metadata())
    memory = MemoryMap({k: Span(t.data_ptr(), t.numel() * t.element_size()) for k, t in target.items()})
    bf16 = ("BF16", "BF16", "BF16")
    writes = [
        Write(0, 0, "o", "s", Box(24 + 16 * 48 * k, (16, 24), (48, 1)), "o", Box(16 * 24 * k, (16, 24), (24, 1)), bf16)
        for k in range(4)
    ]
    writes += [
        Write(0, 1, "w", "s", Box.run(48 * 8 * k, 48 * 8), "w", Box.run(48 * 8 * k, 48 * 8), ("BF16", "BF16", "F32"))
        for k in range(8)
    ]
    asked = []

    def staging(nbytes: int) -> Staging:
        asked.append(nbytes)
        room = torch.zeros(nbytes, dtype=torch.uint8)
        trainer.register([Span(room.data_ptr(), nbytes)])
        return Staging(room, Span(room.data_ptr(), nbytes))

    done = lower(trainer, writes, {"s": source.reshape(-1)}, {0: (peer, memory)}, staging,
                 staging_bytes=staging_bytes, gather_bytes=1024)  # fmt: skip
    assert (done.direct, done.staged) == (0, 12) and len(asked) == 1 and asked[0] <= staging_bytes
    running = threading.Event()
    poller = threading.Thread(target=lambda: [engine.notes() or time.sleep(0.001) for _ in iter(running.is_set, True)])
    poller.start()
    try:
        for _ in range(2):  # prepared once, posted again and again
            source.copy_(torch.randn(64, 48))
            pipeline = Pipeline([("make", 1), ("write", 4)], staging_bytes)
            pipeline.run(done.tasks, 30)
            assert torch.equal(target["o"].view(64, 24), source[:, 24:])
            assert torch.equal(target["w"].view(64, 48), source.float())
            assert pipeline.peak <= staging_bytes
    finally:
        running.set()
        poller.join(10)
        done.release()
        trainer.disconnect(peer)


def test_nobody_writes_beside_registered_memory(agents: Any) -> None:
    source = torch.zeros(16, dtype=torch.bfloat16)
    memory = MemoryMap({"w": Span(4096, 16)})
    for place in (Box.run(4, 8), Box.run(-1, 8), Box(0, (8,), (2,))):
        write = Write(0, 0, "w", "s", Box.run(0, 8), "w", place, ("BF16", "BF16", "BF16"))
        with pytest.raises(FormatError, match="a write leaves its storage: w in 'w'"):
            lower(agents[0], [write], {"s": source}, {0: ("peer", memory)}, lambda n: None,  # type: ignore[arg-type, return-value]
                  staging_bytes=1, gather_bytes=0)  # fmt: skip


def test_memory_that_touches_is_registered_together() -> None:
    page = 4096
    spans = [
        Span(10 * page, 100),
        Span(10 * page + 100, page),
        Span(11 * page + 200, 50),
        Span(20 * page, 8),
        Span(1, 0),
    ]
    assert blocks_of(spans) == [Span(10 * page, page + 250), Span(20 * page, 8)]


# --- the wire ---


def pair(handler: Any) -> tuple[Connection, Connection, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    listener = socket.create_server(("127.0.0.1", 0))
    ours.close(), theirs.close()
    client = socket.create_connection(listener.getsockname())
    server, _ = listener.accept()
    listener.close()
    a, b = Connection(client, "server", handler), Connection(server, "client", handler)
    a.start(), b.start()
    return a, b, client


def test_calls_are_answered_and_errors_keep_their_type() -> None:
    def handler(connection: Connection, call: rdma_pb2.Call) -> rdma_pb2.Call | None:
        if call.WhichOneof("body") == "run":
            return rdma_pb2.Call(run_info=service_pb2.RunInfo(run_id=call.run.run_id))
        raise VersionExpiredError("moved on", field="number", found=3, do="ask again")

    a, b, _ = pair(handler)
    run = rdma_pb2.Call(run=service_pb2.RunRequest(run_id="r"))
    assert a.request(run, 10).run_info.run_id == "r" and b.request(run, 10).run_info.run_id == "r"
    with pytest.raises(VersionExpiredError, match="moved on: number; found '3'; to fix it: ask again"):
        a.request(rdma_pb2.Call(ask=rdma_pb2.Ask()), 10)
    b.close()
    with pytest.raises(StoreUnavailableError, match="the connection has ended"):
        a.request(run, 10)
    a.close()


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x04\x00\x00\x00\xff\xff\xff\xff", b"\x00"])
def test_garbage_ends_the_connection_and_nothing_else(data: bytes) -> None:
    a, b, client = pair(lambda c, call: None)
    client.sendall(data)
    with contextlib.suppress(OSError):  # the other end may have given up already, and ours with it
        client.shutdown(socket.SHUT_WR)
    until(lambda: not b.is_open, "the end of the connection", 10)
    a.close()


def test_addresses() -> None:
    assert parse_address("rdma://host:12") == ("host", 12) and parse_address("rdma://[::1]:0/") == ("::1", 0)
    for bad in ("rdma://host", "tcp://host:1", "rdma://:1", "rdma://host:99999"):
        with pytest.raises(ConfigError, match="not an address"):
            parse_address(bad)


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_BUILDS", ("nixl_that_is_not_there",))
    with pytest.raises(ConfigError, match=r"needs NIXL.*pip install 'weight-sync\[rdma\]'"):
        nixl.load_nixl()


# --- plans ---


def test_a_layouts_file_gives_the_plan_of_the_ranks_that_wrote_it(tmp_path: Path) -> None:
    model, trainer, engine = PRESETS["tiny-moe"]()
    table = model.table()
    sides = (side(trainer.ranks, lambda r: trainer_rank(model, trainer, table, r)),
             side(engine.ranks, lambda r: engine_rank(model, engine, table, r)))  # fmt: skip
    wanted = plan(*sides).hash
    for name in ("layouts.json", "layouts.pb"):
        path = tmp_path / name
        write_file(path, [(r, trainer_rank(model, trainer, table, r)) for r in reversed(range(trainer.ranks))],
                   [(r, engine_rank(model, engine, table, r)) for r in range(engine.ranks)])  # fmt: skip
        assert plan(*read_sides(path)).hash == wanted
    for data, error in ((b"\xff", FormatError), (b"", FormatError)):
        path.write_bytes(data)
        with pytest.raises(error, match="layouts"):
            read_sides(path)


def test_the_plan_command_says_how_long_and_how_much(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["plan", "--preset", "tiny-moe", "--json", "--nics", "4", "--gbps", "100",
                                   "--save", str(tmp_path / "l.pb"), "--plot", str(tmp_path / "p.png")])  # fmt: skip
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert found["trainer_ranks"] == 8 and found["engine_ranks"] == 4
    assert sum(found["links"]["trainer"]) == sum(found["links"]["engine"]) == found["bytes"]
    assert found["memory"]["engine_shadow"] * 4 >= found["bytes"] and found["imbalance"]["trainer"] >= 1
    assert (tmp_path / "p.png").stat().st_size > 1000
    again = CliRunner().invoke(app, ["plan", "--layouts", str(tmp_path / "l.pb"), "--json", "--nics", "4"])
    assert json.loads(again.stdout)["hash"] == found["hash"]
    wrong = CliRunner().invoke(app, ["plan", "--json"])
    assert wrong.exit_code == 2 and "what to plan for" in wrong.stdout


def test_the_model_follows_the_busiest_link() -> None:
    model, trainer, engine = PRESETS["tiny-moe"]()
    table = model.table()
    sources = side(trainer.ranks, lambda r: trainer_rank(model, trainer, table, r))
    targets = side(engine.ranks, lambda r: engine_rank(model, engine, table, r))
    schedule = plan(sources, targets, nics=(Nics(8, 8), Nics(1, 8)))
    found = summarise(schedule, 8.0, Calibration(1.0, 0.0, 0.0))
    assert found["busiest_link"]["side"] == "engine" and found["busiest_link"]["bytes"] == found["bytes"]
    assert found["expected_seconds"] == pytest.approx(found["bytes"] / 1e9)


@pytest.mark.parametrize("layers", [6, pytest.param(61, marks=pytest.mark.slow)])
def test_a_large_expert_model_on_384_ranks_is_planned(capsys: pytest.CaptureFixture[str], layers: int) -> None:
    model, trainer, engine = PRESETS["kimi-k2-like"]()  # of 61 layers: a trillion parameters
    model = replace(model, layers=12)  # fewer of its equal layers; docs/rdma.md has all of them
    table = model.table()
    began = time.perf_counter()
    sources = side(trainer.ranks, lambda r: trainer_rank(model, trainer, table, r))
    targets = side(engine.ranks, lambda r: engine_rank(model, engine, table, r))
    made = time.perf_counter()
    schedule = plan(sources, targets)
    with capsys.disabled():
        print(f"\n{len(table)} tensors, {len(schedule.writes)} writes, {len(schedule.atoms)} templates: layouts "
              f"{made - began:.1f} s, schedule {time.perf_counter() - made:.1f} s")  # fmt: skip
    assert len(schedule.atoms) < 3000 < len(schedule.writes)
    received = np.bincount(schedule.target_ranks, schedule.nbytes)
    expected = np.zeros(engine.ranks)
    parts = np.array([part.elements for part in targets.parts]) * 2
    np.add.at(expected, targets.holdings["rank"], parts[targets.holdings["part"]])
    np.testing.assert_array_equal(received, expected)
