"""Claims about adapters on a real SGLang: each version as a fresh load answers, no stale blocks, no foreign base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_scene import LAST, RANK, Scene, scene_of
from servers import TEXT
from sglang_servers import SglangServer

pytestmark = pytest.mark.timeout(2400)

LORA = ("--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", str(RANK), "--lora-target-modules", "all")


def serve(base: Path, folder: Path) -> SglangServer:
    return SglangServer(base, folder, *LORA)


def request(model: str | None) -> tuple[str, dict[str, Any]]:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True},
            "return_logprob": True, "lora_path": model}  # fmt: skip
    return "/generate", body


def read(told: Any) -> list[tuple[int, float]]:
    return [(token, logprob) for logprob, token, *_ in told["meta_info"]["output_token_logprobs"]]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene_of(tmp_path_factory.mktemp("lora"), serve, request, read) as made:
        made.direct(made.server, None)
        made.start()
        yield made


def test_each_version_is_announced_and_the_bases_answers_stay(scene: Scene) -> None:
    before = scene.made(scene.ask(None))
    scene.publish_all()
    assert scene.made(scene.ask(None)) == before
    assert scene.adapter["ready"] and scene.adapter["errors"] == 0


def test_a_rank_above_the_engines_is_refused_and_the_version_before_goes_on(scene: Scene) -> None:
    scene.refuse_wide()


def test_a_changed_base_invalidates_the_adapter_until_one_for_it_comes(scene: Scene) -> None:
    scene.move_base()


def compare(scene: Scene, base: int, numbers: range, folder: Path) -> None:
    """With a server that has never seen another version."""
    scene.finish()
    words = (*LORA, "--lora-paths", *(f"a{k}={scene.folders[k]}" for k in numbers))
    with SglangServer(scene.trainer.run.checkpoints[base], folder, *words, door="none") as fresh:
        fresh.ready()
        for k in numbers:
            assert [scene.direct(fresh, f"a{k}")] * 2 == scene.seen[k], f"adapter {k}"


@pytest.mark.full
def test_answers_are_those_of_a_fresh_load_of_the_folder(scene: Scene, tmp_path: Path) -> None:
    compare(scene, 0, range(LAST + 1), tmp_path)


@pytest.mark.full
def test_answers_on_the_base_that_moved_are_those_of_a_fresh_load(scene: Scene, tmp_path: Path) -> None:
    compare(scene, 1, range(LAST + 1, LAST + 2), tmp_path)
