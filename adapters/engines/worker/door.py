"""A control socket inside an engine's server: a line of JSON asks, a line of JSON answers, one request per connection.

Owns the socket, who may use it, and the way back of an error. Owns no call: an engine's door names them. The socket lies
in a folder of this user alone (`weight_sync.config.runtime_dir`); no port is opened and no route of the engine's own is
needed.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from weight_sync.adapters.engines.worker.wire import Reply, encode_error
from weight_sync.config import runtime_dir
from weight_sync.errors import ConfigError

__all__ = ["DoorServer", "private_folder"]

_REQUEST = 64 << 20  # longest request in bytes


class DoorServer:
    """Serves on the event loop of the engine's own client.

    Args:
        suffix: of the socket's name, by which drivers find it.
        calls: by name; each answers with a JSON object. ``hello`` is there already.

    Attributes:
        is_open: whether the socket is there.
    """

    def __init__(self, suffix: str, calls: Mapping[str, Callable[..., Awaitable[Reply]]]) -> None:
        self._suffix, self._calls = suffix, {"hello": self._hello, **calls}
        self.is_open = False

    async def serve(self) -> None:
        """Until it is cancelled."""
        path = private_folder() / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{self._suffix}"
        server = await asyncio.start_unix_server(self._answer, path, limit=_REQUEST)
        os.chmod(path, 0o600)
        self.is_open = True
        try:
            async with server:
                await server.serve_forever()
        finally:
            self.is_open = False
            path.unlink(missing_ok=True)

    async def reply(self, call: str, **arguments: Any) -> Reply:
        """The answer to one request, an error among them; on the engine's event loop."""
        try:
            return await self._calls[call](**arguments)
        except Exception as error:
            return encode_error(error)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            reply = await self.reply(**json.loads(await reader.readline()))
        except Exception as error:
            reply = encode_error(error)
        try:
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        except OSError:
            writer.close()  # the driver is gone; whatever it asked for was done, and the next one reads that off

    async def _hello(self) -> Reply:
        return {"ports": _listening(), "pid": os.getpid()}


def private_folder() -> Path:
    """The folder of all sockets, made when it is not there. Raises ConfigError when others can use it."""
    folder = runtime_dir()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError("the folder of the control sockets is not this user's alone", field=str(folder),
                          found=oct(found.st_mode), do="remove it, or set WEIGHT_SYNC_RUNTIME_DIR")  # fmt: skip
    return folder


def _listening() -> list[int]:
    """TCP ports on which this process listens, as /proc tells."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            inodes.add(os.readlink(entry))
    ports = set()
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with suppress(OSError):  # a kernel without IPv6
            for line in Path(table).read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                    ports.add(int(words[1].rpartition(":")[2], 16))
    return sorted(ports)
