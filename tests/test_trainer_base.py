"""Claims about what trainer adapters share: the block, the metrics, one sync's order, and what a failure leaves behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from loop import checkpoint, config, follow_fresh, holding, model, same_bits, versions

from weight_sync import Replica
from weight_sync.adapters.trainers.base import SHARD, TrainerHost, must_stop
from weight_sync.adapters.trainers.block import dialled, read_block
from weight_sync.adapters.trainers.metrics import fleet_metrics, percentile
from weight_sync.adapters.trainers.versions import check_version, outside
from weight_sync.config import Config
from weight_sync.errors import (
    ConfigError,
    EpochFencedError,
    ForkRequiredError,
    LayoutError,
    StoreUnavailableError,
    TensorError,
    WeightSyncError,
)
from weight_sync.group import SoloGroup
from weight_sync.layout.learn import learn_named
from weight_sync.ports import TrainerAdapter
from weight_sync.proto.v1 import common_pb2, replica_pb2
from weight_sync.served import HeldTensors


class Host(TrainerHost):
    """A host whose state is the small model's."""

    def __init__(self, keys: Config, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(keys, SoloGroup())
        self.tensors = dict(tensors)

    def source(self) -> HeldTensors:
        held = self.tensors
        self.paths = dict.fromkeys(held, SHARD)
        return HeldTensors(held, lambda table: learn_named(held, table))


@pytest.fixture
def keys(tmp_path: Path) -> Config:
    return config(tmp_path, base=str(checkpoint(tmp_path / "base")))


@pytest.fixture
def host(keys: Config) -> Iterator[Host]:
    made = Host(keys, model(0))
    yield made
    made.close()


# --- the block ---


def test_a_block_takes_the_containers_and_nulls_of_a_host(tmp_path: Path) -> None:
    block = {"uri": "/x", "threads": None, "overlap": None, "forms": ("step",), "tls": {"cert": None}, "base": None}
    keys = read_block(block, overlap=True, base=str(tmp_path), snapshot_dir=None)
    assert (keys.uri, keys.overlap, keys.base, keys.snapshot_dir) == ("/x", True, str(tmp_path), None)
    assert keys.threads == Config(uri="/x").threads
    assert not read_block({**block, "overlap": False}, overlap=True).overlap, "the block wins over a default"


def test_a_hub_name_as_base_becomes_a_hint_and_the_hosts_own_folder_is_taken(tmp_path: Path) -> None:
    keys = read_block({"uri": "/x", "base": "Qwen/Qwen3-8B"}, base=str(tmp_path))
    assert (keys.base, keys.base_hf_id) == (str(tmp_path), "Qwen/Qwen3-8B")
    assert read_block({"uri": "/x", "base": "Qwen/Qwen3-8B"}).base is None


@pytest.mark.parametrize(("block", "words"), [
    ({"uri": "/x", "anchor_evry": 3}, "anchor_every"), ({"uri": None}, "weight_sync.uri"), (None, "not a mapping"),
    ({"uri": "/x", "threads": "many"}, "weight_sync.threads"),
])  # fmt: skip
def test_a_wrong_block_names_its_key(block: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_block(block)


def test_a_server_that_the_trainer_hosts_keeps_history_beside_the_checkpoints(tmp_path: Path) -> None:
    hosted = read_block({"uri": "grpc://0.0.0.0:5000"}, beside=str(tmp_path))
    assert hosted.store == str(tmp_path / "weight_sync")
    assert read_block({"uri": "grpc://server:5000"}, beside=str(tmp_path)).store is None, "hosted elsewhere"
    assert read_block({"uri": "grpc://0.0.0.0:5000", "store": "/s"}, beside=str(tmp_path)).store == "/s"
    reader = dialled(hosted, "10.0.0.7")
    assert (reader.uri, reader.store) == ("grpc://10.0.0.7:5000", None)
    assert dialled(hosted, "fe80::1").uri == "grpc://[fe80::1]:5000"
    files = read_block({"uri": "file:///x"}, beside=str(tmp_path))
    assert dialled(files, "h") == files and files.store is None


# --- versions of hosts ---


@pytest.mark.parametrize(("found", "is_inside"), [
    ("0.9.1", True), ("0.9.1.post2", True), ("0.9.0", False), ("0.10.0.dev1", False), ("0.10", False), ("1.0", False),
    ("0.9.12", True),
])  # fmt: skip
def test_a_host_version_outside_the_proven_range_is_told(found: str, is_inside: bool) -> None:
    assert (outside(found, "0.9.1", "0.10") == "") == is_inside


def test_a_host_of_another_version_or_none_is_an_error_that_says_which() -> None:
    with pytest.raises(ConfigError, match=r"pytest.*older than 99"):
        check_version("pytest", "99", "100")
    with pytest.raises(ConfigError, match="not installed"):
        check_version("no-such-host", "1", "2")
    check_version("pytest", "1", "100")


# --- metrics ---


def ack(number: int, state: int = replica_pb2.REPLICA_STATE_SERVING, run: str = "r") -> replica_pb2.Acknowledgement:
    version = common_pb2.VersionId(run_id=run, number=number)
    return replica_pb2.Acknowledgement(replica_id=f"e{number}", version=version, state=state)  # type: ignore[arg-type]


def test_staleness_counts_every_replica_and_those_behind_relays() -> None:
    relay = ack(9)
    relay.followers.add(version=common_pb2.VersionId(run_id="r", number=10), count=3)
    relay.followers.add(version=common_pb2.VersionId(run_id="r", number=2), count=1)
    closed = ack(1, replica_pb2.REPLICA_STATE_CLOSED)
    found = fleet_metrics([ack(10), ack(8), closed, ack(10, run="another"), relay], "r", 10)
    assert found == {
        "weight_sync/replicas": 7.0, "weight_sync/acknowledged": 4.0,
        "weight_sync/staleness_p50": 0.0, "weight_sync/staleness_p95": 8.0,
    }  # fmt: skip
    assert fleet_metrics([], "r", 10) == {"weight_sync/replicas": 0.0, "weight_sync/acknowledged": 0.0}
    assert fleet_metrics([ack(0)], "r", 0)["weight_sync/acknowledged"] == 1, "version 0 is a version"


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile([5, 1, 3], share) for share in (0.01, 0.5, 0.95, 1.0)] == [1, 3, 5, 5]


# --- syncs ---


def test_a_host_is_a_trainer_adapter(host: Host) -> None:
    assert isinstance(host, TrainerAdapter)


@pytest.mark.parametrize("overlap", [False, True])
def test_every_sync_is_a_version_and_its_numbers_reach_the_host(keys: Config, overlap: bool) -> None:
    host = Host(keys.replace(overlap=overlap), model(0))
    engine = holding(model(0))
    with Replica.open(keys, engine, replica_id="e") as replica:
        for step in range(1, 5):
            host.tensors = model(step)
            metrics = host.sync(step)
            assert host.settle()
            assert replica.sync(min_version=host.version, timeout=30).version == host.version
            assert same_bits(engine, model(step))
            assert metrics["weight_sync/failed"] == 0 and metrics["weight_sync/tensors_gathered"] == 0
    metrics = host.sync(5)
    assert metrics["weight_sync/replicas"] == 0, "the replica has closed"
    assert metrics["weight_sync/version"] == (host.publisher.version if not overlap else 4)
    assert {f"weight_sync/seconds_{phase}" for phase in ("diff", "send", "commit", "promote")} <= metrics.keys()
    host.close()
    assert versions(keys) == [0, 1, 2, 3, 4, 5] and host.publisher.step == 5


def test_training_waits_for_as_many_replicas_as_asked(keys: Config) -> None:
    host = Host(keys.replace(wait_acks=1, timeout_s=0.3, overlap=True), model(0))
    assert host.sync(1)["weight_sync/acknowledged"] == 0, "nobody came, training goes on at the limit"
    with Replica.open(keys, holding(model(0)), replica_id="e") as replica:
        replica.sync(timeout=30)
        replica.sync(timeout=0)
        host.tensors = model(2)
        told = host.sync(2)
        assert told["weight_sync/replicas"] == 1 and told["weight_sync/acknowledged"] == 0
    host.close()


def broken(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreUnavailableError("the store is away")

    monkeypatch.setattr(host.publisher._end, "put_shard", fail)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_failed_sync_is_told_once_and_its_changes_are_part_of_the_next(
    keys: Config, overlap: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(keys.replace(overlap=overlap), model(0))
    host.tensors = model(1)
    host.sync(1)
    assert host.settle()
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR):
        broken(host, patch)
        host.tensors = model(2)
        first = host.sync(2)
        if overlap:
            assert first["weight_sync/failed"] == 0, "nobody knows yet"
            assert not host.settle()
        else:
            assert first["weight_sync/failed"] == 1
    assert "engines keep the version before" in caplog.text and "the store is away" in caplog.text
    engine = holding(model(0))
    with Replica.open(keys, engine, replica_id="e") as replica:
        replica.sync(timeout=30)
        assert same_bits(engine, model(1)), "no reader sees what failed"
        host.tensors = model(3)
        after = host.sync(3)
        assert host.settle() and after["weight_sync/failed"] == 0 and after["weight_sync/failures"] == 1
        replica.sync(min_version=host.version, timeout=30)
        assert same_bits(engine, model(3))
    host.close()


def test_a_name_that_the_checkpoint_lacks_stops_the_first_sync_and_lists_both_sides(host: Host) -> None:
    host.tensors["model.layers.0.base_layer.weight"] = torch.zeros(3, 3)
    del host.tensors["lm_head"]
    with pytest.raises(LayoutError, match=r"base_layer.*lm_head"):
        host.sync(1)


def test_a_source_that_cannot_be_made_is_an_error_of_all_ranks(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> HeldTensors:
        raise TensorError("adapter weights are not served weights", field="lora_A")

    monkeypatch.setattr(host, "source", fail)
    with pytest.raises(TensorError, match="lora_A"):
        host.sync(1)


def test_a_newer_trainer_ends_the_older_one(host: Host, keys: Config) -> None:
    host.tensors = model(1)
    host.sync(1)
    newer = Host(keys, model(1))
    newer.sync(2)
    host.tensors = model(2)
    with pytest.raises(EpochFencedError):
        host.sync(3)
    newer.close()


@pytest.mark.parametrize(("error", "attached", "stops"), [
    (StoreUnavailableError("x"), True, False), (StoreUnavailableError("x"), False, True), (TensorError("x"), True, False),
    (ForkRequiredError("x"), True, True), (LayoutError("x"), False, True),
])  # fmt: skip
def test_only_what_cannot_pass_stops_a_host(error: WeightSyncError, attached: bool, stops: bool) -> None:
    assert bool(must_stop(error, attached)) == stops


# --- resuming ---


def trained(keys: Config, first: int, last: int) -> None:
    host = Host(keys, model(first))
    for step in range(first, last + 1):
        host.tensors = model(step)
        host.sync(step)
    host.close()


def test_a_resume_from_the_head_goes_on_in_the_same_run_and_publishes_nothing_twice(keys: Config) -> None:
    trained(keys, 1, 3)
    host = Host(keys, model(3))
    metrics = host.sync(3)
    assert versions(keys) == [0, 1, 2, 3] and metrics["weight_sync/failed"] == 0
    head = host.version
    host.tensors = model(4)
    host.sync(4)
    assert head == 3 and host.publisher.step == 4 and len(versions(keys)) == 5
    host.close()


def test_a_resume_after_steps_that_changed_nothing_is_at_the_head(keys: Config) -> None:
    host = Host(keys, model(0))
    for step in range(1, 4):
        host.sync(step)
    host.close()
    before = versions(keys)
    again = Host(keys, model(0))
    again.sync(3)
    assert again.version == before[-1] and versions(keys) == before
    again.tensors = model(1)
    again.sync(4)
    again.close()
    assert same_bits(follow_fresh(keys)[0], model(1))


def test_a_resume_from_an_older_checkpoint_says_which_version_it_is_and_what_to_do(keys: Config) -> None:
    trained(keys, 1, 3)
    with pytest.raises(ForkRequiredError, match=r"step 2, which is version 2.*version 3.*fork=true"):
        Host(keys, model(2)).sync(2)
    with pytest.raises(ForkRequiredError, match="no version of this run"):
        Host(keys, model(9)).sync(1)


def test_a_fork_starts_a_run_of_its_own_in_a_used_store(keys: Config) -> None:
    trained(keys, 1, 3)
    host = Host(keys.replace(fork=True), model(2))
    assert host.sync(2)["weight_sync/failed"] == 0
    engine = holding(model(0))
    with Replica.open(keys, engine, replica_id="e") as replica:
        assert replica.sync(timeout=30).run_id == host.publisher.run_id
        assert same_bits(engine, model(2))
    host.close()
