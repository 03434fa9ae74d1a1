"""Claims about OpenRLHF training through weight_sync, against a stand-in with exactly the contract that its adapter uses.

Owns the launcher, the adapter's order of calls, DeepSpeed's partitions and LoRA. The real host runs in
tests/hosts/openrlhf; the stand-in (tests/openrlhf_stand_in) has its actors, parser and program in miniature.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from test_distributed import Say, finished, launch
from worker_cases import checkpoint

from weight_sync.adapters.trainers.deepspeed import gather_adapter, hold, why_gathered
from weight_sync.adapters.trainers.openrlhf.host import OpenRlhfHost, reachable
from weight_sync.adapters.trainers.openrlhf.launch import prepare
from weight_sync.checkpoint import Checkpoint
from weight_sync.config import load
from weight_sync.errors import ConfigError, LayoutError, TensorError
from weight_sync.group import SoloGroup, TorchGroup
from weight_sync.run import main, split_options
from weight_sync.served import storages_of

STAND_IN = Path(__file__).parent / "openrlhf_stand_in"
PROGRAM = "openrlhf.cli.train_ppo_ray"


def train(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """The launcher with the stand-in, as a user starts it."""
    path = os.pathsep.join([str(STAND_IN), str(STAND_IN.parent)])
    return subprocess.run(
        [sys.executable, "-m", "weight_sync.run", PROGRAM, "--actor.model_name_or_path", str(folder / "base"),
         "--ckpt.path", str(folder / "ckpt"), *options],
        cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def steps_of(run: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def agrees(step: dict[str, Any], engine: dict[str, Any]) -> bool:
    """Whether an engine holds the trainer's weights, in its own fused and padded parameters."""
    own = {name: torch.tensor(value) for name, value in step["trainer"].items()}
    held = {name: torch.tensor(value) for name, value in engine["weights"].items()}
    fused = torch.cat([own["attn.q"], own["attn.k"], own["attn.v"]]).flatten()
    embedded = own["embed.weight"].flatten()
    return bool(
        torch.equal(held["attn.qkv"], fused)
        and torch.equal(held["attn.o"], own["attn.o"].flatten())
        and torch.equal(held["norm.weight"], own["norm.weight"])
        and torch.equal(held["embed.weight"][: len(embedded)], embedded)
    )


# --- the command line ---------------------------------------------------------------------------------------------

_words = st.text("abcdefgh_", min_size=1, max_size=6)
_values = st.one_of(
    st.text("abc/:. 0123456789=-", min_size=1, max_size=9).filter(lambda text: not text.startswith("-")),
    st.just(None),
    st.lists(_words, max_size=3),
)


@given(
    st.dictionaries(_words, _values, max_size=4), st.lists(st.sampled_from(["--a.b", "c", "--d", "e=f"]), max_size=5)
)
def test_our_options_come_off_the_command_line_and_nothing_else_does(block: dict[str, Any], other: list[str]) -> None:
    ours = []
    for key, value in block.items():
        text = value if isinstance(value, str) else json.dumps(value)
        ours += [f"--weight_sync.{key}", text] if len(key) % 2 else [f"--weight_sync.{key}={text}"]
    assert split_options([*other, *ours]) == (block, other)


def test_dots_nest_and_an_option_without_a_value_is_true() -> None:
    block, rest = split_options(
        ["--weight_sync.overlap", "--weight_sync.tls.ca", "f", "--x", "--weight_sync.tls.key=k"]
    )
    assert (block, rest) == ({"overlap": "true", "tls": {"ca": "f", "key": "k"}}, ["--x"])
    with pytest.raises(ConfigError, match="given twice"):
        split_options(["--weight_sync.uri", "a", "--weight_sync.uri", "b"])
    with pytest.raises(ConfigError, match="at once"):
        split_options(["--weight_sync.tls", "a", "--weight_sync.tls.ca", "b"])


def test_a_program_of_another_host_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nobody.train", "--weight_sync.uri", "x"]) == 2
    said = capsys.readouterr().err
    assert "no such launcher" in said and "nobody" in said
    assert main([]) == 2 and "usage" in capsys.readouterr().err


def test_without_options_of_ours_nothing_is_replaced() -> None:
    prepare(PROGRAM, {})  # would raise: OpenRLHF is not installed here
    prepare(PROGRAM, {"backend": "native"})
    with pytest.raises(ConfigError, match="not supported"):
        prepare(PROGRAM, {"uri": "file:///x"})


def test_what_is_wrong_with_the_start_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base")
    run = train(tmp_path, "--weight_sync.uri", "file:///x", "--weight_sync.anchor_evry", "3")
    assert run.returncode == 2 and "anchor_evry" in run.stderr and "anchor_every" in run.stderr
    run = train(tmp_path, "--weight_sync.uri", "file:///x", "--weight_sync.lora", "both")
    assert run.returncode == 2 and "merge or adapter" in run.stderr


