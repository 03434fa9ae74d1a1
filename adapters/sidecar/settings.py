"""What a sidecar can be told, with defaults and checks.

Owns the sidecar's own options. Owns none of the ``weight_sync`` keys (plugin/config.py), and binds nothing.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from weight_sync.errors import ConfigError
from weight_sync.ports import PauseMode

__all__ = ["Settings"]

_LISTEN = "HOST:PORT, [IPv6]:PORT or unix:PATH"


@dataclass(frozen=True)
class Settings:
    """Options of one sidecar. Sizes in bytes, times in seconds.

    Attributes:
        engine_url: of the engine, ``http://host:port``; several make a group that serves one version.
        listen: where clients connect: ``host:port`` or ``unix:path``; port 0 takes a free one.
        insecure: listen on other than loopback addresses, too; there is no authentication.
        tls_cert, tls_key: PEM files; both or none.
        drain_s: how long requests in flight may hold up a fence in mode ``wait``.
        after_drain: what happens to those that take longer: ``abort`` or ``keep``.
        wait_s: how long a request waits for the end of a fence unless it says so itself.
        body_limit: of a request's body; also what is held of a response to tell its last version in a header.
        head_trust_s: how long ago the store may have been seen for a demand about staleness.
        watch_s, watch_timeout_s: between two looks at the engine, and how long it may take to answer.
        stop_s: longest wait for requests, and then for a fence, at the end.
    """

    engine_url: tuple[str, ...]
    listen: str = "127.0.0.1:9000"
    insecure: bool = False
    tls_cert: str | None = None
    tls_key: str | None = None
    drain_s: float = 30.0
    after_drain: str = "abort"
    wait_s: float = 30.0
    body_limit: int = 64 << 20
    head_trust_s: float = 30.0
    watch_s: float = 1.0
    watch_timeout_s: float = 15.0
    stop_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises ConfigError that names the option."""
        for name in ("drain_s", "wait_s", "head_trust_s", "stop_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    "not a usable limit", field=name, found=getattr(self, name), expected="seconds, 0 or more"
                )
        for name in ("watch_s", "watch_timeout_s", "body_limit"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError("not a usable limit", field=name, found=getattr(self, name), expected="more than 0")
        if self.after_drain not in ("abort", "keep"):
            raise ConfigError("unknown mode", field="after_drain", found=self.after_drain, expected="abort or keep")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_cert" if self.tls_cert is None else "tls_key"
            raise ConfigError("one without the other", field=missing, do="give both tls_cert and tls_key, or none")
        if not self.engine_url or len(set(self.engine_url)) < len(self.engine_url):
            raise ConfigError("not a group of engines", field="engine_url", found=list(self.engine_url),
                              expected="one URL or several different ones")  # fmt: skip
        for url in self.engine_url:
            _address_of(url)
        address = self.address
        if isinstance(address, tuple) and not self.insecure and not _is_loopback(address[0]):
            raise ConfigError("not a loopback address, and there is no authentication", field="listen",
                              found=self.listen, expected="127.0.0.1:PORT or unix:PATH",
                              do="listen on loopback, or give --insecure where only friends can connect")  # fmt: skip

    @property
    def fallback(self) -> PauseMode:
        """``after_drain`` as the port says it."""
        return PauseMode(self.after_drain)

    @property
    def engine_addresses(self) -> list[tuple[str, int]]:
        """Host and port of each engine."""
        return [_address_of(url) for url in self.engine_url]

    @property
    def address(self) -> tuple[str, int] | str:
        """Host and port, or the path of a Unix socket. Raises ConfigError."""
        if self.listen.startswith("unix:"):
            path = self.listen.removeprefix("unix:")
            if not path:
                raise ConfigError("not an address", field="listen", found=self.listen, expected=_LISTEN)
            return path
        match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+)):([0-9]{1,5})", self.listen)
        if match is None or int(match[3]) > 65535:
            raise ConfigError("not an address", field="listen", found=self.listen, expected=_LISTEN)
        return match[1] or match[2], int(match[3])


def _address_of(text: str) -> tuple[str, int]:
    """Host and port of an engine. Raises ConfigError."""
    shape = "http://host:port"
    try:
        url = urlsplit(text)
        usable = url.scheme in ("http", "https") and url.port != 0
    except ValueError as error:
        raise ConfigError("not a URL", field="engine_url", found=str(error), expected=shape) from error
    if not usable or not url.hostname or url.username is not None or url.query or url.fragment or url.path.strip("/"):
        raise ConfigError("not the URL of an engine", field="engine_url", found=text, expected=shape)
    return url.hostname, url.port or (443 if url.scheme == "https" else 80)


def _is_loopback(host: str) -> bool:
    """Whether every address of a host is reachable from this machine alone."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise ConfigError("unknown host", field="listen", found=host) from error
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
