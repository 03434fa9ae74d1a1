"""Claims about the command line: versions go in and come out bit for bit, numbers are right, faults are named.

Real checkpoints, real stores in folders; a process of its own where signals, imports or a terminal matter.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from weight_sync import errors
from weight_sync.checkpoint import Checkpoint, write_safetensors
from weight_sync.cli import app
from weight_sync.cli.failure import CODES, exit_code
from weight_sync.cli.publish import mapped_tensors
from weight_sync.codec.apply import apply_changes
from weight_sync.codec.frame import decode_frame
from weight_sync.codec.shard import parse_head
from weight_sync.dtypes import DTYPES
from weight_sync.proto.v1 import manifest_pb2, replica_pb2
from weight_sync.tensors import TensorSpec

COMMANDS = ("publish", "follow", "materialize", "inspect", "log", "diff", "verify", "fold", "gc", "config")
ODD = "../../../etc/[red] nämé\n\x1b[2J"
PROGRAM = [sys.executable, "-c", "from weight_sync.cli import main; main()"]


def run(*words: str | Path, code: int = 0) -> Any:
    """Runs a command in this process and checks its exit code; (stdout, stderr)."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (words, result.stdout, result.stderr, result.exception)
    return result


def ask(*words: str | Path, code: int = 0) -> Any:
    """The JSON of a command; a list when it prints one document per line."""
    lines = run(*words, "--json", code=code).stdout.splitlines()
    documents = [json.loads(line) for line in lines]
    return documents if words[0] == "publish" else documents[0]


def bits(path: Path) -> dict[TensorSpec, bytes]:
    """All tensors of a checkpoint, bit for bit."""
    checkpoint = Checkpoint(path)
    return {spec: checkpoint.bits(spec.name).tobytes() for spec in checkpoint.table}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four folders: changes, zeros that change sign, NaN, a sign flip; tensors that appear, go and change dtype."""
    root = tmp_path_factory.mktemp("checkpoints")
    generator = torch.Generator().manual_seed(7)
    tensors = {f"model.layers.{i}.mlp.weight": torch.randn(40, 64, generator=generator).bfloat16() for i in range(3)}
    tensors |= {ODD: torch.randn(5, generator=generator), "scalar": torch.tensor(1.5, dtype=torch.float16)}
    tensors |= {"empty": torch.zeros(0, 4), "ids": torch.arange(9)}
    folders = []
    for k in range(4):
        folder = root / f"ckpt-{k}"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"k": k}))
        folders.append(folder)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in [name for name in tensors if name.startswith("model")]:
            chosen = torch.rand(tensors[name].shape, generator=generator) < 0.02
            tensors[name][chosen] *= 1.02
        first = tensors["model.layers.0.mlp.weight"].reshape(-1)
        first[k], first[10 + k], first[20 + k] = (0.0, float("nan"), -first[20 + k])
        first[k - 1] = -0.0
        if k == 0:
            tensors["added"] = torch.ones(3, dtype=torch.float8_e4m3fn)
        if k == 1:
            tensors["ids"] = tensors["ids"].int()
        if k == 2:
            del tensors["added"]
    return folders


@pytest.fixture(scope="module")
def store(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the four as versions 0 to 3; nobody may write to it."""
    uri = tmp_path_factory.mktemp("store") / "run"
    rows = ask("publish", *checkpoints, "--to", uri, "--step", "10")
    assert [(row["number"], row["kind"], row["step"]) for row in rows] == [
        (0, "ANCHOR", None), (1, "PATCH", 11), (2, "PATCH", 12), (3, "PATCH", 13)]  # fmt: skip
    return uri


def fresh_store(checkpoints: Sequence[Path], tmp_path: Path, *words: str) -> Path:
    """A store of its own."""
    uri = tmp_path / "run"
    run("publish", *checkpoints, "--to", uri, "--set", "ship_base=always", *words)
    return uri


def objects(store: Path, number: int) -> list[Path]:
    """The stored objects of a version."""
    return sorted(store.glob(f"*/data/{number:020d}/*.safetensors"))


def entry(store: Path, number: int) -> Path:
    """The log's entry."""
    return next(store.glob(f"*/log/{number:020d}.pb"))


