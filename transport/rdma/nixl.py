"""OneSided by NIXL with its UCX backend.

Owns the agent, its settings, and the translation of its errors. NIXL is imported when the first agent is made.

Settings, all explicit: error handling by peer (a peer that dies fails its transfers and nothing else), one worker, and
UCX_TLS and UCX_NET_DEVICES from the configuration. UCX reads them when the first agent of the process is made, so a
process has one set of them. There is no progress thread: it would burn a core even when idle; whoever waits polls.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.config import Config
from weight_sync.errors import ConfigError, EngineError, StoreUnavailableError
from weight_sync.transport.rdma.onesided import OneSided, Post, Span

__all__ = ["NixlAgent", "has_rdma_devices", "load_nixl", "open_agent"]

_BUILDS = ("nixl_cu13", "nixl_cu12", "nixl")
_INFINIBAND = Path("/sys/class/infiniband")
_told = threading.Event()


def load_nixl() -> Any:
    """The API module of whatever build is installed. Raises ConfigError that says what to install."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")  # before the import: else it tells of every agent
    why = []
    for name in _BUILDS:
        try:
            api = importlib.import_module(f"{name}._api")
        except ImportError as error:
            why.append(f"{name}: {error}")
            continue
        told = logging.getLogger("nixl")
        told.handlers.clear()  # they write to stdout, where commands print JSON
        told.propagate = True
        return api
    raise ConfigError("the rdma backend needs NIXL", field="weight_sync.backend", found="; ".join(why),
                      do="pip install 'weight-sync[rdma]' (nixl-cu12), or nixl-cu13 beside CUDA 13")  # fmt: skip


def has_rdma_devices() -> bool:
    """Whether the kernel shows any."""
    return _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())


def open_agent(config: Config, role: str) -> NixlAgent:
    """An agent with the configured settings; says once when there is no RDMA device."""
    settings = config.rdma
    transports = settings.transports
    if transports is None and not has_rdma_devices():
        transports = "tcp,sm,self"
        if not _told.is_set():
            _told.set()
            logging.getLogger("weight_sync.rdma").warning(
                "this host has no RDMA device: versions travel over TCP and shared memory"
            )
    for key, value in (("UCX_TLS", transports), ("UCX_NET_DEVICES", settings.devices)):
        if value is not None:
            os.environ[key] = value
    return NixlAgent(f"{role}-{uuid.uuid4().hex[:12]}")


@contextmanager
def _translated(what: str, where: str) -> Iterator[None]:
    """NIXL's own errors are not typed by what a caller can do; all of them mean that a peer has to be set up again."""
    try:
        yield
    except Exception as error:
        raise StoreUnavailableError(what, field=where, found=f"{type(error).__name__}: {error}",
                                    do="wait until the other side has registered again") from error  # fmt: skip


class _NixlPost(Post):
    def __init__(self, api: Any, handle: Any, nbytes: int, peer: str) -> None:
        self._api, self._handle, self.nbytes, self._peer = api, handle, nbytes, peer

    def start(self) -> bool:
        with _translated("a write could not be posted", self._peer):
            return self._state(self._api.transfer(self._handle))

    def done(self) -> bool:
        with _translated("a write failed", self._peer):
            return self._state(self._api.check_xfer_state(self._handle))

    def _state(self, state: str) -> bool:
        if state == "ERR":
            raise RuntimeError("NIXL reports ERR")
        return bool(state == "DONE")

    def release(self) -> None:
        with suppress(Exception):  # in flight to a dead peer: the agent keeps it until it goes itself
            self._handle.release()


