"""Where a store is: the URI of the configuration, checked and taken apart.

Owns the list of schemes and the split of store options into obstore's two kinds. Owns no connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from weight_sync.errors import ConfigError

__all__ = ["SCHEMES", "Location", "locate", "split_options"]

SCHEMES = ("file", "s3", "gs", "az", "memory")

# obstore refuses a key of one kind among the other, so the kinds must be told apart here
_CLIENT_FLAGS = frozenset(
    {"allow_http", "allow_invalid_certificates", "http1_only", "http2_only", "randomize_addresses"}
)
_CLIENT_TEXTS = frozenset(
    {
        "connect_timeout",
        "default_content_type",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
_TRUTH = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


@dataclass(frozen=True, slots=True)
class Location:
    """A store.

    Attributes:
        scheme: one of SCHEMES.
        uri: normalised, without a slash at the end; names the store in messages and among ``memory://`` stores.
        root: the folder, for ``file`` only.
    """

    scheme: str
    uri: str
    root: Path | None


def locate(uri: str) -> Location:
    """Parses a URI or a plain path, which means a folder on this machine. Raises ConfigError naming the scheme."""
    if "://" not in uri:
        return _folder(uri, uri)
    parts = urlsplit(uri)
    if parts.scheme not in SCHEMES:
        raise ConfigError(
            "unknown scheme",
            field="weight_sync.uri",
            found=f"{parts.scheme}://",
            expected=", ".join(f"{scheme}://" for scheme in SCHEMES) + ", or a plain path",
        )
    if parts.query or parts.fragment:
        raise ConfigError(
            "URI has a query or fragment", field="weight_sync.uri", found=uri, do="put options under store_options"
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(
                "file URI names a host",
                field="weight_sync.uri",
                found=uri,
                expected=f"file:///{parts.netloc}{parts.path}",
            )
        return _folder(unquote(parts.path), uri)
    if not parts.netloc and not (parts.scheme == "memory" and parts.path.strip("/")):
        raise ConfigError(
            "URI names no bucket", field="weight_sync.uri", found=uri, expected=f"{parts.scheme}://name/prefix"
        )
    return Location(parts.scheme, uri.rstrip("/"), None)


def _folder(path: str, uri: str) -> Location:
    if not path.strip():
        raise ConfigError("URI names no folder", field="weight_sync.uri", found=uri, expected="file:///path")
    root = Path(path).expanduser().absolute()
    return Location("file", root.as_uri(), root)


def split_options(options: Mapping[str, str]) -> tuple[dict[str, str], dict[str, Any]]:
    """``store_options`` as (options of the store, options of the HTTP client). Raises ConfigError on a bad flag."""
    store: dict[str, str] = {}
    client: dict[str, Any] = {}
    for key, value in options.items():
        name = key.lower()
        if name in _CLIENT_FLAGS:
            if value.lower() not in _TRUTH:
                raise ConfigError(
                    "not a flag", field=f"weight_sync.store_options.{key}", found=value, expected="true or false"
                )
            client[name] = _TRUTH[value.lower()]
        elif name in _CLIENT_TEXTS:
            client[name] = value
        else:
            store[name] = value
    return store, client
