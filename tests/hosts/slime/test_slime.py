"""Claims about the slime adapter in real slime, from a checkout that SLIME_SRC names (slime is not on PyPI).

Real are slime's training actor under Ray, its updater, iterators and converters, and megatron.core over gloo; what a CPU
cannot have is stubbed (slime_env.py). Proven with slime at commit 624b824a.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from loop import checkpoint, config, model
from remote_site import remote_site

from weight_sync import Publisher
from weight_sync.config import load
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.registry import open_transport

pytestmark = pytest.mark.skipif(
    not os.environ.get("SLIME_SRC"), reason="SLIME_SRC names no checkout of slime, which is not on PyPI"
)

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "slime"


def job(folder: Path, **block: Any) -> Path:
    """What a user writes: the YAML of ``--custom-config-path``; the store is in the folder."""
    (folder / "hf").mkdir()
    keys = {"uri": str(folder / "store"), "poll_s": 0.02, "timeout_s": 120, "threads": 1, "anchor_share": 0, **block}
    text = {"custom_megatron_init_path": "weight_sync.adapters.trainers.slime.install", "weight_sync": keys}
    (folder / "ws.yaml").write_text(yaml.safe_dump(text))
    return folder


def run(script: Path, *arguments: object) -> list[dict[str, Any]]:
    """What a script of slime's processes has said."""
    paths = os.pathsep.join([str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=850)
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return lines


def entries(folder: Path) -> list[manifest_pb2.VersionManifest]:
    """The versions that have a step, in order."""
    end = open_transport(load({"uri": str(folder / "store")})).replica_end(None)
    kinds = (manifest_pb2.ENTRY_KIND_ANCHOR, manifest_pb2.ENTRY_KIND_PATCH)
    found = [entry for entry in end.entries() if entry.kind in kinds and entry.HasField("step")]
    end.close()
    return found


def check(lines: list[dict[str, Any]], syncs: int) -> None:
    """Everything that slime itself would have sent is served, and came from where it lies."""
    assert len(lines) == syncs
    for line in lines:
        assert line["names"] and line["different"] == []
        for rank in line["ranks"]:
            assert rank["gathered"] == [], "every tensor from where it lies"
            assert rank["metrics"]["weight_sync/failed"] == 0
            assert rank["class"] == "WeightSyncUpdateWeightFromDistributed"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("topology", "ranks"), [
    ("1,1,1,0", 1), ("1,1,2,1", 2), pytest.param("2,2,1,0", 4, marks=pytest.mark.full),
    pytest.param("2,1,2,1", 4, marks=pytest.mark.full),
], ids=lambda value: str(value).replace(",", ""))  # fmt: skip
def test_a_fleet_without_handles_serves_what_slime_would_have_sent_bit_for_bit(
    tmp_path: Path, topology: str, ranks: int
) -> None:
    """Topologies are tensor-, pipeline- and expert-parallel sizes, and whether the model has experts."""
    lines = run(EXAMPLE / "actors.py", job(tmp_path), topology, ranks, 4)
    check(lines, 4)
    assert [rank["version"] for line in lines for rank in line["ranks"]] == [
        n for n in range(1, 5) for _ in range(ranks)
    ]


@pytest.mark.timeout(1800)
def test_a_resumed_job_goes_on_in_its_run_with_its_numbers_and_says_how_it_computes(tmp_path: Path) -> None:
    check(run(EXAMPLE / "actors.py", job(tmp_path), "2,1,1,0", 2, 4), 4)
    before = entries(tmp_path)
    assert [entry.step for entry in before] == [0, 1, 2, 3]
    resumed = run(EXAMPLE / "actors.py", tmp_path, "2,1,1,0", 2, 3, 2)  # rollout 2 was the last one: step 3
    check(resumed, 3)
    after = entries(tmp_path)
    assert after[:4] == before and [entry.step for entry in after] == [0, 1, 2, 3, 4, 5]
    assert len({entry.run_id for entry in after}) == 1
    told = [line["ranks"][0]["version"] for line in resumed]
    assert told == [entry.number for entry in after[3:]], "slime's own counter goes on with the run's"
    contract = after[-1].contract
    assert contract.engine == "slime" and contract.tensor_parallel == 2 and contract.kernel_versions["megatron-core"]


@pytest.mark.timeout(600)
def test_slimes_own_rollout_code_learns_from_engines_elsewhere(tmp_path: Path) -> None:
    """Real are slime's data source, its groups, rewards, filters and samples, and the contract of its rollout function."""
    base = checkpoint(tmp_path / "hf")
    keys = config(tmp_path, base=str(base))
    with Publisher.open(keys) as publisher, remote_site(tmp_path / "site", keys.uri, base) as site:
        publisher.publish(model(1), step=0)
        site.reached(1)
        block = {
            **keys.model_dump(mode="json"),
            "rollout": {"engines": [site.url], "flavour": "sglang", "max_staleness": 0},
        }
        lines = run(HERE / "asks.py", tmp_path, json.dumps(block))
        made, evaluated = lines
        assert made["groups"] == [2, 2, 2] and made["type"] == "RolloutFnTrainOutput"
        for sample in made["samples"]:
            assert sample["versions"] == ["1"] and sample["spans"] == [[1, 0, 4]]
            assert (
                sample["length"] == len(sample["likely"]) == sum(sample["mask"]) == 4
                and sample["status"] == "completed"
            )
            assert sample["reward"] in (0, 1) and sample["response"]
        assert made["metrics"]["rollout/weight_sync/version_oldest"] == 1 and made["dropped"] >= 1
        assert made["metrics"]["rollout/weight_sync/staleness_max"] == 0
        assert evaluated["type"] == "RolloutFnEvalOutput" and evaluated["versions"] == [["1"]] * 3
        assert {body["sampling_params"]["max_new_tokens"] for body in site.asked} == {4}
        assert all(body["return_logprob"] and "no_stop_trim" in body["sampling_params"] for body in site.asked)
