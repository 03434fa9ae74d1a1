"""Claims about engines that load a folder when they are told to, shown with a server behind HTTP and with commands."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from mirror_cases import (
    ServedEngine,
    State,
    assert_holds,
    bits,
    changed,
    follow_until_killed,
    follower,
    odd_state,
    publish,
    randoms,
    write_base,
)

from weight_sync.adapters.engines.checkpoint import CheckpointEngine
from weight_sync.adapters.engines.hook import Hook
from weight_sync.errors import ConfigError, DeadlineError, EngineError, EngineInDoubtError, WeightSyncError
from weight_sync.ports import Engine, PauseMode
from weight_sync.proto.v1 import replica_pb2
from weight_sync.testing import check_engine, engine_claims


@pytest.fixture
def served() -> Iterator[ServedEngine]:
    engine = ServedEngine()
    yield engine
    engine.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def states(count: int) -> list[State]:
    out = [{"w": randoms((50, 8), torch.bfloat16, 0), "b": randoms((8,), torch.bfloat16, 1)}]
    while len(out) < count:
        out.append(changed(out[-1], len(out), ["w"]))
    return out


def same(a: State, b: State) -> bool:
    return {name: bits(tensor) for name, tensor in a.items()} == {name: bits(tensor) for name, tensor in b.items()}


def test_every_version_is_loaded_and_proven(tmp_path: Path, store: Path, served: ServedEngine) -> None:
    engine = CheckpointEngine(tmp_path / "out", **served.options(), **pausing(served))
    port: Engine = engine
    assert not port.describe().HasField("digest") and not port.describe().tensors
    with follower(store, engine) as replica:
        for state in states(3):
            (number,) = publish(store, [state])
            assert replica.sync().version == number == served.version
            assert same(served.state, state)
            assert served.log == ["pause", f"reload {number}", "resume"]
            served.log.clear()
        description = port.describe()
        assert description.digest == engine.audit().to_proto()
        assert description.kind == "checkpoint" and not served.log
    engine.close()


def pausing(served: ServedEngine) -> dict[str, str]:
    return {"on_pause": f"{served.url}/pause", "on_resume": f"{served.url}/resume"}


def test_the_engine_keeps_the_promises_of_the_port(tmp_path: Path, served: ServedEngine) -> None:
    write_base(tmp_path / "base", [odd_state()])
    paths = (tmp_path / f"out{k}" for k in range(100))

    def engine() -> CheckpointEngine:
        return CheckpointEngine(next(paths), base=tmp_path / "base", **served.options(), **pausing(served))

    assert check_engine(engine, tmp_path / "base", changes_tensors=True) == engine_claims()


def test_a_failed_reload_brings_folder_and_engine_back(tmp_path: Path, store: Path, served: ServedEngine) -> None:
    first, second = states(2)
    (one,) = publish(store, [first])
    engine = CheckpointEngine(tmp_path / "out", **served.options(), **pausing(served))
    with follower(store, engine) as replica:
        replica.sync()
        (two,) = publish(store, [second])
        served.refuse = {two}
        served.log.clear()
        with pytest.raises(EngineError, match=r"version 0 is served again.*HTTP 500: out of memory") as caught:
            replica.sync()
        assert caught.type is EngineError
        assert served.log == ["pause", f"reload {two}", f"reload {one}", "resume"]
        assert_holds(tmp_path / "out", first)
        assert (replica.version, served.version, replica.state) == (one, one, replica_pb2.REPLICA_STATE_SERVING)
        assert same(served.state, first)
        served.refuse = set()
        assert replica.sync().version == two == served.version
        assert_holds(tmp_path / "out", second)
    engine.close()


def test_an_engine_that_answers_without_loading_is_not_believed(
    tmp_path: Path, store: Path, served: ServedEngine
) -> None:
    first, second = states(2)
    publish(store, [first])
    engine = CheckpointEngine(tmp_path / "out", **served.options())
    with follower(store, engine) as replica:
        replica.sync()
        publish(store, [second])
        served.lies = True
        with pytest.raises(EngineError, match="does not prove the version"):
            replica.sync()
        assert_holds(tmp_path / "out", first)
        assert same(served.state, first) and replica.version == 0
    engine.close()


def test_an_engine_that_loads_nothing_is_in_doubt_until_it_does(
    tmp_path: Path, store: Path, served: ServedEngine
) -> None:
    first, second = states(2)
    (one,) = publish(store, [first])
    engine = CheckpointEngine(tmp_path / "out", **served.options(), **pausing(served))
    with follower(store, engine) as replica:
        served.refuse = {one}
        with pytest.raises(EngineInDoubtError, match="did not load it"):  # nothing to go back to
            replica.sync()
        assert_holds(tmp_path / "out", first)
        assert served.log == ["pause", f"reload {one}"], "admission stays closed"
        with pytest.raises(EngineError, match="HTTP 500"):
            replica.sync()
        served.refuse = set()
        assert replica.sync().version == one == served.version
        assert served.log[-2:] == [f"reload {one}", "resume"]

        (two,) = publish(store, [second])
        served.refuse = {one, two}
        with pytest.raises(EngineInDoubtError, match="neither was the one before"):
            replica.sync()
        assert (replica.version, served.log[-1]) == (None, f"reload {one}")
        served.refuse = set()
        assert replica.sync().version == two == served.version
        assert served.log[-1] == "resume"
        assert same(served.state, second)
    engine.close()


def test_bad_bits_are_never_shown_to_the_engine(tmp_path: Path, store: Path, served: ServedEngine) -> None:
    first, second = states(2)
    publish(store, [first])
    engine = CheckpointEngine(tmp_path / "out", **served.options())
    with follower(store, engine) as replica:
        replica.sync()
        with (tmp_path / "out" / "model.safetensors").open("r+b") as stream:
            stream.seek(-1, 2)
            last = stream.read(1)[0]
            stream.seek(-1, 2)
            stream.write(bytes([last ^ 1]))
        whole = {name: torch.flip(tensor, [0]) for name, tensor in second.items()}
        (two,) = publish(store, [whole], anchor_every=0, anchor_share=0)
        served.log.clear()
        with pytest.raises(EngineInDoubtError, match="bits of no version"):
            replica.sync()
        assert not served.log
        assert replica.sync().version == two
        assert served.log == [f"reload {two}"]
        assert same(served.state, whole)
    engine.close()


def test_an_engine_that_came_up_with_something_else_is_reloaded(
    tmp_path: Path, store: Path, served: ServedEngine
) -> None:
    (number,) = publish(store, states(1))
    with follower(store, engine := CheckpointEngine(tmp_path / "out", **served.options())) as replica:
        replica.sync()
    engine.close()
    served.log.clear()
    with follower(store, engine := CheckpointEngine(tmp_path / "out", **served.options())) as replica:
        assert replica.sync().version == number
    engine.close()
    assert served.log == [], "it proved the version, so it was left alone"
    served.version, served.digest = None, ""
    with follower(store, engine := CheckpointEngine(tmp_path / "out", **served.options())) as replica:
        assert replica.sync().version == number == served.version
    engine.close()
    assert served.log == [f"reload {number}"]


@pytest.mark.parametrize("step", ["replica:paused", "mirror:switched", "replica:committed", "replica:verified"])
def test_an_engine_whose_follower_was_killed_serves_again(
    tmp_path: Path, store: Path, served: ServedEngine, step: str
) -> None:
    first, second = states(2)
    publish(store, [first])
    options = {**served.options(), **pausing(served)}
    with follower(store, engine := CheckpointEngine(tmp_path / "out", **options)) as replica:
        replica.sync()
    engine.close()
    (two,) = publish(store, [second])
    follow_until_killed(store, tmp_path / "out", step, options)
    assert served.log[-1] != "resume", "it was left paused"
    with follower(store, engine := CheckpointEngine(tmp_path / "out", **options)) as replica:
        assert replica.sync().version == two == served.version
    engine.close()
    assert served.log[-1] == "resume"
    assert same(served.state, second)
    assert_holds(tmp_path / "out", second)


def test_admission_that_could_not_be_opened_is_tried_again(tmp_path: Path, store: Path) -> None:
    publish(store, states(1))
    ready = tmp_path / "ready"
    engine = CheckpointEngine(tmp_path / "out", on_pause="true", on_resume=f"test -e {ready}", threads=1)
    with follower(store, engine) as replica:
        with pytest.raises(EngineError, match="on_resume"):
            replica.sync()
        assert replica.state != replica_pb2.REPLICA_STATE_SERVING
        ready.touch()
        assert replica.sync().version == 0
        assert replica.state == replica_pb2.REPLICA_STATE_SERVING
    engine.close()


def test_an_engine_that_starts_later_is_waited_for(tmp_path: Path, store: Path) -> None:
    (number,) = publish(store, states(1))
    gone = ServedEngine()
    gone.close()  # its port is free now, and nobody listens there
    engine = CheckpointEngine(tmp_path / "out", **gone.options(check_s=30.0))
    with follower(store, engine) as replica, ThreadPoolExecutor(1) as other:
        syncing = other.submit(replica.sync)
        deadline = time.monotonic() + 60
        while not (tmp_path / "out").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        served = ServedEngine(gone.port)
        assert syncing.result(60).version == number == served.version
        served.close()
    engine.close()


def test_following_goes_on_after_a_failed_reload(tmp_path: Path, store: Path, served: ServedEngine) -> None:
    first, second = states(2)
    publish(store, [first])
    engine = CheckpointEngine(tmp_path / "out", **served.options())
    with follower(store, engine) as replica:
        replica.sync()
        (two,) = publish(store, [second])
        served.refuse = {two}
        stop = threading.Event()

        def repaired(error: WeightSyncError) -> None:
            served.refuse = set()

        replica.follow(lambda report: stop.set(), stop, repaired)
        assert replica.version == two == served.version
    engine.close()


# --- commands ---


def test_a_command_learns_all_about_the_version(tmp_path: Path, store: Path) -> None:
    told = tmp_path / "told"
    command = " ".join(f"$WEIGHT_SYNC_{name}" for name in ("PATH", "RUN_ID", "VERSION", "DIGEST"))
    command = f'echo "{command}" >> {told}'
    modes = tmp_path / "modes"
    engine = CheckpointEngine(
        tmp_path / "out", on_commit=command, check=f"tail -n 1 {told}", check_contains="{version} {digest}",
        on_pause=f'printf "$WEIGHT_SYNC_MODE " >> {modes}', on_resume=f"echo open >> {modes}", threads=1,
    )  # fmt: skip
    with follower(store, engine, pause="abort") as replica:
        for state in states(2):
            publish(store, [state])
            report = replica.sync()
            assert (
                told.read_text().splitlines()[-1] == f"{tmp_path}/out {replica.run_id} {report.version} {report.digest}"
            )
        assert modes.read_text() == "abort open\n" * 2
    engine.close()


def test_a_failing_command_says_why(tmp_path: Path, store: Path) -> None:
    (one,) = publish(store, states(1))
    command = f'[ "$WEIGHT_SYNC_VERSION" = {one} ] || {{ echo secret; echo "GPU is gone" >&2; exit 3; }}'
    engine = CheckpointEngine(tmp_path / "out", on_commit=command, threads=1)
    with follower(store, engine) as replica:
        replica.sync()
        publish(store, states(2)[1:])
        with pytest.raises(EngineError, match="exit status 3: GPU is gone") as caught:
            replica.sync()
        assert caught.type is EngineError and "secret" not in str(caught.value)
        assert replica.version == one
    engine.close()


def runs(pid: int) -> bool:
    """False for a process that is gone, or dead and not waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    script = f"import os, time; open({str(alive)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    hook = Hook("on_commit", f'{sys.executable} -c "{script}" & while [ ! -s {alive} ]; do sleep 0.01; done; wait')
    with pytest.raises(DeadlineError, match="on_commit"):
        hook.run({}, 2.0)
    deadline = time.monotonic() + 60
    while runs(int(alive.read_text())):  # a kill is noticed a moment later
        assert time.monotonic() < deadline, "it is still alive"
        time.sleep(0.01)


