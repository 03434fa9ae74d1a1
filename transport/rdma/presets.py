"""Synthetic layouts of large models, to plan for machines that are not there.

Owns the shapes of a few public models and the usual ways to split them. Owns no schedule. One rank is made at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod

from weight_sync.errors import InputError
from weight_sync.layout import link
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.tensors import TensorSpec
from weight_sync.transport.rdma.side import Side, SideBuilder

__all__ = ["PRESETS", "Model", "Split", "engine_rank", "side", "trainer_rank"]


@dataclass(frozen=True)
class Model:
    """A decoder: sizes as its configuration file names them. ``experts`` 0 is a dense model.

    Attributes:
        q_rank, kv_rank: of low-rank attention; 0 is plain attention.
        rope: size of the rotated part of a head of low-rank attention.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    inter: int
    vocab: int
    experts: int = 0
    expert_inter: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    rope: int = 0
    dtype: str = "BF16"

    def rows(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Dense tensors: name, shape, and how engines split them: rows, columns or not at all."""
        h = self.hidden
        yield "model.embed_tokens.weight", (self.vocab, h), "rows"
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            yield from self._attention(at + "self_attn.")
            yield at + "input_layernorm.weight", (h,), ""
            yield at + "post_attention_layernorm.weight", (h,), ""
            inter, mlp = self.inter, at + "mlp."
            if self.experts and layer >= self.dense_layers:
                yield mlp + "gate.weight", (self.experts, h), ""
                inter, mlp = self.expert_inter, mlp + "shared_experts."
            yield mlp + "gate_proj.weight", (inter, h), "rows"
            yield mlp + "up_proj.weight", (inter, h), "rows"
            yield mlp + "down_proj.weight", (h, inter), "columns"
        yield "model.norm.weight", (h,), ""
        yield "lm_head.weight", (self.vocab, h), "rows"

    def _attention(self, at: str) -> Iterator[tuple[str, tuple[int, ...], str]]:
        h, out = self.hidden, self.heads * self.head
        if self.q_rank:
            yield at + "q_a_proj.weight", (self.q_rank, h), ""
            yield at + "q_b_proj.weight", (self.heads * (self.head + self.rope), self.q_rank), "rows"
            yield at + "kv_a_proj_with_mqa.weight", (self.kv_rank + self.rope, h), ""
            yield at + "kv_b_proj.weight", (2 * out, self.kv_rank), "rows"
        else:
            yield at + "q_proj.weight", (out, h), "rows"
            yield at + "k_proj.weight", (self.kv_heads * self.head, h), "rows"
            yield at + "v_proj.weight", (self.kv_heads * self.head, h), "rows"
        yield at + "o_proj.weight", (h, out), "columns"

    def expert_rows(self, layers: range, experts: range) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """Some experts of some layers: prefix of the layer's experts, name, shape."""
        for layer in layers:
            if not self.dense_layers <= layer < self.layers or not self.experts:
                continue
            stack = f"model.layers.{layer}.mlp.experts."
            for expert in experts:
                at = f"{stack}{expert}."
                yield stack, at + "gate_proj.weight", (self.expert_inter, self.hidden)
                yield stack, at + "up_proj.weight", (self.expert_inter, self.hidden)
                yield stack, at + "down_proj.weight", (self.hidden, self.expert_inter)

    def table(self) -> dict[str, TensorSpec]:
        """All tensors by name."""
        shapes = [(name, shape) for name, shape, _ in self.rows()]
        everything = self.expert_rows(range(self.layers), range(self.experts))
        shapes += [(name, shape) for _, name, shape in everything]
        return {name: TensorSpec(name, self.dtype, shape) for name, shape in shapes}


@dataclass(frozen=True)
class Split:
    """How many ranks, and how they share a model.

    Attributes:
        ranks: in all; stages * replicas * shards of a trainer, groups * tp of an engine.
        stages: pipeline stages (trainer).
        experts: ways in which a stage's experts are split (trainer: at most the stage's ranks).
        replicas: copies of the shards of a stage (HSDP); each holds the same bits (trainer).
        tp: tensor parallel size of dense tensors (engine); experts are split over all ranks.
    """

    ranks: int
    stages: int = 1
    experts: int = 1
    replicas: int = 1
    tp: int = 1


PRESETS: dict[str, Callable[[], tuple[Model, Split, Split]]] = {
    "kimi-k2-like": lambda: (
        Model(61, 7168, 64, 64, 128, 18432, 163840, 384, 2048, 1, 1536, 512, 64),
        Split(256, stages=4, experts=32, replicas=1), Split(128, tp=8),
    ),
    "qwen3-235b-like": lambda: (
        Model(94, 4096, 64, 4, 128, 12288, 151936, 128, 1536),
        Split(64, stages=2, experts=16, replicas=2), Split(16, tp=4),
    ),
    "llama-70b-like": lambda: (Model(80, 8192, 64, 8, 128, 28672, 128256), Split(64, replicas=2), Split(8, tp=8)),
    "tiny-moe": lambda: (
        Model(4, 64, 4, 2, 16, 128, 256, 8, 32), Split(8, stages=2, experts=2, replicas=2), Split(4, tp=2),
    ),
}  # fmt: skip


_row_major = cache(link.row_major)


def side(ranks: int, make: Callable[[int], Layout]) -> Side:
    """All ranks, one after the other."""
    builder = SideBuilder()
    for rank in range(ranks):
        found = make(rank)
        builder.add(rank, found.tensors, found.placements, found.storages)
    return builder.finish()


def _cut(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of part ``index`` of ``size`` in chunks as torch makes them."""
    step = -(-size // parts)
    start = min(size, index * step)
    return start, min(step, size - start)


def _stage(model: Model, split: Split, name: str) -> int:
    if ".layers." not in name:
        return 0 if "embed" in name else split.stages - 1
    return int(name.split(".")[2]) * split.stages // model.layers


def trainer_rank(model: Model, split: Split, table: dict[str, TensorSpec], rank: int) -> Layout:
    """FSDP over the ranks of a pipeline stage along rows; experts split first, then sharded over the ranks that share
    them. Storages are padded to whole rows, as FSDP2 does.

    Raises InputError when the numbers do not divide.
    """
    per_stage = split.ranks // split.stages
    shards = per_stage // split.replicas
    if shards * split.stages * split.replicas != split.ranks or shards % split.experts:
        raise InputError("ranks do not divide", field="split", found=split, expected="stages * replicas * shards")
    stage, shard = rank // per_stage, rank % per_stage % shards
    expert_shards = shards // split.experts
    placements, storages = [], {}
    dense = [(name, shape, shards, shard) for name, shape, _ in model.rows() if _stage(model, split, name) == stage]
    experts = range(*_range(model.experts, split.experts, shard // expert_shards))
    layers = range(-(-stage * model.layers // split.stages), -(-(stage + 1) * model.layers // split.stages))
    mine = ((name, shape, expert_shards, shard % expert_shards)
            for _, name, shape in model.expert_rows(layers, experts))  # fmt: skip
    for source in (dense, mine):
        for name, shape, parts, index in source:
            start, rows = _cut(shape[0], parts, index)
            if not rows:
                continue
            inner = prod(shape[1:])
            storages[name] = StorageSpec(rows * inner, model.dtype)
            placements.append(Placement(name, Box.run(start * inner, rows * inner), name, Box.run(0, rows * inner)))
    return _layout(table, placements, storages)


def _range(size: int, parts: int, index: int) -> tuple[int, int]:
    start, count = _cut(size, parts, index)
    return start, start + count


def engine_rank(model: Model, split: Split, table: dict[str, TensorSpec], rank: int) -> Layout:
    """Dense tensors split ``tp`` ways with qkv and gate_up fused, replicated in each group; experts over all ranks,
    stacked and with gate and up fused."""
    tp, at = split.tp, rank % split.tp
    placements: list[Placement] = []
    sizes: dict[str, int] = {}

    def put(name: str, shape: tuple[int, ...], how: str, storage: str) -> None:
        whole = _row_major(shape)
        coords = whole
        if how:
            dim = 0 if how == "rows" else 1
            parts = tp if shape[dim] % tp == 0 else 1  # KV heads fewer than ranks are replicated
            start, count = _cut(shape[dim], parts, at % parts)
            local = tuple(count if d == dim else n for d, n in enumerate(shape))
            coords = Box(start * whole.strides[dim], local, whole.strides)
        base = sizes.get(storage, 0)
        inner = _row_major(coords.sizes)
        placements.append(Placement(name, coords, storage, Box(base, coords.sizes, inner.strides)))
        sizes[storage] = base + coords.count

    for name, shape, how in model.rows():
        put(name, shape, how, _fused(name))
    wanted = range(*_range(model.experts, split.ranks, rank))
    for stack, name, shape in model.expert_rows(range(model.layers), wanted):
        put(name, shape, "", f"{stack}{'w2' if 'down' in name else 'w13'}_weight")
    return _layout(table, placements, {key: StorageSpec(n, model.dtype) for key, n in sizes.items()})


def _fused(name: str) -> str:
    for pieces, fused in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        for piece in pieces:
            if f".{piece}." in name:
                return name.replace(piece, fused)
    return name


def _layout(table: dict[str, TensorSpec], placements: list[Placement], storages: dict[str, StorageSpec]) -> Layout:
    return Layout(tuple({p.tensor: table[p.tensor] for p in placements}.values()), tuple(placements), storages)
