"""Claims about what a trajectory must be like and how stale it is.

Owns no claim about storage (test_trajectory_inbox).
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trajectory_cases import make, spans

from weight_sync.errors import LineageError, TrajectoryError
from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory import check, oldest_version, staleness
from weight_sync.trajectory.rules import MAX_BYTES, check_run, check_size, retry_after


@st.composite
def valid(draw: st.DrawFn) -> trajectory_pb2.Trajectory:
    """Any valid trajectory: several versions, with and without logprobs and reward."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    numbers = draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(lengths), max_size=len(lengths)))
    ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
    parts = [(number, end - size, end) for number, size, end in zip(numbers, lengths, ends, strict=True)]
    count = ends[-1]
    trajectory = make(draw(st.text(min_size=1, max_size=40)), tokens=count, spans=spans(*parts))
    if draw(st.booleans()):
        trajectory.ClearField("output_logprobs")
    if draw(st.booleans()):
        trajectory.ClearField("reward")
    return trajectory


@given(valid())
def test_every_valid_trajectory_is_taken(trajectory: trajectory_pb2.Trajectory) -> None:
    check(trajectory)


@given(valid(), st.data())
def test_every_hole_and_overlap_of_spans_is_refused(trajectory: trajectory_pb2.Trajectory, data: st.DataObject) -> None:
    span = trajectory.spans[data.draw(st.integers(0, len(trajectory.spans) - 1))]
    edge = data.draw(st.sampled_from(["begin", "end"]))
    wrong = data.draw(st.integers(0, 30).filter(lambda n: n != getattr(span, edge)))
    setattr(span, edge, wrong)
    with pytest.raises(TrajectoryError, match=r"trajectory\.spans"):
        check(trajectory)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"id": ""}, "batch[7].id"),
        ({"id": "x" * 257}, "batch[7].id"),
        ({"id": "ü" * 129}, "batch[7].id"),
        ({"run_id": "x" * 257}, "batch[7].run_id"),
        ({"engine_id": "x" * 257}, "batch[7].engine_id"),
        ({"contract_id": "x" * 257}, "batch[7].contract_id"),
        ({"finish_reason": "x" * 257}, "batch[7].finish_reason"),
        ({"group": "x" * 257}, "batch[7].group"),
        ({"output_token_ids": [], "output_logprobs": [], "spans": []}, "batch[7].output_token_ids"),
        ({"spans": []}, "batch[7].spans"),
        ({"spans": spans((0, 0, 3))}, "batch[7].spans"),
        ({"spans": spans((0, 0, 5))}, "batch[7].spans"),
        ({"spans": spans((0, 1, 4))}, "batch[7].spans[0]"),
        ({"spans": spans((0, 0, 2), (0, 2, 2), (0, 2, 4))}, "batch[7].spans[1]"),
        ({"spans": spans((2**63, 0, 4))}, "batch[7].spans[0].number"),
        ({"output_logprobs": [-1.0]}, "batch[7].output_logprobs"),
        ({"output_logprobs": [-1.0, -1.0, math.nan, -1.0]}, "batch[7].output_logprobs[2]"),
        ({"output_logprobs": [math.inf, -1.0, -math.inf, -1.0]}, "batch[7].output_logprobs[0]"),
        ({"reward": math.nan}, "batch[7].reward"),
        ({"reward": -math.inf}, "batch[7].reward"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_by_field(fields: dict[str, object], field: str) -> None:
    trajectory = make("a")
    for name in fields:
        trajectory.ClearField(name)
    trajectory.MergeFrom(trajectory_pb2.Trajectory(**fields))  # type: ignore[arg-type]
    with pytest.raises(TrajectoryError) as caught:
        check(trajectory, "batch[7]")
    assert caught.value.field == field
    assert caught.value.found is not None and caught.value.expected is not None


def test_a_message_that_is_too_large_is_refused() -> None:
    check_size(MAX_BYTES)
    with pytest.raises(TrajectoryError, match=r"too large: batch\[7\]"):
        check_size(MAX_BYTES + 1, "batch[7]")


def test_one_old_token_makes_a_trajectory_stale() -> None:
    mixed = make("a", spans=spans((7, 0, 1), (3, 1, 2), (8, 2, 4)))
    assert (oldest_version(mixed), staleness(mixed, 9), staleness(mixed, 3)) == (3, 6, 0)
    assert staleness(make("a", 5), 4) == -1, "ahead of a trainer that went back"


def test_version_zero_is_a_version() -> None:
    assert (oldest_version(make("a", 0)), staleness(make("a", 0), 0)) == (0, 0)


def test_another_run_is_told_by_name() -> None:
    check_run(make("a"), "run")
    check_run(make("a"), None)
    with pytest.raises(LineageError, match=r"another run: trajectory\.run_id; found 'run'; expected 'fork'"):
        check_run(make("a"), "fork")


@given(st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1000)), max_size=16), st.integers(1, 10**6))
def test_senders_never_wait_absurdly(settled: list[tuple[float, int]], needed: int) -> None:
    assert 0.05 <= retry_after(sorted(settled), needed) <= 30


def test_senders_wait_as_long_as_the_trainer_takes_for_that_much() -> None:
    assert retry_after([], 5) == 1.0
    assert retry_after([(0, 10), (2, 10), (4, 10)], 25) == 5.0
