"""One thing that an engine is asked from outside: an HTTP request or a shell command.

Owns running it within a limit and telling why it failed. Owns no meaning: what is asked, and when, is the engine
adapter's. Neither proxies nor redirects are followed: a request goes where it was sent, or fails. Messages name the
option, never the command or the URL, for those may hold secrets and messages travel to the trainer.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO
from urllib.parse import urlsplit

from weight_sync.errors import ConfigError, DeadlineError, EngineError

__all__ = ["Hook"]

_LOG = logging.getLogger("weight_sync")
_KEEP = 1 << 20  # bytes of an answer that are looked at
_AGAIN_S = 0.2  # between two tries to connect
_SHAPE = "http://host:port/path"
_TAIL = 2000  # characters of a failure that are told


@dataclass(frozen=True)
class Hook:
    """A URL or a shell command.

    Attributes:
        option: the option that it comes from, for messages.
        target: ``http://...``, ``https://...``, or a command for ``/bin/sh``.
    """

    option: str
    target: str

    def __post_init__(self) -> None:
        if not self.target.strip():
            raise ConfigError("is empty", field=self.option, expected="a URL or a command", do="leave the option out")
        scheme = re.match(r"\s*([A-Za-z][A-Za-z0-9+.-]*)://", self.target)
        if scheme is None:
            return
        if scheme[1].lower() not in ("http", "https"):
            raise ConfigError("URL of an unknown kind", field=self.option, found=scheme[1], expected="http or https")
        try:
            parts = urlsplit(self.target.strip())
            usable = bool(parts.hostname) and parts.port != 0
        except ValueError as error:
            raise ConfigError("not a URL", field=self.option, found=str(error), expected=_SHAPE) from error
        if not usable or parts.username is not None:
            raise ConfigError("not a URL that can be asked", field=self.option, expected=_SHAPE)

    @classmethod
    def of(cls, option: str, target: str | None) -> Hook | None:
        """None for an option that is not set. Raises ConfigError for one that cannot be used."""
        return None if target is None else cls(option, target)

    @property
    def is_url(self) -> bool:
        """True for an HTTP request."""
        return self.target.strip().lower().startswith(("http://", "https://"))

    def run(self, facts: Mapping[str, str | int], limit: float, method: str = "POST", patient: bool = False) -> str:
        """Asks, and returns the answer: the response's body, or what the command wrote to its output.

        Args:
            facts: sent as a JSON object (POST), or set as WEIGHT_SYNC_<NAME> for a command.
            limit: seconds.
            patient: wait within the limit for a server that does not listen yet.

        Raises DeadlineError at the limit, EngineError for an answer outside 2xx, an exit status other than 0, or no
        answer at all.
        """
        if self.is_url:
            return self._request(facts, limit, method, patient)
        try:
            return self._command(facts, limit)
        except DeadlineError:  # an OSError, too
            raise
        except OSError as error:
            raise EngineError("the command cannot be started", field=self.option, found=str(error)) from error

    def _late(self, limit: float) -> DeadlineError:
        return DeadlineError("no answer in time", field=self.option, expected=f"within {limit:g} s",
                             do="look at the engine, or allow more time")  # fmt: skip

    def _request(self, facts: Mapping[str, str | int], limit: float, method: str, patient: bool) -> str:
        end = time.monotonic() + limit
        url = urlsplit(self.target.strip())
        kind = http.client.HTTPSConnection if url.scheme.lower() == "https" else http.client.HTTPConnection
        assert url.hostname is not None
        connection = kind(url.hostname, url.port, timeout=limit)
        body = json.dumps(dict(facts)) if method == "POST" else None
        headers = {"Content-Type": "application/json", "Connection": "close"}
        try:
            _connect(connection, end if patient else 0.0, self.option)
            connection.request(method, (url.path or "/") + (f"?{url.query}" if url.query else ""), body, headers)
            answer = connection.getresponse()
            data = b""
            while len(data) < _KEEP and (part := answer.read1(1 << 16)):
                data += part
                if time.monotonic() > end:
                    raise TimeoutError
        except TimeoutError as error:
            raise self._late(limit) from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineError("the engine cannot be asked", field=self.option, found=repr(error),
                              do="look whether it runs and listens") from error  # fmt: skip
        finally:
            connection.close()
        text = data.decode("utf-8", "replace")
        if not 200 <= answer.status < 300:
            found = f"HTTP {answer.status}: {text[-_TAIL:].strip()}"
            raise EngineError("the engine refused", field=self.option, found=found, expected="2xx",
                              do="look at the engine's log")  # fmt: skip
        return text

    def _command(self, facts: Mapping[str, str | int], limit: float) -> str:
        environment = {**os.environ, **{f"WEIGHT_SYNC_{name.upper()}": str(value) for name, value in facts.items()}}
        # files, not pipes: a daemon that the command leaves behind would hold a pipe open
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(self.target, shell=True, env=environment, stdin=subprocess.DEVNULL,
                                       stdout=output, stderr=errors, start_new_session=True)  # fmt: skip
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired as error:
                raise self._late(limit) from error
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if status != 0:
                raise EngineError("the command failed", field=self.option,
                                  found=f"exit status {status}: {_end_of(errors).strip()}", expected="exit status 0",
                                  do="run it by hand with the same WEIGHT_SYNC_ variables")  # fmt: skip
            output.seek(0)
            return output.read(_KEEP).decode("utf-8", "replace")


def _connect(connection: http.client.HTTPConnection, end: float, option: str) -> None:
    """Connects; while nobody listens, again until ``end`` (of the monotonic clock), which is said once."""
    told = False
    while True:
        try:
            connection.connect()
            return
        except ConnectionRefusedError:
            left = end - time.monotonic()
            if left < _AGAIN_S:
                raise
            if not told:
                _LOG.warning("%s: nobody listens there yet; trying for %.0f s", option, left)
                told = True
            time.sleep(_AGAIN_S)


def _end_of(stream: IO[bytes]) -> str:
    """The last characters of a file."""
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _TAIL))
    return stream.read().decode("utf-8", "replace")
