"""``weight-sync bench``: measures the codec, the digest, the inbox, and the density of real updates.

Owns options and printing. Owns no measurement (bench/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from weight_sync.cli.output import Output, share, size
from weight_sync.errors import InputError

if TYPE_CHECKING:
    from weight_sync.bench.codec import CodecRow
    from weight_sync.bench.density import DensityRow
    from weight_sync.bench.digest import DigestRow
    from weight_sync.bench.inbox import InboxRow
    from weight_sync.bench.traces import Trace

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure the codec, the digest, real updates, and transports."
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads, on both sides of each comparison.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds, of which the best counts.")]


@app.command()
def codec(
    json_: Json = False,
    trace: Annotated[
        list[Path] | None, typer.Option(help="Recorded trace (.npz); may be repeated. Default: this checkout's own.")
    ] = None,
    formats: Annotated[
        str, typer.Option(help="bf16, fp16, fp32, fp8, mxfp4; recorded traces are bf16, and quantised to the last two.")
    ] = "bf16",
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
    from weight_sync.bench.quantised import QUANTISED, quantised

    chosen = _words("formats", formats, traces.FORMATS)
    forms = _words("encodings", encodings, ENCODINGS)
    paths = (trace or [path for path in [traces.find_recorded()] if path is not None]) if recorded else []

    def each() -> Iterator[Trace]:
        for name in chosen if standard else ():
            for density in traces.DENSITIES:
                yield traces.standard(name, density, elements or traces.STANDARD_ELEMENTS)
        for path in paths:
            for found in traces.recorded(path):
                yield from ([found] if "bf16" in chosen else [])
                yield from (quantised(found, name) for name in chosen if name in QUANTISED)

    rows = [row for one in each() if one.changed for row in bench_codec(one, forms, threads, rounds)]
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


@app.command()
def inbox(
    json_: Json = False,
    senders: Annotated[str, typer.Option(help="Threads that put at the same time, comma-separated.")] = "1,8",
    batch: Annotated[int, typer.Option(min=1, help="Trajectories of one put.")] = 128,
    count: Annotated[int, typer.Option(min=1, help="Trajectories in all.")] = 20_000,
    tokens: Annotated[int, typer.Option(min=1, help="Output tokens of each.")] = 512,
    folder: Annotated[Path | None, typer.Option(help="Where: the disk decides. Default: the temporary folder.")] = None,
) -> None:
    """Trajectories per second with durable receipts, against a plain file that is synced as often."""
    from weight_sync.bench.inbox import bench_inbox

    threads = [int(word) for word in senders.split(",") if word.strip().isdigit()]
    if not threads or min(threads) < 1 or len(threads) != len(senders.split(",")):
        raise InputError("not numbers of threads", field="--senders", found=senders, expected="1,8")
    _print(Output(json_), [bench_inbox(number, batch, count, tokens, folder) for number in threads], _inbox_table)


@app.command()
def transport(
    json_: Json = False,
    mebibytes: Annotated[int, typer.Option(min=1, help="Size of the object that is copied.")] = 256,
    rounds: Rounds = 5,
    fan: Annotated[
        str, typer.Option(help="Replicas, or replicas/relays, comma-separated; empty: none.")
    ] = "1,200,1/1,10/10,1000/10",
    versions: Annotated[int, typer.Option(min=1, help="Versions of each fan-out.")] = 3,
    link: Annotated[bool, typer.Option(help="Measure a long thin link, where one can be emulated.")] = True,
    full: Annotated[bool, typer.Option("--full", help="Over the link, also a whole state: half a minute.")] = False,
    connections: Annotated[int, typer.Option(min=1, help="Of both sides, over the link.")] = 4,
    rate: Annotated[float, typer.Option(help="Of the link, Mbit/s.")] = 100.0,
    rtt: Annotated[float, typer.Option(help="Of the link, ms.")] = 80.0,
    loss: Annotated[float, typer.Option(help="Of the link, percent of packets.")] = 0.1,
    elements: Annotated[
        int, typer.Option(min=1, help="Of the model behind the link; default: SmolLM2-135M's.")
    ] = 134_515_008,
    density: Annotated[float, typer.Option(help="Share of them that a step changes.")] = 0.005,
) -> None:
    """The gRPC transport: loopback against a plain socket copy, fan-out to simulated replicas, a long thin link.

    The link is emulated between two network namespaces, which needs root and /dev/net/tun. Bare TCP moves the same
    bytes over as many connections, equally warm, in turn with each round.
    """
    from weight_sync.registry import find

    out = Output(json_)
    measure = find("transports", "grpc").benchmarks()
    copy = measure.bench_copy(mebibytes, rounds)
    out.note(f"copy: {copy.grpc_fetch_share_of_socket_copy:.2f} of a socket copy")
    fans = []
    for word in filter(None, fan.split(",")):
        replicas, _, relays = word.partition("/")
        if not (replicas.isdecimal() and (relays or "0").isdecimal()):
            raise InputError("not a fan-out", field="--fan", found=word, expected="200, or 1000/10")
        fans.append(measure.bench_fan(int(replicas), int(relays or 0), versions))
        out.note(f"fan-out {word}: {fans[-1].copies_per_direct_child:.2f} copies per direct child")
    why = measure.why_not() if link else "not asked for"
    rows = [] if why else measure.bench_link(rate, rtt, loss, elements, density, connections, rounds, full=full)
    document = {"copy": copy.to_json(), "fan": [row.to_json() for row in fans], "link": [row.to_json() for row in rows],
                "no_link": why, "grpc_fetch_share_of_socket_copy": copy.grpc_fetch_share_of_socket_copy}  # fmt: skip
    out.result(document, lambda: _transport_tables(out, document))


@app.command()
def rdma(
    json_: Json = False,
    mebibytes: Annotated[int, typer.Option(min=1, help="Bytes of one version.")] = 256,
    rounds: Rounds = 5,
    tensors: Annotated[str, typer.Option(help="Numbers of tensors that they are cut into.")] = "1,4,2000",
) -> None:
    """The rdma backend against bare writes of the same library, between two processes over TCP and shared memory."""
    from weight_sync.registry import find

    if not all(word.isdigit() and int(word) for word in tensors.split(",")):
        raise InputError("not counts", field="--tensors", found=tensors, expected="1,4,2000")
    measure: Any = find("services", "rdma-bench")
    found = measure(mebibytes, rounds, [int(word) for word in tensors.split(",")])
    out = Output(json_)
    out.result(found, lambda: _rdma_table(out, found))


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


def _inbox_table(out: Output, rows: Sequence[InboxRow]) -> None:
    columns = (("senders", "right"), ("batch", "right"), ("bytes", "right"), ("put /s", "right"), ("plain file /s", "right"),
               ("take /s", "right"), ("put CPU us", "right"), ("sync ms", "right"))  # fmt: skip
    cells = [
        (str(row.senders), str(row.batch), str(row.bytes), f"{row.put_per_s:.0f}", f"{row.file_per_s:.0f}",
         f"{row.take_per_s:.0f}", f"{row.put_cpu_us:.0f}", f"{row.sync_ms:.1f}")
        for row in rows
    ]  # fmt: skip
    out.table(columns, cells)
    out.text("put: with durable receipts; plain file: the same bytes and batches, each followed by fdatasync")


def _transport_tables(out: Output, document: dict[str, Any]) -> None:
    copy = document["copy"]
    out.facts([
        ("object", f"{copy['bytes'] >> 20} MiB in chunks of {copy['chunk_bytes'] >> 10} KiB"),
        ("gRPC", f"{copy['grpc_gb_per_s']:.2f} GB/s, {copy['grpc_cpu_s_per_gb']:.2f} CPU s/GB"),
        ("socket copy", f"{copy['socket_gb_per_s']:.2f} GB/s, {copy['socket_cpu_s_per_gb']:.2f} CPU s/GB"),
        ("share", f"{copy['grpc_fetch_share_of_socket_copy']:.2f}"),
    ])  # fmt: skip
    columns = (("replicas", "right"), ("relays", "right"), ("patch", "right"), ("copies per child", "right"),
               ("server CPU s", "right"), ("above idle", "right"), ("seconds to all", "right"))  # fmt: skip
    out.table(columns, [
        (str(row["replicas"]), str(row["relays"]), size(row["patch_bytes"]), f"{row['copies_per_direct_child']:.3f}",
         f"{row['server_cpu_s_per_version']:.3f}", f"{row['server_cpu_s_per_version_above_idle']:.3f}",
         f"{row['seconds_to_all']:.2f}")
        for row in document["fan"]
    ])  # fmt: skip
    if document["no_link"]:
        out.text(f"no link: {document['no_link']}")
        return
    heads = ("what", ("bytes", "right"), ("gRPC s", "right"), ("TCP s", "right"), ("ratio", "right"),
             ("bound s", "right"))  # fmt: skip
    out.table(heads, [(row["what"], size(row["bytes"]), f"{row['grpc_s']:.3f}", f"{row['tcp_s']:.3f}",
                         f"{row['ratio']:.2f}", f"{row['bound_s']:.3f}") for row in document["link"]])  # fmt: skip


def _rdma_table(out: Output, found: dict[str, Any]) -> None:
    columns = (("tensors", "right"), ("GiB/s", "right"), ("bare GiB/s", "right"), ("share", "right"),
               ("of one write", "right"), ("engine CPU", "right"))  # fmt: skip
    cells = [
        (str(row["tensors"]), f"{row['gib_per_s']:.2f}", f"{row['bare_gib_per_s']:.2f}",
         f"{row['share_of_bare_write']:.2f}", f"{row['share_of_one_descriptor']:.2f}", share(row["engine_cpu"]))
        for row in found["rows"]
    ]  # fmt: skip
    out.table(columns, cells)
    pipeline = found["pipeline"]
    out.text(f"pipeline with quantisation, {pipeline['layers']} layers: {pipeline['total_over_slowest_stage']:.2f} of "
             f"its slowest stage")  # fmt: skip


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
