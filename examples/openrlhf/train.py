"""OpenRLHF's real trainer on a CPU, through the launcher: ``python train.py FOLDER [OPTION...]``, after tiny.py FOLDER."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_TRIES = 4
HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_usage_threshold": "0.97",
}  # fmt: skip


def main(folder: Path, options: list[str]) -> int:
    """Starts Ray with GPUs that are not there, then the launcher. OpenRLHF keeps a Ray that is up.

    WEIGHT_SYNC_HOOK names what Ray runs in each process; default: openrlhf_cpu.apply.
    """
    hook = os.environ.get("WEIGHT_SYNC_HOOK", "openrlhf_cpu.apply")
    paths = [str(HERE / "stubs"), str(HERE)]
    os.environ.update(ENVIRONMENT, PYTHONPATH=os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
    sys.path[:0] = paths
    _start_ray(hook)
    import openrlhf_cpu

    openrlhf_cpu.apply()
    from weight_sync.run import main as launch

    given = f"""--actor.model_name_or_path {folder}/tiny --reward.remote_url {HERE}/tiny.py
      --data.prompt_dataset {folder}/data.jsonl --data.input_key input --data.label_key label --data.max_samples 16
      --data.max_len 64 --rollout.max_new_tokens 8 --rollout.batch_size 4 --rollout.n_samples_per_prompt 2
      --rollout.micro_batch_size 2 --train.batch_size 8 --train.micro_batch_size 2 --train.num_episodes 1
      --actor.num_nodes 1 --vllm.tensor_parallel_size 1 --vllm.enforce_eager --vllm.gpu_memory_utilization 0.1
      --algo.advantage.estimator rloo --algo.kl.init_coef 0 --ds.attn_implementation eager
      --ckpt.output_dir {folder}/out --ckpt.path {folder}/ckpt"""
    return launch(["openrlhf.cli.train_ppo_ray", *given.split(), *options])


def _start_ray(hook: str) -> None:
    """Tries again: Ray grants its own processes half a minute, which a busy machine may need for less than that."""
    import ray

    for left in reversed(range(_TRIES)):
        try:
            ray.init(
                num_cpus=8, num_gpus=4, include_dashboard=False, object_store_memory=200_000_000,
                runtime_env={"env_vars": ENVIRONMENT, "worker_process_setup_hook": hook},
            )  # fmt: skip
            return
        except Exception as error:  # Ray raises a bare Exception for it
            if "timed out during startup" not in str(error) or not left:
                raise
            ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
