"""Claims about the sidecar: which requests it lets in, what their answers say, and that both are true.

Real processes on both sides. Owns no claim about faults (test_sidecar_faults) or about parts alone (test_sidecar_parts).
"""

from __future__ import annotations

import datetime
import http.client
import json
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_cases import run
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from loop import digest_of, model
from sidecar_cases import Answer, Scene, raw, read_event, scene, until
from test_sidecar_parts import openai_events

LIMIT = 1 << 20
HOST = "Host: x\r\nConnection: close\r\n"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("sidecar"), f"--body-limit={LIMIT}") as made:
        yield made


def demand(kind: str, number: int, run: str | None = None) -> dict[str, Any]:
    return {"weight_version": {kind: number} | ({} if run is None else {"run": run})}


# --- which version answers -----------------------------------------------------------------------------------------


def test_an_answer_says_which_version_made_it(served: Scene) -> None:
    answer = served.sidecar.post({"prompt": "x"})
    assert served.check(answer) == served.head
    assert answer.headers["x-weight-version-run"] == served.publisher.run_id
    assert answer.json["keys"] == ["prompt"]


@pytest.mark.parametrize("way", ["body", "header"])
def test_a_demand_is_met_or_refused_with_the_reason(served: Scene, way: str) -> None:
    served.advance()
    head, run = served.head, served.publisher.run_id
    cases = [
        ("min", head, None, 200), ("min", 0, run, 200), ("min", head + 1, None, 409), ("exact", head, run, 200),
        ("exact", head - 1, None, 409), ("exact", head + 1, None, 409), ("max_staleness", 0, None, 200),
        ("min", 0, "another", 409),
    ]  # fmt: skip
    for kind, number, of, status in cases:
        if way == "body":
            answer = served.sidecar.post({"prompt": "x", **demand(kind, number, of)})
        else:
            headers = {f"X_Weight_Version_{kind.title()}": str(number)} | ({"X_Weight_Version_Run": of} if of else {})
            answer = served.sidecar.post({"prompt": "x"}, **headers)
        assert answer.status == status, (kind, number, of, answer.body)
        if status == 200:
            assert served.check(answer) == head and answer.json["keys"] == ["prompt"]
            continue
        assert answer.error["code"] == "weight_version_not_ready" and int(answer.headers["retry-after"]) >= 1
        assert answer.error["current"] == {"run": run, "version": head, "head": head}
        assert answer.error["wanted"] == {kind: number} | ({"run": of} if of else {})


def test_a_request_that_waits_is_answered_by_the_version_that_it_waited_for(served: Scene) -> None:
    head = served.head
    with ThreadPoolExecutor(8) as pool:
        waits = {
            (kind, number): pool.submit(served.sidecar.post, {**demand(kind, number)}, X_Weight_Version_Wait="30")
            for kind in ("min", "exact") for number in (head + 1, head + 2, head + 3)
        }  # fmt: skip
        until(lambda: served.sidecar.status["waiting"] == 6, "six who wait")
        for _ in range(3):
            served.publish()
        for (kind, number), wait in waits.items():
            version = served.check(wait.result())
            assert version == number if kind == "exact" else version >= number
    late = served.sidecar.post({**demand("min", served.head + 1)}, X_Weight_Version_Wait="0.05")
    assert late.status == 409 and late.error["current"]["version"] == served.head


