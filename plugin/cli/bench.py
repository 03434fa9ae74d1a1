"""``weight-sync bench``: measures the codec, the digest, and the density of real updates.

Owns options and printing. Owns no measurement (bench/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from weight_sync.cli.output import Output, share
from weight_sync.errors import InputError

if TYPE_CHECKING:
    from weight_sync.bench.codec import CodecRow
    from weight_sync.bench.density import DensityRow
    from weight_sync.bench.digest import DigestRow
    from weight_sync.bench.traces import Trace

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure the codec, the digest, and real updates.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads, on both sides of each comparison.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds, of which the best counts.")]


@app.command()
def codec(
    json_: Json = False,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Recorded trace (.npz); may be repeated. Default: this checkout's own.")
    ] = None,
    formats: Annotated[str, typer.Option(help="Of the standard traces: bf16, fp16, fp32, fp8.")] = "bf16",
    encodings: Annotated[str, typer.Option(help="step, compact, absolute.")] = "step,compact,absolute",
    threads: Threads = 1,
    rounds: Rounds = 5,
    standard: Annotated[bool, typer.Option(help="Measure the standard traces.")] = True,
    recorded: Annotated[bool, typer.Option(help="Measure recorded traces.")] = True,
    elements: Annotated[int | None, typer.Option(min=1, hidden=True)] = None,
) -> None:
    """Sizes and speed of patches against XOR + zstd-1 + xxh3, on standard and recorded traces."""
    from weight_sync.bench import traces
    from weight_sync.bench.codec import ENCODINGS, bench_codec

    chosen = _words("formats", formats, traces.FORMATS) if standard else []
    forms = _words("encodings", encodings, ENCODINGS)
    paths = (trace or [path for path in [traces.find_recorded()] if path is not None]) if recorded else []

    def each() -> Iterator[Trace]:
        for name in chosen:
            for density in traces.DENSITIES:
                yield traces.standard(name, density, elements or traces.STANDARD_ELEMENTS)
        for path in paths:
            yield from traces.recorded(path)

    rows = [row for one in each() for row in bench_codec(one, forms, threads, rounds)]
    _print(Output(json_), rows, _codec_table)


@app.command()
def digest(
    json_: Json = False,
    dtypes: Annotated[str, typer.Option(help="Safetensors spellings.")] = "BF16,F32,F8_E4M3,I64",
    mebibytes: Annotated[int, typer.Option(min=1, help="Size of the model.")] = 128,
    threads: Threads = 1,
    rounds: Rounds = 7,
) -> None:
    """Speed of a full recomputation against memcpy, and the cost of an incremental update."""
    from weight_sync.bench.digest import bench_digest
    from weight_sync.dtypes import DTYPES

    rows = [bench_digest(name, mebibytes << 20, threads, rounds) for name in _words("dtypes", dtypes, DTYPES)]
    _print(Output(json_), rows, _digest_table)


@app.command()
def density(
    json_: Json = False,
    optimizer: Annotated[str, typer.Option(help="adam, or muon for the hidden matrices.")] = "adam",
    objective: Annotated[str, typer.Option(help="grpo or sft.")] = "grpo",
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 10,
    model: Annotated[Path | None, typer.Option(help="Checkpoint folder. Default: the quick start's model.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate after a warm-up of three steps.")] = 1e-6,
    seed: Annotated[int, typer.Option(help="Of masters, exercises and sampling.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows into this picture (.png, .svg, .pdf).")] = None,
    tiny: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Density, distances in ulp and bits per change of real training steps."""
    from weight_sync.bench.density import bench_density, check_plot, plot_density
    from weight_sync.bench.train import Trainer, find_model, load_model, tiny_model

    out = Output(json_)
    if plot is not None:
        check_plot()
    loaded = tiny_model(seed) if tiny else load_model(model or find_model())
    trainer = Trainer(*loaded, optimizer, objective, lr, seed)
    rows: list[DensityRow] = []
    for row in bench_density(trainer, steps):
        rows.append(row)
        out.note(
            f"step {row.step}: {share(row.density)} changed, {row.seconds:.0f} s, loss {row.loss:.4f}"
            + ("" if row.reward is None else f", reward {row.reward:.3f}")
        )
    if plot is not None:
        plot_density(rows, plot)
    _print(out, rows, _density_table)


