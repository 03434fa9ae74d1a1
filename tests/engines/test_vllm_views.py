"""Claims about a vLLM server that serves a quantised view: 8-bit integers, the scheme that vLLM runs on every CPU.

vLLM packs codes and scales for its kernels when it has loaded them, so versions are reloaded from host copies. The trainer
offers bf16 weights; docs/views.md says which schemes run where.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import models
import pytest
from quantize_cases import CASES
from runs import Run, engine_of
from safetensors.torch import load_file, save_file
from servers import Server

import weight_sync
from weight_sync.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(2400)
ACTIVATIONS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def quantised(plain: Path, folder: Path) -> Path:
    """The whole checkpoint of some bf16 weights, by compressed-tensors."""
    case = CASES["int8-channel"]
    folder.mkdir()
    found = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        parts = case.quantize(tensor) if ".layers." in name and tensor.ndim == 2 else {"weight": tensor}
        found |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    group = {**case.config["config_groups"]["group_0"], "input_activations": ACTIVATIONS}
    scheme: dict[str, Any] = {**case.config, "config_groups": {"group_0": group}, "ignore": ["lm_head"],
                              "quantization_status": "compressed"}  # fmt: skip
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": scheme}))
    return folder


@pytest.mark.full
def test_a_quantised_view_is_served_as_a_fresh_engine_serves_the_librarys_checkpoint(tmp_path: Path) -> None:
    plain = [models.make(tmp_path / "plain-0", "qwen3")]
    plain += [models.stepped(plain[0], tmp_path / "plain-1", 1)]
    plain += [models.stepped(plain[1], tmp_path / "plain-2", 2)]
    whole = [quantised(path, tmp_path / f"whole-{k}") for k, path in enumerate(plain)]
    run = Run(tmp_path / "store", whole)
    with weight_sync.Publisher.open(str(run.store), base=str(whole[0])) as publisher:
        for step in (1, 2):
            report = publisher.publish(load_file(plain[step] / "model.safetensors"), step)
            assert report is not None and report.views["default"].scheme == "int8-channel"
    with Server(whole[0], tmp_path / "server") as server:
        server.ready().complete()
        engine = engine_of(run, server)
        with weight_sync.Replica.open(run.config(), engine) as replica:
            for number in (1, 2):
                assert replica.sync(exact=number).digest == Checkpoint(whole[number]).digest().hex()
            made = server.complete()
        engine.close()
    with Server(whole[2], tmp_path / "fresh", door="none") as fresh:
        assert fresh.ready().complete() == made
