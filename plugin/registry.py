"""Names to implementations: transports and engines by entry point, so that the core imports neither.

Owns the lookup and its error. Owns no implementation.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from weight_sync.config import Config
from weight_sync.errors import ConfigError
from weight_sync.ports import Transport

__all__ = ["find", "names", "open_transport"]


def names(group: str) -> list[str]:
    """Registered names of "transports" or "engines"."""
    return sorted({point.name for point in entry_points(group=f"weight_sync.{group}")})


def find(group: str, name: str) -> Any:
    """What is registered under ``weight_sync.<group>`` as ``name``. Raises ConfigError that lists the names there are."""
    for point in entry_points(group=f"weight_sync.{group}"):
        if point.name == name:
            try:
                return point.load()
            except ImportError as error:
                raise ConfigError(f"{group[:-1]} cannot be imported", field=name, found=str(error),
                                  do=f"pip install 'weight-sync[{name}]'") from error  # fmt: skip
    raise ConfigError(f"no such {group[:-1]}", field={"transports": "backend"}.get(group, group[:-1]), found=name,
                      expected=", ".join(names(group)) or "an installed one",
                      do="install the package that registers it")  # fmt: skip


def open_transport(config: Config) -> Transport:
    """The transport that ``config.backend`` names, for ``config.uri``."""
    transport: Transport = find("transports", config.backend)(config)
    return transport
