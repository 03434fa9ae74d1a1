"""``weight-sync sidecar``: an HTTP proxy that keeps one engine at the run's versions and tells clients which.

Owns options and what is told. Owns no proxy: it is found by name, like the engine, since the core imports no adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common, backend_of, pairs
from weight_sync.cli.output import Output, seconds

if TYPE_CHECKING:
    from weight_sync.config import Config
    from weight_sync.replica import SyncReport

__all__ = ["sidecar"]

_BASES = ("view", "run_id", "base", "replica_id")

Adapters = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=URI", help="A LoRA adapter that requests name as their model; may be repeated."),
]
Drain = Annotated[float, typer.Option(min=0, metavar="S", help="How long requests in flight may hold up a version.")]
AfterDrain = Annotated[str, typer.Option(metavar="MODE", help="What happens to those that take longer: abort or keep.")]


def sidecar(
    common: Common,
    engine: Annotated[str, typer.Option(metavar="NAME", help="The kind of engine: vllm, sglang, ...")],
    engine_url: Annotated[
        list[str], typer.Option(metavar="URL", help="Where the engine listens; given again: a group, one version.")
    ],
    from_: Annotated[str, typer.Option("--from", metavar="URI", help="The store: a folder, s3://bucket/prefix, ...")],
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where clients connect: HOST:PORT, or unix:PATH.")
    ] = "127.0.0.1:9000",
    adapter: Adapters = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on other than loopback addresses; nobody is authenticated.")
    ] = False,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    drain: Drain = 30.0,
    after_drain: AfterDrain = "abort",
    wait: Annotated[
        float, typer.Option(min=0, metavar="S", help="How long a request waits for the end of a fence.")
    ] = 30.0,
    body_limit: Annotated[int, typer.Option(min=1, metavar="BYTES", help="Largest body of a request.")] = 64 << 20,
    watch: Annotated[float, typer.Option(min=0.01, metavar="S", help="Between two looks at the engine.")] = 1.0,
    watch_timeout: Annotated[
        float, typer.Option(min=0.01, metavar="S", help="An engine that does not answer for so long hangs.")
    ] = 15.0,
) -> None:
    """Serves an engine's API on another port, at the run's versions: each answer says which version made it.

    Several engines make a group: all take a version or none does, and requests go to the one with the fewest in flight.
    Requests may demand a version, {"weight_version": {"min": 7}} in the body or X-Weight-Version-Min: 7, and get 409
    when it cannot be had. /weight_sync/status tells what is served, /readyz whether; /metrics is for Prometheus. Routes
    of the engine that change weights are not forwarded. Ends at Ctrl-C or SIGTERM, once requests in flight are done.

        weight-sync sidecar --engine vllm --engine-url http://127.0.0.1:8000 --from s3://bucket/run
        weight-sync sidecar --engine vllm --engine-url http://127.0.0.1:8000 --from /shared/run \\
            --listen unix:/run/engine.sock --set pause=keep

    With --adapter, the engine loads each version of a LoRA adapter by its own API, and requests for the model NAME are
    answered at a version of that adapter. It must be for the version of the base that the engine serves.

        weight-sync sidecar --engine vllm --engine-url http://127.0.0.1:8000 --from /shared/base \
            --adapter tutor=/shared/lora
    """
    from weight_sync.registry import find

    serve: Any = find("services", "sidecar")
    out = common.out

    def listening(address: str) -> None:
        out.result({"listening": address}, lambda: out.text(f"listening at {address}"))

    serve(
        find("engines", engine), common.config(from_), listening,
        lambda report: _tell(out, report), lambda error: out.note(f"trying again: {error}"),
        adapters={name: _config_of(common, uri) for name, uri in pairs("--adapter", adapter or ()).items()},
        engine_url=tuple(engine_url), listen=listen, insecure=insecure, tls_cert=tls_cert, tls_key=tls_key, drain_s=drain,
        after_drain=after_drain, wait_s=wait, body_limit=body_limit, watch_s=watch, watch_timeout_s=watch_timeout,
    )  # fmt: skip


def _config_of(common: Common, uri: str) -> Config:
    """Of an adapter's run: what belongs to the base's alone is left out."""
    plain = Common(common.file, {k: v for k, v in common.keys.items() if k not in _BASES}, common.store_options)
    return plain.config(uri, pause="wait", backend=backend_of(uri), **dict.fromkeys(_BASES))


def _tell(out: Output, report: SyncReport) -> None:
    row = {
        "run_id": report.run_id,
        "version": report.version,
        "previous": report.previous,
        "staleness": report.staleness,
        "path": report.path,
        "digest": report.digest,
        "seconds": dict(report.seconds),
        "ack_error": report.ack_error,
    }
    took = f"{seconds(report.seconds['total'])}, paused {seconds(report.pause_s)}"
    out.result(row, lambda: out.text(f"version {report.version} ({report.path}), {took}"))
    if report.ack_error:
        out.note(f"the trainer could not be told: {report.ack_error}")
