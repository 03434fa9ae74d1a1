"""Claims about several named views of one run: one number, own tables, digests and shards; readers pick theirs.

Owns no claim about quantised bits (test_quantize.py).
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import ask, run
from mirror_cases import assert_holds, history_of
from safetensors.torch import save_file

from weight_sync.errors import ConfigError, ForkRequiredError, StoreError, VersionMissingError
from weight_sync.history import History
from weight_sync.mirror import materialize
from weight_sync.publisher import Publisher
from weight_sync.replica import Replica
from weight_sync.testing import MemoryEngine

TWO = [{"name": "bf16", "scheme": "bf16"}, {"name": "fp16", "scheme": "fp16"}]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def masters(step: int) -> dict[str, torch.Tensor]:
    """fp32 masters and a table of integers; each step moves all of them."""
    dice = torch.Generator().manual_seed(7)
    weights = {f"layers.{k}.weight": torch.randn(48, 40, generator=dice) * 0.05 for k in range(3)}
    for _ in range(step):
        for tensor in weights.values():
            tensor += 1e-4 * torch.randn(tensor.shape, generator=dice)
    return {**weights, "table": torch.arange(6) + step}


def served(step: int, view: str) -> dict[str, torch.Tensor]:
    return {n: t.to(DTYPES[view]) if t.is_floating_point() else t for n, t in masters(step).items()}


def of_view(store: Path, view: str) -> History:
    return replace(history_of(store), view=view)


def published(store: Path, steps: int, **keys: Any) -> Publisher:
    publisher = Publisher.open(str(store), **{"views": TWO, **keys})
    for step in range(steps):
        publisher.publish(masters(step), step)
    return publisher


def test_two_views_share_a_number_and_each_is_exact(tmp_path: Path) -> None:
    publisher = published(tmp_path / "run", 1)
    engines = {view: MemoryEngine({}) for view in DTYPES}
    replicas = {view: Replica.open(str(tmp_path / "run"), engines[view], view=view) for view in DTYPES}
    for step in range(1, 4):
        report = publisher.publish(masters(step), step)
        assert report is not None and list(report.views) == ["bf16", "fp16"]
        assert report.changed == sum(part.changed for part in report.views.values()) > 0
        assert report.patch_bytes == sum(part.patch_bytes for part in report.views.values())
        assert report.views["bf16"].density < report.views["fp16"].density, "fp16 rounds more finely"
        for view, replica in replicas.items():
            synced = replica.sync()
            assert (synced.version, synced.digest) == (report.version, report.views[view].digest)
    assert publisher.recognise(masters(3)) == publisher.version
    for view in DTYPES:
        materialize(of_view(tmp_path / "run", view), report.version, tmp_path / view)
        assert_holds(tmp_path / view, served(3, view))
        replicas[view].close()
    publisher.close()


def test_a_reader_that_names_no_view_takes_the_only_one_or_is_told_the_names(tmp_path: Path) -> None:
    published(tmp_path / "two", 1).close()
    published(tmp_path / "one", 1, views=TWO[1:]).close()
    with (
        Replica.open(str(tmp_path / "two"), MemoryEngine({})) as replica,
        pytest.raises(VersionMissingError, match=r"(?s)several views.*bf16.*fp16"),
    ):
        replica.sync(timeout=0)
    with Replica.open(str(tmp_path / "one"), MemoryEngine({})) as replica:
        assert replica.sync().changed
    with (
        Replica.open(str(tmp_path / "two"), MemoryEngine({}), view="int4") as replica,
        pytest.raises(VersionMissingError, match=r"(?s)no such view.*bf16.*fp16"),
    ):
        replica.sync(timeout=0)


def test_a_failed_publish_moves_no_view_and_its_changes_come_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = published(tmp_path / "run", 2)
    head, put = publisher.version, publisher._end.put_shard
    calls: list[str] = []

    def fail_second(number: int, shard: Any) -> Any:
        calls.append(shard.label)
        if len(calls) == 2:  # the first view's shard is stored by then
            raise StoreError("the disk is gone")
        return put(number, shard)

    monkeypatch.setattr(publisher._end, "put_shard", fail_second)
    with pytest.raises(StoreError, match="the disk is gone"):
        publisher.publish(masters(2), 2)
    assert publisher.version == head
    monkeypatch.undo()
    report = publisher.publish(masters(3), 3)
    assert report is not None
    for view in DTYPES:
        materialize(of_view(tmp_path / "run", view), report.version, tmp_path / view)
        assert_holds(tmp_path / view, served(3, view))
    publisher.close()


def test_views_by_reference_each_have_their_own_base(tmp_path: Path) -> None:
    for view in DTYPES:
        (tmp_path / view).mkdir()
        save_file(served(0, view), tmp_path / view / "model.safetensors")
        (tmp_path / view / "config.json").write_text(f'{{"k": "{view}"}}')
    views = [{"name": view, "base": os.fspath(tmp_path / view)} for view in DTYPES]
    for ship in ("never", "always"):
        store = tmp_path / ship
        with Publisher.open(str(store), views=views, ship_base=ship) as publisher:
            publisher.publish(masters(1), 1)
        for view in DTYPES:
            for number in (0, 1):
                out = tmp_path / f"{ship}-{view}-{number}"
                materialize(of_view(store, view), number, out)
                assert_holds(out, served(number, view))
                assert (out / "config.json").read_text() == f'{{"k": "{view}"}}'


def test_a_run_keeps_its_views(tmp_path: Path) -> None:
    published(tmp_path / "run", 1).close()
    with pytest.raises(ForkRequiredError, match=r"(?s)further views.*fp16"):
        Publisher.open(str(tmp_path / "run"), views=TWO[:1])
    with pytest.raises(VersionMissingError, match="no such view"):
        Publisher.open(str(tmp_path / "run"), views=[*TWO, {"name": "fp32", "scheme": "fp32"}])
    with Publisher.open(str(tmp_path / "run"), views=TWO) as again:  # the refused ones have fenced nobody
        assert again.publish(masters(1), 1) is not None


def test_what_is_wrong_with_views_is_said_before_anything_is_opened(tmp_path: Path) -> None:
    def opened(**keys: Any) -> None:
        Publisher.open(str(tmp_path / "run"), **keys)

    with pytest.raises(ConfigError, match="two views of one name"):
        opened(views=[TWO[0], TWO[0]])
    with pytest.raises(ConfigError, match="some views have a base"):
        opened(views=[TWO[0], {"name": "other", "base": "x"}])
    with pytest.raises(ConfigError, match=r"(?s)keys of one view beside views.*scheme"):
        opened(views=TWO, scheme="bf16")
    with pytest.raises(ConfigError, match=r"(?s)no quantiser.*nothing-known.*fp8"):
        opened(views=[{"name": "a", "scheme": "nothing-known"}])
    with pytest.raises(ConfigError, match="a quantised view needs its base"):
        opened(scheme="fp8")
    assert not (tmp_path / "run").exists()


def test_the_command_line_handles_several_views(tmp_path: Path) -> None:
    store = tmp_path / "run"
    published(store, 4, anchor_every=3).close()
    rows = ask("log", store)["versions"]
    assert all(sorted(row["views"]) == ["bf16", "fp16"] for row in rows)
    one = ask("log", store, "--view", "fp16")["versions"]
    assert [list(row["views"]) for row in one] == [["fp16"]] * 4 and one[1]["changed"] < rows[1]["changed"]
    found = ask("verify", store, "--deep")
    assert found["ok"] and {view: len(numbers) for view, numbers in found["replayed"].items()} == {"bf16": 4, "fp16": 4}
    assert [view["name"] for view in ask("inspect", store)["views"]] == ["bf16", "fp16"]
    assert ask("fold", store, "0", "3", "--view", "bf16")["view"] == "bf16"
    assert "bf16" in run("fold", store, "0", "3", code=4).stderr
    assert ask("diff", f"{store}@0", f"{store}@3", "--view", "fp16")["changed"] > 0
    out = tmp_path / "out"
    assert ask("materialize", store, "--out", out, "--view", "fp16")["view"] == "fp16"
    assert_holds(out, served(3, "fp16"))
    assert ask("gc", store, "--keep", "1", "--dry-run")["dry_run"]
    ask("gc", store, "--keep", "1")
    assert ask("verify", store, "--deep")["ok"]
