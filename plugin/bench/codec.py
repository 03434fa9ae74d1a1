"""Sizes and speed of the codec against the baseline, in one run.

Owns the rows of ``weight-sync bench codec``. Owns no traces and no stopwatch.

What is timed, on both sides with equal threads and warm buffers:
    encode    ours: diff, encode, hash, digest of what changed, shard head; baseline: XOR, zstd-1, xxh3
    decode    ours: head, hash check, decode, apply with undo log and incremental digest; baseline: zstd, XOR, xxh3
Sizes are those of the whole object: container, index, frame headers and payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.bench.baseline import Baseline
from weight_sync.bench.entropy import bound_bits
from weight_sync.bench.timing import Job, Seconds, alternate
from weight_sync.bench.traces import Trace, TracedTensor
from weight_sync.codec.apply import apply_changes, new_bits_of
from weight_sync.codec.diff import ChangeBuffer, diff_run
from weight_sync.codec.digest import Digest
from weight_sync.codec.frame import FRAME_CHANGES, EncodedFrame, FrameBox, decode_frame, encode_changes
from weight_sync.codec.patch import DiffPiece, encode_patch
from weight_sync.codec.shard import build_shard, identity, parse_head
from weight_sync.codec.threads import ordered_map
from weight_sync.errors import CorruptionError, InputError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.proto.v1 import common_pb2

__all__ = ["ENCODINGS", "CodecRow", "Encoding", "bench_codec"]

ENCODINGS = {"step": common_pb2.FORM_STEP, "compact": common_pb2.FORM_COMPACT, "absolute": common_pb2.FORM_ABSOLUTE}


@dataclass(frozen=True)
class CodecRow:
    """One trace in one encoding. Speeds: GB (1e9 bytes) of model per CPU-second; memcpy counts bytes copied once.

    ``entropy_bound_bits``: see `weight_sync.bench.entropy`. Ratios are ours over the baseline's, shares ours over
    memcpy's. ``*_wall_s`` are seconds of our best round.
    """

    trace: str
    format: str
    density: float
    encoding: str
    bits_per_changed: float
    entropy_bound_bits: float
    baseline_bits_per_changed: float
    encode_gb_per_cpu_s: float
    decode_gb_per_cpu_s: float
    baseline_encode_gb_per_cpu_s: float
    baseline_decode_gb_per_cpu_s: float
    memcpy_gb_per_s: float
    encode_ratio: float
    decode_ratio: float
    encode_share_of_memcpy: float
    decode_share_of_memcpy: float
    encode_wall_s: float
    decode_wall_s: float
    elements: int
    changed: int
    threads: int

    def to_json(self) -> dict[str, Any]:
        """As it is printed."""
        return asdict(self)


class Encoding:
    """One trace in one encoding, both ways.

    Attributes:
        shard: the object, after `encode`.
    """

    def __init__(self, trace: Trace, name: str, threads: int = 1) -> None:
        if name not in ENCODINGS:
            raise InputError("unknown encoding", field="encodings", found=name, expected=", ".join(ENCODINGS))
        self.name, self._form, self._threads = name, ENCODINGS[name], threads
        self._trace = trace
        self._identity = identity("bench", 1, 0, "bench", self._form)
        self.shard = b""

    def encode(self) -> None:
        """Diff, encode and container."""
        if self._form == common_pb2.FORM_ABSOLUTE:
            frames = list(encode_changes(self._changes(), self._form))
        else:
            pieces = [_piece(tensor) for tensor in self._trace.tensors]
            frames = encode_patch(pieces, [self._form], self._threads).frames[self._form]
        self.shard = self._object(frames)

    def _object(self, frames: Sequence[EncodedFrame]) -> bytes:
        built = build_shard("bench", self._identity, frames)
        return b"".join((built.head, *built.body))

    def _changes(self) -> list[Changes]:
        """The absolute form has no walk of its own in a publisher: diff, then new bits, tensor by tensor."""
        return [c for some in ordered_map(_new_bits, self._trace.tensors, self._threads) for c in some]

    def decode(self, state: dict[str, npt.NDArray[Any]]) -> tuple[Digest, list[npt.NDArray[Any]]]:
        """From the object into ``state`` (by tensor name); returns what the digest gains, and the undo log."""
        head = parse_head(memoryview(self.shard), len(self.shard))

        def old(box: FrameBox) -> npt.NDArray[Any]:
            return state[box.spec.name][box.coords.offset : box.coords.offset + box.coords.count]

        def one(k: int) -> tuple[Digest, list[npt.NDArray[Any]]]:
            start, size = head.frame_spans[k]
            payload = memoryview(self.shard)[start : start + size]
            undo: list[npt.NDArray[Any]] = []
            gained = Digest()
            for changes in decode_frame(self._form, head.index.frames[k], payload, head.specs, old):
                old_bits, more = apply_changes(changes, state[changes.spec.name], changes.coords)
                undo.append(old_bits)
                gained += more
            return gained, undo

        parts = list(ordered_map(one, range(len(head.frame_spans)), self._threads))
        return Digest.sum(gained for gained, _ in parts), [bits for _, undo in parts for bits in undo]


def _piece(tensor: TracedTensor) -> DiffPiece:
    return DiffPiece(
        tensor.spec, Box.run(0, tensor.spec.elements), lambda: tensor.old, lambda start, stop: tensor.new[start:stop]
    )


def _new_bits(tensor: TracedTensor) -> list[Changes]:
    out: list[Changes] = []
    at = 0
    while at < tensor.spec.elements:
        found = ChangeBuffer(tensor.spec.type, min(FRAME_CHANGES // 2, tensor.spec.elements - at))
        seen = diff_run(tensor.old[at:], tensor.new[at:], 0, found)
        positions, steps = found.view()
        if len(positions):
            box = Box.run(at, seen)
            item = Changes(tensor.spec, box, positions, steps)
            bits = new_bits_of(item, tensor.old[at : at + seen][positions])
            out.append(Changes(tensor.spec, box, positions, None, bits))
        at += seen
    return out


def bench_codec(trace: Trace, encodings: Sequence[str], threads: int, rounds: int) -> list[CodecRow]:
    """Rows of one trace, in the order of ``encodings``.

    Args:
        threads: of encode and decode, ours and the baseline's.
        rounds: to choose the best of; small traces get more.

    Raises InputError on an unknown encoding or a trace without changes, CorruptionError when anything decodes wrongly.
    Memory: the trace, one more version, the encoded objects, and what the codec needs.
    """
    if not trace.changed:
        raise InputError("no element changes in this trace", field=trace.name, do="record two different versions")
    ours = [Encoding(trace, name, threads) for name in encodings]
    theirs = Baseline(trace, threads)
    state = {t.spec.name: t.old.copy() for t in trace.tensors}

    def restore() -> None:
        for tensor in trace.tensors:
            np.copyto(state[tensor.spec.name], tensor.old)

    theirs.encode()
    theirs.decode(list(state.values()))
    _check(trace, state, "baseline")
    for encoding in ours:
        restore()
        encoding.encode()
        encoding.decode(state)
        _check(trace, state, encoding.name)

    jobs = [Job("memcpy", restore), Job("baseline encode", theirs.encode)]
    jobs += [Job(f"{encoding.name} encode", encoding.encode) for encoding in ours]
    jobs += [Job("baseline decode", lambda: theirs.decode(list(state.values())), restore)]
    jobs += [Job(f"{encoding.name} decode", _decoder(encoding, state), restore) for encoding in ours]
    rounds = max(rounds, min(10 * rounds, (64 << 20) // trace.nbytes))
    seconds = alternate(jobs, rounds)
    return [_row(trace, encoding, theirs, seconds, threads) for encoding in ours]


def _decoder(encoding: Encoding, state: dict[str, npt.NDArray[Any]]) -> Any:
    return lambda: encoding.decode(state)


def _check(trace: Trace, state: dict[str, npt.NDArray[Any]], what: str) -> None:
    for tensor in trace.tensors:
        if not np.array_equal(state[tensor.spec.name], tensor.new):
            raise CorruptionError(f"{what} does not lead to the new version", field=tensor.spec.name, found=trace.name)


def _row(trace: Trace, encoding: Encoding, theirs: Baseline, seconds: dict[str, Seconds], threads: int) -> CodecRow:
    def speed(job: str) -> float:
        return trace.nbytes / 1e9 / seconds[job].cpu

    encode, decode = speed(f"{encoding.name} encode"), speed(f"{encoding.name} decode")
    base_encode, base_decode, memcpy = speed("baseline encode"), speed("baseline decode"), speed("memcpy")
    return CodecRow(
        trace=trace.name,
        format=trace.format,
        density=trace.density,
        encoding=encoding.name,
        bits_per_changed=8 * len(encoding.shard) / trace.changed,
        entropy_bound_bits=bound_bits(trace, encoding.name),
        baseline_bits_per_changed=8 * theirs.nbytes / trace.changed,
        encode_gb_per_cpu_s=encode,
        decode_gb_per_cpu_s=decode,
        baseline_encode_gb_per_cpu_s=base_encode,
        baseline_decode_gb_per_cpu_s=base_decode,
        memcpy_gb_per_s=memcpy,
        encode_ratio=encode / base_encode,
        decode_ratio=decode / base_decode,
        encode_share_of_memcpy=encode / memcpy,
        decode_share_of_memcpy=decode / memcpy,
        encode_wall_s=seconds[f"{encoding.name} encode"].wall,
        decode_wall_s=seconds[f"{encoding.name} decode"].wall,
        elements=trace.elements,
        changed=trace.changed,
        threads=threads,
    )
