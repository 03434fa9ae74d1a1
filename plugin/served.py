"""ServedView: what this rank publishes of what the engine would load.

Owns the match of a host's weights with the table of served tensors, and reading their bits piece by piece. Owns no
base to diff against (snapshot.py) and no sending (publisher.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from weight_sync.consensus import together
from weight_sync.dtypes import dtype_of, dtype_of_torch
from weight_sync.errors import LayoutError, TensorError, WeightSyncError
from weight_sync.layout.agree import agree_on_owners
from weight_sync.layout.box import Box
from weight_sync.layout.learn import learn_module, learn_named
from weight_sync.layout.placement import Layout, Placement
from weight_sync.layout.storage import check_storages, flat_storage, in_memory, local_tensor
from weight_sync.ports import Group
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec, sorted_table

if TYPE_CHECKING:
    import torch

    from weight_sync.projection import Projection

    Source: TypeAlias = (
        "torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | HeldTensors"
    )
    Named: TypeAlias = "torch.nn.Module | Mapping[str, torch.Tensor] | HeldTensors"

__all__ = ["HeldTensors", "ServedPiece", "ServedView", "learn_view", "named_source", "storages_of", "view_fingerprint"]

_FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class HeldTensors:
    """Weights under names of a host's own, which are not those of the checkpoint, and how they become it.

    Attributes:
        tensors: what this rank holds, by any keys; the storages of the layout are ``flat_storage`` of each, same keys.
        learn: makes this rank's layout of the table given. Called when the keys, shapes or dtypes change, on all ranks
            alike. Raises LayoutError when names or shapes differ, listing both sides.
    """

    tensors: Mapping[str, torch.Tensor]
    learn: Callable[[Sequence[TensorSpec]], Layout]


@dataclass(frozen=True)
class ServedPiece:
    """One box of one served tensor, and where this rank holds it."""

    spec: TensorSpec
    placement: Placement

    @property
    def coords(self) -> Box:
        """In checkpoint coordinates."""
        return self.placement.coords

    @property
    def key(self) -> tuple[TensorSpec, Box]:
        """What the snapshot files it under."""
        return self.spec, self.coords


@dataclass(frozen=True)
class ServedView:
    """The pieces that this rank owns.

    Attributes:
        table: all served tensors of the version, sorted by name; equal on every rank.
        pieces: of this rank, by table order and coordinate.
        layout: all that this rank holds, owned or not.
        fingerprint: of the source that it was learnt from.
        projection: makes what the pieces are read from; None when they are read from the trainer's own storages.
    """

    table: tuple[TensorSpec, ...]
    pieces: tuple[ServedPiece, ...]
    layout: Layout
    fingerprint: bytes = b""
    projection: Projection | None = None

    def check(self, storages: Mapping[str, torch.Tensor]) -> None:
        """Raises LayoutError when a storage of the trainer is not what was learnt."""
        check_storages(self.layout if self.projection is None else self.projection.source.layout, storages)


def named_source(source: Source) -> torch.nn.Module | dict[str, torch.Tensor] | HeldTensors:
    """A module and HeldTensors as they are, anything else as a dict.

    Raises TensorError on a name that comes twice or is no tensor.
    """
    import torch

    if isinstance(source, torch.nn.Module | HeldTensors):
        return source
    if not isinstance(source, Mapping | Iterable) or isinstance(source, str | bytes | torch.Tensor):
        raise TensorError(
            "not something to publish", field="source", found=type(source).__name__,
            expected="a torch module, a mapping of names to tensors, or pairs of them",
        )  # fmt: skip
    pairs = source.items() if isinstance(source, Mapping) else source
    named: dict[str, torch.Tensor] = {}
    for pair in pairs:
        name, tensor = pair if isinstance(pair, tuple) and len(pair) == 2 else (pair, None)
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TensorError(
                "not a named tensor", field=repr(name), found=f"{type(name).__name__} and {type(tensor).__name__}",
                expected="pairs of str and torch.Tensor",
            )  # fmt: skip
        if name in named:
            raise TensorError("tensor is offered twice", field="name", found=name, do="publish each tensor once")
        named[name] = tensor
    return named


def view_fingerprint(source: Named, cast: bool) -> bytes:
    """Changes when names, shapes, dtypes, shardings, memory order or ties do: then the view is learnt again."""
    import hashlib

    hasher = hashlib.blake2b(bytes([cast]), digest_size=16)
    places: dict[tuple[int, int], int] = {}
    for name, tensor in _tensors_of(source).items():
        local = local_tensor(tensor)
        split = (tuple(getattr(tensor, "placements", ())), str(getattr(tensor, "device_mesh", "")))
        tied = places.setdefault((local.data_ptr(), local.numel()), len(places)) if local.numel() else -1
        facts = (name, tuple(tensor.shape), tensor.dtype, split, local.shape, local.stride(), tied)
        hasher.update(repr(facts).encode("utf-8", "replace"))
    return hasher.digest()


def _tensors_of(source: Named) -> Mapping[str, torch.Tensor]:
    if isinstance(source, HeldTensors):
        return source.tensors
    return source if isinstance(source, Mapping) else in_memory(source)


def storages_of(source: Named) -> dict[str, torch.Tensor]:
    """The flat storages as they lie now. Raises TensorError for a tensor whose bits do not lie in memory as they are."""
    import torch

    out: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors_of(source).items():
        odd = [fact for fact in ("is_meta", "is_quantized", "is_sparse", "is_nested") if getattr(tensor, fact, False)]
        if odd or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            raise TensorError(
                "tensor has no plain bits", field=name, found=", ".join(odd) or f"{tensor.layout}, a lazy view",
                expected="a dense tensor that holds its values", do="materialise it before publishing",
            )  # fmt: skip
        out[name] = flat_storage(tensor)
    return out


def learn_view(
    source: Named,
    base: Sequence[TensorSpec],
    group: Group,
    cast: bool,
    floats: str = "",
) -> ServedView:
    """Learns what this rank publishes; a collective call of all ranks.

    Args:
        base: table of the version before (of the checkpoint for a model); empty when there is none.
        cast: float tensors are served in the dtype that ``base`` lists under their name (fp32 masters as bf16).
        floats: dtype of float tensors that ``base`` does not list; "" for their own.

    A module must have the tensors of ``base``, under the names that its host saves; named tensors may be others.
    HeldTensors need a ``base`` and have its tensors.

    Raises LayoutError or TensorError, on every rank when one of them fails.
    """
    table = tuple(base)
    if not base and isinstance(source, HeldTensors):
        raise TensorError("there is no table of checkpoint tensors to learn against", field="base",
                          do="open the publisher with base, the checkpoint that engines boot from")  # fmt: skip
    if base and not cast and not isinstance(source, Mapping):
        raise TensorError("a module is served in the dtypes of the version before", field="cast", found=cast,
                          expected=True, do="publish its tensors by name to change dtypes")  # fmt: skip
    if isinstance(source, Mapping) or not base:
        table = _joint_table(source, base, group, cast, floats)
    layout = _agreed_layout(source, table, group)
    owned = set(agree_on_owners(group, layout).owned)
    assert isinstance(layout, Layout)  # else agree_on_owners has raised it
    by_name = {spec.name: spec for spec in layout.tensors}
    pieces = [
        ServedPiece(by_name[name], placement)
        for name in sorted(owned)
        for placement in layout.by_tensor[name]
        if placement.coords.count
    ]
    return ServedView(layout.tensors, tuple(pieces), layout, view_fingerprint(source, cast))


def _agreed_layout(source: Named, table: Sequence[TensorSpec], group: Group) -> Layout | WeightSyncError:
    """This rank's layout, or why it has none, for the other ranks wait to be told."""
    try:
        if isinstance(source, HeldTensors):
            return source.learn(table)
        if isinstance(source, Mapping):
            return learn_named(source, table, partial=group.size > 1)
        return learn_module(source, table, partial=group.size > 1)
    except Exception as error:
        if group.size == 1:
            raise
        return error if isinstance(error, WeightSyncError) else LayoutError("cannot learn", found=repr(error))


