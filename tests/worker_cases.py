"""A parallel engine in miniature: a model with fused, padded, sliced and tied parameters, and its own loader.

Owns what the tests of adapters/engines/worker run against, ranks in one process. No engine of the real world is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weight_sync.adapters.engines.worker.core import WorkerCore
from weight_sync.adapters.engines.worker.remote import RemoteEngine
from weight_sync.adapters.engines.worker.wire import Reply
from weight_sync.config import load
from weight_sync.errors import DeadlineError
from weight_sync.ports import PauseMode

ROWS, WIDTH, VOCABULARY, PADDED = 8, 6, 10, 16


def checkpoint(folder: Path, seed: int = 0) -> Path:
    """q, k and v of one attention, a norm, an embedding that is not as tall as the engine wants it, and a stray."""
    dice = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=dice).to(torch.bfloat16)

    folder.mkdir(parents=True)
    save_file(
        {
            "embed.weight": some(VOCABULARY, WIDTH), "attn.q": some(ROWS, WIDTH), "attn.k": some(ROWS // 2, WIDTH),
            "attn.v": some(ROWS // 2, WIDTH), "attn.o": some(WIDTH, ROWS), "norm.weight": some(WIDTH),
            "rotary.inv_freq": some(3),
        },
        folder / "model.safetensors",
    )  # fmt: skip
    return folder


class Attention(torch.nn.Module):
    """One fused parameter of q, k and v, of which a rank has its rows of each, and its columns of o."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.zeros(2 * ROWS // ranks, WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.o = torch.nn.Parameter(torch.zeros(WIDTH, ROWS // ranks, dtype=torch.bfloat16), requires_grad=False)


class Norm(torch.nn.Module):
    """Every rank has all of it."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


class Model(torch.nn.Module):
    """The part of one rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        self.embed, self.attn, self.norm = Norm(PADDED // ranks, WIDTH), Attention(ranks), Norm(WIDTH)
        self.head = self.embed  # tied

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As engines do: slices, pads, fuses; skips what it computes itself."""
        named = dict(self.named_parameters())
        for name, tensor in tensors:
            if name.startswith("attn.") and name != "attn.o":
                part = name[-1]
                start = {"q": 0, "k": ROWS, "v": ROWS + ROWS // 2}[part] // self.ranks
                count = tensor.shape[0] // self.ranks
                named["attn.qkv"].data.narrow(0, start, count).copy_(tensor.narrow(0, self.rank * count, count))
            elif name == "attn.o":
                count = ROWS // self.ranks
                named["attn.o"].data.copy_(tensor.narrow(1, self.rank * count, count))
            elif name == "embed.weight":
                height = PADDED // self.ranks
                part_of = tensor[self.rank * height : (self.rank + 1) * height]
                named[name].data[: len(part_of)].copy_(part_of)
                named[name].data[len(part_of) :].fill_(0)
            elif name == "norm.weight":
                named[name].data.copy_(tensor)


class Host:
    """Implements the core's host; ``pack`` lays the attention's output projection out in a way of its own."""

    def __init__(self, folder: Path, rank: int = 0, ranks: int = 1, pack: bool = False) -> None:
        from weight_sync.checkpoint import Checkpoint

        self.rank, self.world_size, self.pack = rank, ranks, pack
        self._folder, self._model = folder, Model(rank, ranks)
        self.reloads = 0
        self.broken = False
        names = Checkpoint(folder).table
        from safetensors.torch import load_file

        file = load_file(folder / "model.safetensors")
        self._model.load_weights((spec.name, file[spec.name]) for spec in names)
        self._pack()

    def _pack(self) -> None:
        if self.pack:
            self._model.attn.o.data = self._model.attn.o.data.flip(0).contiguous()

    def model(self) -> torch.nn.Module:
        return self._model

    def load(self, model: Any, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        model.load_weights(tensors)

    def originals(self, module: torch.nn.Module) -> Mapping[str, torch.Tensor]:
        return {}

    def packed(self, module: torch.nn.Module) -> str:
        return "laid out anew" if self.pack and module is self._model.attn else ""

    def reload(self, modules: Iterable[torch.nn.Module], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self.broken:
            self.broken = False
            raise RuntimeError("no")
        self.reloads += 1
        self._model.load_weights(tensors)
        self._pack()

    def checkpoint(self) -> Path | None:
        return self._folder

    def facts(self) -> dict[str, str]:
        return {"engine_version": "1", "torch": str(torch.__version__), "dtype": "bfloat16"}


class LocalControl:
    """All ranks in this process. ``lose``: the verb whose answer gets lost, once."""

    def __init__(self, hosts: list[Host]) -> None:
        self.hosts = hosts
        self.cores = [WorkerCore(host) for host in hosts]
        self.said: list[str] = []
        self.is_open, self.clears = True, 0
        self.lose = ""

    def ranks(self, verb: str, arguments: Mapping[str, Any], limit: float) -> list[Reply]:
        replies = [core.call(verb, arguments) for core in self.cores]
        if verb == self.lose:
            self.lose = ""
            raise DeadlineError("lost")
        return replies

    def pause(self, mode: PauseMode, limit: float) -> None:
        self.is_open = False

    def resume(self, limit: float) -> None:
        self.is_open = True

    def clear(self, limit: float) -> None:
        self.clears += 1

    def announce(self, text: str, limit: float) -> None:
        self.said.append(text)

    def alive(self, limit: float) -> bool:
        return True

    def close(self) -> None:
        pass


def engine_of(folder: Path, ranks: int = 1, pack: bool = False, **keys: Any) -> tuple[RemoteEngine, LocalControl]:
    """An engine that holds a checkpoint, and the control that reaches it."""
    control = LocalControl([Host(folder, rank, ranks, pack) for rank in range(ranks)])
    return RemoteEngine(control, load({"uri": "unused", "timeout_s": 30, "fence_s": 30, **keys}), "test"), control
