"""``weight-sync forecast``: how dense updates of a checkpoint will be, beside what a run measured.

Owns the command, its table and its picture. Owns no model (forecast.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common, reader
from weight_sync.cli.output import Output, share
from weight_sync.errors import InputError

if TYPE_CHECKING:
    from weight_sync.forecast import Forecast

__all__ = ["forecast"]

_LAST = 10  # versions whose density is averaged


def forecast(
    common: Common,
    checkpoint: Annotated[Path, typer.Argument(metavar="CKPT", help="Unquantised checkpoint: folder or file.")],
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-6,
    format: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp8, mxfp4, nvfp4, int4.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="adam or muon: how large one update is.")] = "adam",
    rms: Annotated[
        float | None, typer.Option(help="RMS of one update in units of lr, instead of the optimizer's.")
    ] = None,
    measured: Annotated[str | None, typer.Option(metavar="URI", help="A store to compare with.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw push against floor (.png, .svg, .pdf).")
    ] = None,
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Kinds to list; --json has all.")] = 15,
) -> None:
    """Predicts which share of the elements a step changes, from weight magnitudes and the optimizer's step.

    A weight moves when an update is large against its rounding floor, half an ulp of the served format. Updates are
    taken as normal with the optimizer's RMS after warm-up; in the first steps Adam's is about 0.95 (--rms).

        weight-sync forecast model --lr 1e-6 --format fp8
        weight-sync forecast model --lr 1e-6 --measured /shared/run --plot floor.png
    """
    from weight_sync import forecast as model
    from weight_sync.checkpoint import Checkpoint

    if plot is not None:
        from weight_sync.cli.plot import check

        check(plot)
    if optimizer not in model.OPTIMIZERS:
        raise InputError(
            "unknown optimizer", field="--optimizer", found=optimizer, expected=", ".join(model.OPTIMIZERS)
        )
    size = model.OPTIMIZERS[optimizer] if rms is None else rms
    with common.out.progress("forecast", "tensors") as update:
        found = list(model.forecast(Checkpoint(checkpoint), lr, format, size, update))
    if not found:
        raise InputError("no float tensors", field="CKPT", found=str(checkpoint), expected="an unquantised checkpoint")
    seen = None if measured is None else _measured(common, measured)
    document = _document(found, lr, format, optimizer, size, seen)
    if plot is not None:
        _draw(found, document, plot)
        document["plot"] = str(plot)
    common.out.result(document, lambda: _show(common.out, document, top))


def _measured(common: Common, uri: str) -> dict[str, Any]:
    """Mean density of the newest versions of a run that changed anything."""
    from weight_sync.history import view_of
    from weight_sync.version import is_version

    config = common.config(uri)
    with reader(config) as end:
        versions = [entry for entry in end.entries() if is_version(entry.kind) and entry.HasField("parent")]
        views = [(entry.number, view_of(entry, config.view)) for entry in versions]
    some = [(number, view) for number, view in views if view.changed][-_LAST:]
    if not some:
        raise InputError("the run has no version with changes", field="--measured", found=uri, do="publish one")
    densities = [view.changed / view.elements for _, view in some]
    return {"uri": uri, "view": some[-1][1].name, "scheme": some[-1][1].scheme, "versions": [n for n, _ in some],
            "density": sum(densities) / len(densities)}  # fmt: skip


def _document(found: Sequence[Forecast], lr: float, format: str, optimizer: str, rms: float,
              measured: dict[str, Any] | None) -> dict[str, Any]:  # fmt: skip
    from weight_sync.compare import kind_of

    elements = sum(one.spec.elements for one in found)
    kinds: dict[str, list[Forecast]] = {}
    for one in found:
        kinds.setdefault(kind_of(one.spec.name), []).append(one)
    rows = []
    for kind, some in kinds.items():
        size = sum(one.spec.elements for one in some)
        rows.append({
            "kind": kind, "tensors": len(some), "elements": size, "format": some[0].format,
            "floor": sum(one.floor * one.spec.elements for one in some) / size,
            "density": sum(one.density * one.spec.elements for one in some) / size,
        })  # fmt: skip
    return {
        "format": format, "optimizer": optimizer, "lr": lr, "rms": rms, "push": lr * rms, "elements": elements,
        "density": sum(one.density * one.spec.elements for one in found) / elements,
        "measured": measured,
        "kinds": sorted(rows, key=lambda row: -row["density"] * row["elements"]),
    }  # fmt: skip


def _show(out: Output, document: dict[str, Any], top: int) -> None:
    measured = document["measured"]
    out.facts([
        ("push", f"{document['push']:.3g} (lr {document['lr']:g}, RMS {document['rms']:g} of {document['optimizer']})"),
        ("forecast", f"{share(document['density'])} of {document['elements']} elements change in a step of {document['format']}"),
        *([] if measured is None else [("measured", f"{share(measured['density'])}: view {measured['view']}, "
                                                    f"{len(measured['versions'])} versions")]),
    ])  # fmt: skip
    rows = [[row["kind"], row["format"], str(row["elements"]), f"{row['floor']:.3g}", share(row["density"])]
            for row in document["kinds"][:top]]  # fmt: skip
    if rows:
        out.table(["kind", "format", ("elements", "right"), ("floor", "right"), ("density", "right")], rows)


def _draw(found: Sequence[Forecast], document: dict[str, Any], target: Path) -> None:
    """How many elements have which floor, and where the push is. Raises InputError when it cannot be written."""
    import numpy as np
    from matplotlib.figure import Figure

    from weight_sync.forecast import FLOOR_BINS

    total = np.sum([one.floors for one in found], axis=0)
    used = [k for k, count in enumerate(total) if count]
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    bins = FLOOR_BINS[used[0] : used[-1] + 1]
    axes.bar(bins + 0.5, 100 * total[used[0] : used[-1] + 1] / document["elements"], width=0.9, label="elements")
    for value, label, style in ((document["push"], "push (RMS)", "-"), (document["lr"], "step bound (lr)", ":")):
        axes.axvline(_log2(value), color="tab:red", linestyle=style, label=label)
    axes.set(xlabel="log2 of the floor (half an ulp)", ylabel="elements, %",
             title=f"{document['format']}: {100 * document['density']:.3g} % change in a step")  # fmt: skip
    axes.legend()
    try:
        figure.savefig(target, dpi=150)
    except OSError as error:
        raise InputError("cannot write the picture", field=str(target), found=error.strerror) from error


def _log2(value: float) -> float:
    from math import log2

    return log2(value)
