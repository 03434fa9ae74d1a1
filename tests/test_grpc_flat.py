"""Claims about what one relay costs a server: the same, however many follow behind it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from grpc_cases import COMMON, client_of, relayed, served
from loop import holding, model
from waiting import until

from weight_sync import Publisher, Replica
from weight_sync.config import Config
from weight_sync.proto.v1 import common_pb2, replica_pb2, service_pb2
from weight_sync.transport.grpc import reading as reading_room
from weight_sync.transport.grpc import relay as relay_room
from weight_sync.transport.grpc.bench.fleet import Fleet
from weight_sync.transport.grpc.client import Client
from weight_sync.transport.grpc.relay import RelayReturns, told_in
from weight_sync.transport.grpc.returns import StoreReturns
from weight_sync.transport.grpc.server import Server
from weight_sync.transport.grpc.watching import Watcher

LONG_S = 1e6


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no call more."""
    monkeypatch.setattr(relay_room, "_COUNTS_S", LONG_S)
    monkeypatch.setattr(relay_room, "_WANT_S", LONG_S)
    monkeypatch.setattr(reading_room, "_PAGE_S", LONG_S)


def site(tmp_path: Path, stack: ExitStack) -> tuple[Server, Publisher, Server, Config]:
    """A server with a publisher, and a relay of it."""
    server, client = served(tmp_path / "store", stack)
    publisher = stack.enter_context(Publisher.open(client, anchor_every=0, anchor_share=0))
    publisher.publish(model(0), step=0)
    relay, behind = relayed(client.uri, stack, cache_dir=str(tmp_path / "cache"))
    return server, publisher, relay, behind


def calls(server: Server) -> Counter[str]:
    """So far, by name, whatever came of them."""
    found: Counter[str] = Counter()
    for (name, _), count in list(server.metrics.calls.items()):
        found[name] += count
    return found


def spread(server: Server, publisher: Publisher, fleet: Fleet, step: int) -> tuple[Counter[str], int]:
    """Calls that reached the server, and bytes that left it, for one version; those of the publisher included."""
    before, sent = calls(server), server.metrics.sent_bytes
    publisher.publish(model(step), step=step)
    fleet.wait(step, 60)
    until(lambda: server.metrics.head == step, "the relay to tell")
    return calls(server) - before, server.metrics.sent_bytes - sent


def test_what_a_version_asks_of_the_server_does_not_grow_with_the_followers_behind_a_relay(
    tmp_path: Path, stack: ExitStack
) -> None:
    found = []
    for count in (2, 40):
        with ExitStack() as one:
            server, publisher, relay, behind = site(tmp_path / str(count), one)
            with Fleet(behind, count) as fleet:
                fleet.wait(0, 60)
                until(lambda: server.metrics.head == 0, "the relay to tell")  # noqa: B023
                spread(server, publisher, fleet, 1)
                found.append(spread(server, publisher, fleet, 2))
                assert relay.metrics.watchers == count and server.metrics.watchers == 1
                assert relay.metrics.sent_bytes == count * server.metrics.sent_bytes
    few, many = found
    assert few == many
    assert few[0]["Fetch"] == few[0]["Acknowledge"] == 1
    assert not {"Watch", "GetRun", "GetEntry", "Entries", "Heartbeat"} & set(few[0])


MANY = 40


def hold(monkeypatch: pytest.MonkeyPatch, far: tuple[Any, str], near: tuple[Any, str]) -> None:
    """The server answers ``far`` once MANY have come as far as ``near`` in the relay; each an owner and a method."""
    gate, come = threading.Event(), iter(range(1, MANY + 1))
    answer, ask = getattr(*far), getattr(*near)

    async def late(*given: Any) -> Any:
        assert await asyncio.to_thread(gate.wait, 30)
        return await answer(*given)

    async def counted(*given: Any) -> Any:
        if next(come, MANY) == MANY:
            gate.set()
        return await ask(*given)

    monkeypatch.setattr(*far, late)
    monkeypatch.setattr(*near, counted)


def many(one: Callable[[int], Any]) -> None:
    """MANY threads at once; whatever fails in one of them is raised."""
    with ThreadPoolExecutor(MANY) as pool:
        list(pool.map(one, range(MANY)))


