"""The control socket in vLLM's API process: pause, resume, caches, version, and calls into the workers.

Owns the socket, who may use it, and what each call does to vLLM's client of its own engine (`AsyncLLM`). Owns no weight.
The socket lies in a folder of this user alone (`weight_sync.config.runtime_dir`); no port is opened and none of vLLM's
development routes is needed. One request per connection: a line of JSON, answered by one.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import stat
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from weight_sync.adapters.engines.vllm.control import SUFFIX
from weight_sync.adapters.engines.worker.wire import Reply, encode_error
from weight_sync.config import runtime_dir
from weight_sync.errors import ConfigError, DeadlineError, EngineError

__all__ = ["METHOD", "Door"]

METHOD = "weight_sync_call"
"""Of a worker, through which calls reach its core."""

_REQUEST = 64 << 20  # longest request in bytes


class Door:
    """Serves one engine client on the event loop that it lives on."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._said = ""  # the version, where vLLM keeps none
        self._calls: dict[str, Callable[..., Awaitable[Reply]]] = {
            "hello": self._hello,
            "alive": self._alive,
            "ranks": self._ranks,
            "pause": self._pause,
            "resume": self._resume,
            "clear": self._clear,
            "announce": self._announce,
        }

    async def serve(self) -> None:
        """Until it is cancelled."""
        path = _private(runtime_dir()) / f"{os.getpid()}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        server = await asyncio.start_unix_server(self._answer, path, limit=_REQUEST)
        os.chmod(path, 0o600)
        try:
            async with server:
                await server.serve_forever()
        finally:
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

    # --- the calls ---

    async def _hello(self) -> Reply:
        return {"ports": _listening(), "pid": os.getpid()}

    async def _alive(self) -> Reply:
        await self._engine.check_health()
        if hasattr(self._engine, "is_paused"):
            await self._engine.is_paused()  # asks the scheduler's process
        return {}

    async def _ranks(self, verb: str, arguments: dict[str, Any]) -> Reply:
        # no limit of vLLM's own: one that runs out leaves answers behind that the next call would take for its own
        answers = await self._engine.collective_rpc(METHOD, args=(verb, json.dumps(arguments)))
        return {"ranks": [json.loads(answer) for answer in answers]}

    async def _pause(self, mode: str, within: float) -> Reply:
        before = await self._engine.is_paused()
        task = asyncio.ensure_future(self._engine.pause_generation(**self._pause_arguments(mode)))
        done, _ = await asyncio.wait({task}, timeout=within)
        if not done:
            if not before:
                await self._engine.resume_generation()
            raise DeadlineError("requests in flight took too long", field="timeout", expected=f"within {within:g} s",
                                do="allow more time, or pause in another mode")  # fmt: skip
        task.result()
        return {}

    def _pause_arguments(self, mode: str) -> dict[str, Any]:
        names = inspect.signature(self._engine.pause_generation).parameters
        if "mode" in names:
            return {"mode": mode, "clear_cache": False}
        if mode == "keep":
            raise EngineError("this vLLM cannot keep requests across a pause", field="pause", found=mode,
                              expected="wait or abort", do="set pause to wait")  # fmt: skip
        return {"wait_for_inflight_requests": mode == "wait", "clear_cache": False}

    async def _resume(self) -> Reply:
        await self._engine.resume_generation()
        return {}

    async def _clear(self) -> Reply:
        reset = self._engine.reset_prefix_cache
        names = inspect.signature(reset).parameters
        # requests that were kept hold keys and values of the old weights: they are computed again
        options = {name: True for name in ("reset_running_requests", "reset_connector") if name in names}
        if await reset(**options) is False:
            raise EngineError("vLLM did not drop its prefix cache", field="reset_prefix_cache", found=False,
                              do="pause in mode wait")  # fmt: skip
        for name in ("reset_mm_cache", "reset_encoder_cache"):
            if hasattr(self._engine, name):
                await getattr(self._engine, name)()
        return {}

    async def _announce(self, text: str) -> Reply:
        self._said = text
        if hasattr(self._engine, "update_weight_version"):
            await self._engine.update_weight_version(text)
        return {}


def _private(folder: Path) -> Path:
    """The folder, made when it is not there. Raises ConfigError when others can use it."""
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