def _joint_table(
    source: Named, base: Sequence[TensorSpec], group: Group, cast: bool, floats: str
) -> tuple[TensorSpec, ...]:
    """The union of what the ranks offer, with the dtypes in which it is served."""
    data = together(group, lambda: _offered(source, base, cast, floats), _union)
    return tuple(TensorSpec.from_proto(entry.spec) for entry in manifest_pb2.ViewManifest.FromString(data).tensors)


def _offered(source: Named, base: Sequence[TensorSpec], cast: bool, floats: str) -> bytes:
    known = {spec.name: spec for spec in base}
    mine = manifest_pb2.ViewManifest()
    seen: set[object] = set()
    for name, tensor in _tensors_of(source).items():
        # a model's tied weights are one tensor; named tensors are what the caller says they are
        tied = (local_tensor(tensor).data_ptr(), tuple(tensor.shape))
        if not isinstance(source, Mapping) and tensor.numel() and tied in seen:
            continue
        seen.add(tied)
        try:
            dtype = dtype_of_torch(tensor.dtype).name
        except TensorError as error:
            raise TensorError(error.what, field=name, found=error.found, do=error.do) from error
        before = known.get(name)
        if before is not None and cast and dtype in _FLOATS and before.dtype in _FLOATS:
            dtype = before.dtype
        elif floats and dtype in _FLOATS:
            dtype = floats
        shape = tuple(tensor.shape)
        if dtype_of(dtype).bits < 8:  # torch counts bytes, safetensors counts codes
            shape = (*shape[:-1], shape[-1] * (8 // dtype_of(dtype).bits))
        code_bits = before.code_bits if before is not None and before.dtype == dtype else 0
        mine.tensors.add(spec=TensorSpec(name, dtype, shape, code_bits).to_proto())
    return mine.SerializeToString()


def _union(parts: Sequence[bytes]) -> bytes:
    found: dict[str, common_pb2.TensorSpec] = {}
    for part in parts:
        for entry in manifest_pb2.ViewManifest.FromString(part).tensors:
            other = found.setdefault(entry.spec.name, entry.spec)
            if other != entry.spec:
                raise TensorError("ranks offer different tensors of one name", field=entry.spec.name,
                                  found=_spelled(entry.spec), expected=_spelled(other),
                                  do="offer each tensor with one dtype and shape on all ranks")  # fmt: skip
    table = sorted_table(TensorSpec.from_proto(spec) for spec in found.values())
    return manifest_pb2.ViewManifest(
        tensors=[manifest_pb2.TensorEntry(spec=spec.to_proto()) for spec in table]
    ).SerializeToString()


def _spelled(spec: common_pb2.TensorSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"


def read_bits(piece: ServedPiece, storage: torch.Tensor, start: int, stop: int) -> npt.NDArray[Any]:
    """Elements [start, stop) of the piece's enumeration as (stop - start,) unsigned of the served width, contiguous.

    Not copied when the storage is a CPU tensor of the served dtype and the piece is a run.
    """
    some = read_torch(piece, storage, start, stop)
    return bits_of(some.cpu() if some.device.type != "cpu" else some)


def read_torch(piece: ServedPiece, storage: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The same on the storage's own device, in the served dtype, 1-d and contiguous."""
    place = piece.placement.place
    if place.is_run:
        some = storage.narrow(0, place.offset + start, stop - start)
    else:
        some = _strided(storage, place, start, stop)
    for name in piece.placement.casts:
        some = some.to(dtype_of(name).torch)
    return some


def _strided(storage: torch.Tensor, place: Box, start: int, stop: int) -> torch.Tensor:
    """Part of a strided box: whole rows of the outermost dimension, cut to size."""
    whole = storage.as_strided(place.sizes, place.strides, storage.storage_offset() + place.offset)
    if start == 0 and stop == place.count:
        return whole.reshape(-1)
    inner = place.count // place.sizes[0]
    first, last = start // inner, -(-stop // inner)
    rows = whole[first:last].reshape(-1)
    return rows[start - first * inner : stop - first * inner]


def bits_of(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A contiguous CPU tensor's bits as a flat unsigned array, not copied."""
    import torch

    width = tensor.element_size()
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(signed).numpy().view(np.dtype(f"u{width}"))