def test_what_is_not_understood_is_refused_and_never_reaches_the_engine(served: Scene) -> None:
    before = served.engine.facts()["made"]
    for body, field in (
        ({"weight_version": {"minimum": 1}}, "weight_version.minimum"),
        ({"weight_version": {"min": True}}, "weight_version.min"),
        ({"weight_version": {"min": 1, "exact": 1}}, "weight_version"),
        ({"weight_verison": {"min": 99}}, "weight_verison"),
        (b'{"prompt": ', "body"),
    ):
        answer = served.sidecar.post(body, Content_Type="application/json")
        assert answer.status == 400 and answer.error["param"] == field, answer.body
        assert answer.error["code"] == "weight_version_invalid"
    for header, field in (
        ({"X-Weight-Version-Mim": "1"}, "X-Weight-Version-Mim"),
        ({"X-Weight-Version-Min": "-1"}, "X-Weight-Version-Min"),
        ({"X-Weight-Version-Min": "1", "X-Weight-Version-Exact": "1"}, "X-Weight-Version-Exact, X-Weight-Version-Min"),
        ({"X-Weight-Version-Wait": "soon"}, "X-Weight-Version-Wait"),
        ({"Content-Encoding": "gzip"}, "content-encoding"),
    ):
        answer = served.sidecar.ask("POST", "/v1/completions", {"prompt": "x"}, header)
        assert answer.status == 400 and answer.error["param"] == field, answer.body
    both = served.sidecar.post({**demand("min", 1)}, X_Weight_Version_Min="1")
    assert both.status == 400
    assert served.sidecar.ask("GET", "/v1/models", headers={"X-Weight-Version-Min": "x"}).status == 400
    assert served.engine.facts()["made"] == before


# --- what passes ---------------------------------------------------------------------------------------------------


def test_bodies_and_headers_pass_as_they_are(served: Scene) -> None:
    body = b'{"weight_version":{"min":0}, "n": 1.10,\t"t":[1e400,"\\u00e9\xc3\xa9"]}'
    sent = {"Content-Type": "application/json", "Authorization": "Bearer k", "X-Mine": "a", "Connection": "X-Mine",
            "X-Weight-Version-Wait": "1", "Accept-Encoding": "gzip"}  # fmt: skip
    answer = served.sidecar.ask("POST", "/some/path;a=b/%C3%A9?q=1&q=%2F", body, sent)
    seen = answer.json
    assert (seen["path"], seen["query"]) == ("/some/path;a=b/%C3%A9", "q=1&q=%2F")
    assert seen["body"].encode("latin-1") == b'{"n": 1.10,\t"t":[1e400,"\\u00e9\xc3\xa9"]}'.replace(b'{"n"', b'{ "n"')
    headers = dict(seen["headers"])
    assert headers["authorization"] == "Bearer k" and headers["accept-encoding"] == "identity"
    assert "x-mine" not in headers and not [name for name in headers if "weight" in name]
    assert headers["content-length"] == str(len(seen["body"]))
    assert answer.headers["x-kept"] == "2" and "x-hop" not in answer.headers
    assert answer.versions() == (served.head, served.head)
    plain = bytes(range(256)) * 100
    assert served.sidecar.ask("PUT", "/upload", plain).json["body"].encode("latin-1") == plain


def test_an_answer_passes_byte_for_byte(served: Scene) -> None:
    body = {"prompt": "x", "max_tokens": 3}
    direct, proxied = served.engine.post(body), served.sidecar.post(body)
    assert direct.body == proxied.body and direct.headers["content-type"] == proxied.headers["content-type"]
    missing = served.sidecar.ask("GET", "/test/none")
    assert missing.status == 403
    assert served.sidecar.ask("HEAD", "/health").status == 200


def test_a_stream_arrives_chunk_by_chunk_and_ends_with_the_version(served: Scene) -> None:
    connection = served.sidecar.connect()
    body = json.dumps({"stream": True, "hold": True, "max_tokens": 3, **demand("exact", served.head)})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.getheader("x-weight-version-start") == str(served.head)
    assert answer.getheader("x-weight-version-end") is None
    first = read_event(answer)
    assert digest_of(model(served.head)).encode() in first
    assert served.sidecar.status["in_flight"] == 1
    assert served.engine.facts("go")["inside"] == 1, "the engine has not made the second one yet"
    rest = answer.read()
    chunks = openai_events(first + b"\n\n" + rest)
    assert [chunk["choices"][0]["token"] for chunk in chunks] == [digest_of(model(served.head))] * 3
    end = rest.rstrip().split(b"\n\n")[-1]
    assert end.startswith(b"event: weight_version\ndata: ")
    told = {"run": served.publisher.run_id, "start": served.head, "end": served.head}
    assert json.loads(end.partition(b"data: ")[2]) == told
    connection.close()


