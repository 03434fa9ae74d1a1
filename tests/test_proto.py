"""Claims about the generated message code: it is what the .proto files say, and it loads.

Owns no claim about what the messages mean.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MESSAGES = sorted(path.stem for path in (ROOT / "proto" / "v1").glob("*.proto"))


def generated(root: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (root / "proto" / "v1").glob("*_pb2.py*")}


@pytest.mark.slow
@pytest.mark.timeout(900)  # the generator's environment may have to be built first
def test_the_committed_code_is_what_the_messages_generate(tmp_path: Path) -> None:
    found = subprocess.run(
        [ROOT / "scripts" / "env.sh", "proto"], stdout=subprocess.PIPE, text=True, check=True, timeout=800
    )
    generator = {**os.environ, "PYTHON": f"{found.stdout.strip()}/bin/python"}
    subprocess.run([ROOT / "scripts" / "gen_proto.sh", tmp_path], env=generator, check=True, timeout=60)
    assert generated(tmp_path) == generated(ROOT), "run make proto and commit what it writes"


def test_every_message_file_has_code_and_stubs_and_nothing_is_left_over() -> None:
    assert set(generated(ROOT)) == {f"{name}_pb2.{ending}" for name in MESSAGES for ending in ("py", "pyi")}


@pytest.mark.parametrize("name", MESSAGES)
def test_the_code_loads_on_the_installed_protobuf(name: str) -> None:
    module = importlib.import_module(f"weight_sync.proto.v1.{name}_pb2")
    assert module.DESCRIPTOR.package == "weight_sync.v1"
    for message in module.DESCRIPTOR.message_types_by_name:
        kind = getattr(module, message)
        assert kind.FromString(kind().SerializeToString()) == kind()


@pytest.mark.parametrize("name", MESSAGES)
def test_the_code_demands_no_version_of_the_runtime(name: str) -> None:
    assert "runtime_version" not in generated(ROOT)[f"{name}_pb2.py"], "generate with grpcio-tools <= 1.62"
