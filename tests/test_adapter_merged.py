"""Claims about adapters merged into the embedded engine: PEFT's own bits, versions, the way back, and foreign bases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_cases import adapted, load_base, merged, save_base, step

import weight_sync
from weight_sync.adapters.engines.merged import MergedEngine
from weight_sync.adapters.engines.transformers import TransformersEngine
from weight_sync.checkpoint import Checkpoint
from weight_sync.config import load
from weight_sync.errors import EngineError, EngineInDoubtError, WrongBaseError
from weight_sync.history import History
from weight_sync.mirror import materialize
from weight_sync.ports import PauseMode
from weight_sync.proto.v1 import common_pb2
from weight_sync.registry import open_transport

pytest.importorskip("peft")

PROMPT = [list(range(3, 12))]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


@contextmanager
def following(base: Path, store: Path) -> Iterator[tuple[MergedEngine, Any]]:
    engine = MergedEngine(TransformersEngine(load_base(base), base))
    with weight_sync.Replica.open(str(store), engine) as replica:
        yield engine, replica
    engine.close()


def holds(engine: MergedEngine, weights: dict[str, torch.Tensor]) -> bool:
    found = dict(engine._engine.model.named_parameters())
    return found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


OPTIONS = [
    {},
    {"use_rslora": True, "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "patterns", "embeddings"])
@pytest.mark.parametrize("scheme", [None, "bf16"])
def test_merged_weights_are_pefts_own_bit_for_bit(
    base: Path, tmp_path: Path, options: dict[str, Any], scheme: str | None
) -> None:
    model, store = adapted(base, **options), tmp_path / "lora"
    keys = {"adapter": {"base": str(base)}, "scheme": scheme}
    with weight_sync.Publisher.open(str(store), **keys) as publisher, following(base, store) as (engine, replica):
        for number in range(3):
            publisher.publish(step(model, number))
            report = replica.sync(timeout=60)
            materialize(_history(store), report.version, tmp_path / f"v{number}")
            assert holds(engine, merged(base, tmp_path / f"v{number}"))
            assert engine.audit().hex() == report.digest


def _history(store: Path) -> Any:
    return History(open_transport(load({"uri": str(store)})).replica_end(), None)


def test_answers_are_those_of_pefts_merge_and_carry_the_adapters_version(base: Path, tmp_path: Path) -> None:
    model, store = adapted(base), tmp_path / "lora"
    with weight_sync.Publisher.open(str(store), adapter={"base": str(base)}) as publisher:
        first = publisher.publish(model)
        with following(base, store) as (engine, replica):
            with pytest.raises(EngineError):
                engine.generate(PROMPT, max_new_tokens=4)
            replica.sync()
            answers = [engine.generate(PROMPT, max_new_tokens=8, temperature=0)[0]]
            second = publisher.publish(step(model, 7))
            replica.sync()
            answers.append(engine.generate(PROMPT, max_new_tokens=8, temperature=0)[0])
    assert first is not None and second is not None
    assert [answer.spans[0][0] for answer in answers] == [first.version, second.version]
    assert answers[0].run_id == publisher.run_id
    model.save_pretrained(tmp_path / "saved")
    fresh = load_base(base)
    fresh.load_state_dict(merged(base, tmp_path / "saved"))
    decoder = TransformersEngine(fresh, base)
    decoder.announce(common_pb2.VersionId(run_id="r"))
    assert decoder.generate(PROMPT, max_new_tokens=8, temperature=0)[0].tokens == answers[1].tokens
    assert answers[0].logprobs != answers[1].logprobs


def test_rollback_restores_the_adapter_before_and_close_the_base(base: Path, tmp_path: Path) -> None:
    model, store = adapted(base), tmp_path / "lora"
    with weight_sync.Publisher.open(str(store), adapter={"base": str(base)}) as publisher:
        publisher.publish(model)
        with following(base, store) as (engine, replica):
            replica.sync()
            before = {name: p.detach().clone() for name, p in engine._engine.model.named_parameters()}
            publisher.publish(adapted(base, r=8, target_modules=["q_proj", "up_proj"]))
            report = replica.sync()
            assert not holds(engine, before)
            engine.pause(PauseMode.WAIT, 5)
            for _ in range(2):
                assert engine.rollback() == engine.audit() and engine.audit().hex() != report.digest
                assert holds(engine, before)
            engine.resume()
            inner = engine._engine
    assert inner.audit() == Checkpoint(base).digest()


def test_an_adapter_for_another_base_is_not_served_and_the_error_names_both(base: Path, tmp_path: Path) -> None:
    other = save_base(tmp_path / "other", seed=5)
    store = tmp_path / "lora"
    with weight_sync.Publisher.open(str(store), adapter={"base": str(base)}) as publisher:
        publisher.publish(adapted(base))
    with following(other, store) as (engine, replica):
        with pytest.raises(WrongBaseError) as caught:
            replica.sync()
        assert all(Checkpoint(folder).digest().hex() in str(caught.value) for folder in (base, other))
        assert replica.version is None and engine.version is None
        with pytest.raises(EngineError):
            engine.generate(PROMPT, max_new_tokens=1)
    assert engine._engine.audit() == Checkpoint(other).digest()


def test_a_base_that_moved_invalidates_the_adapter_until_one_for_it_comes(base: Path, tmp_path: Path) -> None:
    store, models = str(tmp_path / "lora"), str(tmp_path / "base-run")
    moved = load_base(base)
    with torch.no_grad():
        moved.model.layers[0].mlp.up_proj.weight[0] *= 1.5
    with weight_sync.Publisher.open(models, base=str(base)) as publisher:
        run = publisher.run_id
        publisher.publish(moved)
    with weight_sync.Publisher.open(store, adapter={"base": f"{models}@0"}) as publisher:
        publisher.publish(adapted(base))
    host = TransformersEngine(load_base(base), base)
    with weight_sync.Replica.open(models, host) as replica:
        replica.sync()
    engine = MergedEngine(host)
    with weight_sync.Replica.open(store, engine) as replica:
        with pytest.raises(WrongBaseError, match=rf"version 1 of run {run}.*version 0 of run {run}.*to fix it"):
            replica.sync()
        moved.save_pretrained(tmp_path / "moved")
        with weight_sync.Publisher.open(store, adapter={"base": f"{models}@head"}, fork=True) as publisher:
            publisher.publish(adapted(tmp_path / "moved"))
        assert replica.sync().run_id == publisher.run_id
    adapted(tmp_path / "moved").save_pretrained(tmp_path / "saved")
    assert holds(engine, merged(tmp_path / "moved", tmp_path / "saved"))


def test_whole_models_and_what_cannot_be_merged_are_refused(base: Path, tmp_path: Path) -> None:
    with weight_sync.Publisher.open(str(tmp_path / "run"), base=str(base)):
        pass
    with following(base, tmp_path / "run") as (_, replica), pytest.raises(EngineError, match="whole model"):
        replica.sync()
    with weight_sync.Publisher.open(str(tmp_path / "lora"), adapter={"base": str(base)}) as publisher:
        publisher.publish(adapted(base, use_dora=True))
    with following(base, tmp_path / "lora") as (engine, replica):
        with pytest.raises(EngineError, match="use_dora"):
            replica.sync()
        assert replica.version is None
    assert engine._engine.audit() == Checkpoint(base).digest()


def test_weights_that_somebody_else_changed_are_noticed(base: Path, tmp_path: Path) -> None:
    with weight_sync.Publisher.open(str(tmp_path / "lora"), adapter={"base": str(base)}) as publisher:
        publisher.publish(adapted(base))
    with following(base, tmp_path / "lora") as (engine, replica):
        replica.sync()
        with torch.no_grad():
            engine._engine.model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1
        with pytest.raises(EngineInDoubtError, match="somebody else"):
            engine.audit()


def test_a_base_that_another_replica_moves_under_an_adapter_is_noticed_and_not_mixed(
    base: Path, tmp_path: Path
) -> None:
    store, models = str(tmp_path / "lora"), str(tmp_path / "base-run")
    moved = load_base(base)
    with torch.no_grad():
        moved.model.layers[0].self_attn.q_proj.weight[0] *= 1.5
    with weight_sync.Publisher.open(models, base=str(base)) as publisher:
        publisher.publish(moved)
    host = TransformersEngine(load_base(base), base)
    with (
        weight_sync.Publisher.open(store, adapter={"base": f"{models}@0"}) as publisher,
        weight_sync.Replica.open(models, host) as below,
    ):
        below.sync(exact=0)
        engine = MergedEngine(host)
        publisher.publish(step(adapted(base), 0))
        with weight_sync.Replica.open(store, engine) as replica:
            replica.sync()
            engine.close()  # the base's own replica finds the bits that it left
            below.forget()
            head = below.sync().digest
            publisher.publish(step(adapted(base), 1))
            with pytest.raises(EngineInDoubtError, match="moved under"):
                replica.sync()
            with pytest.raises(EngineInDoubtError, match="moved under"):
                engine.audit()
        engine.close()
        assert host.audit().hex() == head, "no mixture of two bases"