def test_a_daemon_that_a_command_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    hook = Hook("on_commit", f"sleep 600 & echo $! > {tmp_path / 'daemon'}; echo started")
    assert hook.run({}, 60.0) == "started\n"
    pid = int((tmp_path / "daemon").read_text())
    assert runs(pid)
    os.kill(pid, signal.SIGKILL)


# --- requests and options ---


def test_requests_go_where_they_are_sent_or_fail(served: ServedEngine) -> None:
    with pytest.raises(EngineError, match="HTTP 302"):
        Hook("check", f"{served.url}/moved").run({}, 30.0, "GET")
    with pytest.raises(EngineError, match="cannot be asked"):
        Hook("check", "http://127.0.0.1:1/").run({}, 30.0, "GET")
    assert '"version": null' in Hook("check", f"{served.url}/version?x=1").run({}, 30.0, "GET")


def test_waiting_for_an_engine_that_does_not_listen_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineError, match="cannot be asked"):
        Hook("on_commit", "http://127.0.0.1:1/").run({}, 0.7, patient=True)
    assert [record.getMessage() for record in caplog.records] == ["on_commit: nobody listens there yet; trying for 1 s"]


def test_a_pause_that_fails_is_taken_back(tmp_path: Path, served: ServedEngine) -> None:
    engine = CheckpointEngine(tmp_path / "out", on_pause="exit 1", on_resume=f"{served.url}/resume", threads=1)
    with pytest.raises(EngineError, match="on_pause"):
        engine.pause(PauseMode.WAIT, 5.0)
    assert served.log == ["resume"]
    with pytest.raises(EngineError, match="nothing is staged"):
        engine.commit()
    with pytest.raises(EngineInDoubtError):
        engine.rollback()
    with pytest.raises(EngineError, match="no version"):
        engine.audit()
    engine.close()
    engine.close()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"on_commit": "ftp://host/x"}, "on_commit"),
        ({"on_commit": "  "}, "on_commit"),
        ({"check": "http://:80/"}, "check"),
        ({"check": "http://host:99999/"}, "check"),
        ({"check": "http://user:word@host/"}, "check"),
        ({"check_contains": "{version}"}, "check_contains"),
        ({"check": "true", "check_contains": "ready"}, "check_contains"),
        ({"on_pause": "true"}, "on_pause"),
        ({"on_resume": "true"}, "on_resume"),
        ({"reload_s": 0}, "reload_s"),
        ({"check_s": "soon"}, "check_s"),
        ({"check_s": float("nan")}, "check_s"),
        ({"threads": 0}, "threads"),
    ],
)
def test_an_option_that_cannot_work_is_refused(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CheckpointEngine(tmp_path / "out", **options)
    assert caught.value.field == field
    assert not list(tmp_path.iterdir())


def test_digits_do_not_prove_a_longer_number(tmp_path: Path, store: Path) -> None:
    publish(store, states(1))
    options = {"check_contains": "v{version}", "check_s": 0.1, "threads": 1}
    engine = CheckpointEngine(tmp_path / "a", check="echo v01 v00 xv0x", **options)
    with follower(store, engine) as replica:
        assert replica.sync().version == 0
    engine.close()
    engine = CheckpointEngine(tmp_path / "b", check="echo v01 v00 1v0", **options)
    with follower(store, engine) as replica, pytest.raises(EngineInDoubtError, match="does not prove"):
        replica.sync()
    engine.close()


def test_a_folder_that_is_found_to_hold_the_newest_versions_bits_says_so(tmp_path: Path, store: Path) -> None:
    [state] = states(1)
    first = CheckpointEngine(tmp_path / "out")
    publish(store, [state])
    with follower(store, first) as replica:
        replica.sync()
    first.close()
    numbers = publish(store, [state, state])  # steps that changed nothing
    again = CheckpointEngine(tmp_path / "out")
    with follower(store, again) as replica:
        assert replica.sync().version == numbers[-1]
        note = json.loads((tmp_path / "out" / "weight_sync.json").read_text())
        assert note["version"] == numbers[-1] and note["digest"] == again.audit().hex()
    again.close()
