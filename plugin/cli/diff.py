"""``weight-sync diff``: what differs between two checkpoints, or two versions.

Owns the spelling of its two sides and of the result. Owns no statistic (compare.py).
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common, history_of, reader, version_number
from weight_sync.cli.output import Output, share
from weight_sync.errors import ConfigError, InputError

if TYPE_CHECKING:
    from weight_sync.checkpoint import Checkpoint
    from weight_sync.compare import Comparison, Counts

__all__ = ["diff"]

_VERSION = re.compile(r"(?P<uri>.+)@(?P<number>\d+|head)")


def diff(
    common: Common,
    a: Annotated[str, typer.Argument(metavar="A", help="Folder or file of safetensors, or URI@N, or URI@head.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same; compared with A.")],
    top: Annotated[int, typer.Option(min=0, metavar="N", help="Tensors and kinds to list; --json has all.")] = 15,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the steps and the densities (.png, .svg, .pdf).")
    ] = None,
    tmp: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where versions of a store are unpacked; default: $TMPDIR.")
    ] = None,
) -> None:
    """Compares two checkpoints bit by bit: density, steps in ulp, sign flips, zeros that changed sign, NaN.

    A step is the distance on the dtype's ordered line, so 1 is one ulp. Kinds are names with the numbers of
    layers and experts replaced by *. Exits with 0 whether they differ or not; `equal` tells.

        weight-sync diff ckpt-100 ckpt-200
        weight-sync diff /shared/run@3 /shared/run@head --plot steps.png
        weight-sync diff base-model /shared/run@head --json | jq .density
    """
    from weight_sync.compare import compare

    if plot is not None:
        from weight_sync.cli.plot import check

        check(plot)
    threads = common.config("").threads
    with ExitStack() as stack:
        left = stack.enter_context(_side(common, a, tmp))
        right = stack.enter_context(_side(common, b, tmp))
        with common.out.progress("compare") as update:
            found = compare(left, right, threads, update)
    document = _document(a, b, found)
    if plot is not None:
        from weight_sync.cli.plot import draw

        draw(found, f"{a} to {b}", plot)
        document["plot"] = str(plot)
    common.out.result(document, lambda: _show(common.out, document, top))


@contextmanager
def _side(common: Common, text: str, tmp: Path | None) -> Iterator[Checkpoint]:
    """A checkpoint as it lies there, or a version unpacked for the time of the block."""
    from weight_sync.checkpoint import Checkpoint
    from weight_sync.mirror import materialize

    match = _VERSION.fullmatch(text)
    if Path(text).exists() or match is None:
        if "://" in text:
            raise ConfigError("a store is compared at a version", field="A, B", found=text, expected=f"{text}@N")
        yield Checkpoint(text)
        return
    if tmp is not None and not tmp.is_dir():
        raise InputError("no such folder", field="--tmp", found=str(tmp))
    config = common.config(match["uri"])
    with tempfile.TemporaryDirectory(prefix="weight_sync-diff-", dir=tmp) as folder, reader(config) as end:
        with common.out.progress(f"unpack {text}") as update:
            number = version_number(end, match["number"])
            materialize(history_of(end, config), number, Path(folder) / "version", update)
        yield Checkpoint(Path(folder) / "version")


# --- JSON ---


def _document(a: str, b: str, found: Comparison) -> dict[str, Any]:
    return {
        "a": a,
        "b": b,
        "equal": found.equal,
        **_counts(found.total),
        "tensors": [
            {"name": tensor.spec.name, "dtype": tensor.spec.dtype, "shape": list(tensor.spec.shape),
             "status": tensor.status, **_counts(tensor.counts)}
            for tensor in found.tensors
        ],
        "kinds": [{"kind": kind.kind, "tensors": kind.tensors, **_counts(kind.counts)} for kind in found.kinds()],
        "added": [tensor.spec.name for tensor in found.tensors if tensor.status == "added"],
        "removed": [spec.name for spec in found.removed],
        "respecified": [tensor.spec.name for tensor in found.tensors if tensor.status == "respecified"],
    }  # fmt: skip


def _counts(counts: Counts) -> dict[str, Any]:
    from weight_sync.compare import step_bins

    return {
        "elements": counts.elements,
        "changed": counts.changed,
        "density": counts.density,
        "sign_flips": counts.sign_flips,
        "zero_swaps": counts.zero_swaps,
        "nan_a": counts.nan_a,
        "nan_b": counts.nan_b,
        "largest_step": counts.largest_step,
        "steps": [
            {"from": low, "to": high, "count": int(count)}
            for (low, high), count in zip(step_bins(), counts.steps, strict=True)
            if count
        ],
    }


# --- for people ---


def _show(out: Output, document: dict[str, Any], top: int) -> None:
    if document["equal"]:
        out.text(f"equal: {document['elements']} elements in {len(document['tensors'])} tensors, bit for bit")
        return
    stepped = sum(row["count"] for row in document["steps"])
    out.facts([
        ("changed", f"{document['changed']} of {document['elements']} elements, {share(document['density'])}"),
        ("sign flips", f"{document['sign_flips']}"),
        ("0.0 / -0.0 swaps", f"{document['zero_swaps']}"),
        ("NaN", f"{document['nan_a']} in A, {document['nan_b']} in B"),
        *((name, _names(document[name])) for name in ("added", "removed", "respecified") if document[name]),
    ])  # fmt: skip
    if stepped:
        rows = [[_range(row), str(row["count"]), share(row["count"] / stepped)] for row in document["steps"]]
        out.table([("step (ulp)", "right"), ("elements", "right"), ("share", "right")], rows)
    numbers = [("elements", "right"), ("changed", "right"), ("density", "right"), ("largest step", "right")]

    def cells(row: dict[str, Any]) -> list[str]:
        return [str(row["elements"]), str(row["changed"]), share(row["density"]), str(row["largest_step"])]

    kinds = [[row["kind"], str(row["tensors"]), *cells(row)] for row in document["kinds"]]
    _table(out, ["kind", ("tensors", "right"), *numbers], kinds, top)
    changed = sorted((row for row in document["tensors"] if row["status"] != "same"), key=lambda row: -row["density"])
    _table(out, ["tensor", "status", *numbers], [[row["name"], row["status"], *cells(row)] for row in changed], top)


def _range(row: dict[str, Any]) -> str:
    return str(row["from"]) if row["from"] == row["to"] else f"{row['from']} to {row['to']}"


def _names(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)}: {', '.join(names[:5])}{more}"


def _table(out: Output, columns: list[Any], rows: list[list[str]], top: int) -> None:
    if rows and top:
        out.table(columns, rows[:top])
        if len(rows) > top:
            out.text(f"... and {len(rows) - top} more (--top, or --json for all)")