def test_a_renewal_for_many_replicas_at_once_is_one_call(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, publisher, _, behind = site(tmp_path, stack)
    client = stack.enter_context(closing(Client(behind)))
    version = common_pb2.VersionId(run_id=publisher.run_id, number=0)
    client.call("GetRun", service_pb2.RunRequest())  # the relay knows the run
    hold(monkeypatch, (StoreReturns, "lease"), (RelayReturns, "lease"))
    many(lambda k: client.call("Heartbeat", replica_pb2.Lease(replica_id=f"r{k}", version=version, ttl_s=600)))
    assert calls(server)["Heartbeat"] == 1 and dict(publisher._end.leases()) == {"relay": 0}


def test_a_full_state_that_many_replicas_want_at_once_is_asked_for_once(tmp_path: Path, stack: ExitStack) -> None:
    server, publisher, _, behind = site(tmp_path, stack)
    client = stack.enter_context(closing(Client(behind)))
    version = common_pb2.VersionId(run_id=publisher.run_id, number=0)
    many(lambda k: client.call("Want", replica_pb2.Lease(replica_id=f"r{k}", version=version)))
    assert calls(server)["Want"] == 1 and dict(publisher._end.wants()) == {"relay": 0}


def test_a_page_of_the_log_that_many_replicas_read_at_once_crosses_once(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, publisher, relay, behind = site(tmp_path, stack)
    client = stack.enter_context(closing(Client(behind)))
    client.call("GetRun", service_pb2.RunRequest())  # the relay knows the run
    hold(monkeypatch, (server.reading, "entries"), (relay.reading, "entries"))
    request = service_pb2.EntriesRequest(run_id=publisher.run_id, first=0, limit=1)
    before = calls(server)["Entries"]
    many(lambda k: list(client.stream("Entries", request)))
    assert calls(server)["Entries"] - before == 1


def test_a_relay_that_waits_to_tell_counts_has_one_timer(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_room, "_FORWARD_S", 0.0)
    _, publisher, relay, behind = site(tmp_path, stack)
    client = stack.enter_context(closing(Client(behind)))
    for k in range(30):
        ack = replica_pb2.Acknowledgement(replica_id=f"r{k}", state=replica_pb2.REPLICA_STATE_SERVING)
        ack.version.run_id, ack.version.number = publisher.run_id, 0
        client.call("Acknowledge", service_pb2.AcknowledgeRequest(run_id=publisher.run_id, acknowledgement=ack))
    assert relay.reading is not None
    loop: Any = relay.reading.loop
    until(lambda: len([t for t in list(loop._scheduled) if not t.cancelled() and t.when() > loop.time() + 60]) <= 1)


def test_counts_are_due_a_while_after_the_first_change_and_news_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_room, "_COUNTS_S", 10.0)
    before, told = (replica_pb2.Acknowledgement(replica_id="site") for _ in range(2))
    before.version.number = told.version.number = 1
    told.followers.add(count=7)
    assert told_in(before, told, changed_at=1000.0, now=1000.0) == 10.0  # however long ago it told the last time
    assert told_in(before, told, changed_at=1000.0, now=1009.0) == 1.0
    assert told_in(before, told, changed_at=1000.0, now=1011.0) == 0.0
    told.version.number = 2
    assert told_in(before, told, changed_at=1000.0, now=1000.0) == 0.0
    assert told_in(None, told, changed_at=1000.0, now=1000.0) == 0.0


def test_counts_are_told_after_all(tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_room, "_COUNTS_S", 0.1)
    _, publisher, _, behind = site(tmp_path, stack)
    stack.enter_context(Fleet(behind, 3))

    def told() -> list[int]:
        return [group.count for row in publisher.acknowledgements() for group in row.followers]

    until(lambda: told() == [3])


def test_whoever_waits_for_a_run_hears_of_it(tmp_path: Path, stack: ExitStack) -> None:
    """Before there is one, and while there are others; then one feed per run hears of everything."""
    server, client = served(tmp_path / "store", stack)
    relay, behind = relayed(client.uri, stack, cache_dir=str(tmp_path / "cache"))
    watchers = []
    for uri in (client.uri, behind.uri):
        connection = stack.enter_context(closing(Client(client_of(uri))))
        for asked, meant in (("", "first"), ("first", "first"), ("later", "later")):
            watchers.append((Watcher(connection, asked), meant))
            stack.callback(watchers[-1][0].close)
    waiting = (server.reading, relay.reading)
    until(lambda: all(reading is not None and list(reading._feeds) == [""] for reading in waiting), "all to wait")
    for run, keys in (("first", {}), ("later", {"fork": True})):
        with Publisher.open(client, run_id=run, **keys) as publisher:
            publisher.publish(model(0), step=0)
        for watcher, meant in watchers:
            if meant == run:
                look = until(lambda: watcher.wait(None, 1.0))  # noqa: B023
                assert (look.run_id, look.head) == (run, 0)
    assert all(reading is not None and set(reading._feeds) == {"first", "later"} for reading in waiting)


def test_a_publisher_that_goes_past_the_server_is_noticed(tmp_path: Path, stack: ExitStack) -> None:
    """The server, which had heard of versions from their publisher, goes on looking at the store."""
    _, client = served(tmp_path / "store", stack)
    with Publisher.open(client) as publisher:
        publisher.publish(model(0), step=0)
        replica = stack.enter_context(Replica.open(client, holding(model(0))))
        replica.sync()
        publisher.publish(model(1), step=1)
        assert replica.sync(min_version=1).version == 1
    with closing(Publisher.open(str(tmp_path / "store"), **COMMON)) as other:
        published = other.publish(model(2), step=2)
        assert replica.sync(min_version=published.version).version == published.version
