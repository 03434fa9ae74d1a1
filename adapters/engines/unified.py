"""One forward pass for trainer and rollout, whose bits do not depend on what else is computed: the profile ``unified``.

Owns how a causal language model of transformers computes under it. Owns no sampling (decoder.py) and no weight: the
module's parameters stay where they are, and an engine updates them in place as ever.

A kernel's bits may depend on the shape that it is called with: on how many rows share a matrix product, on how far a
cache is filled, on how many threads share a sum. So nothing here depends on the call:

- rows (tokens) of all sequences lie in one line, and everything that maps a row to a row (linears, norms, MLPs, routers,
  experts) sees tiles of exactly ``ROWS`` of them, the last one padded with zeros. Which rows share a tile does not
  matter, nor where in it a row lies; `Unified` proves that for this machine's kernels when it is made.
- attention sees one tile of ``ROWS`` queries of one sequence, cut at multiples of ``ROWS``, and as many keys as its last
  query has before it, padded to a multiple of ``KEYS``: a query meets the same shape whether it is part of a long prompt
  or the only new token.
- each kernel runs on one thread, so that no sum is split by the number of threads. Other threads may compute beside it.
- an expert sees its tokens of a tile, padded to ``ROWS``; contributions are added in the order of the experts.

Not supported, and refused: attention with sinks, soft caps or a sliding window; rotary embeddings that depend on the
length; more than one shard of tensor parallelism.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from weight_sync.contract import process_contract
from weight_sync.dtypes import dtype_of_torch
from weight_sync.errors import EngineError, InputError
from weight_sync.proto.v1 import contract_pb2

__all__ = ["KEYS", "NAME", "ROWS", "Past", "Unified"]

ROWS = 16
"""Rows of a tile."""

KEYS = 64
"""Keys of attention are padded to a multiple of this; a multiple of ROWS."""

NAME = "weight_sync_unified"
"""Of the attention, as transformers knows it."""

_ORDER = f"one thread, tiles of {ROWS} rows, {KEYS} keys"
_FIXED_ROTARY = {"default", "linear", "llama3", "yarn", "proportional"}


# --- tiles ------------------------------------------------------------------------------------------------------------


def in_tiles(function: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """``function`` of (1, ROWS, ...) -> (1, ROWS, ...), over rows (1, n, ...) -> (1, n, ...)."""
    count = rows.shape[1]
    parts = []
    for at in range(0, count, ROWS):
        tile = rows[:, at : at + ROWS]
        short = ROWS - tile.shape[1]
        if short:
            tile = torch.cat([tile, tile.new_zeros((1, short, *tile.shape[2:]))], 1)
        out = function(tile.contiguous())
        parts.append(out[:, : ROWS - short] if short else out)
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class _PaddedLinears(TorchFunctionMode):
    """Linears on fewer than ROWS rows, as experts call them, are given zeros to make up for it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and args[0].shape[0] != ROWS and args[0].dim() == 2:
            rows = args[0]
            if rows.shape[0] > ROWS:
                raise EngineError("an expert got more rows than a tile has", field="rows", found=rows.shape[0],
                                  expected=f"at most {ROWS}", do="use the profile native for this model")  # fmt: skip
            full = torch.cat([rows, rows.new_zeros(ROWS - rows.shape[0], rows.shape[1])])
            return func(full, *args[1:], **(kwargs or {}))[: rows.shape[0]]
        return func(*args, **(kwargs or {}))


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- sequences --------------------------------------------------------------------------------------------------------


