"""``weight-sync materialize``: one version as a checkpoint folder.

Owns the command. Owns no folder (mirror.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weight_sync.cli.options import Common, Uri, history_of, reader, version_number

__all__ = ["materialize"]


def materialize(
    common: Common,
    uri: Uri,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to make; absent or empty.")],
    version: Annotated[str, typer.Option(metavar="N", help="Number of the version, or head.")] = "head",
) -> None:
    """Writes one version as a Hugging Face checkpoint: safetensors, and the base's configuration and tokenizer.

    The bits are read back and their digest is compared before DIR appears. Any version from the oldest one that
    `weight-sync log` lists can be had.

        weight-sync materialize /shared/run --out ckpt
        weight-sync materialize s3://bucket/run --version 12 --out ckpt-12 --base base
    """
    from weight_sync import mirror

    config = common.config(uri)
    with reader(config) as end, common.out.progress("write") as update:
        kept = mirror.materialize(history_of(end, config), version_number(end, version), out, update)
    found = {"run_id": kept.run_id, "number": kept.number, "view": kept.view, "digest": kept.digest.hex()}
    common.out.result(
        {**found, "out": str(out)}, lambda: common.out.text(f"{out}: version {kept.number}, digest {kept.digest}")
    )
