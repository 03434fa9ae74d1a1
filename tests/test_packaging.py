"""Claims about what is shipped: file lists, metadata, the package map, the direction of imports.

Owns nothing of what the modules do, and not the house rules of the code (test_house) or the environments
(test_environments).
"""

from __future__ import annotations

import ast
import email
import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
FOLDERS = PYPROJECT["tool"]["setuptools"]["package-dir"]
EXTRAS = {"grpc", "rdma", "s3", "verl", "openrlhf", "slime", "vllm", "sglang", "quickstart", "test"}
OUTER = {folder.partition("/")[0] for folder in FOLDERS.values()}
SHIPPED = {".py", ".pyi", ".proto", ".typed", ".yaml"}


def package_of(path: Path) -> str:
    """The mapped package that a file belongs to: that of the innermost mapped folder."""
    return max(
        (n for n, folder in FOLDERS.items() if path.is_relative_to(ROOT / folder)), key=lambda n: len(FOLDERS[n])
    )


def sources(*folders: str) -> Iterator[Path]:
    """Python files of the package, generated ones too."""
    for folder in folders or sorted(OUTER):
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    """Import name of a file below one of the mapped folders."""
    package = package_of(path)
    parts = path.relative_to(ROOT / FOLDERS[package]).with_suffix("").parts
    return ".".join((package, *parts)).removesuffix(".__init__")


def imports_of(path: Path) -> set[str]:
    """Absolute names of all modules that a file may import, at any depth, for types only included."""
    module, found = module_of(path), set()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            home = node.module or ""
            if node.level:
                outer = package.split(".")[: len(package.split(".")) - node.level + 1]
                home = ".".join([*outer, home] if home else outer)
            found |= {home, *(f"{home}.{alias.name}" for alias in node.names)}
    return found


# --- what the files hold ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """Paths of an sdist and of the wheel that was built from it."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built in a copy, since setuptools leaves things behind that would find their way into the next wheel."""
    copy, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    for folder in (*OUTER, "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return Built(next(out.glob("*.tar.gz")), next(out.glob("*.whl")))


def wheel_text(built: Built, name: str) -> str:
    with zipfile.ZipFile(built.wheel) as wheel:
        return wheel.read(f"weight_sync-{PROJECT['version']}.dist-info/{name}").decode()


def test_a_wheel_from_the_sdist_holds_exactly_the_mapped_folders(built: Built) -> None:
    expected = {
        f"{package_of(path).replace('.', '/')}/{path.relative_to(ROOT / FOLDERS[package_of(path)]).as_posix()}"
        for folder in OUTER
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SHIPPED or path.name == "py.typed"
    }
    with zipfile.ZipFile(built.wheel) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected
    assert {f"weight_sync/{name}" for name in ("py.typed", "proto/v1/shard.proto", "proto/v1/shard_pb2.pyi")} <= found


def test_the_sdist_holds_sources_and_licence_and_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "pyproject.toml", "plugin/py.typed", "proto/v1/manifest.proto"} <= names
    assert {path.relative_to(ROOT).as_posix() for path in sources()} <= names
    assert not [name for name in names if name.startswith(("tests", "build", "benchmarks"))]


def test_metadata_names_licence_python_extras_and_entry_points(built: Built) -> None:
    metadata = email.message_from_string(wheel_text(built, "METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("weight-sync", PROJECT["version"])
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    assert set(metadata.get_all("Provides-Extra", [])) >= EXTRAS
    entries = wheel_text(built, "entry_points.txt")
    assert "[console_scripts]\nweight-sync = weight_sync.cli:main" in entries
    assert "[weight_sync.transports]\nfile = " in entries
    assert "[weight_sync.engines]" in entries


def test_an_installed_wheel_imports_by_itself(built: Built, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*pip, str(built.wheel)], check=True, timeout=120)
    code = f"""if True:
        import sys
        sys.path.insert(0, {str(target)!r})
        import weight_sync, weight_sync.codec, weight_sync.config, weight_sync.ports
        import weight_sync.adapters, weight_sync.transport, weight_sync.proto.v1.manifest_pb2
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "weight_sync":
                assert module.__file__.startswith({str(target)!r}), (name, module.__file__)
        print(weight_sync.__version__)"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == PROJECT["version"], done.stderr


# --- pyproject.toml is true -------------------------------------------------------------------------------------------


def test_every_folder_of_modules_is_a_listed_package() -> None:
    folders = {path.parent for path in sources()}
    bare = [str(folder) for folder in folders if not (folder / "__init__.py").exists()]
    assert not bare, "folders with modules but without __init__.py"
    assert {module_of(folder / "__init__.py") for folder in folders} == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_entry_point_leads_somewhere() -> None:
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    for group, entries in groups.items():
        for name, value in entries.items():
            assert callable(importlib.metadata.EntryPoint(name, value, group).load()), f"{group}: {name} = {value}"


def test_the_version_is_the_same_everywhere() -> None:
    import weight_sync

    headings = re.findall(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert weight_sync.__version__ == PROJECT["version"] == headings[0]


def test_every_foreign_import_is_a_declared_dependency() -> None:
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    declared = {canonicalize_name(Requirement(line).name) for lines in lists for line in lines}
    declared |= {"vllm", "sglang", "slime"}  # installed by the user, see the extras of these names
    homes = {
        module: {canonicalize_name(name) for name in names}
        for module, names in importlib.metadata.packages_distributions().items()
    }
    known = {"grpc": {"grpcio"}, "nixl_cu12": {"nixl-cu12"}, "nixl_cu13": {"nixl-cu12"}, "nixl": {"nixl-cu12"}}
    known |= {"llvmlite": {"numba"}, "hydra": {"hydra-core"}, "omegaconf": {"hydra-core"}}
    known |= {"deepspeed": {"openrlhf"}, "peft": {"openrlhf"}, "huggingface_hub": {"vllm"}}  # come with these hosts
    foreign = {
        (str(path.relative_to(ROOT)), top)
        for path in sources()
        for top in {name.partition(".")[0] for name in imports_of(path)} - sys.stdlib_module_names - {"weight_sync"}
    }
    undeclared = {(path, top) for path, top in foreign if not (known.get(top) or homes.get(top, {top})) & declared}
    assert not undeclared


# --- arrows point inward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "outside"),
    [
        ("plugin", ("weight_sync.transport", "weight_sync.adapters")),
        ("transport", ("weight_sync.adapters",)),
        ("adapters", ("weight_sync.transport",)),
        ("proto", tuple(f"weight_sync.{path.stem}" for path in (ROOT / "plugin").iterdir() if path.stem != "__init__")),
    ],
)
def test_arrows_point_inward(folder: str, outside: tuple[str, ...]) -> None:
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for path in sources(folder)
        for name in imports_of(path)
        if name.startswith(tuple(f"{prefix}." for prefix in outside)) or name in outside
    }
    assert not wrong


def test_importing_weight_sync_imports_nothing_heavy() -> None:
    heavy = ["torch", "numba", "grpc", "obstore", "nixl", "nixl_cu12", "transformers"]
    inner = ["weight_sync.transport", "weight_sync.adapters"]
    code = f"import sys, weight_sync; print([name for name in {heavy + inner} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
