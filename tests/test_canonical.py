"""Claims about the compact form on its way: a reader that holds every old bit takes it, and serves the same bits for less."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
from grpc_cases import client_of, served
from loop import config, digest_of, holding, model, same_bits

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.checkpoint import CheckpointEngine
from weight_sync.adapters.engines.inplace import InPlaceStore
from weight_sync.canonical import compact_way
from weight_sync.checkpoint import Checkpoint
from weight_sync.config import Config
from weight_sync.history import History
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec
from weight_sync.transport.file import FileTransport
from weight_sync.transport.grpc import GrpcTransport
from weight_sync.version import Path as Path_


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def keys(tmp_path: Path) -> Config:
    return config(tmp_path, forms=["step", "compact"], anchor_every=0, anchor_share=0, keep_versions=20)


def forms_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Forms of the frames that are decoded from now on."""
    from weight_sync import history

    seen: list[int] = []
    real = history.decode_frame

    def noting(form: Any, *given: Any) -> Any:
        seen.append(form)
        return real(form, *given)

    monkeypatch.setattr(history, "decode_frame", noting)
    return seen


def test_a_replica_that_can_tell_its_bits_takes_the_compact_form(keys: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    held = holding(model(0))
    with Publisher.open(keys) as publisher, Replica.open(keys, held) as replica:
        publisher.publish(model(0), step=0)
        replica.sync()
        seen = forms_read(monkeypatch)
        for step in (1, 2):
            publisher.publish(model(step), step=step)
            assert replica.sync().digest == digest_of(model(step)) and same_bits(held, model(step))
        assert set(seen) == {common_pb2.FORM_COMPACT}
        publisher.publish(model(3), step=3)
        publisher.publish(model(4), step=4)
        seen.clear()
        assert replica.sync().digest == digest_of(model(4)), "two versions at once are folded, which takes steps"
        assert set(seen) == {common_pb2.FORM_STEP}


def test_who_is_told_to_takes_the_step_form(keys: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with Publisher.open(keys) as publisher, Replica.open(keys.replace(take="step"), holding(model(0))) as replica:
        publisher.publish(model(0), step=0)
        replica.sync()
        seen = forms_read(monkeypatch)
        publisher.publish(model(1), step=1)
        assert replica.sync().version == 1 and set(seen) == {common_pb2.FORM_STEP}


def test_a_folder_that_is_kept_current_takes_the_compact_form(
    keys: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = CheckpointEngine(tmp_path / "out")
    with Publisher.open(keys) as publisher, Replica.open(keys, engine) as replica:
        publisher.publish(model(0), step=0)
        replica.sync()
        seen = forms_read(monkeypatch)
        publisher.publish(model(1), step=1)
        report = replica.sync()
        assert set(seen) == {common_pb2.FORM_COMPACT}
        assert Checkpoint(tmp_path / "out").digest().hex() == report.digest == digest_of(model(1))


def test_a_version_with_a_new_tensor_is_taken_in_the_step_form(keys: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {**model(1), "new": torch.ones(5, dtype=torch.bfloat16)}
    held = holding(model(0))
    with Publisher.open(keys) as publisher, Replica.open(keys, held) as replica:
        publisher.publish(model(0), step=0)
        replica.sync()
        seen = forms_read(monkeypatch)
        publisher.publish(more, step=1)
        assert replica.sync().digest == digest_of(more) and same_bits(held, more)
        assert common_pb2.FORM_COMPACT not in seen


def test_a_compact_shard_that_is_damaged_is_replaced_by_the_step_form(keys: Config) -> None:
    held = holding(model(0))
    with Publisher.open(keys) as publisher, Replica.open(keys, held) as replica:
        publisher.publish(model(0), step=0)
        replica.sync()
        publisher.publish(model(1), step=1)
        end = FileTransport(keys).replica_end()
        ref = next(r for r in end.manifest(1).views[0].shards if r.form == common_pb2.FORM_COMPACT)
        path = end.local(ref)
        assert path is not None
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        assert replica.sync().digest == digest_of(model(1)) and same_bits(held, model(1))


def test_a_full_state_that_is_cheaper_than_the_patch_is_taken_alone(
    keys: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [
        {"w": torch.randn(1 << 16, generator=torch.Generator().manual_seed(k)).to(torch.bfloat16)} for k in (0, 1)
    ]
    held = holding(states[0])
    with Publisher.open(keys.replace(anchor_every=1)) as publisher, Replica.open(keys, held) as replica:
        publisher.publish(states[0], step=0)
        replica.sync()
        seen = forms_read(monkeypatch)
        monkeypatch.setattr(History, "plan", lambda self, have, target: Path_(target, (), 0, "a full state"))
        publisher.publish(states[1], step=1)
        assert replica.sync().digest == digest_of(states[1]) and same_bits(held, states[1])
        assert not seen, "every bit came with the full state"


def test_over_grpc_the_compact_shard_is_one_object(
    keys: Config, tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    _server, client = served(tmp_path / "run", stack)
    held = holding(model(0))
    with Publisher.open(keys.replace(uri=str(tmp_path / "run"))) as publisher:
        publisher.publish(model(0), step=0)
        with Replica.open(client, held) as replica:
            replica.sync()
            seen = forms_read(monkeypatch)
            for step in (1, 2, 3):
                publisher.publish(model(step), step=step)
                report = replica.sync(min_version=step, timeout=20)
                assert report.path == f"one object from version {step - 1}" and same_bits(held, model(step))
            assert set(seen) == {common_pb2.FORM_COMPACT}
        with closing(GrpcTransport(client_of(client.uri)).replica_end()) as end:
            stored = [ref for ref in end.manifest(3).views[0].shards if ref.form == common_pb2.FORM_COMPACT]
            found = end.fold("default", 2, 3, True)
            assert found is not None and found.stored == stored[0]


def _ref(form: int, rank: int = 0) -> manifest_pb2.ShardRef:
    return manifest_pb2.ShardRef(form=form, rank=rank)  # type: ignore[arg-type]


def test_the_compact_form_is_taken_from_the_parent_only_and_from_all_ranks() -> None:
    step, compact = common_pb2.FORM_STEP, common_pb2.FORM_COMPACT
    table = (TensorSpec("a", "BF16", (4,)),)
    manifest = manifest_pb2.VersionManifest(number=5, parent=0)
    both = manifest_pb2.ViewManifest(shards=[_ref(step), _ref(compact), _ref(step, 1), _ref(compact, 1)])
    assert compact_way(manifest, both, 0, table, table) == [_ref(compact), _ref(compact, 1)]
    assert compact_way(manifest, both, 4, table, table) == [] == compact_way(manifest, both, None, table, table)
    assert compact_way(manifest, both, 0, None, table) == [] == compact_way(manifest, both, 0, (), table)
    one = manifest_pb2.ViewManifest(shards=[_ref(step), _ref(compact), _ref(step, 1)])
    assert compact_way(manifest, one, 0, table, table) == []


def test_bits_are_read_back_through_a_layout() -> None:
    spec = TensorSpec("a", "BF16", (4, 3))
    halves = [Placement("a", Box(3 * k, (2, 3), (6, 1)), "s", Box(6 * k, (2, 3), (3, 1))) for k in (0, 1)]
    layout = Layout((spec,), tuple(halves), {"s": StorageSpec(12, "BF16")})
    flat = torch.arange(12, dtype=torch.float32).to(torch.bfloat16)
    found = InPlaceStore(layout, lambda: {"s": flat}).bits()(spec)
    rows = flat.view(2, 2, 3).transpose(0, 1).reshape(-1)  # even rows lie first
    assert found.tolist() == rows.view(torch.int16).tolist()
