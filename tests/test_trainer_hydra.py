"""Claims about the Hydra config groups that verl's command line uses; with real Hydra and verl in tests/hosts/verl."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from weight_sync.adapters.trainers.block import read_block
from weight_sync.adapters.trainers.modes import never_synced
from weight_sync.config import Config

ROOT = Path(__file__).resolve().parent.parent
GENERATOR = runpy.run_path(str(ROOT / "scripts" / "gen_hydra.py"))
GROUPS = GENERATOR["GROUPS"]


def keys_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    out = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            out |= keys_of(field.annotation, f"{prefix}{name}.")
        else:
            out.add(prefix + name)
    return out


def keys_in(block: dict[str, Any], prefix: str = "") -> set[str]:
    out = set()
    for name, value in block.items():
        out |= keys_in(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name}
    return out


@pytest.mark.parametrize("name", GROUPS)
def test_every_group_lists_every_key_since_hydra_refuses_others(name: str) -> None:
    path = GENERATOR["FOLDER"] / f"{name}.yaml"
    assert path.read_text() == GENERATOR["group"](name), "run scripts/gen_hydra.py"
    block = yaml.safe_load(path.read_text())["weight_sync"]
    assert keys_in(block) == keys_of(Config)
    block |= {"uri": "/store", "base": None}
    assert read_block(block) == Config(uri="/store", backend=name), "what is listed is the default"


def job(**changes: Any) -> Any:
    values = {"use_v1": True, "trainer_mode": "separate_async", "backend": "weight_sync", **changes}
    v1 = None if values["trainer_mode"] is None else {"trainer_mode": values["trainer_mode"]}
    trainer = {"use_v1": values["use_v1"], "v1": v1}
    holder = SimpleNamespace(get=trainer.get, v1=SimpleNamespace(get=(v1 or {}).get))
    engine = SimpleNamespace(checkpoint_engine=SimpleNamespace(backend=values["backend"]))
    return SimpleNamespace(trainer=holder, actor_rollout_ref=SimpleNamespace(rollout=engine))


@pytest.mark.parametrize(("changes", "words"), [
    ({}, ""), ({"trainer_mode": None}, ""), ({"trainer_mode": "sync"}, "never calls"),
    ({"trainer_mode": "colocate_async"}, "never calls"), ({"use_v1": False}, "legacy"), ({"backend": "nccl"}, "'nccl'"),
])  # fmt: skip
def test_jobs_that_would_publish_nothing_are_told_what_to_set(changes: dict[str, Any], words: str) -> None:
    reason, do = never_synced(job(**changes))
    assert (words in reason) and bool(reason) == bool(words) == bool(do)
