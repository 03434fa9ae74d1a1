"""The examples do what their pages say, as a user would start them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("where", [[], ["--s3"]], ids=["folder", "s3"])
def test_a_trainer_and_two_followers_agree_through_a_store(where):
    command = [sys.executable, str(ROOT / "examples" / "file" / "run.py"), *where]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "trainer and followers agree" in done.stdout
    assert "late: version 5" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("commit", ["shadow", "direct"])
def test_trainer_ranks_write_into_two_engines(commit):
    pytest.importorskip("nixl_cu12")
    command = [sys.executable, str(ROOT / "examples" / "rdma" / "run.py"), "--commit", commit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "trainer and engines agree" in done.stdout
