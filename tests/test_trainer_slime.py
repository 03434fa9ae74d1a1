"""Claims about the slime adapter, against a stand-in with slime's contract; real slime is in tests/hosts/slime."""

from __future__ import annotations

import importlib
import logging
import os
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slime_standin as slime
import torch
import torch.distributed as dist
import yaml
from loop import Child, config, follow_fresh, reader, same_bits, versions
from safetensors.torch import save_file

from weight_sync.adapters.trainers.slime.updater import Nobody
from weight_sync.errors import ConfigError, ForkRequiredError, LayoutError

INSTALL = "weight_sync.adapters.trainers.slime.install"


@pytest.fixture
def standin() -> Iterator[None]:
    slime.put_in_place()
    yield
    slime.take_away()


def job(folder: Path, block: dict[str, Any] | None = None, **changes: Any) -> Namespace:
    """What a user sets, and the checkpoint that engines boot from."""
    keys = {"uri": str(folder / "store"), "poll_s": 0.02, "timeout_s": 60, "threads": 1, "anchor_share": 0}
    text = {"custom_megatron_init_path": INSTALL, "weight_sync": keys if block is None else block}
    (folder / "ws.yaml").write_text(yaml.safe_dump(text))
    args = slime.arguments(folder, **changes)
    (folder / "hf").mkdir(exist_ok=True)
    table = slime.sent(args, 0)
    if args.tied_copy:
        del table["lm_head.weight"]
    save_file(table, folder / "hf" / "model.safetensors")
    return args


def started(args: Namespace, *engines: slime.Engine) -> Any:
    actor = slime.MegatronTrainRayActor()
    actor.init(args)
    actor.set_rollout_manager(slime.Manager(engines))
    return actor


def synced(actor: Any) -> dict[str, float]:
    """One sync of slime's, waited for; its metrics, as slime drains them."""
    actor.update_weights()
    assert actor.weight_updater.weight_sync.settle()
    return dict(actor.weight_updater.pop_metrics())


def served(folder: Path, args: Namespace, step: int) -> bool:
    """Whether a replica that joins now serves exactly what slime would send."""
    wanted = slime.sent(args, step)
    if args.tied_copy:
        del wanted["lm_head.weight"]
    return same_bits(follow_fresh(config(folder))[0], wanted)


@pytest.mark.usefixtures("standin")
def test_a_remote_fleet_is_published_to_although_slime_has_no_engines(tmp_path: Path) -> None:
    args = job(tmp_path)
    actor = started(args)
    for step in range(5):
        if step:
            actor.train(step - 1)
        metrics = synced(actor)
        assert served(tmp_path, args, step)
        assert metrics["weight_sync/failed"] == metrics["weight_sync/tensors_gathered"] == 0
        assert actor.weight_updater.weight_version == actor.weight_updater.weight_sync.version
    assert isinstance(actor.weight_updater.rollout_engines[0], Nobody)
    assert actor.weight_updater.weight_sync.publisher.step == 4 and versions(config(tmp_path)) == list(range(6))
    assert set(actor.weight_updater.weight_sync.paths.values()) == {"shard"}
    actor.weight_updater.weight_sync.close()


@pytest.mark.usefixtures("standin")
def test_engines_of_slimes_own_get_the_same_version_from_slime(tmp_path: Path) -> None:
    args = job(tmp_path)
    engine = slime.Engine()
    actor = started(args, engine)
    for step in range(3):
        if step:
            actor.train(step - 1)
        synced(actor)
        assert engine.version == actor.weight_updater.weight_sync.version == step + 1
        assert all(torch.equal(engine.held[name], tensor) for name, tensor in slime.sent(args, step).items())
        assert served(tmp_path, args, step)