# --- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_engines_hold_the_trainers_bits_after_every_sync_and_a_failed_one_is_made_up_for(tmp_path: Path) -> None:
    checkpoint(tmp_path / "base")
    store, uri = tmp_path / "run", (tmp_path / "run").as_uri()
    options = ("--weight_sync.uri", uri, "--vllm.num_engines", "2")
    run = train(tmp_path, *options, "--steps", "4", "--break_at", "2", "--store", str(store))
    first = steps_of(run)
    assert "sync failed" in run.stdout and "published from where they lie" in run.stdout, "in the host's own log"
    served = [[agrees(step, engine) for engine in step["engines"]] for step in first]
    assert served == [[True, True], [False, False], [True, True], [True, True]]
    assert first[1]["engines"][0]["weights"] == first[0]["engines"][0]["weights"], "the version before is served"
    status = [step["status"] for step in first]
    assert [s.get("weight_sync/failed") for s in status] == [None, 0.0, 1.0, 0.0], "told at the next step boundary"
    assert status[3]["weight_sync/failures"] == 1 and status[3]["policy_loss"] == 0.5
    assert status[3]["weight_sync/tensors_gathered"] == 0 and status[3]["weight_sync/engines_behind"] == 0
    assert first[0]["engines"][0]["resets"] >= 1, "the prefix cache is dropped after the update"

    resumed = steps_of(train(tmp_path, *options, "--weight_sync.overlap", "--steps", "2"))
    assert [step["step"] for step in resumed] == [4, 5, 6]
    assert resumed[0]["trainer"] == first[3]["trainer"], "the host's checkpoint"
    for before, step in zip([resumed[0], *resumed], resumed, strict=False):
        assert all(agrees({"trainer": before["trainer"]}, engine) for engine in step["engines"]), "one version behind"

    (tmp_path / "ckpt").rename(tmp_path / "lost")
    anew = train(tmp_path, *options, "--steps", "1")
    assert anew.returncode != 0 and "fork" in anew.stderr, "a fresh trainer does not go on with a used run"


# --- DeepSpeed's partitions ---------------------------------------------------------------------------------------


def partition(model: torch.nn.Module) -> None:
    """What ZeRO-3 leaves of parameters: an empty tensor, and a flat, padded part of equal size per rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for param in model.parameters():
        if hasattr(param, "ds_tensor"):
            continue
        size = -(-param.numel() // world)
        flat = torch.full((size * world,), 77, dtype=param.dtype)
        flat[: param.numel()] = param.data.view(-1)
        param.ds_shape, param.ds_process_group = param.shape, dist.group.WORLD
        param.ds_tensor = flat[rank * size : (rank + 1) * size].clone()
        param.ds_tensor.ds_numel = size
        param.data = torch.empty(0, dtype=param.dtype)


def moe(folder: Path | None = None, tied: bool = True) -> Any:
    """A mixture of experts, whose experts are fused in memory and single on disk; 3 ranks do not divide its sizes."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    if folder is not None:
        return Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=37, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=12,
        tie_word_embeddings=tied, max_position_embeddings=64,
    )).to(torch.bfloat16)  # fmt: skip


def publish_partitions(say: Say, base: str, uri: str) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a rank gathered a tensor")

    model = moe(Path(base))
    partition(model)
    group = TorchGroup(timeout_s=60)
    dist.all_gather_into_tensor = never  # type: ignore[assignment]
    config = load({"uri": uri, "base": base, "timeout_s": 60, "threads": 1})
    host = OpenRlhfHost(config, group, model, (), 0)
    host.attach()
    for _ in range(2):
        for index, param in enumerate(model.parameters()):
            part = param.ds_tensor
            if index % 3:
                part[:: 3 + index % 4] += 0.25
        host.broadcast()
    say(json.dumps(host.metrics))
    say(json.dumps(sorted(set(host.paths.values()))))
    torch.save({n: (p.ds_shape, p.ds_tensor) for n, p in model.named_parameters()}, f"{base}/rank{group.rank}.pt")
    host.close()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_zero3_partitions_are_published_where_they_lie_under_the_checkpoints_names(tmp_path: Path, world: int) -> None:
    from weight_sync.adapters.engines.checkpoint import CheckpointEngine
    from weight_sync.replica import Replica

    base, uri = tmp_path / "base", (tmp_path / "run").as_uri()
    moe().save_pretrained(base)
    for said in finished(launch(tmp_path, world, publish_partitions, str(base), uri)):
        metrics, paths = map(json.loads, said)
        assert (
            paths == ["shard"] and metrics["weight_sync/version"] == 2 and metrics["weight_sync/tensors_gathered"] == 0
        )
    parts = [torch.load(base / f"rank{rank}.pt") for rank in range(world)]
    expected = moe(base)
    for name, param in expected.named_parameters():
        flat = torch.cat([part[name][1] for part in parts])[: param.numel()]
        param.data = flat.view(parts[0][name][0])
    expected.save_pretrained(tmp_path / "expected")
    engine = CheckpointEngine(tmp_path / "copy", base=base)
    with Replica.open(uri, engine) as replica:
        assert replica.sync().version == 2
        found = engine.mirror.path.resolve()
        assert Checkpoint(found).digest() == Checkpoint(tmp_path / "expected").digest()
        assert len(Checkpoint(found).table) > len(parts[0]), "experts are single on disk"


