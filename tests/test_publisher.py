"""Claims about the publisher: which versions it makes of what it is handed. What fails is in test_publisher_faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop import checkpoint, config, digest_of, engine, entries, follow_fresh, holding, model, reader, same_bits
from safetensors.torch import save_file

from weight_sync import Publisher, Replica
from weight_sync.errors import LayoutError, TensorError, VersionMissingError
from weight_sync.history import History
from weight_sync.ports import Changes
from weight_sync.proto.v1 import common_pb2
from weight_sync.snapshot import Snapshot
from weight_sync.testing import MemoryEngine
from weight_sync.version import ANCHOR, EPOCH, PATCH

Tensors = dict[str, torch.Tensor]


def published(keys: Any, states: list[Tensors], **how: Any) -> list[Any]:
    """Publishes the states and follows each with a replica that has seen them all; the reports."""
    reports = []
    follower = MemoryEngine({})
    with Publisher.open(keys) as publisher, Replica.open(keys, follower, replica_id="r") as replica:
        for state in states:
            report = publisher.publish(state, **how)
            assert report is not None and report.digest == digest_of(state)
            replica.sync(timeout=0)
            assert same_bits(follower, state)
            reports.append(report)
    assert same_bits(follow_fresh(keys)[0], states[-1])
    return reports


# --- versions ---


def test_without_a_base_the_first_version_is_a_full_state(tmp_path: Path) -> None:
    keys = config(tmp_path)
    with Publisher.open(keys) as publisher:
        assert publisher.version is None
        first = publisher.publish(model(1), step=1, metadata={"note": "ü"})
        second = publisher.publish(model(2), step=2)
    assert first is not None and second is not None
    assert (first.version, first.kind, first.patch_bytes, first.digest) == (0, "ANCHOR", 0, digest_of(model(1)))
    assert (second.version, second.kind, second.anchor_bytes, second.digest) == (1, "PATCH", 0, digest_of(model(2)))
    assert 0 < second.changed < second.elements / 10
    manifest = reader(keys).manifest(0)
    assert (manifest.step, dict(manifest.metadata), manifest.HasField("parent")) == (1, {"note": "ü"}, False)
    assert same_bits(follow_fresh(keys)[0], model(2))


def test_a_base_is_version_0_by_reference(tmp_path: Path) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")))
    with Publisher.open(keys) as publisher:
        assert publisher.version == 0
        report = publisher.publish(model(1), step=1)
    assert report is not None and (report.version, report.kind) == (1, "PATCH")
    base = reader(keys).manifest(0)
    assert (base.kind, list(base.views[0].shards), base.base.uri) == (ANCHOR, [], str(tmp_path / "base"))
    assert same_bits(follow_fresh(keys)[0], model(1))
    booted = engine(0)
    with Replica.open(keys, booted) as replica:
        synced = replica.sync(timeout=0)
        assert (synced.version, synced.path) == (1, "1 patch from version 0")
    assert same_bits(booted, model(1))


@pytest.mark.parametrize("based", [False, True])
def test_a_restarted_publisher_continues_the_run_bit_for_bit(tmp_path: Path, based: bool) -> None:
    keys = config(tmp_path, base=str(checkpoint(tmp_path / "base")) if based else None)
    follower = engine(0)
    with Replica.open(keys, follower, replica_id="r") as replica:
        runs = set()
        for start in (1, 4, 7):
            with Publisher.open(keys) as publisher:
                runs.add(publisher.run_id)
                for step in range(start, start + 3):
                    report = publisher.publish(model(step), step=step)
                    assert report is not None and report.digest == digest_of(model(step))
                    replica.sync(timeout=0)
                    assert same_bits(follower, model(step))
    assert len(runs) == 1
    kinds = [entry.kind for entry in reader(keys).entries()]
    assert kinds == [ANCHOR, *[PATCH] * (2 + based), EPOCH, *[PATCH] * 3, EPOCH, *[PATCH] * 3]
    assert same_bits(follow_fresh(keys)[0], model(9))


def test_nothing_changed_is_a_version_all_the_same(tmp_path: Path) -> None:
    reports = published(config(tmp_path), [model(1), model(1)])
    assert (reports[1].kind, reports[1].changed, reports[1].digest) == ("PATCH", 0, reports[0].digest)


def test_both_forms_are_stored_and_count_as_patch_bytes(tmp_path: Path) -> None:
    keys = config(tmp_path, forms=("step", "compact"))
    report = published(keys, [model(1), model(2)])[1]
    refs = reader(keys).manifest(1).views[0].shards
    assert {ref.form for ref in refs} == {common_pb2.FORM_STEP, common_pb2.FORM_COMPACT}
    assert report.patch_bytes == sum(ref.size for ref in refs)


def test_a_view_that_the_run_does_not_have_is_refused_by_name(tmp_path: Path) -> None:
    published(config(tmp_path), [model(1)])
    with pytest.raises(VersionMissingError, match=r"other.*default"):
        Publisher.open(config(tmp_path, view="other"))


# --- full states ---


def anchors(keys: Any) -> list[int]:
    return [entry.number for entry in reader(keys).entries() if entry.kind == ANCHOR]


def test_full_states_come_by_count_across_restarts(tmp_path: Path) -> None:
    keys = config(tmp_path, anchor_every=4, base=str(checkpoint(tmp_path / "base")))
    for step in range(1, 11):  # a trainer that dies after every second step still writes them
        if step % 2 == 1:
            publisher = Publisher.open(keys)
        publisher.publish(model(step), step=step)
        if step % 2 == 0:
            publisher.close()
    steps = [reader(keys).manifest(number).step for number in anchors(keys)[1:]]
    assert steps == [4, 8]
    late = MemoryEngine({})
    with Replica.open(keys.replace(base=None), late) as replica:
        assert replica.sync(timeout=0).path == f"anchor {anchors(keys)[-1]} and 2 patches"
    assert same_bits(late, model(10))


def test_full_states_come_by_the_share_of_the_patches(tmp_path: Path) -> None:
    keys = config(tmp_path, anchor_every=0, anchor_share=0.5)
    reports = published(keys, [model(step) for step in range(12)])
    size = reports[0].anchor_bytes
    spent = 0
    for report in reports[1:]:
        assert (report.kind == "ANCHOR") == (spent > 0.5 * digest_bytes(model(0))), (spent, size)
        spent = 0 if report.kind == "ANCHOR" else spent + report.patch_bytes
    assert sum(report.kind == "ANCHOR" for report in reports) > 1


def digest_bytes(tensors: Tensors) -> int:
    return sum(bits.nbytes for _, bits in entries(tensors).values())


def test_a_full_state_carries_the_patch_as_well(tmp_path: Path) -> None:
    keys = config(tmp_path, anchor_every=1)
    states = [
        model(1),
        model(2),
        {**model(3), "added": torch.ones(5)},
        {k: v for k, v in model(4).items() if k != "norm"},
    ]
    reports = published(keys, states)
    assert [report.kind for report in reports] == ["ANCHOR"] * 4
    history = History(reader(keys), "default")
    by_patch = holding(states[0])
    for number in (1, 2, 3):
        update = history.update(number - 1, number)
        assert not update.full
        by_patch.stage(update)
        assert by_patch.commit() == update.digest
    assert same_bits(by_patch, states[3])


@pytest.mark.parametrize("ship", ["auto", "always", "never"])
def test_the_base_is_shipped_always_never_or_when_a_replica_asks(tmp_path: Path, ship: str) -> None:
    base = checkpoint(tmp_path / "base")
    keys = config(tmp_path, base=str(base), ship_base=ship)
    far = MemoryEngine({})
    with Publisher.open(keys) as publisher, Replica.open(keys.replace(base=None), far, replica_id="far") as replica:
        publisher.publish(model(1), step=1)
        base.rename(tmp_path / "elsewhere")  # as if the replica ran on another machine
        if ship == "always":
            assert replica.sync(timeout=0).version == 1
        else:
            for _ in range(2):
                with pytest.raises(VersionMissingError if ship == "" else Exception, match="base is not here"):
                    replica.sync(timeout=0)
        (tmp_path / "elsewhere").rename(base)
        report = publisher.publish(model(2), step=2)
        base.rename(tmp_path / "elsewhere")
        assert report is not None and (report.kind == "ANCHOR") == (ship == "auto")
        if ship == "auto":
            assert report.reason == "replica far asks for a full state"
        if ship != "never":
            assert replica.sync(timeout=0).version == 2
            assert same_bits(far, model(2))
            report = publisher.publish(model(3), step=3)
            assert report is not None and report.kind == "PATCH"


# --- tensors that appear, vanish and change ---


def test_tensors_that_appear_vanish_and_change_are_carried(tmp_path: Path) -> None:
    a, b, c, d, e, f = (model(step) for step in range(1, 7))
    b["added"] = torch.randn(11, 3)
    b["added.empty"] = torch.empty(0, 2)
    c = {**c, "added": b["added"] + 1, "added.empty": b["added.empty"]}
    del c["norm"]
    d["lm_head"] = torch.randn(130)  # another shape
    e = {
        **e,
        "lm_head": d["lm_head"],
        "scalar": torch.tensor(3.0, dtype=torch.bfloat16),
        "norm": torch.randn(2, 12).bfloat16(),
    }
    f = {**f, "norm": f["norm"].reshape(24), "empty": torch.empty(5, 0, dtype=torch.bfloat16)}
    published(config(tmp_path), [a, b, c, d, e, f])
    keys = config(tmp_path)
    history = History(reader(keys), "default")
    for have in range(5):  # any two of them can be folded
        for target in range(have + 1, 6):
            held = holding([a, b, c, d, e, f][have])
            update = history.update(have, target)
            held.stage(update)
            assert held.commit() == update.digest, (have, target)
            assert same_bits(held, [a, b, c, d, e, f][target])


def test_a_change_of_dtype_is_carried_only_when_it_is_asked_for(tmp_path: Path) -> None:
    keys = config(tmp_path)
    served = {"w": torch.randn(50).bfloat16(), "i": torch.arange(4)}
    masters = {"w": served["w"].float() + 1e-4, "i": served["i"]}
    with Publisher.open(keys) as publisher:
        publisher.publish(served)
        report = publisher.publish(masters)
        assert report is not None
        assert report.digest == digest_of({"w": masters["w"].bfloat16(), "i": masters["i"]})
        report = publisher.publish(masters, cast=False)
        assert report is not None and report.digest == digest_of(masters)
        report = publisher.publish({"w": masters["w"], "i": masters["i"].int()})
        assert report is not None and report.digest == digest_of({"w": masters["w"], "i": masters["i"].int()})
    assert same_bits(follow_fresh(keys)[0], {"w": masters["w"], "i": masters["i"].int()})


def test_another_order_of_the_same_memory_is_noticed(tmp_path: Path) -> None:
    square = torch.randn(6, 6)
    published(config(tmp_path), [{"w": square}, {"w": square.clone().t()}, {"w": torch.randn(12, 12)[::2, ::2]},
                                 {"w": torch.randn(1, 6).expand(6, 6)}])  # fmt: skip


# --- sources ---


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(17, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))


def test_a_module_is_served_in_the_dtypes_of_its_base(tmp_path: Path) -> None:
    module = _Tied()
    names = {"embed.weight": module.embed.weight, "norm.weight": module.norm.weight, "norm.bias": module.norm.bias}
    base = tmp_path / "base"
    base.mkdir()
    save_file(
        {**{k: v.detach().bfloat16() for k, v in names.items()}, "scale": module.scale}, base / "model.safetensors"
    )  # type: ignore[dict-item]
    keys = config(tmp_path, base=str(base))
    with Publisher.open(keys) as publisher:
        with torch.no_grad():
            module.head.weight[3] += 1
        report = publisher.publish(module)
        assert report is not None and report.changed == 8
        with pytest.raises(TensorError, match="by name"):
            publisher.publish(module, cast=False)
        module.extra = torch.nn.Linear(2, 2)
        with pytest.raises(LayoutError, match=r"extra\.weight"):
            publisher.publish(module)
        del module.extra
        with torch.no_grad():
            module.norm.bias += 1
        report = publisher.publish(module)
        assert report is not None and report.changed == 8
    expected = {k: v.detach().bfloat16() for k, v in names.items()} | {"scale": module.scale}
    assert same_bits(follow_fresh(keys)[0], expected)  # type: ignore[arg-type]


def test_tensors_may_come_as_pairs_and_any_name_is_data(tmp_path: Path) -> None:
    names = ["..", "/etc/passwd", "a/../b", "", " ", "\n", "☃", "\U0001f600", "x" * 300, "__weight_sync__.index",
             "__weight_sync__.frame.0", "model.layers.0", "C:\\x", "%2e%2e", "a\x00b"]  # fmt: skip
    first = {name: torch.randn(4) for name in names}
    second = {name: tensor + 1 for name, tensor in first.items()}
    published(config(tmp_path), [first, second])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    with Publisher.open(config(tmp_path)) as publisher:
        report = publisher.publish((name, tensor + 1) for name, tensor in second.items())
        assert report is not None and report.changed == 4 * len(names)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("source", "match"),
    [
        (lambda: [("w", torch.zeros(1)), ("w", torch.zeros(1))], "twice.*'?w"),
        (lambda: {"w": np.zeros(1)}, "'w'.*ndarray"),
        (lambda: {3: torch.zeros(1)}, "3.*int"),
        (lambda: {"w": torch.zeros(2, dtype=torch.complex128)}, "w.*complex128.*cast"),
        (lambda: {"w": torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.quint8)}, "w.*quantized"),
        (lambda: {"w": torch.zeros(2, device="meta")}, "w.*meta"),
        (lambda: {"w": torch.zeros(2, 2).to_sparse()}, "w.*sparse"),
        (lambda: {"w": torch.zeros(2, dtype=torch.complex64).conj()}, "w.*lazy"),
        (lambda: {"__metadata__": torch.zeros(1)}, "__metadata__"),
        (lambda: {"\ud800": torch.zeros(1)}, "UTF-8"),
        (lambda: torch.zeros(1), "Tensor"),
    ],
)
def test_what_cannot_be_published_is_named_and_changes_nothing(
    tmp_path: Path, source: Callable[[], Any], match: str
) -> None:
    keys = config(tmp_path)
    with Publisher.open(keys) as publisher:
        for version in (0, 1):
            with pytest.raises(TensorError, match=match):
                publisher.publish(source())
            report = publisher.publish(model(version))
            assert report is not None and report.version == version
    assert same_bits(follow_fresh(keys)[0], model(1))


# --- values ---


def test_nan_infinity_and_signed_zero_are_carried_bit_for_bit(tmp_path: Path) -> None:
    odd = np.array([0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x8000, 0x0000, 0x0001], np.uint16)
    first = {"w": torch.from_numpy(odd.view(np.int16).copy()).view(torch.bfloat16)}
    second = {"w": torch.from_numpy(odd[::-1].view(np.int16).copy()).view(torch.bfloat16)}
    published(config(tmp_path), [first, second, first])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused_on_request_and_change_nothing(tmp_path: Path, value: float) -> None:
    keys = config(tmp_path, refuse_nonfinite=True)
    good = {"a": torch.randn(10).half(), "b": torch.randn(10)}
    bad = {name: tensor.clone() for name, tensor in good.items()}
    bad["b"][7] = value
    with Publisher.open(keys) as publisher:
        with pytest.raises(TensorError, match=r"NaN or infinity.*'?b"):
            publisher.publish(bad)
        publisher.publish(good)
        with pytest.raises(TensorError, match="index 7"):
            publisher.publish(bad)
        good["a"] += 1
        report = publisher.publish(good)
        assert report is not None and report.digest == digest_of(good)
    assert same_bits(follow_fresh(keys)[0], good)


# --- where the base is kept ---


class _OnTorch(Snapshot):
    """Takes the CPU for a device of its own, so that the device's path runs here."""

    @staticmethod
    def _is_far(device: torch.device) -> bool:
        return True


