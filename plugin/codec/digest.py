"""The digest of a state: a sum over all elements that needs no gathering.

Owns Digest, the tensor key, the mix of one element, and its evaluation over runs, boxes, changes and torch tensors.
Owns no tables of tensors and no comparison policy. docs/format.md, "Digest", is the definition; the constants are here.

Two lanes, each a sum modulo 2^64 over the elements of ``mix(tensor key, index, bits)``, plus one header term per
tensor. Each lane multiplies two 32-bit words that both depend on key, index and bits, so it is non-linear in all
three; a sum that is linear in the bits misses paired flips of high bits. Sums are
    incremental   a patch subtracts the old terms and adds the new ones, O(changed);
    shardable     ranks sum their own parts, the total does not depend on who holds what;
    complete      unchanged tensors count too, so a full recomputation audits a memory.
A digest catches accidents. It is not cryptographic: hashes and the manifest's signature catch tampering.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import uint64

from weight_sync.codec.machine import kernel
from weight_sync.codec.threads import ordered_map
from weight_sync.layout.box import Box
from weight_sync.proto.v1 import common_pb2
from weight_sync.tensors import TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Digest", "digest_box", "digest_tensor", "digest_torch", "header_digest", "state_digest", "tensor_key"]

_MOD = 1 << 64
# Odd constants with no short period: fractions of the golden ratio and of sqrt(3) for the index, and the 32-bit
# multipliers of MurmurHash3 for the bits.
INDEX_0 = 0x9E3779B97F4A7C15
INDEX_1 = 0xD1B54A32D192ED03
BITS_0 = 0x85EBCA6B
BITS_1 = 0xC2B2AE35
_LOW = 0xFFFFFFFF
_CHUNK = 1 << 22  # elements per task: large enough to hide a call, small enough to share among threads


@dataclass(frozen=True, slots=True)
class Digest:
    """Two lanes of a sum modulo 2^64. Digests add and subtract; the zero digest is the empty sum."""

    lane0: int = 0
    lane1: int = 0

    def __add__(self, other: Digest) -> Digest:
        return Digest((self.lane0 + other.lane0) % _MOD, (self.lane1 + other.lane1) % _MOD)

    def __sub__(self, other: Digest) -> Digest:
        return Digest((self.lane0 - other.lane0) % _MOD, (self.lane1 - other.lane1) % _MOD)

    def __str__(self) -> str:
        return self.hex()

    def hex(self) -> str:
        """32 hex digits: lane 0, then lane 1."""
        return f"{self.lane0:016x}{self.lane1:016x}"

    @classmethod
    def parse(cls, text: str) -> Digest:
        """From `hex`. Raises ValueError."""
        if len(text) != 32:
            raise ValueError(f"not a digest: {text!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))

    def to_proto(self) -> common_pb2.Digest:
        """As a message."""
        return common_pb2.Digest(lane0=self.lane0, lane1=self.lane1)

    @classmethod
    def from_proto(cls, message: common_pb2.Digest) -> Digest:
        """From a message."""
        return cls(message.lane0, message.lane1)

    @classmethod
    def sum(cls, parts: Iterable[Digest]) -> Digest:
        """The sum of many."""
        lane0 = lane1 = 0
        for part in parts:
            lane0 += part.lane0
            lane1 += part.lane1
        return cls(lane0 % _MOD, lane1 % _MOD)


class TensorKey(NamedTuple):
    """Six words derived from name, dtype and shape: index seeds, bit seeds (32-bit), header terms."""

    index_0: int
    index_1: int
    bits_0: int
    bits_1: int
    header_0: int
    header_1: int


@lru_cache(maxsize=65536)
def tensor_key(spec: TensorSpec) -> TensorKey:
    """BLAKE2b-320 of ``name 0xff dtype 0xff d0,d1,...`` as little-endian words of 8, 8, 4, 4, 8 and 8 bytes.

    0xff cannot occur in UTF-8, so the parts cannot run into each other.
    """
    text = b"\xff".join(
        (spec.name.encode("utf-8"), spec.dtype.encode("ascii"), ",".join(map(str, spec.shape)).encode("ascii"))
    )
    raw = hashlib.blake2b(text, digest_size=40, person=b"weight_sync.1").digest()
    cuts = (0, 8, 16, 20, 24, 32, 40)
    return TensorKey(*(int.from_bytes(raw[a:b], "little") for a, b in pairwise(cuts)))


@lru_cache(maxsize=65536)
def key_words(spec: TensorSpec) -> npt.NDArray[np.uint64]:
    """The first four words of the key as kernels take them, (4,) uint64; do not write to it."""
    return np.array(tensor_key(spec)[:4], np.uint64)


def header_digest(spec: TensorSpec) -> Digest:
    """The term that every tensor adds once, empty ones too."""
    key = tensor_key(spec)
    return Digest(key.header_0, key.header_1)


@kernel
def gain(index: Any, old: Any, new: Any, i0: Any, i1: Any, b0: Any, b1: Any) -> Any:
    """What both lanes gain when one element of at most 32 bits changes; all arguments uint64.

    The key comes as four scalars: read from an array inside the loop it would be loaded again after every store, and
    nothing would be vectorised (ten times slower).
    """
    a = (index * uint64(INDEX_0) + i0) >> uint64(32)
    b = (index * uint64(INDEX_1) + i1) >> uint64(32)
    v = (old * uint64(BITS_0) + b0) & uint64(_LOW)
    u = (old * uint64(BITS_1) + b1) & uint64(_LOW)
    w = (new * uint64(BITS_0) + b0) & uint64(_LOW)
    t = (new * uint64(BITS_1) + b1) & uint64(_LOW)
    gain0 = (a ^ w) * ((b + w) & uint64(_LOW)) - (a ^ v) * ((b + v) & uint64(_LOW))
    gain1 = (b ^ t) * ((a + t) & uint64(_LOW)) - (b ^ u) * ((a + u) & uint64(_LOW))
    return gain0, gain1


@kernel
def _sum_run(bits: Any, start: Any, key: Any) -> Any:
    """Both lanes over neighbouring elements; the recurrences instead of products let LLVM vectorise the loop."""
    lane0 = uint64(0)
    lane1 = uint64(0)
    w0 = uint64(start) * uint64(INDEX_0) + key[0]
    w1 = uint64(start) * uint64(INDEX_1) + key[1]
    k0 = key[2]
    k1 = key[3]
    for i in range(len(bits)):
        e = uint64(bits[i])
        v = (e * uint64(BITS_0) + k0) & uint64(_LOW)
        u = (e * uint64(BITS_1) + k1) & uint64(_LOW)
        a = w0 >> uint64(32)
        b = w1 >> uint64(32)
        lane0 += (a ^ v) * ((b + v) & uint64(_LOW))
        lane1 += (b ^ u) * ((a + u) & uint64(_LOW))
        w0 += uint64(INDEX_0)
        w1 += uint64(INDEX_1)
    return lane0, lane1


@kernel
def _sum_at(bits: Any, indices: Any, key: Any) -> Any:
    lane0 = uint64(0)
    lane1 = uint64(0)
    k0, k1, k2, k3 = key[0], key[1], key[2], key[3]
    for i in range(len(bits)):
        index, e = uint64(indices[i]), uint64(bits[i])
        a = (index * uint64(INDEX_0) + k0) >> uint64(32)
        b = (index * uint64(INDEX_1) + k1) >> uint64(32)
        v = (e * uint64(BITS_0) + k2) & uint64(_LOW)
        u = (e * uint64(BITS_1) + k3) & uint64(_LOW)
        lane0 += (a ^ v) * ((b + v) & uint64(_LOW))
        lane1 += (b ^ u) * ((a + u) & uint64(_LOW))
    return lane0, lane1


def _words(bits: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], int]:
    """Elements as words of at most 32 bits, and words per element: 8-byte elements enter as two words."""
    if bits.dtype.itemsize == 8:
        return bits.view(np.uint32), 2
    return bits, 1


def digest_box(spec: TensorSpec, bits: npt.NDArray[Any], box: Box, threads: int = 1) -> Digest:
    """Digest of the elements of one box, without the header term.

    Args:
        spec: of the tensor.
        bits: (box.count,) unsigned of the element's width, in enumeration order; not copied when the box is a run.
        box: in checkpoint coordinates.
        threads: that share the work.
    """
    assert bits.ndim == 1 and len(bits) == box.count and bits.dtype == spec.type.uint, (bits.dtype, bits.shape, box)
    key = key_words(spec)

    def part(start: int) -> Digest:
        some = bits[start : start + _CHUNK]
        words, per = _words(np.ascontiguousarray(some))
        if box.is_run:
            return Digest(*map(int, _sum_run(words, (box.offset + start) * per, key)))
        indices = box.indices(np.arange(start, start + len(some), dtype=np.int64))
        if per == 2:
            indices = (indices[:, None] * 2 + np.arange(2)).ravel()
        return Digest(*map(int, _sum_at(words, indices, key)))

    return Digest.sum(ordered_map(part, range(0, len(bits), _CHUNK), threads))


def digest_tensor(spec: TensorSpec, bits: npt.NDArray[Any], threads: int = 1) -> Digest:
    """A whole tensor's part of the state digest, header term included; ``bits``: (spec.elements,) unsigned."""
    return header_digest(spec) + digest_box(spec, bits, Box.run(0, spec.elements), threads)


