"""Claims about memory: what a publish needs beyond the model, whatever the density, sampled from a real process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from loop import Child, config

from weight_sync import Publisher
from weight_sync.config import Config

MIB = 1 << 20
ELEMENTS = 256 << 20  # of bf16: half a GiB
FIXED = 256 * MIB  # of all work space, whatever the size of the model


def resident() -> int:
    """Bytes of this process that are in RAM now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Peak(threading.Thread):
    """Samples the resident memory until it is asked."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self._stop_it = resident(), threading.Event()
        self.start()

    def run(self) -> None:
        while not self._stop_it.wait(0.002):
            self.peak = max(self.peak, resident())

    def stop(self) -> int:
        self._stop_it.set()
        self.join()
        return self.peak


def measure(say: Callable[[str], None], keys: Config, density: float) -> None:
    """Says how much each publish needed beyond what was resident, and how much its patch and snapshot hold."""
    tensors = {f"{k}": torch.full((ELEMENTS // 8,), 0.02, dtype=torch.bfloat16) for k in range(7)}
    tensors["rows"] = torch.full((1024, ELEMENTS // 8 // 1024), 0.02, dtype=torch.bfloat16)
    small = {"w": torch.zeros(1000, dtype=torch.bfloat16)}
    with Publisher.open(keys.replace(uri=keys.uri + "-warm")) as warm:
        for _ in range(2):
            small["w"] += 1
            warm.publish(small)
    with Publisher.open(keys) as publisher:
        before, peak = resident(), Peak()
        report = publisher.publish(tensors)
        assert report is not None
        say(f"first {peak.stop() - before} 0 {publisher._views.parts[0].snapshot.nbytes}")
        generator = torch.Generator().manual_seed(0)
        for tensor in tensors.values():
            flat, step = tensor.view(torch.int16).view(-1), max(1, round(1 / density))
            some = flat[::step]
            some += torch.randint(1, 3, some.shape, dtype=torch.int16, generator=generator)
            del some
        before, peak = resident(), Peak()
        began = time.perf_counter()
        report = publisher.publish(tensors)
        assert report is not None and abs(report.density - density) < density / 10
        say(f"second {peak.stop() - before} {report.patch_bytes} 0 {time.perf_counter() - began:.1f}")


@pytest.mark.slow
@pytest.mark.parametrize("density", [0.005, 1.0])
def test_a_publish_needs_the_snapshot_the_patch_and_a_fixed_rest(tmp_path: Path, density: float) -> None:
    child = Child(tmp_path, measure, config(tmp_path, threads=2, anchor_every=0), density)
    assert child.wait(280) == 0, child.lines()
    for line in child.lines():
        _, extra, patch, snapshot = line.split()[:4]
        assert int(extra) <= int(patch) + int(snapshot) + FIXED, line
    print(child.lines())
