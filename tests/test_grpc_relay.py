"""Claims about relays: each byte crosses once, what comes back is summed up or kept, and what dies is no loss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from grpc_cases import COMMON, Proxy, client_of, command, free_port, kill, process, relayed, served
from loop import digest_of, holding, model, same_bits
from trajectory_cases import make
from waiting import until

from weight_sync import Publisher, Replica
from weight_sync.checkpoint import Checkpoint
from weight_sync.config import Config
from weight_sync.errors import LineageError, TrajectoryError
from weight_sync.ports import ShardBytes
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2
from weight_sync.transport.file import FileTransport
from weight_sync.transport.grpc import GrpcTransport
from weight_sync.transport.grpc import folds as folds_room
from weight_sync.transport.grpc import relay as relay_room
from weight_sync.transport.grpc.relay import is_news, relay_name, summary
from weight_sync.transport.grpc.server import Server


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def site(tmp_path: Path, stack: ExitStack, **keys: Any) -> tuple[Server, Publisher, Server, Config]:
    """A server with a publisher, and a relay of it."""
    server, client = served(tmp_path / "store", stack)
    publisher = stack.enter_context(Publisher.open(client, anchor_every=0, anchor_share=0))
    publisher.publish(model(0), step=0)
    relay, behind = relayed(client.uri, stack, cache_dir=str(tmp_path / "cache"), **keys)
    return server, publisher, relay, behind


def stored_bytes(publisher: Publisher, numbers: range) -> int:
    manifests = [publisher._end.reader().manifest(n) for n in numbers]
    return sum(
        ref.size for m in manifests for view in m.views for ref in view.shards if ref.form == common_pb2.FORM_STEP
    )


def test_relays_of_one_machine_have_names_of_their_own_which_last(tmp_path: Path, stack: ExitStack) -> None:
    """Two of one name would overwrite each other's lease, and what one still reads could be collected."""
    assert relay_name("a.b", 50072, 7) == relay_name("a.b", 50072, 8) == "relay-a-b-50072"
    assert len({relay_name("a.b", port, process) for port in (0, 50072) for process in (7, 8)}) == 3
    assert relay_name("", 1, 7) == "relay-host-1"
    server, publisher, _, behind = site(tmp_path, stack, replica_id=None)
    port = free_port()
    _, other = relayed(str(server.address), stack, replica_id=None, listen=f"127.0.0.1:{port}")
    for k, where in enumerate((behind, other)):
        stack.enter_context(Replica.open(where, holding(model(0)), replica_id=f"r{k}")).sync()
    until(lambda: len(dict(publisher._end.leases())) == 2, "a lease of each")
    assert any(name.endswith(f"-{port}") for name in dict(publisher._end.leases()))


def test_a_new_relay_holds_what_its_replicas_say_they_serve_before_they_renew(tmp_path: Path, stack: ExitStack) -> None:
    _, publisher, _, behind = site(tmp_path, stack)
    end = stack.enter_context(closing(GrpcTransport(behind).replica_end(None)))
    serving = replica_pb2.Acknowledgement(replica_id="r0", state=replica_pb2.REPLICA_STATE_SERVING)
    serving.version.run_id, serving.version.number = end.run_id(), 0
    end.acknowledge(serving)
    until(lambda: dict(publisher._end.leases()) == {"relay": 0}, "the relay's own lease")


