"""A long thin link on one machine: two network namespaces joined by a userspace wire with rate, delay and loss.

Owns the namespaces, their TUN devices and the wire between. Owns no measurement. Needs root (CAP_NET_ADMIN and
CAP_SYS_ADMIN) and /dev/net/tun; not every kernel has ``tc netem``, and this needs none.

    python benchmarks/link/emulator.py --rate 100 --rtt 80 --loss 0.1

prints one line of JSON with the namespaces and addresses once the link is up, and carries packets until stdin closes.
Packets leave in order at the rate, through a queue that drops what does not fit, and arrive half a round trip later.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=30)


@contextlib.contextmanager
def _namespace(name: str, device: str, address: str) -> Iterator[int]:
    """A namespace with one TUN device; yields our end of it."""
    _ip("netns", "add", name)
    try:
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _IFF_TUN | _IFF_NO_PI))
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "mtu", str(_MTU), "txqueuelen", "10000", "up")
        yield tun
        os.close(tun)
    finally:
        _ip("netns", "del", name)


class _Way:
    """One direction."""

    def __init__(self, source: int, target: int, rate: float, delay: float, loss: float, queue: float) -> None:
        self.source, self.target = source, target
        self._per_byte, self._delay, self._loss, self._queue = 8 / rate, delay, loss, queue
        self._free = 0.0  # when the wire has sent what was queued
        self._flying: deque[tuple[float, bytes]] = deque()
        self.sent = self.lost = 0

    def take(self) -> None:
        """Everything that waits to be sent."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, 1 << 16)
                now = time.monotonic()
                begin = max(now, self._free)
                if begin - now > self._queue or random.random() < self._loss:
                    self.lost += 1
                    continue
                self._free = begin + len(packet) * self._per_byte
                self._flying.append((self._free + self._delay, packet))

    def deliver(self) -> float:
        """What has arrived; seconds until the next will."""
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            with contextlib.suppress(BlockingIOError):  # a queue that is full drops
                os.write(self.target, self._flying.popleft()[1])
            self.sent += 1
        return self._flying[0][0] - now if self._flying else 1.0


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=100.0, help="Mbit/s each way")
    parser.add_argument("--rtt", type=float, default=80.0, help="ms")
    parser.add_argument("--loss", type=float, default=0.1, help="percent of packets, each way")
    parser.add_argument("--queue", type=float, default=100.0, help="ms of packets that wait at most")
    given = parser.parse_args()
    random.seed(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that the namespaces go
    tag = f"ws{os.getpid()}"
    near, far = (f"{tag}a", "10.77.0.1"), (f"{tag}b", "10.77.0.2")
    shape = (given.rate * 1e6, given.rtt / 2000, given.loss / 100, given.queue / 1000)
    with _namespace(near[0], f"{tag}ta"[:15], near[1]) as one, _namespace(far[0], f"{tag}tb"[:15], far[1]) as other:
        ways = [_Way(one, other, *shape), _Way(other, one, *shape)]
        print(json.dumps({"near": near, "far": far}), flush=True)
        poll = select.poll()
        for file in (one, other, sys.stdin.fileno()):
            poll.register(file, select.POLLIN | select.POLLHUP)
        pause = 0.0
        while True:
            ready = {file for file, _ in poll.poll(max(0.0, pause * 1000))}
            if sys.stdin.fileno() in ready:
                break
            for way in ways:
                if way.source in ready:
                    way.take()
            pause = min(way.deliver() for way in ways)
        with contextlib.suppress(BrokenPipeError):  # whoever asked has gone; the namespaces must go, too
            print(json.dumps({"sent": [way.sent for way in ways], "lost": [way.lost for way in ways]}), flush=True)


if __name__ == "__main__":
    main()
