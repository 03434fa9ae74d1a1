"""Counting within classes: vector walks give what the definition says, whatever the data, and finding inverts them."""

from __future__ import annotations

import os
import subprocess
import sys

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


MACHINE = """
import numpy as np
from weight_sync.codec.machine import SLOT, before256, high_mask64, kernel, nth_bit, slots256

@kernel
def slots_of(rule, a, low):
    slots, rows = np.zeros(300, np.uint8), np.full(48, 7, np.uint16)
    outside = slots256(rule, a, 40, low, slots, 9, rows, 1)
    return slots, rows, outside

@kernel
def before(slots, start, end, slot):
    return before256(slots, start, end, slot)

@kernel
def high(slots, start):
    return high_mask64(slots, start)

@kernel
def nth(mask, rank):
    return nth_bit(mask, rank)

rng = np.random.default_rng(0)
for width, shift, bits in ((1, 0, 8), (2, 7, 8), (2, 10, 5), (4, 23, 8), (8, 55, 8)):
    for first, spread in ((0, 1), (3, 16), (20, 9), (0, 256), (239, 17)):
        classes = ((first + rng.integers(0, spread, 300)) % (1 << bits)).astype(np.uint64)
        noise = rng.integers(0, 1 << 63, 300, np.uint64) & ~np.uint64(((1 << bits) - 1) << shift)
        a = (noise | (classes << np.uint64(shift))).astype(f"u{width}")
        for low in (0, 3, 112, 240):
            slots, rows, outside = slots_of(((0,) * shift, (0,) * bits), a, np.uint64(low))
            place = classes[40:296].astype(int) - low
            inside = (place >= 0) & (place < 16)
            assert int(outside) == (not inside.all())
            assert (slots[9:265][inside] == SLOT + place[inside]).all() and (slots[9:265][~inside] >= 0x80).all()
            assert not slots[:9].any() and not slots[265:].any()
            assert rows[32:].tolist() == [7 + int((place == k).sum()) for k in range(16)] and (rows[:32] == 7).all()
            assert [int(high(slots, 9)) >> k & 1 for k in range(64)] == (~inside[:64]).tolist()
            for end in (0, 1, 31, 32, 200, 255):
                want = int((place[:end] == 5).sum())
                assert int(before(slots, 9, np.uint64(end), np.uint64(SLOT + 5))) == want
for mask in (1, 1 << 63, (1 << 64) - 1, *(int(x) for x in rng.integers(1, 1 << 63, 20, np.uint64))):
    places = [k for k in range(64) if mask >> k & 1]
    assert [int(nth(np.uint64(mask), np.uint64(k))) for k in range(len(places))] == places
"""


@pytest.mark.parametrize("processor", [{}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}])
def test_counts_do_not_depend_on_what_the_processor_offers(tmp_path, processor):
    script = tmp_path / "machine.py"
    script.write_text(MACHINE)
    env = {**os.environ, **processor, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
