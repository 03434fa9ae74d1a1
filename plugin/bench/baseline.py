"""What others ship: XOR of the bytes, zstd level 1, xxh3 of the result.

Owns the baseline of the codec's benchmark, made as fast as its parts allow: tensor by tensor, each thread with its own
contexts and warm buffers. Owns no measurement.
"""

from __future__ import annotations

import io
import threading
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from weight_sync.bench.traces import Trace, TracedTensor
from weight_sync.codec.threads import ordered_map
from weight_sync.errors import CorruptionError, InputError

__all__ = ["Baseline"]


def _xxhash() -> ModuleType:
    try:
        import xxhash
    except ImportError as error:
        raise InputError("the baseline needs xxhash", field="xxhash", do="pip install 'weight-sync[bench]'") from error
    return xxhash


class Baseline:
    """Encodes and applies one trace.

    Attributes:
        deltas: per tensor the compressed XOR and the checksum of the new bits, after `encode`.
    """

    def __init__(self, trace: Trace, threads: int) -> None:
        self._checksum = _xxhash().xxh3_64_intdigest
        self._trace, self._threads = trace, threads
        self._room = max(t.spec.nbytes for t in trace.tensors)
        self._local = threading.local()
        self.deltas: list[tuple[bytes, int]] = []

    @property
    def nbytes(self) -> int:
        """Compressed bytes in all, without names and checksums."""
        return sum(len(data) for data, _ in self.deltas)

    def _buffer(self) -> npt.NDArray[np.uint8]:
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.empty(self._room, np.uint8)
            self._local.compressor = zstandard.ZstdCompressor(level=1)
            self._local.decompressor = zstandard.ZstdDecompressor()
        buffer: npt.NDArray[np.uint8] = self._local.buffer
        return buffer

    def encode(self) -> None:
        """XOR, compression, and the checksum that the receiver will check."""
        self.deltas = list(ordered_map(self._encode_tensor, self._trace.tensors, self._threads))

    def _encode_tensor(self, tensor: TracedTensor) -> tuple[bytes, int]:
        delta = self._buffer()[: tensor.spec.nbytes].view(tensor.old.dtype)
        np.bitwise_xor(tensor.old, tensor.new, out=delta)
        data: bytes = self._local.compressor.compress(delta)
        return data, int(self._checksum(tensor.new))

    def decode(self, state: list[npt.NDArray[Any]]) -> None:
        """Decompression, XOR in place and checksum. Raises CorruptionError when a checksum differs.

        Args:
            state: per tensor the old bits, which become the new ones.
        """
        for good in ordered_map(self._decode_tensor, zip(state, self.deltas, strict=True), self._threads):
            if not good:
                raise CorruptionError("baseline's checksum differs", field="xxh3")

    def _decode_tensor(self, item: tuple[npt.NDArray[Any], tuple[bytes, int]]) -> bool:
        bits, (data, checksum) = item
        delta = self._buffer()[: bits.nbytes]
        # into a warm buffer that holds it all, zstd decompresses at once; its simple call would allocate each time
        with self._local.decompressor.stream_reader(io.BytesIO(data), read_size=len(data)) as reader:
            size = reader.readinto(delta)
        if size != bits.nbytes:
            raise CorruptionError("baseline's delta is cut off", field="size", found=size, expected=bits.nbytes)
        np.bitwise_xor(bits, delta.view(bits.dtype), out=bits)
        return int(self._checksum(bits)) == checksum
