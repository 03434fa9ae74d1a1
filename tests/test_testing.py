"""Claims about the conformance suites: ours pass them, and each kind of broken implementation is caught by name."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from weight_sync.codec.digest import Digest
from weight_sync.config import Config
from weight_sync.errors import EngineError
from weight_sync.ports import Fate, PauseMode, Transport, Update
from weight_sync.proto.v1 import manifest_pb2
from weight_sync.testing import MemoryEngine, check_engine, check_transport, engine_claims, transport_claims
from weight_sync.transport.file import FilePublisherEnd, FileTransport

_counter = itertools.count()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every dtype that torch knows, odd names and odd shapes."""
    folder = tmp_path_factory.mktemp("checkpoint")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed.weight": torch.randn(33, 16, generator=generator).bfloat16(),
        "../odd/☃ name": torch.randn(7, 3, 5, generator=generator).half(),
        "f32": torch.randn(9, 2, generator=generator),
        "f64": torch.randn(6, generator=generator).double(),
        "i64": torch.arange(-5, 5),
        "i8": torch.arange(-8, 8, dtype=torch.int8),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "fp8": torch.randn(16, 4, generator=generator).to(torch.float8_e4m3fn),
        "special": torch.tensor([float("nan"), float("inf"), -0.0, 0.0], dtype=torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- engines ---


def asked(engine: MemoryEngine, timeout: float) -> bool:
    try:
        engine.serve()
    except EngineError:
        return False
    return True


@pytest.mark.parametrize("claim", engine_claims())
def test_the_reference_engine_keeps_every_promise(claim: str, checkpoint: Path) -> None:
    done = check_engine(
        lambda: MemoryEngine(checkpoint),
        checkpoint,
        changes_tensors=True,
        request=asked,
        only=[claim],  # type: ignore[arg-type]
    )
    assert done == [claim]


@pytest.mark.parametrize("claim", engine_claims())
def test_the_reference_engine_with_fixed_tensors_does_too(claim: str, checkpoint: Path) -> None:
    check_engine(lambda: MemoryEngine(checkpoint, changes_tensors=False), checkpoint, only=[claim])


def test_an_engine_that_holds_nothing_yet_is_filled(checkpoint: Path) -> None:
    check_engine(lambda: MemoryEngine({}), checkpoint, changes_tensors=True, only=["patches_give_exact_bits"])


class _Forgets(MemoryEngine):
    def rollback(self) -> Digest:
        assert self._digest is not None
        return self._digest


class _WritesEarly(MemoryEngine):
    def stage(self, update: Update) -> None:
        super().stage(update)
        if not update.full:
            self.commit()
            super().stage(update)


class _Believes(MemoryEngine):
    def stage(self, update: Update) -> None:
        super().stage(update)
        self._told = update.digest

    def commit(self) -> Digest:
        super().commit()
        return self._told


class _SkipsDense(MemoryEngine):
    def stage(self, update: Update) -> None:
        super().stage(update)
        if not update.full and self._staged is not None:
            self._staged = update, []


class _NeverPauses(MemoryEngine):
    def pause(self, mode: PauseMode, timeout: float) -> None:
        return None


class _StaysPaused(MemoryEngine):
    def resume(self) -> None:
        return None


class _KeepsCaches(MemoryEngine):
    def clear_caches(self) -> None:
        self.caches_of = Digest(1, 2)


class _RollsBackOnce(MemoryEngine):
    def rollback(self) -> Digest:
        held = super().rollback()
        self._undo = None
        return held


class _CommitsNothing(MemoryEngine):
    def commit(self) -> Digest:
        return self._recomputed() if self._staged is None else super().commit()


@pytest.mark.parametrize(
    ("engine", "claim"),
    [
        (_Forgets, "rollback_is_exact"),
        (_WritesEarly, "stage_changes_nothing_that_is_served"),
        (_Believes, "a_patch_for_another_base_is_noticed_and_undone"),
        (_SkipsDense, "a_tensor_may_travel_whole"),
        (_NeverPauses, "a_fence_closes_and_opens_admission"),
        (_StaysPaused, "a_fence_closes_and_opens_admission"),
        (_KeepsCaches, "a_fence_closes_and_opens_admission"),
        (_RollsBackOnce, "rollback_may_be_repeated"),
        (_CommitsNothing, "commit_without_stage_is_refused"),
    ],
)
def test_a_broken_engine_is_caught_by_the_claim_it_breaks(
    engine: type[MemoryEngine], claim: str, checkpoint: Path
) -> None:
    with pytest.raises(AssertionError, match=f"^{claim}: "):
        check_engine(lambda: engine(checkpoint), checkpoint, changes_tensors=True, request=asked, only=[claim])  # type: ignore[arg-type]


def test_an_engine_that_cannot_change_its_tensors_must_refuse(checkpoint: Path) -> None:
    claim = "other_tensors_are_taken_or_refused"
    with pytest.raises(AssertionError, match=f"^{claim}: stage took"):
        check_engine(lambda: MemoryEngine(checkpoint), checkpoint, changes_tensors=False, only=[claim])


# --- transports ---


def made(kind: Callable[[Config], Transport] = FileTransport, **keys: object) -> Callable[[], Transport]:
    def make() -> Transport:
        uri = f"memory://conformance-{next(_counter)}"
        return kind(Config(**{"uri": uri, "poll_s": 0.01, "keep_versions": 2, "timeout_s": 30, **keys}))  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("claim", transport_claims())
def test_the_store_transport_keeps_every_promise_in_memory(claim: str) -> None:
    assert check_transport(made(), only=[claim]) == [claim]


@pytest.mark.parametrize("claim", transport_claims())
def test_the_store_transport_keeps_every_promise_in_a_folder(claim: str, tmp_path: Path) -> None:
    assert check_transport(made(uri=str(tmp_path / "store")), only=[claim]) == [claim]


@pytest.mark.parametrize("claim", transport_claims())
def test_the_store_transport_keeps_every_promise_on_s3(claim: str, s3_uri: tuple[str, dict[str, str]]) -> None:
    assert check_transport(made(uri=s3_uri[0], store_options=s3_uri[1]), only=[claim]) == [claim]


class _Overwrites(FilePublisherEnd):
    def commit(self, manifest: manifest_pb2.VersionManifest) -> None:
        self._store.put(f"{manifest.run_id}/log/{manifest.number:020d}.pb", manifest.SerializeToString())


class _Reopens(FilePublisherEnd):
    def abort(self, number: int, reason: str) -> Fate:
        return Fate.ABORTED


def with_end(kind: type[FilePublisherEnd]) -> Callable[[], Transport]:
    class Broken(FileTransport):
        def publisher_end(self, rank: int, world_size: int) -> FilePublisherEnd:
            return kind(self._store, self._config, rank, world_size)

    return made(Broken)


@pytest.mark.parametrize(
    ("end", "claim"),
    [
        (_Overwrites, "a_number_is_written_once"),
        (_Overwrites, "of_two_publishers_of_a_new_run_one_wins"),
        (_Overwrites, "opening_a_run_fences_its_older_publisher"),
        (_Reopens, "an_aborted_number_stays_closed"),
    ],
)
def test_a_broken_transport_is_caught_by_the_claim_it_breaks(end: type[FilePublisherEnd], claim: str) -> None:
    with pytest.raises(AssertionError, match=f"^{claim}: "):
        check_transport(with_end(end), only=[claim])


def test_a_transport_without_history_says_so_and_is_excused() -> None:
    class Forgetful(FilePublisherEnd):
        keeps_history = False

    done = check_transport(with_end(Forgetful))
    assert set(transport_claims()) - set(done) == {
        "older_versions_stay_readable", "a_lease_keeps_a_version_and_what_it_needs", "a_fork_is_a_run_of_its_own",
    }  # fmt: skip
