"""What all tests of real engines share. Servers are started once per module: a start takes long."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Engines pin another Numba than the other tests use, and two versions would throw out each other's compiled kernels.
os.environ.setdefault("NUMBA_CACHE_DIR", str(Path(sys.prefix) / "numba"))


@pytest.fixture(scope="session", autouse=True)
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Sockets of these tests lie apart from those of other servers of this user."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    os.environ["WEIGHT_SYNC_RUNTIME_DIR"] = str(folder)
    yield
    del os.environ["WEIGHT_SYNC_RUNTIME_DIR"]