def test_a_site_fetches_each_byte_once(tmp_path: Path, stack: ExitStack) -> None:
    server, publisher, relay, behind = site(tmp_path, stack)
    replicas = [stack.enter_context(Replica.open(behind, holding(model(0)), replica_id=f"r{k}")) for k in range(8)]
    for replica in replicas:
        replica.sync()
    sent = server.metrics.sent_bytes
    for step in (1, 2):
        publisher.publish(model(step), step=step)
        threads = [threading.Thread(target=r.sync, kwargs={"min_version": step}) for r in replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert {replica.manifest().views[0].digest.lane0 for replica in replicas} == {
            replicas[0].manifest().views[0].digest.lane0
        }
        assert [replica.version for replica in replicas] == [step] * 8
    assert server.metrics.sent_bytes - sent == stored_bytes(publisher, range(1, 3))
    assert relay.metrics.sent_bytes >= 8 * (server.metrics.sent_bytes - sent)


def test_a_fold_is_made_inside_the_site_from_patches_that_crossed_once(tmp_path: Path, stack: ExitStack) -> None:
    server, publisher, _, behind = site(tmp_path, stack)
    early, late = holding(model(0)), holding(model(0))
    with Replica.open(behind, early, replica_id="a") as one, Replica.open(behind, late, replica_id="b") as other:
        one.sync(), other.sync()
        sent = server.metrics.sent_bytes
        for step in range(1, 5):
            publisher.publish(model(step), step=step)
            one.sync(min_version=step)
        report = other.sync(min_version=4)
        assert (report.path, report.digest) == ("one object from version 0", digest_of(model(4)))
        assert server.metrics.sent_bytes - sent == stored_bytes(publisher, range(1, 5))


def test_a_site_with_a_copy_of_the_weights_takes_the_compact_form_over_the_link(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds_room, "_SITE_S", COMMON["timeout_s"])  # a busy machine's copy moves, if late
    server, client = served(tmp_path / "store", stack)
    publisher = stack.enter_context(Publisher.open(client, anchor_every=0, anchor_share=0, forms=["step", "compact"]))
    publisher.publish(model(0), step=0)
    relay, behind = relayed(client.uri, stack, cache_dir=str(tmp_path / "cache"), mirror=str(tmp_path / "copy"))
    engines = [holding(model(0)) for _ in range(3)]
    replicas = [stack.enter_context(Replica.open(behind, e, replica_id=f"r{k}")) for k, e in enumerate(engines)]
    for replica in replicas:
        replica.sync()
    until(
        lambda: (tmp_path / "copy").is_symlink() and Checkpoint(tmp_path / "copy").digest().hex() == digest_of(model(0))
    )
    sent = server.metrics.sent_bytes
    for step in (1, 2, 3):
        publisher.publish(model(step), step=step)
        for replica in replicas:
            assert replica.sync(min_version=step).path == f"one object from version {step - 1}"
    manifests = [publisher._end.reader().manifest(n) for n in (1, 2, 3)]
    compact = sum(r.size for m in manifests for r in m.views[0].shards if r.form == common_pb2.FORM_COMPACT)
    assert server.metrics.sent_bytes - sent == compact
    assert relay.metrics.far_bytes == 0, "no step form has crossed"
    assert all(same_bits(engine, model(3)) for engine in engines)
    assert Checkpoint(tmp_path / "copy").digest().hex() == digest_of(model(3))


def test_a_copy_that_cannot_move_leaves_the_site_with_the_step_form(tmp_path: Path, stack: ExitStack) -> None:
    _, publisher, _, behind = site(tmp_path, stack, mirror=str(tmp_path / "copy"))
    engine = holding(model(0))
    replica = stack.enter_context(Replica.open(behind, engine, replica_id="r"))
    replica.sync()
    until(lambda: (tmp_path / "copy").is_symlink())
    with unwritable(tmp_path / ".copy.weight_sync"):
        publisher.publish(model(1), step=1)
        assert replica.sync(min_version=1).version == 1 and same_bits(engine, model(1))


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """A file takes the folder's place, as a disk that has gone would."""
    away = folder.with_name("away")
    folder.rename(away)
    folder.write_text("")
    try:
        yield
    finally:
        folder.unlink()
        away.rename(folder)


def test_a_trajectory_that_the_trainer_would_refuse_gets_no_receipt_and_holds_up_nobody(
    tmp_path: Path, stack: ExitStack
) -> None:
    publisher = stack.enter_context(
        Publisher.open(
            "grpc://127.0.0.1:0", store=str(tmp_path / "run"), inbox=str(tmp_path / "inbox.sqlite"), **COMMON
        )
    )
    publisher.publish(model(0), step=0)
    _, behind = relayed(str(publisher._end.server.address), stack, cache_dir=str(tmp_path / "cache"))  # type: ignore[attr-defined]
    run = publisher.run_id
    with closing(GrpcTransport(client_of(behind.uri)).replica_end()) as end:
        end.send_trajectories([make("good", run_id=run)])
        for bad in (
            make("hole", run_id=run, spans=[]),
            make("far", run_id="run-x"),
            make("nan", run_id=run, reward=float("nan")),
        ):
            with pytest.raises((TrajectoryError, LineageError)):
                end.send_trajectories([make(f"beside-{bad.id}", run_id=run), bad])
        end.send_trajectories([make("hole", run_id=run), make("later", run_id=run)])  # mended, under the same id
    found: list[str] = []

    def arrived() -> bool:
        found.extend(t.id for t in publisher.take_trajectories())
        return len(found) >= 3

    until(arrived)
    assert sorted(found) == ["good", "hole", "later"]


def test_the_trainer_sees_a_site_as_one_replica(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_room, "_COUNTS_S", 0.5)
    _, publisher, _, behind = site(tmp_path, stack)
    replicas = [stack.enter_context(Replica.open(behind, holding(model(0)), replica_id=f"r{k}")) for k in range(3)]
    for replica in replicas:
        replica.sync()
    publisher.publish(model(1), step=1)
    for replica in replicas[:2]:
        replica.sync(min_version=1)

    def told() -> list[tuple[int, int]]:
        rows = publisher.acknowledgements()
        return [(g.version.number, g.count) for row in rows for g in row.followers] if len(rows) == 1 else []

    until(lambda: sorted(told()) == [(0, 1), (1, 2)])
    ack = publisher.acknowledgements()[0]
    assert (ack.replica_id, ack.version.number) == ("relay", 0)  # the oldest that is served
    assert dict(publisher._end.leases()) == {"relay": 0}
    replicas[2].sync(min_version=1)
    until(lambda: told() == [(1, 3)])
    until(lambda: dict(publisher._end.leases()) == {"relay": 1})


def test_what_moves_the_oldest_version_or_an_error_is_news_and_mere_counts_are_not() -> None:
    def told(number: int | None, at: int = 0, error: str = "") -> replica_pb2.Acknowledgement:
        made = replica_pb2.Acknowledgement(replica_id="site", error=error)
        if number is not None:
            made.version.number = number
        made.followers.add(count=at)
        return made

    assert is_news(None, told(None))
    assert is_news(told(None), told(0)), "zero is a version"
    assert is_news(told(0), told(1)) and is_news(told(1), told(0))
    assert is_news(told(1), told(1, error="lost")) and is_news(told(1, error="lost"), told(1))
    assert not is_news(told(1), told(1, at=7))


def test_a_summary_is_the_oldest_version_and_the_counts() -> None:
    def ack(number: int | None, state: int, error: str = "") -> replica_pb2.Acknowledgement:
        made = replica_pb2.Acknowledgement(replica_id="x", state=state, error=error)  # type: ignore[arg-type]
        if number is not None:
            made.version.number = number
        return made

    serving, doubt = replica_pb2.REPLICA_STATE_SERVING, replica_pb2.REPLICA_STATE_IN_DOUBT
    told = summary("site", [ack(7, serving), ack(0, serving), ack(7, serving), ack(None, doubt, "lost")], 5)
    assert told.HasField("version") and told.version.number == 0  # zero is a version
    found = {(g.HasField("version"), g.version.number, g.state): g.count for g in told.followers}
    assert found == {(True, 7, serving): 2, (True, 0, serving): 1, (False, 0, doubt): 1}
    assert (told.error, told.fetched_bytes) == ("lost", 5)
    left = ack(0, replica_pb2.REPLICA_STATE_CLOSED, "ended")
    told = summary("site", [left, ack(7, serving), left], 5)
    assert (told.version.number, told.state, told.error) == (7, serving, ""), "one that has closed serves nothing"
    assert sorted((g.version.number, g.count) for g in told.followers) == [(0, 2), (7, 1)]
    told = summary("site", [left, left], 5)
    assert (told.version.number, told.state) == (0, replica_pb2.REPLICA_STATE_CLOSED)
    nobody = summary("site", [], 0)
    assert not nobody.HasField("version") and nobody.state == replica_pb2.REPLICA_STATE_ATTACHING


def test_a_relay_serves_on_while_the_trainer_is_away(tmp_path: Path, stack: ExitStack) -> None:
    server, publisher, _, behind = site(tmp_path, stack)
    publisher.publish(model(1), step=1)
    with Replica.open(behind, holding(model(0)), replica_id="a") as replica:
        replica.sync(min_version=1)
        server.close()
        with Replica.open(behind, holding(model(0)), replica_id="late") as late:
            assert late.sync().version == 1


@pytest.mark.slow
def test_trajectories_outlive_the_relay_and_the_trainer(tmp_path: Path) -> None:
    """Both are killed with trajectories on their way; nothing that was receipted is lost."""
    store, cache, port = str(tmp_path / "store"), str(tmp_path / "cache"), free_port()
    with Publisher.open(store, **COMMON) as publisher:
        publisher.publish(model(0), step=0)
        run = publisher.run_id
        uri = f"grpc://127.0.0.1:{port}"
        with process("serve", "--store", store, "--listen", f"127.0.0.1:{port}") as (server, _):
            words = ("relay", "--from", uri, "--listen", "127.0.0.1:0", "--cache", cache)
            with process(*words) as (_, behind), closing(GrpcTransport(client_of(behind)).replica_end()) as end:
                assert end.run_id() == run
                end.send_trajectories([make("t0", run_id=run)])
                kill(server)
                sent = end.send_trajectories([make(f"t{k}", run_id=run) for k in range(1, 4)])
                assert len(sent) == 3  # durable at the relay; then the relay is killed, too
        with process("serve", "--store", store, "--listen", f"127.0.0.1:{port}"), process(*words):
            found: set[str] = set()

            def all_there() -> bool:
                found.update(t.id for t in publisher.take_trajectories())
                return found == {"t0", "t1", "t2", "t3"}

            until(all_there, limit=60)


@pytest.mark.slow
def test_a_killed_relay_is_replaced_without_a_trace(tmp_path: Path, stack: ExitStack) -> None:
    _, publisher, _, _ = site(tmp_path, stack)
    uri = publisher.config.uri
    port = free_port()
    words = ("relay", "--from", uri, "--listen", f"127.0.0.1:{port}", "--cache", str(tmp_path / "other"))
    engine = holding(model(0))
    with Replica.open(client_of(f"grpc://127.0.0.1:{port}"), engine, replica_id="a") as replica:
        with process(*words):
            replica.sync()
        publisher.publish(model(1), step=1)
        with process(*words):
            assert replica.sync(min_version=1).digest == digest_of(model(1))


def shard_of(body: bytes) -> ShardBytes:
    return ShardBytes("anchor", 0, common_pb2.FORM_RAW, b"head", [body])


def committed(client: Config, bodies: list[bytes]) -> list[manifest_pb2.ShardRef]:
    """One version with shards that mean nothing."""
    with closing(GrpcTransport(client).publisher_end(0, 1)) as end:
        run = end.open_run("r", fork_of=None, writer="test")
        refs = [end.put_shard(0, shard_of(body)) for body in bodies]
        manifest = manifest_pb2.VersionManifest(format=1, run_id="r", kind=1, epoch=run.epoch, nonce=b"n" * 16)
        manifest.views.add(name="default").shards.extend(refs)
        end.commit(manifest)
        return refs


def test_the_cache_keeps_its_quota(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    refs = committed(client, [bytes([k]) * (1 << 20) for k in range(6)])
    _, behind = relayed(client.uri, stack, cache_dir=str(tmp_path / "cache"), cache_bytes=3 << 20)
    with closing(GrpcTransport(behind).replica_end()) as end:
        for _ in range(2):
            for k, ref in enumerate(refs):
                assert bytes(end.read(ref, 4, 100)) == bytes([k]) * 100
        cached = list((tmp_path / "cache" / "server" / "objects").iterdir())
        assert 0 < sum(path.stat().st_size for path in cached) <= 3 << 20


def test_a_byte_that_flipped_on_the_way_is_not_kept(tmp_path: Path, stack: ExitStack) -> None:
    server, client = served(tmp_path / "store", stack)
    refs = committed(client, [b"x" * 1000])
    relay, behind = relayed(client.uri, stack, cache_dir=str(tmp_path / "cache"))
    stored = next((tmp_path / "store").rglob("*.safetensors"))
    good = stored.read_bytes()
    with closing(GrpcTransport(behind).replica_end()) as end:
        stored.write_bytes(good[:-1] + b"y")
        end.read(refs[0], 0, refs[0].size)
        stored.write_bytes(good)
        assert bytes(end.read(refs[0], 0, refs[0].size)) == good  # read again, as whoever checks the hash does
        sent = server.metrics.sent_bytes
        assert bytes(end.read(refs[0], 0, refs[0].size)) == good
        assert server.metrics.sent_bytes == sent and relay.metrics.far_bytes == 2 * refs[0].size


def test_what_a_relay_lost_half_way_is_fetched_once_more_at_most(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    size = 24 << 20
    refs = committed(client, [bytes(range(256)) * (size // 256)])
    proxy = Proxy(client.uri)
    stack.callback(proxy.close)
    relay, behind = relayed(proxy.uri, stack, cache_dir=str(tmp_path / "cache"))
    with closing(GrpcTransport(behind).replica_end()) as end:
        end.run_id()
        proxy.cut_after = proxy.down_bytes + (10 << 20)
        data = end.read(refs[0], 0, refs[0].size)
    assert proxy.cuts == 1 and len(data) == size + 4 and relay.metrics.far_bytes == size + 4
    assert bytes(data[4:260]) == bytes(range(256))


@pytest.mark.slow
def test_a_relay_that_starts_before_its_server_waits_for_it(tmp_path: Path, stack: ExitStack) -> None:
    port = free_port()
    _, behind = relayed(f"grpc://127.0.0.1:{port}", stack, cache_dir=str(tmp_path / "cache"))
    engine = holding(model(0))
    with Publisher.open(str(tmp_path / "store"), **COMMON) as publisher:
        publisher.publish(model(0), step=0)
        running = command("serve", "--store", str(tmp_path / "store"), "--listen", f"127.0.0.1:{port}")
        stack.callback(kill, running)
        with Replica.open(behind, engine, replica_id="a") as replica:

            def synced() -> bool:
                from weight_sync.errors import WeightSyncError

                try:
                    return replica.sync(timeout=1).version == 0
                except WeightSyncError:
                    return False

            until(synced, limit=60)
    assert FileTransport(Config(uri=str(tmp_path / "store"))).replica_end().head() == 0
