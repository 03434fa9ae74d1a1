"""Claims about the embedded transformers engine: exact bits in place, fences that answers survive, no stale cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from adapter_cases import SIZES
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import weight_sync
from weight_sync.adapters.engines.gate import Gate
from weight_sync.adapters.engines.memory import DeviceMemory, HostMemory
from weight_sync.adapters.engines.transformers import TransformersEngine
from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest
from weight_sync.cutting import cut_changes, cut_piece, positions_in
from weight_sync.errors import DeadlineError, EngineError, EngineInDoubtError, InputError, LayoutError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec
from weight_sync.testing import check_engine, engine_claims

transformers = pytest.importorskip("transformers")

MODELS: dict[str, Callable[[], Any]] = {
    "llama-tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=True, **SIZES)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(tie_word_embeddings=False, **SIZES)),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False, **SIZES
        )
    ),
}
COMPUTE = {"bf16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small random bf16 checkpoint of each model."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.manual_seed(0)
    for name, build in MODELS.items():
        build().to(torch.bfloat16).save_pretrained(folder / name)
    return {name: folder / name for name in MODELS}


def load(path: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def engine_of(path: Path, dtype: torch.dtype = torch.bfloat16) -> TransformersEngine:
    return TransformersEngine(load(path, dtype), path, engine_id="test")


def nudge(model: torch.nn.Module, seed: int) -> None:
    """An optimizer step of sorts: the weights stay bf16 numbers."""
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=dice) * (torch.rand(parameter.shape, generator=dice) < 0.2)
            parameter.copy_((parameter.float() + 0.05 * noise).bfloat16())


def answered(engine: Any, timeout: float) -> bool:
    try:
        return len(engine.generate([[1, 2]], max_new_tokens=1, timeout=timeout)) == 1
    except DeadlineError:
        return False


# --- the port -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", engine_claims())
@pytest.mark.parametrize(
    ("name", "compute"), [("llama-tied", "bf16"), ("llama-tied", "float32"), ("qwen3-moe", "bf16")]
)
def test_it_keeps_every_promise_of_the_port(checkpoints: dict[str, Path], name: str, compute: str, claim: str) -> None:
    check_engine(
        lambda: engine_of(checkpoints[name], COMPUTE[compute]), checkpoints[name], request=answered, only=[claim]
    )


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("name", MODELS)
def test_followed_weights_and_answers_are_those_of_a_fresh_load(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, compute: str
) -> None:
    base = checkpoints[name]
    trainer, engine = load(base), engine_of(base, COMPUTE[compute])
    with (
        weight_sync.Publisher.open(str(tmp_path / "store"), base=base) as publisher,
        weight_sync.Replica.open(str(tmp_path / "store"), engine=engine, replica_id="r") as replica,
    ):
        replica.sync()
        for step in (1, 2, 3):
            nudge(trainer, step)
            published = publisher.publish(trainer, step=step)
            assert published is not None and published.kind == "PATCH"
            version, digest = published.version, published.digest
            assert replica.sync(exact=version).digest == digest
        assert engine.audit().hex() == digest
    trainer.save_pretrained(tmp_path / "saved")
    fresh = load(tmp_path / "saved", COMPUTE[compute])
    for (key, held), wanted in zip(engine.model.state_dict().items(), fresh.state_dict().values(), strict=True):
        assert torch.equal(held, wanted), key
    prompts = [[1, 2, 3, 4], [5, 6]]
    other = TransformersEngine(fresh, tmp_path / "saved")
    other.announce(common_pb2.VersionId(run_id=publisher.run_id, number=version))
    assert engine.generate(prompts, max_new_tokens=6, temperature=0) == other.generate(
        prompts, max_new_tokens=6, temperature=0
    )


def test_an_engine_that_restarts_recognises_its_version(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    base, store = checkpoints["llama"], str(tmp_path / "store")
    trainer = load(base)
    with weight_sync.Publisher.open(store, base=base) as publisher:
        nudge(trainer, 1)
        version = publisher.publish(trainer, step=1).version  # type: ignore[union-attr]
        trainer.save_pretrained(tmp_path / "saved")
        with weight_sync.Replica.open(store, engine=engine_of(tmp_path / "saved"), replica_id="r") as replica:
            report = replica.sync()
    assert (report.version, report.previous, report.pause_s) == (version, None, 0.0)


# --- what cannot be served ------------------------------------------------------------------------------------------


def test_a_model_of_another_checkpoint_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(LayoutError, match="names"):
        TransformersEngine(load(checkpoints["llama"]), checkpoints["qwen3-moe"])


def test_a_dtype_that_cannot_hold_the_bits_is_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(LayoutError, match="dtype"):
        engine_of(checkpoints["llama"], torch.float16)


def test_float32_weights_that_are_no_bf16_are_rebuilt_and_not_recognised(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    base = checkpoints["llama-tied"]
    engine = engine_of(base, torch.float32)
    with torch.no_grad():
        next(engine.model.parameters()).view(torch.int32)[0, 0] ^= 1
    assert not engine.describe().HasField("digest")
    with pytest.raises(EngineInDoubtError, match="bf16"):
        engine.audit()
    with (
        weight_sync.Publisher.open(str(tmp_path / "store"), base=base),
        weight_sync.Replica.open(str(tmp_path / "store"), engine=engine, base=str(base), replica_id="r") as replica,
    ):
        assert replica.sync().changed
    assert engine.audit() == Checkpoint(base).digest()
    assert torch.equal(next(engine.model.parameters()), next(load(base, torch.float32).parameters()))


def test_nothing_is_answered_before_a_version_is_announced(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(EngineError, match="no version"):
        engine_of(checkpoints["llama"]).generate([[1]], max_new_tokens=1)


def test_bad_requests_are_refused(checkpoints: dict[str, Path]) -> None:
    engine = engine_of(checkpoints["llama"])
    bad: tuple[dict[str, Any], ...] = (
        {"prompts": []},
        {"prompts": [[]]},
        {"max_new_tokens": 0},
        {"samples": 0},
        {"temperature": -1.0},
    )
    for arguments in bad:
        with pytest.raises(InputError):
            engine.generate(**{"prompts": [[1]], "max_new_tokens": 1, **arguments})


def test_weights_that_move_between_stage_and_commit_are_noticed(checkpoints: dict[str, Path]) -> None:
    engine = engine_of(checkpoints["llama"])
    digest = Digest.from_proto(engine.describe().digest)
    engine.stage(update_of(engine, digest, []))
    parameter = next(engine.model.parameters())
    parameter.data = parameter.data.clone()
    engine.pause(PauseMode.WAIT, 10)
    with pytest.raises(EngineError, match="moved"):
        engine.commit()
    engine.stage(update_of(engine, digest, []))
    assert engine.commit() == digest


# --- tied tensors that the checkpoint lists twice -------------------------------------------------------------------


@pytest.fixture(scope="module")
def listed_twice(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model's checkpoint that holds the head under its own name, too."""
    path = tmp_path_factory.mktemp("listed-twice")
    load(checkpoints["llama-tied"]).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def update_of(engine: TransformersEngine, digest: Digest, changes: list[Changes]) -> Update:
    table = tuple(TensorSpec.from_proto(spec) for spec in engine.describe().tensors)
    target = common_pb2.VersionId(run_id="run", number=7)
    return Update(target, digest, table, changes, lambda: iter(()), (), False, manifest_pb2.VersionManifest())