@dataclass
class Past:
    """Keys and values of one sequence, by layer: (key heads, room, head dim), room a multiple of KEYS, zeros at the end.

    Attributes:
        length: tokens that it holds, once a forward pass is over.
    """

    length: int = 0
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def copy(self) -> Past:
        """One that goes its own way."""
        return Past(self.length, {layer: (k.clone(), v.clone()) for layer, (k, v) in self.layers.items()})

    def extended(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """After ``keys`` and ``values``, (key heads, new, head dim), are written behind the old ones."""
        end = self.length + keys.shape[1]
        kept = self.layers.get(layer)
        if kept is None:
            kept = (_padded(keys[:, :0], end), _padded(values[:, :0], end))
        elif kept[0].shape[1] < end:
            kept = (_padded(kept[0], end), _padded(kept[1], end))
        kept[0][:, self.length : end] = keys
        kept[1][:, self.length : end] = values
        self.layers[layer] = kept
        return kept


@dataclass
class _Plan:
    """The sequences of one forward pass: how many rows each has, and what came before them."""

    counts: list[int]
    pasts: list[Past] | None


_now = threading.local()


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def _padded(tensor: torch.Tensor, least: int) -> torch.Tensor:
    """(heads, n, d) with zeros behind up to the next multiple of KEYS from ``least``."""
    room = _round_up(least, KEYS)
    return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], room - tensor.shape[1], tensor.shape[2])], 1)


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers calls it: query (1, heads, rows, d), key and value (1, key heads, rows, d)."""
    plan: _Plan | None = getattr(_now, "plan", None)
    if plan is None:
        raise InputError("this model computes under the profile unified", field="forward",
                         do="call Unified.logprobs or Unified.logits, not the model")  # fmt: skip
    refused = [name for name in ("softcap", "s_aux", "sliding_window") if options.get(name) is not None]
    if refused or dropout:
        raise EngineError("attention of a kind that unified does not compute", field="attention",
                          found=", ".join(refused) or "dropout", do="use the profile native for this model")  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    parts, at = [], 0
    for index, count in enumerate(plan.counts):
        rows = slice(at, at + count)
        q, k, v = query[0, :, rows], key[0, :, rows], value[0, :, rows]
        if plan.pasts is None:
            begin, k, v = 0, _padded(k, count), _padded(v, count)
        else:
            begin = plan.pasts[index].length
            k, v = plan.pasts[index].extended(module.layer_idx, k, v)
        parts.append(_sequence(q, k, v, begin, scale))
        at += count
    return torch.cat(parts, 1).transpose(0, 1)[None].contiguous(), None


def _sequence(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, begin: int, scale: float) -> torch.Tensor:
    """(heads, n, d): queries at positions from ``begin`` on, of one sequence, tile by tile."""
    count = q.shape[1]
    parts, at = [], 0
    while at < count:
        first = begin + at
        offset = first % ROWS  # of the first query in its tile: tiles are cut by position
        taken = min(ROWS - offset, count - at)
        tile = functional.pad(q[:, at : at + taken], (0, 0, offset, ROWS - offset - taken))
        room = _round_up(first - offset + ROWS, KEYS)
        part = _tile(tile, k[:, :room].contiguous(), v[:, :room].contiguous(), first - offset, scale)
        parts.append(part[:, offset : offset + taken])
        at += taken
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, scale: float) -> torch.Tensor:
    """One tile of queries at ``position``, (heads, ROWS, d), against (key heads, room, d)."""
    heads, rows, dim = q.shape
    room = k.shape[1]
    grouped = q.reshape(k.shape[0], heads // k.shape[0] * rows, dim)  # queries of heads that share keys
    score = torch.bmm(grouped, k.transpose(1, 2)).float() * scale
    at = torch.arange(position, position + rows, device=q.device)
    hidden = torch.arange(room, device=q.device)[None] > at[:, None]
    score = score.view(k.shape[0], -1, rows, room).masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
    return torch.bmm(score.view(k.shape[0], -1, room), v).view(heads, rows, dim)


# --- the model --------------------------------------------------------------------------------------------------------


class Unified:
    """A causal language model that computes the same bits whatever shares a call with a token.

    Args:
        model: of transformers, on a CPU or a GPU; changed in place: it must be called through this class from now on.

    Raises EngineError when the model has parts that are not supported, or when this machine's kernels give a row other
    bits for other neighbours.
    """

    def __init__(self, model: Any) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.model = model.eval()
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        _check_rotary(model.config)
        model.set_attn_implementation(NAME)
        if getattr(model.config, "_experts_implementation", None) is not None:
            model.config._experts_implementation = "eager"
        blocks, rotary = _parts(model)
        if not blocks:
            raise EngineError("no attention was found in the model", field="model", found=type(model).__name__,
                              do="use the profile native for this model")  # fmt: skip
        for block in blocks:
            _tile_module(block)
        for module in rotary:
            _tile_rotary(module)
        self._prove()

    # --- what callers ask ---

    def logits(
        self, sequences: Sequence[Sequence[int]], pasts: list[Past] | None = None, last: bool = False
    ) -> list[torch.Tensor]:
        """Per sequence (tokens, vocabulary), or (1, vocabulary) of the last token.

        Args:
            pasts: what came before each sequence, extended by it; None for sequences from their beginning. With them
                nothing can be differentiated.
        """
        counts = [len(tokens) for tokens in sequences]
        if not counts or not all(counts):
            raise InputError("nothing to compute", field="sequences", found=counts, expected="non-empty sequences")
        device = next(self.model.parameters()).device
        begins = [0] * len(counts) if pasts is None else [past.length for past in pasts]
        ids = torch.tensor([[token for tokens in sequences for token in tokens]], device=device)
        places = torch.tensor([[b + i for b, n in zip(begins, counts, strict=True) for i in range(n)]], device=device)
        ends = torch.tensor(counts, device=device).cumsum(0) - 1
        with self._planned(_Plan(counts, pasts)):
            out = self.model(input_ids=ids, position_ids=places, use_cache=False,
                             **({"logits_to_keep": ends} if last else {})).logits[0]  # fmt: skip
        for past, count in zip(pasts or (), counts, strict=bool(pasts)):
            past.length += count
        return list(out.split([1] * len(counts) if last else counts))

    def logprobs(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[torch.Tensor]:
        """Per sequence (tokens - 1,) float32: of each token after the ones before it. Differentiable."""
        if temperature <= 0 or any(len(tokens) < 2 for tokens in sequences):
            raise InputError("nothing to score", field="sequences, temperature",
                             expected="sequences of 2 or more tokens, a temperature above 0")  # fmt: skip
        out = []
        for tokens, logits in zip(sequences, self.logits(sequences), strict=True):
            chosen = torch.tensor(tokens[1:], device=logits.device)
            out.append(self.log_softmax(logits[:-1], temperature).gather(-1, chosen[:, None])[:, 0])
        return out

    def log_softmax(self, logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """(n, vocabulary) float32, in the same tiles."""
        with _one_thread():
            return in_tiles(lambda tile: torch.log_softmax(tile.float() / temperature, -1), logits[None])[0]

    def contract(self, **known: Any) -> contract_pb2.ExecutionContract:
        """How it computes: the same for a trainer and an engine of the same libraries on the same kind of processor."""
        import transformers

        largest = max(self.model.parameters(), key=lambda parameter: parameter.nbytes)
        fields: dict[str, Any] = {
            "served_format": dtype_of_torch(largest.dtype).name.lower(), "attention_backend": NAME,
            "reduction_order": _ORDER, "accumulation_dtype": "float32", "batch_invariant": True, "deterministic": True,
            "tensor_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1, "engine": "transformers",
            "engine_version": transformers.__version__,
        }  # fmt: skip
        return process_contract(self.model, **{**fields, **known})

    @contextmanager
    def _planned(self, plan: _Plan) -> Iterator[None]:
        _now.plan = plan
        try:
            with _one_thread():
                yield
        finally:
            _now.plan = None

    # --- proof ---

    def _prove(self) -> None:
        """Every shape of matrix product gives a row the same bits in another place of the tile, and beside zeros."""
        seen = set()
        dice = torch.Generator().manual_seed(0)
        order = torch.randperm(ROWS, generator=dice)
        for name, parameter in self.model.named_parameters():
            weight = parameter.detach()
            matrix = weight[0] if weight.dim() == 3 else weight
            key = (tuple(matrix.shape), matrix.dtype)
            if matrix.dim() != 2 or not matrix.is_floating_point() or key in seen or "embed" in name:
                continue
            seen.add(key)
            rows = torch.randn(ROWS, matrix.shape[1], generator=dice).to(matrix)
            with torch.no_grad(), _one_thread():
                full = functional.linear(rows, matrix)
                moved = functional.linear(rows[order], matrix)
                alone = torch.cat([functional.linear(_only(rows, i), matrix)[:1] for i in range(ROWS)])
            if not (torch.equal(full[order], moved) and torch.equal(full, alone)):
                raise EngineError("this machine's matrix product gives a row other bits in other company", field=name,
                                  found=f"{matrix.dtype} {list(matrix.shape)}",
                                  do="use the profile native, or another dtype")  # fmt: skip


def _only(rows: torch.Tensor, index: int) -> torch.Tensor:
    """Row ``index`` in the first place, zeros elsewhere."""
    out = torch.zeros_like(rows)
    out[0] = rows[index]
    return out


def _check_rotary(config: Any) -> None:
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", "default") if isinstance(scaling, dict) else "default"
    if kind not in _FIXED_ROTARY:
        raise EngineError("rotary embeddings that depend on the length", field="rope_type", found=kind,
                          expected=", ".join(sorted(_FIXED_ROTARY)), do="use the profile native for this model")  # fmt: skip


def _is_attention(module: torch.nn.Module) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "is_causal")


def _parts(model: torch.nn.Module) -> tuple[list[torch.nn.Module], list[torch.nn.Module]]:
    """The largest modules that map rows to rows, and rotary embeddings."""
    blocks: list[torch.nn.Module] = []
    rotary: list[torch.nn.Module] = []
    found = False

    def visit(module: torch.nn.Module) -> None:
        nonlocal found
        for child in module.children():
            if _is_attention(child):
                found = True
                visit(child)
            elif isinstance(child, torch.nn.ModuleList) or any(map(_is_attention, child.modules())):
                visit(child)
            elif "rotary" in type(child).__name__.lower():
                rotary.append(child)
            elif not isinstance(child, torch.nn.Embedding) and next(child.parameters(), None) is not None:
                blocks.append(child)

    visit(model)
    return (blocks if found else []), rotary


def _tile_module(module: Any) -> None:
    """From now on it is called with tiles; rows are the second dimension of what it is given."""
    original = module.forward
    loose = any(p.dim() == 3 for p in module.parameters()) or any(
        isinstance(inner, torch.nn.ModuleList) for inner in module.modules()
    )

    def one(tile: torch.Tensor) -> torch.Tensor:
        if loose:
            with _PaddedLinears():
                out = original(tile)
        else:
            out = original(tile)
        if not isinstance(out, torch.Tensor) or out.shape[:2] != (1, ROWS):
            raise EngineError("a part of the model does not map rows to rows", field=type(module).__name__,
                              do="use the profile native for this model")  # fmt: skip
        return out

    module.forward = lambda rows: in_tiles(one, rows)


def _tile_rotary(module: Any) -> None:
    original = module.forward

    def tiled(like: torch.Tensor, position_ids: torch.Tensor, **options: Any) -> Any:
        both = in_tiles(lambda places: torch.stack(original(like, places, **options), -1), position_ids)
        return both[..., 0], both[..., 1]

    module.forward = tiled
