"""Claims about the verl adapter, in real verl on a CPU; only platform and rollout are doubles (verl_cpu.py).

``make test-hosts`` builds the environment.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from remote_site import free_port, remote_site

from weight_sync import Replica
from weight_sync.config import load
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.registry import open_transport
from weight_sync.testing import MemoryEngine

pytest.importorskip("verl", reason="verl is not installed here; make test-hosts builds its environment")

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "verl"
QUICK = ("weight_sync.poll_s=0.02", "weight_sync.anchor_share=0", "weight_sync.timeout_s=120")


def run(command: Sequence[object], variables: dict[str, str], limit: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], env=variables, capture_output=True, text=True, timeout=limit)


def uri_of(kind: str, folder: Path) -> str:
    return f"grpc://127.0.0.1:{free_port()}" if kind == "grpc" else str(folder / "store")


def ranks(model: Path, uri: str, first: int, syncs: int, store: str, variables: dict[str, str]) -> list[dict[str, Any]]:
    """One line per sync, after the checks that hold for each."""
    done = run([sys.executable, HERE / "ranks.py", model, uri, first, syncs, store], variables)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and len(lines) == syncs, done.stdout[-3000:] + done.stderr[-3000:]
    for line in lines:
        assert line["different"] == [[], []] and line["names"] == [True, True]
        assert line["metrics"]["weight_sync/tensors_gathered"] == 0, "every tensor from where it lies"
        assert line["metrics"]["weight_sync/failed"] == 0 and line["keepers"] == 1
    return lines


@pytest.mark.timeout(1800)
def test_two_fsdp2_ranks_and_two_rollouts_agree_bit_for_bit_after_every_sync_and_after_a_restart(
    tmp_path: Path, inputs: Path, variables: dict[str, str]
) -> None:
    """The embeddings are tied; verl's own stream has the head, too."""
    store = str(tmp_path / "store")
    lines = ranks(inputs / "tiny", store, 0, 4, "", variables)
    assert [line["metrics"]["weight_sync/changed"] > 0 for line in lines] == [False, True, True, True]
    assert all(line["our_bytes"] * 20 < line["native_bytes"] for line in lines[1:]), "reports cross, and no weights"
    before = versions(store)
    again = ranks(inputs / "tiny", store, 3, 2, "", variables)
    assert again[0]["metrics"].get("weight_sync/version") is None, "the checkpoint is the head: nothing to publish"
    after = versions(store)
    assert {step: after[step] for step in before} == before and sorted(after) == [0, 1, 2, 3, 4]
    contract = contract_of(store)
    assert (contract.engine, contract.data_parallel) == ("verl", 2) and contract.engine_version.startswith("0.9.")
    assert contract.compute_dtype in ("float32", "bfloat16") and contract.kernel_versions["torch"]


@pytest.mark.timeout(900)
def test_experts_go_by_their_names_on_disk_and_an_embedding_may_be_larger_than_verls_bucket(
    tmp_path: Path, inputs: Path, variables: dict[str, str]
) -> None:
    lines = ranks(inputs / "experts", uri_of("grpc", tmp_path), 0, 4, str(tmp_path / "history"), variables)
    assert any(name.endswith("mlp.experts.3.gate_proj.weight") for name in lines[0]["tensors"])
    assert not any("gate_up_proj" in name for name in lines[0]["tensors"])
    assert lines[0]["largest"] > 1 << 20, "update_weights_bucket_megabytes is 1"
    assert [line["metrics"]["weight_sync/changed"] > 0 for line in lines] == [False, True, True, True]


def versions(store: str) -> dict[int, int]:
    """Step to version."""
    with_steps = {}
    end = open_transport(load({"uri": store})).replica_end(None)
    for entry in end.entries():
        if entry.kind in (manifest_pb2.ENTRY_KIND_ANCHOR, manifest_pb2.ENTRY_KIND_PATCH) and entry.HasField("step"):
            with_steps[entry.step] = entry.number
    end.close()
    return with_steps


def contract_of(store: str) -> Any:
    """As it travels with the newest version."""
    end = open_transport(load({"uri": store})).replica_end(None)
    head = end.head()
    assert head is not None
    found = end.manifest(head).contract
    end.close()
    return found


def hashes(store: str, number: int) -> dict[str, str]:
    """Of every tensor of a version, as a replica that joins now has it."""
    engine = MemoryEngine({})
    with Replica.open(store, engine) as replica:
        replica.sync(exact=number, timeout=60)
    return {
        name: hashlib.blake2b(bits.tobytes(), digest_size=16).hexdigest() for name, (_, bits) in engine.table.items()
    }


