"""Which paths of the engine are not for clients, however they are spelt.

Owns the reading of paths. Owns no list: the engine names its control routes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote_to_bytes

__all__ = ["Blocklist"]

_DECODINGS = 8


class Blocklist:
    """Tells paths that lead to control routes, by every reading that some server may have of them."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = tuple(_plain(prefix.encode()) for prefix in prefixes)  # startswith(()) is False

    def covers(self, raw_path: bytes) -> bool:
        """Whether a path as it was sent (without its query) begins with a control route."""
        for _ in range(_DECODINGS):
            if _plain(raw_path).startswith(self._prefixes):
                return True
            decoded = unquote_to_bytes(raw_path)
            if decoded == raw_path:
                return False
            raw_path = decoded
        return True  # nobody who means well encodes a path that often


def _plain(path: bytes) -> str:
    """Without dots, empty segments, parameters, case and a slash at the end."""
    text = path.decode("utf-8", "replace").replace("\\", "/").casefold()
    segments: list[str] = []
    for segment in re.split("/+", text):
        word = segment.partition(";")[0].strip()
        if word == "..":
            del segments[-1:]
        elif word not in ("", "."):
            segments.append(word)
    return "/" + "/".join(segments)
