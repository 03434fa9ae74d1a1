"""``weight-sync inspect``: what a store, a shard, a safetensors file or a checkpoint folder holds.

Owns the summaries. Owns no check of a whole store (verify.py).
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.failure import FAULTY
from weight_sync.cli.log import adapter_row
from weight_sync.cli.options import Common, reader
from weight_sync.cli.output import Output, size
from weight_sync.errors import InputError, StoreError, VersionError

if TYPE_CHECKING:
    from weight_sync.config import Config
    from weight_sync.ports import PublisherEnd, ReplicaEnd
    from weight_sync.proto.v1 import manifest_pb2

__all__ = ["inspect"]


def inspect(
    common: Common,
    target: Annotated[str, typer.Argument(metavar="URI|FILE", help="A store, a shard, a safetensors file or folder.")],
    digest: Annotated[
        bool, typer.Option("--digest", help="Of safetensors: compute the digest, which names the version in a log.")
    ] = False,
) -> None:
    """Shows what a store holds, or what is inside a file.

    Of a store: run, epoch, head, views, retained versions, sizes, what each replica serves and leases. Of a shard: its
    index and its frames, each with form, boxes, elements, changes, bits per change, and whether its hash is right. Of
    other safetensors files and folders: the tensors.

        weight-sync inspect /shared/run
        weight-sync inspect fold-3-9.safetensors
        weight-sync inspect path/to/checkpoint --digest
    """
    path = Path(target)
    if "://" not in target and (path.is_file() or any(path.glob("*.safetensors"))):
        from weight_sync.cli import inspect_file

        document = inspect_file.describe(path, common, digest)
        common.out.result(document, lambda: inspect_file.show(common.out, document))
        if not document.get("ok", True):
            raise typer.Exit(FAULTY)
        return
    if path.suffix == ".safetensors" and "://" not in target and not path.exists():
        raise InputError("no such file", field=target, do="name a shard, a safetensors file or folder, or a store")
    config = common.config(target)
    with reader(config) as end:
        document = _store(end, config)
    common.out.result(document, lambda: _show(common.out, document))


def _store(end: ReplicaEnd, config: Config) -> dict[str, Any]:
    from weight_sync.version import EXPIRED, is_version, kind_name

    run_id = end.run_id()
    entries = list(end.entries())
    versions = [entry for entry in entries if is_version(entry.kind)]
    head = versions[-1] if versions else None
    document: dict[str, Any] = {
        "uri": config.uri,
        "run_id": run_id,
        "newest_run": end.newest_run(),
        "epoch": entries[-1].epoch if entries else None,
        "head": head.number if head is not None else None,
        "step": head.step if head is not None and head.HasField("step") else None,
        "entries": dict(Counter(kind_name(entry.kind) for entry in entries)),
        "retained": {
            "versions": len(versions),
            "first": versions[0].number if versions else None,
            "last": versions[-1].number if versions else None,
            "anchors": [entry.number for entry in versions if kind_name(entry.kind) == "ANCHOR"],
            "expired": sum(entry.kind == EXPIRED for entry in entries),
        },
        "bytes": _bytes(versions),
        "views": [_view(view) for view in head.views] if head is not None else [],
        "base": _base(versions),
        "adapter": None if head is None else adapter_row(head),
    }
    return document | _replicas(config, run_id, head)


def _bytes(versions: list[manifest_pb2.VersionManifest]) -> dict[str, int]:
    """Stored bytes of the retained versions by form: step, compact, absolute, raw (full states)."""
    from weight_sync.proto.v1 import common_pb2

    found: Counter[str] = Counter()
    for entry in versions:
        for view in entry.views:
            for ref in view.shards:
                found[common_pb2.Form.Name(ref.form).removeprefix("FORM_").lower()] += ref.size
    return dict(found)


def _view(view: manifest_pb2.ViewManifest) -> dict[str, Any]:
    from weight_sync.codec.digest import Digest
    from weight_sync.tensors import TensorSpec

    specs = [TensorSpec.from_proto(entry.spec) for entry in view.tensors]
    return {
        "name": view.name,
        "scheme": view.scheme,
        "tensors": len(specs),
        "elements": view.elements,
        "bytes": sum(spec.nbytes for spec in specs),
        "dtypes": dict(Counter(spec.dtype for spec in specs)),
        "digest": Digest.from_proto(view.digest).hex(),
    }


def _base(versions: list[manifest_pb2.VersionManifest]) -> dict[str, Any] | None:
    """Where the run's base is, when an anchor names one."""
    for entry in versions:
        if entry.HasField("base"):
            base = {"uri": entry.base.uri, "hf_id": entry.base.hf_id, "hf_revision": entry.base.hf_revision}
            own = {view.name: view.base.uri for view in entry.views if view.HasField("base")}
            return base | ({"views": own} if own else {})
    return None


