"""Lists of unsigned integers as bits: the entropy stage of every form.

Owns the split into raw low bits and coded high parts, and the checks on the way back. Owns no meaning of the numbers.

Gaps between changes are nearly geometric, so their low bits are incompressible: ``low_bits`` of each number are packed
as they are, and what remains, ``high = number >> low_bits``, becomes a symbol of one byte that Huffman coding
(zstandard's literals) brings within 1 % of the entropy of the whole number. ``low_bits`` puts the median of high
between 2 and 3. Symbols below 128 are high itself; above, they name its length in bits and the bit after the leading
one, and the other bits follow as they are, so heavy tails (large steps) cost no more than their own length.
Against whole numbers through pcodec at its default level: +0.03 bits per gap and one sixth of the encoding time. The
compact form, which exists for its size, codes the same symbols by pcodec (``small``) and comes within 0.3 %.

Layout of the bytes: symbols (zstd, pcodec, or as they are when that is not longer, or nothing when all are 0), then
the bits, little-endian, number by number: low bits first, then the bits of a high above 127.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
import pcodec
import zstandard
from numba import intp, uint64

from weight_sync.codec.machine import bit_length, kernel, load64, store64
from weight_sync.errors import FormatError
from weight_sync.proto.v1 import shard_pb2

__all__ = [
    "choose_low_bits",
    "compress",
    "decode",
    "decompress",
    "encode",
    "join_bits",
    "spare_bytes",
    "pack_symbols",
    "room_for",
    "split_bits",
    "symbols_of",
    "stream_size",
    "unpack_symbols",
]

_local = threading.local()
_SURELY_PCO = 1 << 12  # numbers from which tANS always wins over Huffman
_BLOCK = 64  # numbers that are looked at together for one with a long high part


def compress(data: npt.NDArray[np.uint8]) -> bytes:
    """One zstd frame, without checksum and content size (hash and size are kept outside).

    Symbols have no repetitions worth a match: a tiny hash table and the longest minimal match make zstd code them as
    Huffman literals, which is both shorter (3.40 against 3.55 bits for gaps of mean 1.4) and faster than its level 1.
    """
    if not hasattr(_local, "compressor"):  # contexts are neither thread-safe nor cheap
        parameters = zstandard.ZstdCompressionParameters(
            window_log=17, hash_log=6, min_match=7, strategy=zstandard.STRATEGY_FAST, target_length=0,
            write_checksum=False, write_content_size=False,
        )  # fmt: skip
        _local.compressor = zstandard.ZstdCompressor(compression_params=parameters)
    return _local.compressor.compress(data)  # type: ignore[no-any-return]


def decompress(data: bytes | memoryview, size: int, what: str) -> npt.NDArray[np.uint8]:
    """Exactly ``size`` bytes. Raises FormatError on anything else, without allocating more than that."""
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    declared = _content_size(data)
    if declared > size:
        raise FormatError("stream announces more than its count", field=what, found=declared, expected=size)
    try:
        out = _local.decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError("stream does not decompress", field=what, found=str(error), do="fetch it again") from error
    if len(out) != size:
        raise FormatError("stream is shorter than its count", field=what, found=len(out), expected=size)
    return np.frombuffer(out, np.uint8)


def _content_size(data: bytes | memoryview) -> int:
    try:
        return max(0, zstandard.frame_content_size(data))
    except zstandard.ZstdError as error:
        raise FormatError("stream is not zstd", field="stream", found=str(error), do="fetch it again") from error


@kernel
def _bit_lengths(values: Any, out: Any) -> None:
    for i in range(len(values)):
        out[bit_length(uint64(values[i]))] += 1


def choose_low_bits(values: npt.NDArray[Any]) -> int:
    """Raw bits that leave a median high part of 2 or 3, where Huffman's loss is small and symbols are few."""
    if not len(values):
        return 0
    sample = values[:: max(1, len(values) // 4096)]  # a median needs no more
    lengths = np.zeros(65, np.int64)
    _bit_lengths(sample, lengths)
    median = int(np.searchsorted(np.cumsum(lengths), (len(sample) + 1) // 2))
    return min(56, max(0, median - 2))


@kernel
def _get(data: Any, at: Any, count: Any) -> Any:
    """``count`` <= 62 bits from bit ``at`` of bytes with eight spare ones. The caller owns the bounds."""
    byte = at >> uint64(3)
    shift = at & uint64(7)
    v = load64(data, byte) >> shift
    if count > uint64(56):
        v |= uint64(data[byte + uint64(8)]) << (uint64(64) - shift) if shift != uint64(0) else uint64(0)
    return v & ((uint64(1) << count) - uint64(1))


@kernel
def _put(data: Any, at: Any, value: Any, count: Any) -> Any:
    """Writes ``value`` < 2^count, count <= 62, at bit ``at``; bits from there on are 0. Returns the next bit."""
    byte = at >> uint64(3)
    shift = at & uint64(7)
    store64(data, byte, load64(data, byte) | (value << shift))
    if shift + count > uint64(64):
        data[byte + uint64(8)] = value >> (uint64(64) - shift)
    return at + count


@kernel
def split_bits(values: Any, low_bits: Any, symbols: Any, low: Any, bit: Any) -> Any:
    """Writes symbols and, from bit ``bit`` of ``low`` (zeros, uint8) on, the bits; returns the next free bit.

    Blocks whose numbers have a one-byte high part, nearly all, go without a branch per number: as many low bits as fit
    a word are gathered before they are written.
    """
    k = uint64(low_bits)
    mask = (uint64(1) << k) - uint64(1)
    at = uint64(bit)
    i = uint64(0)
    end = uint64(len(values))
    group = min(uint64(_BLOCK), uint64(56) // k) if k != uint64(0) else uint64(_BLOCK)
    while i < end:
        stop = min(i + uint64(_BLOCK), end)
        most = uint64(0)
        for j in range(i, stop):
            h = uint64(values[j]) >> k
            symbols[j] = h
            most |= h
        if most >= uint64(128):
            at = _split_slowly(values, k, symbols, low, at, i, stop)
            i = stop
            continue
        while i < stop and k != uint64(0):
            many = min(group, stop - i)
            word = uint64(0)
            for j in range(many):
                word |= (uint64(values[i + uint64(j)]) & mask) << (uint64(j) * k)
            at = _put(low, at, word, many * k)
            i += many
        i = stop
    return at


@kernel
def _split_slowly(values: Any, k: Any, symbols: Any, low: Any, at: Any, start: Any, stop: Any) -> Any:
    """Numbers [start, stop) whatever their size."""
    mask = (uint64(1) << k) - uint64(1)
    for i in range(start, stop):
        v = uint64(values[i])
        h = v >> k
        at = _put(low, at, v & mask, k)
        if h < uint64(128):
            symbols[i] = h
            continue
        n = bit_length(h)
        rest = n - uint64(2)
        symbols[i] = uint64(128) + ((n - uint64(8)) << uint64(1)) + ((h >> rest) & uint64(1))
        at = _put(low, at, h & ((uint64(1) << rest) - uint64(1)), rest)
    return at


@kernel
def symbols_of(values: Any, low_bits: Any, symbols: Any) -> None:
    """The symbols alone."""
    k = uint64(low_bits)
    for i in range(len(values)):
        h = uint64(values[i]) >> k
        if h >= uint64(128):
            n = bit_length(h)
            h = uint64(128) + ((n - uint64(8)) << uint64(1)) + ((h >> (n - uint64(2))) & uint64(1))
        symbols[i] = h


@kernel
def join_bits(symbols: Any, low: Any, bit: Any, end: Any, low_bits: Any, out: Any) -> Any:
    """Inverse of `split_bits`; returns the next bit, or -1 when a number is malformed or bits run past ``end``."""
    k = uint64(low_bits)
    mask = (uint64(1) << k) - uint64(1)
    at = uint64(bit)
    stop = uint64(end)
    count = uint64(len(symbols))
    i = uint64(0)
    while i < count:
        until = min(i + uint64(_BLOCK), count)
        most = uint64(0)
        for j in range(i, until):
            most |= uint64(symbols[j])
        if most >= uint64(128) or at + (until - i) * k > stop:
            after = _join_slowly(symbols, low, at, stop, k, out, i, until)
            if after < 0:
                return -1
            at = uint64(after)
        else:
            for j in range(i, until):  # no branch: every number has k bits
                out[j] = (uint64(symbols[j]) << k) | ((load64(low, at >> uint64(3)) >> (at & uint64(7))) & mask)
                at += k
        i = until
    return intp(at)


@kernel
def _join_slowly(symbols: Any, low: Any, at: Any, stop: Any, k: Any, out: Any, start: Any, until: Any) -> Any:
    """Numbers [start, until) whatever their size."""
    for i in range(start, until):
        if at + k > stop:
            return -1
        v = _get(low, at, k)
        at += k
        h = uint64(symbols[i])
        if h >= uint64(128):
            n = ((h - uint64(128)) >> uint64(1)) + uint64(8)
            rest = n - uint64(2)
            if n + k > uint64(64) or at + rest > stop:
                return -1
            h = ((uint64(2) | (h & uint64(1))) << rest) | _get(low, at, rest)
            at += rest
        out[i] = (h << k) | v
    return intp(at)


def room_for(count: int, low_bits: int) -> int:
    """Bytes that hold the bits of ``count`` numbers whatever they are, and the spare ones that whole words need."""
    return count * (low_bits + 64) // 8 + 16


def encode(values: npt.NDArray[Any]) -> tuple[shard_pb2.IntStream, list[bytes]]:
    """Header and bytes of a list of unsigned integers of any width (uint32 or uint64)."""
    k = choose_low_bits(values)
    symbols = np.empty(len(values), np.uint8)
    low = np.zeros(room_for(len(values), k), np.uint8)
    end = int(split_bits(values, k, symbols, low, 0))
    packed, _ = pack_symbols(symbols)
    bits = low[: (end + 7) // 8].tobytes()
    stream = shard_pb2.IntStream(count=len(values), low_bits=k, symbols_size=len(packed), bits_size=len(bits))
    return stream, [packed, bits]


def pack_symbols(symbols: npt.NDArray[np.uint8], small: bool = False) -> tuple[bytes, bool]:
    """Symbols as bytes, and whether they are a pcodec file: nothing when all are 0, else the shorter of the coders.

    ``small`` asks for size: pcodec's tANS is within 0.3 % of the entropy where Huffman loses 1 to 25 %, at six times
    the time of encoding. Without it, zstd, or the bytes as they are when that is not longer.
    """
    if not symbols.any():
        return b"", False
    pco = pcodec.standalone.simple_compress(symbols.astype(np.uint16), _pco_config()) if small else None
    if pco is not None and len(symbols) > _SURELY_PCO:
        return pco, True
    packed = compress(symbols)
    if len(packed) >= len(symbols):
        packed = symbols.tobytes()
    return (pco, True) if pco is not None and len(pco) < len(packed) else (packed, False)


def _pco_config() -> Any:
    # symbols are coded as they come: no delta, no search for multiples
    return pcodec.ChunkConfig(
        compression_level=8, mode_spec=pcodec.ModeSpec.classic(), delta_spec=pcodec.DeltaSpec.no_op()
    )


def unpack_symbols(stream: shard_pb2.IntStream, data: memoryview, what: str) -> npt.NDArray[np.uint8]:
    """Inverse of `pack_symbols`: (stream.count,). Raises FormatError."""
    if stream.pco:
        return _unpack_pco(data, stream.count, what)
    if not len(data):
        return np.zeros(stream.count, np.uint8)
    if len(data) == stream.count:
        return np.frombuffer(data, np.uint8)
    return decompress(data, stream.count, what)


def _unpack_pco(data: memoryview, count: int, what: str) -> npt.NDArray[np.uint8]:
    wide = np.empty(count, np.uint16)
    try:
        progress = pcodec.standalone.simple_decompress_into(bytes(data), wide)
    except (RuntimeError, TypeError) as error:
        raise FormatError("stream does not decompress", field=what, found=str(error), do="fetch it again") from error
    if progress.n_processed != count or not progress.finished or (count and wide.max() > 255):
        raise FormatError("stream has another count", field=what, found=progress.n_processed, expected=count)
    return wide.astype(np.uint8)


def stream_size(stream: shard_pb2.IntStream) -> int:
    """Bytes of an encoded list."""
    return int(stream.symbols_size + stream.bits_size)


def decode(stream: shard_pb2.IntStream, data: memoryview, dtype: Any, what: str) -> npt.NDArray[Any]:
    """The list, (count,) of ``dtype``. The caller has bounded ``count``. Raises FormatError on any mismatch."""
    symbols = unpack_symbols(stream, data[: stream.symbols_size], what)
    out = np.empty(stream.count, dtype)
    if stream.low_bits > 56:
        raise FormatError("more raw bits than a number has", field=what, found=stream.low_bits, expected="at most 56")
    low = spare_bytes(data[stream.symbols_size :])
    if join_bits(symbols, low, 0, 8 * stream.bits_size, stream.low_bits, out) < 0:
        raise FormatError("bits end too early or name no number", field=what, do="fetch it again")
    return out


def spare_bytes(data: memoryview) -> npt.NDArray[np.uint8]:
    """Packed bits with spare bytes after them, so that whole words may be read anywhere."""
    out = np.zeros(len(data) + 16, np.uint8)
    out[: len(data)] = np.frombuffer(data, np.uint8)
    return out
