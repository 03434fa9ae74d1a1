"""Megatron's shards in checkpoint coordinates, learnt from the host's own gather and conversion.

Owns running slime's iterators, on meta tensors to learn and on the real ones to gather what cannot be learnt. Owns no
architecture: qkv, gate and up, padding, experts and pipeline stages are whatever slime's code does with them.

While learning, collectives of tensors are recorded and not sent; only lists of names cross ranks, as in slime's own sync.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from weight_sync.dtypes import dtype_of
from weight_sync.layout.learn import aliases, fit, learn_named
from weight_sync.layout.placement import Layout, compose, merge
from weight_sync.layout.storage import shard_map
from weight_sync.layout.trace import trace_converter
from weight_sync.tensors import TensorSpec

__all__ = ["GATHERED", "Conversion", "split_paths"]

GATHERED = "gathered/"
"""Prefix of the keys of tensors that were gathered, in front of their checkpoint names."""

_COPIES = {"lm_head.weight"}
"""With tied embeddings, a pipeline stage holds a copy that slime names and the checkpoint does not."""


class Conversion:
    """slime's way from one rank's parameters to checkpoint tensors.

    Args:
        updater: slime's ``UpdateWeightFromDistributed`` (the class), whose iterators gather and convert.
        args: slime's.
        model: its model chunks.
        model_name, quantization_config: as slime hands them to an updater.

    Attributes:
        args: as given.
    """

    def __init__(
        self, updater: Any, args: Any, model: Sequence[Any], model_name: str, quantization_config: Any
    ) -> None:
        self._updater, self.args, self._model = updater, args, model
        self._model_name, self.quantization = model_name, quantization_config
        self._named: Any = sys.modules[updater.__module__].named_params_and_buffers

    def parameters(self) -> dict[str, torch.Tensor]:
        """This rank's parameters as they are, by slime's names, which are the same in all parallel layouts."""
        return dict(self._named(self.args, self._model))

    # --- learning ---

    def learn(self) -> tuple[Layout, dict[str, str]]:
        """(slime's names -> checkpoint, why by name of what could not be learnt), without the host's quantisation.

        Storages of the layout are whole parameters of this rank. Raises UntraceableError.
        """
        held = self.parameters()
        names = {id(tensor): name for name, tensor in held.items()}

        def convert(twins: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            made = {name: _twin(held[name], twin) for name, twin in twins.items()}
            out = self._run([_View(chunk, lambda t: made[names[id(t)]]) for chunk in self._model], None, True)
            return dict(out)

        try:
            with _names_cross():
                layout, refused = trace_converter(convert, held, group_rank=_rank_in)
        finally:
            self._forget()
        return layout, {name: f"slime computes it ({refusal.operation})" for name, refusal in refused.items()}

    # --- gathering ---

    def gather(self, wanted: Callable[[str], bool]) -> dict[str, torch.Tensor]:
        """What slime itself would send of the tensors that are wanted; on ranks that would send. Collective."""
        out = self._run(self._model, self.quantization, None)
        return {name: tensor.detach() for name, tensor in out if wanted(name)}

    def _run(
        self, model: Sequence[Any], quantization: Any, everywhere: bool | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """slime's own updater over ``model``; ``everywhere`` lets every rank convert what it holds."""
        options: dict[str, Any] = {"model_name": self._model_name, "quantization_config": quantization}
        if "is_lora" in inspect.signature(self._updater.__init__).parameters:
            options["is_lora"] = False  # miles
        reader = self._updater(self.args, model, dict, **options)
        reader._is_pp_src_rank = _is_source() if everywhere is None else everywhere
        for chunks in (reader._iter_non_expert_chunks(), reader._iter_expert_chunks()):
            for chunk in chunks:
                yield from chunk

    def _forget(self) -> None:
        """slime pairs some tensors across calls; a meta tensor must not wait there for the next real sync."""
        module = sys.modules.get(self._updater.__module__.rpartition(".update_weight.")[0] + ".megatron_to_hf")
        getattr(module, "_cached_tensors", {}).clear()

    # --- the layout ---

    def copies(self, table: Sequence[TensorSpec]) -> set[str]:
        """Names that slime sends beside the table's, of memory that is served under another name."""
        tied = not getattr(self.args, "untie_embeddings_and_output_weights", True)
        return _COPIES - {spec.name for spec in table} if tied else set()

    def layout(
        self, held: Mapping[str, torch.Tensor], found: Layout, local: Collection[str], table: Sequence[TensorSpec]
    ) -> Layout:
        """This rank's layout of ``held`` (parameters by slime's names, gathered tensors by `GATHERED` ones).

        Raises LayoutError when names or shapes are not the table's, listing both sides.
        """
        own = {name: tensor for name, tensor in held.items() if not name.startswith(GATHERED)}
        gathered = {name.removeprefix(GATHERED): tensor for name, tensor in held.items() if name.startswith(GATHERED)}
        names = set(local) - self.copies(table)
        used = [item for item in found.placements if item.tensor in names]
        kept = {item.tensor for item in used}
        specs = [spec for spec in found.tensors if spec.name in kept]
        mine = fit(merge(specs, used, found.storages), table, aliases(own, {}), partial=True)
        parts = compose(shard_map(own), mine)
        rest = learn_named(gathered, table, partial=True)
        moved = _prefixed(rest)
        return Layout(tuple(table), (*parts.placements, *moved.placements), {**parts.storages, **moved.storages})


def split_paths(
    found: Layout, refused: Mapping[str, str], table: Sequence[TensorSpec], quantises: bool
) -> tuple[set[str], dict[str, str]]:
    """(checkpoint tensors that are published from where they lie, why by name of those that are gathered).

    Where the host quantises, what it would change shows by a dtype that no cast leads to, or by a name of its own.
    """
    specs = {spec.name: spec for spec in found.tensors}
    gathered = dict(refused)
    if quantises:
        for spec in table:
            mine = specs.get(spec.name)
            if mine is not None and (mine.shape != spec.shape or not _casts(mine, spec)):
                gathered[spec.name] = f"slime quantises it to {spec.dtype}"
    return specs.keys() - gathered.keys(), gathered


def _casts(mine: TensorSpec, listed: TensorSpec) -> bool:
    kinds = [dtype_of(spec.dtype) for spec in (mine, listed)]
    return mine.dtype == listed.dtype or all(kind.signed_magnitude and kind.width > 1 for kind in kinds)


def _prefixed(layout: Layout) -> Layout:
    from dataclasses import replace

    placements = tuple(replace(item, storage=GATHERED + item.storage) for item in layout.placements)
    return Layout(layout.tensors, placements, {GATHERED + key: spec for key, spec in layout.storages.items()})


def _is_source() -> bool:
    """slime's rule for who sends: the first of each data- and tensor-parallel group."""
    mpu: Any = sys.modules["megatron.core"].mpu
    first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    return bool(first and mpu.get_tensor_model_parallel_rank() == 0)


def _rank_in(group: Any) -> int:
    return int(dist.ProcessGroup.unbox(group).rank())


def _twin(parameter: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """The meta tensor with the attributes by which Megatron tells how a parameter is split."""
    twin = torch.nn.Parameter(meta, requires_grad=False)
    twin.__dict__.update(parameter.__dict__)
    return twin


class _View:
    """A model chunk whose parameters and buffers are others."""

    def __init__(self, chunk: Any, other: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._chunk, self._other = chunk, other

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As the chunk's."""
        for name, parameter in self._chunk.named_parameters():
            yield name, self._other(parameter)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """As the chunk's; those that slime leaves alone are themselves."""
        for name, buffer in self._chunk.named_buffers():
            try:
                yield name, self._other(buffer)
            except KeyError:
                yield name, buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)


@contextmanager
def _names_cross() -> Iterator[None]:
    """Lists of names are exchanged for real, although everything around them is on meta tensors."""
    original = dist.all_gather_object

    def exchange(*args: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return original(*args, **options)

    dist.all_gather_object = exchange
    try:
        yield
    finally:
        dist.all_gather_object = original
