"""Claims about the mismatch monitor: what it measures, and that it tells stale, other and wrong weights apart."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.scoring import VersionScorer, score_trajectories
from weight_sync.adapters.engines.transformers import TransformersEngine
from weight_sync.contract import Cause, MismatchMonitor
from weight_sync.contract.mismatch import measure, tokens_by_version
from weight_sync.errors import ConfigError, InputError, TrajectoryError, VersionMissingError
from weight_sync.proto.v1 import common_pb2, trajectory_pb2

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


# --- the numbers ------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), max_size=20)


@given(ROWS)
def test_numbers_are_what_their_definitions_say(rows: list[tuple[float, float]]) -> None:
    told, scored = np.array([a for a, _ in rows]), np.array([b for _, b in rows])
    found = measure(told, scored, 0.5)
    n = max(1, len(rows))
    gaps = [b - a for a, b in rows]
    assert found.tokens == len(rows)
    assert math.isclose(found.mean, sum(map(abs, gaps)) / n) and found.max == max(map(abs, gaps), default=0)
    assert math.isclose(found.k1, -sum(gaps) / n, abs_tol=1e-12)
    assert math.isclose(found.k2, sum(g * g for g in gaps) / 2 / n)
    assert math.isclose(found.k3, sum(math.expm1(g) - g for g in gaps) / n, abs_tol=1e-9) and found.k3 >= 0
    assert math.isclose(found.share, sum(abs(g) > 0.5 for g in gaps) / n)


@pytest.mark.parametrize("gap", [0.02, 0.3])
def test_the_estimates_are_those_of_the_divergence(gap: float) -> None:
    dice = np.random.default_rng(0)
    q = dice.dirichlet(np.ones(50))
    p = q * np.exp(gap * dice.standard_normal(50))
    p /= p.sum()
    truth = float((q * np.log(q / p)).sum())
    drawn = dice.choice(50, 400_000, p=q)
    found = measure(np.log(q[drawn]), np.log(p[drawn]), 1.0)
    assert found.k3 == pytest.approx(truth, rel=0.05) and found.k2 == pytest.approx(truth, rel=0.3)
    assert found.k1 == pytest.approx(truth, abs=5 * gap / math.sqrt(len(drawn)))


def trajectory(engine: str, numbers: list[int], logprobs: list[float] | None = None) -> trajectory_pb2.Trajectory:
    """One token per version in ``numbers``."""
    return trajectory_pb2.Trajectory(
        id=f"{engine}-{numbers}", run_id="r", engine_id=engine, prompt_token_ids=[1], output_token_ids=[7] * len(numbers),
        output_logprobs=[-1.0] * len(numbers) if logprobs is None else logprobs,
        spans=[trajectory_pb2.VersionSpan(number=n, begin=i, end=i + 1) for i, n in enumerate(numbers)],
    )  # fmt: skip


def test_tokens_are_judged_by_the_version_that_sampled_each() -> None:
    found = tokens_by_version([trajectory("e", [1, 2, 2]), trajectory("e", [2])])
    assert {v: {i: m.tolist() for i, m in of.items()} for v, of in found.items()} == {
        1: {0: [True, False, False]}, 2: {0: [False, True, True], 1: [True]},
    }  # fmt: skip
    monitor = MismatchMonitor()
    batch = [trajectory("e", [1, 2, 2], [-1.0, -2.0, -2.0])]
    scores = {1: [[-1.0, -9.0, -9.0]], 2: [[-1.5, -2.0, -2.0]]}
    report = monitor.observe(batch, scores[2], 2, lambda version, _: scores[version])
    assert [(f.version, f.cause, f.staleness) for f in report.findings] == [(1, Cause.STALE, 1), (2, Cause.AGREES, 0)]
    assert report.findings[0].total.mean == 0.5 and not report.alarms


def test_what_cannot_be_scored_is_unknown_and_no_alarm() -> None:
    def gone(version: int, batch: Any) -> Any:
        raise VersionMissingError("collected", field="version", found=version)

    for score in (None, gone):
        report = MismatchMonitor().observe([trajectory("e", [1])], [[-3.0]], 2, score)
        assert [f.cause for f in report.findings] == [Cause.UNKNOWN] and not report.alarms
    numeric = MismatchMonitor().observe([trajectory("e", [2])], [[-3.0]], 2, gone)
    assert [f.cause for f in numeric.findings] == [Cause.NUMERIC], "its own version is the trainer's: no scorer needed"


def test_trajectories_without_logprobs_are_counted_and_an_empty_batch_is_none() -> None:
    monitor = MismatchMonitor()
    assert monitor.metrics() == {}
    report = monitor.observe([trajectory("e", [1], [])], [[-1.0]], 1)
    assert (report.skipped, report.batch.tokens, report.findings) == (1, 0, ())
    assert monitor.metrics()["weight_sync/mismatch_skipped"] == 1


@pytest.mark.parametrize(
    ("rows", "told"), [([[-1.0]], [-1.0, -1.0]), ([[-1.0, math.nan]], None), ([[-1.0, -math.inf]], None), ([], None)]
)
def test_logprobs_that_do_not_fit_are_refused(rows: list[list[float]], told: Any) -> None:
    with pytest.raises(TrajectoryError):
        MismatchMonitor().observe([trajectory("e", [1, 1], told)], rows, 1)


@pytest.mark.parametrize("keys", [{"bound": 0}, {"outlier": -1}, {"around": -1}, {"bound": math.nan}])
def test_limits_that_cannot_be_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        MismatchMonitor(**keys)


def test_an_alarm_is_told_once_until_the_engine_agrees_again(caplog: pytest.LogCaptureFixture) -> None:
    monitor = MismatchMonitor()
    with caplog.at_level(logging.WARNING, "weight_sync.contract"):
        for off in (0.5, 0.5, 0.0, 0.5):
            monitor.observe([trajectory('e"\n', [3])], [[-1.0 - off]], 3)
    assert len(caplog.records) == 2 and monitor.last is not None and len(monitor.last.alarms) == 1
    text = monitor.prometheus()
    assert 'weight_sync_mismatch_mean{engine="e\\"\\n",version="3",scored_at="own"} 0.5' in text
    assert 'weight_sync_mismatch_alarm{engine="e\\"\\n",version="3",cause="numeric"} 1' in text


# --- real models ------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "intermediate_size": 48, "max_position_embeddings": 128, "initializer_range": 0.2,
}  # fmt: skip
VERSIONS = 3


class Fleet:
    """Engines of one run whose trainer is at version VERSIONS; ``rollouts`` is what each of them made."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        torch.manual_seed(0)
        build = transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **SIZES))
        self.base = folder / "base"
        build.to(torch.bfloat16).save_pretrained(self.base)
        self.uri, self.stack = str(folder / "store"), stack
        self.replicas: dict[str, Replica] = {}
        self.publisher = stack.enter_context(Publisher.open(self.uri, base=self.base))
        trainer = self.load()
        for step in range(1, VERSIONS + 1):
            dice = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.add_(0.03 * torch.randn(parameter.shape, generator=dice).to(parameter.dtype))
            self.publisher.publish(trainer, step=step)
        assert self.publisher.version is not None
        self.head = self.publisher.version
        self.engines = {
            "good": self.engine("good"), "stale": self.engine("stale", exact=self.head - 1),
            "behind": self.engine("behind", exact=self.head - 1), "perturbed": self.engine("perturbed"),
        }  # fmt: skip
        version = common_pb2.VersionId(run_id=self.publisher.run_id, number=self.head)
        self.engines["behind"].announce(version)  # it says so, and its weights were never moved
        with torch.no_grad():
            self.engines["perturbed"].model.model.layers[0].mlp.up_proj.weight[3] += 2.0
        self.engine("scoring")
        self.score = VersionScorer(self.replicas["scoring"])

    def load(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.bfloat16)

    def engine(self, name: str, **sync: Any) -> TransformersEngine:
        engine = TransformersEngine(self.load(), self.base, engine_id=name)
        self.replicas[name] = self.stack.enter_context(Replica.open(self.uri, engine, replica_id=name))
        self.replicas[name].sync(**sync)
        return engine

    def rollouts(self, *names: str) -> list[trajectory_pb2.Trajectory]:
        out = []
        for name in names:
            answers = self.engines[name].generate([[1, 2, 3], [4, 5]], max_new_tokens=16, samples=3, seed=1)
            out += [a.to_trajectory(f"{name}-{i}", engine_id=name) for i, a in enumerate(answers)]
        return out


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(tmp_path_factory.mktemp("fleet"), stack)