def test_a_wrong_base_is_an_error_that_lists_both_sides(tmp_path: Path) -> None:
    moe().save_pretrained(tmp_path / "base")
    config = load({"uri": (tmp_path / "run").as_uri(), "base": str(tmp_path / "base")})
    model = moe(tmp_path / "base")
    model.model.layers[0].mlp.extra = torch.nn.Linear(4, 4)
    del model.model.layers[1].self_attn.q_norm
    with pytest.raises(LayoutError) as caught:
        OpenRlhfHost(config, SoloGroup(), model, (), 0).attach()
    assert "extra" in str(caught.value) and "q_norm" in str(caught.value)


def test_why_a_tensor_is_gathered_is_a_reason_in_words() -> None:
    plain, swapped, small = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    swapped.ds_tensor = torch.zeros(1)  # type: ignore[attr-defined]
    swapped.ds_tensor.status = SimpleNamespace(name="NOT_AVAILABLE")  # type: ignore[attr-defined]
    small.ds_tensor = torch.zeros(1)  # type: ignore[attr-defined]
    small.ds_tensor.ds_quant_scale = torch.zeros(1)  # type: ignore[attr-defined]
    assert why_gathered(plain, None, False) == ""
    assert "tensor parallelism" in why_gathered(plain, None, True)
    assert "swapped" in why_gathered(swapped, None, False) and "quantised" in why_gathered(small, None, False)


# --- LoRA ---------------------------------------------------------------------------------------------------------


def adapted_model(base: Path, dora: bool = False) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", use_dora=dora)
    model = get_peft_model(moe(base), config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            param.data.normal_()
    return model


def test_lora_is_merged_into_what_is_served_as_peft_merges_it(tmp_path: Path) -> None:
    moe().save_pretrained(tmp_path / "base")
    model = adapted_model(tmp_path / "base")
    paths: dict[str, str] = {}
    table = Checkpoint(tmp_path / "base").table
    held = hold(model, SoloGroup(), paths)
    layout, storages = held.learn(table), storages_of(held)
    assert {spec.name for spec in layout.tensors} == {spec.name for spec in table}
    gathered = {name for name, path in paths.items() if path != "shard"}
    assert len(gathered) == 4 and all(name.endswith(("q_proj.weight", "o_proj.weight")) for name in gathered)
    merged = dict(adapted_model(tmp_path / "base").merge_and_unload().named_parameters())
    for name in gathered:
        (item,) = layout.by_tensor[name]
        assert torch.equal(storages[item.storage], merged[name].detach().view(-1))


def test_the_adapter_alone_goes_out_under_pefts_names(tmp_path: Path) -> None:
    from peft import get_peft_model_state_dict

    moe().save_pretrained(tmp_path / "base")
    model = adapted_model(tmp_path / "base")
    config = load({"uri": (tmp_path / "run").as_uri(), "view": "adapter", "adapter.base": str(tmp_path / "base")})
    host = OpenRlhfHost(config, SoloGroup(), model, (), 0, lora="adapter")
    host.attach()
    assert (host.version, host.publisher.step) == (0, 0), "a run of adapters has no checkpoint that would be version 0"
    host.broadcast()
    assert (host.version, host.publisher.step) == (1, 1)
    wanted = get_peft_model_state_dict(model)
    assert {spec.name for spec in host.publisher._ledger.views["adapter"].table} == set(wanted)
    assert host.metrics["weight_sync/elements"] == sum(tensor.numel() for tensor in wanted.values())
    host.close()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in gather_adapter(model, {}).items())


def test_what_peft_does_beyond_lora_is_refused(tmp_path: Path) -> None:
    moe().save_pretrained(tmp_path / "base")
    with pytest.raises(TensorError, match="DoRA"):
        hold(adapted_model(tmp_path / "base", dora=True), SoloGroup(), {})


def test_a_server_that_listens_everywhere_is_named_by_its_host() -> None:
    assert reachable("grpc://0.0.0.0:50071", "10.0.0.7") == "grpc://10.0.0.7:50071"
    assert reachable("grpc://[::]:50071", "fd00::7") == "grpc://[fd00::7]:50071"
    assert reachable("grpc://head:50071", "10.0.0.7") == "grpc://head:50071"
    assert reachable("file:///shared/run", "10.0.0.7") == "file:///shared/run"
