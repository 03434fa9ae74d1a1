"""``weight-sync fold``: consecutive patches as one.

Owns the command and the writing of the shard file. Owns no merge (codec/fold.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common, Uri, history_of, reader
from weight_sync.cli.output import Output, share, size
from weight_sync.errors import InputError, VersionMissingError

if TYPE_CHECKING:
    from weight_sync.history import History
    from weight_sync.ports import ShardBytes

__all__ = ["fold"]


def fold(
    common: Common,
    uri: Uri,
    start: Annotated[int, typer.Argument(metavar="A", min=0, help="The version that a reader holds.")],
    stop: Annotated[int, typer.Argument(metavar="B", min=0, help="The version that it wants.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the fold as a shard file.")] = None,
) -> None:
    """Folds the patches after version A up to version B into one, without weights; tells what that saves.

    Elements that changed several times count once, those that came back not at all. Replicas do the same on the fly
    when they catch up. The file is a shard in step form that leads from A to B; `weight-sync inspect` opens it.

        weight-sync fold /shared/run 3 9
        weight-sync fold /shared/run 3 9 --out fold-3-9.safetensors
    """
    from weight_sync.codec.frame import encode_changes
    from weight_sync.codec.shard import build_shard, identity
    from weight_sync.history import table_of, view_of
    from weight_sync.proto.v1 import common_pb2

    config = common.config(uri)
    with reader(config) as end, common.out.progress(f"fold {start} to {stop}") as update:
        history = history_of(end, config, update)
        chain = patches_between(history, start, stop)
        manifest = history.manifest(stop)
        view = view_of(manifest, config.view)
        changes, whole = history.fold(chain, table_of(view))
        step = common_pb2.FORM_STEP
        shard = build_shard(f"fold-{view.name}", identity(manifest.run_id, stop, 0, view.name, step),
                            list(encode_changes(changes)), list(whole.values()))  # fmt: skip
        stored = sum(_patch_bytes(history, number) for number in chain)
    if out is not None:
        _write(out, shard)
    changed = sum(len(item.positions) for item in changes)
    document = {
        "run_id": manifest.run_id,
        "from": start,
        "to": stop,
        "view": view.name,
        "versions": chain,
        "changed": changed,
        "whole_tensors": sorted(whole),
        "patches_bytes": stored,
        "patches_changed": sum(_changed(history, number) for number in chain),
        "fold_bytes": shard.size,
        "ratio": shard.size / stored if stored else None,
        "out": None if out is None else str(out),
    }
    common.out.result(document, lambda: _show(common.out, document))


def patches_between(history: History, start: int, stop: int) -> list[int]:
    """The versions whose patches lead from ``start`` to ``stop``, ascending.

    Raises InputError when the order is wrong, VersionMissingError when no patches lead there.
    """
    if start >= stop:
        raise InputError("nothing to fold", field="A, B", found=(start, stop), expected="A below B")
    history.manifest(start)
    chain: list[int] = []
    number = stop
    while number > start:
        manifest = history.manifest(number)
        if not manifest.HasField("parent"):
            raise VersionMissingError(f"version {number} is a full state without a patch", field="B", found=stop,
                                      do=f"fold from {number} on")  # fmt: skip
        chain.append(number)
        number = manifest.parent
    if number != start:
        raise VersionMissingError("no patch starts from this version", field="A", found=start,
                                  expected=f"{number}, or a later one on the way to {stop}")  # fmt: skip
    return chain[::-1]


def _patch_bytes(history: History, number: int) -> int:
    """Stored bytes of one version's patch in the form that folds."""
    from weight_sync.history import view_of
    from weight_sync.proto.v1 import common_pb2

    refs = view_of(history.manifest(number), history.view).shards
    return sum(ref.size for ref in refs if ref.form not in (common_pb2.FORM_RAW, common_pb2.FORM_COMPACT))


def _changed(history: History, number: int) -> int:
    from weight_sync.history import view_of

    return int(view_of(history.manifest(number), history.view).changed)


def _write(target: Path, shard: ShardBytes) -> None:
    """Writes beside the target and renames. Raises InputError when that cannot be done."""
    making = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with making.open("wb") as stream:
            for part in (shard.head, *shard.body):
                stream.write(part)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(making, target)
    except OSError as error:
        raise InputError("cannot write the shard", field=str(target), found=error.strerror) from error
    finally:
        making.unlink(missing_ok=True)


def _show(out: Output, document: dict[str, Any]) -> None:
    ratio = document["ratio"]
    out.facts([
        ("patches", str(len(document["versions"]))),
        ("together", f"{document['patches_changed']} changes, {size(document['patches_bytes'])}"),
        ("folded", f"{document['changed']} changes, {size(document['fold_bytes'])}"
                   + ("" if ratio is None else f", {share(ratio)} of that")),
    ])  # fmt: skip
    if document["whole_tensors"]:
        out.text(f"{len(document['whole_tensors'])} tensors travel whole: they appeared or changed dtype or shape")
    if document["out"] is not None:
        out.text(f"written to {document['out']}")
