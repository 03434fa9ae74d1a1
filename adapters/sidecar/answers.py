"""What the sidecar itself answers: errors, version headers, and the event that ends a stream.

Owns their shape (docs/sidecar.md). Owns no decision.
"""

from __future__ import annotations

import json
from typing import Any

from weight_sync.adapters.sidecar.admission import Answer, Situation, Verdict
from weight_sync.adapters.sidecar.constraint import Constraint
from weight_sync.adapters.sidecar.gate import Ticket
from weight_sync.errors import InputError

__all__ = [
    "Headers",
    "Refusal",
    "end_headers",
    "end_of_stream",
    "error_event",
    "malformed",
    "start_headers",
    "too_late",
]

Headers = list[tuple[bytes, bytes]]
NOT_READY = "weight_version_not_ready"


class Refusal(Exception):
    """An answer instead of the engine's. ``status`` is the HTTP status, ``error`` what becomes the JSON."""

    def __init__(self, status: int, code: str, message: str, retry_s: int | None = None, **parts: Any) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_s = status, code, retry_s
        kind = "invalid_request_error" if status < 500 and status != 409 else "weight_sync_error"
        self.error = {"message": message, "type": kind, "param": None, "code": code} | parts

    @property
    def body(self) -> bytes:
        """JSON, in the shape of OpenAI's errors."""
        return json.dumps({"error": self.error}).encode()

    @property
    def headers(self) -> Headers:
        """Of the answer."""
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self.body))]
        if self.retry_s is not None:
            headers.append((b"retry-after", b"%d" % self.retry_s))
        return headers


def malformed(error: InputError) -> Refusal:
    """A 400 that names the field."""
    return Refusal(400, "weight_version_invalid", str(error), param=error.field)


def too_late(want: Constraint | None, verdict: Verdict, now: Situation) -> Refusal:
    """Why a request was not let in: 409 when it wanted a version that is not served, 503 when nothing is."""
    current = {"run": now.run, "version": now.version, "head": now.head}
    wanted = None if want is None else want.to_json()
    parts = {"current": current, "wanted": wanted, "reason": verdict.reason}
    if want is None or verdict.answer in (Answer.DOWN, Answer.ATTACHING):
        return Refusal(503, "engine_not_serving", verdict.reason, verdict.retry_s, **parts)
    message = f"wanted {json.dumps(wanted)}: {verdict.reason}"
    return Refusal(409, NOT_READY, message, verdict.retry_s, **parts)


def start_headers(ticket: Ticket) -> Headers:
    """Under which version a request was let in, and how the engine computes."""
    headers = [(b"x-weight-version-run", ticket.run.encode()), (b"x-weight-version-start", b"%d" % ticket.version)]
    return [*headers, (b"x-weight-contract", ticket.contract.encode())] if ticket.contract else headers


def end_headers(ticket: Ticket, now: Situation) -> Headers:
    """Which version was served when the answer was complete."""
    headers = [(b"x-weight-version-end", b"%d" % (now.version or 0))]
    if now.run != ticket.run:
        headers.append((b"x-weight-version-end-run", (now.run or "").encode()))
    return headers


def end_of_stream(ticket: Ticket, now: Situation, tail: bytes) -> bytes:
    """The last event of a stream whose last bytes were ``tail``.

    OpenAI clients read up to ``[DONE]``; after it an event of another type is not looked at. A stream that ends without
    it belongs to an API whose clients may look at every event: there it is a comment.
    """
    facts: dict[str, Any] = {"run": ticket.run, "start": ticket.version, "end": now.version}
    if now.run != ticket.run:
        facts["end_run"] = now.run
    text = json.dumps(facts).encode()
    if tail.rstrip().endswith((b"data: [DONE]", b"data:[DONE]")):
        return _gap(tail) + b"event: weight_version\ndata: " + text + b"\n\n"
    return _gap(tail) + b": weight_version " + text + b"\n\n"


def error_event(refusal: Refusal, tail: bytes) -> bytes:
    """The last event of a stream that was ended from here; OpenAI clients raise it."""
    return _gap(tail) + b"data: " + refusal.body + b"\n\n"


def _gap(tail: bytes) -> bytes:
    """What ends the event before, if it is not over."""
    if not tail or tail.endswith((b"\n\n", b"\r\n\r\n", b"\r\r")):
        return b""
    return b"\n" if tail.endswith((b"\n", b"\r")) else b"\n\n"
