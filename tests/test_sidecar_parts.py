"""Claims about the parts of the sidecar that need no process: grammar, decision, gate, paths, end of a stream, options."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop import checkpoint, config, engine, model, same_bits

from weight_sync import Publisher, Replica, SyncReport
from weight_sync.adapters.sidecar.admission import Answer, Situation, Verdict, decide
from weight_sync.adapters.sidecar.answers import end_of_stream, error_event, too_late
from weight_sync.adapters.sidecar.constraint import KINDS, Constraint, cut_constraint, read_headers
from weight_sync.adapters.sidecar.driver import Driver
from weight_sync.adapters.sidecar.engine import GatedEngine, ServedEngine
from weight_sync.adapters.sidecar.exchange import request_headers, response_headers
from weight_sync.adapters.sidecar.gate import Gate, Ticket
from weight_sync.adapters.sidecar.paths import Blocklist
from weight_sync.adapters.sidecar.proxy import read_demand
from weight_sync.adapters.sidecar.settings import Settings
from weight_sync.errors import ConfigError, DeadlineError, EngineInDoubtError, InputError
from weight_sync.ports import PauseMode
from weight_sync.proto.v1 import common_pb2
from weight_sync.testing import MemoryEngine

NUMBERS = st.integers(0, 12)
CONSTRAINTS = st.builds(Constraint, st.sampled_from(KINDS), NUMBERS, st.sampled_from([None, "r", "other"]))
SITUATIONS = st.builds(
    Situation, run=st.just("r"), version=st.none() | NUMBERS, head_run=st.sampled_from([None, "r", "newer"]),
    head=st.none() | NUMBERS, head_age_s=st.sampled_from([0.0, 5.0, 50.0]), open=st.booleans(),
    down=st.sampled_from(["", "", "", "dead"]),
)  # fmt: skip
TRUST_S = 10.0


# --- the decision ---


def holds(want: Constraint | None, now: Situation) -> bool:
    """The demand, in other words than the code's."""
    if want is None:
        return True
    if now.version is None or want.run not in (None, now.run):
        return False
    if want.kind == "max_staleness":
        known = now.head is not None and now.head_run == now.run and now.head_age_s <= TRUST_S
        return known and now.head - now.version <= want.number  # type: ignore[operator]
    return now.version == want.number if want.kind == "exact" else now.version >= want.number


@given(st.none() | CONSTRAINTS, SITUATIONS)
def test_who_is_let_in_gets_what_was_wanted_and_nobody_else_is_kept_out(
    want: Constraint | None, now: Situation
) -> None:
    verdict = decide(want, now, TRUST_S)
    serving = not now.down and now.version is not None and now.open
    assert (verdict.answer is Answer.ADMIT) == (serving and holds(want, now))
    assert verdict.reason and verdict.retry_s >= 1


@given(CONSTRAINTS, SITUATIONS, st.data())
def test_only_what_no_later_version_fulfils_is_refused_for_good(want: Constraint, now: Situation, data: Any) -> None:
    verdict = decide(want, now, TRUST_S)
    if now.version is None or now.down:
        assert verdict.answer in (Answer.DOWN, Answer.ATTACHING)
        return
    later = Situation("r", max(now.version, want.number), "r", max(now.version, want.number), 0.0, True)
    if verdict.answer is Answer.REFUSE:
        version = now.version + data.draw(NUMBERS)
        hopeless = Situation("r", version, "r", version, 0.0, True)
        assert decide(want, hopeless, TRUST_S).answer is not Answer.ADMIT
    elif verdict.answer is Answer.BEHIND:
        assert decide(want, later, TRUST_S).answer is Answer.ADMIT


@given(CONSTRAINTS, SITUATIONS)
def test_a_refusal_says_what_is_served_and_what_was_wanted(want: Constraint, now: Situation) -> None:
    verdict = decide(want, now, TRUST_S)
    refusal = too_late(want, verdict, now)
    assert refusal.status == (503 if verdict.answer in (Answer.DOWN, Answer.ATTACHING) else 409)
    error = json.loads(refusal.body)["error"]
    assert (error["current"]["version"], error["wanted"][want.kind]) == (now.version, want.number)
    assert error["code"] == ("engine_not_serving" if refusal.status == 503 else "weight_version_not_ready")
    assert int(dict(refusal.headers)[b"retry-after"]) >= 1


