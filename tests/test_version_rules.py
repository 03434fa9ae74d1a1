"""Claims about the rules of the log: they hold for every log that a sequence of honest publishers can write."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.proto.v1 import common_pb2, manifest_pb2
from weight_sync.version import (
    ABORTED,
    ANCHOR,
    EPOCH,
    EXPIRED,
    PATCH,
    Entry,
    NoPath,
    Path,
    is_version,
    kept,
    kind_name,
    may_follow,
    plan,
)


def honest_log(choices: list[tuple[int, int, int]]) -> list[Entry]:
    """A log as honest publishers write it: restarts, aborted numbers, anchors with and without stored bits."""
    entries: list[Entry] = []
    epoch, head = 0, None
    for number, (pick, size, flags) in enumerate(choices):
        kinds = [ANCHOR, ABORTED] if head is None else [PATCH, ANCHOR, PATCH, EPOCH, PATCH, ABORTED]
        kind = kinds[pick % len(kinds)]
        if kind == EPOCH:
            epoch = number
        parent = head if kind == PATCH or (kind == ANCHOR and flags & 1) else None
        anchor_bytes = 10 * size if kind == ANCHOR and flags & 2 else None
        patch_bytes = 1 + size if parent is not None else 0
        entries.append(Entry(number, epoch, kind, parent, anchor_bytes, patch_bytes, (f"data/{number}",)))
        if is_version(kind):
            head = number
    return entries


def logs() -> st.SearchStrategy[list[Entry]]:
    step = st.tuples(st.integers(0, 5), st.integers(0, 99), st.integers(0, 3))
    return st.lists(step, min_size=1, max_size=30).map(honest_log)


def versions(log: list[Entry]) -> list[int]:
    return [entry.number for entry in log if is_version(entry.kind)]


def heads(log: list[Entry]) -> list[int | None]:
    """For each number, the newest version before it."""
    found: list[int | None] = [None]
    for entry in log:
        found.append(entry.number if is_version(entry.kind) or entry.kind == EXPIRED else found[-1])
    return found


@given(logs())
def test_every_honest_log_is_accepted(log: list[Entry]) -> None:
    for number, entry in enumerate(log):
        assert may_follow(log[number - 1] if number else None, heads(log)[number], entry) is None


@given(logs(), st.data())
def test_collected_versions_keep_the_log_valid(log: list[Entry], data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.sampled_from(versions(log)))) if versions(log) else set()
    log = [replace(e, kind=EXPIRED, objects=()) if e.number in gone else e for e in log]
    for number, entry in enumerate(log):
        assert may_follow(log[number - 1] if number else None, heads(log)[number], entry) is None


@given(logs(), st.data())
def test_an_older_epoch_never_follows_a_newer_one(log: list[Entry], data: st.DataObject) -> None:
    last = log[-1]
    older = data.draw(st.integers(0, last.number + 3).filter(lambda epoch: epoch != last.epoch))
    zombie = Entry(last.number + 1, older, PATCH, heads(log)[-1])
    reason = may_follow(last, heads(log)[-1], zombie)
    assert reason is not None
    assert str(older) in reason


@pytest.mark.parametrize(
    ("previous", "head", "new", "word"),
    [
        (None, None, Entry(1, 0, ANCHOR), "not the first"),
        (None, None, Entry(0, 0, PATCH), "starts with an ANCHOR"),
        (None, None, Entry(0, 0, EPOCH), "starts with an ANCHOR"),
        (None, None, Entry(0, 3, ANCHOR), "epoch 3"),
        (None, None, Entry(0, 0, ANCHOR, parent=0), "parent 0"),
        (Entry(0, 0, ANCHOR), 0, Entry(2, 0, PATCH, 0), "no holes"),
        (Entry(0, 0, ANCHOR), 0, Entry(0, 0, PATCH, 0), "no holes"),
        (Entry(0, 0, ANCHOR), 0, Entry(1, 0, EPOCH), "not its own number"),
        (Entry(0, 0, ANCHOR), 0, Entry(1, 0, PATCH), "no parent"),
        (Entry(2, 2, EPOCH), 1, Entry(3, 2, PATCH, 0), "newest version before it is 1"),
        (Entry(0, 0, ABORTED), None, Entry(1, 0, PATCH, 0), "newest version before it is None"),
        (Entry(0, 0, ANCHOR), 0, Entry(1, 0, 0), "unknown kind"),
        (Entry(0, 0, ANCHOR), 0, Entry(1, 0, 77), "unknown kind"),
    ],
)
def test_what_may_not_follow_is_refused_with_the_reason(
    previous: Entry | None, head: int | None, new: Entry, word: str
) -> None:
    reason = may_follow(previous, head, new)
    assert reason is not None
    assert word in reason


# --- reading ---


def replay(log: list[Entry], have: int | None, path: Path) -> int | None:
    """The version reached by following ``path``; asserts that each step is possible."""
    at = have
    if path.anchor is not None:
        assert log[path.anchor].kind == ANCHOR
        at = path.anchor
    for number in path.patches:
        assert is_version(log[number].kind)
        assert log[number].parent == at
        at = number
    return at


@given(logs(), st.data())
def test_a_path_leads_from_what_is_held_to_the_target(log: list[Entry], data: st.DataObject) -> None:
    numbers = versions(log)
    if not numbers:
        return
    target = data.draw(st.sampled_from(numbers))
    have = data.draw(st.none() | st.sampled_from(numbers))
    found = plan(dict(enumerate(log)).get, have, target)
    assert isinstance(found, Path)  # every honest log begins with an anchor
    assert replay(log, have, found) == target
    stored = 0 if found.anchor is None else log[found.anchor].anchor_bytes or 0
    assert found.size == stored + sum(log[n].patch_bytes for n in found.patches)


@given(logs(), st.data())
def test_patches_are_taken_unless_a_stored_anchor_is_smaller(log: list[Entry], data: st.DataObject) -> None:
    numbers = versions(log)
    if not numbers:
        return
    target, have = data.draw(st.sampled_from(numbers)), data.draw(st.sampled_from(numbers))
    chain, at = [], target
    while at != have and at > have and log[at].parent is not None:
        chain.append(at)
        at = log[at].parent  # type: ignore[assignment]
    found = plan(dict(enumerate(log)).get, have, target)
    assert isinstance(found, Path)
    if at == have:
        direct = sum(log[n].patch_bytes for n in chain)
        assert found.size <= direct
        if found.anchor is not None:
            assert log[found.anchor].anchor_bytes is not None
            assert found.size < direct


@given(logs(), st.data())
def test_a_reader_without_the_base_is_only_sent_to_stored_anchors(log: list[Entry], data: st.DataObject) -> None:
    numbers = versions(log)
    if not numbers:
        return
    target = data.draw(st.sampled_from(numbers))
    found = plan(dict(enumerate(log)).get, None, target, by_reference=False)
    if isinstance(found, Path):
        assert found.anchor is not None
        assert log[found.anchor].anchor_bytes is not None
        assert replay(log, None, found) == target
    else:
        assert not found.expired


def test_version_zero_held_is_not_nothing_held() -> None:
    log = {0: Entry(0, 0, ANCHOR, None, 1000), 1: Entry(1, 0, PATCH, 0, None, 5)}
    assert plan(log.get, 0, 1) == Path(None, (1,), 5, "1 patch from version 0")
    nothing = plan(log.get, None, 1)
    assert isinstance(nothing, Path)
    assert (nothing.anchor, nothing.patches, nothing.size) == (0, (1,), 1005)


def test_the_version_held_needs_nothing() -> None:
    found = plan({}.get, 7, 7)
    assert isinstance(found, Path)
    assert (found.anchor, found.patches) == (None, ())


def test_going_back_takes_an_anchor() -> None:
    log = {0: Entry(0, 0, ANCHOR), 1: Entry(1, 0, PATCH, 0), 2: Entry(2, 0, PATCH, 1)}
    found = plan(log.get, 2, 1)
    assert isinstance(found, Path)
    assert (found.anchor, found.patches) == (0, (1,))


@pytest.mark.parametrize(
    ("log", "have", "target", "number", "expired", "word"),
    [
        ({}, None, 3, 3, False, "not been published"),
        ({3: Entry(3, 0, ABORTED)}, None, 3, 3, False, "ABORTED, not a version"),
        ({3: Entry(3, 3, EPOCH)}, None, 3, 3, False, "EPOCH, not a version"),
        ({3: Entry(3, 0, EXPIRED, 2)}, 2, 3, 3, True, "collected"),
        ({3: Entry(3, 0, PATCH, 2), 2: Entry(2, 0, EXPIRED, 1)}, 1, 3, 2, True, "collected"),
        ({3: Entry(3, 0, PATCH, 2)}, 1, 3, 2, False, "not been published"),
        ({3: Entry(3, 0, PATCH, None)}, 1, 3, 3, False, "neither"),
        ({3: Entry(3, 0, PATCH, 3)}, 1, 3, 3, False, "does not precede"),
        ({3: Entry(3, 0, PATCH, 9)}, 1, 3, 3, False, "does not precede"),
    ],
)
def test_no_path_says_which_entry_stands_in_the_way(
    log: dict[int, Entry], have: int | None, target: int, number: int, expired: bool, word: str
) -> None:
    found = plan(log.get, have, target)
    assert isinstance(found, NoPath)
    assert (found.number, found.expired) == (number, expired)
    assert word in found.reason


def test_one_patch_ahead_looks_up_one_entry() -> None:
    asked: list[int] = []

    def lookup(number: int) -> Entry:
        asked.append(number)
        return Entry(number, 0, PATCH, number - 1, None, 1)

    assert isinstance(plan(lookup, 99, 100), Path)
    assert asked == [100]


# --- retention ---


@given(logs(), st.integers(1, 10), st.sets(st.integers(0, 40)))
def test_what_is_kept_can_be_rebuilt_from_what_is_kept(log: list[Entry], keep: int, leased: set[int]) -> None:
    reasons = kept(log, keep, leased)
    numbers = versions(log)
    assert set(reasons) <= set(numbers)
    assert set(numbers[-keep:]) <= set(reasons)
    assert leased & set(numbers) <= set(reasons)
    after = {e.number: e if e.number in reasons else replace(e, kind=EXPIRED) for e in log}
    for number in reasons:
        found = plan(after.get, None, number)
        assert isinstance(found, Path)
        assert replay([after[n] for n in sorted(after)], None, found) == number


@given(logs(), st.integers(1, 10), st.sets(st.integers(0, 40)))
def test_nothing_is_kept_without_need(log: list[Entry], keep: int, leased: set[int]) -> None:
    needed: set[int] = set()
    numbers = versions(log)
    for wanted in (set(numbers[-keep:]) | leased) & set(numbers):
        found = plan(dict(enumerate(log)).get, None, wanted)
        assert isinstance(found, Path)
        assert found.anchor is not None
        needed |= {found.anchor, *found.patches}
    assert set(kept(log, keep, leased)) == needed


@given(logs(), st.integers(1, 10), st.sets(st.integers(0, 40)))
def test_a_second_collection_finds_nothing_to_do(log: list[Entry], keep: int, leased: set[int]) -> None:
    first = kept(log, keep, leased)
    after = [replace(e, kind=EXPIRED) if is_version(e.kind) and e.number not in first else e for e in log]
    assert kept(after, keep, leased) == first


def test_a_leased_version_below_the_line_keeps_its_chain_and_no_more() -> None:
    anchors = {0, 5, 10}
    log = [Entry(n, 0, ANCHOR if n in anchors else PATCH, n - 1 if n else None) for n in range(15)]
    assert sorted(kept(log, 2, {7})) == [5, 6, 7, 10, 11, 12, 13, 14]
    assert kept(log, 2, {7})[6] == "needed by version 7"
    assert kept(log, 2, {7})[14] == "the head"


# --- summaries ---


def test_a_summary_counts_the_full_state_apart_from_the_smallest_form_of_the_patch() -> None:
    manifest = manifest_pb2.VersionManifest(number=4, epoch=2, kind=ANCHOR, parent=3)
    for name, scale in (("bf16", 1), ("fp8", 10)):
        view = manifest.views.add(name=name)
        for form, size in (
            (common_pb2.FORM_RAW, 100),
            (common_pb2.FORM_RAW, 50),
            (common_pb2.FORM_STEP, 7),
            (common_pb2.FORM_COMPACT, 5),
        ):
            view.shards.add(object=f"{name}-{form}", form=form, size=size * scale)
    one = Entry.of(manifest, "fp8")
    assert (one.number, one.epoch, one.kind, one.parent) == (4, 2, ANCHOR, 3)
    assert (one.anchor_bytes, one.patch_bytes) == (1500, 50)
    assert Entry.of(manifest).anchor_bytes == 1650
    assert len(Entry.of(manifest).objects) == 8


def test_an_anchor_by_reference_has_no_stored_bytes_and_parent_zero_is_a_parent() -> None:
    assert Entry.of(manifest_pb2.VersionManifest(kind=ANCHOR)).anchor_bytes is None
    assert Entry.of(manifest_pb2.VersionManifest(kind=ANCHOR)).parent is None
    assert Entry.of(manifest_pb2.VersionManifest(number=1, kind=PATCH, parent=0)).parent == 0


def test_kinds_have_names_even_when_unknown() -> None:
    assert kind_name(ANCHOR) == "ANCHOR"
    assert kind_name(77) == "77"
