"""A trainer that is killed while engines send: every receipt holds, and nothing comes twice after it was used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trajectory_cases import make

from weight_sync.trajectory import TrajectoryInbox

_TRAINER = """
import sys, threading
from trajectory_cases import make
from weight_sync.trajectory import TrajectoryInbox
inbox = TrajectoryInbox(sys.argv[1], run_id="run")
say = threading.Lock()
def tell(kind, names):
    with say:
        sys.stdout.write("".join(f"{kind} {name}\\n" for name in names))
        sys.stdout.flush()
def put(thread):
    k = 0
    while True:
        batch = [make(f"{sys.argv[2]}-{thread}-{k}-{j}", tokens=64) for j in range(5)]
        tell("got", [r.id for r in inbox.put(batch)])
        k += 1
for thread in range(3):
    threading.Thread(target=put, args=[thread], daemon=True).start()
while True:
    batch = inbox.take(6, timeout=1)
    tell("saw", [t.id for t in batch])
    batch.acknowledge()
    tell("used", [t.id for t in batch])
"""


def run_until_killed(path: Path, round_: int, lines: int) -> list[tuple[str, str]]:
    """What the trainer said before it was killed with SIGKILL, after so many lines."""
    command = [sys.executable, "-c", _TRAINER, str(path), str(round_)]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent)
    assert trainer.stdout is not None
    said = [line for line, _ in zip(trainer.stdout, range(lines), strict=False)]
    trainer.kill()
    said += trainer.stdout.readlines()
    trainer.wait(30)
    whole = [line for line in said if line.endswith("\n")]
    return [(kind, name) for kind, _, name in (line.strip().partition(" ") for line in whole)]


def test_killed_while_putting_and_taking_it_keeps_every_receipt_and_repeats_nothing_used(tmp_path: Path) -> None:
    path = tmp_path / "inbox.sqlite"
    told: dict[str, set[str]] = {"got": set(), "saw": set(), "used": set()}
    for round_, lines in enumerate((40, 333, 700)):
        for kind, name in run_until_killed(path, round_, lines):
            if kind == "saw":
                assert name not in told["used"], "what was acknowledged came again"
            told[kind].add(name)
    with TrajectoryInbox(path, run_id="run") as inbox:
        pending = [t.id for t in inbox.take(100_000)]
        assert len(pending) == len(set(pending)), "a trajectory is there twice"
        assert not told["used"] & set(pending)
        lost = told["got"] - told["saw"] - set(pending)
        assert told["got"] and not lost, "receipted, and gone"
        # acknowledged, but killed before it could be said
        unsaid = told["saw"] - told["used"] - set(pending)
        assert len(unsaid) <= 3 * 6
        counts = inbox.counts()
        assert counts.received == counts.acknowledged + counts.pending
        sample = sorted(told["got"])[:50]
        assert all(receipt.duplicate for receipt in inbox.put([make(name) for name in sample]))


@pytest.mark.skipif(not Path("/usr/bin/strace").exists(), reason="strace is not installed")
def test_a_receipt_comes_after_a_sync_of_the_log(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from trajectory_cases import make
        from weight_sync.trajectory import TrajectoryInbox
        inbox = TrajectoryInbox(sys.argv[1])
        for k in range(3):
            inbox.put([make(str(k))])
            os.write(2, b"RECEIPT")
        """
    trace = tmp_path / "trace"
    command = ["/usr/bin/strace", "-f", "-y", "-e", "trace=pwrite64,fdatasync,fsync,write", "-o", str(trace)]
    subprocess.run([*command, sys.executable, "-c", code, str(tmp_path / "i.sqlite")], check=True, timeout=120,
                   cwd=Path(__file__).parent, capture_output=True)  # fmt: skip
    synced = True
    receipts = 0
    for line in trace.read_text().splitlines():
        if "i.sqlite-wal" in line:
            synced = "sync(" in line
        if "RECEIPT" in line:
            receipts += 1
            assert synced, "a receipt was given before the log was synced"
    assert receipts == 3
