"""Claims about the profile unified: trainer and engine compute the same bits, whatever shares a call with a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines import unified as room
from weight_sync.adapters.engines.transformers import TransformersEngine
from weight_sync.adapters.engines.unified import KEYS, ROWS, Unified
from weight_sync.contract import compare, decide, terms_of
from weight_sync.contract.terms import Action
from weight_sync.errors import ContractError, EngineError, InputError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 10, "intermediate_size": 70, "max_position_embeddings": 512, "initializer_range": 0.25,
}  # fmt: skip
MODELS: dict[str, Any] = {
    "dense": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(tie_word_embeddings=False, **SIZES)),
    "tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **SIZES)),
    "moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
            tie_word_embeddings=False, **SIZES,
        )
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("unified")
    torch.manual_seed(0)
    for name, build in MODELS.items():
        build().to(torch.bfloat16).save_pretrained(folder / name)
    return {name: folder / name for name in MODELS}


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def sequences(*lengths: int) -> list[list[int]]:
    dice = torch.Generator().manual_seed(5)
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=dice).tolist() for n in lengths]


@pytest.mark.parametrize(
    ("name", "dtype"), [("dense", torch.bfloat16), ("moe", torch.bfloat16), ("tied", torch.float32)]
)
def test_a_trainers_logprobs_are_the_engines_for_prefill_decode_any_batch_and_any_thread_count(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    trainer = Unified(load(checkpoints[name], dtype))
    engine = TransformersEngine(load(checkpoints[name], dtype), checkpoints[name], profile="unified")
    prompts = sequences(3, KEYS - 5)
    with (
        Publisher.open(str(tmp_path / "store"), base=checkpoints[name], execution=trainer.contract(),
                       contract={"profile": "unified", "enforce": "strict", "require": {"served_format": "bf16"}}),
        Replica.open(str(tmp_path / "store"), engine, replica_id="e") as replica,
    ):  # fmt: skip
        replica.sync()
        answers = []
        for count, (batch, samples) in ((1, (prompts, 2)), (2, (prompts[:1], 1)), (2, (prompts[::-1], 1))):
            with threads(count):
                answers += engine.generate(batch, max_new_tokens=ROWS + 1, samples=samples, seed=count)
    whole = [[*a.prompt, *a.tokens] for a in answers]
    for count in (1, 2):
        with threads(count):
            together, alone = trainer.logprobs(whole), [trainer.logprobs([one])[0] for one in whole]
        for answer, row, single in zip(answers, together, alone, strict=True):
            assert row.requires_grad and torch.equal(row, single)
            assert row[-len(answer.tokens) :].tolist() == answer.logprobs, "decode and full forward, bit for bit"
    with threads(2):
        assert all(torch.equal(a, b) for a, b in zip(engine.score(whole), together, strict=True)), "prefill"


@pytest.mark.parametrize("name", MODELS)
def test_it_computes_what_the_model_computes(checkpoints: dict[str, Path], name: str) -> None:
    (tokens,) = sequences(KEYS + 20)
    plain = load(checkpoints[name], torch.float32).eval()
    if name == "moe":
        plain.config._experts_implementation = "eager"
    with torch.no_grad():
        expected = plain(torch.tensor([tokens])).logits[0]
        (found,) = Unified(load(checkpoints[name], torch.float32)).logits([tokens])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_step_of_training_through_it_is_a_step(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["moe"], torch.float32)
    plain = load(checkpoints["moe"], torch.float32)
    plain.config._experts_implementation = "eager"
    (tokens,) = sequences(20)
    (-Unified(model).logprobs([tokens])[0].mean()).backward()
    logits = plain(torch.tensor([tokens])).logits[0, :-1]
    (-torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None]).mean()).backward()
    for (name, mine), (_, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None, name
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-2, atol=1e-4)


def test_a_temperature_is_part_of_what_is_equal(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    engine = TransformersEngine(load(checkpoints["tied"]), checkpoints["tied"], profile="unified")
    with (
        Publisher.open(str(tmp_path / "s"), base=checkpoints["tied"]),
        Replica.open(str(tmp_path / "s"), engine) as replica,
    ):
        replica.sync()
        (answer,) = engine.generate(sequences(9), max_new_tokens=5, temperature=0.7, seed=1)
    (row,) = Unified(load(checkpoints["tied"])).logprobs([[*answer.prompt, *answer.tokens]], temperature=0.7)
    assert row[-5:].tolist() == answer.logprobs


def test_its_contract_is_the_trainers_and_a_native_engine_is_refused(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    path = checkpoints["dense"]
    trainer = TransformersEngine(load(path), path, profile="unified").contract()
    engine = TransformersEngine(load(path), path, profile="unified")
    native = TransformersEngine(load(path), path)
    terms = terms_of("unified", "strict", {}, trainer)
    assert not compare(trainer, engine.contract())
    assert decide(terms, engine.contract()).action is Action.ACCEPT
    verdict = decide(terms, native.contract())
    assert {"attention_backend", "batch_invariant", "reduction_order"} <= {d.field for d in verdict.differences}
    keys = {"contract": {"profile": "unified", "enforce": "strict"}}
    with (
        Publisher.open(str(tmp_path / "s"), base=path, execution=trainer, **keys),
        Replica.open(str(tmp_path / "s"), native) as replica,
        pytest.raises(ContractError, match="attention_backend is sdpa"),
    ):
        replica.sync()


def test_weights_that_change_in_place_are_computed_with(checkpoints: dict[str, Path]) -> None:
    model = load(checkpoints["dense"])
    unified, (tokens,) = Unified(model), sequences(20)
    before = unified.logprobs([tokens])[0]
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] += 1
    assert not torch.equal(unified.logprobs([tokens])[0], before)


def test_what_it_does_not_compute_is_refused(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoints["dense"])
    unified = Unified(model)
    with pytest.raises(InputError, match="unified"):
        model(torch.tensor([[1, 2]]))
    for bad in ([], [[]], [[1]]):
        with pytest.raises(InputError):
            unified.logprobs(bad)
    scaled = load(checkpoints["dense"])
    scaled.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(EngineError, match="depend on the length"):
        Unified(scaled)
    gemma = transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**{**SIZES, "num_attention_heads": 4}, sliding_window=8, pad_token_id=0)
    )
    with pytest.raises(EngineError, match=r"softcap|sliding_window"):
        Unified(gemma.eval()).logits([[1, 2, 3]])


def test_a_machine_whose_products_depend_on_company_is_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = torch.nn.functional.linear

    def fickle(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return plain(rows, weight, bias) + (rows.sum() if rows.shape[0] == ROWS else 0)

    monkeypatch.setattr(room.functional, "linear", fickle)
    with pytest.raises(EngineError, match="other company"):
        Unified(load(checkpoints["dense"]))
