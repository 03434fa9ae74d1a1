"""How the rollout side learns which version a sync ended with, at once and also when it failed; and how the trainer learns
which way each rollout went there.

Owns a small board on actor rank 0 and what is asked of it. One line of JSON each way; whoever asks shows the token that verl
carried to it. Owns no weight and no meaning of a version.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import socketserver
import threading
from dataclasses import dataclass
from typing import Any

from weight_sync.adapters.trainers.metrics import PREFIX
from weight_sync.consensus import writer_name
from weight_sync.errors import DeadlineError, StoreUnavailableError

__all__ = ["IN_PLACE", "WHOLE", "Board", "Notice", "read_notice", "tell_path"]

IN_PLACE, WHOLE = "in_place", "whole"
"""The ways of a rollout to a version: written where the weights lie, or loaded from every tensor."""

_LINE = 1 << 12


@dataclass(frozen=True)
class Notice:
    """What a sync ended with.

    Attributes:
        run_id: of the run; "" before there is one.
        version: the newest that is committed; None for none.
        failed: whether this sync published nothing.
    """

    run_id: str
    version: int | None
    failed: bool


class Board:
    """Serves the outcome of each round to whoever asks for it, before or after it is known."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self.token = secrets.token_hex(16)
        self.round = 0
        self._outcome: tuple[int, Notice] | None = None
        self._told: dict[str, str] = {}
        self._told_before: dict[str, str] = {}
        self._change = threading.Condition()
        self._timeout_s = timeout_s
        board = self

        class Handler(socketserver.StreamRequestHandler):
            timeout = timeout_s

            def handle(self) -> None:
                self.wfile.write(json.dumps(board._answer(self.rfile.readline(_LINE))).encode() + b"\n")

        self._server = socketserver.ThreadingTCPServer((host, 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="weight_sync-board", daemon=True).start()

    def begin(self) -> dict[str, Any]:
        """Opens the next round; what a reader needs, as plain values."""
        with self._change:
            self.round += 1
            self._told, self._told_before = {}, self._told
        host, port = self._server.server_address[:2]
        return {"host": str(host), "port": int(port), "token": self.token, "round": self.round}

    def post(self, notice: Notice) -> None:
        """The outcome of the round that is open."""
        with self._change:
            self._outcome = (self.round, notice)
            self._change.notify_all()

    def paths(self) -> dict[str, float]:
        """Metrics: how many rollouts went which way in the round before; {} while none has told."""
        with self._change:
            ways = list(self._told_before.values())
        return {f"{PREFIX}rollouts_{way}": float(ways.count(way)) for way in (IN_PLACE, WHOLE)} if ways else {}

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = json.loads(line)
            shown, number, told = str(asked["token"]), int(asked["round"]), asked.get("path")
            who = str(asked["who"]) if told else ""
        except (ValueError, LookupError, TypeError, AttributeError):
            return {"error": "not a question"}
        if not hmac.compare_digest(shown.encode(), self.token.encode()):
            return {"error": "unknown token"}
        if told:
            with self._change:
                if number == self.round:
                    self._told[who] = str(told)
            return {}

        def is_there() -> bool:
            return self._outcome is not None and self._outcome[0] >= number

        with self._change:
            if not self._change.wait_for(is_there, self._timeout_s):
                return {"error": f"round {number} has not ended"}
            assert self._outcome is not None
            return dict(vars(self._outcome[1]))

    def close(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()


def read_notice(where: dict[str, Any], timeout_s: float) -> Notice:
    """Waits for the outcome of a round. Raises DeadlineError, and StoreUnavailableError when the board is gone."""
    answer = _ask(where, {}, timeout_s)
    return Notice(str(answer["run_id"]), answer["version"], bool(answer["failed"]))


def tell_path(where: dict[str, Any], path: str, timeout_s: float) -> None:
    """Says which way this process's engine went in a round. Raises as `read_notice`."""
    _ask(where, {"path": path, "who": writer_name()}, timeout_s)


def _ask(where: dict[str, Any], more: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    asked = {"token": where["token"], "round": where["round"], **more}
    try:
        with socket.create_connection((where["host"], where["port"]), timeout=timeout_s) as connection:
            connection.settimeout(timeout_s)
            connection.sendall(json.dumps(asked).encode() + b"\n")
            with connection.makefile("rb") as stream:
                answer: dict[str, Any] = json.loads(stream.readline(_LINE))
    except TimeoutError as error:
        raise DeadlineError("the trainer did not say how the sync ended", field="round", found=where["round"],
                            expected=f"within {timeout_s:g} s") from error  # fmt: skip
    except (OSError, ValueError) as error:
        raise StoreUnavailableError("the trainer cannot be asked", field=f"{where['host']}:{where['port']}",
                                    found=str(error)) from error  # fmt: skip
    if "error" in answer:
        raise StoreUnavailableError("the trainer does not say how the sync ended", field="round",
                                    found=answer["error"])  # fmt: skip
    return answer
