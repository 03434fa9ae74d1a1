"""Claims about the execution contract: its id, the decision, who is refused where, and what the command line tells."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc_cases
import pytest
import torch
from cli_cases import ask, run
from hypothesis import given
from hypothesis import strategies as st
from loop import config, engine, model
from sidecar_cases import Scene, until

from weight_sync import Publisher, Replica
from weight_sync.adapters.engines.switches import set_environment, switches
from weight_sync.adapters.engines.worker.facts import contract_of
from weight_sync.adapters.rollout.spans import read_served
from weight_sync.adapters.trainers.base import TrainerHost
from weight_sync.config import load
from weight_sync.contract import (
    FIELDS,
    Action,
    compare,
    contract_id,
    decide,
    differences,
    document,
    facts,
    from_document,
    process_contract,
    seal,
    terms_of,
)
from weight_sync.errors import ConfigError, ContractError
from weight_sync.group import SoloGroup
from weight_sync.proto.v1 import contract_pb2, replica_pb2
from weight_sync.testing import MemoryEngine
from weight_sync.transport.grpc import GrpcTransport

TRAINER = contract_pb2.ExecutionContract(
    compute_dtype="bfloat16", batch_invariant=True, deterministic=True, tensor_parallel=4, engine="verl",
    kernel_versions={"torch": "2.13.0"}, sampling={"top_k": "-1"},
)  # fmt: skip
STRICT: dict[str, Any] = {
    "enforce": "strict",
    "require": {"tensor_parallel": {"at_most": 2}, "compute_dtype": "bfloat16"},
}


def like(**fields: Any) -> contract_pb2.ExecutionContract:
    """An engine's contract."""
    return contract_pb2.ExecutionContract(**{"compute_dtype": "bfloat16", "tensor_parallel": 2, **fields})


def serving(contract: contract_pb2.ExecutionContract | None, step: int = 0) -> MemoryEngine:
    made = engine(step)
    if contract is not None:
        made.contract = contract
    return made


# --- the contract -----------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="."), max_size=8)
CONTRACTS = st.builds(
    contract_pb2.ExecutionContract, model_revision=TEXT, served_format=TEXT, engine=TEXT, engine_version=TEXT,
    batch_invariant=st.none() | st.booleans(), deterministic=st.none() | st.booleans(),
    tensor_parallel=st.none() | st.integers(0, 3), data_parallel=st.none() | st.integers(0, 3),
    kernel_versions=st.dictionaries(TEXT.filter(bool), TEXT, max_size=3),
    sampling=st.dictionaries(TEXT.filter(bool), TEXT, max_size=2),
)  # fmt: skip


@given(CONTRACTS, CONTRACTS)
def test_ids_are_equal_exactly_when_all_facts_are(a: Any, b: Any) -> None:
    assert (contract_id(a) == contract_id(b)) == (facts(a) == facts(b)) == (not compare(a, b))
    sealed = seal(a)
    assert seal(sealed) == sealed and contract_id(sealed) == sealed.id


@given(CONTRACTS)
def test_a_document_is_read_back_as_the_same_contract(contract: Any) -> None:
    again = from_document(json.loads(json.dumps(document(contract))))
    assert again == seal(contract)


def test_an_id_does_not_change_between_releases() -> None:
    assert contract_id(TRAINER) == "9d4bc0ef4f32da238b03c0ccfb697ff7"
    assert contract_id(contract_pb2.ExecutionContract()) == ""


