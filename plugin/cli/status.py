"""``weight-sync status``: a fleet, live: replicas, versions, staleness, state, throughput, last error.

Owns the command and the shape of its JSON. Owns no fleet: what is told comes from the transport's ends.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common, Uri, reader
from weight_sync.cli.output import Output, size

if TYPE_CHECKING:
    from weight_sync.config import Config
    from weight_sync.ports import PublisherEnd, ReplicaEnd

__all__ = ["status"]


def status(
    common: Common,
    uri: Uri,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until Ctrl-C; with --json one document a time.")
    ] = False,
    every: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds between two looks of --watch.")] = 1.0,
) -> None:
    """Shows who follows a run, and how well: each replica's version, how far it is behind, its state and last error.

    Works on a store and on a server. A relay is one row, with the replicas behind it summed up; ask the relay itself
    for theirs.

        weight-sync status grpc://localhost:50071
        weight-sync status grpcs://trainer.example:50071 --watch --set auth.token_file=token
        weight-sync status /shared/run --json | jq '.replicas[].staleness'
    """
    from weight_sync.registry import open_transport

    config = common.config(uri)
    with reader(config) as end:
        writer = open_transport(config).publisher_end(0, 1)
        try:
            while True:
                document = _fleet(end, writer, config)
                if watch and not common.out.json and sys.stdout.isatty():
                    common.out.text("\x1b[2J\x1b[H")
                common.out.result(document, lambda: _show(common.out, document))  # noqa: B023
                if not watch:
                    break
                time.sleep(every)
        finally:
            writer.close()


def _fleet(end: ReplicaEnd, writer: PublisherEnd, config: Config) -> dict[str, Any]:
    from weight_sync.ports import OpenedRun

    run_id = end.run_id()
    head = end.head()
    writer.attach(OpenedRun(run_id, 0, None, False))  # looks, claims nothing
    acknowledgements = writer.acknowledgements()
    leases = dict(writer.leases())
    rows = [_row(message, head, leases.pop(message.replica_id, None)) for message in acknowledgements]
    rows += [_silent(name, number, head) for name, number in leases.items()]
    behind = [row["staleness"] for row in rows if row["staleness"] is not None and not row["gone"]]
    return {
        "uri": config.uri,
        "run_id": run_id,
        "head": head,
        "replicas": sorted(rows, key=lambda row: str(row["replica_id"])),
        "most_stale": max(behind, default=None),
    }


def _row(message: Any, head: int | None, leased: int | None) -> dict[str, Any]:
    """A replica that has said something. One without a lease is gone: a replica keeps its version while it lives."""
    from weight_sync.proto.v1 import replica_pb2

    number = message.version.number if message.HasField("version") else None
    times = message.timings
    return {
        "replica_id": message.replica_id,
        "version": number,
        "staleness": None if number is None or head is None else max(0, head - number),
        "state": _state(replica_pb2, message.state),
        "gone": leased is None or message.state == replica_pb2.REPLICA_STATE_CLOSED,
        "view": message.view,
        "leased": leased,
        "fetched_bytes": message.fetched_bytes,
        "bytes_per_s": message.fetched_bytes / times.fetch if times.fetch > 0 and message.fetched_bytes else None,
        "seconds": {name: getattr(times, name) for name in ("fetch", "decode", "pause", "apply", "verify")},
        "error": message.error,
        "age_s": time.time() - message.sent_unix_ms / 1000,
        "followers": [
            {"version": group.version.number if group.HasField("version") else None, "count": group.count,
             "state": _state(replica_pb2, group.state), "error": group.error}
            for group in message.followers
        ],
    }  # fmt: skip


def _silent(replica_id: str, number: int, head: int | None) -> dict[str, Any]:
    """A replica that holds a lease and has said nothing."""
    return {"replica_id": replica_id, "version": None, "staleness": None, "state": "UNSPECIFIED", "gone": False, "view": "",
            "leased": number, "fetched_bytes": 0, "bytes_per_s": None, "seconds": {}, "error": "", "age_s": None,
            "followers": []}  # fmt: skip


def _state(replica_pb2: Any, state: int) -> str:
    known = state in replica_pb2.ReplicaState.values()
    return replica_pb2.ReplicaState.Name(state).removeprefix("REPLICA_STATE_") if known else str(state)


def _show(out: Output, document: dict[str, Any]) -> None:
    head = document["head"]
    out.text(f"run {document['run_id']}, head {'none' if head is None else head}, {len(document['replicas'])} replicas")
    rows = []
    for row in document["replicas"]:
        rate = "" if row["bytes_per_s"] is None else f"{size(row['bytes_per_s'])}/s"
        behind = "" if row["staleness"] is None else str(row["staleness"])
        said = "" if row["age_s"] is None else f"{row['age_s']:.0f} s ago"
        number = "" if row["version"] is None else str(row["version"])
        state = f"{row['state']}, gone" if row["gone"] and row["state"] != "CLOSED" else row["state"]
        rows.append([row["replica_id"], state, number, behind, rate, said, row["error"]])
        for group in row["followers"]:
            number = "none" if group["version"] is None else str(group["version"])
            behind = "" if group["version"] is None or head is None else str(max(0, head - group["version"]))
            rows.append([f"  {group['count']} behind it", group["state"], number, behind, "", "", group["error"]])
    if rows:
        out.table(["replica", "state", ("version", "right"), ("behind", "right"), ("read at", "right"), "said",
                   "last error"], rows)  # fmt: skip
