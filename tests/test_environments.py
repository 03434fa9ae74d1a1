"""Claims about scripts/env.sh: what is built once is built whole, once, for every checkout.

Owns no claim about the packages in the environments.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "scripts" / "requirements"
WITHOUT_TORCH = {"proto", "dev.nodeps", "openrlhf.nodeps", "sglang.nodeps"}


class Checkout:
    """A small copy of the project with requirement files of its own, and a cache to build into."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.root, self.cache = root, cache
        for folder in ("plugin", "transport", "adapters", "proto"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "LICENSE"):
            shutil.copy(ROOT / name, root)
        (root / "scripts" / "requirements").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "env.sh", root / "scripts")

    def require(self, text: str) -> None:
        (self.root / "scripts" / "requirements" / "small.txt").write_text(text)

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        values = {**os.environ, "WEIGHT_SYNC_CACHE": str(self.cache), "PYTHON": sys.executable, **variables}
        command = [str(self.root / "scripts" / "env.sh"), *arguments]
        return subprocess.Popen(
            command, cwd=self.root, env=values, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def env(self, *arguments: str, **variables: str) -> Path:
        out, err = (process := self.start(*arguments, **variables)).communicate(timeout=240)
        assert process.returncode == 0, err
        return Path(out.strip())

    def refusal(self, *arguments: str, **variables: str) -> str:
        _, err = (process := self.start(*arguments, **variables)).communicate(timeout=240)
        assert process.returncode != 0
        return err


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "checkout", tmp_path / "cache")


@pytest.mark.parametrize("path", sorted(REQUIREMENTS.glob("*.txt")), ids=lambda path: path.stem)
def test_every_requirement_is_pinned_exactly(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert not [line for line in lines if not re.fullmatch(r"[\w.\-]+(\[[\w,]+\])?==[\w.+]+", line)]
    if path.stem not in WITHOUT_TORCH:
        assert "torch==2.13.0" in lines, "unpinned, torch may come as a build for other hardware"


def test_the_pins_satisfy_the_bounds_of_the_package() -> None:
    lines = (REQUIREMENTS / "dev.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for line in [*project["dependencies"], *extras["test"], *extras["quickstart"]]:
        bound = Requirement(line)
        version = pinned.get(canonicalize_name(bound.name))
        assert version is not None and version in bound.specifier, f"dev.txt has {version} for {line}"


@pytest.mark.slow
def test_an_environment_is_built_whole_and_once(checkout: Checkout) -> None:
    checkout.require("# nothing\n")
    first, second = checkout.start("small"), checkout.start("small")
    answers = [process.communicate(timeout=240) for process in (first, second)]
    assert [process.returncode for process in (first, second)] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    assert "".join(err for _, err in answers).count("env.sh: building") == 1, "builders wait for one another"

    venv = Path(answers[0][0].strip())
    assert subprocess.run([venv / "bin" / "python", "-c", "import pip"], check=False, timeout=60).returncode == 0
    (venv / ".complete").unlink()
    (venv / "half-built").touch()
    assert checkout.env("small") == venv
    assert not (venv / "half-built").exists(), "a half-built environment is built anew"
    before = (venv / ".complete").stat().st_mtime_ns
    assert checkout.env("small", WEIGHT_SYNC_LOCK_TIMEOUT="0") == venv
    assert (venv / ".complete").stat().st_mtime_ns == before

    with open(f"{venv}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert checkout.env("small") == venv, "what is complete needs no lock"
        (venv / ".complete").unlink()
        assert "another build still holds" in checkout.refusal("small", WEIGHT_SYNC_LOCK_TIMEOUT="1")


@pytest.mark.slow
def test_a_last_step_finishes_an_environment_and_is_part_of_its_name(checkout: Checkout) -> None:
    checkout.require("# nothing\n")
    plain = checkout.env("small")
    last = checkout.root / "scripts" / "requirements" / "small.after.sh"
    last.write_text('touch "$1/finished"\n')
    finished = checkout.env("small")
    assert finished != plain and (finished / "finished").exists()
    last.write_text("return 1\n")
    assert "could not be built" in checkout.refusal("small")


@pytest.mark.slow
def test_a_build_that_fails_leaves_nothing_to_be_used(checkout: Checkout) -> None:
    checkout.require("no-such-thing @ file:///nowhere/no_such_thing-1.0-py3-none-any.whl\n")
    assert "could not be built" in checkout.refusal("small")
    assert not list(checkout.cache.glob("venvs/*/.complete"))


def test_what_cannot_be_built_is_said(checkout: Checkout) -> None:
    checkout.require("")
    assert "no Python 3.11" in checkout.refusal("small", PYTHON="/bin/false")
    assert "missing.txt" in checkout.refusal("missing")


@pytest.mark.slow
def test_checkouts_share_packages_and_import_their_own_code(checkout: Checkout, tmp_path: Path) -> None:
    pin = next(line for line in (REQUIREMENTS / "dev.txt").read_text().splitlines() if line.startswith("setuptools=="))
    other = Checkout(tmp_path / "other", checkout.cache)
    for each in (checkout, other):
        each.require(pin)
        thin = each.env("small", ".venv")
        assert thin == each.root / ".venv"
        script = "import setuptools, weight_sync.transport, weight_sync.errors; print(setuptools.__file__); "
        script += "print(weight_sync.__file__); print(weight_sync.transport.__file__)"
        run = subprocess.run(
            [thin / "bin" / "python", "-c", script],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        shared, *own = run.stdout.split()
        assert Path(shared).is_relative_to(checkout.cache)
        assert own == [str(each.root / "plugin" / "__init__.py"), str(each.root / "transport" / "__init__.py")]
        assert (thin / "bin" / "weight-sync").read_text().startswith(f"#!{thin}/bin/python")
        assert (thin / "bin" / "pip").read_text().startswith(f"#!{thin}/bin/python")
    assert len(list(checkout.cache.glob("venvs/*/.complete"))) == 1

    stamp = checkout.root / ".venv" / ".complete"
    before = stamp.stat().st_mtime_ns
    checkout.env("small", ".venv")
    assert stamp.stat().st_mtime_ns == before, "a second run installs nothing"
    with (checkout.root / "pyproject.toml").open("a") as project:
        project.write("\n# changed\n")
    checkout.env("small", ".venv")
    assert stamp.stat().st_mtime_ns != before, "a changed pyproject.toml is installed"


def test_a_folder_that_is_no_environment_is_never_cleared(checkout: Checkout, tmp_path: Path) -> None:
    checkout.require("")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    assert "is no virtual environment" in checkout.refusal("small", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "file").exists()