def step(spec: TensorSpec, position: int, distance: int) -> Changes:
    box = Box.run(0, spec.elements)
    return Changes(spec, box, np.array([position], np.uint32), np.array([distance], spec.type.uint))


@pytest.mark.parametrize("compute", COMPUTE)
def test_a_tied_tensor_that_is_listed_twice_is_written_once(listed_twice: Path, compute: str) -> None:
    engine = engine_of(listed_twice, COMPUTE[compute])
    held = Digest.from_proto(engine.describe().digest)
    assert held == Checkpoint(listed_twice).digest()
    specs = {spec.name: TensorSpec.from_proto(spec) for spec in engine.describe().tensors}
    twins = [specs["lm_head.weight"], specs["model.embed_tokens.weight"]]
    engine.stage(update_of(engine, held, [step(spec, 5, 3) for spec in twins]))
    engine.pause(PauseMode.WAIT, 10)
    after = engine.commit()
    assert after == engine.audit() != held
    assert engine.rollback() == held


def test_a_commit_that_fails_half_way_leaves_the_old_bits_and_serves_on(listed_twice: Path) -> None:
    engine = engine_of(listed_twice)
    engine.announce(common_pb2.VersionId(run_id="run", number=0))
    held = Digest.from_proto(engine.describe().digest)
    answer = engine.generate([[1, 2, 3]], max_new_tokens=4, temperature=0)
    specs = {spec.name: TensorSpec.from_proto(spec) for spec in engine.describe().tensors}
    changes = [step(specs["lm_head.weight"], 5, 3), step(specs["model.embed_tokens.weight"], 5, 4)]
    engine.stage(update_of(engine, held, changes))
    engine.pause(PauseMode.WAIT, 10)
    with pytest.raises(EngineError, match="old bits are back") as caught:
        engine.commit()
    assert not isinstance(caught.value, EngineInDoubtError)
    engine.resume()
    assert engine.audit() == held
    assert engine.generate([[1, 2, 3]], max_new_tokens=4, temperature=0) == answer


