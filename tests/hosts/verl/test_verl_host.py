"""Claims about the verl adapter that need verl's classes and no run of verl: the way without shards, names that are refused,
another version of verl, and the copy of a rollout host when its keeper dies.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loop import checkpoint, config, digest_of, follow_fresh, model, same_bits

from weight_sync import Publisher
from weight_sync.adapters.trainers import versions
from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import ConfigError, LayoutError, TensorError
from weight_sync.group import SoloGroup

pytest.importorskip("verl", reason="verl is not installed here; make test-hosts builds its environment")
pytestmark = pytest.mark.timeout(300)


def host(folder: Path) -> Any:
    from weight_sync.adapters.trainers.verl.host import VerlHost

    return VerlHost(config(folder, base=str(checkpoint(folder / "base"))), SoloGroup())


def test_without_a_module_verls_own_stream_is_published_and_every_tensor_says_why(tmp_path: Path) -> None:
    publishing = host(tmp_path)
    for step in (1, 2):
        publishing.weights = ((name, tensor.clone()) for name, tensor in model(step).items())
        metrics = publishing.sync(step)
        assert metrics["weight_sync/failed"] == 0 and metrics["weight_sync/tensors_gathered"] == len(model(0))
        assert same_bits(follow_fresh(config(tmp_path))[0], model(step))
    assert set(publishing.paths.values()) == {"gathered: the training engine was not reached"}
    publishing.close()


@pytest.mark.parametrize("name", ["model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.lora_A.weight"])
def test_names_of_adapters_are_refused_with_what_to_set(tmp_path: Path, name: str) -> None:
    publishing = host(tmp_path)
    publishing.weights = iter([(name, torch.zeros(3))])
    with pytest.raises(TensorError, match=r"lora\.merge=true"):
        publishing.sync(1)


def test_a_stream_that_lacks_a_tensor_is_an_error_that_names_it(tmp_path: Path) -> None:
    publishing = host(tmp_path)
    publishing.weights = ((name, tensor) for name, tensor in model(1).items() if name != "lm_head")
    with pytest.raises(LayoutError, match="lm_head"):
        publishing.sync(1)


@pytest.mark.parametrize(("engine", "words"), [
    (SimpleNamespace(), "no module"), (SimpleNamespace(module=[1]), "no module"),
    (SimpleNamespace(module=torch.nn.Linear(2, 2)), ""),
    (SimpleNamespace(module=torch.nn.Linear(2, 2), _qat_enabled=True), "quantises"),
    (SimpleNamespace(module=type("FullyShardedDataParallel", (torch.nn.Linear,), {})(2, 2)), "fsdp2"),
])  # fmt: skip
def test_why_shards_are_not_published_is_a_reason_in_words(engine: Any, words: str) -> None:
    from weight_sync.adapters.trainers.verl.host import why_not_shards

    assert words in why_not_shards(engine) and bool(why_not_shards(engine)) == bool(words)


@pytest.mark.parametrize("found", ["0.9.0", "0.10.0"])
def test_another_version_of_verl_is_refused_when_the_module_is_imported(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import weight_sync.adapters.trainers.verl as adapter

    with monkeypatch.context() as patch:
        patch.setattr(versions, "version", lambda _: found)
        with pytest.raises(ConfigError, match=rf"verl.*{found}.*>=0\.9\.1,<0\.10"):
            importlib.reload(adapter)
    importlib.reload(adapter)


KEEPER = """
import sys
from weight_sync.adapters.trainers.verl.copy import HostCopy
from weight_sync.config import load
copy = HostCopy(load(sys.argv[1]))
for line in sys.stdin:
    run, version = line.split()
    print(copy.reach(run, int(version)), copy.keeps, flush=True)
"""


@contextmanager
def two(make: Callable[[], subprocess.Popen[str]]) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Two processes, killed in the end."""
    both = make(), make()
    try:
        yield both
    finally:
        for process in both:
            process.kill()
            process.wait(30)


def test_the_copy_of_a_host_goes_on_when_its_keeper_is_killed(tmp_path: Path) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")), cache_dir=str(tmp_path / "copies"))
    block = tmp_path / "block.yaml"
    block.write_text(f"uri: {keys.uri}\nbase: {keys.base}\ncache_dir: {keys.cache_dir}\npoll_s: 0.02\ntimeout_s: 60\n")

    def worker() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", KEEPER, str(block)], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)  # fmt: skip

    def reach(process: subprocess.Popen[str], version: int) -> tuple[Path, bool]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{publisher.run_id} {version}\n")
        process.stdin.flush()
        folder, keeps = process.stdout.readline().split()
        return Path(folder), keeps == "True"

    with Publisher.open(keys) as publisher, two(worker) as (first, second):
        publisher.publish(model(1), step=1)
        assert reach(first, 1)[1] and not reach(second, 1)[1], "one of them keeps it"
        os.kill(first.pid, signal.SIGKILL)
        first.wait(30)
        publisher.publish(model(2), step=2)
        folder, keeps = reach(second, 2)
        assert keeps and Checkpoint(folder).digest().hex() == digest_of(model(2))
