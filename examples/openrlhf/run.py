"""OpenRLHF trains, its vLLM engines follow through weight_sync, and both are shown to agree by digest.

Owns the command line that is run and the comparison afterwards. Owns no training: that is `openrlhf.cli.train_ppo_ray`,
unmodified. Without an accelerator it runs train.py, the same program with doubles of CUDA calls.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weight_sync.codec.digest import Digest
from weight_sync.config import load
from weight_sync.ports import OpenedRun
from weight_sync.registry import open_transport

HERE = Path(__file__).resolve().parent
TRAIN = """--rollout.batch_size 4 --rollout.n_samples_per_prompt 2 --rollout.micro_batch_size 2 --train.batch_size 8
  --train.micro_batch_size 2 --train.num_episodes 1 --data.max_samples 16 --data.max_len 1024
  --rollout.max_new_tokens 256 --algo.advantage.estimator rloo --algo.kl.init_coef 0 --ds.zero_stage 3
  --actor.num_nodes 1 --vllm.tensor_parallel_size 1 --vllm.gpu_memory_utilization 0.6 --actor.adam.lr 1e-6"""


def command(args: argparse.Namespace, folder: Path, uri: str) -> list[str]:
    """What is run: the launcher, OpenRLHF's own options, and ours."""
    shared = ["--weight_sync.uri", uri, "--actor.num_gpus_per_node", str(args.ranks), "--vllm.num_engines",
              str(args.engines), *args.more]  # fmt: skip
    if args.cpu:
        return [sys.executable, str(HERE / "train.py"), str(folder), "--ds.zero_stage", "3", *shared]
    return [
        sys.executable, "-m", "weight_sync.run", "openrlhf.cli.train_ppo_ray", "--actor.model_name_or_path", args.model,
        "--data.prompt_dataset", str(folder / "data.jsonl"), "--data.input_key", "input", "--data.label_key", "label",
        "--reward.remote_url", str(HERE / "tiny.py"), "--ckpt.output_dir", str(folder / "out"),
        "--ckpt.path", str(folder / "ckpt"), *TRAIN.split(), *shared,
    ]  # fmt: skip


def disagreements(uri: str, engines: int) -> list[str]:
    """One line for every engine that does not serve the trainer's last version, by the digest that it computed itself."""
    config = load({"uri": uri})
    transport = open_transport(config)
    end = transport.replica_end()
    run, head = end.run_id(), end.head()
    assert head is not None, "a run without a version"
    digest = Digest.from_proto(end.manifest(head).views[0].digest).hex()
    writer = transport.publisher_end(0, 1)
    writer.attach(OpenedRun(run, 0, None, False))  # looks, claims nothing
    acks = writer.acknowledgements()
    print(f"trainer   version {head}  digest {digest}")
    wrong = [] if len(acks) >= engines else [f"{len(acks)} of {engines} engines have reported"]
    for ack in acks:
        found = Digest.from_proto(ack.digest).hex()
        print(f"engine    version {ack.version.number}  digest {found}  {ack.replica_id}")
        if (ack.version.number, found) != (head, digest):
            wrong.append(f"{ack.replica_id} serves version {ack.version.number}: {ack.error or 'no error was told'}")
    writer.close()
    end.close()
    return wrong


def main() -> int:
    """0 when trainer and engines agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=os.environ.get("MODEL", ""), help="a checkpoint; default: a tiny random one")
    parser.add_argument("--cpu", action="store_true", help="without an accelerator")
    parser.add_argument("--ranks", type=int, default=2, help="trainer ranks")
    parser.add_argument("--engines", type=int, default=2, help="vLLM engines")
    parser.add_argument("--folder", type=Path, help="where everything is written; default: a new one")
    parser.add_argument("more", nargs="*", help="after --: more options for OpenRLHF and weight_sync")
    args = parser.parse_args()
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="weight_sync-openrlhf-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(HERE / "tiny.py"), str(folder)], check=True)
    if args.model and args.cpu:
        (folder / "tiny").rename(folder / "unused")
        (folder / "tiny").symlink_to(Path(args.model).resolve())
    args.model = args.model or str(folder / "tiny")
    uri = (folder / "run").as_uri()
    trained = subprocess.run(command(args, folder, uri), cwd=folder, check=False)
    wrong = (
        [f"the trainer ended with code {trained.returncode}"]
        if trained.returncode
        else disagreements(uri, args.engines)
    )
    if not wrong:
        print("trainer and engines agree")
        return 0
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"look at: the trainer's lines above that name weight_sync; weight-sync status {uri}; weight-sync log {uri}; "
          "weight-sync doctor openrlhf", file=sys.stderr)  # fmt: skip
    return 1


if __name__ == "__main__":
    sys.exit(main())
