"""Claims about verl with a real vLLM as its rollout, on a CPU: versions arrive in verl's own vLLM worker, bit for bit, in place
and, where that is not possible, by verl's own load.

Runs in an environment of its own (scripts/requirements/verl.txt). vLLM's linears must stay unpacked, for both: verl loads
by vLLM's plain ``load_weights``, which finds no loaders on packed ones.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from test_verl import EXAMPLE, HERE, QUICK, metrics, run, uri_of, versions

from weight_sync import Replica
from weight_sync.testing import MemoryEngine

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; make test-hosts builds its environment", allow_module_level=True)

VLLM = (
    "actor_rollout_ref.rollout.name=vllm", "+actor_rollout_ref.rollout.enable_sleep_mode=False",
    "actor_rollout_ref.rollout.free_cache_engine=False", "actor_rollout_ref.rollout.enforce_eager=True",
    "actor_rollout_ref.rollout.max_model_len=64", "actor_rollout_ref.rollout.max_num_seqs=8",
    "actor_rollout_ref.rollout.max_num_batched_tokens=64", "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=vllm_witness.Witness",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config={weight_sync:{in_place:true}}",
)  # fmt: skip
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("kind", "format", "parallel", "fails", "ways"), [
    # vLLM boots from nothing; the second commit fails: verl loads the first version and that one whole
    ("file", "dummy", 1, 2, ["whole", "in_place", "whole", "in_place", "in_place"]),
    # vLLM boots from the checkpoint, and so holds the first version
    pytest.param("grpc", "auto", 1, 0, ["in_place"] * 5, marks=pytest.mark.full),
    # two tensor-parallel ranks
    pytest.param("file", "dummy", 2, 0, ["whole", *["in_place"] * 4], marks=pytest.mark.full),
])  # fmt: skip
def test_verls_own_vllm_worker_holds_every_version_bit_for_bit(
    tmp_path: Path, inputs: Path, variables: dict[str, str], kind: str, format: str, parallel: int, fails: int,
    ways: list[str],
) -> None:  # fmt: skip
    from safetensors.torch import load_file

    store, out = str(tmp_path / "store"), tmp_path / "out"
    out.mkdir()
    block = [f"weight_sync.uri={uri_of(kind, tmp_path)}", *([f"weight_sync.store={store}"] if kind == "grpc" else ())]
    paths = os.pathsep.join([variables["PYTHONPATH"], str(HERE), str(HERE.parent / "openrlhf")])
    done = run([EXAMPLE / "main_ppo.sh", inputs, f"+weight_sync={kind}", *block, *QUICK, *VLLM,
                f"actor_rollout_ref.rollout.load_format={format}",
                f"actor_rollout_ref.rollout.tensor_model_parallel_size={parallel}",
                f"actor_rollout_ref.rollout.n_gpus_per_node={parallel}"],
               {**variables, **CPU, "PYTHONPATH": paths, "WEIGHT_SYNC_TEST_OUT": str(out),
                "WEIGHT_SYNC_TEST_FAIL": str(fails)}, 1700)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    by_step = versions(store)
    assert sorted(by_step) == [0, 1, 2, 3, 4]
    ranks = [sorted(out.glob(f"vllm-*-{rank}.safetensors")) for rank in range(parallel)]
    held = [joined([load_file(path) for path in paths]) for paths in zip(*ranks, strict=True)]
    seen = [path.stem.split("-")[2] for path in ranks[0]]
    assert seen == ways[5 - len(seen) :], "what is held already is not written again"
    for tensors, step in zip(reversed(held), reversed(range(5)), strict=False):
        agrees(tensors, store, by_step[step], f"step {step}")
    assert metrics(done.stdout, "weight_sync/rollouts_in_place") == [float(way == "in_place") for way in ways[:4]]
    assert metrics(done.stdout, "weight_sync/rollouts_whole") == [float(way == "whole") for way in ways[:4]]
    assert re.search(r"version \d+ in place after [\d.]+ s \(.*\), digest [0-9a-f]{32}", done.stdout + done.stderr)
    if fails:
        assert "full load: its workers hold no version of the run yet" in done.stdout + done.stderr
        assert re.search("full load: .*nothing is staged", done.stdout + done.stderr)
    apart = [float(value) for value in re.findall(r"rollout_probs_diff_mean:(?:np\.\w+\()?([\d.e+-]+)", done.stdout)]
    assert apart and max(apart) < 0.02, "vLLM's probabilities are the trainer's"


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, of those that tensor-parallel ranks hold; norms, and its one head of keys and values,
    are held by each.
    """
    whole = {}
    for name, first in parts[0].items():
        if len(parts) == 1 or any(word in name for word in ("norm", "k_proj", "v_proj")):
            assert all(torch.equal(first, part[name]) for part in parts), name
            whole[name] = first
        else:
            whole[name] = torch.cat([part[name] for part in parts], int("o_proj" in name or "down_proj" in name))
    return whole


def agrees(held: dict[str, torch.Tensor], store: str, number: int, when: str) -> None:
    """Whether vLLM held every tensor of a version."""
    engine = MemoryEngine({})
    with Replica.open(store, engine) as replica:
        replica.sync(exact=number, timeout=60)
    for name, (_, bits) in engine.table.items():
        assert np.array_equal(held[name].reshape(-1).view(torch.int16).numpy().view("u2"), bits), f"{name} at {when}"
