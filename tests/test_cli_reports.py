"""Claims about what the command line tells: differences, contents of stores and shards, faults and where they are."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import ODD, ask, entry, flip, fresh_store, lease, make_checkpoints, objects, run
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.apply import apply_changes
from weight_sync.codec.frame import FRAME_CHANGES, decode_frame, encode_changes
from weight_sync.codec.shard import parse_head
from weight_sync.compare import compare_run, count_nan, step_bins
from weight_sync.dtypes import DTYPES
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.tensors import TensorSpec


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def store(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the four as versions 0 to 3; nobody may write to it."""
    uri = tmp_path_factory.mktemp("store") / "run"
    rows = ask("publish", *checkpoints, "--to", uri, "--step", "10")
    assert [(row["number"], row["kind"], row["step"]) for row in rows] == [
        (0, "ANCHOR", None), (1, "PATCH", 11), (2, "PATCH", 12), (3, "PATCH", 13)]  # fmt: skip
    return uri


# --- comparing -----------------------------------------------------------------------------------------------------


def ordered(codes: np.ndarray, width: int) -> list[int]:
    """The ordered integer line, with Python's own integers: -0.0 is -1."""
    top = 1 << (8 * width - 1)
    return [-(int(code) - top) - 1 if int(code) >= top else int(code) for code in codes]


def test_diff_counts_what_a_plain_loop_counts(checkpoints: list[Path]) -> None:
    a, b = Checkpoint(checkpoints[0]), Checkpoint(checkpoints[3])
    document = ask("diff", checkpoints[0], checkpoints[3])
    rows = {row["name"]: row for row in document["tensors"]}
    changed = 0
    for name in [name for name in rows if name.startswith("model")] + [ODD]:
        width = a.spec(name).type.width
        old, new = ordered(a.bits(name), width), ordered(b.bits(name), width)
        steps = [abs(y - x) for x, y in zip(old, new, strict=True) if x != y]
        flips = [{x, y} == {0, -1} for x, y in zip(old, new, strict=True) if (x < 0) != (y < 0)]
        row = rows[name]
        assert (row["changed"], row["elements"]) == (len(steps), len(old))
        assert (row["zero_swaps"], row["sign_flips"]) == (flips.count(True), flips.count(False))
        assert row["largest_step"] == max(steps, default=0)
        assert sum(bin_["count"] for bin_ in row["steps"]) == len(steps)
        for bin_ in row["steps"]:
            assert bin_["count"] == sum(bin_["from"] <= step <= bin_["to"] for step in steps)
        changed += len(steps)
    first = a.bits("model.layers.0.mlp.weight"), b.bits("model.layers.0.mlp.weight")
    nans = [int(np.isnan((x.astype(np.uint32) << 16).view(np.float32)).sum()) for x in first]
    row = rows["model.layers.0.mlp.weight"]
    assert [row["nan_a"], row["nan_b"]] == nans and nans[1] == 3 and row["sign_flips"] >= 3 and row["zero_swaps"] == 0
    assert document["respecified"] == ["ids"] and document["changed"] == changed + 9
    assert ask("diff", checkpoints[1], checkpoints[2])["zero_swaps"] == 1
    kinds = {row["kind"]: row["tensors"] for row in document["kinds"]}
    assert kinds["model.layers.*.mlp.weight"] == 3 and not document["equal"]