def flip(path: Path, at: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


# --- in and out ----------------------------------------------------------------------------------------------------


def test_log_prints_the_promised_shape_with_true_numbers(store: Path, checkpoints: list[Path]) -> None:
    document = ask("log", store)
    assert set(document) == {"run_id", "versions"}
    keys = {"number", "epoch", "kind", "parent", "bytes", "density", "views"}
    assert all(keys <= set(row) for row in document["versions"])
    assert [row["parent"] for row in document["versions"]] == [None, 0, 1, 2]
    for row, folder in zip(document["versions"], checkpoints, strict=True):
        assert row["views"] == {"default": Checkpoint(folder).digest().hex()}
        assert row["bytes"] == sum(path.stat().st_size for path in objects(store, row["number"]))
    assert document["versions"][1]["density"] == ask("diff", *checkpoints[:2])["density"] > 0
    assert "3" in run("log", store).stdout and "entries" not in document


@pytest.mark.parametrize("number", range(4))
def test_every_version_materializes_bit_for_bit(
    number: int, store: Path, checkpoints: list[Path], tmp_path: Path
) -> None:
    document = ask("materialize", store, "--version", str(number), "--out", tmp_path / "out")
    assert bits(tmp_path / "out") == bits(checkpoints[number])
    assert document["digest"] == Checkpoint(checkpoints[number]).digest().hex() and document["number"] == number
    assert (tmp_path / "out" / "config.json").exists()


def test_follow_once_leaves_the_newest_checkpoint(store: Path, checkpoints: list[Path], tmp_path: Path) -> None:
    for changed, previous in ((True, None), (True, None)):  # the second time it recognises what is there
        document = ask("follow", store, "--out", tmp_path / "current", "--once")
        assert (document["version"], document["changed"], document["previous"]) == (3, changed, previous)
        assert bits(tmp_path / "current") == bits(checkpoints[3])
    assert "seconds" in document and "pause" not in document["seconds"]


def test_publishing_again_goes_on_in_the_same_run(checkpoints: list[Path], tmp_path: Path) -> None:
    uri = fresh_store(checkpoints[:2], tmp_path)
    first = ask("log", uri)
    rows = ask("publish", checkpoints[2], "--to", uri)
    assert rows[0]["run_id"] == first["run_id"] and rows[0]["number"] == 3  # entry 2 is the new epoch
    document = ask("log", uri, "--all")
    assert [row["number"] for row in document["versions"]] == [0, 1, 3]
    assert [(row["number"], row["kind"]) for row in document["entries"]] == [(2, "EPOCH")]
    rows = ask("publish", checkpoints[3], checkpoints[2], "--to", uri, "--set", "fork=true")
    assert [row["number"] for row in rows] == [0, 1] and rows[0]["run_id"] != first["run_id"]
    assert ask("log", uri)["run_id"] == rows[0]["run_id"]
    assert ask("log", uri, "--run", first["run_id"])["versions"][-1]["number"] == 3


def test_a_base_of_ones_own_makes_all_folders_patches(checkpoints: list[Path], tmp_path: Path) -> None:
    rows = ask("publish", checkpoints[1], "--base", checkpoints[0], "--to", tmp_path / "run")
    assert [row["number"] for row in rows] == [1]
    run("publish", checkpoints[2], "--base", checkpoints[3], "--to", tmp_path / "run", code=5)


def test_a_broken_publish_keeps_what_it_did_and_names_the_rest(checkpoints: list[Path], tmp_path: Path) -> None:
    words = ["--to", tmp_path / "run", *(f"--step={step}" for step in (0, 5, 4))]
    result = run("publish", *checkpoints[:3], *words, code=5)
    assert f"still to be published: {checkpoints[2]}" in result.stderr
    assert [row["step"] for row in ask("log", tmp_path / "run")["versions"]] == [None, 5]


def test_every_dtype_that_torch_has_is_carried(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    names = [name for name, dtype in DTYPES.items() if dtype.torch_name and hasattr(torch, dtype.torch_name)]
    folders = [tmp_path / "a", tmp_path / "b"]
    specs = [TensorSpec(f"t.{name}", name, (4, 8)) for name in names]
    for folder in folders:
        folder.mkdir()
        random = [(spec, np.frombuffer(rng.bytes(spec.nbytes), spec.type.uint)) for spec in specs]
        write_safetensors(folder / "model.safetensors", random)
    run("publish", *folders, "--to", tmp_path / "run")
    run("materialize", tmp_path / "run", "--out", tmp_path / "out")
    assert bits(tmp_path / "out") == bits(folders[1])
    checkpoint = Checkpoint(folders[0])
    assert all(
        np.shares_memory(checkpoint.bits(name), tensor.view(torch.uint8).numpy())  # mapped, not copied
        for name, tensor in mapped_tensors(checkpoint).items()
        if tensor.dtype not in (torch.bool, torch.float4_e2m1fn_x2, torch.complex64)
    )


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
    kinds = {row["kind"]: row["tensors"] for row in document["kinds"]}
    assert kinds["model.layers.*.mlp.weight"] == 3 and not document["equal"]


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
    assert [(row["replica_id"], row["version"], row["state"]) for row in document["replicas"]] == [("mine", 1, "CLOSED")]
    assert document["leases"] == {"other": 0}


def lease(uri: Path, replica: str, number: int) -> None:
    """Writes a lease as a replica does."""
    run_id = ask("log", uri)["run_id"]
    message = replica_pb2.Lease(replica_id=replica, ttl_s=600)
    message.version.run_id, message.version.number = run_id, number
    (uri / run_id / "leases").mkdir(exist_ok=True)
    (uri / run_id / "leases" / f"{replica}.pb").write_bytes(message.SerializeToString())


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
    uri = fresh_store([*checkpoints, checkpoints[0]], tmp_path, "--set", "anchor_every=2", "--set", "forms=[step, compact]")
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


# --- failures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "kind", "says"),
    [
        ("log ftp://host/run", 2, "ConfigError", "file://"),
        ("log STORE --set backnd=grpc", 2, "ConfigError", "backend"),
        ("log STORE --set threads=many", 2, "ConfigError", "threads"),
        ("log STORE --set threads", 2, "ConfigError", "KEY=VALUE"),
        ("log STORE --run ../x", 2, "ConfigError", "run_id"),
        ("log STORE --run other", 4, "VersionMissingError", "other"),
        ("log STORE --view nope", 4, "VersionMissingError", "default"),
        ("log STORE --option", 2, "InputError", "--option"),
        ("log", 2, "InputError", "URI"),
        ("nonsense", 2, "InputError", "nonsense"),
        ("log EMPTY", 4, "VersionMissingError", "start the publisher"),
        ("verify EMPTY", 4, "VersionMissingError", "start the publisher"),
        ("gc EMPTY", 4, "VersionMissingError", "start the publisher"),
        ("follow EMPTY --out OUT --once --timeout 0", 4, "VersionNotReadyError", "no run"),
        ("materialize STORE --version 9 --out OUT", 4, "VersionMissingError", "9"),
        ("materialize STORE --version nine --out OUT", 2, "InputError", "nine"),
        ("materialize STORE --out STORE", 2, "ConfigError", "not empty"),
        ("diff STORE STORE", 2, "TensorError", "safetensors"),
        ("diff file://STORE STORE@0", 2, "ConfigError", "@N"),
        ("fold STORE 3 1", 2, "InputError", "A below B"),
        ("fold STORE 1 9", 4, "VersionMissingError", "9"),
        ("inspect OUT.safetensors", 2, "InputError", "no such file"),
        ("publish OUT --to EMPTY", 2, "TensorError", "safetensors"),
        ("config --config OUT", 2, "ConfigError", "OUT"),
        ("bench nonsense", 2, "InputError", "nonsense"),
    ],
)
def test_an_error_is_one_line_an_exit_code_and_json(
    words: str, code: int, kind: str, says: str, store: Path, tmp_path: Path
) -> None:
    places = {"STORE": str(store), "EMPTY": str(tmp_path / "empty"), "OUT": str(tmp_path / "out")}
    filled = [re.sub("STORE|EMPTY|OUT", lambda match: places[match[0]], word) for word in words.split()]
    result = run(*filled, "--json", code=code)
    error = json.loads(result.stdout)["error"]
    assert error["kind"] == kind and error["exit_code"] == code
    assert (places.get(says, says)) in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "empty").exists() and not (tmp_path / "out").exists()


