"""Claims about adapters as versions: only they travel, followers hold PEFT's folder, and the base is named and checked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from adapter_cases import TARGETS, adapted, merged, save_base, step
from cli_cases import ask, bits, run
from safetensors.torch import load_file

import weight_sync
from weight_sync.adapter import AdapterConfig, pairs_of
from weight_sync.adapters.engines.checkpoint import CheckpointEngine
from weight_sync.adapting import AdapterSource
from weight_sync.checkpoint import Checkpoint
from weight_sync.config import load
from weight_sync.errors import ConfigError, ForkRequiredError, TensorError, VersionMissingError
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.registry import open_transport

pytest.importorskip("peft")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("models") / "base")


def manifest_of(store: Path, number: int | None = None) -> manifest_pb2.VersionManifest:
    end = open_transport(load({"uri": str(store)})).replica_end()
    head = end.head()
    assert head is not None
    return end.manifest(head if number is None else number)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def settings(folder: Path) -> dict[str, object]:
    """PEFT writes its set of modules in no order."""
    found = json.loads((folder / "adapter_config.json").read_text())
    return {**found, "target_modules": sorted(found["target_modules"])}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_only_the_adapter_travels_and_followers_hold_what_peft_would_have_saved(base: Path, tmp_path: Path) -> None:
    store, out, model = tmp_path / "lora", tmp_path / "current", adapted(base)
    with weight_sync.Publisher.open(str(store), adapter={"base": str(base)}) as publisher:
        engine = CheckpointEngine(out)
        with weight_sync.Replica.open(str(store), engine) as replica:
            for number in range(3):
                report = publisher.publish(step(model, number), step=number)
                assert report is not None and report.elements == sum(
                    p.numel() for n, p in model.named_parameters() if "lora_" in n
                )
                assert replica.sync(min_version=report.version).version == report.version
                saved = tmp_path / f"saved-{number}"
                model.save_pretrained(saved)
                assert {item.name for item in out.iterdir()} == {
                    "adapter_config.json", "adapter_model.safetensors", "weight_sync.json",
                }  # fmt: skip
                assert same(tensors(out), tensors(saved))
                assert settings(out) == settings(saved)
                assert same(merged(base, out), merged(base, saved)), "peft loads it"
        engine.close()
    assert manifest_of(store).kind == manifest_pb2.ENTRY_KIND_PATCH
    stored = sum(file.stat().st_size for file in store.rglob("*.safetensors"))
    assert stored < Checkpoint(base).path.joinpath("model.safetensors").stat().st_size


def test_a_version_says_what_it_adapts(base: Path, tmp_path: Path) -> None:
    run("publish", base, "--to", tmp_path / "base-run")
    model = adapted(base)
    with weight_sync.Publisher.open(str(tmp_path / "a"), adapter={"base": f"{tmp_path}/base-run@0"}) as publisher:
        publisher.publish(model)
    found, of = manifest_of(tmp_path / "a").adapter, manifest_of(tmp_path / "base-run")
    assert (found.base.run_id, found.base.number, found.base_view) == (of.run_id, 0, "default")
    assert found.base_digest == of.views[0].digest == Checkpoint(base).digest().to_proto()
    assert json.loads(found.config)["r"] == 4
    with weight_sync.Publisher.open(str(tmp_path / "b"), adapter={"base": str(base)}) as publisher:
        publisher.publish(model)
    other = manifest_of(tmp_path / "b").adapter
    assert not other.HasField("base") and other.base_digest == found.base_digest
    assert other.reference.uri == str(base)


def test_folders_are_published_listed_materialised_and_followed(base: Path, tmp_path: Path) -> None:
    model, store = adapted(base), tmp_path / "lora"
    folders = []
    for k in range(3):
        step(model, k).save_pretrained(tmp_path / f"adapter-{k}")
        folders.append(tmp_path / f"adapter-{k}")
    rows = ask("publish", *folders, "--to", store, "--adapter-base", base)
    assert [row["kind"] for row in rows] == ["ANCHOR", "PATCH", "PATCH"]
    listed = ask("log", store)["versions"]
    assert [row["adapter"]["config"]["lora_alpha"] for row in listed] == [8, 8, 8]
    assert listed[0]["adapter"]["base"]["digest"] == Checkpoint(base).digest().hex()
    assert ask("inspect", store)["adapter"]["base"]["uri"] == str(base)
    assert "rank 4" in run("inspect", store).stdout
    for row, folder in zip(rows, folders, strict=True):
        out = tmp_path / f"out-{row['number']}"
        ask("materialize", store, "--version", str(row["number"]), "--out", out)
        assert bits(out / "adapter_model.safetensors") == bits(folder / "adapter_model.safetensors")
        assert (out / "adapter_config.json").read_bytes() == (folder / "adapter_config.json").read_bytes()
    ask("follow", store, "--out", tmp_path / "current", "--once")
    assert bits(tmp_path / "current" / "adapter_model.safetensors") == bits(folders[2] / "adapter_model.safetensors")
    run("verify", store, "--deep")
    with pytest.raises(ConfigError, match="adapters"), weight_sync.Publisher.open(str(store)):
        pass


def test_the_rank_and_the_modules_may_change_on_the_way(base: Path, tmp_path: Path) -> None:
    with weight_sync.Publisher.open(str(tmp_path / "lora"), adapter={"base": str(base)}) as publisher:
        engine = CheckpointEngine(tmp_path / "current")
        with weight_sync.Replica.open(str(tmp_path / "lora"), engine) as replica:
            for options in ({}, {"r": 8}, {"r": 8, "target_modules": ["q_proj", "up_proj"]}):
                model = adapted(base, **options)
                publisher.publish(model)
                replica.sync()
                model.save_pretrained(tmp_path / "saved")
                assert same(tensors(tmp_path / "current"), tensors(tmp_path / "saved"))
                found = json.loads((tmp_path / "current" / "adapter_config.json").read_text())
                assert found["r"] == options.get("r", 4)
        engine.close()


def test_a_run_keeps_its_base(base: Path, tmp_path: Path) -> None:
    other, model = save_base(tmp_path / "other", seed=5), adapted(base)
    store = str(tmp_path / "lora")
    with weight_sync.Publisher.open(store, adapter={"base": str(base)}) as publisher:
        publisher.publish(model)
    with pytest.raises(ForkRequiredError) as caught:
        weight_sync.Publisher.open(store, adapter={"base": str(other)})
    for folder in (base, other):
        assert Checkpoint(folder).digest().hex() in str(caught.value)
    with weight_sync.Publisher.open(store, adapter={"base": str(other)}, fork=True) as publisher:
        publisher.publish(adapted(other))
        assert manifest_of(tmp_path / "lora").adapter.base_digest == Checkpoint(other).digest().to_proto()


def test_what_does_not_belong_to_the_base_is_refused_and_nothing_is_published(base: Path, tmp_path: Path) -> None:
    wide = save_base(tmp_path / "wide", hidden_size=64)
    deep = save_base(tmp_path / "deep", num_hidden_layers=3)
    with weight_sync.Publisher.open(str(tmp_path / "lora"), adapter={"base": str(base)}) as publisher:
        with pytest.raises(TensorError, match="does not fit") as caught:
            publisher.publish(adapted(wide))
        assert "expected" in str(caught.value) and "layers.0" in str(caught.value)
        with pytest.raises(TensorError, match=r"not for this base.*layers\.2"):
            publisher.publish(adapted(deep))
        good = AdapterSource(*_parts(adapted(base), tmp_path / "good"))
        half = {name: t for name, t in good.tensors.items() if not name.endswith("1.self_attn.q_proj.lora_B.weight")}
        other = {name: t for name, t in good.tensors.items() if not name.endswith("1.self_attn.q_proj.lora_A.weight")}
        extra = {**good.tensors, "base_model.model.foo": torch.zeros(2)}
        settings = json.dumps({**json.loads(good.config), "target_modules": ["o_proj"]})
        for source, message in (
            (AdapterSource(half, good.config), "without its other half"),
            (AdapterSource(other, good.config), "without its other half"),
            (AdapterSource(extra, good.config), "adapts nothing"),
            (AdapterSource(good.tensors, settings), "does not adapt this module"),
            (AdapterSource(good.tensors, good.config.replace('"r": 4', '"r": 5')), "rank differs"),
            (AdapterSource(good.tensors, good.config.replace("LORA", "IA3")), "not a LoRA adapter"),
            (AdapterSource(good.tensors, "{"), "not JSON"),
            (AdapterSource({"w": torch.zeros(2)}, good.config), "no adapter's tensors"),
            (dict(good.tensors), "not an adapter"),
            (tmp_path / "nowhere", "no adapter's folder"),
        ):
            with pytest.raises(TensorError, match=message):
                publisher.publish(source)
        assert publisher.version is None
        assert publisher.publish(good) is not None


def _parts(model: object, folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    return tensors(folder), (folder / "adapter_config.json").read_text()


def test_a_base_that_is_not_there_is_named(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such base"):
        weight_sync.Publisher.open(str(tmp_path / "lora"), adapter={"base": str(tmp_path / "nowhere")})
    (tmp_path / "empty").mkdir()
    with pytest.raises(VersionMissingError):
        weight_sync.Publisher.open(str(tmp_path / "lora"), adapter={"base": str(tmp_path / "empty")})
    run("publish", base, "--to", tmp_path / "base-run")
    with pytest.raises(VersionMissingError):
        weight_sync.Publisher.open(str(tmp_path / "lora"), adapter={"base": f"{tmp_path}/base-run@7"})
    adapted(base).save_pretrained(tmp_path / "adapter")
    run("publish", tmp_path / "adapter", "--to", tmp_path / "lora", code=2)
    shutil.copytree(base, tmp_path / "model")
    run("publish", tmp_path / "adapter", tmp_path / "model", "--to", tmp_path / "lora", "--adapter-base", base, code=2)
    assert not list((tmp_path / "lora").rglob("*.safetensors"))


def test_scalings_are_pefts_own(base: Path) -> None:
    options = {"use_rslora": True, "rank_pattern": {"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 3}}
    for given in ({}, options, {**options, "use_rslora": False}):
        model = adapted(base, **given)
        config = AdapterConfig.read(_config(model))
        pairs, rest = pairs_of(Checkpoint(base).table)
        assert not pairs and rest
        modules = dict(model.get_base_model().named_modules())
        seen = [name for name, module in modules.items() if name.endswith(TARGETS) and hasattr(module, "scaling")]
        assert len(seen) == 6
        for name in seen:
            assert config.scaling(name) == modules[name].scaling["default"]
            assert config.rank_of(name) == modules[name].r["default"]


def _config(model: object) -> str:
    from weight_sync.adapters.trainers.lora import adapter_config

    return adapter_config(model)  # type: ignore[arg-type]


def test_a_folder_tells_the_base_of_the_newest_version_although_its_bits_were_there_already(
    base: Path, tmp_path: Path
) -> None:
    """The same adapter, published anew for another base."""
    store, out, other = tmp_path / "lora", tmp_path / "current", save_base(tmp_path / "other", seed=5)
    model = adapted(base)
    with weight_sync.Publisher.open(str(store), adapter={"base": str(base)}) as publisher:
        publisher.publish(model, step=0)
    engine = CheckpointEngine(out)
    with weight_sync.Replica.open(str(store), engine) as replica:
        replica.sync()
        with weight_sync.Publisher.open(str(store), adapter={"base": str(other)}, fork=True) as publisher:
            publisher.publish(model, step=0)
        replica.sync()
        note = json.loads((out / "weight_sync.json").read_text())
        assert note["run_id"] == publisher.run_id and note["base"]["digest"] == Checkpoint(other).digest().hex()
    engine.close()
    with weight_sync.Replica.open(str(store), CheckpointEngine(out)) as replica:
        replica.sync()
    assert json.loads((out / "weight_sync.json").read_text()) == note
