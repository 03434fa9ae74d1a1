"""``weight-sync contract``: how the sides of a run compute, where they differ, and which switches a profile needs.

Owns the spelling of a side and the shape of the answers. Owns no rule (contract/) and no switch (adapters).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common, command, reader
from weight_sync.cli.output import Output
from weight_sync.errors import ConfigError, InputError, VersionMissingError

if TYPE_CHECKING:
    from weight_sync.config import Config
    from weight_sync.proto.v1 import contract_pb2, manifest_pb2

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="How trainer and engines compute, and where they differ.")

_FILES = (".json", ".yaml", ".yml")
Side = typer.Argument(metavar="URI|FILE", help="A store or server, or a document as --json prints it.")


def show(common: Common, source: Annotated[str, Side]) -> None:
    """Shows the trainer's contract, what it asks of engines, and how the engines that follow compute.

    Of a store or a server: the newest version's, and what replicas presented. Of a file: the contract in it, checked.

        weight-sync contract show /shared/run
        weight-sync contract show grpc://trainer:50071 --json | jq '.engines[].differences'
        weight-sync contract show mine.yaml
    """
    from weight_sync.contract import document

    path = Path(source)
    if _is_file(source):
        found: dict[str, Any] = {"contract": document(_read(path))}
    else:
        found = _of_run(common.config(source))
    common.out.result(found, lambda: _show(common.out, found))


def diff(
    common: Common,
    a: Annotated[str, typer.Argument(metavar="A", help="FILE, URI (its trainer), or URI#REPLICA_ID.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; compared with A.")],
) -> None:
    """Lists the fields in which two contracts differ.

    Exits with 0 whether they differ or not; `equal` tells.

        weight-sync contract diff /shared/run /shared/run#engine-7
        weight-sync contract diff yesterday.json /shared/run --json
    """
    from weight_sync.contract import compare, contract_id

    left, right = _side(common, a), _side(common, b)
    rows = [{"field": name, "a": x, "b": y} for name, x, y in compare(left, right)]
    found = {"a": contract_id(left), "b": contract_id(right), "equal": not rows, "fields": rows}
    common.out.result(found, lambda: _show_rows(common.out, rows))


def switches(
    common: Common,
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="vllm, sglang, transformers, or torch: a trainer.")],
    profile: Annotated[str, typer.Option(help="native, deterministic or unified.")] = "deterministic",
) -> None:
    """Prints what to start an engine with, for a profile.

    Variables of its environment, and options of its command line.

        weight-sync contract switches vllm
        weight-sync contract switches sglang --profile deterministic --json
    """
    from weight_sync.contract.terms import PROFILES
    from weight_sync.registry import find

    if profile not in PROFILES:
        raise ConfigError("no such profile", field="--profile", found=profile, expected=", ".join(PROFILES))
    ask: Any = find("services", "switches")
    given = ask(profile, engine)
    found = {"environment": dict(given.environment), "options": list(given.options)}
    lines = [*(f"export {name}={value}" for name, value in given.environment.items()), *given.options]
    common.out.result(found, lambda: _show_lines(common.out, lines))


# --- reading ---


def _is_file(source: str) -> bool:
    path = Path(source)
    return path.suffix in _FILES and (path.is_file() or "://" not in source)


def _read(path: Path) -> contract_pb2.ExecutionContract:
    from weight_sync.contract import from_document
    from weight_sync.yamlfile import read_yaml

    data = read_yaml(path)
    if isinstance(data, dict) and isinstance(data.get("contract"), dict):
        data = data["contract"]  # what show --json prints
    if not isinstance(data, dict):
        raise ConfigError("not a contract", field=str(path), found=type(data).__name__, expected="field: value lines")
    return from_document(data, str(path))


def _head(config: Config) -> manifest_pb2.VersionManifest:
    with reader(config) as end:
        head = end.head()
        if head is None:
            raise VersionMissingError("the run has no version yet", field="version", found="head", do="publish one")
        return end.manifest(head)


def _engines(config: Config, run_id: str) -> dict[str, contract_pb2.ExecutionContract]:
    """By replica, of those that have told."""
    from weight_sync.ports import OpenedRun
    from weight_sync.registry import open_transport

    writer = open_transport(config).publisher_end(0, 1)
    try:
        writer.attach(OpenedRun(run_id, 0, None, False))  # looks, claims nothing
        told = writer.acknowledgements()
    finally:
        writer.close()
    return {ack.replica_id: ack.contract for ack in told if ack.contract.id}


def _side(common: Common, text: str) -> contract_pb2.ExecutionContract:
    if _is_file(text):
        return _read(Path(text))
    uri, _, replica = text.partition("#")
    config = common.config(uri)
    manifest = _head(config)
    if not replica:
        if not manifest.HasField("contract"):
            raise InputError("the trainer has published no contract", field=uri,
                             do="open the publisher with execution=, or use a trainer adapter")  # fmt: skip
        return manifest.contract
    engines = _engines(config, manifest.run_id)
    if replica not in engines:
        raise InputError("no contract of this replica is known", field=text, expected=", ".join(sorted(engines)))
    return engines[replica]


def _of_run(config: Config) -> dict[str, Any]:
    from weight_sync.contract import differences, document
    from weight_sync.proto.v1 import contract_pb2

    manifest = _head(config)
    terms = manifest.terms
    rows = []
    for replica, contract in sorted(_engines(config, manifest.run_id).items()):
        found = [{"field": d.field, "found": d.found, "expected": d.expected} for d in differences(terms, contract)]
        rows.append({"replica_id": replica, "contract": document(contract), "differences": found})
    return {
        "run_id": manifest.run_id,
        "version": manifest.number,
        "contract": document(manifest.contract) if manifest.HasField("contract") else None,
        "profile": terms.profile or "native",
        "enforce": contract_pb2.Enforcement.Name(terms.enforce).removeprefix("ENFORCEMENT_").lower(),
        "terms": [
            {"field": term.field, "at_most": term.at_most} if term.HasField("at_most")
            else {"field": term.field, "one_of": list(term.one_of)}
            for term in terms.terms
        ],
        "engines": rows,
    }  # fmt: skip


# --- for people ---


def _show(out: Output, found: dict[str, Any]) -> None:
    if "version" in found:
        out.text(f"run {found['run_id']}, version {found['version']}")
    if found["contract"] is None:
        out.text("the trainer has published no contract")
    else:
        out.facts(_facts(found["contract"]))
    if found.get("terms"):
        out.text()
        out.text(f"engines must be like this (profile {found['profile']}, enforce {found['enforce']}):")
        out.facts([(row["field"], f"at most {row['at_most']:g}" if "at_most" in row else " or ".join(row["one_of"]))
                   for row in found["terms"]])  # fmt: skip
    for row in found.get("engines", ()):
        out.text()
        out.text(f"{row['replica_id']}  {row['contract']['id']}")
        for one in row["differences"]:
            was = "not known" if one["found"] is None else one["found"]
            out.text(f"  {one['field']} is {was}, asked for is {one['expected']}")


def _show_lines(out: Output, lines: list[str]) -> None:
    for line in lines:
        out.text(line)


def _facts(contract: dict[str, Any]) -> list[tuple[str, str]]:
    from weight_sync.contract import facts, from_document

    return [("id", contract["id"]), *facts(from_document(contract)).items()]


def _show_rows(out: Output, rows: list[dict[str, Any]]) -> None:
    if not rows:
        out.text("equal")
        return
    out.table(["field", "A", "B"], [[row["field"], row["a"] or "not known", row["b"] or "not known"] for row in rows])


for function in (show, diff, switches):
    app.command()(command(function))
