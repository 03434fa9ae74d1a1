"""Claims about who gets in: addresses, TLS, tokens, limits, hostile bytes, signatures. Real sockets throughout."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from grpc_cases import COMMON, Authority, client_of, process, served
from loop import digest_of, holding, model

from weight_sync import Publisher, Replica
from weight_sync.config import Config
from weight_sync.errors import ConfigError, CorruptionError, StoreUnavailableError, WeightSyncError
from weight_sync.ports import ReplicaEnd
from weight_sync.proto.v1 import replica_pb2, service_pb2
from weight_sync.transport.file import FileTransport
from weight_sync.transport.grpc import GrpcTransport, wire
from weight_sync.transport.grpc.address import Address, parse, refuse_dialling, refuse_listening
from weight_sync.transport.grpc.limits import RateLimit
from weight_sync.transport.grpc.security import ROLES
from weight_sync.transport.grpc.server import Server

TOKENS = {"tokens": [{"token": "reader", "roles": ["follow", "return"]}, {"token": "writer", "roles": ["publish"]}]}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def end_of(client: Config, stack: ExitStack, **keys: Any) -> ReplicaEnd:
    config = client_of(client.uri, **{"timeout_s": 5, **keys})
    return stack.enter_context(closing(GrpcTransport(config).replica_end()))


# --- addresses ---


@pytest.mark.parametrize(
    ("uri", "tls", "known", "insecure", "refused"),
    [
        ("grpc://127.0.0.1:1", False, False, False, False),
        ("grpc://[::1]:1", False, False, False, False),
        ("grpc://localhost:1", False, False, False, False),
        ("grpc://0.0.0.0:1", False, False, False, True),
        ("grpc://0.0.0.0:1", False, True, False, True),
        ("grpc://10.0.0.1:1", False, False, True, False),
        ("grpcs://0.0.0.0:1", True, False, False, True),
        ("grpcs://0.0.0.0:1", True, True, False, False),
        ("grpcs://127.0.0.1:1", False, True, True, True),
    ],
)
def test_nobody_listens_in_the_open_by_accident(
    uri: str, tls: bool, known: bool, insecure: bool, refused: bool
) -> None:
    assert (refuse_listening(parse(uri), tls, known, insecure) is not None) is refused


def test_a_server_refuses_before_it_listens(tmp_path: Path) -> None:
    store = FileTransport(Config(uri=str(tmp_path)))
    with pytest.raises(ConfigError, match="no TLS"):
        Server(Config(uri="grpc://0.0.0.0:0"), store)
    with pytest.raises(ConfigError, match="no TLS"):
        Publisher.open("grpc://0.0.0.0:0", store=str(tmp_path))
    Server(Config(uri="grpc://0.0.0.0:0", insecure=True), store)


def test_a_token_does_not_cross_the_network_in_the_open() -> None:
    assert refuse_dialling(parse("grpc://10.0.0.1:1"), True, False) is not None
    assert refuse_dialling(parse("grpc://10.0.0.1:1"), False, False) is None
    assert refuse_dialling(parse("grpcs://10.0.0.1:1"), True, False) is None
    with pytest.raises(ConfigError, match="in the open"):
        GrpcTransport(Config(uri="grpc://trainer:1", auth={"token": "t"})).replica_end()


@pytest.mark.parametrize(
    "uri", ["grpc://", "grpc://host", "grpc://host:x", "http://h:1", "grpc://h:1/path", "grpc://h:1?q"]
)
def test_a_bad_address_is_named(uri: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        parse(uri)
    assert parse("grpcs://[::1]:7") == Address("::1", 7, True) and str(parse("grpcs://[::1]:7")) == "grpcs://[::1]:7"


# --- TLS ---


def test_tls_proves_the_server(tmp_path: Path, stack: ExitStack) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    _, client = served(tmp_path / "store", stack, tls=ours.issue("server"))
    assert client.uri.startswith("grpcs://")
    assert end_of(client, stack, tls={"ca": ours.ca}).newest_run() is None
    for tls in ({"ca": theirs.ca}, {}):
        with pytest.raises(StoreUnavailableError):
            end_of(client, stack, tls=tls).newest_run()


def test_plaintext_and_an_expired_certificate_get_nothing(tmp_path: Path, stack: ExitStack) -> None:
    authority = Authority(tmp_path / "ca")
    _, client = served(tmp_path / "one", stack, tls=authority.issue("server"))
    with pytest.raises(StoreUnavailableError):
        end_of(client.replace(uri=client.uri.replace("grpcs", "grpc")), stack).newest_run()
    _, old = served(tmp_path / "two", stack, tls=authority.issue("old", days=-1, since=-9))
    with pytest.raises(StoreUnavailableError):
        end_of(old, stack, tls={"ca": authority.ca}).newest_run()


def test_mutual_tls_demands_a_certificate_of_the_right_issuer(tmp_path: Path, stack: ExitStack) -> None:
    servers, clients = Authority(tmp_path / "s", "servers"), Authority(tmp_path / "c", "clients")
    _, client = served(tmp_path / "store", stack, tls={**servers.issue("server"), "client_ca": clients.ca})
    assert end_of(client, stack, tls={"ca": servers.ca, **clients.issue("engine")}).newest_run() is None
    expired, stranger = clients.issue("expired", days=-1, since=-9), servers.issue("stranger")
    for mine in ({}, expired, stranger):
        with pytest.raises(StoreUnavailableError):
            end_of(client, stack, tls={"ca": servers.ca, **mine}).newest_run()


def test_a_whole_loop_runs_over_tls_with_tokens(tmp_path: Path, stack: ExitStack) -> None:
    authority = Authority(tmp_path / "ca")
    _, client = served(tmp_path / "store", stack, tls=authority.issue("server"), auth=TOKENS)
    keys = {"tls": {"ca": authority.ca}}
    with Publisher.open(client.replace(**keys, auth={"token": "writer"})) as publisher:
        publisher.publish(model(0), step=0)
        publisher.publish(model(1), step=1)
        with Replica.open(client.replace(**keys, auth={"token": "reader"}), holding(model(0))) as replica:
            assert replica.sync().digest == digest_of(model(1))
        assert [ack.version.number for ack in publisher.acknowledgements()] == [1]


# --- tokens ---


def test_every_call_has_roles() -> None:
    assert set(ROLES) == set(wire.CALLS)


def test_a_wrong_token_reads_no_byte_and_sends_none(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack, auth=TOKENS)
    for auth in ({}, {"token": "reade"}, {"token": "readerr"}, {"token": "READER"}):
        end = end_of(client, stack, auth=auth)
        for call in (end.newest_run, end.run_id, lambda: end.lease("r", 0, 1), lambda: end.send_trajectories([])):  # noqa: B023
            with pytest.raises(WeightSyncError):
                call()
        with pytest.raises(ConfigError, match="token"):
            end.newest_run()
    reader = client.replace(auth={"token": "reader"})
    with pytest.raises(ConfigError, match="OpenRun needs one of the roles admin, publish"):
        Publisher.open(reader)
    assert end_of(client, stack, auth={"token": "reader"}).newest_run() is None


def test_a_token_comes_from_a_file_without_its_line_end(tmp_path: Path, stack: ExitStack) -> None:
    secret = tmp_path / "token"
    secret.write_text("s3cret\n")
    auth = {"tokens": [{"token_file": str(secret), "roles": ["follow"]}]}
    _, client = served(tmp_path / "store", stack, auth=auth)
    assert end_of(client, stack, auth={"token_file": str(secret)}).newest_run() is None
    with pytest.raises(ConfigError, match="token_file"):
        end_of(client, stack, auth={"token_file": str(tmp_path / "none")})


def test_the_message_of_a_stranger_is_not_even_read(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack, auth=TOKENS)
    with grpc.insecure_channel(client.uri.removeprefix("grpc://")) as channel:
        call = channel.unary_unary(wire.CALLS["Commit"].path)
        with pytest.raises(grpc.RpcError) as caught:
            call(os.urandom(3 << 20), timeout=10)  # garbage: reading it would be another error
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# --- limits and hostile bytes ---


def test_an_oversize_message_is_refused_and_the_server_goes_on(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    with grpc.insecure_channel(client.uri.removeprefix("grpc://")) as channel:
        call = channel.unary_unary(wire.CALLS["GetRun"].path)
        with pytest.raises(grpc.RpcError) as caught:
            call(bytes(wire.MESSAGE + 1), timeout=30)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert end_of(client, stack).newest_run() is None


def test_garbage_is_refused_and_the_server_goes_on(tmp_path: Path, stack: ExitStack) -> None:
    _, client = served(tmp_path / "store", stack)
    target = client.uri.removeprefix("grpc://")
    host, port = target.split(":")
    for data in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + os.urandom(4096)):
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(data)
            raw.settimeout(10)
            try:
                while raw.recv(4096):
                    continue
            except (ConnectionError, TimeoutError):
                continue  # closed on us, or ignored: both will do
    with grpc.insecure_channel(target) as channel:
        for name in ("GetEntry", "Heartbeat", "OpenRun"):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(wire.CALLS[name].path)(b"\xff" * 100, timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(b"", timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert end_of(client, stack).newest_run() is None


@pytest.mark.parametrize("name", ["../x", "a/b", "x" * 200, "runs", ".."])
def test_names_that_could_be_paths_are_refused(name: str, tmp_path: Path, stack: ExitStack) -> None:
    server, client = served(tmp_path / "store", stack)
    with Publisher.open(client) as publisher:
        publisher.publish(model(0), step=0)
        run = publisher.run_id
    end = end_of(client, stack)
    calls = end._client  # type: ignore[attr-defined]
    lease = replica_pb2.Lease(replica_id="r", ttl_s=1)
    lease.version.run_id = name
    with pytest.raises(WeightSyncError):
        calls.call("Heartbeat", lease)
    if name != "runs":
        lease.version.run_id, lease.replica_id = run, name
        with pytest.raises(WeightSyncError):
            calls.call("Heartbeat", lease)
    with pytest.raises(WeightSyncError):
        list(calls.stream("Fetch", service_pb2.FetchRequest(run_id=run, object={"object": f"data/{0:020d}/{name}"})))
    assert server.wait(0) is False


def test_a_flood_of_calls_is_slowed_down_and_others_are_served(tmp_path: Path, stack: ExitStack) -> None:
    server, client = served(tmp_path / "store", stack, calls_per_s=50.0)
    outcomes: list[str] = []

    def flood() -> None:
        end = end_of(client, stack)
        for _ in range(150):
            try:
                end._client.call("GetRun", service_pb2.RunRequest())  # type: ignore[attr-defined]
                outcomes.append("ok")
            except StoreUnavailableError:
                outcomes.append("slow down")

    threads = [threading.Thread(target=flood) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert outcomes.count("slow down") > 100 and outcomes.count("ok") >= 200
    assert server.metrics.calls["GetRun", "limited"] == outcomes.count("slow down")


def test_the_limit_is_per_machine_and_refills() -> None:
    limit = RateLimit(10.0)
    assert all(limit.take("a", 0.0) for _ in range(40)) and not limit.take("a", 0.0)
    assert limit.take("b", 0.0)
    assert limit.take("a", 0.1) and not limit.take("a", 0.1)


def test_a_command_refuses_to_listen_in_the_open(tmp_path: Path) -> None:
    from cli_cases import run

    run("serve", "--store", tmp_path, "--listen", "0.0.0.0:0", code=2)
    run("relay", "--from", "grpc://127.0.0.1:1", "--listen", "0.0.0.0:0", code=2)
    with process("serve", "--store", str(tmp_path), "--listen", "0.0.0.0:0", "--insecure") as (_, uri):
        assert uri.startswith("grpc://0.0.0.0:")


# --- signatures ---


def key_files(folder: Path, name: str) -> tuple[str, str]:
    """Private and public key."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    pem = serialization.Encoding.PEM
    private.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo))
    return str(private), str(public)


