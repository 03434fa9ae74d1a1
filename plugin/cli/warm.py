"""``weight-sync warm``: compiles the kernels ahead of time.

Owns the command. Owns no compiling (weight_sync.warm).
"""

from __future__ import annotations

from typing import Annotated

import typer

from weight_sync.cli.options import Common

__all__ = ["warm"]


def warm(
    common: Common,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compile; each dtype is compiled by one.")] = 2,
) -> None:
    """Compiles the codec's kernels, once per machine, so that the first publish and the first sync do not wait for it.

    They are kept beside the installed sources, or in $NUMBA_CACHE_DIR. Put it into the recipe of an image, or run it
    before a job; without it, each process compiles what it needs when it needs it, which takes a minute or two.

        weight-sync warm
    """
    from weight_sync.warm import warm as compile_all

    out = common.out
    seconds: dict[str, float] = {}
    for name, took in compile_all(workers):
        seconds[name] = round(took, 3)
        out.note(f"{name}: {took:.1f} s")
    out.result({"seconds": seconds}, lambda: out.text(f"compiled for {', '.join(seconds)}"))
