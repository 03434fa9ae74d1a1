"""What the tests of real verl share: the package as a wheel leaves it, a tiny model, and processes with verl's settings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
EXAMPLE = ROOT / "examples" / "verl"
EXPERTS = """
import sys
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
torch.manual_seed(0)
config = Qwen3MoeConfig(
    vocab_size=9001, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False)
Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """weight_sync as ``pip install weight-sync`` installs it: Hydra does not look into editable installs."""
    copy, target = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, copy)
    for folder in ("plugin", "transport", "adapters", "proto"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(copy)], check=True, timeout=300)
    return target


@pytest.fixture(scope="session")
def variables(site: Path) -> dict[str, str]:
    """Environment of verl's processes."""
    own = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
           "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled",
           "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip
    return {**os.environ, **own, "PYTHONPATH": f"{site}{os.pathsep}{EXAMPLE}"}


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory, variables: dict[str, str]) -> Path:
    """Folder with the tiny model and its prompts, and a tiny one with experts."""
    folder = tmp_path_factory.mktemp("inputs")
    subprocess.run([sys.executable, EXAMPLE / "tiny.py", str(folder)], env=variables, check=True, timeout=300)
    shutil.copytree(folder / "tiny", folder / "experts", ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    subprocess.run([sys.executable, "-c", EXPERTS, str(folder / "experts")], env=variables, check=True, timeout=300)
    return folder
