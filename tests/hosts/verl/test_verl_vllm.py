"""Claims about verl with a real vLLM as its rollout, on a CPU: versions arrive in verl's own vLLM worker, bit for bit.

Runs in an environment of its own (scripts/requirements/verl-vllm.txt). vLLM's linears must stay unpacked: verl loads by vLLM's
plain ``load_weights``, which finds no loaders on packed ones.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from test_verl import EXAMPLE, HERE, QUICK, run, versions

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
def test_verls_own_vllm_worker_holds_every_version_bit_for_bit(
    tmp_path: Path, inputs: Path, variables: dict[str, str]
) -> None:
    import torch
    from safetensors.torch import load_file

    store, out = str(tmp_path / "store"), tmp_path / "out"
    out.mkdir()
    paths = os.pathsep.join([variables["PYTHONPATH"], str(HERE), str(HERE.parent / "openrlhf")])
    done = run([EXAMPLE / "main_ppo.sh", inputs, "+weight_sync=file", f"weight_sync.uri={store}", *QUICK, *VLLM],
               {**variables, **CPU, "PYTHONPATH": paths, "WEIGHT_SYNC_TEST_OUT": str(out)}, 1700)  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    by_step = versions(store)
    assert sorted(by_step) == [0, 1, 2, 3, 4]
    for step, number in by_step.items():
        engine = MemoryEngine({})
        with Replica.open(store, engine) as replica:
            replica.sync(exact=number, timeout=60)
        held = load_file(out / f"vllm-{step}.safetensors")
        for name, (_, bits) in engine.table.items():
            assert np.array_equal(held[name].reshape(-1).view(torch.int16).numpy().view("u2"), bits), (
                f"{name} at step {step}"
            )
    apart = [float(value) for value in re.findall(r"rollout_probs_diff_mean:(?:np\.\w+\()?([\d.e+-]+)", done.stdout)]
    assert apart and max(apart) < 0.02, "vLLM's probabilities are the trainer's"
