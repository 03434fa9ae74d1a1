"""Claims about adapters on a real vLLM: each version as a fresh load answers, no stale blocks, no foreign base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_scene import LAST, NAME, RANK, Scene, scene_of
from servers import TEXT, Server
from sidecars import Made, completion, until

from weight_sync.checkpoint import Checkpoint

pytestmark = pytest.mark.timeout(2400)

LORA = ("--enable-lora", "--max-lora-rank", str(RANK))


def serve(base: Path, folder: Path) -> Server:
    return Server(base, folder, *LORA, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")


def request(model: str | None) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {**completion(TEXT, 12), "model": model or "tiny"}


def read(told: Any) -> Made:
    return Made.of(told["choices"][0])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_of(tmp_path_factory.mktemp("lora"), serve, request, read) as made:
        made.start()
        yield made


def test_each_version_is_announced_and_the_bases_answers_stay(scene: Scene) -> None:
    before = scene.made(scene.ask(None))
    assert scene.ask().status == 503, "no version of the adapter yet"
    scene.publish_all()
    assert scene.made(scene.ask(None)) == before
    status, base = scene.adapter, scene.trainer.run.checkpoints[0]
    assert status["ready"] and status["errors"] == 0, status
    assert status["base"]["digest"] == Checkpoint(base).digest().hex() and status["base"]["version"] == 0
    link = next((scene.root / "cache").rglob(NAME))
    assert json.loads((link / "weight_sync.json").read_text())["version"] == status["version"]
    assert (link / "adapter_config.json").read_bytes() == (scene.folders[LAST] / "adapter_config.json").read_bytes()


def test_a_rank_above_the_engines_is_refused_and_the_version_before_goes_on(scene: Scene) -> None:
    scene.refuse_wide()


def test_a_sidecar_that_died_finds_the_adapter_in_place(scene: Scene) -> None:
    served = scene.adapter["version"]
    assert scene.sidecar is not None
    scene.sidecar.kill()
    scene.start()
    until(lambda: scene.adapter["ready"], "the adapter")
    assert scene.adapter["version"] == served and scene.adapter["commits"] == 0
    assert scene.made(scene.ask()) == scene.seen[LAST][0]


def test_a_changed_base_invalidates_the_adapter_until_one_for_it_comes(scene: Scene) -> None:
    scene.move_base()


def test_vllms_own_reload_from_one_folder_keeps_stale_blocks(scene: Scene, tmp_path: Path) -> None:
    """The fault that the sidecar does not have; vLLM warns of it in its own log."""
    place = tmp_path / "same"
    shutil.copytree(scene.folders[0], place)
    body = {"lora_name": "same", "lora_path": str(place), "load_inplace": True}
    scene.server.post("/v1/load_lora_adapter", body)
    scene.direct(scene.server, "same")
    shutil.copy(scene.folders[1] / "adapter_model.safetensors", place)
    scene.server.post("/v1/load_lora_adapter", body)
    stale = scene.direct(scene.server, "same")
    scene.server.post("/v1/load_lora_adapter", {"lora_name": "other", "lora_path": str(scene.folders[1])})
    assert stale.logprobs != scene.direct(scene.server, "other").logprobs


def compare(scene: Scene, base: int, numbers: range, folder: Path) -> None:
    """With a server that has never seen another version."""
    scene.finish()
    words = (*LORA, "--lora-modules", *(f"a{k}={scene.folders[k]}" for k in numbers))
    with Server(scene.trainer.run.checkpoints[base], folder, *words, door="none") as fresh:
        fresh.ready()
        for k in numbers:
            assert [scene.direct(fresh, f"a{k}")] * 2 == scene.seen[k], f"adapter {k}"


def test_answers_are_those_of_a_fresh_load_of_the_folder(scene: Scene, tmp_path: Path) -> None:
    compare(scene, 0, range(LAST + 1), tmp_path)


@pytest.mark.full
def test_answers_on_the_base_that_moved_are_those_of_a_fresh_load(scene: Scene, tmp_path: Path) -> None:
    compare(scene, 1, range(LAST + 1, LAST + 2), tmp_path)
