"""Claims about ranks that publish one adapter together: FSDP2 shards of it stay where they lie."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapter_cases import adapted, step
from cli_cases import ask
from safetensors.torch import load_file
from test_adapter import base, same
from test_distributed import Counting, Say, finished, forbidden, launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import weight_sync

pytest.importorskip("peft")
__all__ = ["base"]  # a fixture


def publish_shards(say: Say, folder: str, store: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = adapted(Path(folder))
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert any("lora_" in name and isinstance(p, DTensor) for name, p in model.named_parameters())
    group = Counting(timeout_s=60.0)
    DTensor.full_tensor = forbidden  # type: ignore[method-assign, assignment]
    with weight_sync.Publisher.open(store, adapter={"base": folder}, group=group) as publisher:
        for k in range(2):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_" in name:
                        parameter.to_local()[:1] += k
            publisher.publish(model)
        say(str(publisher.version))


def test_shards_of_an_adapter_are_published_from_where_they_lie(base: Path, tmp_path: Path) -> None:
    said = finished(launch(tmp_path, 2, publish_shards, str(base), str(tmp_path / "lora")))
    assert said[0] == said[1]
    first = min(row["number"] for row in ask("log", tmp_path / "lora")["versions"])
    ask("materialize", tmp_path / "lora", "--version", str(first), "--out", tmp_path / "out")
    step(model := adapted(base), 1, share=0.0)
    model.save_pretrained(tmp_path / "saved")
    assert same(load_file(tmp_path / "out" / "adapter_model.safetensors"),
                load_file(tmp_path / "saved" / "adapter_model.safetensors"))  # fmt: skip