@given(st.sampled_from(sorted(DTYPES)), st.data())
@settings(max_examples=60, deadline=None)
def test_steps_signs_and_zeros_of_any_bits(name: str, data: st.DataObject) -> None:
    dtype = DTYPES[name]
    top = 1 << (8 * dtype.width - 1)
    edges = st.sampled_from([0, 1, top - 1, top, top + 1, 2 * top - 1])
    pairs = data.draw(st.lists(st.tuples(edges, edges | st.integers(0, 2 * top - 1), st.booleans()), min_size=1))
    old = np.array([a for a, _, _ in pairs], dtype.uint)
    new = np.array([b if change else a for a, b, change in pairs], dtype.uint)
    counts = compare_run(old, new, dtype)
    places = [
        ordered(codes, dtype.width) if dtype.signed_magnitude
        else [int(x) for x in (codes.view(f"i{dtype.width}") if name[0] == "I" else codes)]
        for codes in (old, new)
    ]  # fmt: skip
    steps = [abs(y - x) for x, y in zip(*places, strict=True) if x != y]
    assert (counts.changed, counts.largest_step) == (len(steps), max(steps, default=0))
    for (low, high), count in zip(step_bins(), counts.steps, strict=True):
        assert count == sum(low <= step <= high for step in steps)
    swaps = sum({x, y} == {0, -1} for x, y in zip(*places, strict=True))
    assert counts.zero_swaps == (swaps if dtype.signed_magnitude and "FNUZ" not in name else 0)


def test_nan_is_counted_as_torch_counts_it() -> None:
    for name in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        dtype = DTYPES[name]
        some = np.random.default_rng(1).integers(0, 256, 1 << 16, np.uint8)
        some[:64] = 0xFF  # NaN in most of them
        tensor = torch.from_numpy(some).view(dtype.torch)
        expected = int((tensor if dtype.width == 8 else tensor.float()).isnan().sum())
        assert count_nan(some.view(dtype.uint), dtype) == expected > 0, name


def test_a_fold_of_more_changes_than_a_frame_takes_is_cut() -> None:
    spec = TensorSpec("t", "BF16", (3 * FRAME_CHANGES,))
    positions = np.arange(0, spec.elements, 2, dtype=np.uint32)
    whole = Changes(spec, Box.run(0, spec.elements), positions, np.ones(len(positions), np.uint16))
    frames = list(encode_changes([whole]))
    found = [item.coords.indices(item.positions) for frame in frames for item in frame.changes()]
    assert len(frames) == 2 and np.array_equal(np.concatenate(found), positions)


def test_diff_takes_versions_of_a_store_and_tells_added_and_removed(store: Path, checkpoints: list[Path]) -> None:
    assert ask("diff", f"{store}@2", checkpoints[2])["equal"]
    assert ask("diff", f"file://{store}@head", f"{store}@3")["equal"]
    assert ask("diff", f"{store}@0", f"{store}@1")["added"] == ["added"]
    text = run("diff", f"{store}@2", f"{store}@3").stdout
    assert "removed" in text and "\x1b" not in text and "model.layers.*.mlp.weight" in text