def test_an_engine_left_behind_and_one_with_a_wrong_weight_are_found_and_told_apart(
    fleet: Fleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = fleet.rollouts("good", "stale", "behind", "perturbed")
    assert all(t.contract_id == fleet.engines["good"].contract().id for t in batch)
    trainers = fleet.score(fleet.head, batch)
    monitor = MismatchMonitor(bound=0.01)
    with caplog.at_level(logging.WARNING, "weight_sync.contract"):
        report = monitor.observe(batch, trainers, fleet.head, fleet.score)
    found = {f.engine: f for f in report.findings}
    assert {name: f.cause for name, f in found.items()} == {
        "good": Cause.AGREES, "stale": Cause.STALE, "behind": Cause.OTHER_VERSION, "perturbed": Cause.NUMERIC,
    }  # fmt: skip
    assert found["stale"].staleness == 1 and found["stale"].own is not None
    assert found["stale"].own.mean < monitor.bound < found["stale"].total.mean
    assert found["behind"].held == fleet.head - 1 and found["perturbed"].held is None
    assert [a.finding.engine for a in report.alarms] == ["behind", "perturbed"]
    assert f"are those of version {fleet.head - 1}" in caplog.text and "no version explains" in caplog.text
    metrics = report.metrics()
    assert metrics["weight_sync/mismatch_alarms"] == 2 and metrics["weight_sync/mismatch_numeric"] > monitor.bound
    target = tmp_path / "mismatch.png"
    monitor.plot(target)
    assert target.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError):
        monitor.plot(tmp_path / "mismatch.txt")


def test_without_a_scorer_numbers_are_still_told_apart_from_staleness(fleet: Fleet) -> None:
    batch = fleet.rollouts("stale", "perturbed")
    report = MismatchMonitor().observe(batch, fleet.score(fleet.head, batch), fleet.head)
    assert {f.engine: f.cause for f in report.findings} == {"stale": Cause.UNKNOWN, "perturbed": Cause.NUMERIC}


def test_scores_are_those_of_a_forward_pass_of_each_sequence_alone(fleet: Fleet) -> None:
    batch = fleet.rollouts("good")
    together = score_trajectories(fleet.engines["good"], batch)
    for trajectory_, row in zip(batch, together, strict=True):
        (alone,) = score_trajectories(fleet.engines["good"], [trajectory_])
        np.testing.assert_allclose(row, alone, atol=0.15)  # bf16: shapes differ, and so do the bits
        assert len(row) == len(trajectory_.output_token_ids)