def state_digest(tensors: Iterable[tuple[TensorSpec, npt.NDArray[Any]]], threads: int = 1) -> Digest:
    """Digest of a whole state given tensor by tensor."""
    return Digest.sum(digest_tensor(spec, bits, threads) for spec, bits in tensors)


def digest_torch(spec: TensorSpec, tensor: torch.Tensor, box: Box, chunk: int = 1 << 22) -> Digest:
    """`digest_box` with torch operations on the tensor's own device, in chunks of at most ``chunk`` elements.

    Args:
        tensor: (box.count,) 1-d, of the spec's dtype, in enumeration order.

    int64 wraps modulo 2^64 like the CPU kernel's uint64, so both give the same bits.
    """
    import torch

    key = tensor_key(spec)
    assert tensor.ndim == 1 and tensor.numel() == box.count
    width = spec.type.width
    row = tensor.contiguous().as_strided((box.count,), (1,))  # one element is contiguous with any stride
    words = row.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}[width])
    per = 2 if width == 8 else 1
    mask = {1: 0xFF, 2: 0xFFFF, 4: _LOW, 8: _LOW}[width]
    lane0 = lane1 = 0
    for start in range(0, words.numel(), chunk):
        some = words[start : start + chunk]
        position = torch.arange(start, start + some.numel(), device=tensor.device, dtype=torch.int64)
        index = _torch_indices(torch, box, position // per) * per + position % per
        bits = some.to(torch.int64) & mask
        a = ((index * _signed(INDEX_0) + _signed(key.index_0)) >> 32) & _LOW
        b = ((index * _signed(INDEX_1) + _signed(key.index_1)) >> 32) & _LOW
        v = (bits * BITS_0 + key.bits_0) & _LOW
        u = (bits * BITS_1 + key.bits_1) & _LOW
        lane0 += int(((a ^ v) * ((b + v) & _LOW)).sum())
        lane1 += int(((b ^ u) * ((a + u) & _LOW)).sum())
    return Digest(lane0 % _MOD, lane1 % _MOD)


def _torch_indices(torch: Any, box: Box, positions: Any) -> Any:
    if box.is_run:
        return positions + box.offset
    out = torch.full_like(positions, box.offset)
    for size, stride in zip(reversed(box.sizes), reversed(box.strides), strict=True):
        out += (positions % size) * stride
        positions = positions // size
    return out


def _signed(word: int) -> int:
    return word - _MOD if word >= 1 << 63 else word
