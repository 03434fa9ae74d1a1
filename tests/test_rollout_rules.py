"""Claims about the rollout client's decisions: which spans, who is asked, what follows an answer. No I/O."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.adapters.rollout.flavours import FLAVOURS, Answer
from weight_sync.adapters.rollout.fleet import Fleet, Seat, Wanted, choose
from weight_sync.adapters.rollout.session import of_model
from weight_sync.adapters.rollout.spans import Served, read_served, spans_of
from weight_sync.adapters.rollout.verdict import Next, judge
from weight_sync.errors import EngineError

Label = tuple[str, int, int]


def answer(labels: list[Label] | None, tokens: int = 4) -> Answer:
    return Answer([1] * tokens, [-1.0] * tokens, "stop", labels)


def spans(labels: list[Label] | None) -> list[tuple[int, int, int]]:
    """Of an answer of 4 tokens, begun at version 4 of run-1 and ended at version 9."""
    return [(s.number, s.begin, s.end) for s in spans_of(answer(labels), Served("run-1", 4, 9, "run-1"))]


@pytest.mark.parametrize("form", ["{}", "run-1:{}", "run-1/{}", "run-1@{}"])
def test_labels_with_and_without_the_run_are_read(form: str) -> None:
    assert spans([(form.format(4), 0, 3), (form.format(9), 3, 4)]) == [(4, 0, 3), (9, 3, 4)]


@pytest.mark.parametrize(
    "labels",
    [
        None,
        [],
        [("default", 0, 4)],
        [("other:5", 0, 4)],
        [("3", 0, 4)],
        [("10", 0, 4)],
        [("5", 0, 3)],
        [("5", 0, 5)],
        [("5", 1, 4)],
        [("5", 0, 2), ("6", 3, 4)],
        [("5", 0, 2), ("6", 2, 2), ("7", 2, 4)],
    ],
)
def test_labels_that_do_not_say_it_give_way_to_the_start_version(labels: list[Label] | None) -> None:
    assert spans(labels) == [(4, 0, 4)]


labels = st.lists(
    st.tuples(st.sampled_from(["4", "9", "run-1:5", "x"]), st.integers(0, 5), st.integers(0, 5)), max_size=4
)


@given(labels)
def test_spans_always_cover_the_output_exactly(found: list[Label]) -> None:
    at = 0
    for number, begin, end in spans(found):
        assert begin == at and end > begin and 4 <= number <= 9
        at = end
    assert at == 4


@pytest.mark.parametrize("missing", ["run", "start", "end"])
def test_an_answer_without_versions_is_no_trajectory(missing: str) -> None:
    headers = {f"x-weight-version-{name}": value for name, value in (("run", "r"), ("start", "0"), ("end", "0"))}
    assert read_served(headers) == Served("r", 0, 0, "r")
    del headers[f"x-weight-version-{missing}"]
    with pytest.raises(EngineError, match="sidecar"):
        read_served(headers)


def seat(url: str, version: int | None = None, **state: Any) -> Seat:
    return Seat(url, run="run", version=version, **state)


@pytest.mark.parametrize(
    ("seats", "chosen"),
    [
        ([seat("a", 5, in_flight=3), seat("b", 5, in_flight=1), seat("c", 5, in_flight=2)], "b"),
        ([seat("a", 5, in_flight=1, others=5), seat("b", 5, in_flight=3)], "b"),
        ([seat("a", 3), seat("b", 5, in_flight=7)], "b"),
        ([seat("a", 3, in_flight=1), seat("b", 2)], "b"),
        ([seat("a", 3), seat("b", None, in_flight=3)], "b"),
        ([seat("a", 5, not_before=11.0), seat("b", 5, in_flight=7)], "b"),
        ([seat("a", 3), seat("b", 5, in_flight=8)], None),
        ([seat("a", 5, not_before=11.0)], None),
        ([], None),
    ],
)
def test_the_least_loaded_engine_at_an_acceptable_version_is_chosen(seats: list[Seat], chosen: str | None) -> None:
    choice = choose(seats, Wanted(min=4), None, now=10.0, per_engine=8)
    assert (choice.seat.url if choice.seat else None) == chosen
    if chosen is None and any(s.not_before for s in seats):
        assert choice.wake == 11.0


@pytest.mark.parametrize(
    ("wanted", "version", "current", "accepted"),
    [
        (Wanted(), 0, None, True),
        (Wanted(min=0), 0, None, True),
        (Wanted(min=1), 0, None, False),
        (Wanted(exact=3), 4, None, False),
        (Wanted(exact=0), 0, 9, True),
        (Wanted(max_staleness=2), 5, 7, True),
        (Wanted(max_staleness=2), 4, 7, False),
        (Wanted(max_staleness=0), 4, None, True),
        (Wanted(run="other"), 4, None, False),
        (Wanted(run="other"), None, None, True),
    ],
)
def test_what_an_engine_was_last_seen_at_says_whether_to_ask(
    wanted: Wanted, version: int | None, current: int | None, accepted: bool
) -> None:
    assert wanted.accepts("run", version, current) is accepted


def test_constraints_become_headers_and_zero_is_one_of_them() -> None:
    assert Wanted().headers() == {}
    assert Wanted(min=0).headers() == {"X-Weight-Version-Min": "0"}
    assert Wanted(max_staleness=0, run="r").headers() == {
        "X-Weight-Version-Max-Staleness": "0",
        "X-Weight-Version-Run": "r",
    }
    assert Wanted(max_staleness=2).headers(current=7) == {"X-Weight-Version-Min": "5"}, "the trainer knows better"
    assert Wanted(max_staleness=2).headers(current=0) == {"X-Weight-Version-Min": "0"}
    assert Wanted(run="r").headers() == {"X-Weight-Version-Min": "0", "X-Weight-Version-Run": "r"}


def test_pauses_grow_with_failures_and_end_with_an_answer() -> None:
    one = seat("a", 5)
    pauses = []
    for _ in range(12):
        one.failed(100.0, "broken")
        pauses.append(one.not_before - 100.0)
    assert pauses == sorted(pauses) and pauses[0] < 1 and pauses[-1] == 30.0
    one.answered()
    assert (one.failures, one.not_before, one.why) == (0, 0.0, "")


def test_a_fleet_remembers_those_that_stay() -> None:
    fleet = Fleet()
    fleet.set(["http://a/", "http://b"])
    fleet.seats[0].in_flight = 3
    fleet.set(["http://a", "http://c"])
    assert [(s.url, s.in_flight) for s in fleet.seats] == [("http://a", 3), ("http://c", 0)]
    assert Fleet().reasons() == "there are no engines"


@pytest.mark.parametrize(
    ("status", "next_"),
    [
        (200, Next.TAKE),
        *[(status, Next.WAIT) for status in (409, 429, 503)],
        *[(status, Next.ELSEWHERE) for status in (404, 408, 500, 502, 504)],
        *[(status, Next.GIVE_UP) for status in (400, 401, 403, 413, 422)],
    ],
)
def test_each_status_leads_somewhere(status: int, next_: Next) -> None:
    assert judge(status, {}, b"no JSON").next is next_


def test_a_refusal_tells_what_is_served_and_when_to_come_again() -> None:
    body = json.dumps({"error": {"message": "behind", "current": {"run": "r", "version": 3}}}).encode()
    verdict = judge(409, {"retry-after": "2.5"}, body)
    assert (verdict.reason, verdict.retry_s, verdict.run, verdict.version) == ("HTTP 409: behind", 2.5, "r", 3)


@given(st.text(), st.binary())
def test_no_header_and_no_body_breaks_the_reading(header: str, body: bytes) -> None:
    verdict = judge(503, {"retry-after": header}, body)
    assert verdict.next is Next.WAIT and 0 <= verdict.retry_s <= 60


@pytest.mark.parametrize("flavour", sorted(FLAVOURS))
def test_a_request_asks_for_one_whole_answer_whatever_the_sampling_says(flavour: str) -> None:
    body = FLAVOURS[flavour].request([1, 2], {"n": 5, "stream": True, "temperature": 0.5}, None)
    inner = body.get("sampling_params", body)
    assert inner["n"] == 1 and body["stream"] is False and inner["temperature"] == 0.5 and "model" not in body


def test_token_ids_are_never_guessed_from_text() -> None:
    choice = {"text": "x", "finish_reason": "stop", "logprobs": {"token_logprobs": [-1.0]}}
    with pytest.raises(EngineError, match="no token ids"):
        FLAVOURS["completions"].read({"choices": [choice]})


def test_a_status_is_that_of_the_adapter_that_is_asked_for() -> None:
    status = {
        "run_id": "base",
        "version": 3,
        "replica_id": "site",
        "adapters": {"tutor": {"run_id": "lora", "version": 0}},
    }
    for model in ("tutor", "base:tutor"):
        assert of_model(status, model) == {**status, "run_id": "lora", "version": 0}
    for model in (None, "tiny", "other"):
        assert of_model(status, model) == status
    assert of_model({"version": 3}, "tutor") == {"version": 3}, "of a sidecar that knows no adapters"
