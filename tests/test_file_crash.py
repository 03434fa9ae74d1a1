"""Claims about publishers that are killed or race, shown with real processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from file_store import (
    check_everything_readable,
    objects,
    opened,
    publish,
    reader,
    referenced,
    run_until_killed,
    start,
)

from weight_sync.config import Config
from weight_sync.transport.file.store import Store
from weight_sync.version import ABORTED


@pytest.fixture(params=["folder", "s3"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Config:
    if request.param == "s3":
        uri, options = request.getfixturevalue("s3_uri")
        return Config(uri=uri, store_options=options, poll_s=0.02, timeout_s=60)
    return Config(uri=str(tmp_path / "store"), poll_s=0.02, timeout_s=60)


def check_it_goes_on(config: Config, committed: int) -> None:
    """A publisher that opens the run again continues ``committed`` versions, and nothing of the dead one is left."""
    follower = reader(config)
    assert check_everything_readable(follower) == list(range(committed))
    end = opened(config)
    run = end._opened()
    if committed == 0:
        assert (run.created, run.head) == (True, None)
    else:
        assert run.head is not None
        assert (run.created, run.head.number, run.epoch) == (False, committed - 1, committed)
    number = publish(end)
    assert number == (committed + 1 if committed else 0)
    assert check_everything_readable(follower) == [*range(committed), number]
    end.collect()
    assert objects(config) == referenced(follower)
    assert follower.wait(None, 0) == number


@pytest.mark.parametrize(
    ("crash_at", "committed"),
    [
        ("put_shard:before#1", 0),
        ("put_shard:after#1", 0),
        ("commit:before#1", 0),
        ("commit:after#1", 1),
        ("put_shard:before#3", 2),
        ("put_shard:after#3", 2),
        ("commit:before#3", 2),
        ("commit:after#3", 3),
    ],
)
def test_a_publisher_killed_at_any_step_is_continued(tmp_path: Path, crash_at: str, committed: int) -> None:
    config = Config(uri=str(tmp_path / "store"), timeout_s=60)
    printed = run_until_killed("publish", config, crash_at)
    assert len(printed) - 1 <= committed  # "ready", then one line per version whose commit had returned
    check_it_goes_on(config, committed)


@pytest.mark.parametrize(("crash_at", "committed"), [("commit:before#2", 1), ("commit:after#2", 2)])
def test_a_publisher_killed_beside_a_bucket_is_continued(
    s3_uri: tuple[str, dict[str, str]], crash_at: str, committed: int
) -> None:
    config = Config(uri=s3_uri[0], store_options=s3_uri[1], timeout_s=60)
    run_until_killed("publish", config, crash_at)
    check_it_goes_on(config, committed)


def test_a_publisher_killed_inside_an_upload_leaves_nothing_visible(tmp_path: Path) -> None:
    config = Config(uri=str(tmp_path / "store"), timeout_s=60)
    worker = start("upload", config)
    assert worker.stdin is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    deadline = time.monotonic() + 60
    while not (making := [p for p in tmp_path.rglob("*.safetensors#*") if p.stat().st_size > 0]):
        assert time.monotonic() < deadline
        assert worker.poll() is None
    worker.send_signal(signal.SIGKILL)
    worker.communicate(timeout=60)
    assert making[0].exists()
    assert objects(config) == set()
    assert reader(config).head() is None
    end = opened(config)
    publish(end)
    assert end.collect()["leftovers"] == 0  # it might still be written to
    long_ago = time.time() - 2 * 3600
    os.utime(making[0], (long_ago, long_ago))
    assert end.collect()["leftovers"] == 1
    assert not making[0].exists()


def test_of_two_racing_publishers_exactly_one_wins_each_number(config: Config) -> None:
    workers = [start("race", config) for _ in range(2)]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    won: list[str] = []
    outputs = []
    for worker in workers:  # both are running before the first answer is waited for
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    for worker in workers:
        outputs.append(worker.communicate(timeout=120)[0].splitlines())
        assert worker.returncode == 0
    won = [line for lines in outputs for line in lines if line]
    follower = reader(config)
    versions = check_everything_readable(follower)  # entries() checks epochs and parents on the way
    assert sorted(int(line.split()[0]) for line in won) == versions
    assert {f"{n} {follower.manifest(n).nonce.hex()}" for n in versions} == set(won)
    assert all(entry.kind != ABORTED for entry in follower.entries())


def test_put_if_absent_has_one_winner_among_threads(config: Config) -> None:
    from concurrent.futures import ThreadPoolExecutor

    store = Store(config)
    with ThreadPoolExecutor(4) as pool:
        for key in range(5):
            wins = list(pool.map(lambda data, key=key: store.create(f"x/{key}", data), [b"a", b"b", b"c", b"d"]))
            assert wins.count(True) == 1
            assert store.get(f"x/{key}") == [b"a", b"b", b"c", b"d"][wins.index(True)]
