"""Counters of a service, and their page for Prometheus.

Owns the counting and the page's text, which needs no library. Owns no meaning beyond the names' help.
"""

from __future__ import annotations

import http.server
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from weight_sync.errors import ConfigError
from weight_sync.proto.v1 import replica_pb2

__all__ = ["Metrics", "Page"]


class Metrics:
    """What a service has done; written on its loop, read from anywhere."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # by name and outcome
        self.sent_bytes = 0
        self.trajectories = 0
        self.watchers = 0
        self.expecting = 0
        self.sends = 0
        self.acknowledgements: Counter[str] = Counter()  # by state
        self.head = -1
        self.pause_seconds = 0.0
        self.far_bytes = 0

    @contextmanager
    def watcher(self) -> Iterator[None]:
        """While one more watches."""
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1

    @contextmanager
    def expected(self) -> Iterator[None]:
        """While one more has asked for the next version before there is one."""
        self.expecting += 1
        try:
            yield
        finally:
            self.expecting -= 1

    @contextmanager
    def sending(self) -> Iterator[None]:
        """While one more reads an object."""
        self.sends += 1
        try:
            yield
        finally:
            self.sends -= 1

    def acknowledged(self, message: replica_pb2.Acknowledgement) -> None:
        """One replica told where it is."""
        self.acknowledgements[replica_pb2.ReplicaState.Name(message.state)] += 1
        self.pause_seconds += message.timings.pause
        if message.HasField("version"):
            self.head = max(self.head, message.version.number)

    def page(self) -> str:
        """Everything, in Prometheus' text format."""
        lines: list[str] = []

        def add(name: str, kind: str, what: str, values: dict[str, float]) -> None:
            lines.extend([f"# HELP weight_sync_{name} {what}", f"# TYPE weight_sync_{name} {kind}"])
            lines.extend(f"weight_sync_{name}{labels} {value:g}" for labels, value in sorted(values.items()))

        calls = {f'{{call="{call}",outcome="{outcome}"}}': float(n) for (call, outcome), n in list(self.calls.items())}
        add("calls_total", "counter", "Calls by name and outcome.", calls)
        add("sent_bytes_total", "counter", "Bytes of objects sent to readers.", {"": self.sent_bytes})
        add("far_bytes_total", "counter", "Bytes of objects fetched from far away.", {"": self.far_bytes})
        add("trajectories_total", "counter", "Trajectories with a receipt.", {"": self.trajectories})
        add("watchers", "gauge", "Watchers connected.", {"": self.watchers})
        add("expecting", "gauge", "Reads of a version that is not there yet.", {"": self.expecting})
        add("sends", "gauge", "Objects being sent.", {"": self.sends})
        states = {f'{{state="{name}"}}': float(n) for name, n in list(self.acknowledgements.items())}
        add("acknowledgements_total", "counter", "Acknowledgements by state.", states)
        add("pause_seconds_total", "counter", "Seconds of admission closed, as acknowledged.", {"": self.pause_seconds})
        add("newest_acknowledged", "gauge", "Newest version that a replica acknowledged; -1: none.", {"": self.head})
        return "\n".join(lines) + "\n"


class Page:
    """An HTTP server with the page, in a thread. Raises ConfigError when it cannot listen."""

    def __init__(self, metrics: Metrics, listen: str) -> None:
        host, _, port = listen.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError("not an address", field="weight_sync.metrics", found=listen, expected="host:port")

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = metrics.page().encode() if self.path in ("/", "/metrics") else b""
                self.send_response(200 if data else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: object) -> None:
                return  # scrapes are no news

        try:
            self._server = http.server.ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError("cannot listen", field="weight_sync.metrics", found=f"{listen}: {error}",
                              do="choose another port") from error  # fmt: skip
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="weight_sync-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)