def test_exit_codes_cover_the_branches_of_the_error_tree_and_the_manual_lists_them() -> None:
    branches = [branch for branch in errors.WeightSyncError.__subclasses__() if branch.__module__ == errors.__name__]
    assert set(branches) == set(CODES)
    manual = (Path(__file__).parent.parent / "docs" / "cli.md").read_text()
    for branch in branches:
        assert re.search(rf"^\| {exit_code(branch('x'))} \|.*`{branch.__name__}`", manual, re.M), branch


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_and_shows_examples(name: str) -> None:
    text = run(name, "--help").stdout
    assert f"weight-sync {name} " in text.partition("Usage")[2].partition("\n")[2]
    assert "--json" in text and "--set" in text and name in run("--help").stdout
    assert re.search(rf"`weight-sync {name}", (Path(__file__).parent.parent / "docs" / "cli.md").read_text())


def test_config_lists_every_key_and_values_in_force(tmp_path: Path) -> None:
    from weight_sync.config import Config

    rows = {row["key"]: row for row in ask("config")["keys"]}
    assert set(rows) == set(Config.model_fields) and all(row["help"] for row in rows.values())
    assert rows["uri"]["required"] and rows["anchor_every"]["default"] == 50
    (tmp_path / "train.yaml").write_text("weight_sync: {uri: /x, anchor_every: 7}")
    document = ask("config", "--config", tmp_path / "train.yaml", "--set", "forms=[step, compact]")
    values = {row["key"]: row["value"] for row in document["keys"]}
    assert (values["uri"], values["anchor_every"], values["forms"]) == ("/x", 7, ["step", "compact"])


