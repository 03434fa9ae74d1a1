"""``weight-sync publish``: checkpoint folders become versions.

Owns which folder becomes which version, and the mapping of a checkpoint's bits to tensors. Owns no diff and no store.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.log import version_row
from weight_sync.cli.options import Common, reader
from weight_sync.cli.output import Output, printable, seconds, share, size
from weight_sync.errors import ConfigError, WeightSyncError

if TYPE_CHECKING:
    import torch

    from weight_sync.checkpoint import Checkpoint
    from weight_sync.config import Config
    from weight_sync.publisher import Publisher

__all__ = ["mapped_tensors", "publish"]


def publish(
    common: Common,
    checkpoints: Annotated[
        list[Path], typer.Argument(metavar="CKPT_DIR...", help="Folders (or files) of safetensors, oldest first.")
    ],
    to: Annotated[str, typer.Option("--to", metavar="URI", help="The store: a folder, file:///path, s3://..., ...")],
    step: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="The trainer's step: once per folder, or that of the first; then it counts on."),
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

    Memory is that of one state, the base of the next diff; with --set snapshot=file it lies on disk.
    """
    from weight_sync.checkpoint import Checkpoint
    from weight_sync.publisher import Publisher

    config = common.config(to).replace(overlap=False)
    if not config.views and config.scheme is None:  # a folder that is quantised is published as it is
        config = config.replace(scheme="cast")
    steps = _steps(len(checkpoints), step)
    opened = [Checkpoint(path) for path in checkpoints]  # what is no checkpoint is refused before anything is written
    if config.base is None and _is_new(config):
        config = config.replace(base=os.fspath(checkpoints[0]))
        first_is_base = True
    else:
        first_is_base = False
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


def mapped_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by name: the mapped bits seen as torch's dtypes, not copied and not to be written to.

    Raises TensorError for a dtype that torch does not have.
    """
    import torch

    named: dict[str, torch.Tensor] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nothing here writes
        for spec in checkpoint.table:
            bits = checkpoint.bits(spec.name)
            flat = torch.from_numpy(bits.view("u1" if spec.type.width == 1 else f"i{spec.type.width}"))
            shape = spec.shape
            if spec.type.bits < 8:  # torch counts bytes, safetensors counts codes
                shape = (*shape[:-1], shape[-1] * spec.type.bits // 8)
            named[spec.name] = flat.view(spec.type.torch).reshape(shape)
    return named


def _publish_one(publisher: Publisher, checkpoint: Checkpoint, step: int | None) -> dict[str, Any]:
    source = printable(os.fspath(checkpoint.path))
    report = publisher.publish(mapped_tensors(checkpoint), step, {"checkpoint": source}, cast=False)
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