def _replicas(config: Config, run_id: str, head: manifest_pb2.VersionManifest | None) -> dict[str, Any]:
    """What the replicas said last, and their leases."""
    from weight_sync.ports import OpenedRun
    from weight_sync.registry import open_transport

    writer = open_transport(config).publisher_end(0, 1)
    try:
        writer.attach(OpenedRun(run_id, head.epoch if head is not None else 0, head, False))  # looks, claims nothing
        rows = [_replica(message) for message in writer.acknowledgements()]
        leases, unknown = _leases(writer)
    finally:
        writer.close()
    return {"replicas": rows, "leases": leases, "leases_unknown": unknown}


def _leases(writer: PublisherEnd) -> tuple[dict[str, int], str]:
    """Fresh leases by replica, and why they cannot be told: a store that is read-only has no clock for us."""
    try:
        return dict(writer.leases()), ""
    except (StoreError, VersionError) as error:
        return {}, str(error)


def _replica(message: Any) -> dict[str, Any]:
    from weight_sync.codec.digest import Digest
    from weight_sync.proto.v1 import replica_pb2

    known = message.HasField("version")
    return {
        "replica_id": message.replica_id,
        "version": message.version.number if known else None,
        "view": message.view,
        "state": replica_pb2.ReplicaState.Name(message.state).removeprefix("REPLICA_STATE_"),
        "digest": Digest.from_proto(message.digest).hex() if message.HasField("digest") else None,
        "pause_s": message.timings.pause,
        "error": message.error,
        "age_s": time.time() - message.sent_unix_ms / 1000,
    }


# --- for people ---


def _show(out: Output, document: dict[str, Any]) -> None:
    retained = document["retained"]
    kept = f"{retained['versions']}"
    if retained["versions"]:
        kept += f", {retained['first']} to {retained['last']}; anchors {', '.join(map(str, retained['anchors']))}"
    stored = ", ".join(f"{name} {size(count)}" for name, count in document["bytes"].items())
    pairs = [
        ("store", document["uri"]),
        ("run", document["run_id"]),
        ("epoch", str(document["epoch"])),
        ("head", f"{document['head']}" + ("" if document["step"] is None else f", step {document['step']}")),
        ("entries", ", ".join(f"{count} {kind}" for kind, count in document["entries"].items()) or "none"),
        ("versions", kept),
        ("stored", stored or "nothing"),
    ]
    if document["newest_run"] != document["run_id"]:
        pairs.insert(2, ("newest run", str(document["newest_run"])))
    if document["base"] is not None:
        base = document["base"]
        pairs.append(("base", " ".join(filter(None, (base["uri"], base["hf_id"], base["hf_revision"])))))
    if document["adapter"] is not None:
        of = document["adapter"]["base"]
        what = of["uri"] if of["run_id"] is None else f"version {of['version']} of run {of['run_id']}"
        rank = document["adapter"]["config"].get("r")
        pairs.append(("adapter", f"rank {rank}, of {what}, digest {of['digest']}"))
    for view in document["views"]:
        what = f"{view['tensors']} tensors, {view['elements']} elements, {size(view['bytes'])}"
        pairs.append((f"view {view['name']}", f"{what}, {' '.join(view['dtypes'])}, digest {view['digest']}"))
    out.facts(pairs)
    if document["leases_unknown"]:
        out.note(f"leases are not known: {document['leases_unknown']}")
    _show_replicas(out, document)


def _show_replicas(out: Output, document: dict[str, Any]) -> None:
    leases = dict(document["leases"])
    rows = [
        [row["replica_id"], row["state"], "" if row["version"] is None else str(row["version"]),
         str(leases.pop(row["replica_id"], "")), f"{row['age_s']:.0f} s ago", row["error"]]
        for row in document["replicas"]
    ]  # fmt: skip
    rows += [[name, "", "", str(number), "", ""] for name, number in leases.items()]
    if rows:
        out.table(["replica", "state", ("serves", "right"), ("leases", "right"), "said", "last error"], rows)
