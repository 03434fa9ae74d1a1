"""``weight-sync plan``: what writing a version into engines will cost, before there is any hardware.

Owns options, table and picture. Owns no schedule: the planner is found by name, since the core imports no transport.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common
from weight_sync.cli.output import seconds, size

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["plan"]


def plan(
    common: Common,
    layouts: Annotated[Path | None, typer.Option(metavar="FILE", help="Layouts of all ranks (.json or .pb).")] = None,
    preset: Annotated[
        str | None, typer.Option(metavar="NAME", help="A synthetic model instead: kimi-k2-like, llama-70b-like, ...")
    ] = None,
    trainers: Annotated[int | None, typer.Option(min=1, help="Trainer ranks of the preset.")] = None,
    engines: Annotated[int | None, typer.Option(min=1, help="Engine ranks of the preset.")] = None,
    nics: Annotated[int, typer.Option(min=1, help="NICs per host.")] = 8,
    gpus: Annotated[int, typer.Option(min=1, help="Ranks per host.")] = 8,
    gbps: Annotated[float, typer.Option(min=0.001, help="Rate of one NIC, 10^9 bits per second.")] = 400.0,
    chunk: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Largest write.")] = 8 << 20,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What weight-sync bench rdma --json printed, for the model.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the preset's layouts (.json for people, else protobuf).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the links' loads (.png, .svg, .pdf).")] = None,
) -> None:
    """Plans who writes what into whose memory, and tells how long it takes: the rdma backend without any hardware.

    Layouts come from a file that real ranks wrote (docs/rdma.md) or from a preset. The same layouts give the same
    schedule, and the same hash, everywhere.

        weight-sync plan --preset kimi-k2-like --nics 8 --gbps 400
        weight-sync plan --layouts layouts.pb --nics 1 --gbps 100 --plot links.png
        weight-sync plan --preset llama-70b-like --trainers 32 --save layouts.json
    """
    from weight_sync.registry import find

    if plot is not None:
        from weight_sync.cli.plot import check

        check(plot)
    describe: Any = find("services", "rdma-plan")
    found = describe(layouts=layouts, preset=preset, trainers=trainers, engines=engines, nics=nics, gpus=gpus,
                     gbps=gbps, chunk_bytes=chunk, calibration=calibration, save=save)  # fmt: skip
    if plot is not None:
        _draw(found, plot)
    common.out.result(found, lambda: common.out.facts(_facts(found)))


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    busiest, pairs, memory = found["busiest_link"], found["pairs"], found["memory"]
    top = pairs["top"][0] if pairs["top"] else None
    return [
        ("ranks", f"{found['trainer_ranks']} trainer, {found['engine_ranks']} engine"),
        ("moved", f"{size(found['bytes'])} of {found['tensors']} tensors in {found['writes']} writes, "
                  f"the largest {size(found['largest_write'])}"),
        ("mesh groups", str(found["mesh_groups"])),
        ("pairs", f"{pairs['count']}; {size(pairs['smallest'])} to {size(pairs['largest'])}"
                  + ("" if top is None else f", most from trainer {top['trainer']} to engine {top['engine']}")),
        ("busiest link", f"{busiest['side']} {busiest['link']}: {size(busiest['bytes'])}, {busiest['writes']} writes"),
        ("imbalance", f"{found['imbalance']['trainer']:.3f} sending, {found['imbalance']['engine']:.3f} receiving"),
        ("expected", f"{seconds(found['expected_seconds'])} at {found['model']['gbps']:g} Gb/s per NIC, "
                     f"{size(found['bytes_per_second'])}/s in all"),
        ("memory", f"{size(memory['engine_shadow'])} per engine rank with commit: shadow, none with direct"),
        ("planned in", f"{seconds(found['seconds']['schedule'])}, layouts {seconds(found['seconds']['layouts'])}"),
        ("hash", found["hash"]),
    ]  # fmt: skip


def _draw(found: Mapping[str, Any], target: Path) -> None:
    """Bytes per link, both sides. Raises InputError when the picture cannot be written."""
    from matplotlib.figure import Figure  # without pyplot: no window, no global state

    from weight_sync.errors import InputError

    figure = Figure(figsize=(12, 5), layout="constrained")
    figure.suptitle(f"{size(found['bytes'])}, expected {seconds(found['expected_seconds'])}")
    for axes, name in zip(figure.subplots(1, 2), ("trainer", "engine"), strict=True):
        loads = found["links"][name]
        axes.bar(range(len(loads)), [load / 2**30 for load in loads], width=1.0)
        axes.set(xlabel=f"{name} link", ylabel="GiB", title=f"imbalance {found['imbalance'][name]:.3f}")
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise InputError("cannot write the picture", field=str(target), found=error.strerror) from error