def test_a_stream_without_an_end_mark_tells_the_version_in_a_comment(served: Scene) -> None:
    answer = served.sidecar.post({"stream": True, "done": False})
    assert len(openai_events(answer.body)) == 4
    assert answer.body.rstrip().split(b"\n\n")[-1].startswith(b': weight_version {"run": ')


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_in_the_engine(served: Scene, stream: bool) -> None:
    before = served.engine.facts()["dropped"]
    body = json.dumps({"stream": stream, "hang": "hard"}).encode()
    with socket.create_connection(("127.0.0.1", served.sidecar.port), 30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                           b"Content-Length: %d\r\n\r\n%s" % (len(body), body))  # fmt: skip
        until(lambda: served.engine.facts()["inside"] == 1, "the request in the engine")
    until(lambda: served.engine.facts()["dropped"] == before + 1, "the end of the request")
    until(lambda: served.sidecar.status["in_flight"] == 0, "nobody inside")


# --- what does not pass --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["/door/resume", "//door/resume", "/door//resume", "/DOOR/resume", "/v1/../door/resume", "/%64oor/resume",
     "/v1/%2e%2e/door/resume", "/door%2fresume", "/door/resume/", "/;/door/resume", "/pause_everything?x=1"],
)  # fmt: skip
def test_control_routes_are_not_for_clients(served: Scene, target: str) -> None:
    before = served.engine.facts()["calls"]
    answer = raw(served.sidecar.port, f"POST {target} HTTP/1.1\r\n{HOST}Content-Length: 0\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 403") and b"route_blocked" in answer
    assert served.engine.facts()["calls"] == before


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"0\r\n\r\nPOST /door/resume HTTP/1.1\r\n\r\n"),
        (b"Content-Length: 0\r\nContent-Length: 38\r\n", b"POST /door/resume HTTP/1.1\r\nHost: x\r\n\r\n"),
        (b"Content-Length: +5\r\n", b"hello"),
        (b"Transfer-Encoding: xchunked\r\n", b"0\r\n\r\n"),
        (b"Transfer-Encoding: chunked\r\n", b"zz\r\n\r\n"),
        (b"Content-Length : 5\r\n", b"hello"),
    ],
)
def test_a_request_that_two_readers_would_read_differently_is_refused(served: Scene, head: bytes, body: bytes) -> None:
    before = served.engine.facts()
    answer = raw(served.sidecar.port, b"POST /v1/completions HTTP/1.1\r\n" + HOST.encode() + head + b"\r\n" + body)
    assert answer.startswith(b"HTTP/1.1 400") or answer == b"", answer
    assert answer.count(b"HTTP/1.1 ") <= 1
    after = served.engine.facts()
    assert (after["made"], after["calls"]) == (before["made"], before["calls"])


@pytest.mark.parametrize("target", ["http://evil/v1/x", "*", "/a b", "/a\x01", "/#/door/resume"])
def test_a_target_that_is_no_path_goes_nowhere(served: Scene, target: str) -> None:
    answer = raw(served.sidecar.port, f"GET {target} HTTP/1.1\r\n{HOST}\r\n".encode())
    if target in ("http://evil/v1/x", "/#/door/resume"):  # what is no path in them does not count
        assert b'"path":"/v1/x"' in answer or b'"path":"/"' in answer or answer.startswith(b"HTTP/1.1 400")
    else:
        assert answer.startswith(b"HTTP/1.1 40"), answer


