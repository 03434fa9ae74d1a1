"""``weight-sync log``: the entries of a run.

Owns the shape of its JSON, which programs rely on. Owns no rule of the log.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common, Uri, reader
from weight_sync.cli.output import Column, Output, share, size
from weight_sync.errors import VersionMissingError

if TYPE_CHECKING:
    from weight_sync.proto.v1 import manifest_pb2

__all__ = ["adapter_row", "log", "version_row"]


def log(
    common: Common,
    uri: Uri,
    all_entries: Annotated[
        bool, typer.Option("--all", help="List EPOCH, ABORTED and EXPIRED entries, too, each with its reason.")
    ] = False,
) -> None:
    """Lists the versions of a run: number, epoch, kind, parent, stored bytes, density, digest per view.

    weight-sync log /shared/run
    weight-sync log s3://bucket/run --option region=eu-west-1 --all
    weight-sync log /shared/run --json | jq '.versions[-1].number'
    """
    from weight_sync.version import is_version

    config = common.config(uri)
    with reader(config) as end:
        run_id = end.run_id()
        entries = list(end.entries())
    wanted = common.keys.get("view")
    known = {view.name for entry in entries for view in entry.views}
    if wanted is not None and known and wanted not in known:
        raise VersionMissingError("no version has such a view", field="view", found=wanted, expected=sorted(known))
    versions = [version_row(entry, wanted) for entry in entries if is_version(entry.kind)]
    document: dict[str, Any] = {"run_id": run_id, "versions": versions}
    if all_entries:
        document["entries"] = [_entry_row(entry) for entry in entries if not is_version(entry.kind)]
    common.out.result(document, lambda: _show(common.out, document))


def version_row(entry: manifest_pb2.VersionManifest, view: str | None = None) -> dict[str, Any]:
    """One version as JSON; counts of all its views, or of one.

    ``bytes`` are those stored for it, all forms. ``density`` is changed elements over all elements.
    """
    from weight_sync.codec.digest import Digest
    from weight_sync.proto.v1 import common_pb2
    from weight_sync.version import kind_name

    views = [part for part in entry.views if view is None or part.name == view]
    refs = [ref for part in views for ref in part.shards]
    elements, changed = sum(part.elements for part in views), sum(part.changed for part in views)
    full = sum(ref.size for ref in refs if ref.form == common_pb2.FORM_RAW)
    return {
        "number": entry.number,
        "epoch": entry.epoch,
        "kind": kind_name(entry.kind),
        "parent": entry.parent if entry.HasField("parent") else None,
        "step": entry.step if entry.HasField("step") else None,
        "bytes": sum(ref.size for ref in refs),
        "anchor_bytes": full,
        "elements": elements,
        "changed": changed,
        "density": changed / elements if elements else 0.0,
        "views": {part.name: Digest.from_proto(part.digest).hex() for part in views},
        "created_unix_ms": entry.created_unix_ms,
        "writer": entry.writer,
        "metadata": dict(entry.metadata),
        "adapter": adapter_row(entry),
    }


def adapter_row(entry: manifest_pb2.VersionManifest) -> dict[str, Any] | None:
    """Which base a version adapts, and PEFT's configuration; None for a whole model."""
    if not entry.HasField("adapter"):
        return None
    import json

    from weight_sync.adapter import base_facts

    return {"base": base_facts(entry.adapter), "config": json.loads(entry.adapter.config)}


def _entry_row(entry: manifest_pb2.VersionManifest) -> dict[str, Any]:
    from weight_sync.version import kind_name

    return {
        "number": entry.number,
        "epoch": entry.epoch,
        "kind": kind_name(entry.kind),
        "reason": entry.reason,
        "created_unix_ms": entry.created_unix_ms,
        "writer": entry.writer,
    }


def _when(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _show(out: Output, document: dict[str, Any]) -> None:
    rows = [(row["number"], _version_cells(row)) for row in document["versions"]]
    for row in document.get("entries", ()):
        cells = [str(row["number"]), "", str(row["epoch"]), row["kind"], "", _when(row["created_unix_ms"])]
        rows.append((row["number"], [*cells, "", "", row["reason"]]))
    columns: list[Column] = [
        ("number", "right"), ("step", "right"), ("epoch", "right"), "kind", ("parent", "right"), "written (UTC)",
        ("stored", "right"), ("density", "right"), "digest",
    ]  # fmt: skip
    out.text(f"run {document['run_id']}")
    out.table(columns, [cells for _, cells in sorted(rows)])


def _version_cells(row: dict[str, Any]) -> list[str]:
    def text(value: int | None) -> str:
        return "" if value is None else str(value)

    only = len(row["views"]) == 1
    digests = "  ".join(digest if only else f"{name} {digest}" for name, digest in row["views"].items())
    return [text(row["number"]), text(row["step"]), text(row["epoch"]), row["kind"], text(row["parent"]),
            _when(row["created_unix_ms"]), size(row["bytes"]), share(row["density"]), digests]  # fmt: skip
