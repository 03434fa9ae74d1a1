"""Addresses: the URI of the configuration, what is dialled and what is listened on, and what is refused.

Owns the parsing and the rule that nobody listens in the open by accident. Owns no socket.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from weight_sync.config import Config
from weight_sync.errors import ConfigError

__all__ = ["Address", "bind_address", "parse", "refuse_dialling", "refuse_listening"]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Attributes:
        host: name or literal, without brackets.
        port: 0 lets the system choose, for listening only.
        secure: TLS, of ``grpcs://``.
    """

    host: str
    port: int
    secure: bool

    @property
    def target(self) -> str:
        """As grpc wants it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def wildcard(self) -> bool:
        """True for an address that can be listened on and not dialled."""
        return self.host in ("0.0.0.0", "::")

    @property
    def loopback(self) -> bool:
        """True when no other machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def __str__(self) -> str:
        return f"{'grpcs' if self.secure else 'grpc'}://{self.target}"


def parse(uri: str, field: str = "weight_sync.uri") -> Address:
    """``grpc://host:port`` or ``grpcs://host:port``. Raises ConfigError."""
    parts = urlsplit(uri)
    try:
        port = parts.port
    except ValueError:
        port = None
    plain = not (parts.query or parts.fragment or parts.username or parts.path.strip("/"))
    if parts.scheme not in ("grpc", "grpcs") or not parts.hostname or port is None or not plain:
        raise ConfigError(
            "not the address of a server", field=field, found=uri, expected="grpc://host:port or grpcs://"
        )
    return Address(parts.hostname, port, parts.scheme == "grpcs")


def bind_address(config: Config) -> Address:
    """What a server of this configuration listens on: the key ``listen``, else the URI's own host and port."""
    if config.listen is None:
        return parse(config.uri)
    text = config.listen
    secure = config.tls.cert is not None
    return parse(text if "://" in text else f"{'grpcs' if secure else 'grpc'}://{text}", "weight_sync.listen")


def refuse_listening(address: Address, tls: bool, authenticated: bool, insecure: bool) -> str | None:
    """Why a server must not listen there; None when it may. Pure.

    Args:
        tls: whether it has a certificate.
        authenticated: whether it asks for tokens or client certificates.
        insecure: the key of that name.
    """
    if address.secure and not tls:
        return "grpcs:// needs tls.cert and tls.key"
    if address.loopback or insecure:
        return None
    if not tls:
        return "other machines reach this address, and there is no TLS"
    if not authenticated:
        return "other machines reach this address, and nobody is asked for a token or a certificate"
    return None


def refuse_dialling(address: Address, has_token: bool, insecure: bool) -> str | None:
    """Why a client must not call there; None when it may. Pure."""
    if address.port == 0:
        return "port 0 cannot be called"
    if has_token and not address.secure and not address.loopback and not insecure:
        return "a token would cross the network in the open"
    return None
