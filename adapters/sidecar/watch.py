"""Two lookouts: one sees whether the engine lives, the other one which version is the newest.

Owns their threads. Owns no consequence: the driver and the gate are told.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress

from weight_sync.adapters.sidecar.driver import Driver
from weight_sync.adapters.sidecar.engine import ServedEngine
from weight_sync.adapters.sidecar.gate import Gate
from weight_sync.adapters.sidecar.settings import Settings
from weight_sync.config import Config
from weight_sync.errors import WeightSyncError
from weight_sync.ports import ReplicaEnd
from weight_sync.registry import open_transport

__all__ = ["HeadWatch", "Watchdog"]

_LOG = logging.getLogger("weight_sync.sidecar")
_LOOK_S = 1.0
_TETHERS = 4  # connections to watch before it is clear that the engine closes idle ones
_PAUSE_S = 2.0  # after an error of the store


class _Watch(threading.Thread):
    """A thread that looks again and again until `stop`."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.ended = threading.Event()

    def stop(self, timeout: float) -> None:
        """Ends the thread, or leaves it when it hangs: it dies with the process."""
        self.ended.set()
        if self.is_alive():
            self.join(timeout)


class Watchdog(_Watch):
    """Asks the engine whether it lives: regularly, when a request failed, and when a connection to it breaks.

    The kernel closes the connections of a process that dies, so one that nothing is ever sent on tells at once, also
    when another process is there before the next look. Servers that close idle connections take it from us.
    """

    def __init__(self, engine: ServedEngine, drivers: Sequence[Driver], settings: Settings) -> None:
        super().__init__("weight-sync-watchdog")
        self._engine, self._drivers, self._settings = engine, drivers, settings
        self._up: bool | None = None
        self._bell, self._ring = socket.socketpair()
        self._ring.setblocking(False)
        self._tethers: list[socket.socket] = []  # to every engine, or none
        self._tethers_left = 0 if any(url.startswith("https") for url in settings.engine_url) else _TETHERS

    def look_now(self) -> None:
        """There is reason to believe that the engine is gone."""
        with suppress(BlockingIOError, OSError):  # it rings already, or nobody listens any more
            self._ring.send(b"!")

    def stop(self, timeout: float) -> None:
        """Ends the thread, or leaves it when it hangs: it dies with the process."""
        self.ended.set()
        self.look_now()
        super().stop(timeout)

    def run(self) -> None:
        """Until `stop`."""
        while not self.ended.is_set():
            alive = self._ask()
            if not alive and self._up is not False:
                self._lost("the engine does not answer")
            if alive and not self._up:
                for driver in self._drivers:
                    driver.engine_back()
            self._up = alive
            if self._wait() and alive:
                self._lost("the engine closed its connections")
                self._up = False
        self._cut()

    def _lost(self, reason: str) -> None:
        for driver in self._drivers:
            driver.engine_lost(reason)
        _LOG.warning(reason)

    def _ask(self) -> bool:
        try:
            return self._engine.alive(self._settings.watch_timeout_s)
        except Exception:  # a watchdog that dies watches nothing
            _LOG.exception("the engine cannot be asked whether it lives")
            return False

    def _wait(self) -> bool:
        """Until the next look is due. Returns whether the tether broke."""
        if self._up and not self._tethers and self._tethers_left:
            self._tie()
        readable, _, _ = select.select([self._bell, *self._tethers], [], [], self._settings.watch_s)
        if self._bell in readable:
            self._bell.recv(4096)
        broken = [tether for tether in self._tethers if tether in readable and _is_over(tether)]
        if broken:
            self._cut()
        return bool(broken)

    def _tie(self) -> None:
        self._tethers_left -= 1
        try:
            for address in self._settings.engine_addresses:
                self._tethers.append(socket.create_connection(address, self._settings.watch_timeout_s))
        except OSError:  # the next look tells why
            self._cut()

    def _cut(self) -> None:
        for tether in self._tethers:
            tether.close()
        self._tethers.clear()


def _is_over(tether: socket.socket) -> bool:
    """Whether the other side closed a connection that is readable."""
    try:
        return not tether.recv(1)
    except OSError:  # a reset says what an end says
        return True


class HeadWatch(_Watch):
    """Follows the log beside the replica, which may be busy or failing: staleness is told from what is seen here."""

    def __init__(self, config: Config, driver: Driver, gate: Gate) -> None:
        super().__init__("weight-sync-head")
        self._config, self._driver, self._gate = config, driver, gate
        self._transport = open_transport(config)
        self._end: ReplicaEnd | None = None
        self._head: int | None = None

    def run(self) -> None:
        """Until `stop`."""
        while not self.ended.is_set():
            try:
                self._look()
            except WeightSyncError as error:
                _LOG.info("the newest version cannot be seen: %s", error)
                self.ended.wait(_PAUSE_S)
            except Exception:  # staleness would never be known again
                _LOG.exception("the newest version cannot be seen")
                self.ended.wait(_PAUSE_S)
        self._switch(None)

    def _look(self) -> None:
        if self._end is None:
            self._end = self._transport.replica_end(self._config.run_id)
        newer = self._end.wait(self._head, _LOOK_S)
        if newer is not None:
            self._head = newer
        if self._head is None:
            return
        run = self._end.run_id()
        self._gate.saw(run, self._head)
        if newer is not None:
            self._driver.wake()
        elif self._config.run_id is None and (newest := self._end.newest_run()) not in (None, run):
            end = self._transport.replica_end(newest)
            if end.head() is None:
                end.close()
            else:
                self._switch(end)

    def _switch(self, end: ReplicaEnd | None) -> None:
        if self._end is not None:
            self._end.close()
        self._end, self._head = end, None