def test_version_zero_and_staleness_zero_are_numbers() -> None:
    now = Situation("r", 0, "r", 0, 0.0, True)
    for kind in KINDS:
        assert decide(Constraint(kind, 0), now, TRUST_S).answer is Answer.ADMIT
    assert decide(Constraint("max_staleness", 0), Situation("r", 0, "r", 1, 0.0, True), TRUST_S).answer is Answer.BEHIND


# --- bodies ---

KEYS = st.text(max_size=8).filter(lambda key: "version" not in key.lower())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SPACE = st.text(" \t\n\r", max_size=2)


@given(st.lists(st.tuples(KEYS, VALUES), max_size=4), CONSTRAINTS, st.data())
def test_a_constraint_is_cut_out_and_every_other_byte_stays(
    members: list[tuple[str, Any]], want: Constraint, data: Any
) -> None:
    ascii_ = data.draw(st.booleans())
    texts = [
        f"{json.dumps(key, ensure_ascii=ascii_)}:{json.dumps(value, ensure_ascii=ascii_)}" for key, value in members
    ]
    try:
        plain = ("{" + ",".join(texts) + "}").encode()
    except UnicodeEncodeError:
        return
    assert cut_constraint(plain) == (None, plain)
    mine = '"weight_version"' + data.draw(SPACE) + ":" + json.dumps(want.to_json())
    texts.insert(data.draw(st.integers(0, len(texts))), mine)
    assert cut_constraint(("{" + ",".join(texts) + "}").encode()) == (want, plain)
    spaced = data.draw(SPACE) + "{" + (data.draw(SPACE) + ",").join(texts) + data.draw(SPACE) + "}" + data.draw(SPACE)
    found, rest = cut_constraint(spaced.encode())
    assert found == want
    assert json.loads(rest, object_pairs_hook=list) == json.loads(plain, object_pairs_hook=list)


def test_numbers_and_escapes_that_json_would_rewrite_pass() -> None:
    body = b'{"a":1.10,"weight_version":{"min":3},"b":1E400,"c":"\\ud800\\/","a":123456789012345678901234567890}'
    assert cut_constraint(body) == (
        Constraint("min", 3),
        b'{"a":1.10,"b":1E400,"c":"\\ud800\\/","a":123456789012345678901234567890}',
    )


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ('{"weight_version": 3}', "weight_version"),
        ('{"weight_version": null}', "weight_version"),
        ('{"weight_version": [3]}', "weight_version"),
        ('{"weight_version": {}}', "weight_version"),
        ('{"weight_version": {"run": "r"}}', "weight_version"),
        ('{"weight_version": {"min": 1, "exact": 1}}', "weight_version"),
        ('{"weight_version": {"min": 1}, "weight_version": {"min": 1}}', "weight_version"),
        ('{"weight_version": {"min": -1}}', "weight_version.min"),
        ('{"weight_version": {"min": true}}', "weight_version.min"),
        ('{"weight_version": {"exact": 1.0}}', "weight_version.exact"),
        ('{"weight_version": {"exact": "1"}}', "weight_version.exact"),
        ('{"weight_version": {"exact": null}}', "weight_version.exact"),
        ('{"weight_version": {"max_staleness": 9223372036854775808}}', "weight_version.max_staleness"),
        ('{"weight_version": {"min": 1, "min": 2}}', "weight_version.min"),
        ('{"weight_version": {"mim": 1}}', "weight_version.mim"),
        ('{"weight_version": {"min": 1, "max-staleness": 1}}', "weight_version.max-staleness"),
        ('{"weight_version": {"min": 1, "run": 7}}', "weight_version.run"),
        ('{"weight_version": {"min": 1, "run": null}}', "weight_version.run"),
        ('{"weight_version": {"min": 1, "run": ""}}', "weight_version.run"),
        ('{"weight_versions": {"min": 1}}', "weight_versions"),
        ('{"weight_verison": {"min": 1}}', "weight_verison"),
        ('{"wieght_version": {"min": 1}}', "wieght_version"),
        ('{"weightVersion": {"min": 1}}', "weightVersion"),
        ('{"weight-version": {"min": 1}}', "weight-version"),
        ('{"Weight_Version": {"min": 1}}', "Weight_Version"),
        ('{"weight\\u005fverson": {"min": 1}}', "weight_verson"),
        ('{"a": 1', "body"),
        ('{"a": 1,}', "body"),
        ('{"a": 1} x', "body"),
        ('{"a": ' + "[" * 100_000, "body"),
        ("", "body"),
    ],
)  # fmt: skip
def test_a_body_that_is_not_understood_is_refused_by_name(body: str, field: str) -> None:
    with pytest.raises(InputError) as caught:
        cut_constraint(body.encode())
    assert caught.value.field == field


