"""``weight-sync publish``: checkpoint folders become versions.

Owns which folder becomes which version. Owns no diff and no store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.log import version_row
from weight_sync.cli.options import Common, reader
from weight_sync.cli.output import Output, printable, seconds, share, size
from weight_sync.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    from weight_sync.checkpoint import Checkpoint
    from weight_sync.config import Config
    from weight_sync.publisher import Publisher

__all__ = ["publish"]

Steps = Annotated[
    list[int] | None,
    typer.Option(metavar="N", help="The trainer's step: once per folder, or that of the first; then it counts on."),
]


def publish(
    common: Common,
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CKPT_DIR...", help="Folders (or files) of safetensors, oldest first.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="URI", help="The store: a folder, file:///path, s3://..., ...")],
    step: Steps = None,
    adapter_base: Annotated[
        str | None,
        typer.Option(metavar="DIR_OR_URI", help="Of LoRA adapters: the base, a checkpoint or a store (URI, URI@N)."),
    ] = None,
) -> None:
    """Publishes checkpoint folders, each as the next version, carrying what changed since the one before.

    In a store without versions the first folder becomes version 0: the base, by reference, so no bytes of it are
    shipped; engines start from it. With --base another folder is version 0. In a store that has versions the run goes
    on: every folder is a next version. Dtypes, shapes and the set of tensors may change on the way.

        weight-sync publish ckpt-0 ckpt-100 ckpt-200 --to /shared/run
        weight-sync publish ckpt-300 --to /shared/run --step 300

    The base's bits, too, for engines that do not have it; and a new run in the same store:

        weight-sync publish ckpt-0 --to s3://bucket/run --set ship_base=always
        weight-sync publish other-0 other-1 --to /shared/run --set fork=true

    Folders that PEFT saved, with adapter_config.json, become versions of an adapter to a named base:

        weight-sync publish adapter-0 adapter-1 --to /shared/lora --adapter-base /shared/run@0

    Memory is that of one state, the base of the next diff; with --set snapshot=file it lies on disk.
    """
    from weight_sync.checkpoint import Checkpoint
    from weight_sync.publisher import Publisher

    config = _with_adapter(common.config(to).replace(overlap=False), checkpoints, adapter_base)
    if not config.views and config.scheme is None:  # a folder that is quantised is published as it is
        config = config.replace(scheme="cast")
    steps = _steps(len(checkpoints), step)
    opened = [Checkpoint(path) for path in checkpoints]  # what is no checkpoint is refused before anything is written
    if first_is_base := config.base is None and config.adapter.base is None and _is_new(config):
        config = config.replace(base=os.fspath(checkpoints[0]))
    done = 0
    try:
        with common.out.progress("publish", "folders") as update, Publisher.open(config) as publisher:
            update(0, len(opened))
            if first_is_base and publisher.version is not None:
                _tell(common.out, _base_row(publisher, opened[0]))
                done = 1
            for checkpoint, number in zip(opened[done:], steps[done:], strict=True):
                update(done, len(opened))
                _tell(common.out, _publish_one(publisher, checkpoint, number))
                done += 1
    except (WeightSyncError, KeyboardInterrupt):
        if 0 < done < len(opened):
            rest = " ".join(str(path) for path in checkpoints[done:])
            common.out.note(f"{done} of {len(opened)} checkpoints are published; still to be published: {rest}")
        raise


def _with_adapter(config: Config, folders: Sequence[Path], base: str | None) -> Config:
    """The configuration, for adapters when the folders are PEFT's. Raises ConfigError for some that are and some not."""
    from weight_sync.adapter import ADAPTER_CONFIG

    adapters = [folder for folder in folders if (folder / ADAPTER_CONFIG).is_file()]
    if base is not None:
        config = config.replace(adapter={**config.adapter.model_dump(), "base": base})
    if not adapters and config.adapter.base is None:
        return config
    if len(adapters) < len(folders):
        other = next(folder for folder in folders if folder not in adapters)
        raise ConfigError("not an adapter", field=os.fspath(other), expected=f"{ADAPTER_CONFIG} in each folder",
                          do="publish adapters and models to uris of their own")  # fmt: skip
    if config.adapter.base is None:
        raise ConfigError("an adapter needs a base", field="--adapter-base", found=None,
                          do="name the checkpoint, or the store and version, that it was trained on")  # fmt: skip
    return config


def _steps(count: int, given: Sequence[int] | None) -> list[int | None]:
    if not given:
        return [None] * count
    if len(given) == 1:
        return [given[0] + k for k in range(count)]
    if len(given) != count:
        raise ConfigError("steps and folders do not match", field="--step", found=len(given), expected=f"1 or {count}")
    return list(given)


def _is_new(config: Config) -> bool:
    """True when the store has no version that the first folder could continue."""
    if config.fork:
        return True
    with reader(config) as end:
        return end.head() is None


def _publish_one(publisher: Publisher, checkpoint: Checkpoint, step: int | None) -> dict[str, Any]:
    from weight_sync.checkpoint import mapped_tensors

    source = printable(os.fspath(checkpoint.path))
    offered: Any = mapped_tensors(checkpoint) if publisher.config.adapter.base is None else checkpoint.path
    report = publisher.publish(offered, step, {"checkpoint": source}, cast=False)
    assert report is not None  # nothing overlaps here
    return {
        "checkpoint": source,
        "run_id": report.run_id,
        "number": report.version,
        "kind": report.kind,
        "step": report.step,
        "elements": report.elements,
        "changed": report.changed,
        "density": report.density,
        "bytes": report.patch_bytes + report.anchor_bytes,
        "bits_per_changed": report.bits_per_changed,
        "digest": report.digest,
        "seconds": dict(report.seconds),
        "reason": report.reason,
    }


def _base_row(publisher: Publisher, checkpoint: Checkpoint) -> dict[str, Any]:
    number = publisher.version
    assert number is not None  # the caller has looked
    with reader(publisher.config.replace(run_id=publisher.run_id)) as end:
        row = version_row(end.manifest(number))
    return {
        "checkpoint": printable(os.fspath(checkpoint.path)),
        "run_id": publisher.run_id,
        **{key: row[key] for key in ("number", "kind", "step", "elements", "changed", "density", "bytes")},
        "bits_per_changed": 0.0,
        "digest": row["views"][publisher.config.published[0].name],
        "seconds": {},
        "reason": "the base of a new run, " + ("with its bits" if row["bytes"] else "by reference"),
    }


def _tell(out: Output, row: dict[str, Any]) -> None:
    def show() -> None:
        what = f"{row['changed']} of {row['elements']} elements changed ({share(row['density'])}), {size(row['bytes'])}"
        if row["changed"]:
            what += f", {row['bits_per_changed']:.2f} bits per change"
        if row["seconds"]:
            what += f", {seconds(row['seconds']['total'])}"
        out.text(f"{row['checkpoint']}: version {row['number']}, {row['kind']}: {row['reason'] or what}")

    out.result(row, show)
