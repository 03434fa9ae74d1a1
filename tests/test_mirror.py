"""Claims about the folder that is kept at a version, shown with real publishers, stores and killed processes."""

from __future__ import annotations

import json
import os
import resource
import tempfile
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mirror_cases import (
    State,
    assert_holds,
    bits,
    changed,
    follow_until_killed,
    follower,
    history_of,
    lifecycle,
    odd_state,
    publish,
    randoms,
    write_base,
)

from weight_sync.adapters.engines.checkpoint import CheckpointEngine
from weight_sync.checkpoint import Checkpoint
from weight_sync.errors import (
    ConfigError,
    EngineInDoubtError,
    StoreFullError,
    VersionMissingError,
    WrongBaseError,
)
from weight_sync.mirror import NOTE, Mirror

SWITCHED = ["mirror:switched", "replica:committed", "replica:verified"]
CRASH_STEPS = ["mirror:written", "replica:staged", "replica:paused", *SWITCHED]


def engine_at(path: Path, base: Path | None = None) -> CheckpointEngine:
    return CheckpointEngine(path, base=base, threads=1)


def house(path: Path) -> list[str]:
    """The version folders, and whatever else lies beside the lock."""
    return sorted(item.name for item in (path.parent / f".{path.name}.weight_sync").iterdir() if item.name != "lock")


@pytest.mark.parametrize("stops", [[1, 2, 3, 4, 5, 6, 7, 8], [2, 7, 8], [3, 5, 8], [1, 8]])
def test_the_folder_equals_the_published_version_however_many_are_folded(tmp_path: Path, stops: list[int]) -> None:
    states = lifecycle()
    store, path = tmp_path / "store", tmp_path / "out"
    engine = engine_at(path)
    done = 0
    with follower(store, engine, pause="keep") as replica:
        for stop in stops:
            numbers = publish(store, states[done:stop], anchor_every=0, anchor_share=0)
            assert replica.sync(min_version=numbers[-1]).version == numbers[-1]
            assert_holds(path, states[stop - 1])
            note = json.loads((path / NOTE).read_text())
            assert (note["run_id"], note["version"], note["view"]) == (replica.run_id, numbers[-1], "default")
            assert note["digest"] == Checkpoint(path).digest().hex() == engine.audit().hex()
            done = stop
    engine.close()
    assert sorted(item.name for item in tmp_path.iterdir()) == [
        ".out.weight_sync",
        "out",
        "store",
    ]


@st.composite
def walks(draw: st.DrawFn) -> list[State]:
    """States in which a few tensors change, vanish, return, and change their shape or dtype."""
    names = ["..", "a/b", "c", "d"]
    states = []
    for _ in range(draw(st.integers(2, 4))):
        state = {"stays": randoms((3,), torch.bfloat16, draw(st.integers(0, 3)))}
        for name in draw(st.lists(st.sampled_from(names), unique=True)):
            shape = draw(st.sampled_from([(), (0,), (5,), (3, 4)]))
            dtype = draw(st.sampled_from([torch.bfloat16, torch.uint8, torch.float64]))
            state[name] = randoms(shape, dtype, draw(st.integers(0, 3)))
        states.append(state)
    return states


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(states=walks(), several=st.booleans())
def test_any_walk_of_tables_ends_bit_equal(tmp_path: Path, states: list[State], several: bool) -> None:
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    engine = engine_at(folder / "out")
    with follower(folder / "store", engine) as replica:
        for k, state in enumerate(states):
            publish(folder / "store", [state], anchor_every=0, anchor_share=0)
            if k == 0 or not several or k == len(states) - 1:
                replica.sync(timeout=0)
                assert_holds(folder / "out", state)
    engine.close()


def test_files_keep_the_names_of_the_base_and_unchanged_ones_are_shared(tmp_path: Path) -> None:
    base, store, path = tmp_path / "base", tmp_path / "store", tmp_path / "out"
    parts = [
        {"a": randoms((40,), torch.bfloat16, 1)},
        {"b": randoms((40,), torch.bfloat16, 2)},
        {"c": randoms((9,), torch.float32, 3)},
    ]
    state = write_base(base, parts)
    engine = engine_at(path, base)
    publish(store, [], base)
    with follower(store, engine) as replica:
        replica.sync()
        before = path.resolve()
        assert_holds(path, state)
        second = changed(state, 4, ["b"])
        publish(store, [second], base)
        replica.sync()
        assert_holds(path, second)
        names = {item.name for item in path.iterdir()}
        assert names == {item.name for item in base.iterdir()} | {NOTE}
        shared = {name for name in names if (path / name).stat().st_ino == (before / name).stat().st_ino}
        assert shared == {
            "model-00001-of-00003.safetensors",
            "model-00003-of-00003.safetensors",
            "config.json",
            "tokenizer.json",
        }
        third = {**changed(second, 5, ["a"]), "new": randoms((3,), torch.bfloat16, 6)}
        del third["b"]
        publish(store, [third], base)
        replica.sync()
        assert_holds(path, third)
        assert {file.name: set(file_names) for file, file_names in by_file(path).items()} == {
            "model-00001-of-00003.safetensors": {"a"},
            "model-00003-of-00003.safetensors": {"c", "new"},
        }
    engine.close()