def test_a_body_above_the_limit_is_refused_without_being_held(served: Scene) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST.encode()
    assert raw(served.sidecar.port, head + b"Content-Length: %d\r\n\r\n" % (LIMIT + 1)).startswith(b"HTTP/1.1 413")
    chunk = b"%x\r\n%s\r\n" % (LIMIT // 2, b"x" * (LIMIT // 2))
    connection = served.sidecar.connect()
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Transfer-Encoding", "chunked")
    connection.endheaders()
    connection.send(chunk * 2 + b"1\r\nx\r\n")
    assert connection.getresponse().status == 413
    connection.close()
    assert served.sidecar.ask("PUT", "/upload", b"x" * LIMIT).status == 200


def test_headers_without_an_end_are_not_held(served: Scene) -> None:
    with socket.create_connection(("127.0.0.1", served.sidecar.port), 20) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nX: ")
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for _ in range(10_000):
                connection.sendall(b"x" * 65536)
    long = raw(served.sidecar.port, b"GET /v1/x HTTP/1.1\r\n" + HOST.encode() + b"X: " + b"x" * 30_000 + b"\r\n\r\n")
    assert long.startswith(b"HTTP/1.1 200")


def test_a_websocket_is_not_opened(served: Scene) -> None:
    upgrade = (b"GET /v1/realtime HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n"
               b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n")  # fmt: skip
    assert b" 101 " not in raw(served.sidecar.port, upgrade)


# --- what it tells -------------------------------------------------------------------------------------------------


def test_status_metrics_and_probes_tell_what_is_served(served: Scene) -> None:
    served.advance()
    until(lambda: served.sidecar.status["digest"] is not None, "the report of the sync")
    status = served.sidecar.status
    expected = {"run_id": served.publisher.run_id, "version": served.head, "staleness": 0, "state": "serving", "error": "",
                "ready": True, "in_flight": 0, "digest": digest_of(model(served.head)), "replica_id": "sidecar"}  # fmt: skip
    assert status | expected == status
    assert status["seconds"]["pause"] > 0
    metrics = served.sidecar.ask("GET", "/metrics").body.decode()
    assert f"\nweight_sync_version {served.head}.0\n" in metrics and "\nweight_sync_ready 1.0\n" in metrics
    assert 'weight_sync_requests_total{outcome="2xx"}' in metrics and "weight_sync_pause_seconds_sum" in metrics
    assert served.sidecar.ask("GET", "/healthz").status == 200 == served.sidecar.ask("GET", "/readyz").status
    assert served.sidecar.ask("GET", "/weight_sync/wake").status == 405
    assert served.sidecar.ask("GET", "/weight_sync/none").status == 404
    acks = {ack.replica_id: ack.version.number for ack in served.publisher.acknowledgements()}
    assert acks == {"sidecar": served.head}


def test_a_wake_is_quicker_than_the_poll(served: Scene) -> None:
    served.publish()
    assert served.sidecar.ask("POST", "/weight_sync/wake").status == 202
    served.sidecar.await_version(served.head)


# --- under load ----------------------------------------------------------------------------------------------------


def load(served: Scene, clients: int, ended: threading.Event) -> list[tuple[dict[str, Any], Answer]]:
    """What clients with different demands get while versions change."""
    answers: list[tuple[dict[str, Any], Answer]] = []

    def client(k: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            seen = served.head
            wants = [{}, demand("min", max(0, seen - k % 3)), demand("max_staleness", k % 4), demand("exact", seen)]
            body = {"max_tokens": 3, "delay": 0.002, **wants[(k + turn) % 4]}
            answers.append((body, served.sidecar.post(body, X_Weight_Version_Wait="20")))

    with ThreadPoolExecutor(clients) as pool:
        futures = [pool.submit(client, k) for k in range(clients)]
        for future in futures:
            future.result()
    return answers


def while_publishing(served: Scene, versions: int, clients: int) -> list[tuple[dict[str, Any], Answer]]:
    ended = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(load, served, clients, ended)
        try:
            for _ in range(versions):
                served.advance()
        finally:
            ended.set()
        return answers.result()


def fulfils(served: Scene, body: dict[str, Any], start: int, end: int) -> bool:
    want = body.get("weight_version", {})
    exact = want.get("exact")
    return start >= want.get("min", 0) and exact in (None, start) and end <= served.head


def test_no_answer_under_load_is_of_another_version_than_it_says(served: Scene) -> None:
    first = served.head
    answers = while_publishing(served, 20, 6)
    versions = set()
    for body, answer in answers:
        if answer.status == 409:
            assert answer.error["code"] == "weight_version_not_ready" and "weight_version" in body
            continue
        version = served.check(answer)
        assert fulfils(served, body, version, version)
        versions.add(version)
    assert len(versions) > 15 and max(versions) == first + 20
    refused = sum(answer.status == 409 for _, answer in answers)
    assert refused < len(answers) / 2, "the rest of the claim is not empty"


def test_answers_that_span_versions_are_true_token_by_token(tmp_path: Path) -> None:
    with scene(tmp_path, "--set=pause=keep") as served:
        spanning = 0
        for body, answer in while_publishing(served, 12, 6):
            if answer.status == 409:
                assert "weight_version" in body
                continue
            assert answer.status == 200, answer.body
            start, end = answer.versions()
            made_by = answer.json["choices"][0]["tokens"]
            assert [token["token"] for token in made_by] == [digest_of(model(token["version"])) for token in made_by]
            numbers = [token["version"] for token in made_by]
            assert len(numbers) == 3 and start <= numbers[0] and numbers[-1] <= end and numbers == sorted(numbers)
            assert fulfils(served, body, start, end)
            spanning += start != end
        assert spanning, "some were in the engine at a fence"


# --- where it listens ----------------------------------------------------------------------------------------------


def test_a_unix_socket_serves_this_user_alone_and_goes_in_the_end(served: Scene, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    other = served.new_sidecar(f"--listen=unix:{path}")
    try:
        until(other.lines, "its address")
        assert other.lines()[0] == {"listening": f"unix:{path}"}
        assert path.stat().st_mode & 0o777 == 0o600
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(path))
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
        other.signal(signal.SIGTERM)
        assert other.process.wait() == 143 and not path.exists()
    finally:
        other.kill()


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost, and its key."""
    now = datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    key = ec.generate_private_key(ec.SECP256R1())
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(Encoding.PEM))
    files[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return files


def test_tls_files_make_it_https(served: Scene, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    other = served.new_sidecar(f"--tls-cert={cert}", f"--tls-key={key}")
    try:
        until(other.lines, "its address")
        assert other.lines()[0]["listening"].startswith("https://")
        trust = ssl.create_default_context(cafile=str(cert))
        connection = http.client.HTTPSConnection("localhost", other.port, context=trust, timeout=30)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        other.kill()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--listen=0.0.0.0:1"], "--insecure"), (["--engine=nonsense"], "no such engine"),
        ([], "answers no HTTP"), (["--engine-url=ftp://x"], "engine_url"), (["--set=pause=never"], "weight_sync.pause"),
        (["--tls-cert=x"], "tls_key"), (["--after-drain=wait"], "after_drain"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_said(words: list[str], says: str, tmp_path: Path) -> None:
    fixed = ["--engine=transformers", "--engine-url=http://127.0.0.1:1", f"--from={tmp_path}", "--listen=127.0.0.1:0"]
    assert says in run("sidecar", *fixed, *words, code=2).stderr


def test_an_address_that_is_taken_is_said(served: Scene) -> None:
    other = served.new_sidecar(f"--listen=127.0.0.1:{served.engine_port}")
    assert other.process.wait() == 2 and "cannot listen" in other.lines()[-1]["error"]["message"]
