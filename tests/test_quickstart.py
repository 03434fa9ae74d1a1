"""Claims about the quick start, as a user runs it: it trains and serves, resumes, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from safetensors.torch import load_file, save_file

import weight_sync
from weight_sync.codec.digest import Digest
from weight_sync.config import load
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.transport.file import FileTransport

transformers = pytest.importorskip("transformers")

RUN = Path(__file__).parents[1] / "examples" / "quickstart" / "run.py"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's modules can be imported, as its own scripts do."""
    monkeypatch.syspath_prepend(str(RUN.parent))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of models for all tests of this file."""
    return tmp_path_factory.mktemp("cache")


def command(folder: Path, *arguments: str) -> list[str]:
    small = ["--prompts", "2", "--group", "3", "--tokens", "6"]
    return [sys.executable, str(RUN), "--tiny", "--dir", str(folder), *small, *arguments]


def environment(cache: Path) -> dict[str, str]:
    return {**os.environ, "WEIGHT_SYNC_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


def run(cache: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    summary = folder.with_suffix(".json")
    done = subprocess.run(
        command(folder, *arguments, "--json", str(summary)),
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


@contextlib.contextmanager
def started(cache: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A quick start that is on its way, in a session of its own; nothing of it outlives the test."""
    process = subprocess.Popen(
        command(folder, "--steps", "1000"),
        env=environment(cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(30)


def until(true: Callable[[], bool], process: subprocess.Popen[bytes] | None = None, limit: float = 240) -> None:
    deadline = time.monotonic() + limit
    while not true():
        assert process is None or process.poll() is None, "the quick start ended early"
        assert time.monotonic() < deadline, "nothing happened"
        threading.Event().wait(0.05)


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def history(folder: Path) -> list[manifest_pb2.VersionManifest]:
    end = FileTransport(load({"uri": str(folder / "store")})).replica_end()
    try:
        return list(end.entries())
    finally:
        end.close()


def versions(folder: Path) -> list[tuple[int, int | None]]:
    """(number, step) of all versions."""
    kinds = (manifest_pb2.ENTRY_KIND_ANCHOR, manifest_pb2.ENTRY_KIND_PATCH)
    return [(m.number, m.step if m.HasField("step") else None) for m in history(folder) if m.kind in kinds]


@pytest.fixture(scope="module")
def trained(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of three steps and its summary; tests that go on from it take a copy."""
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    return folder, run(cache, folder, "--steps", "3")


@pytest.fixture
def folder(trained: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of the run of three steps."""
    return Path(shutil.copytree(trained[0], tmp_path / "run"))


def test_three_steps_are_trained_and_both_rollouts_serve_them(trained: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = trained
    assert [row["step"] for row in summary["rows"]] == [1, 2, 3] == [row["step"] for row in rows(folder)]
    assert all(row["patch_bytes"] > 0 and 0 < row["density"] < 1 for row in summary["rows"])
    # a random model writes no small letter at all in one step of fifty
    assert all(0 <= row["staleness"] <= 2 and 0 <= row["reward"] < 1 for row in summary["rows"])
    assert any(row["reward"] > 0 for row in summary["rows"])
    assert summary["rows"][-1]["pause_ms"] > 0
    digest = Digest.from_proto(history(folder)[-1].views[0].digest).hex()
    assert summary["served"] == {"rollout-0": digest, "rollout-1": digest}
    assert (folder / "quickstart.png").read_bytes().startswith(b"\x89PNG")


def test_a_kill_between_saving_and_publishing_is_made_up_for_when_the_run_goes_on(cache: Path, folder: Path) -> None:
    killed = subprocess.run(
        command(folder, "--rollouts", "1"),
        env={**environment(cache), "WEIGHT_SYNC_CRASH_AT": "publish:commit"},
        capture_output=True,
        timeout=500,
    )
    assert killed.returncode == -9
    assert [step for _, step in versions(folder)] == [None, 1, 2, 3]  # the trainer's state is at step 4
    again = run(cache, folder, "--steps", "1", "--rollouts", "1")
    assert again["step"] == 5 and [step for _, step in versions(folder)] == [None, 1, 2, 3, 4, 5]
    assert [row["step"] for row in again["rows"]] == [1, 2, 3, 5]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_end_at_any_moment_leaves_no_process_and_a_store_that_opens(
    cache: Path, folder: Path, how: signal.Signals
) -> None:
    with started(cache, folder) as process:
        until(lambda: len(rows(folder)) >= 4, process)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2
        process.send_signal(how)
        process.wait(60)
        until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children), limit=60)
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    steps = [step for _, step in versions(folder)]
    assert steps == [None, *range(1, len(steps))]
    with weight_sync.Publisher.open(str(folder / "store"), base=cache / "models" / "tiny-random") as publisher:
        assert publisher.step == steps[-1]


def test_another_model_in_the_same_folder_is_refused(cache: Path, folder: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(cache / "models" / "tiny-random", tmp_path / "other"))
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    before = versions(folder)
    done = subprocess.run(
        command(folder, "--model", str(other)), env=environment(cache), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1 and "ForkRequiredError: base is not the base of this run" in done.stderr
    assert versions(folder) == before


def test_a_trainer_whose_state_is_gone_does_not_overwrite_the_run(cache: Path, folder: Path) -> None:
    (folder / "trainer.safetensors").unlink()
    before = versions(folder)
    done = subprocess.run(command(folder), env=environment(cache), capture_output=True, text=True, timeout=500)
    assert done.returncode == 1 and "ForkRequiredError: the trainer's state is gone" in done.stderr
    assert versions(folder) == before


# --- its parts -------------------------------------------------------------------------------------------------------


def test_a_trainer_that_loads_its_state_goes_on_bit_for_bit(example: None, tmp_path: Path) -> None:
    from grpo import Sample, Trainer

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).bfloat16().float()
    samples = [Sample([1, 2, 3], [4 + k, 5], [-3.0, -4.0], "g", reward=float(k)) for k in range(2)]
    one = Trainer(copy.deepcopy(model), torch.bfloat16, 1e-3, seed=0)
    one.train(samples)
    one.save(tmp_path / "state.safetensors")
    other = Trainer(copy.deepcopy(model), torch.bfloat16, 1e-3, seed=1)
    other.load(tmp_path / "state.safetensors")
    for trainer in (one, other):
        trainer.train(samples)
        assert trainer.step == 2
    changed = 0
    for (name, held), wanted, before in zip(
        other.model.named_parameters(), one.model.parameters(), model.parameters(), strict=True
    ):
        assert torch.equal(held, wanted) and torch.equal(other.masters[name], one.masters[name])
        assert torch.equal(held, other.masters[name].bfloat16().float())
        changed += int((held != before).sum())
    assert changed


@pytest.mark.parametrize("served", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_round_to_the_checkpoint_and_fill_the_space_between_its_numbers(
    example: None, served: torch.dtype
) -> None:
    from grpo import spread

    torch.manual_seed(0)
    weights = (torch.randn(10_000) * 0.05).to(served).float()
    weights[:3] = torch.tensor([0.0, 1.0, -2.0])  # below a power of two the neighbours are nearer
    masters = spread(weights, served)
    assert torch.equal(masters.to(served).float(), weights)
    share = float((masters != weights).float().mean())
    assert share > 0.95 if served is not torch.float32 else share == 0


def test_dequantised_zeros_become_small_numbers_and_nothing_else_changes(example: None) -> None:
    from model import without_zeros

    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).mul(3).round() / 8
    fixed = without_zeros(weight)
    assert (weight == 0).any() and (fixed != 0).all()
    assert torch.equal(fixed[weight != 0], weight[weight != 0]) and fixed[weight == 0].abs().max() <= 1 / 16
    assert without_zeros(torch.zeros(2, 32)).eq(0).all() and without_zeros(torch.zeros(5)).eq(0).all()


def test_rewards_want_the_capital_and_few_words(example: None) -> None:
    from task import Capitals, Letters

    asked = next(question for question in Capitals().questions("0") if question.answer == "Paris")
    rewards = [
        Capitals().reward(asked, text) for text in ("Paris", "It is Paris.", "The capital is Rome.", "", "Parisian")
    ]
    assert rewards == [1.0, 0.8, 0.0, 0.0, 0.0]
    assert Letters().reward(asked, "abCD") == 0.5
