"""Writes the Hydra config groups (adapters/trainers/hydra/conf) from the configuration model.

Owns the files' text. Hydra refuses keys that a file does not list, so the groups list all of them; a test compares.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from weight_sync.config import Config

FOLDER = Path(__file__).resolve().parent.parent / "adapters" / "trainers" / "hydra" / "conf" / "weight_sync"
GROUPS = ("file", "grpc", "rdma")
_HEAD = """# @package _global_
# Every key of the weight_sync block; `weight-sync config` explains them. null: not set. Made by scripts/gen_hydra.py.
weight_sync:
"""
_TAIL = """actor_rollout_ref:
  rollout:
    checkpoint_engine:
      backend: weight_sync
      custom_backend_module: weight_sync.adapters.trainers.verl
      engine_kwargs:
        weight_sync:
          config: ${weight_sync}
          checkpoints: ${trainer.default_local_dir}
hydra:
  callbacks:
    weight_sync:
      _target_: hydra_plugins.weight_sync.check.StartCheck
"""
_DIFFERENT = {"uri": "???", "base": "${actor_rollout_ref.model.path}", "threads": "null"}


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _lines(model: type[BaseModel], indent: str, backend: str) -> list[str]:
    out = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            out += [f"{indent}{name}:", *_lines(field.annotation, indent + "  ", backend)]
            continue
        value = None if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        text = _text(value)
        if model is Config:
            text = backend if name == "backend" else _DIFFERENT.get(name, text)
        out.append(f"{indent}{name}: {text}")
    return out


def group(backend: str) -> str:
    """The text of one group's file."""
    return _HEAD + "\n".join(_lines(Config, "  ", backend)) + "\n" + _TAIL


if __name__ == "__main__":
    for name in GROUPS:
        (FOLDER / f"{name}.yaml").write_text(group(name))
