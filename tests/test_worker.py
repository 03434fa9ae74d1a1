"""Claims about the parts that parallel engines share: layouts learnt by loaders, all ranks or none, proof by digest."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from worker_cases import LocalControl, Model, checkpoint, engine_of

from weight_sync.adapters.engines.vllm.door import open_door
from weight_sync.adapters.engines.vllm.extension import WorkerExtension
from weight_sync.adapters.engines.vllm.plugin import _extend_when_made, _open_when_made
from weight_sync.adapters.engines.worker.staging import Staging, read_staged
from weight_sync.adapters.engines.worker.twin import PlainModel, learn_loader, meta_twin
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.errors import ConfigError, EngineError, EngineInDoubtError, FormatError, LayoutError
from weight_sync.ports import PauseMode
from weight_sync.testing import check_engine, engine_claims
from weight_sync.testing.engines import _World


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "checkpoint")


def world(engine: Any, folder: Path) -> _World:
    """Versions to try, as the conformance suite makes them."""
    made = _World(engine, Checkpoint(folder), False, frozenset(), None, 0)
    made.attach()
    return made


# --- the port -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", engine_claims())
@pytest.mark.parametrize(("ranks", "pack"), [(1, False), (2, False), (1, True), (2, True)])
def test_it_keeps_every_promise_of_the_port(folder: Path, ranks: int, pack: bool, claim: str) -> None:
    check_engine(lambda: engine_of(folder, ranks, pack)[0], folder, only=[claim])


def test_a_loader_tells_where_everything_lies(folder: Path) -> None:
    layout = learn_loader(
        lambda m, t: m.load_weights(t), meta_twin(Model(1, 2), lambda _: {}), Checkpoint(folder).table
    )  # type: ignore[attr-defined, operator]
    q = layout.by_tensor["attn.q"][0]
    assert (q.storage, q.coords.offset, q.place.offset, q.coords.count) == ("attn.qkv", 24, 0, 24)
    k = layout.by_tensor["attn.k"][0]
    assert (k.storage, k.coords.offset, k.place.offset, k.coords.count) == ("attn.qkv", 12, 24, 12)
    o = layout.by_tensor["attn.o"][0]
    assert (o.coords.offset, o.coords.sizes, o.coords.strides) == (4, (6, 4), (8, 1))
    assert layout.by_tensor["embed.weight"][0].coords.count == 2 * 6, "two rows of the vocabulary, the rest is padding"
    assert "rotary.inv_freq" not in layout.by_tensor


class LinearWithLoRA(torch.nn.Module):
    """What engines put around a layer that adapters may adapt."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_layers_that_adapt_others_are_looked_through(folder: Path) -> None:
    plain, wrapped, finder = Model(0, 1), Model(0, 1), PlainModel()
    assert finder.of(plain) is plain
    wrapped.attn = LinearWithLoRA(wrapped.attn)
    found = finder.of(wrapped)
    assert found is not wrapped and finder.of(wrapped) is found, "the same while the tree is the same"
    parameters = {name.replace(".base_layer.", "."): p for name, p in wrapped.named_parameters()}
    assert {name: id(p) for name, p in found.named_parameters()} == {name: id(p) for name, p in parameters.items()}
    assert isinstance(wrapped.attn, LinearWithLoRA)
    layouts = [
        learn_loader(lambda m, t: m.load_weights(t), meta_twin(model, lambda _: {}), Checkpoint(folder).table)  # type: ignore[operator]
        for model in (plain, found)
    ]
    assert layouts[0] == layouts[1]


def test_learning_does_not_touch_the_model_that_serves(folder: Path) -> None:
    model = Model(0, 1)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    learn_loader(lambda m, t: m.load_weights(t), meta_twin(model, lambda _: {}), Checkpoint(folder).table)  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1])


def test_what_no_loader_takes_is_held_all_the_same(folder: Path) -> None:
    engine, _ = engine_of(folder, 2)
    description = engine.describe()
    assert "rotary.inv_freq" in {spec.name for spec in description.tensors}
    assert Digest.from_proto(description.digest) == Checkpoint(folder).digest()


# --- packed modules ---------------------------------------------------------------------------------------------------


def test_packed_modules_are_reloaded_and_others_are_written_in_place(folder: Path) -> None:
    engine, control = engine_of(folder, pack=True)
    made = world(engine, folder)
    assert set(engine.copied) == {"attn.q", "attn.k", "attn.v", "attn.o"}, "a module is reloaded as a whole"
    host = control.hosts[0]
    new, changes = made.changed()
    kept = [item for item in changes if item.spec.name == "norm.weight"]
    some = dict(made.state) | {"norm.weight": new["norm.weight"]}
    made.advance(made.update(some, kept), some)
    assert host.reloads == 0
    new, changes = made.changed()
    made.advance(made.update(new, changes), new)
    assert host.reloads == 1
    bits = torch.from_numpy(new["attn.o"][1].view("i2").reshape(6, 8).copy())
    assert torch.equal(host.model().get_parameter("attn.o").view(torch.int16), bits.flip(0))


