"""What a request demands of the version that answers it, read from headers and body; nothing in between is ignored.

Owns the grammar, and the cutting of the constraint out of a body whose other bytes stay as they are. Owns no decision
(admission.py) and no I/O.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from weight_sync.errors import InputError

__all__ = ["Constraint", "Demand", "cut_constraint", "read_headers"]

KEY = "weight_version"
KINDS = ("min", "exact", "max_staleness")
PREFIX = "x-weight-version-"
_HEADERS = {f"{PREFIX}{kind.replace('_', '-')}": kind for kind in KINDS}
_RUN, _WAIT = f"{PREFIX}run", f"{PREFIX}wait"
_MAX = (1 << 63) - 1
_MAX_WAIT_S = 3600.0
_WORD = re.compile(r"[0-9]{1,19}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_LONGEST_SLIP = 40  # characters of a key that may be ours, misspelt
_SPACE = re.compile(r"[ \t\n\r]*")


class _Pairs(list[tuple[str, Any]]):
    """The members of a JSON object in order, repeated ones too."""


_PLAIN = json.JSONDecoder()
_EXACT = json.JSONDecoder(object_pairs_hook=_Pairs)


@dataclass(frozen=True)
class Constraint:
    """One demand.

    Attributes:
        kind: "min", "exact" or "max_staleness".
        number: of a version for min and exact, of versions for max_staleness.
        run: the run that it is about, None for whichever is served.
    """

    kind: str
    number: int
    run: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As a body would carry it."""
        return {self.kind: self.number} | ({} if self.run is None else {"run": self.run})


@dataclass(frozen=True)
class Demand:
    """What the headers of a request say.

    Attributes:
        constraint: None without one.
        wait_s: how long it is worth waiting for; None when the header is not there.
    """

    constraint: Constraint | None = None
    wait_s: float | None = None


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> Demand:
    """The demand of ASGI headers (lower-case names). Raises InputError that names the header."""
    found: dict[str, str] = {}
    for raw, value in headers:
        if b"weight" not in raw or b"version" not in raw:
            continue
        name = raw.decode("latin-1")
        if name not in _HEADERS and name not in (_RUN, _WAIT):
            near = difflib.get_close_matches(name.replace("_", "-"), [*_HEADERS, _RUN, _WAIT], n=1, cutoff=0.0)
            raise InputError("unknown header", field=_spelt(name), expected=_spelt(near[0]))
        if name in found:
            raise InputError("header given twice", field=_spelt(name))
        found[name] = value.decode("latin-1").strip(" \t")
    wait = found.pop(_WAIT, None)
    run = found.pop(_RUN, None)
    if run is not None and not found:
        raise InputError("a run without a constraint", field=_spelt(_RUN), found=run,
                         expected="one of " + ", ".join(map(_spelt, _HEADERS)), do="add X-Weight-Version-Min: 0")  # fmt: skip
    if len(found) > 1:
        names = ", ".join(map(_spelt, sorted(found)))
        raise InputError("more than one constraint", field=names, expected="one of them")
    return Demand(_of_headers(found, run), None if wait is None else _seconds(wait))


def _of_headers(found: Mapping[str, str], run: str | None) -> Constraint | None:
    for name, value in found.items():
        if not _WORD.fullmatch(value) or int(value) > _MAX:
            raise InputError("not a number", field=_spelt(name), found=value, expected="an integer, 0 or more")
        return Constraint(_HEADERS[name], int(value), None if run is None else _run(_spelt(_RUN), run))
    return None


def _spelt(name: str) -> str:
    return "-".join(part.capitalize() for part in name.split("-"))


def _seconds(value: str) -> float:
    if not _SECONDS.fullmatch(value) or float(value) > _MAX_WAIT_S:
        raise InputError("not a number of seconds", field=_spelt(_WAIT), found=value,
                         expected=f"0 to {_MAX_WAIT_S:.0f}, as in 2.5")  # fmt: skip
    return float(value)


def _run(field: str, value: object) -> str:
    if not isinstance(value, str) or not _RUN_ID.fullmatch(value):
        raise InputError("not a run id", field=field, found=value, expected="the text of a run id")
    return value