@pytest.mark.usefixtures("standin")
def test_an_engine_in_the_place_of_a_dead_one_gets_the_whole_of_the_next_version(tmp_path: Path) -> None:
    """slime's fault tolerance starts engines anew, with the weights of the base, and reports them at the next sync."""
    args = job(tmp_path)
    lives, dies, anew = slime.Engine(), slime.Engine(), slime.Engine()
    actor, manager = started(args), slime.Manager([lives, dies])
    actor.set_rollout_manager(manager)
    lists = [[lives, dies], [lives, anew], [], [anew]]  # one dies, then all, and one comes back
    for step, engines in enumerate(lists):
        new = [engine for engine in engines if engine not in manager.engines]
        manager.engines, manager.new = engines, len(new) or manager.new
        if step:
            actor.train(step - 1)
        assert synced(actor)["weight_sync/failed"] == 0 and served(tmp_path, args, step)
        for engine in engines:
            assert engine.version == actor.weight_updater.weight_sync.version == step + 1
            assert all(torch.equal(engine.held[name], tensor) for name, tensor in slime.sent(args, step).items())
    assert dies.version == 1


def publish_shards(say: Callable[[str], None], folder: str, rank: int) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    slime.put_in_place()
    args = slime.arguments(Path(folder))
    actor = started(args)
    gathers = []
    original = dist.all_gather

    def gather(*given: Any, **options: Any) -> Any:
        gathers.append(given[1].device.type)
        return original(*given, **options)

    dist.all_gather = gather
    for step in range(5):
        if step:
            actor.train(step - 1)
        metrics = synced(actor)
        say(
            f"{actor.weight_updater.weight_version} {metrics['weight_sync/failed']} {metrics.get('weight_sync/replicas')}"
        )
    assert set(gathers) == {"meta"}, "tensors were gathered while learning only, and then on meta"
    dist.barrier()
    os._exit(0)


def test_tensor_parallel_ranks_publish_their_own_shards_and_gather_nothing(tmp_path: Path) -> None:
    args = job(tmp_path)
    ranks = [Child(tmp_path, publish_shards, str(tmp_path), rank) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.lines() for rank in ranks]
    assert ranks[0].lines() == ranks[1].lines(), "metrics are the same on every rank"
    assert served(tmp_path, args, 4)


@pytest.mark.usefixtures("standin")
def test_what_slime_computes_is_gathered_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = job(tmp_path, scales_down=True)
    actor = started(args)
    with caplog.at_level(logging.WARNING):
        metrics = synced(actor)
    assert metrics["weight_sync/tensors_gathered"] == slime.LAYERS
    assert "model.layers.0.mlp.down_proj.weight is gathered: slime computes it" in caplog.text
    actor.train(0)
    synced(actor)
    assert served(tmp_path, args, 1)


@pytest.mark.usefixtures("standin")
def test_what_slime_quantises_is_published_as_slime_sends_it(tmp_path: Path) -> None:
    args = job(tmp_path, quantization={"quant_method": "int8"})
    actor = started(args)
    synced(actor)
    actor.train(0)
    metrics = synced(actor)
    paths = actor.weight_updater.weight_sync.paths
    assert metrics["weight_sync/tensors_gathered"] == 2 * slime.LAYERS, "codes and their scales"
    assert paths["model.norm.weight"] == "shard" and "quantises" in paths["model.layers.0.mlp.down_proj.weight"]
    assert served(tmp_path, args, 1)


@pytest.mark.usefixtures("standin")
def test_a_copy_of_tied_embeddings_is_dropped_and_an_untied_one_refused(tmp_path: Path) -> None:
    args = job(tmp_path, tied_copy=True, untie_embeddings_and_output_weights=False)
    actor = started(args)
    synced(actor)
    assert served(tmp_path, args, 0)
    slime.take_away()
    slime.put_in_place()
    other = started(slime.arguments(tmp_path, tied_copy=True))
    with pytest.raises(LayoutError, match=r"lm_head\.weight"):
        other.update_weights()


@pytest.mark.usefixtures("standin")
def test_an_offloaded_trainer_publishes_from_slimes_backup(tmp_path: Path) -> None:
    args = job(tmp_path, offload_train=True)
    actor = started(args)
    actor.backup = {name: tensor.detach().clone() for name, tensor in actor.model[0].named_parameters()}
    synced(actor)
    actor.train(0)
    actor.backup = {name: tensor.detach().clone() for name, tensor in actor.model[0].named_parameters()}
    with torch.no_grad():
        for _, parameter in actor.model[0].named_parameters():
            parameter.fill_(float("nan"))  # as if the memory were gone
    synced(actor)
    assert served(tmp_path, args, 1)