def test_a_reload_that_fails_leaves_the_old_version(folder: Path) -> None:
    engine, control = engine_of(folder, pack=True)
    made = world(engine, folder)
    new, changes = made.changed()
    engine.stage(made.update(new, changes))
    control.hosts[0].broken = True
    with pytest.raises(EngineError, match="old bits are back"):
        engine.commit()
    made.holds(engine.audit(), made.state, "audit")
    made.advance(made.update(new, changes), new)


def test_weights_packed_without_a_word_are_not_taken_for_the_checkpoints(folder: Path) -> None:
    engine, control = engine_of(folder)
    model = control.hosts[0].model()
    model.attn.o.data = model.attn.o.data.flip(0).contiguous()  # type: ignore[union-attr, operator]
    assert not engine.describe().HasField("digest"), "nobody knows what it computes with"
    assert engine.copied["attn.o"] == "its bits are not the checkpoint's"
    made = _World(engine, Checkpoint(folder), False, frozenset(), None, 0)
    made.attach()  # by a full version, which is loaded by the engine itself
    assert control.hosts[0].reloads == 1
    new, changes = made.changed()
    made.advance(made.update(new, changes), new)


# --- all ranks or none ------------------------------------------------------------------------------------------------


def test_one_rank_that_fails_takes_all_ranks_back(folder: Path) -> None:
    engine, control = engine_of(folder, 2, pack=True)
    made = world(engine, folder)
    new, changes = made.changed()
    engine.stage(made.update(new, changes))
    control.hosts[1].broken = True
    with pytest.raises(EngineError, match="all ranks"):
        engine.commit()
    made.holds(engine.audit(), made.state, "audit")
    made.advance(made.update(new, changes), new)


def test_replicas_that_differ_are_no_version(folder: Path) -> None:
    engine, control = engine_of(folder, 2)
    world(engine, folder)
    control.hosts[1].model().norm.weight.data[0] += 1  # type: ignore[union-attr, index, operator]
    with pytest.raises(EngineError, match=r"norm\.weight"):
        engine.audit()
    assert not engine.describe().HasField("digest")


def test_a_lost_answer_is_doubt_and_the_next_driver_reads_off_what_is_held(folder: Path) -> None:
    engine, control = engine_of(folder, 2)
    made = world(engine, folder)
    new, changes = made.changed()
    update = made.update(new, changes)
    engine.stage(update)
    control.lose = "commit"
    with pytest.raises(EngineInDoubtError):
        engine.commit()
    assert Digest.from_proto(engine.describe().digest) == update.digest


def test_ranks_left_on_two_versions_are_brought_back_to_one(folder: Path) -> None:
    engine, control = engine_of(folder, 2)
    made = world(engine, folder)
    new, changes = made.changed()
    engine.stage(made.update(new, changes))
    control.cores[0].call("commit", {"token": engine._token})  # and then the driver died
    other, other_control = engine_of(folder, 2)
    other_control.cores = control.cores
    made.holds(Digest.from_proto(other.describe().digest), made.state, "describe")


def test_an_engine_that_was_started_anew_is_noticed(folder: Path) -> None:
    engine, control = engine_of(folder)
    made = world(engine, folder)
    new, changes = made.changed()
    control.cores = LocalControl(control.hosts).cores
    with pytest.raises(EngineInDoubtError, match="anew"):
        engine.stage(made.update(new, changes))
    assert Digest.from_proto(engine.describe().digest) == Checkpoint(folder).digest()


def test_ranks_that_do_not_hold_everything_are_refused(folder: Path) -> None:
    engine, control = engine_of(folder, 2)
    control.cores[1] = LocalControl(engine_of(folder, 2)[1].hosts).cores[0]
    with pytest.raises(EngineError, match="not all ranks"):
        engine.describe()
    control.hosts[0].rank = 1
    with pytest.raises((LayoutError, EngineError)):
        engine.describe()


# --- staging ----------------------------------------------------------------------------------------------------------


