"""``weight-sync verify``: is everything in a store what it should be?

Owns the command and its answer. Owns no check (checks.py, replay.py).
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.failure import FAULTY
from weight_sync.cli.options import Common, Uri, reader
from weight_sync.cli.output import Output, size
from weight_sync.errors import VersionMissingError

if TYPE_CHECKING:
    from weight_sync.cli.checks import Findings
    from weight_sync.config import Config
    from weight_sync.history import History
    from weight_sync.ports import ReplicaEnd
    from weight_sync.proto.v1 import manifest_pb2

__all__ = ["verify"]


def verify(
    common: Common,
    uri: Uri,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read everything: hash all objects, decode all frames, rebuild all states.")
    ] = False,
) -> None:
    """Checks a run, goes on after a fault, and names the object and the version of each. Changes nothing.

    Always: the log has no holes and each entry may follow the one before; manifests parse and their sums are right;
    every object is there with the right size, and its head has the right hash. With --deep also: the hash of every
    object; every frame decodes; every version's whole state, rebuilt from the anchors, has its digest. That needs disk
    space for one state in $TMPDIR. Exits with 3 when there are faults.

        weight-sync verify /shared/run
        weight-sync verify s3://bucket/run --deep --json
    """
    from weight_sync.cli.checks import Findings, check_log

    config = common.config(uri)
    findings = Findings()
    with reader(config) as end:
        run_id = end.run_id()
        versions = check_log(end, findings)
        names = sorted({view.name for entry in versions for view in entry.views})
        wanted = common.keys.get("view")
        views = names if wanted is None else [name for name in names if name == wanted]
        if wanted is not None and names and not views:
            raise VersionMissingError("no version has such a view", field="view", found=wanted, expected=names)
        histories = [_history(end, config, name) for name in views]
        _check(common.out, histories, versions, findings)
        if deep:
            _check_deep(common.out, end, histories, versions, findings)
    document: dict[str, Any] = {
        "run_id": run_id,
        "ok": not findings.faults,
        "deep": deep,
        "versions": findings.versions,
        "objects": findings.objects,
        "bytes": findings.bytes,
        "replayed": findings.replayed,
        "faults": [asdict(fault) for fault in findings.faults],
        "notes": findings.notes,
    }
    common.out.result(document, lambda: _show(common.out, findings, deep))
    if findings.faults:
        raise typer.Exit(FAULTY)


def _history(end: ReplicaEnd, config: Config, view: str) -> History:
    from weight_sync.history import History

    return History(end, view, config.threads, config.base)


def _check(
    out: Output, histories: list[History], versions: list[manifest_pb2.VersionManifest], findings: Findings
) -> None:
    from weight_sync.cli.checks import check_version

    with out.progress("manifests and heads", "versions") as update:
        for done, entry in enumerate(versions):
            for history in histories:
                for view in entry.views:
                    if view.name == history.view:
                        check_version(history, entry, view, findings)
            update(done + 1, len(versions))


def _check_deep(
    out: Output,
    end: ReplicaEnd,
    histories: list[History],
    versions: list[manifest_pb2.VersionManifest],
    findings: Findings,
) -> None:
    from weight_sync.cli.checks import check_objects
    from weight_sync.cli.replay import replay

    with out.progress("hashes") as update:
        check_objects(end, versions, findings, update)
    for history in histories:
        with out.progress(f"states of {history.view}", "versions") as update:
            replay(history, versions, findings, update)


def _show(out: Output, findings: Findings, deep: bool) -> None:
    for fault in findings.faults:
        out.text(str(fault))
    for note in findings.notes:
        out.text(f"note: {note}")
    what = f"{findings.versions} versions, {findings.objects} objects, {size(findings.bytes)}"
    if deep:
        what += f", {sum(map(len, findings.replayed.values()))} states rebuilt"
    well = "all is well" if deep else "all is well as far as sizes and heads tell; --deep reads the contents"
    out.text(f"{what}: {f'{len(findings.faults)} faults' if findings.faults else well}")