def test_a_constraint_is_found_however_its_key_is_escaped_and_only_at_the_top() -> None:
    assert cut_constraint(b'{"weight\\u005fversion":{"m\\u0069n":4}}') == (Constraint("min", 4), b"{}")
    for body in (b'{"x":{"weight_version":1}}', b'[{"weight_version":1}]', b'"weight_version"', b'{"weight_decay":1}'):
        assert cut_constraint(body) == (None, body)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_json_in_another_encoding_is_not_passed_unread(encoding: str) -> None:
    with pytest.raises(Exception, match="UTF-8"):
        read_demand([(b"content-type", b"application/json")], '{"weight_version": {"min": 9}}'.encode(encoding))


# --- headers ---


@given(CONSTRAINTS, st.none() | st.floats(0, 3600))
def test_headers_say_the_same_as_a_body(want: Constraint, wait: float | None) -> None:
    headers = [(f"x-weight-version-{want.kind}".replace("_", "-").encode(), b"%d" % want.number)]
    if want.run is not None:
        headers.append((b"x-weight-version-run", want.run.encode()))
    if wait is not None:
        headers.append((b"x-weight-version-wait", f"{wait:.3f}".encode()))
    demand = read_headers([(b"content-type", b"x"), *headers])
    assert demand.constraint == want
    assert (demand.wait_s is None) == (wait is None) and (
        wait is None or demand.wait_s == pytest.approx(wait, abs=1e-3)
    )


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"min": "-1"}, "X-Weight-Version-Min"),
        ({"min": "+1"}, "X-Weight-Version-Min"),
        ({"min": "1.0"}, "X-Weight-Version-Min"),
        ({"min": ""}, "X-Weight-Version-Min"),
        ({"min": "true"}, "X-Weight-Version-Min"),
        ({"min": "1_0"}, "X-Weight-Version-Min"),
        ({"min": "1, 2"}, "X-Weight-Version-Min"),
        ({"min": "²"}, "X-Weight-Version-Min"),
        ({"exact": "9223372036854775807"}, None),
        ({"exact": "9223372036854775808"}, "X-Weight-Version-Exact"),
        ({"minimum": "1"}, "X-Weight-Version-Minimum"),
        ({"max_staleness": "1"}, "X-Weight-Version-Max_staleness"),
        ({"min": "1", "exact": "1"}, "X-Weight-Version-Exact, X-Weight-Version-Min"),
        ({"run": "r"}, "X-Weight-Version-Run"),
        ({"min": "1", "run": "a b"}, "X-Weight-Version-Run"),
        ({"min": "1", "wait": "-1"}, "X-Weight-Version-Wait"),
        ({"min": "1", "wait": "inf"}, "X-Weight-Version-Wait"),
        ({"min": "1", "wait": "1e3"}, "X-Weight-Version-Wait"),
        ({"min": "1", "wait": "4000"}, "X-Weight-Version-Wait"),
    ],
)
def test_a_header_that_is_not_understood_is_refused_by_name(headers: dict[str, str], field: str | None) -> None:
    sent = [(f"x-weight-version-{name}".encode(), value.encode("latin-1")) for name, value in headers.items()]
    if field is None:
        read_headers(sent)
        return
    with pytest.raises(InputError) as caught:
        read_headers(sent)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "name", [b"x-weight-version", b"weight-version-min", b"x_weight_version_min", b"x-weights-version-min"]
)
def test_a_header_that_was_meant_to_be_one_of_ours_is_refused(name: bytes) -> None:
    with pytest.raises(InputError):
        read_headers([(name, b"1")])