@pytest.mark.usefixtures("standin")
def test_a_resumed_job_goes_on_in_its_run_and_an_older_checkpoint_is_refused(tmp_path: Path) -> None:
    actor = started(job(tmp_path))
    for step in range(3):
        if step:
            actor.train(step - 1)
        synced(actor)
    actor.weight_updater.weight_sync.close()

    def resumed(rollout: int) -> Any:
        slime.take_away()
        slime.put_in_place()
        again = started(slime.arguments(tmp_path, loaded=rollout))
        again.model[0].move(rollout + 1)
        return again

    before = versions(config(tmp_path))
    head = resumed(1)
    synced(head)
    assert versions(config(tmp_path)) == before, "step 2 is the head"
    head.train(2)
    synced(head)
    assert head.weight_updater.weight_sync.publisher.step == 3
    with pytest.raises(ForkRequiredError, match="step 1, which is version 2"):
        resumed(0).update_weights()


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("own", [0, 1], ids=["remote fleet", "engines of its own, too"])
def test_miles_is_told_by_its_features_and_its_two_more_questions_are_answered(tmp_path: Path, own: int) -> None:
    slime.take_away()
    slime.put_in_place("miles")
    args = job(tmp_path)
    engines = [slime.Engine() for _ in range(own)]
    actor = started(args, *engines)
    updater = actor.weight_updater
    assert not updater.is_rollout_engines_fresh(), "nobody has connected it yet"
    for step in range(3):
        if step:
            actor.train(step - 1)
        assert synced(actor)["weight_sync/failed"] == 0 and served(tmp_path, args, step)
        assert updater.weight_version == step + 1 and all(engine.version == step + 1 for engine in engines)
        assert updater.is_rollout_engines_fresh()
    updater.mark_engine_connection_stale()
    assert updater.is_rollout_engines_fresh() == (not engines), (
        "miles connects anew, and only to what it has handles of"
    )
    actor.train(2)
    synced(actor)
    assert updater.is_rollout_engines_fresh() and served(tmp_path, args, 3)
    updater.weight_sync.close()


@pytest.mark.usefixtures("standin")
def test_a_version_says_how_slime_computes(tmp_path: Path) -> None:
    args = job(tmp_path, tensor_model_parallel_size=2, params_dtype=torch.bfloat16, use_rollout_routing_replay=True)
    actor = started(args)
    synced(actor)
    contract = actor.weight_updater.weight_sync.contract()
    assert (contract.engine, contract.tensor_parallel, contract.compute_dtype) == ("slime", 2, "bfloat16")
    assert contract.router_replay and not contract.HasField("pipeline_parallel"), "what slime does not say is not set"
    sent = reader(config(tmp_path)).manifest(1).contract
    assert sent.id and sent.tensor_parallel == 2 and sent.router_replay


# --- installing ---


@pytest.mark.usefixtures("standin")
def test_without_a_block_nothing_is_touched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    actor = started(job(tmp_path, block={}), slime.Engine())
    assert type(actor.weight_updater) is slime.UpdateWeightFromDistributed
    assert "nothing is published" in caplog.text


@pytest.mark.usefixtures("standin")
def test_a_wrong_key_stops_slime_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="anchor_every"):
        started(job(tmp_path, block={"uri": "/x", "anchor_evry": 1}))


@pytest.mark.usefixtures("standin")
@pytest.mark.parametrize("name", ["initialize_model_and_optimizer", "train", "UpdateWeightFromDistributed"])
def test_a_slime_that_lacks_a_hook_point_is_told_which(tmp_path: Path, name: str) -> None:
    import sys

    delattr(sys.modules["slime.backends.megatron_utils.actor"], name)
    with pytest.raises(ConfigError, match=rf"{name}.*doctor slime"):
        started(job(tmp_path))


def test_outside_of_slime_the_hook_says_so(tmp_path: Path) -> None:
    from weight_sync.adapters.trainers.slime import install

    with pytest.raises(ConfigError, match="neither slime nor miles"):
        install(Namespace(weight_sync={"uri": str(tmp_path)}))


@pytest.mark.usefixtures("standin")
def test_the_hook_is_a_function_whatever_was_imported_before() -> None:
    importlib.import_module("weight_sync.adapters.trainers.slime.hooks")
    assert callable(slime._load(INSTALL))