def test_diff_draws_a_plot_or_says_what_is_missing(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("diff", *checkpoints[:2], "--plot", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    run("diff", *checkpoints[:2], "--plot", tmp_path / "out.jpeg", code=2)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "weight-sync[plot]" in run("diff", *checkpoints[:2], "--plot", tmp_path / "b.png", code=2).stderr


def test_a_fold_leads_from_its_parent_to_its_version(store: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    document = ask("fold", store, "0", "3", "--out", tmp_path / "fold.safetensors")
    difference = ask("diff", checkpoints[0], checkpoints[3])
    assert document["whole_tensors"] == ["ids"] and document["changed"] + 9 == difference["changed"]
    assert document["patches_bytes"] == sum(row["bytes"] for row in ask("log", store)["versions"])
    data = memoryview((tmp_path / "fold.safetensors").read_bytes())
    head = parse_head(data, len(data))
    before, after = Checkpoint(checkpoints[0]), Checkpoint(checkpoints[3])
    state = {spec.name: before.bits(spec.name).copy() for spec in before.table}
    for frame, (at, length) in zip(head.index.frames, head.frame_spans, strict=True):
        for item in decode_frame(head.index.form, frame, data[at : at + length], head.specs):
            apply_changes(item, state[item.spec.name], item.coords)
    wrong = [name for name in state if name != "ids" and state[name].tobytes() != after.bits(name).tobytes()]
    assert not wrong


# --- looking -------------------------------------------------------------------------------------------------------


def test_inspect_tells_stores_shards_and_checkpoints_apart(store: Path, checkpoints: list[Path]) -> None:
    document = ask("inspect", store)
    assert (document["head"], document["step"], document["retained"]["anchors"]) == (3, 13, [0])
    assert document["views"][0]["digest"] == Checkpoint(checkpoints[3]).digest().hex()
    shard = ask("inspect", objects(store, 1)[0])
    assert shard["ok"] and shard["form"] == "STEP" and shard["number"] == 1
    assert sum(frame["changes"] for frame in shard["frames"]) == shard["changes"] > 0
    assert [piece["tensor"] for piece in shard["pieces"]] == ["added"]
    plain = ask("inspect", checkpoints[0], "--digest")
    assert plain["digest"] == Checkpoint(checkpoints[0]).digest().hex() and len(plain["tensors"]) == 7
    for target in (store, objects(store, 1)[0], checkpoints[0]):
        assert "\x1b" not in run("inspect", target).stdout


def test_inspect_sees_a_flipped_byte(store: Path, tmp_path: Path) -> None:
    copy = tmp_path / "shard.safetensors"
    copy.write_bytes(objects(store, 1)[0].read_bytes())
    flip(copy, -1)
    assert not ask("inspect", copy, code=3)["ok"]
    copy.write_bytes(copy.read_bytes()[:40])
    assert ask("inspect", copy, code=3)["error"]["kind"] == "FormatError"


def test_inspect_shows_replicas_and_leases(checkpoints: list[Path], tmp_path: Path) -> None:
    uri = fresh_store(checkpoints[:2], tmp_path)
    run("follow", uri, "--out", tmp_path / "current", "--once", "--set", "replica_id=mine")
    lease(uri, "other", 0)
    document = ask("inspect", uri)
    (row,) = document["replicas"]
    assert (row["replica_id"], row["version"], row["state"]) == ("mine", 1, "CLOSED")
    assert document["leases"] == {"other": 0}


def test_gc_expires_what_nobody_needs_and_says_so_before(checkpoints: list[Path], tmp_path: Path) -> None:
    uri = fresh_store(checkpoints, tmp_path, "--set", "anchor_every=2")
    anchors = [row["number"] for row in ask("log", uri)["versions"] if row["kind"] == "ANCHOR"]
    assert anchors == [0, 2]
    lease(uri, "slow", 1)
    assert ask("gc", uri, "--keep", "1", "--dry-run")["expire"] == []
    next(uri.glob("*/leases/slow.pb")).unlink()
    plan = ask("gc", uri, "--keep", "1", "--dry-run")
    assert plan["expire"] == [0, 1] and plan["keep"]["2"] == "needed by version 3"
    counts = ask("gc", uri, "--keep", "1")
    assert (counts["expired"], counts["kept"], counts["bytes"]) == (2, 2, plan["bytes"])
    assert [row["number"] for row in ask("log", uri)["versions"]] == [2, 3]
    assert {row["kind"] for row in ask("log", uri, "--all")["entries"]} == {"EXPIRED"}
    assert ask("verify", uri, "--deep")["replayed"] == {"default": [2, 3]}
    error = ask("materialize", uri, "--version", "1", "--out", tmp_path / "out", code=4)["error"]
    assert error["kind"] == "VersionExpiredError"


# --- verifying -----------------------------------------------------------------------------------------------------


def test_verify_rebuilds_every_state_in_all_forms(checkpoints: list[Path], tmp_path: Path) -> None:
    words = ("--set", "anchor_every=2", "--set", "forms=[step, compact]")
    uri = fresh_store([*checkpoints, checkpoints[0]], tmp_path, *words)
    document = ask("verify", uri, "--deep")
    assert document["ok"] and document["replayed"] == {"default": [0, 1, 2, 3, 4]} and not document["notes"]
    assert document["objects"] == len(list(uri.glob("*/data/*/*")))
    assert ask("verify", uri)["ok"]


def test_verify_notes_what_it_could_not_rebuild(store: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    elsewhere = tmp_path / "moved"
    uri = tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_bytes((checkpoints[0] / "model.safetensors").read_bytes())
    run("publish", elsewhere, checkpoints[1], "--to", uri)
    elsewhere.rename(tmp_path / "gone")
    document = ask("verify", uri, "--deep")
    assert document["ok"] and document["replayed"] == {} and "not replayed: 0, 1" in document["notes"][-1]
    assert ask("verify", uri, "--deep", "--base", tmp_path / "gone")["replayed"] == {"default": [0, 1]}
    assert ask("verify", uri, "--deep", "--base", checkpoints[2], code=3)["faults"][0]["version"] == 0


def test_verify_names_object_and_version_of_a_flipped_byte(checkpoints: list[Path], tmp_path: Path) -> None:
    uri = fresh_store(checkpoints, tmp_path)
    broken = objects(uri, 2)[0]
    flip(broken, -1)
    assert ask("verify", uri)["ok"]  # the byte lies behind the head
    document = ask("verify", uri, "--deep", code=3)
    assert {(fault["version"], Path(fault["object"]).name) for fault in document["faults"]} == {(2, broken.name)}
    assert document["replayed"] == {"default": [0, 1]}
    text = run("verify", uri, "--deep", code=3).stdout
    assert "version 2" in text and broken.name in text
    flip(broken, 200)  # in the head now, too
    assert ask("verify", uri, code=3)["faults"][0]["version"] == 2


@pytest.mark.parametrize("damage", ["cut", "longer", "gone"])
def test_verify_sees_wrong_sizes_without_reading_all(damage: str, checkpoints: list[Path], tmp_path: Path) -> None:
    uri = fresh_store(checkpoints[:2], tmp_path)
    path = objects(uri, 1)[0]
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if damage == "cut" else data + b"x")
    fault = ask("verify", uri, code=3)["faults"][0]
    assert fault["version"] == 1 and Path(fault["object"]).name == path.name


def test_verify_sees_a_hole_in_the_log_and_a_manifest_that_lies(checkpoints: list[Path], tmp_path: Path) -> None:
    uri = fresh_store(checkpoints, tmp_path)
    path = entry(uri, 2)
    good = path.read_bytes()
    manifest = manifest_pb2.VersionManifest.FromString(good)
    manifest.views[0].changed += 1
    path.write_bytes(manifest.SerializeToString())
    assert "changes of the tensors" in ask("verify", uri, code=3)["faults"][0]["what"]
    manifest = manifest_pb2.VersionManifest.FromString(good)  # consistent in itself, and wrong
    manifest.views[0].tensors[0].digest.lane0 ^= 1 << 63
    manifest.views[0].digest.lane0 ^= 1 << 63
    path.write_bytes(manifest.SerializeToString())
    assert ask("verify", uri)["ok"]
    fault = ask("verify", uri, "--deep", code=3)["faults"][0]
    assert (fault["version"], fault["kind"]) == (2, "DigestMismatchError")
    path.unlink()
    assert "hole" in ask("verify", uri, code=3)["faults"][0]["what"]


def test_verify_checks_what_lies_before_a_damaged_newest_entry(checkpoints: list[Path], tmp_path: Path) -> None:
    uri = fresh_store(checkpoints, tmp_path)
    newest = entry(uri, 2)
    newest.write_bytes(newest.read_bytes()[:-20])
    document = ask("verify", uri, "--deep", code=3)
    assert [fault["version"] for fault in document["faults"]] == [2]
    assert document["versions"] == 2 and document["replayed"] == {"default": [0, 1]}
    assert document["notes"] == ["entries from 2 on were not checked"]