def test_the_base_may_be_kept_anywhere_with_the_same_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(where: str, **keys: Any) -> Iterator[tuple[Any, ...]]:
        states = [model(1), model(2), {**model(3), "added": torch.arange(7)}, model(4)]
        folder = tmp_path / f"{where}{len(keys)}"
        for report in published(config(folder, snapshot=where, anchor_every=3, **keys), states):
            yield report.digest, report.kind, report.changed, report.patch_bytes, report.anchor_bytes
        with Publisher.open(config(folder, snapshot=where, **keys)) as publisher:
            report = publisher.publish(model(6))
            assert report is not None
            yield report.digest, report.kind, report.changed, report.patch_bytes, report.anchor_bytes

    expected = list(run("memory"))
    assert list(run("file")) == expected
    assert list(run("file", snapshot_dir=str(tmp_path / "kept" / "here"))) == expected
    assert not list((tmp_path / "kept" / "here").iterdir())  # the file has no name
    assert list(run("device")) == expected
    monkeypatch.setattr("weight_sync.work.Snapshot", _OnTorch)
    assert list(run("device", keep_versions=7)) == expected


def test_a_snapshot_takes_its_own_promotion_back(tmp_path: Path) -> None:
    snapshot = Snapshot("memory")
    spec, bits = entries(model(1))["model.embed.weight"]
    from weight_sync.layout.box import Box
    from weight_sync.layout.placement import Placement
    from weight_sync.served import ServedPiece

    box = Box.run(0, spec.elements)
    piece = ServedPiece(spec, Placement(spec.name, box, "w", box))
    snapshot.allocate([piece], {"w": torch.zeros(1)})
    snapshot.fill(piece, bits)
    steps = np.array([1, 0xFFFF, 0x8000, 77], np.uint16)
    changes = [Changes(spec, box, np.array([0, 5, 6, spec.elements - 1], np.uint32), steps)]
    snapshot.promote(changes)
    assert (snapshot.array(piece) != bits).sum() == 4
    snapshot.demote(changes)
    assert np.array_equal(snapshot.array(piece), bits)
