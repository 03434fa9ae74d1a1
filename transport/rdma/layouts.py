"""Layouts as messages and as files.

Owns the conversion and its checks; docs/rdma.md describes the file. Owns no meaning of a layout (weight_sync.layout).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from weight_sync.errors import FormatError, InputError, LayoutError
from weight_sync.layout.box import Box
from weight_sync.layout.placement import Layout, Placement, StorageSpec
from weight_sync.proto.v1 import layout_pb2
from weight_sync.tensors import TensorSpec
from weight_sync.transport.rdma.side import Side, SideBuilder

__all__ = ["FORMAT", "from_message", "read_sides", "to_message", "write_file"]

FORMAT = 1
_MOST_DIMENSIONS = 32


def to_message(rank: int, layout: Layout) -> layout_pb2.RankLayout:
    """One rank's layout; the table is cut to the tensors that it holds."""
    message = layout_pb2.RankLayout(rank=rank)
    held = {item.tensor for item in layout.placements}
    tensors = [spec for spec in layout.tensors if spec.name in held]
    numbers = {spec.name: i for i, spec in enumerate(tensors)}
    message.tensors.extend(spec.to_proto() for spec in tensors)
    keys = {key: i for i, key in enumerate(layout.storages)}
    for key, spec in layout.storages.items():
        message.storages.add(key=key, elements=spec.elements, dtype=spec.dtype)
    for item in layout.placements:
        message.placements.add(
            tensor=numbers[item.tensor], storage=keys[item.storage], offset=item.coords.offset,
            sizes=item.coords.sizes, strides=item.coords.strides, place_offset=item.place.offset,
            place_strides=item.place.strides, casts=item.casts,
        )  # fmt: skip
    return message


def from_message(message: layout_pb2.RankLayout) -> Layout:
    """From a message. Raises LayoutError, TensorError or FormatError when it is no layout: it may come from anybody."""
    tensors = tuple(TensorSpec.from_proto(spec) for spec in message.tensors)
    storages = {item.key: StorageSpec(item.elements, item.dtype) for item in message.storages}
    if len(storages) != len(message.storages):
        raise LayoutError("a storage is listed twice", field="storages", found=len(message.storages))
    keys = list(storages)
    placements: list[Placement] = []
    for item in message.placements:
        sizes = tuple(item.sizes)
        if item.tensor >= len(tensors) or item.storage >= len(keys) or len(sizes) > _MOST_DIMENSIONS:
            raise FormatError("placement leads nowhere", field="placements", found=len(placements))
        coords = Box(item.offset, sizes, tuple(item.strides))
        place = Box(item.place_offset, sizes, tuple(item.place_strides))
        name = tensors[item.tensor].name
        placements.append(Placement(name, coords, keys[item.storage], place, tuple(item.casts)))
    return Layout(tensors, tuple(placements), storages)


def write_file(
    path: Path, trainers: Iterable[tuple[int, Layout]], engines: Iterable[tuple[int, Layout]], note: str = ""
) -> None:
    """Writes a layouts file: JSON for a name that ends in ``.json``, else protobuf. Raises InputError."""
    message = layout_pb2.LayoutFile(format=FORMAT, note=note)
    message.trainers.extend(to_message(rank, found) for rank, found in trainers)
    message.engines.extend(to_message(rank, found) for rank, found in engines)
    data = json_format.MessageToJson(message).encode() if path.suffix == ".json" else message.SerializeToString()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise InputError("cannot write the layouts", field=str(path), found=error.strerror) from error


def read_sides(path: Path) -> tuple[Side, Side]:
    """Trainer and engines of a layouts file. Raises InputError, FormatError or LayoutError that names the file or rank."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError("cannot read the layouts", field=str(path), found=error.strerror) from error
    try:
        if path.suffix == ".json":
            message = json_format.Parse(data, layout_pb2.LayoutFile())
        else:
            message = layout_pb2.LayoutFile.FromString(data)
    except (DecodeError, json_format.ParseError) as error:
        raise FormatError("not a layouts file", field=str(path), found=str(error)[:200],
                          do="make one with weight-sync plan --preset NAME --save FILE") from error  # fmt: skip
    if message.format != FORMAT:
        raise FormatError("layouts file of another format", field=str(path), found=message.format, expected=FORMAT)
    return _side(message.trainers, "trainers", path), _side(message.engines, "engines", path)


def _side(ranks: Iterable[layout_pb2.RankLayout], what: str, path: Path) -> Side:
    builder = SideBuilder()
    seen: set[int] = set()
    for message in ranks:
        if message.rank in seen:
            raise LayoutError("a rank is listed twice", field=f"{path}: {what}", found=message.rank)
        seen.add(message.rank)
        found = from_message(message)
        builder.add(message.rank, found.tensors, found.placements, found.storages)
    if not seen:
        raise InputError("layouts file lists no ranks", field=f"{path}: {what}")
    return builder.finish()
