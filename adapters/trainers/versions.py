"""Which versions of a host an adapter was proven with.

Owns the comparison and its error. Owns no range: adapters name theirs.
"""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from weight_sync.errors import ConfigError

__all__ = ["check_version", "installed", "outside"]


def installed(distribution: str) -> str | None:
    """The installed version; None when it is not there."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def outside(found: str, lowest: str, below: str) -> str:
    """Why ``lowest <= found < below`` does not hold; "" when it does. Pre-releases count as what they lead to."""
    if _numbers(found) < _numbers(lowest):
        return f"{found} is older than {lowest}"
    if _numbers(found) >= _numbers(below):
        return f"{found} is not older than {below}, the first one that the adapter was not proven with"
    return ""


def check_version(distribution: str, lowest: str, below: str) -> None:
    """Raises ConfigError when the host is missing or of a version that the adapter was not proven with."""
    found = installed(distribution)
    reason = "it is not installed" if found is None else outside(found, lowest, below)
    if reason:
        raise ConfigError(f"this version of {distribution} is not supported: {reason}", field=distribution, found=found,
                          expected=f">={lowest},<{below}", do=f"pip install '{distribution}>={lowest},<{below}'")  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    """The release part: 0.10.0.dev3 is (0, 10, 0)."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