def by_file(folder: Path) -> dict[Path, list[str]]:
    out: dict[Path, list[str]] = {}
    for name, file in Checkpoint(folder).files.items():
        out.setdefault(file, []).append(name)
    return out


def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "base", max_shard_size="10KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)
    publish(tmp_path / "store", [], tmp_path / "base")
    publish(tmp_path / "store", [dict(model.state_dict())], tmp_path / "base")
    engine = engine_at(tmp_path / "out", tmp_path / "base")
    with follower(tmp_path / "store", engine) as replica:
        replica.sync()
    engine.close()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert {n: bits(t) for n, t in loaded.state_dict().items()} == {n: bits(t) for n, t in model.state_dict().items()}


def test_a_reader_of_the_old_folder_keeps_it_for_one_more_version(tmp_path: Path) -> None:
    states = [odd_state()]
    for seed in range(3):
        states.append(changed(states[-1], seed))
    store, path = tmp_path / "store", tmp_path / "out"
    engine = engine_at(path)
    with follower(store, engine) as replica:
        publish(store, states[:1])
        replica.sync()
        old = path.resolve()
        opened = Checkpoint(old)
        taken = {spec.name: opened.bits(spec.name) for spec in opened.table}  # mapped, not read
        publish(store, states[1:2])
        replica.sync()
        assert_holds(old, states[0])
        publish(store, states[2:3])
        replica.sync()
        assert not old.exists()
        assert len(house(path)) == 2  # the current one and the one to go back to
        assert {name: part.tobytes() for name, part in taken.items()} == {n: bits(t)[2] for n, t in states[0].items()}
    engine.close()


def test_a_path_that_is_taken_is_refused_and_left_alone(tmp_path: Path) -> None:
    full, file, link, empty = tmp_path / "full", tmp_path / "file", tmp_path / "link", tmp_path / "empty"
    full.mkdir()
    (full / "precious").write_text("x")
    file.write_text("x")
    link.symlink_to(full)
    empty.mkdir()
    for path in (full, file, link):
        with pytest.raises(ConfigError, match="give another path"):
            Mirror(path)
    assert (full / "precious").read_text() == "x"
    assert not list(tmp_path.glob(".*"))
    with Mirror(empty), pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        Mirror(empty)
    with Mirror(empty) as mirror, pytest.raises(VersionMissingError):
        mirror.rollback()
    with pytest.raises(ConfigError, match="base"):
        Mirror(empty, tmp_path / "nowhere")


def test_a_patch_needs_a_version_to_start_from(tmp_path: Path) -> None:
    numbers = publish(tmp_path / "store", [odd_state(), changed(odd_state(), 1)])
    update = history_of(tmp_path / "store").update(numbers[0], numbers[1])
    with Mirror(tmp_path / "out") as mirror, pytest.raises(WrongBaseError):
        mirror.next(update)


def test_rollback_is_the_old_folder_itself(tmp_path: Path) -> None:
    states = [odd_state(), changed(odd_state(), 1)]
    numbers = publish(tmp_path / "store", states)
    history = history_of(tmp_path / "store")
    with Mirror(tmp_path / "out") as mirror:
        first = mirror.next(history.update(None, numbers[0]))
        assert not (tmp_path / "out").exists()
        mirror.switch()
        second = mirror.next(history.update(numbers[0], numbers[1]))
        assert_holds(tmp_path / "out", states[0])
        mirror.switch()
        assert (mirror.current, mirror.previous) == (second, first)
        assert_holds(tmp_path / "out", states[1])
        assert mirror.rollback() == first
        assert_holds(tmp_path / "out", states[0])
        again = mirror.next(history.update(numbers[0], numbers[1]))
        assert again.digest == second.digest
        rebuilt = mirror.next(history.update(None, numbers[0]))  # of the version that is current
        assert rebuilt.folder != first.folder
        mirror.switch()
        assert_holds(tmp_path / "out", states[0])
    with Mirror(tmp_path / "out") as mirror:
        assert mirror.current == rebuilt and house(tmp_path / "out") == [rebuilt.folder.name]


