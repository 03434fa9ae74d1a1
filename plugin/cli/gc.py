"""``weight-sync gc``: deletes what no retained version and no lease needs.

Owns the command. Owns no rule (version.py) and no deletion (the transport).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common, Uri, reader
from weight_sync.cli.output import Output, size

if TYPE_CHECKING:
    from weight_sync.config import Config

__all__ = ["gc"]


def gc(
    common: Common,
    uri: Uri,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Newest versions to keep; default: the key keep_versions.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell which versions would go; delete nothing.")] = False,
) -> None:
    """Collects: all but the newest N versions expire, unless a lease or a kept version needs them.

    Safe beside a live trainer and live engines. Also sweeps what crashed writers left. The numbers of expired versions
    stay taken, and `weight-sync log --all` still tells about them.

        weight-sync gc /shared/run --keep 20 --dry-run
        weight-sync gc /shared/run --keep 20
    """
    config = common.config(uri, **({} if keep is None else {"keep_versions": keep}))
    if dry_run:
        document = _plan(config)
        common.out.result(document, lambda: _show_plan(common.out, document))
        return
    from weight_sync.registry import open_transport

    end = open_transport(config).publisher_end(0, 1)
    try:
        counts = dict(end.collect())
    finally:
        end.close()
    common.out.result({"dry_run": False, **counts}, lambda: _show(common.out, counts))


def _plan(config: Config) -> dict[str, Any]:
    """What a collection would do now."""
    from weight_sync.registry import open_transport
    from weight_sync.version import Entry, is_version, kept

    with reader(config) as end:
        run_id = end.run_id()
        manifests = list(end.entries())
    entries = [Entry.of(entry) for entry in manifests]
    sizes = {entry.number: sum(ref.size for view in entry.views for ref in view.shards) for entry in manifests}
    writer = open_transport(config).publisher_end(0, 1)
    try:
        leases = dict(writer.leases())
    finally:
        writer.close()
    reasons = kept(entries, config.keep_versions, leases.values())
    expire = [entry.number for entry in entries if is_version(entry.kind) and entry.number not in reasons]
    return {
        "dry_run": True,
        "run_id": run_id,
        "expire": expire,
        "bytes": sum(sizes[number] for number in expire),
        "keep": {str(number): reasons[number] for number in sorted(reasons)},
        "leases": leases,
    }


def _show_plan(out: Output, document: dict[str, Any]) -> None:
    expire = document["expire"]
    out.text(f"would expire {len(expire)} versions, {size(document['bytes'])}: {', '.join(map(str, expire)) or 'none'}")
    out.table([("kept", "right"), "because"], [(number, why) for number, why in document["keep"].items()])


def _show(out: Output, counts: dict[str, int]) -> None:
    rows = [(name, size(count) if name == "bytes" else str(count)) for name, count in counts.items()]
    out.facts([(name.replace("_", " "), value) for name, value in rows])
