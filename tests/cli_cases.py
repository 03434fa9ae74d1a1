"""What the tests of the command line share: commands in this process, real tiny checkpoints, real stores in folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from weight_sync.checkpoint import Checkpoint
from weight_sync.cli import app
from weight_sync.proto.v1 import replica_pb2
from weight_sync.tensors import TensorSpec

ODD = "../../../etc/[red] nämé\n\x1b[2J"


def run(*words: str | Path, code: int = 0) -> Any:
    """Runs a command in this process and checks its exit code."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, (words, result.stdout, result.stderr, result.exception)
    return result


def ask(*words: str | Path, code: int = 0) -> Any:
    """The JSON of a command; a list when it prints one document per line."""
    lines = run(*words, "--json", code=code).stdout.splitlines()
    documents = [json.loads(line) for line in lines]
    return documents if words[0] == "publish" else documents[0]


def bits(path: Path) -> dict[TensorSpec, bytes]:
    """All tensors of a checkpoint, bit for bit."""
    checkpoint = Checkpoint(path)
    return {spec: checkpoint.bits(spec.name).tobytes() for spec in checkpoint.table}


def make_checkpoints(root: Path) -> list[Path]:
    """Four folders: changes, zeros that change sign, NaN, a sign flip; tensors that appear, go and change dtype."""
    generator = torch.Generator().manual_seed(7)
    tensors = {f"model.layers.{i}.mlp.weight": torch.randn(40, 64, generator=generator).bfloat16() for i in range(3)}
    tensors |= {ODD: torch.randn(5, generator=generator), "scalar": torch.tensor(1.5, dtype=torch.float16)}
    tensors |= {"empty": torch.zeros(0, 4), "ids": torch.arange(9)}
    folders = []
    for k in range(4):
        folder = root / f"ckpt-{k}"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({"k": k}))
        folders.append(folder)
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        for name in [name for name in tensors if name.startswith("model")]:
            chosen = torch.rand(tensors[name].shape, generator=generator) < 0.02
            tensors[name][chosen] *= 1.02
        first = tensors["model.layers.0.mlp.weight"].reshape(-1)
        first[k], first[10 + k], first[20 + k] = (0.0, float("nan"), -first[20 + k])
        first[k - 1] = -0.0
        if k == 0:
            tensors["added"] = torch.ones(3, dtype=torch.float8_e4m3fn)
        if k == 1:
            tensors["ids"] = tensors["ids"].int()
        if k == 2:
            del tensors["added"]
    return folders


def fresh_store(checkpoints: Sequence[Path], tmp_path: Path, *words: str) -> Path:
    """A store of its own."""
    uri = tmp_path / "run"
    run("publish", *checkpoints, "--to", uri, "--set", "ship_base=always", *words)
    return uri


def objects(store: Path, number: int) -> list[Path]:
    """The stored objects of a version."""
    return sorted(store.glob(f"*/data/{number:020d}/*.safetensors"))


def entry(store: Path, number: int) -> Path:
    """The log's entry."""
    return next(store.glob(f"*/log/{number:020d}.pb"))


def flip(path: Path, at: int) -> None:
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def lease(uri: Path, replica: str, number: int) -> None:
    """Writes a lease as a replica does."""
    run_id = ask("log", uri)["run_id"]
    message = replica_pb2.Lease(replica_id=replica, ttl_s=600)
    message.version.run_id, message.version.number = run_id, number
    (uri / run_id / "leases").mkdir(exist_ok=True)
    (uri / run_id / "leases" / f"{replica}.pb").write_bytes(message.SerializeToString())
