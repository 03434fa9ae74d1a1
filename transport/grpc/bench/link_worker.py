"""The four processes of the measurement over a link: trainer, engine, and the two ends of bare TCP.

Owns what each does when told by a line on stdin, and the times it prints: seconds of the one monotonic clock that all
processes of a machine share. Run as ``python -m weight_sync.transport.grpc.bench.link_worker ROLE JSON``.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from weight_sync.transport.grpc.bench.link_model import Model

__all__ = ["main"]


def _say(**document: Any) -> None:
    print(json.dumps(document), flush=True)


def _lines() -> Any:
    return (line.strip() for line in sys.stdin)


def trainer(given: dict[str, Any]) -> None:
    """Hosts the service; each line "step" publishes one, and tells when it was committed and acknowledged."""
    from weight_sync import Publisher
    from weight_sync.proto.v1 import common_pb2

    model = Model(given["elements"], given["density"])
    with Publisher.open(f"grpc://{given['host']}:{given['port']}", store=given["store"], insecure=True,
                        anchor_every=0, anchor_share=0, forms=["step"]) as publisher:  # fmt: skip
        times: dict[str, float] = {}
        heard = threading.Event()
        end: Any = publisher._end
        commit, told = end.commit, end.server.metrics.acknowledged

        def committing(manifest: Any) -> None:
            commit(manifest)
            times["committed"] = time.monotonic()

        def hearing(message: Any) -> None:
            told(message)
            if message.HasField("version") and message.version.number == publisher._end.next_number() - 1:
                times["acknowledged"] = time.monotonic()
                heard.set()

        end.commit, end.server.metrics.acknowledged = committing, hearing
        publisher.publish(model.tensors, step=0)
        _say(ready=True)
        for number, _ in enumerate(_lines(), 1):
            model.step(number)
            heard.clear()
            publisher.publish(model.tensors, step=number)
            manifest = end.reader().manifest(publisher.version)
            size = sum(r.size for r in manifest.views[0].shards if r.form == common_pb2.FORM_STEP)
            if not heard.wait(given["limit_s"]):
                _say(error="no acknowledgement")
                return
            ack = publisher.acknowledgements()[0]
            _say(seconds=times["acknowledged"] - times["committed"], bytes=size, manifest_bytes=manifest.ByteSize(),
                 read_s=ack.timings.fetch, stage_s=ack.timings.decode, pause_s=ack.timings.pause,
                 error=ack.error)  # fmt: skip


def engine(given: dict[str, Any]) -> None:
    """Follows until stdin closes; tells how long the first, full state took."""
    from weight_sync import Replica
    from weight_sync.testing import MemoryEngine

    model = Model(given["elements"], given["density"])
    held = MemoryEngine({name: tensor.clone() for name, tensor in model.tensors.items()} if given["holds_base"] else {})
    if given["holds_base"]:
        held.audit()
    stop = threading.Event()
    uri = f"grpc://{given['host']}:{given['port']}"
    with Replica.open(uri, held, connections=given["connections"], timeout_s=given["limit_s"]) as replica:
        began = time.monotonic()
        replica.sync()
        _say(ready=True, seconds=time.monotonic() - began)
        thread = threading.Thread(target=replica.follow, kwargs={"stop": stop}, daemon=True)
        thread.start()
        for _ in _lines():
            continue
        stop.set()
        thread.join(10)


def tcp_send(given: dict[str, Any]) -> None:
    """Each line "BYTES" sends so many over all connections, which stay; tells when the receiver had them all."""
    listener = socket.create_server((given["host"], given["port"]))
    _say(ready=True)
    peers = [listener.accept()[0] for _ in range(given["connections"])]
    for line in _lines():
        size = int(line)
        began = time.monotonic()
        shares = [size * (k + 1) // len(peers) - size * k // len(peers) for k in range(len(peers))]
        threads = [
            threading.Thread(target=peer.sendall, args=(bytes(share),))
            for peer, share in zip(peers, shares, strict=True)
        ]
        for peer, share in zip(peers, shares, strict=True):
            peer.sendall(share.to_bytes(8, "little"))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for peer in peers:
            assert peer.recv(1) == b"k"
        _say(seconds=time.monotonic() - began, bytes=size)


def tcp_receive(given: dict[str, Any]) -> None:
    """Receives on all connections and acknowledges with one byte on each."""
    peers = [socket.create_connection((given["host"], given["port"]), timeout=60) for _ in range(given["connections"])]
    for peer in peers:
        peer.settimeout(None)
    _say(ready=True)

    def receive(peer: socket.socket) -> None:
        buffer = bytearray(1 << 20)
        while head := peer.recv(8, socket.MSG_WAITALL):
            left = int.from_bytes(head, "little")
            while left:
                left -= peer.recv_into(buffer, min(left, len(buffer)))
            peer.sendall(b"k")

    for peer in peers:
        threading.Thread(target=receive, args=(peer,), daemon=True).start()
    for _ in _lines():
        continue


def main() -> None:
    """The role that was asked for."""
    roles = {"trainer": trainer, "engine": engine, "tcp-send": tcp_send, "tcp-receive": tcp_receive}
    given = json.loads(sys.argv[2])
    Path(given.get("store", "/tmp")).mkdir(parents=True, exist_ok=True)
    roles[sys.argv[1]](given)


if __name__ == "__main__":
    main()