def test_a_header_given_twice_or_beside_a_body_is_refused() -> None:
    one = (b"x-weight-version-min", b"1")
    with pytest.raises(InputError, match="twice"):
        read_headers([one, one])
    with pytest.raises(Exception, match="header and body"):
        read_demand([one], b'{"weight_version": {"min": 1}}')
    with pytest.raises(Exception, match="content-encoding"):
        read_demand([(b"content-encoding", b"gzip")], b"\x1f\x8b")
    assert read_demand([(b"x-weight-version-wait", b"2")], b'{"weight_version": {"min": 1}}')[:2] == (
        Constraint("min", 1), 2.0)  # fmt: skip


def test_hop_by_hop_headers_and_ours_stay_here() -> None:
    sent = [(b"connection", b"close, X-Mine"), (b"x-mine", b"1"), (b"te", b"trailers"), (b"transfer-encoding", b"chunked"),
            (b"upgrade", b"h2c"), (b"content-length", b"3"), (b"x-weight-version-min", b"1"), (b"authorization", b"k"),
            (b"accept-encoding", b"gzip"), (b"accept", b"a"), (b"accept", b"b")]  # fmt: skip
    assert request_headers(sent) == [
        ("authorization", "k"), ("accept", "a"), ("accept", "b"), ("Accept-Encoding", "identity")]  # fmt: skip
    assert response_headers([(b"Keep-Alive", b"x"), (b"Set-Cookie", b"a"), (b"Set-Cookie", b"b"),
                             (b"X-Weight-Version-End", b"9")]) == [(b"set-cookie", b"a"), (b"set-cookie", b"b")]  # fmt: skip


# --- paths ---

BLOCKED = Blocklist(("/pause", "/update_weights", "/collective_rpc"))


@pytest.mark.parametrize(
    "path",
    ["/pause", "/pause/", "//pause", "/./pause", "/v1/../pause", "/PAUSE", "/%70ause", "/%2570ause", "/%252570ause",
     "/pause%2f", "/%2fpause", "/v1/%2e%2e/pause", "/v1/%2E%2E%2Fpause", "/v1/..%5cpause", "/pause;x=1", "/;x/pause",
     "/pause%00", "/pause%20", "/%20pause", "/update_weights_from_disk", "/collective_rpc/x", "/..//../pause",
     "/v1/..;/pause", "/%" + "25" * 40 + "70ause"],
)  # fmt: skip
def test_a_control_route_is_blocked_however_it_is_spelt(path: str) -> None:
    assert BLOCKED.covers(path.encode())


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/", "/v1/pause", "/pauses/..", "/v1/chat/completions/", "/%61", "/paus"]
)
def test_other_routes_are_not_blocked(path: str) -> None:
    assert not BLOCKED.covers(path.encode())
    assert not Blocklist(()).covers(path.encode())


@given(st.text(st.characters(codec="ascii"), max_size=20).map(lambda text: f"/{text}".encode()))
def test_a_path_that_is_blocked_stays_blocked_when_it_is_encoded(path: bytes) -> None:
    encoded = b"/" + b"".join(b"%%%02x" % byte for byte in path[1:])
    if BLOCKED.covers(path) and b"%" not in path:
        assert BLOCKED.covers(encoded)


# --- the gate ---


def opened(version: int = 1, **keys: Any) -> Gate:
    gate = Gate(**{"head_trust_s": TRUST_S, "fence_wait_s": 5.0, **keys})
    gate.announce("r", version)
    gate.open()
    return gate


def enter(gate: Gate, want: Constraint | None = None, wait: float | None = None) -> Any:
    return gate.enter(want, wait, lambda: None)