# --- processes -----------------------------------------------------------------------------------------------------


def test_help_and_config_import_nothing_heavy() -> None:
    code = """if True:
        import sys
        from typer.testing import CliRunner
        from weight_sync.cli import app
        for words in (["--help"], ["publish", "--help"], ["config", "--json"]):
            assert CliRunner().invoke(app, words).exit_code == 0
        print([name for name in ("torch", "numba", "numpy", "obstore", "google.protobuf") if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_follow_waits_for_versions_reloads_and_ends_at_a_signal(checkpoints: list[Path], tmp_path: Path) -> None:
    uri, current, told = tmp_path / "run", tmp_path / "current", tmp_path / "told"
    hook = f"echo $WEIGHT_SYNC_VERSION $WEIGHT_SYNC_PATH >> {told}"
    words = ["follow", uri, "--out", current, "--on-commit", hook, "--json", "--set", "poll_s=0.05"]
    process = subprocess.Popen([*PROGRAM, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        seen = []
        for folders in (checkpoints[:2], checkpoints[2:3]):
            run("publish", *folders, "--to", uri)
            while not seen or seen[-1]["version"] != ask("log", uri)["versions"][-1]["number"]:
                seen.append(json.loads(process.stdout.readline()))  # blocks; the test's own limit ends it
            assert bits(current) == bits(folders[-1])
        process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM, stderr
    assert "Traceback" not in stderr and bits(current) == bits(checkpoints[2])
    lines = told.read_text().splitlines()
    assert lines[-1] == f"{seen[-1]['version']} {current}" and len(lines) == len(seen)


def test_progress_is_drawn_on_a_terminal_only_and_never_into_the_answer(
    store: Path, checkpoints: list[Path], tmp_path: Path
) -> None:
    ours, theirs = pty.openpty()
    words = ["materialize", store, "--out", tmp_path / "out", "--json"]
    done = subprocess.Popen([*PROGRAM, *map(str, words)], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other side has closed
        while part := os.read(ours, 1 << 16):
            drawn += part
    os.close(ours)
    assert done.stdout is not None
    assert json.loads(done.stdout.read())["number"] == 3 and done.wait(60) == 0
    assert b"write" in drawn
    assert run("materialize", store, "--out", tmp_path / "again").stderr == ""
