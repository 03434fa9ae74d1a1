"""The engines as the client sees them: load, version, when to ask again, and who is asked next.

Owns the choice and the memory that it needs. Owns no HTTP and no waiting (client.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Choice", "Fleet", "Seat", "Wanted", "choose"]

_BACKOFF_S, _LONGEST_BACKOFF_S = 0.25, 30.0


@dataclass(frozen=True)
class Wanted:
    """The version that is asked for; at most one of the numbers is set.

    Attributes:
        min, exact, max_staleness: as a sidecar takes them.
        run: of the version, None for whichever is served.
    """

    min: int | None = None
    exact: int | None = None
    max_staleness: int | None = None
    run: str | None = None

    def headers(self, current: int | None = None) -> dict[str, str]:
        """For a sidecar.

        Args:
            current: the trainer's version where it is known, of which the sidecar may have heard nothing yet: then it
                refuses what would be dropped here, and no token is made in vain.
        """
        named = {"Min": self.min, "Exact": self.exact, "Max-Staleness": self.max_staleness, "Run": self.run}
        if self.max_staleness is not None and current is not None:
            named |= {"Min": max(0, current - self.max_staleness), "Max-Staleness": None}
        # a run alone is no constraint: any version of it is at least its first
        if self.run is not None and (self.min, self.exact, self.max_staleness) == (None, None, None):
            named["Min"] = 0
        return {f"X-Weight-Version-{name}": str(value) for name, value in named.items() if value is not None}

    def accepts(self, run: str | None, version: int | None, current: int | None) -> bool:
        """Whether an engine that was last seen at this version probably answers; True for one that is not known."""
        if version is None:
            return True
        if self.run is not None and run != self.run:
            return False
        if self.exact is not None:
            return version == self.exact
        floor = self.min
        if self.max_staleness is not None and current is not None:
            floor = current - self.max_staleness
        return floor is None or version >= floor


@dataclass
class Seat:
    """One engine.

    Attributes:
        in_flight: requests of this client.
        others: requests of others, when its status was last read.
        run, version: last seen, None when not known.
        head_run, head: the newest version that its sidecar has seen, served or not; None when not known.
        not_before: when it may be asked again, in seconds of the event loop's clock.
        failures: in a row.
        why: the last refusal or failure, "" after a success.
        name: its replica id, when its status told it.
    """

    url: str
    in_flight: int = 0
    others: int = 0
    run: str | None = None
    version: int | None = None
    head_run: str | None = None
    head: int | None = None
    not_before: float = 0.0
    failures: int = 0
    why: str = ""
    name: str = ""

    def saw(self, run: str | None, version: int | None) -> None:
        """It serves this version."""
        self.run, self.version = run, version

    def answered(self) -> None:
        """It works."""
        self.failures, self.not_before, self.why = 0, 0.0, ""

    def refused(self, now: float, retry_s: float, why: str) -> None:
        """It said when to come again; what it serves then is not known."""
        self.not_before, self.why = now + retry_s, why

    def failed(self, now: float, why: str) -> None:
        """It broke off or answered nonsense: longer pauses each time."""
        self.failures += 1
        pause = min(_LONGEST_BACKOFF_S, _BACKOFF_S * 2 ** min(self.failures - 1, 16))
        self.not_before, self.why, self.version = now + pause, why, None


@dataclass(frozen=True)
class Choice:
    """Who is asked; None means nobody now, and ``wake`` when to look again (None: when a request ends)."""

    seat: Seat | None
    wake: float | None = None


def choose(seats: Sequence[Seat], wanted: Wanted, current: int | None, now: float, per_engine: int) -> Choice:
    """The least loaded engine among those at an acceptable version.

    One that was last seen at another version is asked only when no engine is at an acceptable one, since it may have
    moved on: its sidecar knows.
    """
    asked = [seat for seat in seats if seat.not_before <= now]
    acceptable = [seat for seat in asked if wanted.accepts(seat.run, seat.version, current)]
    free = [seat for seat in acceptable or asked if seat.in_flight < per_engine]
    if free:
        return Choice(min(free, key=lambda seat: seat.in_flight + seat.others))
    return Choice(None, min((seat.not_before for seat in seats if seat.not_before > now), default=None))


class Fleet:
    """The engines by URL; keeps what is known of those that stay."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}

    @property
    def seats(self) -> list[Seat]:
        """All of them."""
        return list(self._seats.values())

    def head(self, run: str | None) -> int | None:
        """The newest version of a run (None: of any) that one of the sidecars has seen; None when none said."""
        seen = [seat.head for seat in self.seats if seat.head is not None and run in (None, seat.head_run)]
        return max(seen, default=None)

    def set(self, urls: Iterable[str]) -> None:
        """The fleet is these now."""
        self._seats = {url: self._seats.get(url) or Seat(url) for url in (url.rstrip("/") for url in urls)}

    def reasons(self) -> str:
        """Why each of them was not asked, or did not answer."""
        return "; ".join(f"{seat.url}: {seat.why or 'busy'}" for seat in self.seats) or "there are no engines"