# --- answers across a fence -----------------------------------------------------------------------------------------


class AtStep:
    """Holds the model's k-th forward pass until the gate is closed, so that a fence falls right behind it."""

    def __init__(self, engine: TransformersEngine, k: int) -> None:
        self.reached = threading.Event()
        self._left, self._gate = k, engine._decoder.gate
        self._hook = engine.model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._hook.remove()
            self.reached.set()
            deadline = time.monotonic() + 30
            while self._gate.is_open and time.monotonic() < deadline:
                threading.Event().wait(0.001)


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def fenced(checkpoint: Path, store: Path, pause: str, samples: int = 1) -> tuple[list[Any], Any, Any]:
    """Answers in flight while a version is committed; the model before and after."""
    trainer, engine = load(checkpoint), engine_of(checkpoint)
    before = load(checkpoint)
    with (
        weight_sync.Publisher.open(str(store), base=checkpoint) as publisher,
        weight_sync.Replica.open(str(store), engine=engine, replica_id="r", pause=pause) as replica,
    ):
        replica.sync()
        nudge(trainer, 1)
        publisher.publish(trainer, step=1)
        at = AtStep(engine, 3)
        thread, results = in_thread(
            lambda: engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=8, temperature=0, samples=samples, timeout=60)
        )
        assert at.reached.wait(30)
        replica.sync()
        thread.join(60)
    return results[0], before, trainer


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Without any cache, one token after the other."""
    tokens = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[-count:]


@pytest.mark.parametrize("samples", [1, 2])
def test_kept_requests_go_on_with_the_new_weights_and_no_stale_cache(
    checkpoints: dict[str, Path], tmp_path: Path, samples: int
) -> None:
    answers, before, after = fenced(checkpoints["llama"], tmp_path / "store", "keep", samples)
    for answer in answers:
        assert answer.spans == [(0, 0, 3), (1, 3, 8)] and answer.finish_reason == "length"
        assert answer.tokens[:3] == greedy(before, answer.prompt, 3)
        assert answer.tokens[3:] == greedy(after, answer.prompt + answer.tokens[:3], 5)


def test_a_waiting_fence_lets_requests_end_with_the_old_weights(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    answers, before, _ = fenced(checkpoints["llama"], tmp_path / "store", "wait")
    for answer in answers:
        assert answer.spans == [(0, 0, 8)] and answer.tokens == greedy(before, answer.prompt, 8)


def test_an_aborting_fence_ends_requests_with_what_they_have(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    answers, before, _ = fenced(checkpoints["llama"], tmp_path / "store", "abort")
    for answer in answers:
        assert (answer.spans, answer.finish_reason) == ([(0, 0, 3)], "abort")
        assert answer.tokens == greedy(before, answer.prompt, 3) and len(answer.logprobs) == 3


def test_a_fence_that_runs_into_its_limit_opens_admission_again() -> None:
    gate = Gate()
    with gate.request(1):
        with pytest.raises(DeadlineError, match="requests in flight"):
            gate.pause(PauseMode.WAIT, 0.01)
        assert gate.is_open
        with gate.step(1) as goes_on, pytest.raises(DeadlineError, match="steps in flight"):
            assert goes_on
            gate.pause(PauseMode.KEEP, 0.01)
        gate.pause(PauseMode.KEEP, 1)
        with pytest.raises(DeadlineError, match="fence"), gate.step(0.01):
            pass
        gate.resume()
        with gate.step(0.01) as goes_on:
            assert goes_on


def test_answers_end_at_stop_tokens_and_become_trajectories(checkpoints: dict[str, Path]) -> None:
    engine = engine_of(checkpoints["llama"])
    engine.announce(common_pb2.VersionId(run_id="run", number=0))
    free = engine.generate([[1, 2, 3]], max_new_tokens=8, samples=4, seed=3)
    again = engine.generate([[1, 2, 3]], max_new_tokens=8, samples=4, seed=3)
    assert free == again and len({tuple(answer.tokens) for answer in free}) > 1
    stop = free[0].tokens[2]
    ended = engine.generate([[1, 2, 3]], max_new_tokens=8, samples=4, seed=3, stop=[stop])[0]
    first = free[0].tokens.index(stop)
    assert ended.tokens == free[0].tokens[: first + 1] and ended.finish_reason == "stop"
    message = ended.to_trajectory("id", group="g", reward=0.0)
    assert message.HasField("reward") and list(message.output_token_ids) == ended.tokens
    assert [(s.number, s.begin, s.end) for s in message.spans] == [(0, 0, first + 1)]


def test_logprobs_are_those_of_the_model(checkpoints: dict[str, Path]) -> None:
    engine = engine_of(checkpoints["llama-tied"], torch.float32)
    engine.announce(common_pb2.VersionId(run_id="run", number=0))
    for answer in engine.generate([[7, 8, 9], [1]], max_new_tokens=5, samples=2, temperature=0.7, seed=1):
        ids = torch.tensor([answer.prompt + answer.tokens])
        with torch.inference_mode():
            logits = engine.model(input_ids=ids, use_cache=False).logits[0, len(answer.prompt) - 1 : -1].float() / 0.7
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(answer.logprobs), wanted, atol=1e-5)


# --- memories and routes --------------------------------------------------------------------------------------------


@st.composite
def nested_boxes(draw: st.DrawFn) -> Box:
    """Boxes of ascending coordinates."""
    sizes, strides, step = [], [], draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.integers(1, 4))
        sizes.append(size)
        strides.append(step)
        step *= size + draw(st.integers(0, 2))
    return Box(draw(st.integers(0, 5)), tuple(reversed(sizes)), tuple(reversed(strides)))


@given(nested_boxes())
@settings(deadline=None)
def test_positions_are_the_inverse_of_indices(box: Box) -> None:
    everywhere = np.arange(box.last + 5, dtype=np.int64)
    inside, positions = positions_in(box, everywhere)
    assert np.array_equal(everywhere[inside], np.sort(box.indices(np.arange(box.count))))
    assert np.array_equal(box.indices(positions), everywhere[inside])


@given(st.data(), st.sampled_from(["BF16", "F32", "U8", "I64"]))
@settings(max_examples=60, deadline=None)
def test_device_memory_does_what_host_memory_does(data: st.DataObject, dtype: str) -> None:
    place = data.draw(nested_boxes())
    spec = TensorSpec("t", dtype, (place.count,))
    coords = Box(0, place.sizes, _row_major(place.sizes))
    dice = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    start = dice.integers(0, 1 << 63, place.last + 3, np.uint64).astype(spec.type.uint)
    count = data.draw(st.integers(0, place.count))
    positions = np.sort(dice.choice(place.count, count, replace=False)).astype(np.uint32)
    values = dice.integers(0, 1 << 63, count, np.uint64).astype(spec.type.uint)
    relative = data.draw(st.booleans())
    changes = Changes(spec, coords, positions, values if relative else None, None if relative else values)
    seen = []
    signed = {1: "u1", 2: "i2", 4: "i4", 8: "i8"}[spec.type.width]
    for memory in (HostMemory(start.copy()), DeviceMemory(torch.from_numpy(start.copy().view(signed)))):
        ready = memory.scatter(changes, place)
        before = memory.digest(spec, coords, place, 1)
        old, gained = ready.apply()
        after = memory.digest(spec, coords, place, 1)
        assert before + gained == after
        written = memory.read(place)
        memory.write(place, written[::-1].copy())
        memory.write(place, written)
        ready.undo(old)
        assert np.array_equal(memory.read(place), start[place.indices(np.arange(place.count))])
        seen.append((before, after, old.tobytes(), written.tobytes()))
    assert seen[0] == seen[1]


def _row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(sizes[d + 1 :], dtype=np.int64)) for d in range(len(sizes)))


@given(nested_boxes(), st.data())
@settings(deadline=None)
def test_cut_parts_hold_what_the_whole_holds_there(outer: Box, data: st.DataObject) -> None:
    spec = TensorSpec("t", "U8", (outer.last + 1,))
    bits = np.arange(outer.count, dtype=np.uint8)
    lower = tuple(data.draw(st.integers(0, size - 1)) for size in outer.sizes)
    sizes = tuple(data.draw(st.integers(1, size - low)) for size, low in zip(outer.sizes, lower, strict=True))
    offset = outer.offset + sum(low * stride for low, stride in zip(lower, outer.strides, strict=True))
    inner = Box(offset, sizes, outer.strides)
    whole = np.full(spec.elements, 255, np.uint8)
    outer.view(whole)[...] = bits.reshape(outer.sizes)
    assert np.array_equal(cut_piece(DensePiece(spec, outer, bits), inner).bits, inner.view(whole).reshape(-1))
    positions = np.arange(0, outer.count, 2, dtype=np.uint32)
    part = cut_changes(Changes(spec, outer, positions, None, bits[positions]), inner)
    assert part.bits is not None and np.array_equal(part.bits, inner.view(whole).reshape(-1)[part.positions])
    assert len(part.positions) == np.isin(inner.view(whole), bits[positions]).sum()