def test_a_reader_that_trusts_keys_takes_signed_versions_only(tmp_path: Path, stack: ExitStack) -> None:
    private, public = key_files(tmp_path, "trainer")
    other, _ = key_files(tmp_path, "other")
    _, client = served(tmp_path / "store", stack)
    trusting = client.replace(signing={"trusted": {"trainer": public}})
    engine = holding(model(0))
    with Replica.open(trusting, engine) as replica:
        with Publisher.open(client.replace(signing={"key": private, "key_id": "trainer"})) as publisher:
            for step in range(4):
                publisher.publish(model(step), step=step)
        assert replica.sync().digest == digest_of(model(3))
        with Publisher.open(client.replace(signing={"key": other, "key_id": "trainer"})) as publisher:
            publisher.publish(model(4), step=4)
        with pytest.raises(CorruptionError, match="signature does not fit"):
            replica.sync()
        with Publisher.open(client) as publisher:
            publisher.publish(model(5), step=5)
        with pytest.raises(CorruptionError, match="not signed by a trusted key"):
            replica.sync()
        assert replica.version == 3


def test_a_key_that_is_none_is_named_before_the_run_is_claimed(tmp_path: Path) -> None:
    for signing in ({"key": str(tmp_path / "none"), "key_id": "k"}, {"key": "x"}):
        with pytest.raises(ConfigError, match=r"signing\.key"):
            Publisher.open(str(tmp_path / "store"), signing=signing)
    assert not (tmp_path / "store").exists()


def test_secrets_stay_out_of_what_is_printed() -> None:
    config = Config(
        uri="grpc://127.0.0.1:1", auth={"token": "hush", "tokens": [{"token": "hush", "roles": ["follow"]}]}
    )
    assert "hush" not in repr(config) and "hush" not in str(config)
    assert COMMON["timeout_s"]
