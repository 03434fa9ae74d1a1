"""What ``weight-sync plan`` asks of this transport: the summary of a schedule, without any hardware.

Owns the way from a file or a preset to a document. Owns no option and no printing (weight_sync.cli.plan).
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from weight_sync.errors import InputError
from weight_sync.transport.rdma.layouts import read_sides, write_file
from weight_sync.transport.rdma.links import Nics
from weight_sync.transport.rdma.model import Calibration, summarise
from weight_sync.transport.rdma.presets import PRESETS, Model, Split, engine_rank, side, trainer_rank
from weight_sync.transport.rdma.schedule import plan
from weight_sync.transport.rdma.side import Side

__all__ = ["describe_plan", "preset_names"]


def preset_names() -> list[str]:
    """Models that can be planned for without a file."""
    return sorted(PRESETS)


def describe_plan(
    *,
    layouts: Path | None = None,
    preset: str | None = None,
    trainers: int | None = None,
    engines: int | None = None,
    nics: int = 8,
    gpus: int = 8,
    gbps: float = 400.0,
    chunk_bytes: int = 8 << 20,
    calibration: Path | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """The summary of the schedule.

    Args:
        layouts, preset: exactly one of them.
        trainers, engines: ranks of a preset, instead of its own.
        nics, gpus: per host, on both sides.
        calibration: what ``weight-sync bench rdma --json`` printed, for the constants of the model.
        save: where to write the preset's layouts.

    Raises InputError, FormatError or LayoutError.
    """
    if (layouts is None) == (preset is None):
        raise InputError("what to plan for", field="--layouts, --preset", found="both" if preset else "neither",
                         expected="one of them", do=f"give a file, or one of {', '.join(preset_names())}")  # fmt: skip
    began = time.perf_counter()
    found = _preset(preset, trainers, engines, save) if layouts is None else read_sides(layouts)
    read = time.perf_counter() - began
    began = time.perf_counter()
    schedule = plan(*found, chunk_bytes=chunk_bytes, nics=(Nics(nics, gpus), Nics(nics, gpus)))
    planned = time.perf_counter() - began
    document = summarise(schedule, gbps, _calibration(calibration))
    document["seconds"] = {"layouts": read, "schedule": planned}
    return document


def _preset(name: str | None, trainers: int | None, engines: int | None, save: Path | None) -> tuple[Side, Side]:
    if name not in PRESETS:
        raise InputError("no such preset", field="--preset", found=name, expected=", ".join(preset_names()))
    model, trainer, engine = PRESETS[name]()
    trainer = trainer if trainers is None else replace(trainer, ranks=trainers)
    engine = engine if engines is None else replace(engine, ranks=engines)
    table = model.table()
    if save is not None:
        write_file(save, ((r, trainer_rank(model, trainer, table, r)) for r in range(trainer.ranks)),
                   ((r, engine_rank(model, engine, table, r)) for r in range(engine.ranks)), _note(name, model))  # fmt: skip
    return _sides(model, trainer, engine)


def _sides(model: Model, trainer: Split, engine: Split) -> tuple[Side, Side]:
    table = model.table()
    return (
        side(trainer.ranks, lambda rank: trainer_rank(model, trainer, table, rank)),
        side(engine.ranks, lambda rank: engine_rank(model, engine, table, rank)),
    )


def _note(name: str, model: Model) -> str:
    return f"preset {name}: {model}"


def _calibration(path: Path | None) -> Calibration:
    if path is None:
        return Calibration()
    try:
        found = json.loads(path.read_text())["model"]
        return Calibration(float(found["share"]), float(found["write_s"]), float(found["fixed_s"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("not a calibration", field=str(path), found=repr(error),
                         do="write one with weight-sync bench rdma --json > FILE") from error  # fmt: skip
