"""The conformance suite of ``weight_sync.ports.Engine``.

Owns the claims that every engine must keep, and the versions that they are tried with: bit patterns of all kinds at
first, last and random places of a checkpoint's tensors. Owns no engine and no store; digests tell what an engine holds,
since equal digests mean equal bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.checkpoint import Checkpoint
from weight_sync.codec.digest import Digest, state_digest
from weight_sync.codec.ordered import steps_between
from weight_sync.errors import EngineError, WeightSyncError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece, Engine, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.tensors import TensorSpec, sorted_table

__all__ = ["check_engine", "engine_claims"]

State = dict[str, tuple[TensorSpec, npt.NDArray[Any]]]
_TRIED = 64  # elements of a tensor that a version changes, at most


def check_engine(
    make_engine: Callable[[], Engine],
    checkpoint: str | os.PathLike[str],
    *,
    changes_tensors: bool = False,
    frozen: Collection[str] = (),
    request: Callable[[Engine, float], bool] | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
) -> list[str]:
    """Holds an engine to the promises of the port.

    Args:
        make_engine: a new engine that holds ``checkpoint``, or nothing yet; called once per claim.
        checkpoint: folder of safetensors files, small: the suite keeps several copies in memory.
        changes_tensors: whether the engine takes versions whose tensors appear, vanish or change shape; an engine that
            does not must refuse them in ``stage``.
        frozen: tensors that no version changes, such as one that is tied to another under its own name.
        request: sends one request and waits that many seconds at most for its admission; True when it was answered.
            Without it, only the calls of pause and resume are tried.
        only: claims to check, by name; all without it.
        seed: of the random places and bits.

    Returns the names of the claims that were checked. Raises AssertionError that begins with the claim's name.
    """
    names = list(only) or engine_claims()
    folder = Path(checkpoint)
    for name in names:
        world = _World(make_engine(), Checkpoint(folder), changes_tensors, frozenset(frozen), request, seed)
        try:
            _CLAIMS[name](world)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        except WeightSyncError as error:
            raise AssertionError(f"{name}: unexpected {type(error).__name__}: {error}") from error
        finally:
            world.engine.close()
    return names


def engine_claims() -> list[str]:
    """Names of all claims, in the order in which they are checked."""
    return list(_CLAIMS)


# --- versions to try ---------------------------------------------------------------------------------------------------


@dataclass
class _World:
    """An engine and what it should hold."""

    engine: Engine
    checkpoint: Checkpoint
    changes_tensors: bool
    frozen: frozenset[str]
    request: Callable[[Engine, float], bool] | None
    seed: int
    state: State = field(default_factory=dict)
    number: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.base: State = {s.name: (s, self.checkpoint.bits(s.name)) for s in self.checkpoint.table}

    def attach(self) -> None:
        """The engine holds the checkpoint, by a full version when it held nothing, and has told its digest."""
        description = self.engine.describe()
        if not description.HasField("digest") or Digest.from_proto(description.digest) != state_digest(
            self.base.values()
        ):
            self.advance(self.update(self.base, full=True), self.base)
        self.state = self.base

    def update(
        self,
        new: State,
        changes: Sequence[Changes] = (),
        whole: Collection[str] = (),
        full: bool = False,
        digest: Digest | None = None,
    ) -> Update:
        """What takes the engine to ``new``."""
        self.number += 1
        table = sorted_table(spec for spec, _ in new.values())
        target = common_pb2.VersionId(run_id="conformance", number=self.number)
        manifest = manifest_pb2.VersionManifest(format=1, run_id=target.run_id, number=self.number)
        view = manifest.views.add(name="default", scheme="cast")
        for spec in table:
            view.tensors.add(spec=spec.to_proto(), digest=state_digest([new[spec.name]]).to_proto())
        total = state_digest(new.values()) if digest is None else digest
        view.digest.CopyFrom(total.to_proto())
        names = set(new) if full else set(whole)

        def dense() -> Iterator[DensePiece]:
            for spec in table:
                if spec.name in names and spec.elements:
                    yield DensePiece(spec, Box.run(0, spec.elements), new[spec.name][1])

        removed = tuple(sorted(self.state.keys() - new.keys()))
        return Update(target, total, table, list(changes), dense, removed, full, manifest)

    def changed(
        self, absolute: bool = False, boxes: Callable[[TensorSpec], list[Box]] | None = None
    ) -> tuple[State, list[Changes]]:
        """Another state, and the changes that lead there from the one held."""
        new: State = {}
        changes: list[Changes] = []
        for name, (spec, old) in self.state.items():
            if not spec.elements or name in self.frozen:
                new[name] = spec, old
                continue
            at = np.unique(np.concatenate([[0, spec.elements - 1], self.random.integers(0, spec.elements, _TRIED)]))
            mask = self.random.integers(1, 1 << min(63, 8 * spec.type.width), len(at), np.uint64).astype(spec.type.uint)
            bits = old.copy()
            bits[at] ^= np.ones_like(mask) if spec.dtype == "BOOL" else np.where(mask, mask, 1).astype(mask.dtype)
            new[name] = spec, bits
            for box in [Box.run(0, spec.elements)] if boxes is None else boxes(spec):
                changes += _changes_in(spec, box, at, old, bits, absolute)
        assert changes, "the checkpoint has no tensor that may change"
        return new, changes

    def advance(self, update: Update, new: State) -> None:
        """One version, as a replica would bring it."""
        self.engine.stage(update)
        self.engine.pause(PauseMode.WAIT, 60.0)
        self.holds(self.engine.commit(), new, "commit")
        self.engine.clear_caches()
        self.engine.announce(update.target)
        self.engine.resume()
        self.state = new

    def holds(self, digest: Digest, state: State, what: str) -> None:
        expected = state_digest(state.values())
        assert digest == expected, f"{what} tells digest {digest}, expected {expected}"


def _changes_in(
    spec: TensorSpec, box: Box, at: npt.NDArray[Any], old: npt.NDArray[Any], new: npt.NDArray[Any], absolute: bool
) -> list[Changes]:
    found = box.find(at)
    inside = np.flatnonzero(found >= 0)
    order = inside[np.argsort(found[inside])]
    positions, indices = found[order].astype(np.uint32), at[order]
    if not len(positions):
        return []
    if absolute:
        return [Changes(spec, box, positions, None, new[indices])]
    return [Changes(spec, box, positions, steps_between(old[indices], new[indices], spec.type))]


def _columns(spec: TensorSpec) -> list[Box]:
    """A tensor as two ranks of a column-parallel layer would publish it; as two runs when it has one dimension."""
    if len(spec.shape) < 2 or spec.type.bits < 8 or spec.shape[-1] < 2:
        half = spec.elements // 2
        return [Box.run(0, half), Box.run(half, spec.elements - half)] if half else [Box.run(0, spec.elements)]
    width = spec.shape[-1]
    rows, half = spec.elements // width, width // 2
    return [Box(0, (rows, half), (width, 1)), Box(half, (rows, width - half), (width, 1))]


# --- claims ------------------------------------------------------------------------------------------------------------


def _describe_tells_what_is_held(world: _World) -> None:
    description = world.engine.describe()
    told = description.changes_tensors == world.changes_tensors
    assert told or not description.tensors, f"describe says changes_tensors is {description.changes_tensors}"
    if description.HasField("digest"):
        world.holds(Digest.from_proto(description.digest), world.base, "describe")
        world.holds(world.engine.audit(), world.base, "audit")
    mine = [TensorSpec.from_proto(spec) for spec in description.tensors]
    if mine:
        theirs = [(s.name, s.dtype, s.shape) for s in world.checkpoint.table]
        assert [(s.name, s.dtype, s.shape) for s in mine] == theirs, (
            "describe lists other tensors than the checkpoint, or unsorted"
        )


def _a_full_version_gives_its_exact_bits(world: _World) -> None:
    world.attach()
    new, _ = world.changed()
    world.advance(world.update(new, full=True), new)
    world.holds(world.engine.audit(), new, "audit")


def _changes_continue_the_dense_part_of_a_full_version(world: _World) -> None:
    world.attach()
    new, changes = world.changed()
    update = world.update(new, changes, full=True)
    old = world.update(world.state, full=True)
    update.dense = old.dense
    world.advance(update, new)
    world.holds(world.engine.audit(), new, "audit")


def _patches_give_exact_bits(world: _World) -> None:
    world.attach()
    for _ in range(3):
        new, changes = world.changed()
        world.advance(world.update(new, changes), new)
    world.holds(world.engine.audit(), world.state, "audit")
    world.holds(Digest.from_proto(world.engine.describe().digest), world.state, "describe")


def _absolute_changes_give_exact_bits(world: _World) -> None:
    if common_pb2.FORM_ABSOLUTE not in world.engine.describe().forms:
        return
    world.attach()
    new, changes = world.changed(absolute=True)
    world.advance(world.update(new, changes), new)
    world.holds(world.engine.audit(), new, "audit")


def _patches_of_several_ranks_give_exact_bits(world: _World) -> None:
    world.attach()
    for _ in range(2):
        new, changes = world.changed(boxes=_columns)
        world.advance(world.update(new, changes), new)
    world.holds(world.engine.audit(), world.state, "audit")


def _a_tensor_may_travel_whole(world: _World) -> None:
    world.attach()
    new, changes = world.changed()
    name = changes[0].spec.name
    world.advance(world.update(new, [item for item in changes if item.spec.name != name], [name]), new)
    world.holds(world.engine.audit(), new, "audit")


def _an_empty_patch_changes_nothing(world: _World) -> None:
    world.attach()
    world.advance(world.update(world.state), world.state)
    world.holds(world.engine.audit(), world.state, "audit")


def _stage_changes_nothing_that_is_served(world: _World) -> None:
    world.attach()
    dropped, changes = world.changed()
    world.engine.stage(world.update(dropped, changes))
    world.holds(world.engine.audit(), world.state, "audit after stage")
    new, changes = world.changed()
    world.advance(world.update(new, changes), new)  # a later stage replaces the earlier one
    world.holds(world.engine.audit(), new, "audit")


def _rollback_is_exact(world: _World) -> None:
    world.attach()
    for full in (False, True):
        new, changes = world.changed()
        world.engine.stage(world.update(new, () if full else changes, full=full))
        world.engine.pause(PauseMode.WAIT, 60.0)
        world.holds(world.engine.commit(), new, "commit")
        world.holds(world.engine.rollback(), world.state, "rollback")
        world.holds(world.engine.audit(), world.state, "audit after rollback")
        world.engine.resume()
        world.advance(world.update(new, changes), new)  # the version before can still be left by a patch


def _rollback_may_be_repeated(world: _World) -> None:
    world.attach()
    new, changes = world.changed()
    world.engine.stage(world.update(new, changes))
    world.engine.pause(PauseMode.WAIT, 60.0)
    world.engine.commit()
    for _ in range(2):  # a coordinator whose answer was lost asks again
        world.holds(world.engine.rollback(), world.state, "rollback")
    world.engine.resume()
    world.holds(world.engine.audit(), world.state, "audit")


def _a_patch_for_another_base_is_noticed_and_undone(world: _World) -> None:
    world.attach()
    held = world.state
    world.state, _ = world.changed()  # the base that the patch is made from, which the engine does not hold
    new, changes = world.changed()
    update = world.update(new, changes)
    world.engine.stage(update)
    world.engine.pause(PauseMode.WAIT, 60.0)
    try:
        digest = world.engine.commit()
    except EngineError:
        digest = None  # noticed even earlier; then it is undone already
    if digest is not None:
        assert digest != update.digest, "commit tells the version's digest although the bits are not the version's"
        world.holds(world.engine.rollback(), held, "rollback")
    world.holds(world.engine.audit(), held, "audit")
    world.engine.resume()


def _other_tensors_are_taken_or_refused(world: _World) -> None:
    world.attach()
    new, changes = world.changed()
    gone = changes[0].spec
    added = TensorSpec("weight_sync.conformance/../added \u2603", gone.dtype, gone.shape, gone.code_bits)
    empty = TensorSpec("weight_sync.conformance.empty", gone.dtype, (0, *gone.shape[1:]), gone.code_bits)
    del new[gone.name]
    new |= {added.name: (added, world.state[gone.name][1]), empty.name: (empty, np.empty(0, empty.type.uint))}
    update = world.update(new, [item for item in changes if item.spec != gone], [added.name, empty.name])
    if not world.changes_tensors:
        try:
            world.engine.stage(update)
        except EngineError:
            world.holds(world.engine.audit(), world.state, "audit after a refusal")
            return
        raise AssertionError("stage took a version with other tensors")
    world.engine.stage(update)
    world.engine.pause(PauseMode.WAIT, 60.0)
    world.holds(world.engine.commit(), new, "commit")
    world.holds(world.engine.rollback(), world.state, "rollback")
    world.engine.resume()
    world.advance(update, new)
    world.holds(world.engine.audit(), new, "audit")
    again, changes = world.changed()
    world.advance(world.update(again, changes), again)


def _commit_without_stage_is_refused(world: _World) -> None:
    world.attach()
    world.engine.pause(PauseMode.WAIT, 60.0)
    try:
        world.engine.commit()
    except EngineError:
        world.engine.resume()
        world.holds(world.engine.audit(), world.state, "audit")
        return
    raise AssertionError("commit went on although nothing was staged")


def _a_fence_closes_and_opens_admission(world: _World) -> None:
    world.attach()
    for mode in PauseMode:
        world.engine.pause(mode, 60.0)
        if world.request is not None:
            assert not world.request(world.engine, 0.1), f"a request was answered inside a fence ({mode.value})"
        world.engine.pause(mode, 60.0)  # a rebuild pauses an engine that is paused already
        world.engine.clear_caches()
        world.engine.announce(common_pb2.VersionId(run_id="conformance", number=world.number))
        world.engine.resume()
        if world.request is not None:
            assert world.request(world.engine, 60.0), f"no request was answered after a fence ({mode.value})"
    world.holds(world.engine.audit(), world.state, "audit")


_CLAIMS: dict[str, Callable[[_World], None]] = {
    claim.__name__.strip("_"): claim
    for claim in (
        _describe_tells_what_is_held,
        _a_full_version_gives_its_exact_bits,
        _changes_continue_the_dense_part_of_a_full_version,
        _patches_give_exact_bits,
        _absolute_changes_give_exact_bits,
        _patches_of_several_ranks_give_exact_bits,
        _a_tensor_may_travel_whole,
        _an_empty_patch_changes_nothing,
        _stage_changes_nothing_that_is_served,
        _rollback_is_exact,
        _rollback_may_be_repeated,
        _a_patch_for_another_base_is_noticed_and_undone,
        _other_tensors_are_taken_or_refused,
        _commit_without_stage_is_refused,
        _a_fence_closes_and_opens_admission,
    )
}
