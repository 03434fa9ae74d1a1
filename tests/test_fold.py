"""Fold: one patch that does what many do, without weights; and shards that hold patches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.codec_cases import COMPACT, STEP, nearby, random_bits, spec_of, with_regions
from weight_sync.codec.apply import apply_changes
from weight_sync.codec.diff import ChangeBuffer, diff_run
from weight_sync.codec.fold import fold_changes, on_dense
from weight_sync.codec.frame import decode_frame, encode_changes
from weight_sync.codec.patch import DiffPiece, encode_patch
from weight_sync.codec.shard import build_shard, identity, parse_head
from weight_sync.dtypes import DTYPES
from weight_sync.errors import FormatError, LineageError, WeightSyncError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece
from weight_sync.tensors import TensorSpec

quick = settings(max_examples=50, deadline=None)


def step_changes(spec, old, new, cuts):
    """Changes of one version, the tensor cut into runs at ``cuts``."""
    out = []
    for a, b in pairwise(cuts):
        buffer = ChangeBuffer(spec.type, max(1, b - a))
        diff_run(old[a:b], new[a:b], 0, buffer)
        positions, steps = (x.copy() for x in buffer.view())
        if len(positions):
            out.append(Changes(spec, Box.run(a, b - a), positions, steps))
    return out


@quick
@given(
    st.integers(0, 2**32), st.sampled_from(["BF16", "F32", "F8_E4M3", "I64", "U8"]), st.integers(1, 500),
    st.integers(1, 6), st.booleans(), st.sampled_from([0.01, 0.3, 1.0]),
)  # fmt: skip
def test_a_fold_equals_the_patches_one_after_the_other_however_they_were_sharded(
    seed, dtype, count, versions, same_cuts, density
):
    rng = np.random.default_rng(seed)
    spec = spec_of("w", dtype, count)
    states = [random_bits(rng, dtype, count)]
    for _ in range(versions):
        states.append(nearby(rng, states[-1], density, 0.1))
    if versions > 2:
        states[2] = states[0].copy()  # changes that are taken back drop out
    cuts = sorted({0, count, *rng.integers(0, count + 1, 2).tolist()})
    patches = []
    for old, new in pairwise(states):
        if not same_cuts:
            cuts = sorted({0, count, *rng.integers(0, count + 1, 2).tolist()})
        patches.append(step_changes(spec, old, new, cuts))
    folded = fold_changes(patches)
    out = states[0].copy()
    for item in folded:
        assert (np.diff(item.positions.astype(np.int64)) > 0).all()
        apply_changes(item, out, item.coords)
    assert np.array_equal(out, states[-1])
    assert sum(len(i.positions) for i in folded) == np.count_nonzero(states[0] != states[-1]), "nothing superfluous"


def test_columns_of_one_version_and_rows_of_the_next_fold():
    rng = np.random.default_rng(4)
    spec = TensorSpec("w", "BF16", (6, 8))
    a = random_bits(rng, "BF16", 48)
    b, c = nearby(rng, a, 0.5, 0.5), None
    c = nearby(rng, b, 0.5, 0.5)
    columns = [Box(0, (6, 4), (8, 1)), Box(4, (6, 4), (8, 1))]
    first = []
    for box in columns:
        old, new = box.view(a).ravel(), box.view(b).ravel()
        buffer = ChangeBuffer(spec.type, 24)
        diff_run(old, new, 0, buffer)
        first.append(Changes(spec, box, *(x.copy() for x in buffer.view())))
    second = step_changes(spec, b, c, [0, 24, 48])
    out = a.copy()
    for item in fold_changes([first, second]):
        apply_changes(item, out, item.coords)
    assert np.array_equal(out, c)


def test_a_fold_over_a_change_of_shape_is_refused():
    one = [Changes(spec_of("w", "BF16", 4), Box.run(0, 4), np.array([1], np.uint32), np.array([1], np.uint16))]
    two = [Changes(spec_of("w", "BF16", 5), Box.run(0, 5), np.array([1], np.uint32), np.array([1], np.uint16))]
    with pytest.raises(LineageError, match="changes shape"):
        fold_changes([one, two])


def test_later_changes_apply_to_dense_bits():
    spec = spec_of("w", "BF16", 10)
    bits = np.arange(10, dtype=np.uint16)
    item = Changes(spec, Box.run(4, 4), np.array([0, 3], np.uint32), np.array([5, 1], np.uint16))
    assert on_dense(bits, Box.run(0, 10), [item]).tolist() == [0, 1, 2, 3, 9, 5, 6, 8, 8, 9]


# --- patches over many pieces, and their shards ---


def pieces_of(rng, layout, density=0.05):
    old = {name: random_bits(rng, dtype, n) for name, dtype, n in layout}
    new = {name: nearby(rng, bits, density, 0.2) for name, bits in old.items()}
    pieces = [
        DiffPiece(spec_of(name, dtype, n), Box.run(0, n), lambda b=old[name]: b, lambda a, z, b=new[name]: b[a:z])
        for name, dtype, n in layout
    ]
    return old, new, pieces


def test_small_frames_and_full_buffers_lose_nothing(monkeypatch):
    from weight_sync.codec import patch

    monkeypatch.setattr(patch, "FRAME_ELEMENTS", 1000)
    monkeypatch.setattr(patch, "FRAME_CHANGES", 150)
    monkeypatch.setattr(patch, "READ", 130)
    rng = np.random.default_rng(9)
    layout = [("a", "BF16", 3100), ("b", "BF16", 10), ("c", "F32", 700), ("d", "BF16", 999), ("e", "U8", 1)]
    for density in (0.0, 0.01, 0.5, 1.0):
        old, new, pieces = pieces_of(rng, layout, density)
        box = Box(100, (50, 20), (60, 2))  # a strided piece of a tensor of its own
        spec, before = spec_of("s", "BF16", 4000), random_bits(rng, "BF16", 1000)
        after = nearby(rng, before, density, 0.1)
        pieces.insert(2, DiffPiece(spec, box, lambda b=before: b, lambda a, z, b=after: b[a:z]))
        made = encode_patch(pieces, [STEP], threads=2)
        for frame in made.frames[STEP]:
            assert frame.header.elements <= 1000 and frame.header.changes <= 150 + 64
            for item in frame.changes():
                target = old.get(item.spec.name)
                if target is None:
                    at = box.find(item.coords.indices(item.positions))
                    run = Changes(spec, Box.run(0, 1000), at.astype(np.uint32), item.steps)
                    apply_changes(run, before, Box.run(0, 1000))
                else:
                    apply_changes(item, target, item.coords)
        assert all(np.array_equal(old[name], new[name]) for name in old) and np.array_equal(before, after)


@pytest.mark.parametrize(
    ("elements", "room"), [(1 << 21, 20_000), ((1 << 20) + 777, 16_384), (40_000, 17_000), (5_000, 64)]
)
def test_compact_frames_counted_while_comparing_equal_the_step_frames(monkeypatch, elements, room):
    from weight_sync.codec import patch

    monkeypatch.setattr(patch, "FRAME_CHANGES", room)
    monkeypatch.setattr(patch, "READ", 1 << 15)
    rng = np.random.default_rng(elements)
    layout = [("a", "BF16", elements // 3 + 1), ("b", "BF16", 130), ("c", "BF16", elements // 2)]
    for density in (0.004, 0.3):
        old, new, pieces = pieces_of(rng, layout, density)
        made = encode_patch(pieces, [STEP, COMPACT], threads=2)
        assert len(made.frames[STEP]) == len(made.frames[COMPACT]) >= 1
        for step, compact in zip(made.frames[STEP], made.frames[COMPACT], strict=True):
            header, specs = with_regions(compact)
            payload = memoryview(b"".join(compact.payload))
            found = decode_frame(COMPACT, header, payload, specs, lambda b, old=old: b.coords.view(old[b.spec.name]))
            for mine, other in zip(found, step.changes(), strict=True):
                assert (mine.spec, mine.coords) == (other.spec, other.coords)
                assert np.array_equal(mine.positions, other.positions) and np.array_equal(mine.steps, other.steps)
        for frame in made.frames[STEP]:
            for item in frame.changes():
                apply_changes(item, old[item.spec.name], item.coords)
        assert all(np.array_equal(old[name], new[name]) for name in old)


NAMES = ["..", "a/b", "../../etc/passwd", "ü→模型", "__weight_sync__.index", "__weight_sync__.frame.0", "", " ", "a\nb"]


def test_shards_carry_any_name_and_open_in_safetensors(tmp_path):
    rng = np.random.default_rng(2)
    _, _, pieces = pieces_of(rng, [(name, "BF16", 300) for name in NAMES])
    made = encode_patch(pieces, [STEP], 1)
    dense = [DensePiece(spec_of(f"new {n}", "F32", 5), Box.run(0, 5), random_bits(rng, "F32", 5)) for n in NAMES]
    dense.append(DensePiece(spec_of("part", "F32", 9), Box.run(2, 3), random_bits(rng, "F32", 3)))
    dense.append(DensePiece(TensorSpec("zero", "F32", (0, 3)), Box.run(0, 0), random_bits(rng, "F32", 0)))
    shard = build_shard("x", identity("run", 7, 3, "default", STEP), made.frames[STEP], dense)
    data = shard.head + b"".join(bytes(part) for part in shard.body)
    assert len(data) == shard.size
    head = parse_head(memoryview(data)[: len(shard.head)], len(data))
    assert (head.index.run_id, head.index.number, head.index.rank) == ("run", 7, 3)
    for piece, box, (offset, length) in zip(head.index.pieces, head.boxes, head.piece_spans, strict=True):
        spec = head.specs[piece.region.tensor]
        (want,) = [p for p in dense if p.spec == spec]
        assert box == want.coords and data[offset : offset + length] == want.bits.tobytes()
    (tmp_path / "s.safetensors").write_bytes(data)
    with safe_open(str(tmp_path / "s.safetensors"), framework="np") as file:
        assert "new .." in file.keys()  # noqa: SIM118 - not a dict
        assert np.array_equal(file.get_tensor("new a/b").view(np.uint32), dense[1].bits)


def test_every_cut_and_flip_of_a_head_is_a_format_error_or_harmless():
    rng = np.random.default_rng(3)
    _, _, pieces = pieces_of(rng, [("a", "BF16", 400), ("b", "F32", 50)])
    shard = build_shard("x", identity("run", 7, 0, "default", STEP), encode_patch(pieces, [STEP], 1).frames[STEP])
    for size in range(0, len(shard.head), 3):
        with pytest.raises(FormatError):
            parse_head(shard.head[:size], shard.size)
    for _ in range(1500):
        bad = bytearray(shard.head)
        bad[rng.integers(0, len(bad))] = rng.integers(0, 256)
        try:
            head = parse_head(bytes(bad), shard.size)
        except FormatError:
            continue
        assert all(o >= 0 and o + n <= shard.size for o, n in head.frame_spans + head.piece_spans)


def test_foreign_safetensors_files_are_told_apart():
    import json
    import struct

    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    with pytest.raises(FormatError, match="not a weight_sync shard"):
        parse_head(struct.pack("<Q", len(text)) + text + b"\0" * 4, 12 + len(text))
    with pytest.raises(FormatError, match="leaves the head"):
        parse_head(struct.pack("<Q", 1 << 60) + b"{}", 10)


def test_refuse_nonfinite_names_the_tensor_and_the_element():
    spec = spec_of("w", "BF16", 100)
    old = np.full(100, 0x3F80, np.uint16)
    new = old.copy()
    new[42] = 0x7FC0
    piece = DiffPiece(spec, Box.run(0, 100), lambda: old, lambda a, b: new[a:b])
    with pytest.raises(WeightSyncError, match=r"NaN or infinity: w; .*index 42"):
        encode_patch([piece], [STEP], 1, refuse_nonfinite=True)
    assert encode_patch([piece], [STEP], 1).changed == 1, "carried when it is not refused"


def test_encoding_known_changes_keeps_dtypes_apart():
    items = [
        Changes(spec_of("a", "BF16", 5), Box.run(0, 5), np.array([1], np.uint32), np.array([2], np.uint16)),
        Changes(spec_of("b", "F32", 5), Box.run(0, 5), np.array([4], np.uint32), np.array([3], np.uint32)),
    ]
    frames = list(encode_changes(items))
    assert [frame.boxes[0].spec.dtype for frame in frames] == ["BF16", "F32"]
    assert DTYPES["BF16"].uint == np.uint16