# --- printing -----------------------------------------------------------------------------------------------------


class _Row(Protocol):
    def to_json(self) -> dict[str, Any]: ...


def _print(out: Output, rows: Sequence[Any], table: Callable[[Output, Any], None]) -> None:
    documents: list[_Row] = list(rows)
    out.result({"rows": [row.to_json() for row in documents]}, lambda: table(out, rows))


def _words(option: str, text: str, known: Sequence[str] | dict[str, Any]) -> list[str]:
    """Comma-separated words, each of them known. Raises InputError."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in known:
            raise InputError("unknown word", field=f"--{option}", found=word, expected=", ".join(known))
    return words


def _codec_table(out: Output, rows: Sequence[CodecRow]) -> None:
    columns = ("trace", "format", ("density", "right"), "encoding", ("bits", "right"), ("bound", "right"),
               ("XOR+zstd", "right"), ("encode GB/s", "right"), ("x", "right"), ("of memcpy", "right"),
               ("decode GB/s", "right"), ("x", "right"), ("of memcpy", "right"))  # fmt: skip
    cells = [
        (row.trace, row.format, share(row.density), row.encoding, f"{row.bits_per_changed:.2f}",
         f"{row.entropy_bound_bits:.2f}", f"{row.baseline_bits_per_changed:.2f}", f"{row.encode_gb_per_cpu_s:.2f}",
         f"{row.encode_ratio:.1f}", f"{row.encode_share_of_memcpy:.2f}", f"{row.decode_gb_per_cpu_s:.2f}",
         f"{row.decode_ratio:.1f}", f"{row.decode_share_of_memcpy:.2f}")
        for row in rows
    ]  # fmt: skip
    out.table(columns, cells)
    out.text("bits: per changed element, whole object; GB/s: of model per CPU-second; x: against XOR + zstd-1 + xxh3")


def _digest_table(out: Output, rows: Sequence[DigestRow]) -> None:
    columns = ("dtype", ("digest GB/s", "right"), ("memcpy GB/s", "right"), ("share", "right"), ("update ns", "right"),
               ("4x model", "right"), ("and 4x changes", "right"))  # fmt: skip
    cells = [
        (row.dtype, f"{row.digest_gb_per_cpu_s:.2f}", f"{row.memcpy_gb_per_s:.2f}", f"{row.share_of_memcpy:.2f}",
         f"{row.update_ns_per_changed:.1f}", f"{row.update_ns_per_changed_large_model:.1f}",
         f"{row.update_ns_per_changed_many:.1f}")
        for row in rows
    ]  # fmt: skip
    out.table(columns, cells)
    out.text("GB/s: per CPU-second, the digest's over both lanes; update: per changed element, written and digested")


def _density_table(out: Output, rows: Sequence[DensityRow]) -> None:
    names = list(rows[0].ulp)
    columns = (("step", "right"), ("density", "right"), ("hidden", "right"), *((f"{n} ulp", "right") for n in names),
               ("sign flips", "right"), ("step bits", "right"), ("bound", "right"), ("compact bits", "right"),
               ("bound", "right"))  # fmt: skip
    cells = [
        (str(row.step), share(row.density), share(row.density_hidden), *(share(row.ulp[n]) for n in names),
         share(row.sign_flips), _bits(row.step_bits), f"{row.step_bound_bits:.2f}", _bits(row.compact_bits),
         f"{row.compact_bound_bits:.2f}")
        for row in rows
    ]  # fmt: skip
    title = f"{rows[0].objective}, {rows[0].optimizer}, lr {rows[0].lr:g}, {rows[0].elements} elements"
    out.table(columns, cells, title)


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    app()