# --- bodies ---


def cut_constraint(body: bytes) -> tuple[Constraint | None, bytes]:
    """The constraint of a JSON body and the body without it; every other byte stays.

    Only the members of the outermost object are looked at. Raises InputError that names the member, and for bytes that
    are not JSON.
    """
    try:
        text = body.decode("utf-8")
        members = list(_members(text))
    except (ValueError, RecursionError) as error:
        raise InputError("not a JSON body", field="body", found=str(error) or type(error).__name__,
                         expected="JSON in UTF-8") from error  # fmt: skip
    for member in members:
        if member.key != KEY and len(member.key) <= _LONGEST_SLIP and _resembles(member.key):
            raise InputError("unknown key", field=member.key, expected=KEY)
    mine = [member for member in members if member.key == KEY]
    if not mine:
        return None, body
    if len(mine) > 1:
        raise InputError("key given twice", field=KEY)
    return _of_body(mine[0].value), (text[: mine[0].start] + text[mine[0].end :]).encode("utf-8")


@dataclass(frozen=True, slots=True)
class _Member:
    """One member of the outermost object; [start, end) is what to cut so that JSON remains."""

    key: str
    value: Any  # read for our own key only
    start: int
    end: int


def _members(text: str) -> Iterator[_Member]:
    """Of the outermost object; none when the text is another value. Raises ValueError for what is not JSON."""
    at = _after_space(text, 0)
    if text[at : at + 1] != "{":
        at = _after_space(text, _PLAIN.raw_decode(text, at)[1])
    else:
        comma: int | None = None  # the one before the member
        at = _after_space(text, at + 1)
        while text[at : at + 1] != "}" or comma is not None:
            begin = at
            _expect(text, at, '"')
            key, at = _PLAIN.raw_decode(text, at)
            at = _after_space(text, at)
            _expect(text, at, ":")
            value, at = (_EXACT if key == KEY else _PLAIN).raw_decode(text, _after_space(text, at + 1))
            end, at = at, _after_space(text, at)
            if text[at : at + 1] != ",":
                yield _Member(key, value if key == KEY else None, begin if comma is None else comma, end)
                break
            yield _Member(key, value if key == KEY else None, begin, at + 1)
            comma, at = at, _after_space(text, at + 1)
        _expect(text, at, "}")
        at = _after_space(text, at + 1)
    if at != len(text):
        raise ValueError(f"something follows at character {at}")


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _expect(text: str, at: int, mark: str) -> None:
    if text[at : at + 1] != mark:
        raise ValueError(f"expected {mark!r} at character {at}")


@lru_cache(maxsize=1024)
def _resembles(key: str) -> bool:
    """Whether another key was meant to be ours: another spelling, or a slip of a letter or two."""
    plain = re.sub(r"[^a-z]", "", key.lower())
    return plain.startswith("weightversion") or difflib.SequenceMatcher(None, plain, "weightversion").ratio() > 0.85


def _of_body(value: Any) -> Constraint:
    if not isinstance(value, _Pairs):
        raise InputError("not a constraint", field=KEY, found=value, expected='an object, as {"min": 3}')
    given: dict[str, Any] = {}
    for key, item in value:
        field = f"{KEY}.{key}"
        if key not in (*KINDS, "run"):
            near = difflib.get_close_matches(key, [*KINDS, "run"], n=1, cutoff=0.0)
            raise InputError("unknown key", field=field, expected=near[0] if near else ", ".join(KINDS))
        if key in given:
            raise InputError("key given twice", field=field)
        given[key] = _run(field, item) if key == "run" else _number(field, item)
    kinds = [kind for kind in KINDS if kind in given]
    if len(kinds) != 1:
        raise InputError("not one constraint", field=KEY, found=" and ".join(kinds) or "none",
                         expected="one of " + ", ".join(KINDS))  # fmt: skip
    return Constraint(kinds[0], given[kinds[0]], given.get("run"))


def _number(field: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX:  # a bool is an int, too
        raise InputError("not a number", field=field, found=value, expected="an integer, 0 or more")
    return value