def test_who_waits_for_a_version_is_inside_before_the_next_fence() -> None:
    async def scenario() -> None:
        gate = opened(1)
        waits = [asyncio.create_task(enter(gate, Constraint("exact", n), 30)) for n in (2, 3)]
        while gate.waiting < 2:
            await asyncio.sleep(0)
        gate.saw("r", 3)
        assert gate.wanted() == 2
        gate.close()
        gate.announce("r", 2)
        gate.open()
        assert gate.inside == 1, "let in by the thread that opened, not when the loop comes to it"
        gate.close()
        assert not gate.drain(0), "so that the next fence waits for it"
        ticket = await waits[0]
        assert isinstance(ticket, Ticket) and (ticket.run, ticket.version) == ("r", 2)
        gate.leave(ticket)
        gate.leave(ticket)
        assert gate.drain(0) and gate.wanted() == 3
        gate.announce("r", 4)
        gate.open()
        verdict = await waits[1]
        assert isinstance(verdict, Verdict) and verdict.answer is Answer.REFUSE and "passed" in verdict.reason

    asyncio.run(scenario())


def test_a_request_waits_for_a_fence_unasked_and_for_a_version_only_if_it_says_so() -> None:
    async def scenario() -> None:
        gate = opened(1)
        verdict = await enter(gate, Constraint("min", 2))
        assert verdict.answer is Answer.BEHIND
        gate.close()
        waits = [asyncio.create_task(enter(gate, want)) for want in (None, Constraint("min", 2), Constraint("min", 9))]
        while gate.waiting < 3:
            await asyncio.sleep(0)
        gate.announce("r", 2)
        gate.open()
        free, second, ninth = await asyncio.gather(*waits)
        assert isinstance(free, Ticket) and isinstance(second, Ticket) and ninth.answer is Answer.BEHIND
        gate.close()
        assert (await enter(gate, None, 0.01)).answer is Answer.FENCED

    asyncio.run(scenario())


def test_whoever_is_down_or_in_doubt_lets_nobody_in() -> None:
    async def scenario() -> None:
        gate = opened(1)
        waits = asyncio.create_task(enter(gate, Constraint("min", 2), 30))
        while not gate.waiting:
            await asyncio.sleep(0)
        gate.down("dead")
        assert (await waits).answer is Answer.DOWN and (await enter(gate)).reason == "dead"
        gate.down("")
        assert isinstance(await enter(gate), Ticket)
        gate.doubt()
        assert (await enter(gate)).answer is Answer.ATTACHING
        gate.announce("r", 1)
        assert (await enter(gate, None, 0)).answer is Answer.FENCED, "announced is not opened"
        gate.end()
        gate.down("")
        assert (await enter(gate)).answer is Answer.DOWN

    asyncio.run(scenario())


def test_staleness_is_not_told_from_an_old_look_at_the_store() -> None:
    now = [100.0]

    async def scenario() -> None:
        gate = opened(1, clock=lambda: now[0])
        fresh = Constraint("max_staleness", 3)
        assert (await enter(gate, fresh)).answer is Answer.BEHIND
        gate.saw("r", 2)
        assert isinstance(await enter(gate, fresh), Ticket)
        now[0] += TRUST_S + 1
        assert "last seen" in (await enter(gate, fresh)).reason
        gate.saw("newer", 0)
        assert "newer" in (await enter(gate, fresh)).reason

    asyncio.run(scenario())


def test_a_request_that_is_cancelled_while_it_is_let_in_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        gate = opened(1)
        waits = asyncio.create_task(enter(gate, Constraint("min", 2), 30))
        while not gate.waiting:
            await asyncio.sleep(0)
        gate.announce("r", 2)  # in the same turn of the loop
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert gate.inside == 0 and gate.waiting == 0

    asyncio.run(scenario())


