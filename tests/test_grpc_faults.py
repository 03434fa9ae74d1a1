"""Claims about what fails: links, servers, trainers, disks, slow readers, and versions of the protocol. Real sockets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_cases import COMMON, Proxy, client_of, free_port, go_on, kill, process, served, trainer
from loop import digest_of, holding, model
from test_grpc_relay import committed
from waiting import until

from weight_sync import Publisher, Replica
from weight_sync.config import Config
from weight_sync.errors import StoreError, StoreFullError, StoreUnavailableError, VersionNotReadyError, WeightSyncError
from weight_sync.ports import ShardBytes
from weight_sync.proto.v1 import common_pb2, service_pb2
from weight_sync.transport.grpc import GrpcTransport, wire
from weight_sync.transport.grpc.client import Client
from weight_sync.transport.grpc.wire import CALLS, read_chunk, write_chunk

DATA = Path(__file__).parent / "data"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


# --- links ---


def test_a_cut_link_resumes_at_the_byte_where_it_stopped(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    size = 64 << 20
    body = os.urandom(1 << 20) * 64
    ref = committed(client, [body])[0]
    proxy = Proxy(client.uri)
    stack.callback(proxy.close)
    end = stack.enter_context(closing(GrpcTransport(client_of(proxy.uri)).replica_end()))
    end.run_id()
    before = proxy.down_bytes
    proxy.cut_after = before + size // 2
    assert bytes(end.read(ref, 0, ref.size)) == b"head" + body
    assert proxy.cuts == 1
    lost = proxy.down_bytes - before - ref.size
    # what the dead connection still held in the window and the two socket buffers; from the start it would be half of all
    assert lost < size // 4, f"{lost} bytes were fetched twice"


@pytest.mark.full
def test_a_link_that_is_cut_for_half_a_minute_takes_no_byte_twice(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = served(tmp_path / "store", stack)
    size = 32 << 20
    body = os.urandom(1 << 20) * 32
    ref = committed(client, [body])[0]
    proxy = Proxy(client.uri)
    stack.callback(proxy.close)
    end = stack.enter_context(closing(GrpcTransport(client_of(proxy.uri, timeout_s=120)).replica_end()))
    end.run_id()
    taken: list[tuple[int, int]] = []  # (where a chunk went, its bytes)
    fetch = Client.fetch

    def told(self: Client, request: Any, fill: Any, connection: int = 0) -> int:
        def both(at: int, data: memoryview, message: Any) -> None:
            taken.append((at, len(data)))
            if at >= size // 2 and not proxy.cuts:  # in the middle of an object, from the reader's side
                proxy.refusing = True
                back = threading.Timer(30.0, lambda: setattr(proxy, "refusing", False))
                stack.callback(back.cancel)
                back.start()
                proxy.cut()
            fill(at, data, message)

        return fetch(self, request, both, connection)

    monkeypatch.setattr(Client, "fetch", told)
    began = time.monotonic()
    assert bytes(end.read(ref, 0, ref.size)) == b"head" + body
    assert time.monotonic() - began >= 30 and proxy.cuts == 1
    places = [at for at, _ in taken]
    assert places == sorted(places) and sum(count for _, count in taken) == ref.size, "each byte was taken once"


def test_a_link_that_is_down_for_longer_than_the_patience_is_an_error(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    ref = committed(client, [bytes(4 << 20)])[0]
    proxy = Proxy(client.uri)
    stack.callback(proxy.close)
    end = stack.enter_context(closing(GrpcTransport(client_of(proxy.uri, timeout_s=1.5)).replica_end()))
    end.run_id()
    proxy.refusing = True
    proxy.cut_after = proxy.down_bytes + (1 << 20)
    with pytest.raises(StoreUnavailableError):
        end.read(ref, 0, ref.size)


def test_the_next_version_is_sent_without_being_asked_for_again(tmp_path: Path, stack: ExitStack) -> None:
    server, client = served(tmp_path / "store", stack)
    proxy = Proxy(client.uri)
    stack.callback(proxy.close)
    end = stack.enter_context(closing(GrpcTransport(client_of(proxy.uri)).replica_end()))
    with Publisher.open(client, anchor_every=0, anchor_share=0) as publisher:
        for step in (0, 1):
            publisher.publish(model(step), step=step)
        assert end.fold("default", 0, 1) is not None
        waits = stack.enter_context(ThreadPoolExecutor(1))
        heard = waits.submit(end.wait, 1, 30.0)
        until(lambda: server.metrics.expecting == 1, "the read of version 2")
        proxy.mute = True
        publisher.publish(model(2), step=2)
        assert heard.result(30) == 2
        found = end.fold("default", 1, 2)
        proxy.mute = False
        shard = next(ref for ref in end.manifest(2).views[0].shards if ref.form == common_pb2.FORM_STEP)
        assert found is not None and found.stored == shard and found.data == end.read(shard, 0, shard.size)


@pytest.mark.parametrize("cut", [None, 3 << 20])
def test_what_came_ahead_is_dropped_or_completed(tmp_path: Path, stack: ExitStack, cut: int | None) -> None:
    """Another version than the one that is wanted is dropped; a link that is cut meanwhile is taken up where it broke."""
    server, client = served(tmp_path / "store", stack)
    proxy = Proxy(client.uri)
    stack.callback(proxy.close)
    end = stack.enter_context(closing(GrpcTransport(client_of(proxy.uri)).replica_end()))
    with Publisher.open(client, anchor_every=0, anchor_share=0) as publisher:
        big = {"w": torch.zeros(8 << 20, dtype=torch.bfloat16)}
        for step in (0, 1):
            big["w"][step] = 1
            publisher.publish(big, step=step)
        assert end.fold("default", 0, 1) is not None
        assert end.wait(1, 0.2) is None
        until(lambda: server.metrics.expecting == 1, "the read of version 2")
        if cut is not None:
            proxy.cut_after = proxy.down_bytes + cut
        big["w"].copy_(torch.rand(8 << 20))
        publisher.publish(big, step=2)
        if cut is None:
            big["w"][:9] = 3
            publisher.publish(big, step=3)
        newest = 2 if cut is not None else 3
        until(lambda: end.wait(1, 5.0) == newest)
        found = end.fold("default", 1, newest)
        assert found is not None and proxy.cuts == (cut is not None)
        fresh = stack.enter_context(closing(GrpcTransport(client).replica_end())).fold("default", 1, newest)
        assert fresh is not None and found.data == fresh.data


@pytest.mark.full
def test_a_half_open_link_is_noticed(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    ref = committed(client, [bytes(16 << 20)])[0]
    proxy = Proxy(client.uri)
    stack.callback(proxy.close)
    end = stack.enter_context(closing(GrpcTransport(client_of(proxy.uri, timeout_s=300)).replica_end()))
    end.run_id()
    thawed = threading.Timer(40.0, proxy.frozen.clear)  # by then the connection has been given up
    proxy.frozen.set()
    thawed.start()
    assert len(end.read(ref, 0, ref.size)) == ref.size
    thawed.cancel()


def test_a_watcher_comes_back_after_a_cut(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    proxy = Proxy(client.uri)
    stack.callback(proxy.close)
    with Publisher.open(client) as publisher, Replica.open(client_of(proxy.uri), holding(model(0))) as replica:
        publisher.publish(model(0), step=0)
        replica.sync(min_version=0)
        with pytest.raises(VersionNotReadyError):
            replica.sync(min_version=1, timeout=0.3)
        proxy.cut()
        publisher.publish(model(1), step=1)
        assert replica.sync(min_version=1).digest == digest_of(model(1))


# --- processes ---


@pytest.mark.slow
@pytest.mark.parametrize("crash_at", ["put_shard:after#2", "commit:before#2", "commit:after#2"])
def test_a_trainer_that_dies_leaves_its_engines_serving(crash_at: str, tmp_path: Path, stack: ExitStack) -> None:
    """The host is killed at a step of its second version; a new one goes on in the same run on the same port."""
    uri = f"grpc://127.0.0.1:{free_port()}"
    first = trainer(uri, tmp_path / "store", 0, 3, crash_at)
    stack.callback(kill, first)
    engine = holding(model(0))
    with Replica.open(client_of(uri), engine, replica_id="a") as replica:
        until(lambda: _tried(replica) is not None, limit=60)
        go_on(first)
        assert first.wait(60) == -9
        with pytest.raises(WeightSyncError):
            replica.sync(timeout=1)
        assert replica.version is not None and replica.state == 2  # it serves on
        run = replica.run_id
        second = trainer(uri, tmp_path / "store", 2, 4)
        stack.callback(kill, second)
        go_on(second)
        until(lambda: (_tried(replica) or 0) >= 1 and replica.manifest().step == 4, limit=60)
        assert replica.run_id == run
        assert replica.engine.audit().hex() == digest_of(model(4))


def _tried(replica: Replica) -> int | None:
    try:
        return replica.sync(timeout=1).version
    except WeightSyncError:
        return None


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_read_is_waited_for(tmp_path: Path, stack: ExitStack) -> None:
    store, port = str(tmp_path / "store"), free_port()
    words = ("serve", "--store", store, "--listen", f"127.0.0.1:{port}")
    with process(*words) as (first, uri):
        ref = committed(client_of(uri), [bytes(48 << 20)])[0]
        proxy = Proxy(uri)
        stack.callback(proxy.close)
        end = stack.enter_context(closing(GrpcTransport(client_of(proxy.uri)).replica_end()))
        end.run_id()
        found: list[memoryview] = []
        reading = threading.Thread(target=lambda: found.append(end.read(ref, 0, ref.size)))
        begun = proxy.down_bytes
        reading.start()
        until(lambda: proxy.down_bytes > begun + (1 << 20))
        kill(first)
    with process(*words):
        reading.join(60)
    assert len(found) == 1 and len(found[0]) == ref.size


def test_engines_of_an_old_run_follow_the_new_one(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    engine = holding(model(0))
    with Replica.open(client, engine) as replica:
        with Publisher.open(client) as publisher:
            publisher.publish(model(0), step=0)
            publisher.publish(model(1), step=1)
        replica.sync(min_version=1)
        old = replica.run_id
        with Publisher.open(client, fork=True) as publisher:
            publisher.publish(model(7), step=0)
            until(lambda: replica.sync().run_id != old)
        assert replica.engine.audit().hex() == digest_of(model(7))


def test_a_server_without_a_store_says_so_and_recovers(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    with Publisher.open(client) as publisher:
        publisher.publish(model(0), step=0)
        with Replica.open(client, holding(model(0))) as replica:
            replica.sync()
            publisher.publish(model(1), step=1)
            publisher.publish(model(2), step=2)
            folder = next((tmp_path / "store").glob("*/data"))
            folder.rename(tmp_path / "away")
            with pytest.raises(WeightSyncError):
                replica.sync()
            assert replica.version == 0
            (tmp_path / "away").rename(folder)
            assert replica.sync().digest == digest_of(model(2))


# --- disks ---


def test_a_full_disk_refuses_the_version_and_keeps_the_one_before(small_disk: Path, stack: ExitStack) -> None:
    _, client = served(small_disk / "store", stack, cache_dir=str(small_disk / "cache"))
    with closing(GrpcTransport(client).publisher_end(0, 1)) as end:
        run = end.open_run("r", fork_of=None, writer="test")
        for size in (2 << 20, 700_000):  # more than the way in holds; then more than way in and store hold together
            with pytest.raises(StoreError) as caught:
                for _ in range(3):
                    end.put_shard(0, ShardBytes("anchor", 0, common_pb2.FORM_RAW, b"head", [os.urandom(size)]))
            assert isinstance(caught.value, StoreFullError)
        assert end.next_number() == 0 and run.created
    assert GrpcTransport(client).replica_end().newest_run() == "r"


# --- slow readers ---


def test_slow_readers_cost_little_memory_and_delay_nobody(tmp_path: Path, stack: ExitStack) -> None:
    store = str(tmp_path / "store")
    with process("serve", "--store", store, "--listen", "127.0.0.1:0") as (running, uri):
        client = client_of(uri)
        ref = committed(client, [bytes(32 << 20)])[0]
        end = stack.enter_context(closing(GrpcTransport(client).replica_end()))
        end.read(ref, 0, ref.size)
        before = psutil.Process(running.pid).memory_info().rss
        request = service_pb2.FetchRequest(run_id="r", object={"object": ref.object})
        for _ in range(40):
            channel = stack.enter_context(grpc.insecure_channel(uri.removeprefix("grpc://")))
            call = channel.unary_stream(CALLS["Fetch"].path)(request.SerializeToString())
            next(call)  # and nothing more
            stack.callback(call.cancel)
        assert len(end.read(ref, 0, ref.size)) == ref.size
        grown = psutil.Process(running.pid).memory_info().rss - before
        assert grown < 40 * (4 << 20), f"{grown >> 20} MiB for 40 readers that do not read"


# --- versions of the protocol ---


def frozen() -> Any:
    """Message classes of the service as it was frozen, apart from the installed ones."""
    files = descriptor_pb2.FileDescriptorSet.FromString((DATA / "service_v1.binpb").read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    service = pool.FindServiceByName("weight_sync.v1.WeightSync")
    return pool, service


def test_a_client_of_the_frozen_protocol_is_served(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    with Publisher.open(client) as publisher:
        for step in range(3):
            publisher.publish(model(step), step=step)
        run = publisher.run_id
    _, service = frozen()
    channel = stack.enter_context(grpc.insecure_channel(client.uri.removeprefix("grpc://")))

    def kinds(name: str) -> tuple[Any, Any]:
        method = service.methods_by_name[name]
        return message_factory.GetMessageClass(method.input_type), message_factory.GetMessageClass(method.output_type)

    def ask(name: str, **fields: Any) -> Any:
        request, reply = kinds(name)
        return channel.unary_unary(f"/{wire.SERVICE}/{name}", request.SerializeToString, reply.FromString)(
            request(**fields), timeout=10
        )

    info = ask("GetRun")
    assert (info.run_id, info.newest_run, info.head) == (run, run, 2)
    manifest = ask("GetEntry", run_id=run, number=2)
    request, reply = kinds("Fetch")
    fetch = channel.unary_stream(f"/{wire.SERVICE}/Fetch", request.SerializeToString, reply.FromString)
    for ref in manifest.views[0].shards:
        chunks = list(fetch(request(run_id=run, object=ref), timeout=10))
        assert sum(len(chunk.data) for chunk in chunks) == ref.size
    fold = list(fetch(request(run_id=run, fold={"view": "default", "have": 0, "target": 2}), timeout=10))
    assert fold[0].size == sum(len(chunk.data) for chunk in fold)
    ask("Acknowledge", run_id=run, acknowledgement={"replica_id": "old", "state": 2, "version": manifest_id(run, 2)})
    assert [r.replica_id for r in ask("GetFleet", run_id=run).replicas] == ["old"]


def manifest_id(run: str, number: int) -> dict[str, Any]:
    return {"run_id": run, "number": number}


def test_the_frozen_protocol_is_a_part_of_todays() -> None:
    """Nothing that was frozen has another number, type or place now; what is new has new numbers."""
    _, service = frozen()
    today = service_pb2.DESCRIPTOR.services_by_name["WeightSync"]
    for method in service.methods:
        now = today.methods_by_name[method.name]
        assert (now.client_streaming, now.server_streaming) == (method.client_streaming, method.server_streaming)
        seen: set[str] = set()
        _same(method.input_type, now.input_type, seen)
        _same(method.output_type, now.output_type, seen)


def _same(then: Any, now: Any, seen: set[str]) -> None:
    assert then.full_name == now.full_name
    if then.full_name in seen:
        return
    seen.add(then.full_name)
    for field in then.fields:
        current = now.fields_by_number[field.number]
        assert (current.name, current.type, current.is_repeated) == (field.name, field.type, field.is_repeated)
        if field.message_type is not None:
            _same(field.message_type, current.message_type, seen)


UNKNOWN = b"\xfa\x3f\x05novel"  # field 1023, five bytes


def test_unknown_fields_are_tolerated_both_ways(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    channel = stack.enter_context(grpc.insecure_channel(client.uri.removeprefix("grpc://")))
    data = service_pb2.RunRequest().SerializeToString() + UNKNOWN
    assert channel.unary_unary(CALLS["GetRun"].path)(data, timeout=10) == b""
    for call in CALLS.values():
        if call.name != "Fetch":
            assert call.decode_reply(UNKNOWN) is not None
    found, message = read_chunk(write_chunk(b"bytes") + UNKNOWN)
    assert bytes(found) == b"bytes" and message is not None
    assert read_chunk(write_chunk(b"x" * 70_000)) == (b"x" * 70_000, None)
    assert read_chunk(b"")[0] == b""


def test_a_server_that_knows_less_is_named(tmp_path: Path, stack: ExitStack) -> None:
    from concurrent import futures

    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stack.callback(server.stop, None)
    end = stack.enter_context(closing(GrpcTransport(client_of(f"grpc://127.0.0.1:{port}")).replica_end()))
    with pytest.raises(StoreError, match="does not know this call"):
        end.newest_run()


# --- many ---


def test_two_hundred_replicas_on_one_server_get_one_copy_each(tmp_path: Path, stack: ExitStack) -> None:
    from weight_sync.transport.grpc.bench.fleet import Fleet

    server, client = served(tmp_path / "store", stack)
    with Publisher.open(client, anchor_every=0, anchor_share=0) as publisher:
        publisher.publish(model(0), step=0)
        with Fleet(client, 200) as fleet:
            fleet.wait(0, 60)
            sent = server.metrics.sent_bytes
            publisher.publish(model(1), step=1)
            fleet.wait(1, 60)
            shard = publisher._end.reader().manifest(1).views[0].shards[0]
            assert server.metrics.sent_bytes - sent == 200 * shard.size
            until(lambda: len(publisher.acknowledgements()) == 200)
            assert {ack.version.number for ack in publisher.acknowledgements()} == {1}


def test_configuration_of_this_room_is_checked() -> None:
    assert Config(uri="grpc://h:1").backend == "grpc" and COMMON
    with pytest.raises(WeightSyncError, match=r"connections"):
        Config(uri="grpc://h:1").replace(connections=0)