def test_unset_false_zero_and_empty_are_told_apart() -> None:
    found = [like(tensor_parallel=None), like(tensor_parallel=0), like(batch_invariant=False), like()]
    assert len({contract_id(one) for one in found}) == 4
    terms = terms_of("native", "strict", {"batch_invariant": False}, None)
    assert not differences(terms, like(batch_invariant=False))
    assert [d.found for d in differences(terms, like())] == [None]


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ({"tensor_paralel": 1}, "contract.tensor_paralel"),
        ({"tensor_parallel": "two"}, "contract.tensor_parallel"),
        ({"tensor_parallel": True}, "contract.tensor_parallel"),
        ({"sampling": "hot"}, "contract.sampling"),
        ({"id": "feed", "engine": "x"}, "contract.id"),
    ],
)
def test_a_document_that_is_no_contract_is_refused_by_field(given_: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        from_document(given_)
    assert raised.value.field == field


def test_this_process_is_described_by_what_is_in_force() -> None:
    import torch

    found = process_contract(kernel_versions={"extra": "1"}, engine="test")
    assert found.kernel_versions["torch"] == str(torch.__version__) and found.kernel_versions["extra"] == "1"
    assert found.deterministic is torch.are_deterministic_algorithms_enabled() and found.engine == "test"


# --- the decision -----------------------------------------------------------------------------------------------------


@given(CONTRACTS, st.sampled_from(["none", "warn", "strict"]), st.sampled_from(["none", "warn", "strict"]))
def test_the_stricter_side_decides_and_every_refusal_has_its_reasons(engine_: Any, theirs: str, ours: str) -> None:
    terms = terms_of("native", theirs, {"tensor_parallel": {"at_most": 1}, "engine": {"one_of": ["a", "b"]}}, None)
    verdict = decide(terms, engine_, ours)
    known = facts(engine_)
    wrong = {"engine"} if known.get("engine") not in ("a", "b") else set()
    wrong |= {"tensor_parallel"} if int(known.get("tensor_parallel", 99)) > 1 else set()
    order = ["none", "warn", "strict"]
    action = {"none": Action.ACCEPT, "warn": Action.WARN, "strict": Action.REFUSE}[max(theirs, ours, key=order.index)]
    assert verdict.action is (action if wrong else Action.ACCEPT)
    assert {d.field for d in verdict.differences} == (wrong if verdict.action is not Action.ACCEPT else set())
    assert all(name in verdict.reason for name in wrong) or verdict.action is Action.ACCEPT


def test_same_means_as_the_trainer_computes_and_profiles_bring_their_own_rules() -> None:
    terms = terms_of("deterministic", "strict", {"kernel_versions": {"torch": {"same": True}}}, TRAINER)
    assert {t.field: list(t.one_of) for t in terms.terms} == {
        "batch_invariant": ["true"], "deterministic": ["true"], "kernel_versions.torch": ["2.13.0"],
    }  # fmt: skip
    relaxed = terms_of("deterministic", "strict", {"batch_invariant": {"one_of": [True, False]}}, TRAINER)
    assert list(relaxed.terms[0].one_of) == ["true", "false"]
    with pytest.raises(ConfigError, match="does not know its own value"):
        terms_of("unified", "strict", {}, TRAINER)
    assert not terms_of("native", "strict", {}, None).terms


@pytest.mark.parametrize(
    "require",
    [
        {"tensor_paralel": 1},
        {"tensor_parallel": "1"},
        {"tensor_parallel": -1},
        {"tensor_parallel": {"at_most": "1"}},
        {"compute_dtype": {"at_most": 1}},
        {"compute_dtype": {"one_of": []}},
        {"compute_dtype": {"exact": "a", "at_most": 1}},
        {"compute_dtype": {"same": False}},
        {"sampling": 1},
        {"engine.name": "x"},
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_field(require: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        load({"uri": "x", "contract": {"require": require}})
    assert str(raised.value.field).startswith("weight_sync.contract.require.")


# --- versions and replicas --------------------------------------------------------------------------------------------


def test_versions_carry_how_the_trainer_computes_and_what_it_asks(tmp_path: Path) -> None:
    keys = config(tmp_path, contract=STRICT)
    with Publisher.open(keys, execution=TRAINER) as publisher, Replica.open(keys, serving(like())) as replica:
        publisher.publish(model(0))
        replica.sync()
        manifest = replica.manifest()
        assert manifest.contract == seal(TRAINER)
        assert [t.field for t in manifest.terms.terms] == ["compute_dtype", "tensor_parallel"]
        (told,) = publisher.acknowledgements()
        assert told.contract == seal(like())


@pytest.mark.parametrize("contract", [like(tensor_parallel=4), like(compute_dtype="float16"), None])
def test_strict_refuses_an_engine_before_it_serves_and_names_what_differs(tmp_path: Path, contract: Any) -> None:
    keys = config(tmp_path, contract=STRICT)
    held = serving(contract)
    with Publisher.open(keys) as publisher, Replica.open(keys.replace(contract={}), held) as replica:
        publisher.publish(model(0))
        with pytest.raises(ContractError) as raised:
            replica.sync()
        for difference in differences(terms_of("native", "strict", STRICT["require"], None), held.contract):
            assert str(difference) in str(raised.value)
        assert replica.version is None and held.announced is None
        with pytest.raises(ContractError):  # it may never fit
            replica.follow()


def test_warn_lets_an_engine_on_and_warns_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = config(tmp_path, contract={**STRICT, "enforce": "warn"})
    with Publisher.open(keys) as publisher, Replica.open(keys, serving(like(tensor_parallel=4))) as replica:
        with caplog.at_level(logging.WARNING, "weight_sync.contract"):
            for step in range(3):
                publisher.publish(model(step))
                assert replica.sync().version == publisher.version
                replica.forget()
                replica.sync()
        (line,) = [record.getMessage() for record in caplog.records]
        assert "tensor_parallel is 4, asked for is at most 2" in line


def test_an_engines_own_side_may_be_stricter_than_the_trainer(tmp_path: Path) -> None:
    keys = config(tmp_path, contract={**STRICT, "enforce": "none"})
    strict = keys.replace(contract={"enforce": "strict"})
    with Publisher.open(keys) as publisher:
        publisher.publish(model(0))
        with Replica.open(keys, serving(like(tensor_parallel=4))) as replica:
            assert replica.sync().version == publisher.version
        with Replica.open(strict, serving(like(tensor_parallel=4))) as replica, pytest.raises(ContractError):
            replica.sync()


def test_terms_that_change_hold_from_their_version_on(tmp_path: Path) -> None:
    keys = config(tmp_path)
    with Replica.open(keys, serving(like(tensor_parallel=4))) as replica:
        with Publisher.open(keys) as publisher:
            publisher.publish(model(0))
            first = replica.sync().version
        with Publisher.open(keys.replace(contract=STRICT)) as publisher:
            publisher.publish(model(1))
            with pytest.raises(ContractError):
                replica.sync()
            assert replica.version == first
        with Publisher.open(keys) as publisher:
            publisher.publish(model(2))
            assert replica.sync().version == publisher.version


# --- registration -----------------------------------------------------------------------------------------------------


def test_a_server_refuses_to_register_an_engine_that_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        _, client = grpc_cases.served(tmp_path / "store", stack)
        publisher = stack.enter_context(Publisher.open(client.replace(contract=STRICT)))
        publisher.publish(model(0))
        end = GrpcTransport(client).replica_end()
        stack.callback(end.close)
        end.register("good", replica_pb2.EngineDescription(contract=like()), 60)
        with pytest.raises(ContractError) as raised:
            end.register("bad", replica_pb2.EngineDescription(contract=like(tensor_parallel=8)), 60)
        assert "tensor_parallel is 8, asked for is at most 2" in str(raised.value)
        with pytest.raises(ContractError), Replica.open(client, serving(like(tensor_parallel=8))) as replica:
            replica.sync()
        with Replica.open(client, serving(like()), replica_id="fits") as replica:
            assert replica.sync().version == publisher.version


def test_a_server_warns_once_about_an_engine_that_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        _, client = grpc_cases.served(tmp_path / "store", stack)
        publisher = stack.enter_context(Publisher.open(client.replace(contract={**STRICT, "enforce": "warn"})))
        publisher.publish(model(0))
        end = GrpcTransport(client).replica_end()
        stack.callback(end.close)
        with caplog.at_level(logging.WARNING, "weight_sync.contract"):
            for name in ("a", "a", "b"):
                end.register(name, replica_pb2.EngineDescription(contract=like(tensor_parallel=8)), 60)
        assert [record.getMessage().split()[1] for record in caplog.records] == ["a", "b"]


# --- the sidecar ------------------------------------------------------------------------------------------------------


def test_a_sidecar_is_not_ready_in_front_of_an_engine_that_is_refused(tmp_path: Path) -> None:
    made = Scene(tmp_path)

    def published(step: int, **keys: Any) -> int:
        with Publisher.open(made.keys.replace(**keys)) as publisher:
            report = publisher.publish(model(step), step=step)
            assert report is not None
            return report.version

    try:
        made.sidecar.await_version(0)
        answer = made.sidecar.post({"prompt": "x"})
        assert answer.status == 200 and "x-weight-contract" not in answer.headers, "this engine says nothing of itself"
        made.publisher.close()
        published(1, contract=STRICT)
        until(lambda: not made.sidecar.is_ready(), "the refusal")
        told = made.sidecar.ask("GET", "/readyz")
        assert told.status == 503 and "tensor_parallel is not known, asked for is at most 2" in told.json["reason"]
        assert made.sidecar.status["version"] == 0
        made.sidecar.await_version(published(2, contract={}))
    finally:
        made.close()


def test_a_rollout_client_reads_the_contract_from_the_headers() -> None:
    headers = {"x-weight-version-run": "r", "x-weight-version-start": "1", "x-weight-version-end": "2"}
    assert read_served(headers).contract == ""
    assert read_served({**headers, "x-weight-contract": "c0ffee"}).contract == "c0ffee"


# --- adapters ---


def test_a_ranks_facts_become_its_contract_and_what_is_not_told_stays_unknown() -> None:
    facts_ = {
        "dtype": "bfloat16", "torch": "2.13.0", "engine_version": "0.32.0", "tensor_parallel": "8", "revision": "x",
        "batch_invariant": "false", "deterministic": "", "sampling.top_k": "20", "kernel_versions.triton": "",
    }  # fmt: skip
    assert contract_of("vllm", facts_) == seal(contract_pb2.ExecutionContract(
        engine="vllm", engine_version="0.32.0", compute_dtype="bfloat16", served_format="bfloat16", tensor_parallel=8,
        batch_invariant=False, kernel_versions={"torch": "2.13.0"}, sampling={"top_k": "20"},
    ))  # fmt: skip
    assert contract_of("vllm", {**facts_, "served_format": "fp8"}).served_format == "fp8"
    for wrong in ({"tensor_parallel": "many"}, {"batch_invariant": "maybe"}):
        with pytest.raises(ConfigError, match="vllm's facts"):
            contract_of("vllm", wrong)


class Trainer(TrainerHost):
    """A host that knows some of how it computes."""

    host = "tiny"

    def source(self) -> Any:
        return model(1)

    def execution(self) -> dict[str, Any]:
        model_ = torch.nn.Linear(2, 2).bfloat16()
        return {"model": model_, "tensor_parallel": 2, "engine_version": "", "router_replay": None}


def test_a_trainer_adapter_publishes_how_its_host_computes(tmp_path: Path) -> None:
    keys = config(tmp_path, contract={"require": {"compute_dtype": {"same": True}}})
    host = Trainer(keys, SoloGroup())
    host.sync(1)
    with Replica.open(keys, serving(like(), 1)) as replica:
        replica.sync()
        found = replica.manifest()
    host.monitor.observe([], [], 1)
    assert host.sync(2)["weight_sync/mismatch_alarms"] == 0, "the monitor's numbers go with the host's"
    host.close()
    assert (found.contract.engine, found.contract.compute_dtype, found.contract.tensor_parallel) == (
        "tiny",
        "bfloat16",
        2,
    )
    assert not found.contract.engine_version and not found.contract.HasField("router_replay")
    assert [list(term.one_of) for term in found.terms.terms] == [["bfloat16"]]
    with pytest.raises(ConfigError, match="own model code"):
        Trainer(keys.replace(contract={"profile": "unified"}), SoloGroup())


_DETERMINISTIC = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from test_contract import Trainer
from loop import config
from pathlib import Path
from weight_sync.group import SoloGroup
host = Trainer(config(Path(sys.argv[2]), contract={"profile": "deterministic"}), SoloGroup())
import os
assert torch.are_deterministic_algorithms_enabled() and os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
assert host.contract().deterministic
"""


def test_the_profile_deterministic_sets_the_trainers_switches(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-c", _DETERMINISTIC, str(Path(__file__).parent), str(tmp_path)], check=True, timeout=120
    )


# --- switches ---------------------------------------------------------------------------------------------------------


def test_profiles_set_the_switches_of_each_engine() -> None:
    given_: dict[str, str] = {"VLLM_BATCH_INVARIANT": "0"}
    set_environment("native", "vllm", given_)
    assert given_ == {"VLLM_BATCH_INVARIANT": "0"}
    set_environment("deterministic", "vllm", given_)
    assert given_["VLLM_BATCH_INVARIANT"] == "1" and given_["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert switches("deterministic", "sglang").options == ("--enable-deterministic-inference",)
    assert switches("unified", "transformers").environment
    for profile, kind in (("unified", "vllm"), ("unified", "sglang"), ("deterministic", "llama.cpp")):
        with pytest.raises(ConfigError):
            switches(profile, kind)


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_line_shows_both_sides_and_what_differs(tmp_path: Path) -> None:
    keys = config(tmp_path, contract={**STRICT, "enforce": "warn"}, replica_id="e1")
    with (
        Publisher.open(keys, execution=TRAINER) as publisher,
        Replica.open(keys, serving(like(tensor_parallel=4))) as r,
    ):
        publisher.publish(model(0))
        r.sync()
        found = ask("contract", "show", keys.uri)
        assert found["contract"] == document(TRAINER) and found["enforce"] == "warn"
        (row,) = found["engines"]
        assert row["replica_id"] == "e1"
        assert row["differences"] == [{"field": "tensor_parallel", "found": "4", "expected": "at most 2"}]
        text = run("contract", "show", keys.uri).stdout
        assert "tensor_parallel is 4, asked for is at most 2" in text and contract_id(TRAINER) in text
        file = tmp_path / "mine.json"
        file.write_text(json.dumps(found))
        assert ask("contract", "diff", keys.uri, file)["equal"]
        assert ask("contract", "show", file)["contract"] == document(TRAINER)
        fields = ask("contract", "diff", file, f"{keys.uri}#e1")["fields"]
        assert {"field": "engine", "a": "verl", "b": None} in fields
        assert {row["field"].partition(".")[0] for row in fields} <= set(FIELDS)
        assert "not known" in run("contract", "diff", file, f"{keys.uri}#e1").stdout


def test_the_command_line_tells_the_switches_of_a_profile() -> None:
    found = ask("contract", "switches", "vllm")
    assert found["environment"]["VLLM_BATCH_INVARIANT"] == "1" and found["options"] == []
    assert "--enable-deterministic-inference" in run("contract", "switches", "sglang").stdout.splitlines()
    assert ask("contract", "switches", "vllm", "--profile", "native") == {"environment": {}, "options": []}
    assert ask("contract", "switches", "vllm", "--profile", "unified", code=2)["error"]["field"] == "contract.profile"
    assert ask("contract", "switches", "vllm", "--profile", "fast", code=2)["error"]["field"] == "--profile"


def test_the_command_line_refuses_what_is_no_contract(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("tensor_paralel: 1\n")
    assert ask("contract", "show", file, code=2)["error"]["field"].endswith("tensor_paralel")
    assert ask("contract", "show", tmp_path / "none.json", code=2)["error"]["kind"]
    keys = config(tmp_path)
    with Publisher.open(keys) as publisher:
        assert ask("contract", "show", keys.uri, code=4)["error"]
        publisher.publish(model(0))
        assert ask("contract", "show", keys.uri)["contract"] is None
        assert "no contract" in ask("contract", "diff", keys.uri, keys.uri, code=2)["error"]["message"]
        assert ask("contract", "diff", f"{keys.uri}#who", keys.uri, code=2)["error"]
