"""Checkpoints on disk: a folder of safetensors files as tables and bits.

Owns reading headers, mapping tensors, and writing a folder. Owns no versions. Reads never copy: arrays are views of
the mapped files, and stay valid as long as they are referenced.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weight_sync.codec.digest import Digest, digest_tensor
from weight_sync.errors import FormatError, InputError, TensorError
from weight_sync.tensors import TensorSpec, sorted_table

if TYPE_CHECKING:
    import torch

__all__ = ["Checkpoint", "as_torch", "mapped_tensors", "write_safetensors"]

_MAX_HEADER = 100 << 20
_ALONE = {"model.safetensors", "adapter_model.safetensors"}
_SHARD_BYTES = 5 << 30  # of a written file, like the hub's own


class Checkpoint:
    """The tensors of a folder, or of one file.

    Attributes:
        path: as given.
        table: specs sorted by name.
        files: per tensor, the file that holds it.

    Raises TensorError when there is no safetensors file or a tensor comes twice, FormatError on a broken file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        if not files:
            raise TensorError(
                "no safetensors file", field=str(path), do="name a folder with *.safetensors files, or one such file"
            )
        self.files: dict[str, Path] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        self._maps: dict[Path, npt.NDArray[np.uint8]] = {}
        specs: list[TensorSpec] = []
        for file in files:
            for spec, span in _read_header(file):
                if spec.name in self.files:
                    raise TensorError("tensor is in two files", field=spec.name,
                                      found=[self.files[spec.name].name, file.name],
                                      do="keep one set of files in the folder")  # fmt: skip
                specs.append(spec)
                self.files[spec.name] = file
                self._spans[spec.name] = span
        self.table = sorted_table(specs)
        self._by_name = {spec.name: spec for spec in self.table}

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def spec(self, name: str) -> TensorSpec:
        """Raises TensorError for a name that is not there."""
        found = self._by_name.get(name)
        if found is None:
            raise TensorError("no such tensor", field=name, found=str(self.path))
        return found

    def bits(self, name: str) -> npt.NDArray[Any]:
        """(elements,) unsigned of the element's width, read-only, mapped; copied only where the file is unaligned."""
        spec = self.spec(name)
        file = self.files[name]
        if file not in self._maps:
            self._maps[file] = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.empty(0, np.uint8)
        start, length = self._spans[name]
        raw = self._maps[file][start : start + length]
        if raw.ctypes.data % spec.type.width if len(raw) else False:
            raw = np.frombuffer(raw.tobytes(), np.uint8)
        return np.asarray(raw).view(spec.type.uint)

    def span(self, name: str) -> tuple[int, int]:
        """Where the tensor lies in its file: (offset, length) in bytes. Raises TensorError."""
        return self._spans[self.spec(name).name]

    def digests(self, names: Iterable[str] | None = None, threads: int = 1) -> Iterator[tuple[TensorSpec, Digest]]:
        """Each tensor's part of the digest, header term included, one tensor at a time."""
        for name in [spec.name for spec in self.table] if names is None else names:
            yield self.spec(name), digest_tensor(self.spec(name), self.bits(name), threads)

    def digest(self, threads: int = 1) -> Digest:
        """Of the whole state."""
        return Digest.sum(digest for _, digest in self.digests(threads=threads))


def mapped_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by name: the mapped bits seen as torch's dtypes, not copied and not to be written to.

    Raises TensorError for a dtype that torch does not have.
    """
    return {spec.name: as_torch(spec, checkpoint.bits(spec.name)) for spec in checkpoint.table}


def as_torch(spec: TensorSpec, bits: npt.NDArray[Any]) -> torch.Tensor:
    """(elements,) unsigned seen as the tensor; shares memory. Raises TensorError for a dtype that torch does not have."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # whoever asks does not write
        flat = torch.from_numpy(bits.view("u1" if spec.type.width == 1 else f"i{spec.type.width}"))
    shape = spec.shape
    if spec.type.bits < 8:  # torch counts bytes, safetensors counts codes
        shape = (*shape[:-1], shape[-1] * spec.type.bits // 8)
    return flat.view(spec.type.torch).reshape(shape)


def _read_header(file: Path) -> Iterator[tuple[TensorSpec, tuple[int, int]]]:
    """Specs and (offset, length) of one file. Raises FormatError that names the file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
        if length > min(_MAX_HEADER, size - 8):
            raise FormatError(
                "file is cut off or not safetensors", field=str(file), found=f"{size} bytes", do="write it again"
            )
        raw = stream.read(length)
    try:
        table = json.loads(raw)
        entries = [(k, v["dtype"], v["shape"], v["data_offsets"]) for k, v in table.items() if k != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            "header is not a table of tensors", field=str(file), found=str(error), do="write it again"
        ) from error
    for name, dtype, shape, (begin, end) in entries:
        try:
            spec = TensorSpec(name, dtype, tuple(shape))
        except InputError as error:
            raise TensorError(f"{file.name}: {error.what}", field=name, found=error.found, do=error.do) from error
        if not 0 <= begin <= end <= size - 8 - length or end - begin != spec.nbytes:
            raise FormatError(
                "file is cut off", field=f"{file}: {name}", found=(begin, end), expected=f"{spec.nbytes} bytes"
            )
        yield spec, (8 + length + begin, end - begin)


def file_head(specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> tuple[bytes, dict[str, int]]:
    """The first bytes of a file of these tensors, and each one's offset in the file, aligned to its elements."""
    table: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    places: dict[str, int] = {}
    at = 0
    for spec in sorted(specs, key=lambda spec: -spec.type.width):  # keeps wider elements aligned, as safetensors does
        table[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        places[spec.name] = at
        at += spec.nbytes
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + at for name, at in places.items()}


def write_safetensors(
    file: Path, tensors: Iterable[tuple[TensorSpec, npt.NDArray[Any]]], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes one file, tensor by tensor, and syncs it."""
    items = list(tensors)
    head, places = file_head([spec for spec, _ in items], metadata)
    with file.open("wb") as stream:
        stream.write(head)
        for spec, bits in sorted(items, key=lambda item: places[item[0].name]):
            assert bits.nbytes == spec.nbytes, spec
            stream.write(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
        stream.flush()
        os.fsync(stream.fileno())


_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"}


def is_weights(file: Path) -> bool:
    """True for files of weights, and for their indices, by the hub's naming."""
    return file.suffix in _WEIGHTS or file.name.endswith(".index.json")


def copy_other_files(source: Path, target: Path) -> None:
    """Configuration, tokenizer and the like: everything in the folder that is not weights."""
    if not source.is_dir():
        return
    for item in sorted(source.iterdir()):
        if item.is_file() and not is_weights(item) and not (target / item.name).exists():
            shutil.copy2(item, target / item.name)


def plan_files(table: Iterable[TensorSpec], limit: int = _SHARD_BYTES) -> dict[str, list[TensorSpec]]:
    """File names for a table, as the hub names them: one file, or several of at most ``limit`` bytes."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in table:
        if groups[-1] and size + spec.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


def write_index(folder: Path, files: Mapping[str, list[TensorSpec]]) -> None:
    """The hub's index; nothing for one file of a name that is looked for without an index."""
    if len(files) == 1 and not _ALONE.isdisjoint(files):
        return
    total = sum(spec.nbytes for specs in files.values() for spec in specs)
    names = {spec.name: file for file, specs in files.items() for spec in specs}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2, ensure_ascii=False)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
