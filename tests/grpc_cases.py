"""What the tests of the gRPC transport share: servers in this process and in others, a proxy that fails, certificates.

Run as a program it is a trainer that hosts the service: ``grpc_cases.py URI STORE FIRST LAST``.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from weight_sync.config import Config
from weight_sync.transport.file import FileTransport
from weight_sync.transport.grpc import GrpcTransport
from weight_sync.transport.grpc.server import Server

COMMON: dict[str, Any] = {"poll_s": 0.02, "keep_versions": 100, "timeout_s": 30}


def served(folder: Path, stack: ExitStack, **keys: Any) -> tuple[Server, Config]:
    """A server over a folder, and the configuration of its clients."""
    keys = {**COMMON, **keys}
    scheme = "grpcs" if "tls" in keys else "grpc"
    store = FileTransport(Config(uri=str(folder), **{**COMMON, "keep_versions": keys["keep_versions"]}))
    server = Server(Config(uri=f"{scheme}://127.0.0.1:0", **keys), store)
    stack.callback(server.close)
    return server, client_of(str(server.start()))


def relayed(upstream: str, stack: ExitStack, **keys: Any) -> tuple[Server, Config]:
    """A relay of a server, and the configuration of its clients."""
    keys = {**COMMON, "replica_id": "relay", "listen": "127.0.0.1:0", **keys}
    relay = GrpcTransport(Config(uri=upstream, backend="grpc", **keys)).relay()
    stack.callback(relay.close)
    return relay, client_of(str(relay.start()))


def client_of(uri: str, **keys: Any) -> Config:
    return Config(uri=uri, backend="grpc", **{**COMMON, **keys})


# --- processes ---


def command(*words: str, **environment: str) -> subprocess.Popen[str]:
    """The command line, in a process of its own."""
    code = "from weight_sync.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


@contextlib.contextmanager
def process(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server by command, and its address; killed in the end."""
    running = command(*words, "--json")
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line, "the server did not start"
        yield running, json.loads(line)["listening"]
    finally:
        kill(running)


def kill(running: subprocess.Popen[str]) -> None:
    """SIGKILL; nothing is tidied up."""
    with contextlib.suppress(ProcessLookupError):
        running.send_signal(signal.SIGKILL)
    running.wait(30)
    for pipe in (running.stdin, running.stdout):
        if pipe is not None:
            pipe.close()


def trainer(uri: str, store: Path, first: int, last: int, crash_at: str = "") -> subprocess.Popen[str]:
    """A trainer that hosts the service, publishes step ``first``, and after a line on stdin those up to ``last``."""
    return subprocess.Popen(
        [sys.executable, __file__, uri, str(store), str(first), str(last)],
        stdin=subprocess.PIPE, text=True, env={**os.environ, "WEIGHT_SYNC_CRASH_AT": crash_at},
    )  # fmt: skip


def go_on(running: subprocess.Popen[str]) -> None:
    """The line that a trainer waits for."""
    assert running.stdin is not None
    running.stdin.write("go\n")
    running.stdin.flush()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- a link that fails ---


class Proxy:
    """A TCP proxy on loopback that counts what it passes on and can be cut after so many bytes."""

    def __init__(self, target: str) -> None:
        host, port = target.rpartition("://")[2].rsplit(":", 1)
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.uri = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        self.down_bytes = 0  # towards the client
        self.cut_after: int | None = None
        self.cuts = 0
        self.refusing = False
        self.frozen = threading.Event()  # set: nothing moves, and nobody is told
        self.mute = False  # nothing of the client's is passed on
        self._closed = False
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                if self.refusing:
                    raise ConnectionRefusedError
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._pairs.append((near, far))
            threading.Thread(target=self._pump, args=(near, far), daemon=True).start()

    def _pump(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):  # cut
            while True:
                readable, _, _ = select.select([near, far], [], [], 0.2)
                if self.frozen.is_set():
                    time.sleep(0.01)
                    continue
                for source in readable:
                    if source is near and self.mute:
                        time.sleep(0.001)
                        continue
                    data = source.recv(1 << 16)
                    if not data:
                        raise OSError
                    if source is far:
                        self.down_bytes += len(data)
                    (near if source is far else far).sendall(data)
                    if self.cut_after is not None and self.down_bytes >= self.cut_after:
                        self.cut_after = None
                        self.cut()
        for end in (near, far):
            end.close()

    def cut(self) -> None:
        """Resets every connection."""
        self.cuts += 1
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed = True
        self._listener.close()
        self.cut()


# --- certificates ---


class Authority:
    """Issues certificates into a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = self._builder(self._subject, self._key, 3650, -1).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self.ca = self._write(f"{name}.pem", builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM))

    def _builder(self, subject: x509.Name, key: Any, days: int, since: int) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._subject).public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + datetime.timedelta(days=since))
            .not_valid_after(now + datetime.timedelta(days=days))
        )  # fmt: skip

    def _write(self, name: str, data: bytes) -> str:
        path = self._folder / name
        path.write_bytes(data)
        return str(path)

    def issue(self, name: str, days: int = 30, since: int = -1) -> dict[str, str]:
        """Certificate and key for 127.0.0.1, as keys of ``tls``."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = self._builder(subject, key, days, since).add_extension(names, critical=False)
        certificate = made.sign(self._key, hashes.SHA256()).public_bytes(_PEM)
        secret = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return {"cert": self._write(f"{name}.pem", certificate), "key": self._write(f"{name}.key", secret)}


_PEM = serialization.Encoding.PEM


def _train(uri: str, store: str, first: int, last: int) -> None:
    from loop import model

    from weight_sync import Publisher

    with Publisher.open(uri, backend="grpc", store=store, **COMMON) as publisher:
        for step in range(first, last + 1):
            report = publisher.publish(model(step), step=step)
            assert report is not None
            if step == first:
                sys.stdin.readline()
        signal.pause()


if __name__ == "__main__":
    _train(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
