"""Who is who: TLS from files, tokens with roles, and which call needs which role.

Owns credentials of both sides and the comparison of tokens. Owns no connection, no limit on load (limits.py) and no
signature (weight_sync.signing).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

import grpc

from weight_sync.config import Config
from weight_sync.errors import ConfigError
from weight_sync.transport.grpc.address import Address

__all__ = ["ROLES", "Guard", "channel_credentials", "client_token", "server_credentials"]

_FOLLOW = frozenset({"follow", "publish", "admin"})
_PUBLISH = frozenset({"publish", "admin"})
ROLES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("GetRun", "GetEntry", "Entries", "Watch", "Fetch", "Register", "Heartbeat", "Release", "Want",
                     "Acknowledge", "GetFleet"), _FOLLOW),
    "ReturnTrajectories": frozenset({"return", "admin"}),
    **dict.fromkeys(("OpenRun", "PutShard", "Commit", "Abort", "GetFate", "NextNumber", "TakeTrajectories"), _PUBLISH),
    "Collect": _PUBLISH,
}  # fmt: skip
"""The roles of which a caller needs one, by call."""


def _read(path: str | None, field: str) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError("cannot read the file", field=field, found=f"{path}: {error.strerror}") from error


def _token(given: str | None, path: str | None, field: str) -> str | None:
    if given is not None and path is not None:
        raise ConfigError("a token twice", field=field, expected="token or token_file")
    data = _read(path, f"{field}.token_file")
    token = given if data is None else data.decode("ascii", "replace").strip()
    if token is not None and not (token.isascii() and token.isprintable() and token):
        raise ConfigError("not a token", field=field, expected="printable ASCII, one line")
    return token


def client_token(config: Config) -> str | None:
    """The token that this process shows. Raises ConfigError."""
    return _token(config.auth.token, config.auth.token_file, "weight_sync.auth")


class Guard:
    """Compares the token of a call with all that are known, in a time that tells nothing about them."""

    def __init__(self, config: Config) -> None:
        self._known: list[tuple[bytes, frozenset[str]]] = []
        for index, entry in enumerate(config.auth.tokens):
            field = f"weight_sync.auth.tokens.{index}"
            token = _token(entry.token, entry.token_file, field)
            if token is None:
                raise ConfigError("entry without a token", field=field, expected="token or token_file")
            self._known.append((_hashed(token), frozenset(entry.roles)))

    @property
    def asks(self) -> bool:
        """False when no token is asked for."""
        return bool(self._known)

    def refuse(self, call: str, metadata: Iterable[tuple[str, str | bytes]]) -> tuple[grpc.StatusCode, str] | None:
        """Why ``call`` must not be made; None when it may."""
        if not self._known:
            return None
        shown = [value for key, value in metadata if key == "authorization"]
        if len(shown) != 1 or not isinstance(shown[0], str) or not shown[0].startswith("Bearer "):
            return grpc.StatusCode.UNAUTHENTICATED, "no token was shown"
        given = _hashed(shown[0].removeprefix("Bearer "))
        roles: frozenset[str] = frozenset()
        for known, its_roles in self._known:  # all of them, always
            if hmac.compare_digest(known, given):
                roles |= its_roles
        if not roles:
            return grpc.StatusCode.UNAUTHENTICATED, "the token is not known"
        needed = ROLES[call]
        if not roles & needed:
            return grpc.StatusCode.PERMISSION_DENIED, f"{call} needs one of the roles {', '.join(sorted(needed))}"
        return None


def _hashed(token: str) -> bytes:
    """Equal lengths for all, and the tokens themselves are not kept."""
    return hashlib.sha256(token.encode()).digest()


def server_credentials(config: Config) -> grpc.ServerCredentials | None:
    """TLS of a server, with client certificates when ``tls.client_ca`` is given; None without a certificate."""
    tls = config.tls
    cert, key, ca = (_read(getattr(tls, name), f"weight_sync.tls.{name}") for name in ("cert", "key", "client_ca"))
    if cert is None or key is None:
        return None
    return grpc.ssl_server_credentials([(key, cert)], root_certificates=ca, require_client_auth=ca is not None)


def channel_credentials(config: Config, address: Address) -> grpc.ChannelCredentials | None:
    """TLS of a client; None for ``grpc://``."""
    if not address.secure:
        return None
    tls = config.tls
    cert, key, ca = (_read(getattr(tls, name), f"weight_sync.tls.{name}") for name in ("cert", "key", "ca"))
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
