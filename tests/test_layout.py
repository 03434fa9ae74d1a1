"""Layouts of models and named tensors: the checkpoint comes back bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from layout_cases import (
    bits,
    blank,
    rebuilt,
    table_of,
)
from safetensors.torch import load_file
from torch import nn

from weight_sync.errors import LayoutError
from weight_sync.layout import (
    check_storages,
    learn_module,
    learn_named,
    local_storages,
)
from weight_sync.layout import coverage as cov
from weight_sync.layout.storage import flat_storage


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(2.0))


def test_tied_names_outside_of_the_table_are_dropped_and_others_are_errors() -> None:
    model = Tied()
    state = {"embed.weight": model.embed.weight, "scale": torch.tensor(2.0)}
    layout = learn_module(model, table_of(state))
    assert set(layout.by_tensor) == {"embed.weight", "scale"}
    assert set(
        learn_module(model, table_of({"head.weight": model.head.weight, "scale": state["scale"]})).by_tensor
    ) == {
        "head.weight",
        "scale",
    }
    with pytest.raises(LayoutError, match=r"1 not in the checkpoint: scale.*1 not in the model: other"):
        learn_module(model, table_of({"embed.weight": model.embed.weight, "other": torch.ones(2)}))
    with pytest.raises(LayoutError, match=r"embed.weight \(10, 4\).*embed.weight \(4, 10\)"):
        learn_module(model, table_of({"embed.weight": torch.ones(4, 10), "scale": state["scale"]}))
    with pytest.raises(LayoutError, match="Quantizer"):
        learn_module(model, table_of({"embed.weight": torch.ones(10, 4, dtype=torch.int8), "scale": state["scale"]}))


def test_a_stage_may_lack_names_only_when_it_says_so() -> None:
    table = table_of({"a": torch.ones(2), "b": torch.ones(3)})
    with pytest.raises(LayoutError, match="not in the model: b"):
        learn_named({"a": torch.ones(2)}, table)
    assert set(learn_named({"a": torch.ones(2)}, table, partial=True).by_tensor) == {"a"}


def test_named_tensors_of_any_strides_and_sizes_are_read_in_place() -> None:
    big = torch.arange(200, dtype=torch.float32).view(10, 20)
    named = {
        "columns": big[:, 3:7],
        "transposed": big.t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "row": big[4],
        "spread": big[::2, ::3],
    }
    table = table_of({name: tensor.to(torch.bfloat16) for name, tensor in named.items()})
    layout = learn_named(named, table)
    storages = {name: flat_storage(tensor) for name, tensor in named.items()}
    assert all(
        t.untyped_storage().data_ptr() == big.untyped_storage().data_ptr()
        for n, t in storages.items()
        if n in ("columns", "row")
    )
    check_storages(layout, storages)
    into = blank(table)
    rebuilt(layout, storages, into)
    for name, tensor in named.items():
        assert torch.equal(into[name], tensor.to(torch.bfloat16))
    assert {item.casts for item in layout.placements} == {("BF16",)}
    with pytest.raises(LayoutError, match="columns"):
        check_storages(layout, {**storages, "columns": storages["columns"].half()})


CONFIG = {
    "vocab_size": 151,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = dict(CONFIG, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12)


@pytest.mark.parametrize(
    ("kind", "config"),
    [("qwen3", CONFIG), ("qwen3", dict(CONFIG, tie_word_embeddings=True)), ("qwen3_moe", EXPERTS)],
    ids=["qwen3", "tied", "experts"],
)
def test_a_checkpoint_is_rebuilt_bit_equal_from_a_transformers_model(
    tmp_path: Path, kind: str, config: dict[str, Any]
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.bfloat16).save_pretrained(
        tmp_path
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    disk = load_file(tmp_path / "model.safetensors")
    table = table_of(disk)
    layout = learn_module(model, table)
    storages = local_storages(model)
    check_storages(layout, storages)
    into = blank(table)
    rebuilt(layout, storages, into)
    assert all(bits(into[name]) == bits(tensor) for name, tensor in disk.items())
    assert cov.check_exactly_once(table, [cov.summarise(layout)]) == ()
    if kind == "qwen3_moe":
        assert "model.layers.1.mlp.experts.4.up_proj.weight" in layout.by_tensor
        assert layout.by_tensor["model.layers.1.mlp.experts.4.up_proj.weight"][0].storage.endswith(
            "experts.gate_up_proj"
        )
    with torch.no_grad():  # resolved afresh, the same layout reads the weights of the next step
        for parameter in model.parameters():
            parameter.data = parameter.data * 2 + 1
    rebuilt(layout, local_storages(model), into)
    model.save_pretrained(tmp_path / "next")
    assert all(bits(into[n]) == bits(t) for n, t in load_file(tmp_path / "next" / "model.safetensors").items())


def test_importing_the_geometry_imports_no_torch() -> None:
    code = "import sys, weight_sync.layout.placement, weight_sync.layout.agree; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