def train(folder: Path, inputs: Path, variables: dict[str, str], kind: str, *more: str) -> tuple[str, str]:
    """What main_ppo printed, and the store; ``folder``/out says what the rollout held after each sync."""
    out, store = folder / "out", str(folder / "store")
    out.mkdir()
    kept = [f"weight_sync.store={store}"] if kind == "grpc" else [f"weight_sync.uri={store}"]
    done = run([EXAMPLE / "main_ppo.sh", inputs, f"+weight_sync={kind}", *kept, *QUICK, *more],
               {**variables, "WEIGHT_SYNC_TEST_OUT": str(out)}, 1700)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, store


def agree(folder: Path, store: str) -> None:
    """Rollouts held every version, bit for bit."""
    by_step = versions(store)
    assert sorted(by_step) == [0, 1, 2, 3, 4]
    for step, number in by_step.items():
        lines = (folder / "out" / f"rollout-0-step-{step}.txt").read_text().splitlines()
        assert dict(line.split() for line in lines) == hashes(store, number), f"step {step}"


def metrics(printed: str, key: str) -> list[float]:
    """Of each step, as verl logged it."""
    return [float(value) for value in re.findall(rf" {re.escape(key)}:(?:np\.\w+\()?(-?[\d.e+-]+)", printed)]


@pytest.mark.timeout(1800)
def test_main_ppo_trains_and_its_rollout_holds_every_version_bit_for_bit(
    tmp_path: Path, inputs: Path, variables: dict[str, str]
) -> None:
    printed, store = train(tmp_path, inputs, variables, "file")
    agree(tmp_path, store)
    told = re.findall(r"step:\d+ - .*", printed)
    assert len(told) == 4, "metrics are in verl's own step log"
    for line in told:
        assert "weight_sync/failed:0.0" in line and "weight_sync/tensors_gathered:0.0" in line
        assert "weight_sync/density:" in line and "weight_sync/staleness_p95:" in line


@pytest.mark.timeout(1800)
def test_main_ppo_learns_from_engines_elsewhere_and_counts_their_versions_as_its_steps(
    tmp_path: Path, inputs: Path, variables: dict[str, str]
) -> None:
    uri = uri_of("grpc", tmp_path)
    with remote_site(tmp_path / "site", uri, inputs / "tiny") as site:
        printed, store = train(tmp_path, inputs, variables, "grpc", f"weight_sync.uri={uri}",
                               f"weight_sync.rollout.engines=[{site.url}]", "weight_sync.rollout.max_staleness=3")  # fmt: skip
        assert len(site.asked) >= 4 * 2 * 2, "steps, prompts of a batch, samples of a prompt"
        agree(tmp_path, store)
    behind = metrics(printed, "training/off_policy/trajectory_staleness_worst/max")
    assert len(behind) == 4 and all(0 <= steps <= 3 for steps in behind), behind
    assert metrics(printed, "weight_sync/failed") == [0.0] * 4
    assert max(metrics(printed, "weight_sync/replicas")) >= 2, "verl's own rollout, and the sidecar"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("overrides", "words"), [
    (["trainer.v1.trainer_mode=sync"], "never calls a checkpoint engine"),
    (["trainer.v1.trainer_mode=colocate_async"], "trainer.v1.trainer_mode=separate_async"),
    (["+weight_sync.anchor_evry=3"], "expected 'anchor_every'"),
    (["weight_sync.snapshot=disk"], "weight_sync.snapshot"),
])  # fmt: skip
def test_what_would_sync_nothing_ends_at_the_start_and_says_what_to_set(
    inputs: Path, variables: dict[str, str], overrides: list[str], words: str
) -> None:
    done = run(
        [EXAMPLE / "main_ppo.sh", inputs, "+weight_sync=file", "weight_sync.uri=/nowhere", *overrides], variables, 500
    )
    assert done.returncode != 0
    assert words in done.stderr and "Started a local Ray instance" not in done.stderr


@pytest.mark.timeout(600)
def test_the_doctor_finds_every_hook_point(variables: dict[str, str], tmp_path: Path) -> None:
    code = "from weight_sync.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "doctor", "verl"], env=variables, cwd=tmp_path,
                          capture_output=True, text=True, timeout=500, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert all(line.startswith("ok") for line in done.stdout.splitlines() if line.startswith(("ok", "OFF")))
