"""What follows an answer's status: take it, ask again later, ask elsewhere, or give up. Pure.

Owns the table of statuses and the reading of Retry-After. Owns no waiting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

__all__ = ["Next", "Verdict", "judge"]

_DEFAULT_S, _LONGEST_S = 1.0, 60.0


class Next(Enum):
    """What to do."""

    TAKE = "take"
    WAIT = "wait"  # this engine says when it will do; others may do now
    ELSEWHERE = "elsewhere"  # this engine fails
    GIVE_UP = "give up"  # no engine would answer otherwise


@dataclass(frozen=True)
class Verdict:
    """A decision with its reason.

    Attributes:
        retry_s: of WAIT.
        run, version: what the engine serves, where the refusal says so.
    """

    next: Next
    reason: str = ""
    retry_s: float = 0.0
    run: str | None = None
    version: int | None = None


def judge(status: int, headers: Mapping[str, str], body: bytes) -> Verdict:
    """Of one answer."""
    if status == 200:
        return Verdict(Next.TAKE)
    error = _error(body)
    reason = f"HTTP {status}: {error.get('message') or body[:200].decode(errors='replace')}"
    if status in (409, 429, 503):
        current = error.get("current")
        run, version = (current.get("run"), current.get("version")) if isinstance(current, dict) else (None, None)
        return Verdict(Next.WAIT, reason, _retry_after(headers.get("retry-after")),
                       run if isinstance(run, str) else None, version if isinstance(version, int) else None)  # fmt: skip
    if status >= 500 or status in (404, 408):  # 404: the engine behind the URL is another one, or not up yet
        return Verdict(Next.ELSEWHERE, reason)
    return Verdict(Next.GIVE_UP, reason)


def _error(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
        error = document["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _retry_after(text: str | None) -> float:
    """Seconds; a date, or nonsense, counts as not given."""
    try:
        return min(_LONGEST_S, max(0.0, float(text or "")))
    except ValueError:
        return _DEFAULT_S