class NixlAgent(OneSided):
    """One agent; made once per process and role."""

    def __init__(self, name: str) -> None:
        api = load_nixl()
        self.name = name
        config = api.nixl_agent_config(
            enable_prog_thread=False, backends=[], sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        )
        try:
            self._api = api.nixl_agent(name, config)
            self._api.create_backend("UCX", {"ucx_error_handling_mode": "peer", "num_workers": "1"})
        except Exception as error:
            raise EngineError("NIXL cannot start", field="UCX", found=f"{type(error).__name__}: {error}",
                              expected=f"UCX_TLS={os.environ.get('UCX_TLS', 'unset')} to be usable",
                              do="set rdma.transports, for example to tcp") from error  # fmt: skip
        self._registered: list[Any] = []
        self._prepared: dict[str, list[Any]] = {}  # descriptor lists by peer
        self._lock = threading.Lock()

    def register(self, spans: Sequence[Span]) -> None:
        """One call per kind of memory."""
        for kind, some in _by_kind(spans).items():
            rows = [(span.address, span.nbytes, span.device or 0, "") for span in some]
            try:
                self._registered.append(self._api.register_memory(rows, kind))
            except Exception as error:
                total = sum(span.nbytes for span in some)
                raise EngineError(
                    f"memory cannot be registered ({kind})", field=f"{len(some)} blocks",
                    found=f"{type(error).__name__}: {error}",
                    expected=f"{total} bytes", do="raise ulimit -l; on CUDA unset expandable_segments; or use the grpc or "
                                                  "file backend",
                ) from error  # fmt: skip

    def metadata(self) -> bytes:
        """Of all that is registered."""
        return bytes(self._api.get_agent_metadata())

    def connect(self, metadata: bytes) -> str:
        """A peer with the same name as an older one replaces it."""
        with _translated("a peer cannot be reached", "metadata"):
            peer = self._api.add_remote_agent(metadata)
            name = peer.decode() if isinstance(peer, bytes) else str(peer)
            self._api.make_connection(name)
        return name

    def disconnect(self, peer: str) -> None:
        """Descriptor lists go first."""
        with self._lock:
            prepared = self._prepared.pop(peer, [])
        for handle in prepared:
            with suppress(Exception):  # of a peer that is gone
                handle.release()
        with suppress(Exception):  # it may be gone already
            self._api.remove_remote_agent(peer)

    def prepare(
        self, peer: str, rows: npt.NDArray[Any], local: int | None, remote: int | None, split: Sequence[int]
    ) -> list[Post]:
        """One descriptor list on each side; one request per post."""
        if not len(rows):
            return []
        with _translated("writes cannot be prepared", peer):
            mine = self._api.prep_xfer_dlist("NIXL_INIT_AGENT", _table(rows, "source", local), _kind(local))
            theirs = self._api.prep_xfer_dlist(peer, _table(rows, "target", remote), _kind(remote))
            with self._lock:
                self._prepared.setdefault(peer, []).extend((mine, theirs))
            posts: list[Post] = []
            first = 0
            for end in split:
                index = np.arange(first, end, dtype=np.int32)
                handle = self._api.make_prepped_xfer("WRITE", mine, index, theirs, index)
                posts.append(_NixlPost(self._api, handle, int(rows["nbytes"][first:end].sum()), peer))
                first = end
        return posts

    def notify(self, peer: str, note: bytes) -> None:
        """By the same connection as the writes."""
        with _translated("a note could not be sent", peer):
            self._api.send_notif(peer, note)

    def notes(self) -> list[tuple[str, bytes]]:
        """Also makes progress."""
        with _translated("notes cannot be read", self.name):
            found = self._api.get_new_notifs()
        return [(peer, bytes(note)) for peer, some in found.items() for note in some]

    def close(self) -> None:
        """Peers, then memory."""
        for peer in list(self._prepared):
            self.disconnect(peer)
        registered, self._registered = self._registered, []
        for handle in registered:
            with suppress(Exception):  # the agent goes with the process anyway
                self._api.deregister_memory(handle)


def _kind(device: int | None) -> str:
    return "DRAM" if device is None else "VRAM"


def _by_kind(spans: Sequence[Span]) -> dict[str, list[Span]]:
    kinds: dict[str, list[Span]] = {}
    for span in spans:
        if span.nbytes:
            kinds.setdefault(_kind(span.device), []).append(span)
    return kinds


def _table(rows: npt.NDArray[Any], side: str, device: int | None) -> npt.NDArray[np.uint64]:
    out = np.empty((len(rows), 3), np.uint64)
    out[:, 0], out[:, 1], out[:, 2] = rows[side], rows["nbytes"], device or 0
    return out
