"""``weight-sync serve`` and ``weight-sync relay``: servers of a store, and of another server.

Owns the commands and their end by a signal. Owns no serving (the grpc transport, found by name).
"""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weight_sync.cli.options import Common

if TYPE_CHECKING:
    from weight_sync.config import Config

__all__ = ["relay", "serve"]

_Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 lets the system choose.")]
_Cert = Annotated[str | None, typer.Option(metavar="FILE", help="Certificate chain of this server, PEM.")]
_Key = Annotated[str | None, typer.Option(metavar="FILE", help="Its private key, PEM.")]
_ClientCa = Annotated[
    str | None, typer.Option(metavar="FILE", help="Demand client certificates of this issuer: mutual TLS.")
]
_Insecure = Annotated[bool, typer.Option("--insecure", help="Listen in the open, in a network that you trust.")]
_Metrics = Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where to show Prometheus metrics.")]


def serve(
    common: Common,
    store: Annotated[str, typer.Option(metavar="URI", help="The store to serve: a folder, s3://bucket/prefix, ...")],
    listen: _Listen = "127.0.0.1:50071",
    cert: _Cert = None,
    key: _Key = None,
    client_ca: _ClientCa = None,
    insecure: _Insecure = False,
    metrics: _Metrics = None,
) -> None:
    """Serves a store over gRPC, so that engines in other places follow it and the trainer's process owns no socket.

    Engines, relays and every command that takes a URI use grpc://HOST:PORT, or grpcs:// with a certificate. Tokens
    are in the configuration file (auth.tokens). An address that other machines reach is refused without TLS and
    tokens, or --insecure. Ends at Ctrl-C or SIGTERM.

        weight-sync serve --store /shared/run
        weight-sync serve --store s3://bucket/run --listen 0.0.0.0:50071 --cert server.pem --key server.key \\
            --config tokens.yaml
    """
    keys = _server_keys(common, listen, cert, key, client_ca, insecure, metrics)
    _run(common, common.config(_uri(listen, cert), store=store, **keys), "server")


def relay(
    common: Common,
    source: Annotated[str, typer.Option("--from", metavar="URI", help="The server to relay: grpcs://host:port.")],
    listen: _Listen = "127.0.0.1:50071",
    cache: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the cache and of trajectories on their way.")
    ] = None,
    mirror: Annotated[
        str | None, typer.Option(metavar="DIR", help="Keep a copy of the weights here, and take the compact form.")
    ] = None,
    cert: _Cert = None,
    key: _Key = None,
    client_ca: _ClientCa = None,
    insecure: _Insecure = False,
    metrics: _Metrics = None,
) -> None:
    """Serves a site: fetches each byte once from another server, and serves it to any number of engines.

    Engines of the site use this relay's address. To the server it is one replica, which acknowledges the oldest version
    that its engines serve; their trajectories are kept in the cache folder until the trainer has them, so give a
    folder that survives a restart. With --mirror it keeps a copy of the weights: where the run stores the compact form
    (forms: [step, compact]) a version crosses the link a third smaller, and the site is served the step form.

        weight-sync relay --from grpcs://trainer.example:50071 --listen 0.0.0.0:50071 --cache /nvme/relay \\
            --cert site.pem --key site.key --config tokens.yaml
    """
    keys = _server_keys(common, listen, cert, key, client_ca, insecure, metrics)
    keys["listen"] = _uri(listen, cert)
    if cache is not None:
        keys["cache_dir"] = cache
    if mirror is not None:
        keys["mirror"] = mirror
    _run(common, common.config(source, **keys), "relay")


def _uri(listen: str, cert: str | None) -> str:
    return listen if "://" in listen else f"{'grpc' if cert is None else 'grpcs'}://{listen}"


def _server_keys(
    common: Common, listen: str, cert: str | None, key: str | None, client_ca: str | None, insecure: bool,
    metrics: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Configuration keys of the options that were given; the file's own ``tls`` stays where they say nothing."""
    keys: dict[str, Any] = {"backend": "grpc", "listen": None}
    given = {"cert": cert, "key": key, "client_ca": client_ca}
    if any(value is not None for value in given.values()):
        before = common.config("").tls.model_dump() if common.file is not None else {}
        keys["tls"] = {**before, **{name: value for name, value in given.items() if value is not None}}
    if insecure:
        keys["insecure"] = True
    if metrics is not None:
        keys["metrics"] = metrics
    return keys


def _run(common: Common, config: Config, kind: str) -> None:
    from weight_sync.registry import find

    transport = find("transports", "grpc")(config)
    server = transport.relay() if kind == "relay" else transport.server()
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: stop.set())
    try:
        address = server.start()
        document = {"listening": str(address), "store": config.store, "from": config.uri if kind == "relay" else None}
        common.out.result(document, lambda: common.out.text(f"listening on {address}"))
        while not stop.wait(1.0) and not server.wait(0):
            continue
    finally:
        server.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if not stop.is_set():
        raise typer.Exit(1)  # it ended by itself, and has logged why
