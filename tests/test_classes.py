"""Counting within classes: vector walks give what the definition says, whatever the data, and finding inverts them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.codec.classcount import ClassCounter, count_known, lanes_for
from weight_sync.codec.classfind import find_changes
from weight_sync.codec.classrule import CLASSES
from weight_sync.codec.diff import ChangeBuffer
from weight_sync.dtypes import DTYPES


def elements(rng, dtype, count, spread):
    """(count,) bits: classes in a bell of the given width, and now and then one from anywhere."""
    top = (1 << dtype.class_bits) - 1
    near = np.clip(rng.normal(top * 0.45, spread, count), 0, top).astype(np.uint64)
    classes = np.where(rng.random(count) < 0.03, rng.integers(0, top + 1, count, np.uint64), near)
    noise = rng.integers(0, 1 << 63, count, np.uint64)
    field = np.uint64(top << dtype.class_shift)
    return ((noise & ~field) | (classes << np.uint64(dtype.class_shift))).astype(dtype.uint)


def counts_by_definition(dtype, old, positions):
    """(keys, gaps) of one lane, element by element."""
    since, keys, gaps = [0] * CLASSES, [], []
    changed = set(positions.tolist())
    for i, bits in enumerate(old.tolist()):
        c = (bits >> dtype.class_shift) & ((1 << dtype.class_bits) - 1)
        if i in changed:
            keys.append(c)
            gaps.append(since[c])
            since[c] = 0
        else:
            since[c] += 1
    return keys, gaps


def found_again(dtype, regions, keys, gaps):
    """`find_changes` on what an encoder would have sent."""
    by_class = np.argsort(keys, kind="stable")
    counts = np.bincount(keys, minlength=CLASSES)
    tail = np.cumsum(counts)[None].astype(np.int64)
    head = tail - counts
    positions, order = find_changes(dtype, regions, head, tail, gaps[by_class] * np.uint32(2))
    assert np.array_equal(head, tail)
    assert np.array_equal(order, np.argsort(by_class))
    return positions


@pytest.mark.parametrize("name", ["BF16", "F32", "F64", "F8_E4M3"])
def test_vector_walks_count_as_defined_and_finding_inverts(name):
    dtype = DTYPES[name]

    @settings(max_examples=15, deadline=None)
    @given(
        st.integers(0, 2**32),
        st.lists(st.sampled_from([0, 1, 63, 1000, 1023, 1024, 1025, 2048, 5003, 17000]), min_size=1, max_size=4),
        st.sampled_from([0.1, 2.0, 8.0, 60.0]),
        st.sampled_from([0.0, 0.001, 0.01, 0.3, 1.0]),
    )
    def check(seed, sizes, spread, density):
        rng = np.random.default_rng(seed)
        regions = [elements(rng, dtype, size, spread) for size in sizes]
        old = np.concatenate(regions)
        changed = rng.random(len(old)) < density
        positions = np.flatnonzero(changed).astype(np.uint32)
        keys, gaps = counts_by_definition(dtype, old, positions)
        known = count_known(dtype, 1, positions, regions)
        assert known.keys.tolist() == keys and known.gaps.tolist() == gaps

        out = ChangeBuffer(dtype, len(old) + 1)
        counter = ClassCounter(dtype, 1, len(old) + 1)
        base = 0
        for region in regions:
            new = region ^ changed[base : base + len(region)].astype(dtype.uint)
            assert counter.diff_run(region, new, base, out) == len(region)
            base += len(region)
        assert np.array_equal(out.view()[0], positions)
        assert counter.keys[: out.count].tolist() == keys and counter.gaps[: out.count].tolist() == gaps
        assert np.array_equal(found_again(dtype, regions, known.keys, known.gaps), positions)

    check()


def test_only_large_frames_of_bytes_are_cut_into_lanes():
    large = 1 << 20
    assert [lanes_for(DTYPES[n], large) for n in ("F8_E4M3", "BF16", "F32", "F64")] == [4, 1, 1, 1]
    assert lanes_for(DTYPES["F8_E4M3"], large - 1) == 1
