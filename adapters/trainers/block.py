"""The ``weight_sync:`` block of a host as a Config, whatever the host made of it on the way.

Owns what a host's own configuration system does to a block: containers of its own, and null for what was not set. Owns
no key and no default of a key (weight_sync.config).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weight_sync.config import Config, load
from weight_sync.errors import ConfigError

__all__ = ["dialled", "read_block", "wildcard"]


def read_block(block: object, *, beside: str | None = None, **defaults: Any) -> Config:
    """The keys in force.

    Args:
        block: what the host hands over: a mapping, also one of omegaconf. A key that is null counts as not given where
            null is not its default.
        beside: folder of the host's checkpoints; a server that the trainer is to host keeps history in it when ``store``
            does not say where.
        defaults: for keys that the block does not give; None gives none.

    Hosts name hub models where we want a folder: a ``base`` that is no path here becomes the hint ``base_hf_id``.

    Raises ConfigError that names the key and the nearest valid one.
    """
    if not isinstance(block, Mapping):
        raise ConfigError("the weight_sync block is not a mapping", field="weight_sync", found=type(block).__name__,
                          expected="key: value lines", do="weight-sync config lists all keys")  # fmt: skip
    given = {key: value for key, value in _plain(block).items() if not _unset(key, value)}
    base = given.get("base")
    if base is not None and not Path(str(base)).exists():
        given["base"] = None
        given["base_hf_id"] = given.get("base_hf_id") or str(base)
    for key, value in defaults.items():
        if value is not None and given.get(key) is None:
            given[key] = value
    config = load(given)
    if beside and config.store is None and wildcard(config.uri):
        return config.replace(store=str(Path(beside).absolute() / "weight_sync"))
    return config


def wildcard(uri: str) -> bool:
    """Whether a URI can be listened on and not dialled: then the trainer hosts the server."""
    return "://" in uri and urlsplit(uri).hostname in ("0.0.0.0", "::")


def dialled(config: Config, host: str) -> Config:
    """The same for a reader: a server that listens everywhere is dialled at ``host``; its store is not the reader's."""
    if not wildcard(config.uri):
        return config
    parts = urlsplit(config.uri)
    name = f"[{host}]" if ":" in host else host
    return config.replace(uri=f"{parts.scheme}://{name}:{parts.port}{parts.path}", store=None, listen=None)


def _unset(key: str, value: object) -> bool:
    field = Config.model_fields.get(key)
    return value is None and field is not None and (field.is_required() or field.default is not None)


def _plain(value: Any) -> Any:
    """Built-in containers all the way down."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
