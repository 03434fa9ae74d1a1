"""Strategies and builders that the codec's tests share. Owns no test."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from weight_sync.codec.frame import EncodedFrame, FrameBox, decode_frame, encode_frame, hash16
from weight_sync.dtypes import DTYPES
from weight_sync.layout.box import Box
from weight_sync.ports import Changes
from weight_sync.proto.v1 import common_pb2, shard_pb2
from weight_sync.tensors import TensorSpec

STEP, COMPACT, ABSOLUTE = common_pb2.FORM_STEP, common_pb2.FORM_COMPACT, common_pb2.FORM_ABSOLUTE
DTYPE_NAMES = sorted(DTYPES)


def spec_of(name: str, dtype: str, elements: int) -> TensorSpec:
    """A 1-d spec that has this many elements (bytes for packed codes); see `whole`."""
    bits = DTYPES[dtype].bits
    return TensorSpec(name, dtype, (elements * 8 * DTYPES[dtype].width // bits,))


def whole(dtype: str, count: int) -> int:
    """A count near this one that ends on a whole number of codes: four 6-bit codes fill three bytes."""
    return max(3, count // 3 * 3) if DTYPES[dtype].bits == 6 else count


def random_bits(rng: np.random.Generator, dtype: str, count: int) -> npt.NDArray[Any]:
    """Any bit patterns: NaN payloads, both zeros, subnormals."""
    width = DTYPES[dtype].width
    return rng.integers(0, (1 << 8 * width) - 1, count, dtype=np.uint64, endpoint=True).astype(DTYPES[dtype].uint)


def nearby(rng: np.random.Generator, bits: npt.NDArray[Any], density: float, wild: float) -> npt.NDArray[Any]:
    """A successor: a share of the elements moves by a small step, a share of those to any bits at all."""
    out = bits.copy()
    at = np.flatnonzero(rng.random(len(bits)) < density)
    small = rng.integers(1, 4, len(at)).astype(bits.dtype)
    up = rng.random(len(at)) < 0.5
    out[at] = np.where(up, bits[at] + small, bits[at] - small)
    far = at[rng.random(len(at)) < wild]
    out[far] = rng.integers(0, 1 << 63, len(far), dtype=np.uint64).astype(bits.dtype)
    return out


@st.composite
def transitions(draw: st.DrawFn, max_elements: int = 3000) -> tuple[str, npt.NDArray[Any], npt.NDArray[Any]]:
    """dtype, old bits, new bits."""
    dtype = draw(st.sampled_from(DTYPE_NAMES))
    count = whole(dtype, draw(st.integers(1, max_elements)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old = random_bits(rng, dtype, count)
    if draw(st.booleans()):  # like trained weights: a few exponents, many elements each
        old &= old.dtype.type(draw(st.sampled_from([0x3, 0xFF, (1 << (8 * old.dtype.itemsize)) - 1])))
    density = draw(st.sampled_from([0.0, 0.001, 0.02, 0.5, 1.0]))
    new = nearby(rng, old, density, draw(st.sampled_from([0.0, 0.1, 1.0])))
    return dtype, old, new


def with_regions(frame: EncodedFrame) -> tuple[shard_pb2.Frame, list[TensorSpec]]:
    """The header as a reader finds it, and the table of tensors."""
    header = shard_pb2.Frame()
    header.CopyFrom(frame.header)
    specs = [box.spec for box in frame.boxes]
    header.regions.extend(box.coords.to_region(i, box.spec.elements) for i, box in enumerate(frame.boxes))
    return header, specs


def round_trip(
    form: common_pb2.Form, spec: TensorSpec, old: npt.NDArray[Any], positions: npt.NDArray[np.uint32],
    given: npt.NDArray[Any],
) -> list[Changes]:  # fmt: skip
    """Encode and decode one whole tensor."""
    boxes = [FrameBox(spec, Box.run(0, spec.elements))]
    frame = encode_frame(form, boxes, positions, given, [old])
    header, specs = with_regions(frame)
    payload = memoryview(b"".join(frame.payload))
    assert hash16([payload]) == header.blake3
    return decode_frame(form, header, payload, specs, lambda box: old)
