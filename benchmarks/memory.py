"""Memory of publishing and following a model of a billion parameters, both at once on one machine.

    python benchmarks/memory.py [--elements 1000000000] [--density 0.01] [--folder DIR]

Writes two bf16 checkpoints, runs ``weight-sync publish`` and ``weight-sync follow`` as processes beside each other and
samples their memory until the follower holds the second version. Prints JSON: peaks of the sum and of each process, in
GiB; ``rss`` counts pages that both map twice, ``pss`` once, ``private`` not at all. Owns no threshold: it only measures.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

SIDE = 4096  # of each square tensor
FILES = 4
LIMIT_S = 1800.0


def write_checkpoints(folder: Path, elements: int, density: float) -> None:
    """``c0`` and ``c1``: weights of N(0, 0.02), of which about ``density`` differ by one ulp."""
    random = torch.Generator().manual_seed(0)
    tensors = max(FILES, round(elements / SIDE**2))
    weight_map: dict[str, str] = {}
    for part in range(FILES):
        name = f"model-{part:05d}-of-{FILES:05d}.safetensors"
        old: dict[str, torch.Tensor] = {}
        new: dict[str, torch.Tensor] = {}
        for k in range(part, tensors, FILES):
            key = f"model.layers.{k}.weight"
            old[key] = torch.randn(SIDE, SIDE, generator=random).mul_(0.02).to(torch.bfloat16)
            moved = torch.rand(SIDE, SIDE, generator=random) < density
            new[key] = (old[key].view(torch.int16) ^ moved.to(torch.int16)).view(torch.bfloat16)
            weight_map[key] = name
        for which, state in (("c0", old), ("c1", new)):
            (folder / which).mkdir(exist_ok=True)
            save_file(state, folder / which / name)
    for which in ("c0", "c1"):
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / which / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / which / "config.json").write_text("{}")


def memory_of(process: subprocess.Popen[bytes]) -> dict[str, int]:
    """Bytes of a process; zeros once it has ended."""
    try:
        info = psutil.Process(process.pid).memory_full_info()
    except psutil.Error:
        return {"rss": 0, "pss": 0, "private": 0}
    return {"rss": info.rss, "pss": info.pss, "private": info.uss}


def measure(folder: Path) -> dict[str, dict[str, float]]:
    """Peaks in GiB, by process and of their sum."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        return _sample(folder, processes)
    finally:
        for process in processes.values():
            process.terminate()
            process.wait(60)


def _sample(folder: Path, processes: dict[str, subprocess.Popen[bytes]]) -> dict[str, dict[str, float]]:
    command = [str(Path(sys.executable).parent / "weight-sync")]
    store, out = folder / "run", folder / "out"
    jobs = {
        "publish": ["publish", str(folder / "c0"), str(folder / "c1"), "--to", str(store)],
        "follow": ["follow", str(store), "--out", str(out)],
    }
    for name, arguments in jobs.items():
        processes[name] = subprocess.Popen([*command, *arguments], stdout=sys.stderr)
    peaks = {name: dict.fromkeys(("rss", "pss", "private"), 0) for name in (*processes, "sum")}
    deadline = time.monotonic() + LIMIT_S
    state = out / "weight_sync.json"
    while time.monotonic() < deadline and not (state.exists() and json.loads(state.read_text())["version"] >= 1):
        now = {name: memory_of(process) for name, process in processes.items()}
        now["sum"] = {key: sum(part[key] for part in now.values()) for key in ("rss", "pss", "private")}
        for name, found in now.items():
            peaks[name] = {key: max(found[key], peaks[name][key]) for key in found}
        time.sleep(0.1)
    return {name: {key: round(value / 2**30, 2) for key, value in found.items()} for name, found in peaks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1_000_000_000, help="parameters, about")
    parser.add_argument("--density", type=float, default=0.01, help="share of them that changes")
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        write_checkpoints(Path(folder), given.elements, given.density)
        print(json.dumps(measure(Path(folder)), indent=2))


if __name__ == "__main__":
    main()
