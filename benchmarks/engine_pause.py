"""The fence of a real vLLM server beside vLLM's own way to patch weights, for the same changes in one run.

    scripts/env.sh vllm .venv-vllm
    .venv-vllm/bin/python benchmarks/engine_pause.py [--model DIR] [--density 0.01] [--rounds 20] [--packed] [--json]
    .venv-vllm/bin/python benchmarks/engine_pause.py --larger        # a second row: four times the model, as many changes

Starts a server with unpacked weights (``--packed``: as vLLM packs them) that is never without a request, publishes a
version per round and lets a replica follow. Per round, in the worker and under that load:

    pause        from the end of the last forward step before the commit to the start of the first after it
    empty_pause  the same of a pause and resume of the engine with nothing between them
    vllm_patch   vLLM's ``load_checkpoint_weight_patches`` for the same elements inside an engine that is paused, its
                 patch already in memory

The fence's work is the pause less the empty one. The default model is the quick start's, once that has cached it; the
larger one is made from its configuration, with random weights. Owns no threshold: it only measures.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
CLIENTS, TOKENS = 2, 4  # what keeps the server busy
SETTLE_S = 60.0


def larger(model: Path, folder: Path) -> Path:
    """A Llama of twice the width and 34/30 of the depth, about four times the elements, with random weights."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    config.hidden_size *= 2
    config.intermediate_size *= 2
    config.num_attention_heads *= 2
    config.num_key_value_heads *= 2
    config.num_hidden_layers = round(config.num_hidden_layers * 34 / 30)
    torch.manual_seed(0)
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(config)
    tensors = {name: torch.randn(p.shape, dtype=torch.bfloat16) * 0.02 for name, p in made.named_parameters()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    config.save_pretrained(folder)
    return folder


def step(state: dict[str, torch.Tensor], changed: int, seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Moves ``changed`` elements, spread over all tensors, by one ulp; the places and their new bits."""
    dice = np.random.default_rng(seed)
    density = changed / sum(tensor.numel() for tensor in state.values())
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


class Bench:
    """One server, asked by clients without a break; and what its worker measured."""

    def __init__(self, server: Server, engine: VllmEngine) -> None:
        self.server, self.engine = server, engine

    @contextmanager
    def load(self) -> Iterator[None]:
        """Requests, until the block ends."""
        ended = threading.Event()

        def client() -> None:
            while not ended.is_set():
                self.server.generate(range(5, 21), TOKENS)

        threads = [threading.Thread(target=client, daemon=True) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        yield
        ended.set()
        for thread in threads:
            thread.join()

    def worker(self, method: str, *args: Any) -> Any:
        """A method of the benchmark's worker."""
        body = {"method": f"weight_sync_benchmark_{method}", "args": list(args)}
        return self.server.post("/collective_rpc", body, 600.0)["results"][0]

    def gap(self) -> float:
        """The longest gap between two forward steps since ``watch``, once it is over."""
        end = time.monotonic() + SETTLE_S
        before = int(self.worker("steps"))
        while int(self.worker("steps")) < before + 3:
            if time.monotonic() > end:
                sys.exit("the server makes no steps")
            time.sleep(0.01)
        return float(self.worker("gap"))

    def empty(self) -> float:
        """The gap of a pause with nothing in it."""
        self.worker("watch")
        self.engine.pause(PauseMode.WAIT, 60.0)
        self.engine.resume()
        return self.gap()

    def theirs(self, patch: Path) -> float:
        """Seconds of vLLM's own patch function."""
        self.engine.pause(PauseMode.WAIT, 60.0)
        try:
            return float(self.worker("patch", str(patch)))
        finally:
            self.engine.resume()


def measure(server: Server, folder: Path, model: Path, changed: int, rounds: int) -> dict[str, Any]:
    """One row: every round the same changes both ways. The first round warms both up and does not count."""
    state = load_file(model / "model.safetensors")
    config = load({"uri": str(folder / "store"), "base": str(model), "threads": 2, "cache_dir": str(folder)})
    engine = VllmEngine(server.url, config)
    bench = Bench(server, engine)
    rows: dict[str, list[float]] = {"pause": [], "apply": [], "prepare": [], "empty": [], "theirs": []}
    counts = []
    with weight_sync.Publisher.open(config) as publisher, weight_sync.Replica.open(config, engine) as replica:
        replica.sync()
        with bench.load():
            for number in range(1, rounds + 2):
                changes = step(state, changed, number)
                report = publisher.publish(state)
                write_patch(folder / "patch.safetensors", state, changes)
                bench.worker("watch")
                synced = replica.sync(exact=report.version)
                found = {"pause": bench.gap(), "empty": bench.empty(), "theirs": bench.theirs(folder / "patch.safetensors"),
                         "apply": synced.seconds["apply"],
                         "prepare": synced.seconds["prepare"] + synced.seconds["stage"]}  # fmt: skip
                if number > 1:
                    counts.append(report.changed)
                    for key, value in found.items():
                        rows[key].append(value)
        assert engine.audit().hex() == synced.digest, "vLLM's own patch left other bits"
        copied = len(engine.copied)
    engine.close()
    empty, theirs = statistics.median(rows["empty"]), statistics.median(rows["theirs"])
    work = [pause - empty for pause in rows["pause"]]
    return {
        "elements": sum(tensor.numel() for tensor in state.values()), "changed": round(statistics.median(counts)),
        "rounds": rounds, "tensors_reloaded": copied, "pause": spread(rows["pause"]),
        "empty_pause": spread(rows["empty"]), "fence_work": spread(work), "apply": spread(rows["apply"]),
        "while_serving": spread(rows["prepare"]), "vllm_patch": spread(rows["theirs"]),
        "fence_work_over_vllm_patch": statistics.median(work) / theirs,
    }  # fmt: skip


def row(model: Path, given: argparse.Namespace, changed: int) -> dict[str, Any]:
    """Of one model, on a server of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = (*EXTENSION, *(() if given.packed else IN_PLACE))
        with Server(model, folder / "server", *options, VLLM_SERVER_DEV_MODE="1", PYTHONPATH=str(HERE)) as server:
            return measure(server.ready(), folder, model, changed, given.rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, help="a bf16 checkpoint of one safetensors file")
    parser.add_argument("--density", type=float, default=0.01, help="changed elements over all, of the first row")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--larger", action="store_true", help="a second row: four times the model, as many changes")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    cached = sorted(Path("~/.cache/weight_sync/models").expanduser().glob("smollm2-*"))
    if given.model is None and not cached:
        parser.error("no model: run make quickstart once, or give --model")
    model = given.model or cached[-1]
    changed = round(given.density * sum(t.numel() for t in load_file(model / "model.safetensors").values()))
    rows = [tell(row(model, given, changed), given)]
    if given.larger:
        with tempfile.TemporaryDirectory() as name:
            rows.append(tell(row(larger(model, Path(name) / "larger"), given, changed), given))
    if given.json:
        print(json.dumps({"rows": rows}))
    elif given.larger:
        ratio = rows[1]["fence_work"]["median_ms"] / rows[0]["fence_work"]["median_ms"]
        print(f"{'fence_work, larger over first':28} {ratio:.2f}")


def tell(one: dict[str, Any], given: argparse.Namespace) -> dict[str, Any]:
    """Prints a row as soon as it is there, unless JSON is wanted."""
    for key, value in ({} if given.json else one).items():
        print(f"{key:28}", f"{value['median_ms']:9.2f} ms  [{value['min_ms']:.2f}, {value['max_ms']:.2f}]"
              if isinstance(value, dict) else value, flush=True)  # fmt: skip
    return one


if __name__ == "__main__":
    main()
