"""Layouts of models and of named tensors, learnt and checked against the table of the base checkpoint.

Owns the names: how in-memory names become checkpoint names, what may be left out, what is missing. The table (what the
checkpoint's safetensors headers list) decides; a host's converter only proposes. Owns no shard map (layout/storage.py)
and no agreement between ranks (layout/agree.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from weight_sync.dtypes import dtype_of
from weight_sync.errors import LayoutError, UntraceableError
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout, Placement, StorageSpec, compose, merge
from weight_sync.layout.probe import probe_converter
from weight_sync.layout.storage import in_memory, local_tensor, shard_map
from weight_sync.layout.trace import Converter, spec_of, trace_converter
from weight_sync.tensors import TensorSpec

__all__ = ["aliases", "fit", "learn_converter", "learn_module", "learn_named", "name_map"]

_SHOWN = 5


def learn_module(model: torch.nn.Module, table: Sequence[TensorSpec], *, partial: bool = False) -> Layout:
    """This rank's layout of a model: its local storages (see ``local_storages``) in checkpoint coordinates.

    Works on plain modules, whose names are checkpoint names, and on Hugging Face models, whose own reverse conversion
    gives the names. Parameters are plain tensors or DTensors (FSDP2, HSDP, tensor parallel). Needs no other rank and
    moves no weight. ``partial`` allows tensors of the table to be missing, because other ranks have them (pipeline
    stages).

    Raises LayoutError when a name is missing or unknown or a shape differs, listing both sides.
    """
    named = in_memory(model)
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        named.pop(name, None)
    same = aliases(named, getattr(model, "all_tied_weights_keys", None) or {})
    return compose(shard_map(named), name_map(model, named, table, same, partial=partial))


def name_map(
    model: torch.nn.Module,
    sources: Mapping[str, torch.Tensor],
    table: Sequence[TensorSpec],
    same: Mapping[str, str],
    *,
    partial: bool = False,
) -> Layout:
    """The map from a model's in-memory tensors to the table, for hosts that split them in ways of their own.

    ``sources`` give shapes and dtypes of whole in-memory tensors, on meta if need be; ``same`` is as in ``fit``. Does not
    depend on the rank. Raises as ``learn_module``.
    """
    convert = _converter(model)
    names = _identity(sources) if convert is None else learn_converter(convert, sources)
    return fit(names, table, same, partial=partial)


def learn_named(named: Mapping[str, torch.Tensor], table: Sequence[TensorSpec], *, partial: bool = False) -> Layout:
    """This rank's layout of tensors whose names are checkpoint names; the storages are ``flat_storage`` of each.

    ``partial`` allows tensors of the table to be missing, because other ranks have them. Raises as ``learn_module``.
    """
    return compose(shard_map(named), fit(_identity(named), table, aliases(named, {}), partial=partial))


def learn_converter(convert: Converter, sources: Mapping[str, torch.Tensor]) -> Layout:
    """The map from in-memory tensors to the outputs of a converter: traced, and probed where it cannot be traced.

    ``sources`` give shapes and dtypes. Raises UntraceableError when the converter does arithmetic.
    """
    try:
        traced, refused = trace_converter(convert, sources)
    except UntraceableError:
        return probe_converter(convert, sources)
    if not refused:
        return traced
    needed = frozenset().union(*(refusal.sources for refusal in refused.values()))
    try:
        probed = probe_converter(convert, sources, needed)
    except UntraceableError:  # it may only be the meta tensors among the values that it does not take
        probed = probe_converter(convert, sources)
    if missing := refused.keys() - probed.by_name.keys():
        raise UntraceableError(
            "outputs can be neither traced nor probed",
            field=min(missing),
            found=refused[min(missing)].operation,
            do="publish what it makes through a Quantizer",
        )
    probed = probed.restrict(refused)
    return merge(traced.tensors, (*traced.placements, *probed.placements), {**traced.storages, **probed.storages})


def aliases(named: Mapping[str, torch.Tensor], tied: Mapping[str, str]) -> dict[str, str]:
    """For each name the first name of the same memory. ``tied`` adds what a host declares tied (name -> name)."""
    first: dict[Any, str] = {}
    out = {}
    for name, tensor in named.items():
        local = local_tensor(tensor)
        memory = (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride(), tensor.shape)
        out[name] = first.setdefault(memory, name)
    for name, target in tied.items():
        if name in out and target in out:
            root, other = out[target], out[name]
            out = {key: root if value == other else value for key, value in out.items()}
    return out


def fit(found: Layout, table: Sequence[TensorSpec], same: Mapping[str, str], *, partial: bool = False) -> Layout:
    """A name map in the terms of the table: its tensors, its dtypes (casts are added), nothing outside of it.

    ``found`` maps in-memory tensors to what their host would save. ``same`` gives in-memory tensors of the same memory
    one name: a tensor outside of the table is dropped when all its memory is saved under a name of the table, too. The
    result does not depend on the rank as long as ``found`` does not. Raises LayoutError when a name is missing or
    unknown, or when a shape or the kind of dtype differs.
    """
    specs = {spec.name: spec for spec in table}
    if len(specs) != len(table):
        raise LayoutError("the table lists a tensor twice", field="tensors", found=len(table), expected=len(specs))
    served = {same.get(item.storage, item.storage) for item in found.placements if item.tensor in specs}
    outside: dict[str, set[str]] = {spec.name: set() for spec in found.tensors if spec.name not in specs}
    for item in found.placements:
        if item.tensor in outside:
            outside[item.tensor].add(same.get(item.storage, item.storage))
    unknown = [name for name, sources in outside.items() if not sources or not sources <= served]
    missing = [] if partial else [spec.name for spec in table if spec.name not in found.by_name]
    if unknown or missing:
        raise LayoutError(
            "the model's names are not the checkpoint's",
            field="names",
            found=_some(unknown, "not in the checkpoint"),
            expected=_some(missing, "not in the model"),
            do="load the model with from_pretrained from the base checkpoint, or name the checkpoint it came from",
        )
    pairs = [(spec, specs[spec.name]) for spec in found.tensors if spec.name in specs]
    wrong = [(mine, listed) for mine, listed in pairs if mine.shape != listed.shape]
    if wrong:
        raise LayoutError(
            "the model's shapes are not the checkpoint's",
            field="shapes",
            found=_some([f"{s.name} {s.shape}" for s, _ in wrong], "in the model"),
            expected=_some([f"{s.name} {s.shape}" for _, s in wrong], "in the checkpoint"),
        )
    casts = {mine.name: _cast(mine, listed) for mine, listed in pairs if mine.dtype != listed.dtype}
    placements = [
        replace(item, casts=(*item.casts, casts[item.tensor])) if item.tensor in casts else item
        for item in found.placements
        if item.tensor in specs
    ]
    used = {item.storage for item in placements}
    return Layout(tuple(table), tuple(placements), {key: spec for key, spec in found.storages.items() if key in used})


def _some(names: Sequence[str], where: str) -> str:
    return f"{len(names)} {where}" + (f": {', '.join(sorted(names)[:_SHOWN])}" if names else "")


def _cast(found: TensorSpec, wanted: TensorSpec) -> str:
    """The dtype to cast to. Raises LayoutError when a cast is not all it takes."""
    kinds = [(dtype_of(spec.dtype).signed_magnitude, dtype_of(spec.dtype).width > 1) for spec in (found, wanted)]
    if kinds != [(True, True)] * 2:
        raise LayoutError(
            f"tensor {found.name!r} needs more than a cast",
            field="dtype",
            found=found.dtype,
            expected=wanted.dtype,
            do="learn against the unquantised checkpoint and publish through a Quantizer",
        )
    return wanted.dtype


def _identity(named: Mapping[str, torch.Tensor]) -> Layout:
    """The map of a host whose in-memory names are checkpoint names."""
    specs = [spec_of(name, tensor) for name, tensor in named.items()]
    whole = {spec.name: Box.run(0, spec.elements) for spec in specs}
    placements = [Placement(name, box, name, box) for name, box in whole.items()]
    return merge(specs, placements, {spec.name: StorageSpec(spec.elements, spec.dtype) for spec in specs})


def _converter(model: torch.nn.Module) -> Converter | None:
    """The host library's way back from in-memory to checkpoint tensors; None when names are kept."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return None
    loading = sys.modules.get("transformers.core_model_loading")
    revert: Callable[..., Mapping[str, torch.Tensor]] | None = getattr(loading, "revert_weight_conversion", None)
    return None if revert is None else lambda state: revert(model, state)
