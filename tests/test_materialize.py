"""Claims about one version as a plain checkpoint folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from mirror_cases import (
    assert_holds,
    changed,
    history_of,
    lifecycle,
    materialize_until_killed,
    publish,
    randoms,
    write_base,
)

from weight_sync.codec.digest import Digest
from weight_sync.errors import ConfigError, CorruptionError, DigestMismatchError, VersionMissingError
from weight_sync.mirror import Mirror, materialize


def test_any_version_materializes_as_a_plain_folder(tmp_path: Path) -> None:
    states = lifecycle()
    store = tmp_path / "store"
    numbers = publish(store, states, anchor_every=3)
    history = history_of(store)
    for k in (0, 3, 7):
        out = tmp_path / f"v{k}"
        if k:
            out.mkdir()
        seen: list[int] = []
        kept = materialize(history, numbers[k], out, lambda done, total, seen=seen: seen.append(total - done))
        assert out.is_dir() and not out.is_symlink()
        assert_holds(out, states[k])
        assert (kept.folder, kept.number) == (out, numbers[k])
        assert seen and seen == sorted(seen, reverse=True) and seen[-1] >= 0
    assert not [item for item in tmp_path.iterdir() if item.name.startswith(".")]
    with pytest.raises(ConfigError, match="not empty"):
        materialize(history, numbers[0], tmp_path / "v0")
    with pytest.raises(VersionMissingError):
        materialize(history, 10_000, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_base_by_reference_materializes_with_its_configuration(tmp_path: Path) -> None:
    base = tmp_path / "base"
    state = write_base(base, [{"a": randoms((4,), torch.float32, 1)}, {"b": randoms((4,), torch.bfloat16, 2)}])
    publish(tmp_path / "store", [changed(state, 1)], base)
    materialize(history_of(tmp_path / "store"), 0, tmp_path / "zero")
    assert_holds(tmp_path / "zero", state)
    assert (tmp_path / "zero" / "config.json").read_bytes() == (base / "config.json").read_bytes()


def test_a_process_killed_on_the_way_leaves_no_folder(tmp_path: Path) -> None:
    state = {"w": randoms((64,), torch.bfloat16, 1)}
    (number,) = publish(tmp_path / "store", [state])
    materialize_until_killed(tmp_path / "store", number, tmp_path / "out", "mirror:written")
    assert not (tmp_path / "out").exists()
    materialize(history_of(tmp_path / "store"), number, tmp_path / "out")
    assert_holds(tmp_path / "out", state)
    assert {item.name for item in tmp_path.iterdir()} == {"out", "store"}


def test_bad_data_never_becomes_a_folder(tmp_path: Path) -> None:
    publish(tmp_path / "store", [{"w": randoms((64,), torch.bfloat16, 1)}])
    (shard,) = (tmp_path / "store").rglob("*anchor*.safetensors")
    history = history_of(tmp_path / "store")
    update = history.update(None, 0)
    with shard.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)[0]
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    with pytest.raises(CorruptionError, match="the store itself is bad"):
        materialize(history, 0, tmp_path / "out")
    with pytest.raises(CorruptionError), Mirror(tmp_path / "out") as mirror:
        mirror.next(update)
    assert not (tmp_path / "out").exists()
    history.update = lambda have, target: update  # type: ignore[method-assign]
    update.dense = lambda: iter(())
    with pytest.raises(CorruptionError, match="do not make up"):
        materialize(history, 0, tmp_path / "out")


def test_wrong_bits_never_become_a_folder(tmp_path: Path) -> None:
    publish(tmp_path / "store", [{"w": randoms((64,), torch.bfloat16, 1)}])
    history = history_of(tmp_path / "store")
    update = history.update(None, 0)
    update.digest = Digest(1, 2)
    history.update = lambda have, target: update  # type: ignore[method-assign]
    with pytest.raises(DigestMismatchError):
        materialize(history, 0, tmp_path / "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "store"]
