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

import pytest
import yaml

if not os.environ.get("SLIME_SRC"):
    pytest.skip("SLIME_SRC names no checkout of slime, which is not on PyPI", allow_module_level=True)

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[2] / "examples" / "slime"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("topology", "ranks"), [
    ("1,1,1,0", 1), ("2,1,1,0", 2), ("1,1,2,1", 2), pytest.param("2,2,1,0", 4, marks=pytest.mark.full),
    pytest.param("2,1,2,1", 4, marks=pytest.mark.full),
], ids=lambda value: str(value).replace(",", ""))  # fmt: skip
def test_a_fleet_without_handles_serves_what_slime_would_have_sent_bit_for_bit(
    tmp_path: Path, topology: str, ranks: int
) -> None:
    """Topologies are tensor-, pipeline- and expert-parallel sizes, and whether the model has experts."""
    (tmp_path / "hf").mkdir()
    block = {"uri": str(tmp_path / "store"), "poll_s": 0.02, "timeout_s": 120, "threads": 1, "anchor_share": 0}
    hook = "weight_sync.adapters.trainers.slime.install"
    (tmp_path / "ws.yaml").write_text(yaml.safe_dump({"custom_megatron_init_path": hook, "weight_sync": block}))
    paths = os.pathsep.join([str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, str(EXAMPLE / "actors.py"), str(tmp_path), topology, str(ranks), "4"]
    done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, timeout=850)
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and len(lines) == 4, done.stdout[-3000:] + done.stderr[-3000:]
    for number, line in enumerate(lines, start=1):
        assert line["names"] and line["different"] == []
        for rank in line["ranks"]:
            assert rank["gathered"] == [], "every tensor from where it lies"
            assert rank["version"] == number and rank["metrics"]["weight_sync/failed"] == 0
            assert rank["class"] == "WeightSyncUpdateWeightFromDistributed"
