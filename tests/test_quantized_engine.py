"""Claims about a real engine that loads quantised views: transformers, on a CPU, from the folder that a follower keeps.

Owns tiny checkpoints quantised by the formats' libraries. docs/views.md says which engines ran which schemes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize_cases import CASES, Case, Tensors
from safetensors.torch import save_file

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.checkpoint import CheckpointEngine
from weight_sync.adapters.engines.transformers import TransformersEngine
from weight_sync.errors import EngineError

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
LOADED = (
    "fp8-block",
    "ct-fp8-tensor",
    "ct-fp8-channel",
    "ct-fp8-block",
    "int4-group",
    "int4-channel",
    "nvfp4",
    "mxfp4",
)
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 10]])


def tiny() -> Any:
    torch.manual_seed(3)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 64,
             "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(initializer_range=0.08, **sizes)).bfloat16()


def state(model: Any, step: int) -> Tensors:
    """The trainer's weights after so many steps."""
    dice = torch.Generator().manual_seed(step)
    return {
        name: tensor if step == 0 else (tensor + 0.004 * torch.randn(tensor.shape, generator=dice)).bfloat16()
        for name, tensor in model.state_dict().items()
    }


def whole(case: Case, tensors: Tensors, folder: Path, model: Any) -> Path:
    """A full checkpoint, quantised by the format's library."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        parts = case.quantize(tensor) if ".layers." in name and tensor.ndim == 2 else None
        if parts is None:
            found[name] = tensor.contiguous()
        else:
            found |= {name.removesuffix("weight") + suffix: part.contiguous() for suffix, part in parts.items()}
    folder.mkdir()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    extra: dict[str, Any] = {"modules_to_not_convert": ["lm_head"], "activation_scheme": "dynamic"}
    if case.config["quant_method"] == "compressed-tensors":
        extra = {"ignore": ["lm_head"], "quantization_status": "compressed"}
    config = {**json.loads(model.config.to_json_string()), "quantization_config": {**case.config, **extra}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def answer(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        return load(folder)(PROMPT).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", LOADED)
def test_an_engine_loads_each_version_and_answers_as_from_the_librarys_own_checkpoint(
    name: str, tmp_path: Path
) -> None:
    model, case = tiny(), CASES[name]
    base, out = whole(case, state(model, 0), tmp_path / "base", model), tmp_path / "served"
    before = answer(base)
    with (
        Publisher.open(str(tmp_path / "run"), base=os.fspath(base)) as publisher,
        Replica.open(str(tmp_path / "run"), CheckpointEngine(out, base=base)) as replica,
    ):
        for step in (1, 2):
            publisher.publish(state(model, step), step)
            replica.sync()
            made = answer(out)
            assert torch.equal(made, answer(whole(case, state(model, step), tmp_path / f"whole-{step}", model)))
            assert not torch.equal(made, before)
            before = made


@pytest.mark.parametrize("name", ["ct-fp8-channel", "int4-group"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_model_that_unpacks_its_codes_is_refused_before_it_serves_old_weights(
    name: str, warm: bool, tmp_path: Path
) -> None:
    """compressed-tensors computes with what it unpacked at the first forward: codes written later change nothing."""
    model, case = tiny(), CASES[name]
    base = whole(case, state(model, 0), tmp_path / "base", model)
    served = load(base)
    if warm:
        served(PROMPT)
    with pytest.raises(EngineError, match="unpacks"):
        TransformersEngine(served, base)
