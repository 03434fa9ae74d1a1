"""One object store behind seven verbs, the same on a folder, S3, Google, Azure and memory.

Owns the connection, retries of uploads and what failures mean. Owns no layout and no protocol: keys come from
keys.py, rules from weight_sync.version. "Absent" is an answer here (None, False), never an error.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import LocalStore, MemoryStore, ObjectStore

from weight_sync.config import Config
from weight_sync.errors import ConfigError, CorruptionError, StoreError, StoreUnavailableError
from weight_sync.transport.file import folder
from weight_sync.transport.file.faults import FAILURES, Action, names_no_bucket, store_error
from weight_sync.transport.file.location import Location, locate, split_options

__all__ = ["SMALL_OBJECT", "Meta", "Store"]

SMALL_OBJECT = 256 << 20
"""Most bytes of an object that is read whole (entries, leases, batches): bounds memory against a hostile store."""

PART = 8 << 20
"""Bytes of one part of an upload; larger when an object would have more than 9,000 parts (S3 allows 10,000)."""

_CONCURRENT_PARTS = 4
_ATTEMPTS = 5

_MEMORY: dict[str, MemoryStore] = {}
_MEMORY_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Meta:
    """One object of a listing.

    Attributes:
        key: of the store.
        size: bytes.
        modified: seconds by the store's clock; S3 rounds down to whole ones.
    """

    key: str
    size: int
    modified: float


class Store:
    """The object store of one configuration. Threads may share it. Opened at the first use.

    Every method raises StoreError, or one of its kinds, naming the object.
    """

    def __init__(self, config: Config) -> None:
        self.location: Location = locate(config.uri)
        self._options = dict(config.store_options)
        self._timeout_s = config.timeout_s
        self._lock = threading.Lock()
        self._opened: ObjectStore | None = None
        if self.location.root is None:
            self._backend()  # bad options are the configuration's fault: say so at once

    def name(self, key: str) -> str:
        """``key`` for messages."""
        return f"{self.location.uri}/{key}"

    # --- reading ---

    def get(self, key: str) -> bytes | None:
        """A small object, whole; None when absent. Raises CorruptionError when it is not small."""
        try:
            result = obstore.get(self._backend(), key)
            if result.meta["size"] > SMALL_OBJECT:
                raise CorruptionError(
                    "object is too large to be what it should be",
                    field=self.name(key),
                    found=result.meta["size"],
                    expected=f"at most {SMALL_OBJECT} bytes",
                )
            return bytes(result.bytes())
        except FAILURES as error:
            self._absent(error, "read", key)
            return None

    def read(self, key: str, offset: int, length: int) -> memoryview | None:
        """Up to ``length`` bytes (1 or more) from ``offset``, fewer at the end of the object; None when absent."""
        try:
            return memoryview(obstore.get_range(self._backend(), key, start=offset, length=length))
        except FAILURES as error:
            if isinstance(error, FileNotFoundError):
                self._absent(error, "read", key)
                return None
            found = self.head(key)
            if found is None:
                return None
            if found.size <= offset:  # each store has its own words for this one
                return memoryview(b"")
            raise store_error(error, "read", self.name(key)) from error

    def head(self, key: str) -> Meta | None:
        """Size and time of an object; None when absent."""
        try:
            return _meta(obstore.head(self._backend(), key))
        except FAILURES as error:
            self._absent(error, "read", key)
            return None

    def list(self, prefix: str, after: str | None = None) -> list[Meta]:
        """Objects below the folder ``prefix``, sorted by key; only keys greater than ``after``."""
        try:
            pages = obstore.list(self._backend(), prefix, offset=after, chunk_size=1000)
            return sorted((_meta(item) for page in pages for item in page), key=lambda meta: meta.key)
        except FAILURES as error:
            self._absent(error, "list", prefix)
            return []

    # --- writing ---

    def create(self, key: str, data: bytes) -> bool:
        """Put-if-absent, durable on return: True for the one caller that wrote it, False when it exists.

        A request that is repeated after a lost answer may find its own object: callers compare what is there.
        """
        try:
            if self.location.root is not None:
                return folder.create(self.location.root / key, data, self.location.root)
            obstore.put(self._backend(create=True), key, data, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        except FAILURES as error:
            raise store_error(error, "write", self.name(key)) from error
        return True

    def replace(self, key: str, data: bytes) -> None:
        """Writes an object over what may be there, durable on return."""
        try:
            if self.location.root is not None:
                folder.replace(self.location.root / key, data, self.location.root)
            else:
                obstore.put(self._backend(create=True), key, data, use_multipart=False)
        except FAILURES as error:
            raise store_error(error, "write", self.name(key)) from error

    def put(self, key: str, data: bytes) -> None:
        """Writes an object over what may be there; atomic, but a power cut may lose it."""
        try:
            obstore.put(self._backend(create=True), key, data, use_multipart=False)
        except FAILURES as error:
            raise store_error(error, "write", self.name(key)) from error

    def upload(self, key: str, size: int, chunks: Callable[[], Iterator[memoryview]]) -> None:
        """Writes an object of ``size`` bytes, durable on return and invisible until it is whole.

        ``chunks()`` yields the bytes from the start each time it is called. Objects above PART bytes go up in parts,
        at most four of them in memory at once. A part that fails is sent again alone; an upload that fails is sent
        again from the start, up to five times within ``timeout_s``. Nothing is resumed by another process.
        """
        deadline = time.monotonic() + self._timeout_s
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                self._upload_once(key, size, chunks())
            except StoreUnavailableError:
                pause = random.uniform(0.5, 1.0) * min(8.0, 0.25 * 2**attempt)
                if attempt == _ATTEMPTS or time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
            else:
                return

    def _upload_once(self, key: str, size: int, chunks: Iterator[memoryview]) -> None:
        backend = self._backend(create=True)
        root = self.location.root
        try:
            if size <= PART:
                obstore.put(backend, key, list(chunks), use_multipart=False)
            else:
                part = max(PART, (size // 9000 // (1 << 20) + 1) << 20)
                obstore.put(
                    backend, key, chunks, use_multipart=True, chunk_size=part, max_concurrency=_CONCURRENT_PARTS
                )
            if root is not None:
                folder.sync_file(root / key, root)
        except FAILURES as error:
            raise store_error(error, "write", self.name(key)) from error

    def delete(self, key: str) -> None:
        """Deletes an object; an absent one is fine."""
        try:
            obstore.delete(self._backend(), key)
        except FAILURES as error:
            self._absent(error, "delete", key)

    def move(self, source: str, target: str) -> None:
        """Renames an object; an absent one is fine."""
        try:
            obstore.rename(self._backend(), source, target)
        except FAILURES as error:
            self._absent(error, "write", source)

    # --- time and leftovers ---

    def now(self, probe: str) -> float:
        """The store's time in seconds, from an object ``probe`` written for the purpose."""
        self.put(probe, b"")
        meta = self.head(probe)
        if meta is None:
            raise StoreError(
                "probe vanished", field=self.name(probe), do="check that nothing else deletes objects here"
            )
        return meta.modified

    def sweep(self, older_than: float) -> int:
        """Deletes files in the making whose last write was before ``older_than`` (the store's time); their number.

        Only folders have them; S3 and the like keep parts of broken uploads out of sight until a lifecycle rule of
        the bucket ends them.
        """
        root = self.location.root
        if root is None:
            return 0
        swept = 0
        try:
            for path, modified in folder.leftovers(root):
                if modified < older_than:
                    path.unlink(missing_ok=True)
                    swept += 1
        except OSError as error:
            raise store_error(error, "delete", self.location.uri) from error
        return swept

    # --- connection ---

    def _absent(self, error: Exception, action: Action, key: str) -> None:
        """Returns when ``error`` says that the object is absent, else raises what it means."""
        if isinstance(error, FileNotFoundError) and not names_no_bucket(error):
            return
        raise store_error(error, action, self.name(key)) from error

    def _backend(self, create: bool = False) -> ObjectStore:
        """obstore's client. A folder that is not there yet is made for a writer, and empty for a reader.

        Raises FileNotFoundError for the reader, which every verb takes for "absent".
        """
        with self._lock:
            if self._opened is None:
                if self.location.root is None:
                    self._opened = self._connect()
                else:
                    if create:
                        self.location.root.mkdir(parents=True, exist_ok=True)
                    elif not self.location.root.is_dir():
                        raise FileNotFoundError(str(self.location.root))
                    self._opened = LocalStore(self.location.root, automatic_cleanup=True)
            return self._opened

    def _connect(self) -> ObjectStore:
        uri = self.location.uri
        if self.location.scheme == "memory":
            with _MEMORY_LOCK:
                return _MEMORY.setdefault(uri, MemoryStore())
        options, client = split_options(self._options)
        client.setdefault("timeout", f"{max(1, int(self._timeout_s))}s")
        client.setdefault("read_timeout", "30s")  # a stalled connection must not eat the whole limit
        retry: dict[str, Any] = {"retry_timeout": timedelta(seconds=min(self._timeout_s, 180.0))}
        try:
            # Any: which store's option types apply cannot be told from a URI
            connect: Any = obstore.store.from_url
            return cast(ObjectStore, connect(uri, config=options, client_options=client, retry_config=retry))
        except FAILURES as error:
            raise ConfigError(
                "store cannot be opened",
                field="weight_sync.uri, weight_sync.store_options",
                found=f"{uri}: {str(error).partition(chr(10))[0]}",
                do="use obstore's option names: endpoint, region, access_key_id, secret_access_key, allow_http, ...",
            ) from error


def _meta(item: Any) -> Meta:
    return Meta(item["path"], item["size"], item["last_modified"].timestamp())
