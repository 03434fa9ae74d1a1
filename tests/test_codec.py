"""The codec: what goes in comes out, in every form, for all dtypes and bit patterns; bad bytes are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codec_cases import (
    ABSOLUTE,
    COMPACT,
    DTYPE_NAMES,
    STEP,
    nearby,
    random_bits,
    round_trip,
    spec_of,
    transitions,
    with_regions,
)
from weight_sync.codec import intstream
from weight_sync.codec.apply import apply_changes, changed_digest, new_bits_of, restore_changes
from weight_sync.codec.classcount import count_known
from weight_sync.codec.classstream import decode_classes, encode_classes
from weight_sync.codec.classtable import unpack_tables
from weight_sync.codec.diff import ChangeBuffer, diff_run, diff_torch
from weight_sync.codec.digest import Digest, digest_box
from weight_sync.codec.frame import FrameBox, decode_frame, encode_changes, encode_frame, split
from weight_sync.codec.ordered import add_steps, steps_between
from weight_sync.codec.stepform import Cursor
from weight_sync.dtypes import DTYPES
from weight_sync.errors import CorruptionError, FormatError, LayoutError, WeightSyncError, WrongBaseError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes

quick = settings(max_examples=60, deadline=None)


def changes_of(dtype, old, new):
    buffer = ChangeBuffer(DTYPES[dtype], len(old))
    assert diff_run(old, new, 0, buffer) == len(old)
    positions, steps = buffer.view()
    return positions.copy(), steps.copy()


@quick
@given(transitions())
def test_diff_finds_exactly_the_elements_whose_bits_differ(case):
    dtype, old, new = case
    positions, steps = changes_of(dtype, old, new)
    assert np.array_equal(positions, np.flatnonzero(old != new))
    assert np.array_equal(add_steps(old[positions], steps, DTYPES[dtype]), new[positions])


@quick
@given(transitions())
def test_diff_on_a_torch_device_equals_the_cpu_kernel(case):
    dtype, old, new = case
    signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[old.dtype.itemsize]
    as_torch = [
        torch.from_numpy(x.view("u1" if x.dtype.itemsize == 1 else f"i{x.dtype.itemsize}")).view(signed)
        for x in (old, new)
    ]
    buffer = ChangeBuffer(DTYPES[dtype], len(old))
    assert diff_torch(*as_torch, 0, buffer, chunk=97) == len(old)
    for mine, other in zip(buffer.view(), changes_of(dtype, old, new), strict=True):
        assert np.array_equal(mine, other)


@pytest.mark.parametrize("form", [STEP, COMPACT])
def test_every_relative_form_restores_the_exact_bits(form):
    @quick
    @given(transitions())
    def check(case):
        dtype, old, new = case
        positions, steps = changes_of(dtype, old, new)
        spec = spec_of("w", dtype, len(old))
        decoded = round_trip(form, spec, old, positions, steps)
        out = old.copy()
        for item in decoded:
            apply_changes(item, out, Box.run(0, len(old)))
        assert np.array_equal(out, new)

    check()


@quick
@given(transitions(), st.integers(0, 2**32))
def test_the_absolute_form_leads_from_any_state_to_the_new_bits_and_may_be_applied_twice(case, seed):
    dtype, old, new = case
    positions, _ = changes_of(dtype, old, new)
    spec = spec_of("w", dtype, len(old))
    out = random_bits(np.random.default_rng(seed), dtype, len(old))
    for _ in range(2):
        for item in round_trip(ABSOLUTE, spec, old, positions, new[positions]):
            apply_changes(item, out, Box.run(0, len(old)))
    assert np.array_equal(out[positions], new[positions])


@pytest.mark.parametrize("count", [1 << 20, (1 << 20) + 5, (1 << 21) + 63])
@pytest.mark.parametrize("dtype,lanes", [("BF16", 1), ("F8_E4M3", 4), ("F32", 1), ("BF16", 4)])
def test_compact_lanes_cover_large_frames_of_odd_sizes(count, dtype, lanes):
    rng = np.random.default_rng(count)
    old = random_bits(rng, dtype, count)
    new = nearby(rng, old, 0.01, 0.02)
    positions, steps = changes_of(dtype, old, new)
    cut = count // 3 + 1
    boxes = [
        FrameBox(spec_of("a", dtype, cut), Box.run(0, cut)),
        FrameBox(spec_of("b", dtype, count - cut), Box.run(0, count - cut)),
    ]
    counted = count_known(DTYPES[dtype], lanes, positions, [old[:cut], old[cut:]])
    frame = encode_frame(COMPACT, boxes, positions, steps, counted=counted)
    assert frame.header.lanes == lanes
    header, specs = with_regions(frame)
    parts = {"a": old[:cut].copy(), "b": old[cut:].copy()}
    for item in decode_frame(
        COMPACT, header, memoryview(b"".join(frame.payload)), specs, lambda box: parts[box.spec.name]
    ):
        apply_changes(item, parts[item.spec.name], Box.run(0, len(parts[item.spec.name])))
    assert np.array_equal(np.concatenate([parts["a"], parts["b"]]), new)


def test_signed_zeros_nan_payloads_and_infinities_survive():
    old = np.array([0x0000, 0x8000, 0x7FC0, 0x7FC1, 0xFFFF, 0x7F80, 0xFF80, 0x0001], np.uint16)
    new = np.array([0x8000, 0x0000, 0x7FC1, 0xFFC0, 0x0000, 0xFF80, 0x7F80, 0x8001], np.uint16)
    positions, steps = changes_of("BF16", old, new)
    assert len(positions) == 8, "0.0 and -0.0 are different bits"
    assert steps[0] == 0xFFFF and steps[1] == 1, "and neighbours on the ordered line"
    for form in (STEP, COMPACT):
        (item,) = round_trip(form, spec_of("w", "BF16", 8), old, positions, steps)
        assert np.array_equal(new_bits_of(item, old), new)


@quick
@given(transitions())
def test_undo_restores_every_bit_and_the_digest(case):
    dtype, old, new = case
    spec, box = spec_of("w", dtype, len(old)), Box.run(0, len(old))
    positions, steps = changes_of(dtype, old, new)
    item = Changes(spec, box, positions, steps)
    state = old.copy()
    kept, gained = apply_changes(item, state, box)
    assert gained == changed_digest(item, old[positions])
    assert digest_box(spec, old, box) + gained == digest_box(spec, state, box)
    for _ in range(2):  # a rollback that is interrupted and started again
        restore_changes(item, state, box, kept)
    assert np.array_equal(state, old)


@quick
@given(st.integers(0, 2**32), st.integers(1, 400), st.sampled_from([1, 3, 70, 1 << 20, 1 << 45, 1 << 63]))
def test_integer_streams_invert_whatever_the_numbers(seed, count, scale):
    values = np.random.default_rng(seed).integers(0, scale, count, dtype=np.uint64)
    stream, parts = intstream.encode(values)
    data = memoryview(b"".join(parts))
    assert len(data) == intstream.stream_size(stream)
    assert np.array_equal(intstream.decode(stream, data, np.uint64, "test"), values)


@pytest.mark.parametrize("largest", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_one_huge_number_among_small_ones_is_coded(largest):
    """Nearly all low bits are zero then, so the huge one has a high part of 63 or 64 bits."""
    values = np.array([1] * 100 + [largest] + [0] * 5, np.uint64)
    stream, parts = intstream.encode(values)
    assert np.array_equal(intstream.decode(stream, memoryview(b"".join(parts)), np.uint64, "test"), values)
    lists = [values, np.array([3, largest], np.uint64)]
    header, parts = encode_classes(lists, spread=False)
    back = decode_classes(header, Cursor(memoryview(b"".join(parts))), [len(v) for v in lists], np.uint64, "test")
    assert np.array_equal(back, np.concatenate(lists))


@quick
@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3))
def test_changes_in_strided_boxes_land_on_their_coordinates(seed, dims):
    rng = np.random.default_rng(seed)
    sizes = tuple(n for n, _ in dims)
    strides, span = [], 1
    for n, gap in reversed(dims):
        strides.insert(0, span * gap)
        span = strides[0] * n
    box = Box(int(rng.integers(0, 5)), sizes, tuple(strides))
    spec = spec_of("w", "BF16", box.last + 1 + int(rng.integers(0, 4)))
    state = random_bits(rng, "BF16", spec.elements)
    positions = np.sort(rng.permutation(box.count)[: max(1, box.count // 2)]).astype(np.uint32)
    steps = rng.integers(1, 1 << 16, len(positions)).astype(np.uint16)
    expected = state.copy()
    flat = box.indices(positions)
    assert np.array_equal(box.find(flat), positions)
    expected[flat] = add_steps(expected[flat], steps, DTYPES["BF16"])
    _, gained = apply_changes(Changes(spec, box, positions, steps), before := state.copy(), box)
    assert np.array_equal(before, expected)
    whole = Box.run(0, spec.elements)
    assert digest_box(spec, state, whole) + gained == digest_box(spec, expected, whole)


def test_a_place_that_does_not_fit_is_refused_before_anything_is_written():
    spec = spec_of("w", "BF16", 10)
    item = Changes(spec, Box.run(0, 10), np.array([9], np.uint32), np.array([1], np.uint16))
    state = np.zeros(9, np.uint16)
    with pytest.raises(LayoutError, match="place does not fit"):
        apply_changes(item, state, Box.run(0, 10))
    assert not state.any()


def frame_of(form, count=5000, dtype="BF16", seed=3):
    rng = np.random.default_rng(seed)
    old = random_bits(rng, dtype, count) & np.uint16(0x3FFF)
    new = nearby(rng, old, 0.05, 0.05)
    positions, steps = changes_of(dtype, old, new)
    boxes = [FrameBox(spec_of("w", dtype, count), Box.run(0, count))]
    given_ = new[positions] if form == ABSOLUTE else steps
    frame = encode_frame(form, boxes, positions, given_, [old])
    return old, frame


@pytest.mark.parametrize("form", [STEP, COMPACT, ABSOLUTE])
def test_every_flipped_bit_of_a_payload_is_noticed_by_its_hash(form):
    old, frame = frame_of(form, 800)
    header, specs = with_regions(frame)
    payload = bytearray(b"".join(frame.payload))
    for at in range(0, 8 * len(payload), 7):
        payload[at // 8] ^= 1 << at % 8
        with pytest.raises(CorruptionError):
            decode_frame(form, header, memoryview(bytes(payload)), specs, lambda box: old)
        payload[at // 8] ^= 1 << at % 8


@pytest.mark.parametrize("form", [STEP, COMPACT, ABSOLUTE])
def test_hostile_payloads_with_a_right_hash_raise_typed_errors_or_decode_within_their_frame(form):
    from weight_sync.codec.frame import hash16

    old, frame = frame_of(form)
    header, specs = with_regions(frame)
    payload = bytearray(b"".join(frame.payload))
    rng = np.random.default_rng(1)
    for _ in range(300):
        bad = bytearray(payload)
        for at in rng.integers(0, len(bad), rng.integers(1, 4)):
            bad[at] = rng.integers(0, 256)
        header.blake3 = hash16([bytes(bad)])
        try:
            for item in decode_frame(form, header, memoryview(bytes(bad)), specs, lambda box: old):
                assert len(item.positions) == header.changes and item.positions.max() < 5000
        except WeightSyncError:
            continue


def bad_tables(frame):
    """Packed tables that are cut, or of other classes, widths or counts."""
    good = frame.header.class_tables
    yield good[:-1]
    yield good[:20]
    yield bytes(32) + good[32:]
    yield good[:32] + b"\3" + good[33:]
    yield bytes([good[0] ^ 1]) + good[1:]


@pytest.mark.parametrize("form", [STEP, COMPACT, ABSOLUTE])
def test_headers_that_disagree_with_their_payload_are_format_errors(form):
    old, frame = frame_of(form)

    def broken(edit):
        header, specs = with_regions(frame)
        header = unpack_tables(header)
        header.ClearField("class_tables")
        edit(header)
        return header, specs

    edits = [
        lambda h: setattr(h, "changes", h.changes + 1),
        lambda h: setattr(h, "changes", 1 << 40),
        lambda h: setattr(h, "elements", h.elements + 1),
        lambda h: setattr(h.regions[0], "tensor", 7),
        lambda h: h.regions[0].sizes.append(1 << 50),
        lambda h: h.regions.add(),
        lambda h: h.regions.pop(),
    ]
    if form == COMPACT:
        edits += [
            lambda h: setattr(h, "lanes", 3),
            lambda h: setattr(h, "class_ids", h.class_ids[::-1]),
            lambda h: h.class_counts.append(1),
            lambda h: setattr(h.class_gaps, "groups", b"\xff" * len(h.class_ids)),
            lambda h: setattr(h, "class_wide", b""),
            *(lambda h, tables=tables: setattr(h, "class_tables", tables) for tables in bad_tables(frame)),
        ]
    else:
        edits += [
            lambda h: setattr(h.gaps, "count", h.gaps.count + 1),
            lambda h: setattr(h.gaps, "low_bits", 60),
            lambda h: setattr(h.gaps, "symbols_size", 1 << 30),
        ]
    for edit in edits:
        header, specs = broken(edit)
        with pytest.raises(FormatError):
            decode_frame(form, header, memoryview(b"".join(frame.payload)), specs, lambda box: old)


def test_a_compact_frame_on_other_old_bits_never_passes_unnoticed():
    old, frame = frame_of(COMPACT)
    header, specs = with_regions(frame)
    other = old.copy()
    other[::2] ^= np.uint16(0x0180)
    payload = memoryview(b"".join(frame.payload))
    right = decode_frame(COMPACT, header, payload, specs, lambda box: old)
    try:
        wrong = decode_frame(COMPACT, header, payload, specs, lambda box: other)
    except WrongBaseError:
        return
    digests = []
    for items, bits in ((right, old), (wrong, other)):
        state = bits.copy()
        gained = Digest.sum(apply_changes(item, state, Box.run(0, len(state)))[1] for item in items)
        digests.append(digest_box(items[0].spec, old, Box.run(0, len(old))) + gained)
    assert digests[0] != digests[1]


@quick
@given(st.integers(0, 2**32), st.lists(st.integers(0, 400), min_size=1, max_size=6))
def test_frames_of_known_changes_split_into_the_same_changes(seed, sizes):
    rng = np.random.default_rng(seed)
    items = []
    for i, size in enumerate(sizes):
        spec = spec_of(f"t{i}", ["BF16", "BF16", "F32"][i % 3], size + 1)
        at = np.flatnonzero(rng.random(size + 1) < 0.3).astype(np.uint32)
        steps = rng.integers(1, 1 << 16, len(at)).astype(spec.type.uint)
        if len(at):
            items.append(Changes(spec, Box.run(0, size + 1), at, steps))
    back = [item for frame in encode_changes(items) for item in frame.changes()]
    assert [item.spec for item in back] == [item.spec for item in items]
    for a, b in zip(items, back, strict=True):
        assert np.array_equal(a.positions, b.positions) and np.array_equal(a.steps, b.steps)


def test_splitting_leaves_boxes_without_changes_out():
    boxes = [FrameBox(spec_of(n, "U8", 4), Box.run(0, 4)) for n in "abc"]
    items = split(boxes, np.array([1, 9], np.uint32), np.array([7, 8], np.uint8))
    assert [(i.spec.name, i.positions.tolist(), i.steps.tolist()) for i in items] == [("a", [1], [7]), ("c", [1], [8])]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_steps_between_neighbours_are_one_ulp(dtype):
    kind = DTYPES[dtype]
    low = np.array([5, 6], kind.uint)
    assert steps_between(low[:1], low[1:], kind)[0] == 1
    if kind.signed_magnitude:
        top = kind.uint.type(1 << (8 * kind.width - 1))
        minus = low | top
        step = steps_between(minus[1:], minus[:1], kind)[0]
        assert step == 1, "towards zero is up for negative numbers"
