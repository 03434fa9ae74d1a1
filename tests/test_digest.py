"""The digest: shardable, incremental, complete, and the same on CPU and on torch."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec_cases import DTYPE_NAMES, random_bits, spec_of, transitions, whole
from weight_sync.codec.digest import Digest, digest_box, digest_tensor, digest_torch, header_digest, tensor_key
from weight_sync.dtypes import DTYPES
from weight_sync.layout.box import Box
from weight_sync.tensors import TensorSpec

quick = settings(max_examples=50, deadline=None)


def reference(spec, bits, box):
    """The definition of docs/format.md in plain Python integers."""
    key = tensor_key(spec)
    lanes = [0, 0]
    words = bits.view(np.uint32) if bits.dtype.itemsize == 8 else bits
    per = 2 if bits.dtype.itemsize == 8 else 1
    for k, word in enumerate(words.tolist()):
        index = int(box.indices(np.array([k // per]))[0]) * per + k % per
        a = ((index * 0x9E3779B97F4A7C15 + key.index_0) % 2**64) >> 32
        b = ((index * 0xD1B54A32D192ED03 + key.index_1) % 2**64) >> 32
        v = (word * 0x85EBCA6B + key.bits_0) % 2**32
        u = (word * 0xC2B2AE35 + key.bits_1) % 2**32
        lanes[0] += (a ^ v) * ((b + v) % 2**32)
        lanes[1] += (b ^ u) * ((a + u) % 2**32)
    return Digest(lanes[0] % 2**64, lanes[1] % 2**64)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_kernel_computes_the_definition(dtype):
    bits = random_bits(np.random.default_rng(5), dtype, 300)
    spec = spec_of("model.w", dtype, 300)
    for box in (Box.run(0, 300), Box.run(7, 300), Box(1, (10, 30), (60, 2))):
        assert digest_box(spec, bits, box) == reference(spec, bits, box)


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16", "U8", "I64", "F64", "F8_E4M3", "BOOL"])
def test_torch_and_cpu_agree(dtype):
    bits = random_bits(np.random.default_rng(6), dtype, 1000)
    if dtype == "BOOL":
        bits &= np.uint8(1)
    width = DTYPES[dtype].width
    tensor = torch.from_numpy(bits.view("u1" if width == 1 else f"i{width}")).view(DTYPES[dtype].torch)
    spec = spec_of("w", dtype, 5000)
    for box in (Box.run(3, 1000), Box(3, (20, 50), (150, 3))):
        assert digest_torch(spec, tensor, box, chunk=77) == digest_box(spec, bits, box)


@quick
@given(st.integers(0, 2**32), st.sampled_from(DTYPE_NAMES), st.integers(1, 2000), st.lists(st.floats(0, 1), max_size=6))
def test_parts_of_any_cut_add_up_to_the_whole(seed, dtype, count, cuts):
    count = whole(dtype, count)
    bits = random_bits(np.random.default_rng(seed), dtype, count)
    spec = spec_of("w", dtype, count)
    at = sorted({0, count, *(int(c * count) for c in cuts)})
    parts = [digest_box(spec, bits[a:b], Box.run(a, b - a)) for a, b in pairwise(at)]
    assert header_digest(spec) + Digest.sum(parts) == digest_tensor(spec, bits)
    assert digest_tensor(spec, bits, threads=2) == digest_tensor(spec, bits)


@quick
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 8), st.integers(1, 8))
def test_columns_and_rows_give_the_same_total(seed, parts, rows, cols):
    bits = random_bits(np.random.default_rng(seed), "BF16", rows * cols * parts)
    spec = TensorSpec("w", "BF16", (rows, cols * parts))
    matrix = bits.reshape(rows, cols * parts)
    columns = [
        digest_box(
            spec,
            np.ascontiguousarray(matrix[:, p * cols : (p + 1) * cols]).ravel(),
            Box(p * cols, (rows, cols), (cols * parts, 1)),
        )
        for p in range(parts)
    ]
    assert Digest.sum(columns) == digest_box(spec, bits, Box.run(0, len(bits)))


@quick
@given(transitions(600))
def test_two_states_that_differ_have_different_digests(case):
    dtype, old, new = case
    spec = spec_of("w", dtype, len(old))
    assert (digest_tensor(spec, old) == digest_tensor(spec, new)) == np.array_equal(old, new)


def test_paired_flips_swaps_and_shifts_are_noticed():
    """A sum that is linear in the bits misses paired flips of high bits half of the time."""
    rng = np.random.default_rng(0)
    bits = random_bits(rng, "BF16", 4096)
    spec, box = spec_of("w", "BF16", 4096), Box.run(0, 4096)
    right = digest_box(spec, bits, box)
    for _ in range(3000):
        i, j = rng.choice(4096, 2, replace=False)
        wrong = bits.copy()
        mode = rng.integers(0, 3)
        if mode == 0:
            wrong[[i, j]] ^= np.uint16(1 << rng.integers(0, 16))
        elif mode == 1:
            wrong[[i, j]] = wrong[[j, i]]
        else:
            wrong[min(i, j) : max(i, j)] = np.roll(wrong[min(i, j) : max(i, j)], 1)
        if not np.array_equal(wrong, bits):
            found = digest_box(spec, wrong, box)
            assert found.lane0 != right.lane0 and found.lane1 != right.lane1, "each lane on its own notices"


def test_name_dtype_and_shape_are_part_of_it_and_empty_tensors_count():
    bits = np.zeros(6, np.uint16)
    specs = [
        TensorSpec("a", "BF16", (6,)),
        TensorSpec("b", "BF16", (6,)),
        TensorSpec("a", "F16", (6,)),
        TensorSpec("a", "BF16", (2, 3)),
        TensorSpec("a", "BF16", (3, 2)),
    ]
    assert len({digest_tensor(spec, bits) for spec in specs}) == len(specs)
    empty = [TensorSpec("e", "BF16", (0, 4)), TensorSpec("e", "BF16", (4, 0))]
    assert len({digest_tensor(spec, bits[:0]) for spec in empty} | {Digest()}) == 3
    assert digest_tensor(TensorSpec("s", "F32", ()), np.zeros(1, np.uint32)) != Digest()


def test_the_test_vectors_of_the_format_hold():
    spec = TensorSpec("model.embed_tokens.weight", "BF16", (2, 3))
    bits = np.array([0x3F80, 0xBF80, 0x0000, 0x8000, 0x7FC0, 0x0001], np.uint16)
    key = tensor_key(spec)
    assert digest_tensor(spec, bits) == header_digest(spec) + reference(spec, bits, Box.run(0, 6))
    assert [f"{word:x}" for word in key] == VECTOR_KEY
    assert digest_tensor(spec, bits).hex() == VECTOR_DIGEST
    assert digest_tensor(TensorSpec("n", "I64", (2,)), np.array([1, 2**63], np.uint64)).hex() == VECTOR_I64


VECTOR_KEY = ["55632cac2470be7f", "10ac8c23e0921f6c", "61fd3157", "2a677617", "5e8064f8e0435651", "a4ee1ef6c24c3982"]
VECTOR_DIGEST = "fbd77d500b8fa86f344a4ae42785f7d6"
VECTOR_I64 = "5239641ea204e4fd7228fe3d795dbb79"
