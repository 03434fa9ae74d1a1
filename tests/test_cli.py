"""Claims about the command line: versions go in and come out bit for bit, errors say what to do, processes end well.

A process of its own where signals, imports or a terminal matter.
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
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_cases import ask, bits, fresh_store, make_checkpoints, objects, run

from weight_sync import errors
from weight_sync.checkpoint import Checkpoint, mapped_tensors, write_safetensors
from weight_sync.cli.failure import CODES, exit_code
from weight_sync.dtypes import DTYPES
from weight_sync.tensors import TensorSpec

COMMANDS = ("publish", "follow", "sidecar", "materialize", "inspect", "log", "diff", "verify", "fold", "gc", "config")
PROGRAM = [sys.executable, "-c", "from weight_sync.cli import main; main()"]


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


def test_a_bucket_is_reached_with_store_options(
    checkpoints: list[Path], s3_uri: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    uri, options = s3_uri
    words = [word for key, value in options.items() for word in ("--option", f"{key}={value}")]
    run("publish", *checkpoints[:3], "--to", uri, *words)
    assert len(ask("log", uri, *words)["versions"]) == 3 and ask("verify", uri, "--deep", *words)["ok"]
    run("materialize", uri, "--version", "2", "--out", tmp_path / "out", *words)
    assert bits(tmp_path / "out") == bits(checkpoints[2])


def test_a_failed_reload_is_undone(checkpoints: list[Path], tmp_path: Path) -> None:
    uri = fresh_store(checkpoints[:2], tmp_path)
    words = ["follow", uri, "--out", tmp_path / "current", "--once", "--on-commit", "test $WEIGHT_SYNC_VERSION = 1"]
    run(*words)
    run("publish", checkpoints[2], "--to", uri)
    assert "version 1 is served again" in run(*words, code=7).stderr
    assert bits(tmp_path / "current") == bits(checkpoints[1])


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
        ("log STORE --option endpoint", 2, "ConfigError", "KEY=VALUE"),
        ("log STORE --threads 0", 2, "InputError", "--threads"),
        ("log", 2, "InputError", "URI"),
        ("nonsense", 2, "InputError", "nonsense"),
        ("log EMPTY", 4, "VersionMissingError", "start the publisher"),
        ("verify EMPTY", 4, "VersionMissingError", "start the publisher"),
        ("gc EMPTY", 4, "VersionMissingError", "start the publisher"),
        ("follow EMPTY --out OUT --once --timeout 0", 4, "VersionNotReadyError", "no version"),
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
    assert (
        {key for key in rows if "." not in key} == set(Config.model_fields)
        and "tls.cert" in rows
        and all(row["help"] for row in rows.values())
    )
    assert rows["uri"]["required"] and rows["anchor_every"]["default"] == 50
    (tmp_path / "train.yaml").write_text("weight_sync: {uri: /x, anchor_every: 7}")
    document = ask("config", "--config", tmp_path / "train.yaml", "--set", "forms=[step, compact]")
    values = {row["key"]: row["value"] for row in document["keys"]}
    assert (values["uri"], values["anchor_every"], values["forms"]) == ("/x", 7, ["step", "compact"])


def test_a_file_that_names_no_known_transport_is_refused_by_the_command_that_checks_it(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("weight_sync: {uri: 'file:///run', backend: grcp}\n")
    told = run("config", "--config", tmp_path / "train.yaml", code=2)
    assert "no such transport: backend; found 'grcp'" in told.stderr


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
    words = ["publish", *checkpoints[:2], "--to", tmp_path / "run", "--json"]
    done = subprocess.Popen([*PROGRAM, *map(str, words)], stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    drawn = b""
    with contextlib.suppress(OSError):  # how a terminal says that the other side has closed
        while part := os.read(ours, 1 << 16):
            drawn += part
    os.close(ours)
    assert done.stdout is not None
    assert [json.loads(line)["number"] for line in done.stdout] == [0, 1] and done.wait(60) == 0
    assert b"publish" in drawn
    assert run("materialize", store, "--out", tmp_path / "out").stderr == ""
