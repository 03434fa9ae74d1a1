"""The fence of a real vLLM server beside vLLM's own way to patch weights, for the same changes in one run.

    scripts/env.sh vllm .venv-vllm
    .venv-vllm/bin/python benchmarks/engine_pause.py [--model DIR] [--density 0.01] [--rounds 20] [--packed] [--json]

Starts a server with unpacked weights (``--packed``: as vLLM packs them), publishes a version per round and lets a
replica follow. Per round it measures the pause as the replica reports it, an empty pause and resume of the engine, and
vLLM's ``load_checkpoint_weight_patches`` for the same elements, inside the same worker, its patch already in memory.
The fence's work is the pause less the empty one. The default model is the quick start's, once that has cached it.
Owns no threshold: it only measures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "engines"))

from servers import Server  # noqa: E402

import weight_sync  # noqa: E402
from weight_sync.adapters.engines.vllm.engine import VllmEngine  # noqa: E402
from weight_sync.config import load  # noqa: E402
from weight_sync.ports import PauseMode  # noqa: E402

IN_PLACE = ("--additional-config", '{"weight_sync": {"in_place": true}}')
EXTENSION = ("--worker-extension-cls", "engine_pause_worker.BenchmarkWorker")


def step(state: dict[str, torch.Tensor], density: float, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Moves ``density`` of each tensor's elements by one ulp; the places and their new bits."""
    dice = np.random.default_rng(seed)
    out = {}
    for name, tensor in sorted(state.items()):
        bits = tensor.view(torch.int16).numpy().reshape(-1)
        at = np.flatnonzero(dice.random(len(bits), np.float32) < density).astype(np.int32)
        bits[at] ^= 1
        out[name] = at, bits[at].copy()
    return out


def write_patch(path: Path, state: dict[str, torch.Tensor], changes: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """As vLLM wants it: int32 indices and values of the tensor's dtype."""
    tensors = {}
    for name, (at, bits) in changes.items():
        tensors[f"{name}|indices"] = torch.from_numpy(at)
        tensors[f"{name}|values"] = torch.from_numpy(bits).view(state[name].dtype)
    save_file(tensors, path, {name: json.dumps(list(state[name].shape)) for name in changes})


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most, in milliseconds."""
    return {"median_ms": 1e3 * statistics.median(values), "min_ms": 1e3 * min(values), "max_ms": 1e3 * max(values)}


def measure(server: Server, folder: Path, model: Path, density: float, rounds: int) -> dict[str, Any]:
    """One row: every round the same changes both ways. The first round warms both up and does not count."""
    state = load_file(model / "model.safetensors")
    config = load({"uri": str(folder / "store"), "base": str(model), "threads": 2, "cache_dir": str(folder)})
    engine = VllmEngine(server.url, config)
    rows: dict[str, list[float]] = {"pause": [], "apply": [], "prepare": [], "empty": [], "theirs": []}
    with weight_sync.Publisher.open(config) as publisher, weight_sync.Replica.open(config, engine) as replica:
        replica.sync()
        for number in range(1, rounds + 2):
            changes = step(state, density, number)
            report = publisher.publish(state)
            write_patch(folder / "patch.safetensors", state, changes)
            synced = replica.sync(exact=report.version)
            began = time.perf_counter()
            engine.pause(PauseMode.WAIT, 60.0)
            engine.resume()
            empty = time.perf_counter() - began
            body = {"method": "weight_sync_benchmark", "args": [str(folder / "patch.safetensors")]}
            theirs = server.post("/collective_rpc", body, 600.0)["results"][0]
            if number == 1:
                continue
            rows["pause"].append(synced.seconds["pause"])
            rows["apply"].append(synced.seconds["apply"])
            rows["prepare"].append(synced.seconds["prepare"] + synced.seconds["stage"])
            rows["empty"].append(empty)
            rows["theirs"].append(float(theirs))
        assert engine.audit().hex() == synced.digest, "vLLM's own patch left other bits"
        copied = len(engine.copied)
    engine.close()
    work = [pause - statistics.median(rows["empty"]) for pause in rows["pause"]]
    theirs_of = statistics.median(rows["theirs"])
    return {
        "elements": sum(tensor.numel() for tensor in state.values()), "density": density, "rounds": rounds,
        "tensors_reloaded": copied, "pause": spread(rows["pause"]), "empty_pause": spread(rows["empty"]),
        "fence_work": spread(work), "apply": spread(rows["apply"]), "while_serving": spread(rows["prepare"]),
        "vllm_patch": spread(rows["theirs"]), "fence_work_over_vllm_patch": statistics.median(work) / theirs_of,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="a bf16 checkpoint of one safetensors file")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    cached = sorted(Path("~/.cache/weight_sync/models").expanduser().glob("smollm2-*"))
    if given.model is None and not cached:
        parser.error("no model: run make quickstart once, or give --model")
    model = given.model or cached[-1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = (*EXTENSION, *(() if given.packed else IN_PLACE))
        with Server(model, folder / "server", *options, VLLM_SERVER_DEV_MODE="1", PYTHONPATH=str(HERE)) as server:
            row = measure(server.ready(), folder, model, given.density, given.rounds)
    if given.json:
        print(json.dumps({"rows": [row]}))
        return
    for key, value in row.items():
        print(f"{key:28}", f"{value['median_ms']:9.2f} ms  [{value['min_ms']:.2f}, {value['max_ms']:.2f}]"
              if isinstance(value, dict) else value)  # fmt: skip


if __name__ == "__main__":
    main()