def test_a_staged_version_reads_back_as_it_was(folder: Path, tmp_path: Path) -> None:
    engine, _ = engine_of(folder)
    made = world(engine, folder)
    new, changes = made.changed()
    absolute = made.changed(absolute=True)[1]
    staging = Staging(tmp_path / "room", 1 << 20)
    update = made.update(new, [*changes, *absolute], whole=["attn.q"])
    back = read_staged(staging.write(update))
    assert (back.target, back.digest, back.tensors, back.full) == (update.target, update.digest, update.tensors, False)
    for one, other in zip(update.changes, back.changes, strict=True):
        assert (one.spec, one.coords) == (other.spec, other.coords)
        for mine, theirs in ((one.positions, other.positions), (one.steps, other.steps), (one.bits, other.bits)):
            assert (mine is None) == (theirs is None) and (mine is None or mine.tobytes() == theirs.tobytes())  # type: ignore[union-attr]
    pieces = [(p.spec, p.coords, p.bits.tobytes()) for p in back.dense()]
    assert pieces == [(p.spec, p.coords, p.bits.tobytes()) for p in update.dense()]
    staging.drop()


def test_staging_is_bounded_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    engine, _ = engine_of(folder)
    made = world(engine, folder)
    new, changes = made.changed()
    nowhere = Staging(None, 16)
    with pytest.raises(EngineError, match="cache_dir"):
        nowhere.write(made.update(new, changes))
    staging = Staging(tmp_path / "room", 16)  # too small for shared memory
    first = staging.write(made.update(new, changes))
    assert first.is_relative_to(tmp_path) and first.stat().st_mode & 0o077 == 0
    second = staging.write(made.update(new, changes))
    assert not first.exists() and second.exists()
    staging.drop()
    assert not list((tmp_path / "room").iterdir())


@pytest.mark.parametrize("damage", ["index", "gone", "file"])
def test_a_damaged_staged_version_is_refused_and_nothing_has_changed(folder: Path, tmp_path: Path, damage: str) -> None:
    engine, control = engine_of(folder)
    made = world(engine, folder)
    new, changes = made.changed()
    path = Staging(tmp_path, 16).write(made.update(new, changes))
    file = path / ("changes.safetensors" if damage == "file" else "index.json")
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(FormatError):
        read_staged(path)
    control.cores[0].call("stage", {"folder": str(path), "token": "t", "keep_undo": True})
    while (reply := control.cores[0].call("poll", {})).get("busy"):
        pass
    assert reply["error"] == "FormatError"
    engine.pause(PauseMode.WAIT, 1.0)
    assert control.cores[0].call("commit", {"token": "t"})["error"] == "EngineError"
    engine.resume()
    made.holds(engine.audit(), made.state, "audit")


# --- doors ------------------------------------------------------------------------------------------------------------


class Client:
    """Of an engine, as vLLM's server makes it: on its event loop."""

    def __init__(self) -> None:
        self.vllm_config = type("Config", (), {"parallel_config": type("Parallel", (), {})})


async def knock() -> tuple[Any, list[bool]]:
    """From another thread, until the door is open; the client, and every answer."""
    _open_when_made(Client)
    client = Client()
    opened = [await asyncio.to_thread(open_door, client)]
    while not opened[-1]:
        await asyncio.sleep(0.01)
        opened.append(await asyncio.to_thread(open_door, client))
    return client, opened


def test_a_door_is_opened_once_and_from_any_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHT_SYNC_RUNTIME_DIR", str(tmp_path / "doors"))

    async def found() -> list[Path]:
        client, opened = await knock()
        assert opened == [*[False] * (len(opened) - 1), True] and open_door(client)
        return list((tmp_path / "doors").glob("*.vllm.sock"))

    assert len(asyncio.run(found())) == 1
    assert not list((tmp_path / "doors").iterdir()), "it goes with the loop"


def test_a_door_that_cannot_be_opened_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doors").mkdir(mode=0o755)
    monkeypatch.setenv("WEIGHT_SYNC_RUNTIME_DIR", str(tmp_path / "doors"))
    with pytest.raises(ConfigError, match="alone"):
        asyncio.run(knock())
    with pytest.raises(EngineError, match="plugin"):
        open_door(object())


def test_workers_that_verl_has_extended_get_our_method_and_no_others_do() -> None:
    class Worker:
        def __init__(self, number: int) -> None:
            self.number = number

    class Plain(Worker):
        pass

    Extension = type("Extension", (), {"__module__": "verl.workers.rollout.vllm_rollout.utils"})
    Extended = type("Extended", (Worker, Extension), {})
    for _ in range(2):  # vLLM may load plugins more than once
        _extend_when_made(Worker)
    assert Plain(1).number == 1 and not hasattr(Plain(1), "weight_sync_call")
    assert Extended(2).number == 2 and Extended(2).weight_sync_call.__func__ is WorkerExtension.weight_sync_call
    assert not hasattr(Worker, "weight_sync_call"), "else vLLM refuses extensions that have it"
