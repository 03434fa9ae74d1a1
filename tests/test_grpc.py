"""Claims about the gRPC transport where nothing fails: conformance, hosting, folds, remote ranks, the command line."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cli_cases import ask
from grpc_cases import COMMON, client_of, free_port, relayed, served
from hypothesis import given
from hypothesis import strategies as st
from loop import digest_of, holding, model, same_bits
from trajectory_cases import make as trajectory
from waiting import until

from weight_sync import Publisher, Replica
from weight_sync.config import Config
from weight_sync.errors import CorruptionError, InputError, LineageError
from weight_sync.history import History, table_of
from weight_sync.layout.box import Box
from weight_sync.pieces import unfold
from weight_sync.ports import Changes, Transport
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2, service_pb2
from weight_sync.testing import check_transport, transport_claims
from weight_sync.transport.file import FileTransport
from weight_sync.transport.grpc import GrpcTransport
from weight_sync.transport.grpc.folds import choose
from weight_sync.transport.grpc.server import Server
from weight_sync.transport.grpc.service import _part
from weight_sync.transport.grpc.telemetry import trace_id
from weight_sync.transport.grpc.wire import read_chunk, write_chunk
from weight_sync.version import NoPath
from weight_sync.version import Path as Way


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def hosted(stack: ExitStack, tmp_path: Path, **keys: Any) -> tuple[Publisher, str]:
    """A publisher that hosts the service, and where."""
    uri = f"grpc://127.0.0.1:{free_port()}"
    return stack.enter_context(Publisher.open(uri, store=str(tmp_path / "store"), **{**COMMON, **keys})), uri


@pytest.mark.parametrize("claim", transport_claims())
def test_the_transport_keeps_every_promise_through_a_server(claim: str, tmp_path: Path, stack: ExitStack) -> None:
    def make() -> Transport:
        return GrpcTransport(served(tmp_path / "store", stack, keep_versions=2)[1])

    assert check_transport(make, only=[claim]) == [claim]


def test_importing_the_package_imports_no_grpc() -> None:
    code = "import sys, weight_sync, weight_sync.transport.file; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


# --- a publisher that hosts the service ---


def test_an_engine_follows_a_trainer_over_grpc(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path)
    publisher.publish(model(0), step=0)
    engine = holding(model(0))
    with Replica.open(uri, engine, replica_id="one", **COMMON) as replica:
        assert replica.sync().version == 0
        publisher.publish(model(1), step=1)
        report = replica.sync()
        assert (report.version, report.digest, report.ack_error) == (1, digest_of(model(1)), "")
        assert same_bits(engine, model(1))
        told = publisher.acknowledgements()
        assert [(ack.replica_id, ack.version.number) for ack in told] == [("one", 1)]
        assert told[0].fetched_bytes > 0


def test_a_watcher_hears_of_a_commit_without_polling(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path, poll_s=60.0)  # the host's own feed looks that seldom
    publisher.publish(model(0), step=0)
    reports: list[int] = []
    stop = threading.Event()
    with Replica.open(uri, holding(model(0)), **{**COMMON, "poll_s": 60.0}) as replica:
        thread = threading.Thread(target=replica.follow, args=(lambda report: reports.append(report.version), stop))
        thread.start()
        until(lambda: reports == [0])
        for step in (1, 2, 3):
            publisher.publish(model(step), step=step)
            until(lambda: reports[-1] == step)  # noqa: B023
        stop.set()
        thread.join(30)


def test_a_replica_that_is_behind_gets_one_object(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path, anchor_every=0, anchor_share=0)
    publisher.publish(model(0), step=0)
    engine = holding(model(0))
    with Replica.open(uri, engine, **COMMON) as replica:
        replica.sync()
        for step in range(1, 9):
            publisher.publish(model(step), step=step)
        counted = _served_calls(publisher)
        before = counted["Fetch", "ok"]
        report = replica.sync()
        assert report.path == "one object from version 0"
        assert report.digest == digest_of(model(8)) and same_bits(engine, model(8))
        assert counted["Fetch", "ok"] - before == 1


def _served_calls(publisher: Publisher) -> Any:
    return publisher._end.server.metrics.calls  # type: ignore[attr-defined]


def test_the_object_of_one_version_is_the_stored_shard_itself(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path)
    for step in range(3):
        publisher.publish(model(step), step=step)
    with closing(GrpcTransport(client_of(uri)).replica_end()) as end:
        one, two = end.fold("default", 1, 2), end.fold("default", 0, 2)
        shard = next(ref for ref in end.manifest(2).views[0].shards if ref.form == common_pb2.FORM_STEP)
        assert one is not None and one.stored == shard and one.data == end.read(shard, 0, shard.size)
        assert two is not None and two.stored is None
        assert end.fold("default", 0, 77) is None  # not there: the reader plans, and says why
        with pytest.raises(InputError):
            end.fold("default", 2, 2)


def test_readers_of_parts_get_their_parts_and_together_everything(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path, anchor_every=0, anchor_share=0)
    for step in range(4):
        publisher.publish(model(step), step=step)
    with closing(GrpcTransport(client_of(uri)).replica_end()) as end:
        manifest = end.manifest(3)
        view = manifest.views[0]
        table = table_of(view)
        history = History(end, "default")
        whole = end.fold("default", 0, 3)
        assert whole is not None
        wanted = {
            (c.spec.name, int(i), int(s)) for c in unfold(history, whole, manifest, view, table)[0] for i, s in flat(c)
        }
        spec = next(spec for spec in table if spec.name == "model.embed.weight")
        rows, columns = spec.shape
        left = Box(0, (rows, 10), (columns, 1))
        right = Box(10, (rows, columns - 10), (columns, 1))
        rest = {other.name: [Box.run(0, other.elements)] for other in table if other is not spec and other.elements}
        found: set[tuple[str, int, int]] = set()
        for regions in ({spec.name: [left]}, {spec.name: [right]}, rest):
            part = end.fold("default", 0, 3, regions=regions)
            assert part is not None and part.stored is None and len(part.data) < len(whole.data)
            mine = {
                (c.spec.name, int(i), int(s))
                for c in unfold(history, part, manifest, view, table)[0]
                for i, s in flat(c)
            }
            assert mine and not mine & found
            assert all(name in regions for name, _, _ in mine)
            found |= mine
        assert found == wanted
        with pytest.raises(InputError, match="larger than its tensor"):
            end.fold("default", 0, 3, regions={spec.name: [Box.run(0, spec.elements + 1)]})
        with pytest.raises(InputError, match="no such tensor"):
            end.fold("default", 0, 3, regions={"none": [Box.run(0, 1)]})


def flat(changes: Changes) -> Iterator[tuple[int, int]]:
    """Index in the tensor, and step."""
    assert changes.steps is not None
    return zip(changes.coords.indices(changes.positions).tolist(), changes.steps.tolist(), strict=True)


def test_the_choice_of_an_object_gives_its_reason() -> None:
    step = manifest_pb2.ShardRef(object="a", form=common_pb2.FORM_STEP)
    view = manifest_pb2.ViewManifest(name="v", shards=[step, manifest_pb2.ShardRef(form=common_pb2.FORM_COMPACT)])
    two = manifest_pb2.ViewManifest(name="v", shards=[step, step])
    assert choose(Way(None, (4,), 10, "x"), view).stored == step
    assert choose(Way(None, (4,), 10, "x"), two) == choose(Way(None, (4,), 10, "x"), two)
    assert choose(Way(None, (4,), 10, "x"), two).stored is None and choose(Way(None, (4,), 10, "x"), two).patches == (
        4,
    )
    assert choose(Way(3, (4,), 10, "anchor 3"), view).reason == "not by patches: anchor 3"
    assert choose(NoPath(3, True, "collected"), view).patches == ()
    assert choose(Way(None, tuple(range(2000)), 1, "x"), view).patches == ()


def test_a_host_takes_trajectories_into_a_durable_inbox(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path)
    publisher.publish(model(0), step=0)
    batch = [trajectory(f"t{k}", run_id=publisher.run_id) for k in range(5)]
    with closing(GrpcTransport(client_of(uri)).replica_end()) as end:
        assert [r.duplicate for r in end.send_trajectories(batch)] == [False] * 5
        assert [r.duplicate for r in end.send_trajectories(batch[:2])] == [True] * 2
    assert publisher.inbox is not None
    assert {t.id for t in publisher.take_trajectories()} == {t.id for t in batch}


# --- publishers elsewhere ---


def test_a_trainer_may_publish_through_a_server_of_somebody_else(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    with Publisher.open(client) as publisher:
        publisher.publish(model(0), step=0)
        publisher.publish(model(1), step=1)
    with Publisher.open(client) as publisher:  # a restart: a new epoch of the same run
        assert (publisher.version, publisher.step) == (1, 1)
        publisher.publish(model(2), step=2)
    engine = holding(model(0))
    with Replica.open(client, engine) as replica:
        assert replica.sync().digest == digest_of(model(2))


def test_a_session_survives_the_server(tmp_path: Path, stack: ExitStack) -> None:
    port = free_port()
    for first in (True, False):
        with ExitStack() as inner:
            server = Server(Config(uri=f"grpc://127.0.0.1:{port}", **COMMON), FileTransport(
                Config(uri=str(tmp_path / "store"), **COMMON)))  # fmt: skip
            inner.callback(server.close)
            server.start()
            if first:
                Publisher.open(client_of(f"grpc://127.0.0.1:{port}")).publish(model(0), step=0)
                publisher = stack.enter_context(Publisher.open(client_of(f"grpc://127.0.0.1:{port}")))
            report = publisher.publish(model(1 if first else 2), step=1 if first else 2)
            assert report is not None and report.version == (2 if first else 3)


def test_nobody_publishes_through_a_relay(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    with Publisher.open(client) as publisher:
        publisher.publish(model(0), step=0)
    _, behind = relayed(client.uri, stack, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(InputError, match="relay"):
        Publisher.open(behind)


def test_errors_keep_their_kind_and_their_words_across_the_wire(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    end = GrpcTransport(client).publisher_end(0, 1)
    run = end.open_run("r", fork_of=None, writer="w")
    manifest = manifest_pb2.VersionManifest(format=1, run_id="r", number=3, epoch=run.epoch, kind=1, nonce=b"n" * 16)
    with pytest.raises(LineageError) as caught:
        end.commit(manifest)
    assert caught.value.what == "entry does not continue the log" and "3" in str(caught.value.field)
    end.close()


# --- the command line ---


def test_every_command_that_reads_a_uri_reads_a_server(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    with Publisher.open(client) as publisher:
        for step in range(3):
            publisher.publish(model(step), step=step)
    for words in (["log"], ["inspect"], ["verify", "--deep"], ["fold", "0", "2"], ["status"], ["gc", "--dry-run"], ["gc"],
                  ["materialize", "--out", str(tmp_path / "out")]):  # fmt: skip
        assert "error" not in ask(words[0], client.uri, *words[1:])


def test_status_tells_how_far_each_replica_is(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path)
    publisher.publish(model(0), step=0)
    with Replica.open(uri, holding(model(0)), replica_id="slow", **COMMON) as replica:
        replica.sync()
        publisher.publish(model(1), step=1)
        document = ask("status", uri)
    row = document["replicas"][0]
    assert (document["head"], document["most_stale"]) == (1, 1)
    assert (row["replica_id"], row["version"], row["staleness"], row["state"]) == ("slow", 0, 1, "SERVING")


def test_status_counts_nobody_who_has_gone(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path)
    publisher.publish(model(0), step=0)
    with Replica.open(uri, holding(model(0)), replica_id="closed", **COMMON) as closed:
        closed.sync()
    killed = stack.enter_context(Replica.open(uri, holding(model(0)), replica_id="killed", **COMMON))
    killed.sync()
    killed._end.release("killed")  # as when its lease has run out
    publisher.publish(model(1), step=1)
    live = stack.enter_context(Replica.open(uri, holding(model(0)), replica_id="live", **COMMON))
    live.sync()
    document = ask("status", uri)
    assert {row["replica_id"]: (row["gone"], row["staleness"]) for row in document["replicas"]} == {
        "closed": (True, 1), "killed": (True, 1), "live": (False, 0)
    }  # fmt: skip
    assert document["most_stale"] == 0


def test_a_fleet_tells_what_registered(tmp_path: Path, stack: ExitStack) -> None:
    publisher, uri = hosted(stack, tmp_path)
    publisher.publish(model(0), step=0)
    with closing(GrpcTransport(client_of(uri)).replica_end()) as end:
        end.register("x", replica_pb2.EngineDescription(engine_id="e", kind="vllm", view="default"), 60)
        end.lease("x", 0, 60)
        fleet = end._client.call("GetFleet", service_pb2.FleetRequest())
        assert [(r.replica_id, r.leased, r.description.kind) for r in fleet.replicas] == [("x", 0, "vllm")]


# --- the wire ---


@given(st.binary(max_size=200_000))
def test_a_chunk_comes_back_whole_and_is_the_message_that_it_says(data: bytes) -> None:
    found, message = read_chunk(write_chunk(data))
    assert bytes(found) == data and message is None
    assert service_pb2.Chunk.FromString(write_chunk(data)) == service_pb2.Chunk(data=data) or not data
    mixed = service_pb2.Chunk(data=data, size=5, start=1).SerializeToString()
    found, message = read_chunk(mixed)
    assert bytes(found) == data and message is not None and (message.size, message.start) == (5, 1)


@given(st.binary(max_size=300))
def test_no_bytes_make_the_reading_of_a_chunk_fail_in_another_way(data: bytes) -> None:
    try:
        found, _ = read_chunk(data)
    except CorruptionError:
        return
    assert len(found) <= len(data)


@given(st.integers(0, 1 << 40), st.integers(1, 256))
def test_the_parts_of_an_object_cover_it_once(size: int, parts: int) -> None:
    cuts = [_part(service_pb2.FetchRequest(part=k, parts=parts), size) for k in range(parts)]
    assert cuts[0][0] == 0 and cuts[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(cuts))


# --- observability ---


def test_a_version_is_one_trace_from_commit_to_acknowledgement(tmp_path: Path, stack: ExitStack) -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    publisher, uri = hosted(stack, tmp_path)
    publisher.publish(model(0), step=0)
    with Replica.open(uri, holding(model(0)), **COMMON) as replica:
        replica.sync()
        publisher.publish(model(1), step=1)
        replica.sync()
    found = [s for s in exporter.get_finished_spans() if s.context.trace_id == trace_id(publisher.run_id, 1)]
    assert [s.name for s in found[:3]] == ["weight_sync.commit", "weight_sync.fetch", "weight_sync.acknowledge"]


def test_metrics_are_a_page_for_prometheus(tmp_path: Path, stack: ExitStack) -> None:
    server, client = served(tmp_path / "store", stack, metrics="127.0.0.1:0")
    with Publisher.open(client) as publisher:
        publisher.publish(model(0), step=0)
        with Replica.open(client, holding(model(0))) as replica:
            replica.sync()
    assert server.page is not None
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.page.port}/metrics", timeout=10).read().decode()
    assert 'weight_sync_acknowledgements_total{state="REPLICA_STATE_SERVING"} 1' in text
    assert 'weight_sync_calls_total{call="Commit",outcome="ok"} 1' in text
    lines = text.splitlines()
    assert len([line for line in lines if line.startswith("# TYPE")]) == 10 and "" not in lines