def test_no_request_is_inside_a_fence_whatever_the_threads_do() -> None:
    """Requests from a loop, fences from a thread: an answer made of another version than the ticket's would show."""
    gate = opened(0)
    held, rounds, wrong = [0], 300, []
    ended = threading.Event()

    def fences() -> None:
        for number in range(1, rounds + 1):
            gate.close()
            assert gate.drain(10)
            held[0] = number
            gate.announce("r", number)
            gate.open()
        ended.set()

    async def client() -> None:
        while not ended.is_set():
            ticket = await enter(gate)
            assert isinstance(ticket, Ticket)
            await asyncio.sleep(0)
            if held[0] != ticket.version:
                wrong.append((held[0], ticket.version))
            gate.leave(ticket)
            await asyncio.sleep(0)

    async def scenario() -> None:
        thread = threading.Thread(target=fences)
        thread.start()
        await asyncio.gather(*(client() for _ in range(8)))
        thread.join()

    asyncio.run(scenario())
    assert not wrong and held[0] == rounds


# --- the engine behind it ---


class Recorded(MemoryEngine):
    def __init__(self, **keys: Any) -> None:
        super().__init__({}, **keys)
        self.modes: list[PauseMode] = []

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self.modes.append(mode)
        super().pause(mode, timeout)


def inside(gate: Gate, cancelled: list[int]) -> Ticket:
    async def one() -> Any:
        return await gate.enter(None, None, lambda: cancelled.append(1))

    ticket: Ticket = asyncio.run(one())
    return ticket


@pytest.mark.parametrize(("fallback", "cancels"), [(PauseMode.ABORT, 1), (PauseMode.KEEP, 0)])
def test_a_request_that_hangs_is_settled_by_the_fallback(fallback: PauseMode, cancels: int) -> None:
    gate, engine, cancelled = opened(), Recorded(), []
    gated = GatedEngine(engine, gate, 0.01, fallback)
    inside(gate, cancelled)
    gated.pause(PauseMode.WAIT, 5)
    assert engine.modes == [fallback] and len(cancelled) == cancels == gated.aborted
    assert not gate.now.open
    gated.announce(common_pb2.VersionId(run_id="r", number=2))
    gated.resume()
    assert gate.now.open and gate.now.version == 2


def test_a_drained_engine_is_paused_as_configured() -> None:
    for mode in PauseMode:
        gate, engine = opened(), Recorded()
        GatedEngine(engine, gate, 1, PauseMode.ABORT).pause(mode, 5)
        assert engine.modes == [mode] and not gate.now.open


def test_a_pause_that_fails_leaves_the_gate_as_it_was() -> None:
    for was_open in (True, False):
        gate, engine = opened(), Recorded(fail_at={"pause": 1})
        if not was_open:
            gate.close()
        with pytest.raises(DeadlineError):
            GatedEngine(engine, gate, 1, PauseMode.ABORT).pause(PauseMode.WAIT, 5)
        assert gate.now.open is was_open


def test_an_engine_that_answers_requests_is_told_by_its_methods() -> None:
    class Served(MemoryEngine):
        control_routes = ()

        def alive(self, timeout: float) -> bool:
            return True

    assert isinstance(Served({}), ServedEngine) and not isinstance(MemoryEngine({}), ServedEngine)


# --- the replica's thread ---


class Replaced(MemoryEngine):
    """Is replaced by another process, with other weights, before a version is staged; that process says so."""

    replaced = False

    def stage(self, update: Any) -> None:
        if update.target.number == 2 and not self.replaced:
            self.replaced = True
            self.table = engine(0).table
            raise EngineInDoubtError("the engine was started anew")
        super().stage(update)


def test_an_engine_that_says_it_was_started_anew_is_identified_again(tmp_path: Path) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    held, gate = Replaced(model(0)), Gate(TRUST_S, 5.0)
    seen: list[Situation] = []
    versions: list[int] = []
    third = threading.Event()

    def failed(error: Exception) -> None:
        seen.append(gate.now)
        raise RuntimeError("a listener's own fault")

    def took(report: SyncReport) -> None:
        versions.append(report.version)
        if report.version == 3:
            third.set()

    with Publisher.open(keys) as publisher:
        driver = Driver(Replica.open(keys, GatedEngine(held, gate, 1, PauseMode.ABORT)), gate)
        driver.listeners.commit.append(took)
        driver.listeners.error.append(failed)
        driver.start()
        driver.engine_back()
        for step in (1, 2, 3):
            publisher.publish(model(step), step=step)
            driver.wake()
            deadline = time.monotonic() + 30
            while gate.now.version != step and time.monotonic() < deadline:
                time.sleep(0.005)
        assert third.wait(30) and driver.stop(30)
    assert seen[0].version is None and not seen[0].open, "nobody was let in from then on"
    assert held.replaced and driver.progress.errors == len(seen) == 1
    assert held.calls.count("describe") == 2 and same_bits(held, model(3)) and versions[-1] == 3