@pytest.mark.parametrize("step", CRASH_STEPS)
def test_a_follower_killed_at_any_step_goes_on_from_a_whole_version(tmp_path: Path, step: str) -> None:
    states = [{"w": randoms((50,), torch.bfloat16, 0), "same": randoms((9,), torch.bfloat16, 1)}]
    states += [changed(states[0], 1, ["w"]), changed(states[0], 2) | {"new": randoms((5,), torch.bfloat16, 3)}]
    store, path = tmp_path / "store", tmp_path / "out"
    first = publish(store, states[:1])
    with follower(store, engine := engine_at(path)) as replica:
        replica.sync()
    engine.close()
    second = publish(store, states[1:2])
    follow_until_killed(store, path, step)
    switched = step in SWITCHED
    assert_holds(path, states[1 if switched else 0])
    publish(store, states[2:])
    with follower(store, engine := engine_at(path)) as replica:
        assert len(house(path)) == 1, "leftovers are swept"
        report = replica.sync()
        assert report.previous is None and "patch" in report.path  # recognised by its digest, not rebuilt
        assert engine.mirror.previous is not None
        assert engine.mirror.previous.number == (second if switched else first)[0]
        assert_holds(path, states[2])
    engine.close()


@pytest.mark.parametrize("step", ["mirror:written", "mirror:switched"])
def test_a_follower_killed_in_its_first_version_starts_again(tmp_path: Path, step: str) -> None:
    state = {"w": randoms((50,), torch.bfloat16, 0)}
    publish(tmp_path / "store", [state])
    follow_until_killed(tmp_path / "store", tmp_path / "out", step)
    assert (tmp_path / "out").exists() == (step == "mirror:switched")
    with follower(tmp_path / "store", engine := engine_at(tmp_path / "out")) as replica:
        replica.sync()
        assert_holds(tmp_path / "out", state)
    engine.close()


def flip(file: Path, name: str, element: int = 0) -> None:
    offset = Checkpoint(file.parent).span(name)[0] + element
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_noticed_by_the_next_patch_and_the_folder_is_rebuilt(tmp_path: Path) -> None:
    store, path = tmp_path / "store", tmp_path / "out"
    state = {"w": randoms((64,), torch.bfloat16, 1)}
    second = {"w": state["w"].clone()}
    second["w"].view(torch.int16)[0] ^= 4
    publish(store, [state])
    engine = engine_at(path)
    with follower(store, engine) as replica:
        replica.sync()
        flip(path / "model.safetensors", "w")
        numbers = publish(store, [second])
        with pytest.raises(EngineInDoubtError):
            replica.sync()
        assert replica.version is None
        assert replica.sync().version == numbers[-1]
        assert_holds(path, second)
        flip(path / "model.safetensors", "w", 100)
    engine.close()
    with follower(store, engine := engine_at(path)) as replica:  # found again at a restart, by the full digest
        assert "anchor" in replica.sync().path
        assert_holds(path, second)
    engine.close()


def test_a_full_disk_leaves_the_old_version(tmp_path: Path) -> None:
    store, path = tmp_path / "store", tmp_path / "out"
    states = [{"w": randoms((1000,), torch.bfloat16, 1)}, {"w": randoms((90_000,), torch.bfloat16, 2)}]
    publish(store, states[:1])
    engine = engine_at(path)
    with follower(store, engine) as replica:
        replica.sync()
        numbers = publish(store, states[1:])
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(StoreFullError, match="make room"):
                replica.sync()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert_holds(path, states[0])
        assert len(house(path)) == 1
        assert replica.sync().version == numbers[-1]
        assert_holds(path, states[1])
    engine.close()


def test_memory_is_that_of_one_tensor(tmp_path: Path) -> None:
    state = {f"layer.{k}": randoms((512, 1024), torch.bfloat16, k) for k in range(24)}
    second = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in second.values():
        tensor.view(torch.int16)[::16, 7] ^= 1
    numbers = publish(tmp_path / "store", [state, second], anchor_share=0)
    history = history_of(tmp_path / "store")
    with Mirror(tmp_path / "out") as mirror:
        for have, target in [(None, numbers[0]), (numbers[0], numbers[1])]:
            update = history.update(have, target)
            tracemalloc.start()  # counts what numpy allocates, and no mapped files
            mirror.next(update)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            mirror.switch()
            assert peak < 4 << 20, "24 MiB of weights"
        assert_holds(tmp_path / "out", second)
