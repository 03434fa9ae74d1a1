"""Claims about the benchmarks: traces, bounds, sizes on recorded data, shapes of their JSON. No claim about time."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.bench.baseline import Baseline
from weight_sync.bench.codec import ENCODINGS, Encoding, bench_codec
from weight_sync.bench.density import ULP_EDGES, bench_density, plot_density
from weight_sync.bench.digest import bench_digest
from weight_sync.bench.entropy import bound_bits
from weight_sync.bench.timing import Job, alternate
from weight_sync.bench.traces import DENSITIES, FORMATS, Trace, TracedTensor, find_recorded, recorded, standard
from weight_sync.bench.train import OBJECTIVES, OPTIMIZERS, Trainer, load_model, orthogonalized, tiny_model
from weight_sync.codec.digest import Digest, digest_tensor
from weight_sync.errors import CorruptionError, InputError
from weight_sync.tensors import TensorSpec

CODEC_KEYS = {
    "trace", "format", "density", "encoding", "bits_per_changed", "entropy_bound_bits", "baseline_bits_per_changed",
    "encode_gb_per_cpu_s", "decode_gb_per_cpu_s", "baseline_encode_gb_per_cpu_s", "baseline_decode_gb_per_cpu_s",
    "memcpy_gb_per_s",
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices as small as these wait longer for each other's threads than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    """The recorded ones, by name."""
    path = find_recorded()
    assert path is not None
    return {trace.name: trace for trace in recorded(path)}


def bits(trace: Trace, name: str) -> float:
    encoding = Encoding(trace, name)
    encoding.encode()
    return 8 * len(encoding.shard) / trace.changed


def bench(*arguments: str) -> Any:
    """JSON of a command in a process of its own."""
    command = [sys.executable, "-m", "weight_sync.cli.bench", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- traces -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_standard_trace_has_the_density_asked_for_and_always_the_same_bits(format: str) -> None:
    for density in DENSITIES:
        first, again = standard(format, density, 1 << 16), standard(format, density, 1 << 16)
        assert first.density == pytest.approx(density, rel=0.02)
        assert (first.tensors[0].old == again.tensors[0].old).all()
        assert (first.tensors[0].new == again.tensors[0].new).all()


def test_a_standard_trace_of_several_tensors_keeps_its_density() -> None:
    trace = standard("bf16", 0.0055, (8 << 20) + 1)
    assert [t.spec.elements for t in trace.tensors] == [4 << 20] * 3
    assert trace.density == pytest.approx(0.0055, rel=0.03)
    assert (trace.tensors[0].old != trace.tensors[1].old).any()


def test_the_recorded_trace_has_the_densities_that_its_readme_lists(traces: dict[str, Trace]) -> None:
    listed = {"recorded-lr1e-6-1": 0.00248, "recorded-lr1e-6-3": 0.00227, "recorded-lr1e-5-2": 0.01664}
    for name, density in listed.items():
        tensor = next(t for t in traces[name].tensors if t.spec.name == "model.layers.14.self_attn.q_proj.weight")
        assert tensor.spec.shape == (576, 576)
        assert np.mean(tensor.old != tensor.new) == pytest.approx(density, abs=5e-6)
    assert traces["recorded-lr1e-6-1"].changed == pytest.approx(13_500, abs=10)
    assert all((a.new == b.old).all() for a, b in zip(
        traces["recorded-lr1e-5-1"].tensors, traces["recorded-lr1e-5-2"].tensors, strict=True))  # fmt: skip


def test_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    def refused(name: str, **arrays: Any) -> str:
        np.savez(tmp_path / name, **arrays)
        with pytest.raises(InputError) as caught:
            list(recorded(tmp_path / name))
        return str(caught.value)

    (tmp_path / "text.npz").write_text("not an archive")
    with pytest.raises(InputError, match=r"not a trace: .*text\.npz"):
        list(recorded(tmp_path / "text.npz"))
    whole = find_recorded()
    assert whole is not None
    raw = bytearray(whole.read_bytes())
    raw[len(raw) // 2] ^= 1
    (tmp_path / "flipped.npz").write_bytes(raw)
    with pytest.raises(InputError, match="trace cannot be read"):
        list(recorded(tmp_path / "flipped.npz"))
    assert "no trace in the file" in refused("empty.npz", other=np.zeros(3))
    assert "expected 'uint16'" in refused("wide.npz", **{"r|w|v0": np.zeros(3, np.float32)})
    planes = {"r|w|v0": np.zeros(3, np.uint16), "r|w|xor12": np.zeros(3, np.uint16)}
    assert "expected 'xor01'" in refused("gap.npz", **planes)
    assert "expected 'one v0'" in refused("loose.npz", **{"r|w|v0xor": np.zeros(3, np.uint16)})


# --- bounds and sizes ---------------------------------------------------------------------------------------------


def test_bounds_of_a_trace_that_can_be_counted_by_hand() -> None:
    old = np.array([0x3F80] * 8 + [0x4000] * 8, np.uint16)  # eight times 1.0 and eight times 2.0: two classes
    new = old.copy()
    new[8:12] += np.array([1, 1, 2, 2], np.uint16)
    trace = Trace("hand", "bf16", (TracedTensor(TensorSpec("w", "BF16", (16,)), old, new),))
    quarter = 2 - 0.75 * math.log2(3)  # entropy of one in four
    assert bound_bits(trace, "step") == pytest.approx(16 * quarter / 4 + 1)
    assert bound_bits(trace, "compact") == pytest.approx(8 * 1 / 4 + 1)  # a half of the second class, none of the first
    assert bound_bits(trace, "absolute") == pytest.approx(16 * quarter / 4 + 1)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_no_encoding_goes_below_its_bound(data: st.DataObject) -> None:
    format = data.draw(st.sampled_from(sorted(FORMATS)))
    elements = data.draw(st.sampled_from([1 << 12, 1 << 15, 50_000]))
    trace = standard(format, data.draw(st.sampled_from([0.002, 0.02, 0.3])), elements)
    for name in ENCODINGS:
        assert bits(trace, name) >= bound_bits(trace, name)


def test_recorded_patches_are_as_small_as_promised(traces: dict[str, Trace]) -> None:
    compact = {name: bits(trace, "compact") for name, trace in traces.items()}
    assert max(size for name, size in compact.items() if "lr1e-6" in name) <= 8.8, compact
    assert max(size for name, size in compact.items() if "lr1e-5" in name) <= 6.5, compact
    for name, trace in traces.items():
        assert compact[name] >= bound_bits(trace, "compact")
        assert bits(trace, "step") >= bound_bits(trace, "step")


def test_standard_patches_come_near_their_bound() -> None:
    for density, limit, elements in ((0.0055, 7.5, 32 << 20), (0.019, 6.6, 16 << 20)):
        trace = standard("bf16", density, elements)
        size = bits(trace, "compact")
        assert size <= min(limit, 1.02 * bound_bits(trace, "compact")), density
        if density == 0.0055:
            assert bits(trace, "step") <= 10.9
            baseline = Baseline(trace, 1)
            baseline.encode()
            assert 8 * baseline.nbytes / trace.changed == pytest.approx(24.9, rel=0.03)


def test_the_digest_of_a_decoded_patch_is_that_of_the_new_version() -> None:
    trace = standard("bf16", 0.02, 1 << 16)
    tensor = trace.tensors[0]
    for name in ENCODINGS:
        encoding = Encoding(trace, name, threads=2)
        encoding.encode()
        state = {tensor.spec.name: tensor.old.copy()}
        gained, undo = encoding.decode(state)
        assert (state[tensor.spec.name] == tensor.new).all()
        assert digest_tensor(tensor.spec, tensor.old) + gained == digest_tensor(tensor.spec, tensor.new)
        assert gained != Digest()
        at = np.flatnonzero(tensor.old != tensor.new)
        assert (np.concatenate(undo) == tensor.old[at]).all()


def test_the_baseline_notices_a_wrong_base() -> None:
    trace = standard("bf16", 0.02, 1 << 12)
    baseline = Baseline(trace, 1)
    baseline.encode()
    state = trace.tensors[0].old.copy()
    baseline.decode([state])
    assert (state == trace.tensors[0].new).all()
    with pytest.raises(CorruptionError, match="checksum"):
        baseline.decode([state])


def test_measuring_refuses_what_cannot_be_measured() -> None:
    trace = standard("bf16", 0.02, 1 << 12)
    still = Trace("still", "bf16", tuple(TracedTensor(t.spec, t.old, t.old) for t in trace.tensors))
    with pytest.raises(InputError, match="no element changes"):
        bench_codec(still, ["step"], 1, 1)
    with pytest.raises(InputError, match="unknown encoding: encodings; found 'dense'"):
        bench_codec(trace, ["dense"], 1, 1)
    with pytest.raises(InputError, match="unknown format"):
        standard("bf17", 0.02)
    with pytest.raises(InputError, match="too small"):
        bench_digest("BF16", 100, 1, 1)


# --- timing -------------------------------------------------------------------------------------------------------


def test_jobs_take_turns_after_a_round_that_does_not_count() -> None:
    calls: list[str] = []
    jobs = [Job(name, partial(calls.append, name), partial(calls.append, f"{name}?")) for name in "ab"]
    seconds = alternate(jobs, 2)
    assert calls == ["a?", "a", "b?", "b"] * 3
    assert all(0 <= seconds[name].cpu < float("inf") and seconds[name].wall > 0 for name in "ab")


# --- what the commands print --------------------------------------------------------------------------------------


def test_bench_codec_prints_one_row_per_trace_and_encoding() -> None:
    document = bench("codec", "--elements", "65536", "--rounds", "1", "--encodings", "step,compact")
    assert list(document) == ["rows"]
    rows = document["rows"]
    standards = [row for row in rows if row["trace"].startswith("standard-")]
    assert {(row["format"], row["encoding"]) for row in standards} == {("bf16", "step"), ("bf16", "compact")}
    assert len(standards) == 6
    assert len([row for row in rows if row["trace"].startswith("recorded-")]) == 12
    for row in rows:
        assert set(row) >= CODEC_KEYS
        numbers = [value for value in row.values() if isinstance(value, int | float)]
        assert all(math.isfinite(value) and value > 0 for value in numbers), row
        assert row["bits_per_changed"] >= row["entropy_bound_bits"]
        assert row["encode_ratio"] == pytest.approx(row["encode_gb_per_cpu_s"] / row["baseline_encode_gb_per_cpu_s"])


def test_bench_digest_prints_one_row_per_dtype() -> None:
    document = bench("digest", "--mebibytes", "1", "--rounds", "1", "--dtypes", "BF16,I64")
    assert [(row["dtype"], row["width"]) for row in document["rows"]] == [("BF16", 2), ("I64", 8)]
    for row in document["rows"]:
        assert row["digest_gb_per_cpu_s"] > 0
        assert row["share_of_memcpy"] == pytest.approx(row["digest_gb_per_cpu_s"] / row["memcpy_gb_per_s"])
        assert min(row["update_ns_per_changed"], row["update_ns_per_changed_many"]) > 0


def test_bench_shows_tables_too(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from weight_sync.cli.bench import app

    runner = CliRunner()
    shown = runner.invoke(app, ["codec", "--elements", "4096", "--rounds", "1", "--no-recorded"])
    assert shown.exit_code == 0, shown.output
    assert "standard-0.55pct" in shown.output
    shown = runner.invoke(app, ["digest", "--mebibytes", "1", "--rounds", "1", "--dtypes", "F8_E4M3"])
    assert "F8_E4M3" in shown.output
    refused = runner.invoke(app, ["codec", "--formats", "bf16,fp9"])
    assert isinstance(refused.exception, InputError)
    assert "--formats; found 'fp9'" in str(refused.exception)


# --- density ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_density_is_measured_on_real_steps(optimizer: str, objective: str, tmp_path: Path) -> None:
    trainer = Trainer(*tiny_model(), optimizer, objective, 1e-5, 0)
    assert len(trainer.hidden) == 14  # seven matrices in each of two layers; not the embedding
    rows = list(bench_density(trainer, 2))
    assert [row.step for row in rows] == [1, 2]
    for row in rows:
        assert row.elements == sum(p.numel() for p in trainer.parameters.values())
        assert 0 < row.density < 1
        assert 0 < row.density_hidden < 1
        assert list(row.ulp) == [*map(str, ULP_EDGES), ">16"]
        assert sum(row.ulp.values()) == pytest.approx(1)
        assert row.ulp["1"] > 0.5
        assert row.step_bits is not None and row.compact_bits is not None
        assert row.step_bits >= row.step_bound_bits
        assert (row.reward is None) == (objective == "sft")
        assert row.nonzero_gradients > 0.9
        json.dumps(row.to_json())
    plot_density(rows, tmp_path / "density.png")
    assert (tmp_path / "density.png").read_bytes().startswith(b"\x89PNG")


def test_a_larger_learning_rate_changes_more() -> None:
    first = [next(bench_density(Trainer(*tiny_model(), "adam", "sft", lr, 0), 1)).density for lr in (1e-6, 1e-5, 1e-4)]
    assert first == sorted(first)
    assert first[2] > 5 * first[0]


def test_training_with_the_trainer_learns() -> None:
    trainer = Trainer(*tiny_model(), "muon", "sft", 3e-3, 0)
    losses = [trainer.step().loss for _ in range(8)]
    assert losses[-1] < losses[0]
    served = trainer.served()
    assert all((p == served[name].float()).all() for name, p in trainer.model.named_parameters())


def test_newton_schulz_takes_singular_values_near_one() -> None:
    dice = torch.Generator().manual_seed(0)
    for shape in ((40, 24), (24, 40)):
        matrix = torch.randn(shape, generator=dice)
        values = torch.linalg.svdvals(orthogonalized(matrix))
        assert float(values.min()) > 0.5 and float(values.max()) < 1.3
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(orthogonalized(matrix).ravel(), (u @ v).ravel(), dim=0) > 0.97


def test_density_refuses_what_it_cannot_train(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a checkpoint folder"):
        load_model(tmp_path)
    with pytest.raises(InputError, match="optimizer; found 'sgd'"):
        Trainer(*tiny_model(), "sgd", "sft", 1e-5, 0)
    with pytest.raises(InputError, match="nothing to measure"):
        next(bench_density(Trainer(*tiny_model(), "adam", "sft", 1e-5, 0), 0))


def test_a_checkpoint_folder_is_trained(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: k for k, word in enumerate(["<unk>", "</s>", "plus", "is", "number"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(tmp_path)
    model, _ = tiny_model()
    model.bfloat16().save_pretrained(tmp_path)  # type: ignore[operator]
    loaded, exercises = load_model(tmp_path)
    exercise = exercises.draw()
    assert exercise.answer[-1] == exercises.end == 1
    assert exercises.reward(exercise, [1]) == pytest.approx(-0.02)
    row = next(bench_density(Trainer(loaded, exercises, "adam", "sft", 1e-5, 0), 1))
    assert row.changed > 0


# --- inbox --------------------------------------------------------------------------------------------------------


def test_the_inbox_row_says_what_was_measured(tmp_path: Path) -> None:
    rows = bench(
        "inbox", "--senders", "1,3", "--count", "60", "--batch", "7", "--tokens", "5", "--folder", str(tmp_path)
    )
    assert [(row["senders"], row["batch"], row["trajectories"], row["tokens"]) for row in rows["rows"]] == [
        (1, 7, 60, 5),
        (3, 7, 60, 5),
    ]
    assert all(row[key] > 0 for row in rows["rows"] for key in ("put_per_s", "file_per_s", "take_per_s", "sync_ms"))
    assert not list(tmp_path.iterdir()), "the bench leaves files behind"