# --- the end of a stream ---


def openai_events(stream: bytes) -> list[Any]:
    """As OpenAI's client reads a stream: lines into events, up to ``[DONE]``; every event before it is a chunk."""
    chunks = []
    for event in stream.decode().replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in event.split("\n") if line and not line.startswith(":")]
        data = "\n".join(line.partition(":")[2].removeprefix(" ") for line in lines if line.startswith("data:"))
        if data.startswith("[DONE]"):
            break
        if data:
            chunk = json.loads(data)
            assert "error" not in chunk
            chunks.append(chunk)
    return chunks


@pytest.mark.parametrize("done", [b"data: [DONE]\n\n", b"data:[DONE]\r\n\r\n", b"data: [DONE]\n", b"data: [DONE]", b""])
def test_the_last_event_tells_the_version_and_openai_clients_do_not_see_it(done: bytes) -> None:
    ticket, now = Ticket("r", 3, lambda: None), Situation("r", 4)
    stream = b'data: {"choices": []}\n\n' + done
    whole = stream + end_of_stream(ticket, now, stream[-64:])
    assert whole.startswith(stream)
    assert openai_events(whole) == [{"choices": []}]
    last = whole.replace(b"\r\n", b"\n").rstrip().split(b"\n\n")[-1]
    start = b"event: weight_version\ndata: " if done else b": weight_version "
    assert last.startswith(start)
    assert json.loads(last.removeprefix(start)) == {"run": "r", "start": 3, "end": 4}


def test_a_stream_that_is_cut_off_ends_in_an_error_that_openai_clients_raise() -> None:
    event = error_event(too_late(None, Verdict(Answer.DOWN, "dead"), Situation()), b'data: {"half')
    with pytest.raises(AssertionError):
        openai_events(b'data: {"choices": []}' + event)
    assert event.startswith(b"\n\ndata: {") and json.loads(event.strip()[6:])["error"]["code"] == "engine_not_serving"


# --- options ---


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"listen": "0.0.0.0:9000"}, "listen"), ({"listen": "[::]:9000"}, "listen"), ({"listen": "9000"}, "listen"),
        ({"listen": "127.0.0.1:99999"}, "listen"), ({"listen": "unix:"}, "listen"), ({"listen": ":9000"}, "listen"),
        ({"listen": "10.0.0.1:9000"}, "listen"), ({"engine_url": ("127.0.0.1:8000",)}, "engine_url"),
        ({"engine_url": ("ftp://h:1",)}, "engine_url"), ({"engine_url": ("http://u:p@h:1",)}, "engine_url"),
        ({"engine_url": ("http://h:1/path",)}, "engine_url"), ({"engine_url": ("http://h:x",)}, "engine_url"),
        ({"engine_url": ()}, "engine_url"), ({"engine_url": ("http://h:1", "http://h:1")}, "engine_url"),
        ({"tls_cert": "x"}, "tls_key"), ({"after_drain": "wait"}, "after_drain"), ({"drain_s": -1}, "drain_s"),
        ({"drain_s": float("nan")}, "drain_s"), ({"body_limit": 0}, "body_limit"), ({"watch_s": 0}, "watch_s"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_used_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**{"engine_url": ("http://127.0.0.1:1",), **options})
    assert caught.value.field == field


def test_loopback_and_unix_sockets_need_no_permission() -> None:
    for listen in ("127.0.0.1:0", "127.9.9.9:1", "localhost:1", "[::1]:1", "unix:/tmp/x"):
        Settings(("http://127.0.0.1:1",), listen)
    assert Settings(("http://127.0.0.1:1",), "0.0.0.0:9000", insecure=True).address == ("0.0.0.0", 9000)
