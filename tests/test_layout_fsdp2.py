"""Sharded models in real processes over gloo: every rank learns alone, together they rebuild the checkpoint."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layout_cases import bits, table_of
from safetensors.torch import load_file, save_file
from torch import nn

from weight_sync.layout import (
    agree_on_owners,
    check_storages,
    learn_module,
    local_storages,
    take,
    trace_converter,
)
from weight_sync.layout.placement import Layout
from weight_sync.tensors import TensorSpec

TINY = {
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", TINY),
    "tied": ("qwen3", {**TINY, "tie_word_embeddings": True}),
    "experts": ("qwen3_moe", {**TINY, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}


# --- processes --------------------------------------------------------------------------------------------------------


class GlooGroup:
    """``ports.Group`` over torch.distributed."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def gather(self, data: bytes) -> list[bytes]:
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        longest = max(int(length) for length in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        if self.rank:
            return []
        return [part.numpy().tobytes()[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def broadcast(self, data: bytes | None) -> bytes:
        length = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(length, 0)
        word = torch.zeros(int(length), dtype=torch.uint8)
        if data is not None:
            word = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(word, 0)
        return word.numpy().tobytes()


def _enter(work: Callable[..., None], rank: int, world: int, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
        work(Path(folder), *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.exit(1)


def in_processes(world: int, folder: Path, work: Callable[..., None], *args: Any) -> None:
    """Runs ``work(folder, *args)`` in ``world`` processes; fails when one of them does."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "transformers.models.qwen3_moe.modeling_qwen3_moe"])
    running = [context.Process(target=_enter, args=(work, rank, world, str(folder), args)) for rank in range(world)]
    for process in running:
        process.start()
    for process in running:
        process.join(120)
    codes = [process.exitcode for process in running]
    for process in running:
        process.kill()
    assert codes == [0] * world


# --- a checkpoint put together from the ranks' own shards -------------------------------------------------------------


def shared_file(folder: Path, name: str, table: list[TensorSpec]) -> dict[str, torch.Tensor]:
    """Tensors in one file that all processes map."""
    size = sum(spec.nbytes + 16 for spec in table)
    memory = torch.from_file(str(folder / name), shared=True, size=size, dtype=torch.uint8)
    out, at = {}, 0
    for spec in table:
        out[spec.name] = memory[at : at + spec.nbytes].view(spec.type.torch).view(spec.shape)
        at += -(-spec.nbytes // 16) * 16
    return out


def publish(folder: Path, name: str, model: nn.Module, layout: Layout, owned: tuple[str, ...]) -> None:
    """Writes what this rank owns into the shared file."""
    into = shared_file(folder, name, list(layout.tensors))
    storages = local_storages(model)
    check_storages(layout, storages)
    for item in layout.restrict(owned).placements:
        whole, coords = into[item.tensor], item.coords
        place = whole.as_strided(coords.sizes, coords.strides, whole.storage_offset() + coords.offset)
        place.copy_(take(item, storages[item.storage]))


def prepare(folder: Path, name: str, table: list[TensorSpec]) -> None:
    (folder / name).write_bytes(b"\xaa" * sum(spec.nbytes + 16 for spec in table))


def check_equal(folder: Path, name: str, expected: dict[str, torch.Tensor]) -> None:
    found = shared_file(folder, name, table_of(expected))
    assert [n for n, tensor in expected.items() if bits(found[n]) != bits(tensor)] == []


# --- transformers under FSDP2 -----------------------------------------------------------------------------------------


def _train(folder: Path, names: list[str]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16)
        table = table_of(load_file(folder / name / "model.safetensors"))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        loss = model(torch.arange(12).view(1, 12), labels=torch.arange(12).view(1, 12)).loss  # leaves the root whole
        layout = learn_module(model, table)
        ownership = agree_on_owners(GlooGroup(), layout)
        assert set(ownership.owned) == set(layout.by_tensor), "nothing is held twice"
        publish(folder, f"{name}.first", model, layout, ownership.owned)
        loss = model(torch.arange(12).view(1, 12), labels=torch.arange(12).view(1, 12)).loss
        loss.backward()
        torch.optim.SGD(model.parameters(), 0.5).step()
        publish(folder, f"{name}.second", model, layout, ownership.owned)
        state = {key: value.full_tensor() for key, value in model.state_dict().items()}
        if dist.get_rank() == 0:
            whole = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.bfloat16)
            whole.load_state_dict(state)
            whole.save_pretrained(folder / name / "next")


@pytest.mark.parametrize(("world", "names"), [(2, ["qwen3", "tied", "experts"]), (3, ["tied", "experts"])])
def test_fsdp2_ranks_rebuild_the_checkpoint_before_and_after_a_step(
    tmp_path: Path, world: int, names: list[str]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    for name in names:
        kind, config = MODELS[name]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        for step in ("first", "second"):
            prepare(tmp_path, f"{name}.{step}", table_of(load_file(tmp_path / name / "model.safetensors")))
    in_processes(world, tmp_path, _train, names)
    for name in names:
        before = load_file(tmp_path / name / "model.safetensors")
        after = load_file(tmp_path / name / "next" / "model.safetensors")
        assert any(bits(before[key]) != bits(after[key]) for key in before)
        check_equal(tmp_path, f"{name}.first", before)
        check_equal(tmp_path, f"{name}.second", after)


# --- other ways to shard ----------------------------------------------------------------------------------------------


def perceptron() -> nn.Sequential:
    """Odd sizes on purpose: shards are uneven, some are empty."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 7), nn.Linear(7, 2), nn.Linear(2, 16, bias=False)).double()


def _shard(folder: Path, mode: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, table = perceptron(), table_of(load_file(folder / "disk.safetensors"))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    if mode == "hybrid":
        fully_shard(model, mesh=mesh)
    elif mode == "strided":
        parallelize_module(model, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        for layer in model:
            fully_shard(layer, mesh=mesh["outer"])
    else:
        columns = init_device_mesh("cpu", (4,))
        fully_shard(model, mesh=columns, shard_placement_fn=lambda p: Shard(int(p.dim() == 2 and p.shape[1] % 4 == 0)))
    kinds = {type(placement).__name__ for tensor in model.state_dict().values() for placement in tensor.placements}
    assert {"hybrid": "Replicate", "strided": "_StridedShard", "columns": "Shard"}[mode] in kinds
    layout = learn_module(model, table)
    ownership = agree_on_owners(GlooGroup(), layout)
    publish(folder, "rebuilt", model, layout, ownership.owned)
    held = sum(item.coords.count for item in layout.placements)
    owned = sum(item.coords.count for item in layout.restrict(ownership.owned).placements)
    totals = torch.tensor([held, owned])
    dist.all_reduce(totals)
    elements = sum(spec.elements for spec in table)
    assert int(totals[1]) == elements
    assert (int(totals[0]) > elements) == (mode != "columns"), "replicas were held, and owned once"


@pytest.mark.parametrize("mode", ["hybrid", "strided", "columns"])
def test_replicas_strided_and_column_shards_rebuild_the_checkpoint(tmp_path: Path, mode: str) -> None:
    expected = {name: tensor.bfloat16() for name, tensor in perceptron().state_dict().items()}
    save_file(expected, tmp_path / "disk.safetensors")
    prepare(tmp_path, "rebuilt", table_of(expected))
    in_processes(4, tmp_path, _shard, mode)
    check_equal(tmp_path, "rebuilt", expected)


# --- a converter that gathers -----------------------------------------------------------------------------------------


def _gather(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    def convert(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = [torch.empty_like(state["w"]) for _ in range(world)]
        dist.all_gather(rows, state["w"])
        flat = torch.empty(world * 10, dtype=state["v"].dtype)
        dist.all_gather_into_tensor(flat, state["v"])
        return {"w": torch.cat([row.t() for row in rows], 0).cpu(), "v": flat}

    sources = {"w": torch.empty(6, 4), "v": torch.empty(10)}
    layout, refused = trace_converter(convert, sources, group_rank=lambda group: dist.ProcessGroup.unbox(group).rank())
    assert not refused
    numbers = {
        name: rank * 1000 + torch.arange(t.numel(), dtype=torch.int64).view(t.shape) for name, t in sources.items()
    }
    for name, truth in convert(numbers).items():
        mine = truth.reshape(-1) // 1000 == rank
        found = torch.full((truth.numel(),), -1, dtype=torch.int64)
        for item in layout.by_tensor[name]:
            part = found.as_strided(item.coords.sizes, item.coords.strides, item.coords.offset)
            part.copy_(take(item, numbers[item.storage].view(-1)))
        assert torch.equal(found[mine], truth.reshape(-1)[mine])
        assert bool((found[~mine] == -1).all())
    agree_on_owners(GlooGroup(), layout)


def test_a_converter_that_gathers_is_traced_to_this_ranks_part(tmp_path: Path) -> None:
    in_processes(2, tmp_path, _gather)
