"""An engine for the tests of the sidecar: a real OpenAI-like server that holds real weights, and its door.

The server answers with what its weights are: every token is the digest of all bits that are in place when it is made.
The weights lie in files, so that they outlive the process. `main` is the server; `DoorEngine` is the engine class that a
sidecar loads, which drives the server over HTTP.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from weight_sync.codec.digest import Digest
from weight_sync.config import Config
from weight_sync.errors import DeadlineError, EngineError, EngineInDoubtError
from weight_sync.layout.box import Box
from weight_sync.ports import Changes, DensePiece, Engine, PauseMode, Update
from weight_sync.proto.v1 import common_pb2, manifest_pb2, replica_pb2
from weight_sync.tensors import TensorSpec

SECRETS = ("/door", "/pause_everything", "/test")


# --- the door, from outside --------------------------------------------------------------------------------------------


class DoorEngine(Engine):
    """Drives the server below; registered as the engine ``door``."""

    control_routes = SECRETS

    def __init__(self, url: str, config: Config) -> None:
        self._url, self._config = urlsplit(url), config

    def _ask(self, verb: str, body: bytes = b"", limit: float = 30.0, method: str = "POST") -> bytes:
        assert self._url.hostname is not None
        connection = http.client.HTTPConnection(self._url.hostname, self._url.port, timeout=limit)
        try:
            connection.request(method, verb, body)
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError("the engine cannot be asked", field=verb, found=repr(error)) from error
        finally:
            connection.close()
        kinds = {409: EngineError, 410: EngineInDoubtError, 504: DeadlineError}
        if answer.status != 200:
            raise kinds.get(answer.status, EngineError)("the engine refused", field=verb, found=data.decode())
        return data

    def alive(self, timeout: float) -> bool:
        try:
            self._ask("/health", limit=timeout, method="GET")
        except EngineError:
            return False
        return True

    def describe(self) -> replica_pb2.EngineDescription:
        return replica_pb2.EngineDescription.FromString(self._ask("/door/describe"))

    def stage(self, update: Update) -> None:
        self._ask("/door/stage", pack(update))

    def _digest(self, verb: str) -> Digest:
        return Digest.from_proto(common_pb2.Digest.FromString(self._ask(f"/door/{verb}")))

    def commit(self) -> Digest:
        return self._digest("commit")

    def rollback(self) -> Digest:
        return self._digest("rollback")

    def audit(self) -> Digest:
        return self._digest("audit")

    def pause(self, mode: PauseMode, timeout: float) -> None:
        self._ask(f"/door/pause?mode={mode.value}&timeout={timeout}", limit=timeout + 5)

    def resume(self) -> None:
        self._ask("/door/resume")

    def clear_caches(self) -> None:
        self._ask("/door/clear_caches")

    def announce(self, version: common_pb2.VersionId) -> None:
        self._ask("/door/announce", version.SerializeToString())

    def close(self) -> None:
        """Nothing is kept open."""


def pack(update: Update) -> bytes:
    """An update as bytes: an .npz of arrays, and JSON that says what they are."""
    arrays: dict[str, Any] = {}
    changes, pieces = [], []
    for k, item in enumerate(update.changes):
        arrays[f"at{k}"] = item.positions
        arrays[f"to{k}"] = item.steps if item.bits is None else item.bits
        changes.append([_spec(item.spec), _box(item.coords), item.bits is None])
    for k, piece in enumerate(update.dense()):
        arrays[f"piece{k}"] = piece.bits
        pieces.append([_spec(piece.spec), _box(piece.coords)])
    facts = {
        "target": update.target.SerializeToString().hex(), "digest": update.digest.to_proto().SerializeToString().hex(),
        "tensors": [_spec(spec) for spec in update.tensors], "changes": changes, "pieces": pieces,
        "removed": update.removed, "full": update.full, "manifest": update.manifest.SerializeToString().hex(),
    }  # fmt: skip
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def unpack(data: bytes) -> Update:
    arrays = dict(np.load(io.BytesIO(data)))
    facts = json.loads(arrays["facts"].tobytes())
    changes = [
        Changes(TensorSpec(*spec[:2], tuple(spec[2])), Box(box[0], tuple(box[1]), tuple(box[2])), arrays[f"at{k}"],
                arrays[f"to{k}"] if is_step else None, None if is_step else arrays[f"to{k}"])
        for k, (spec, box, is_step) in enumerate(facts["changes"])
    ]  # fmt: skip
    pieces = [
        DensePiece(
            TensorSpec(*spec[:2], tuple(spec[2])), Box(box[0], tuple(box[1]), tuple(box[2])), arrays[f"piece{k}"]
        )
        for k, (spec, box) in enumerate(facts["pieces"])
    ]
    return Update(
        common_pb2.VersionId.FromString(bytes.fromhex(facts["target"])),
        Digest.from_proto(common_pb2.Digest.FromString(bytes.fromhex(facts["digest"]))),
        tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in facts["tensors"]),
        changes, lambda: iter(pieces), tuple(facts["removed"]), facts["full"],
        manifest_pb2.VersionManifest.FromString(bytes.fromhex(facts["manifest"])),
    )  # fmt: skip


def _spec(spec: TensorSpec) -> list[Any]:
    return [spec.name, spec.dtype, list(spec.shape)]


def _box(box: Box) -> list[Any]:
    return [box.offset, list(box.sizes), list(box.strides)]


# --- the server --------------------------------------------------------------------------------------------------------


class Server:
    """Requests, a fence in every mode, and the weights."""

    def __init__(self, folder: Path, step: int) -> None:
        from test_replica_crash import mapped

        from weight_sync.testing import MemoryEngine

        self.engine = MemoryEngine(mapped(folder, step), changes_tensors=False)
        self.running = asyncio.Event()  # steps may be made
        self.running.set()
        self.aborting = asyncio.Event()  # set, and replaced, at each abort
        self.go = asyncio.Event()  # lets streams that hold go on
        self.inside = 0
        self.idle = asyncio.Condition()
        self.dropped = self.made = 0  # requests whose client left, and all

    async def pause(self, mode: str, timeout: float) -> bool:
        self.running.clear()
        if mode == "abort":
            self.aborting.set()
            self.aborting = asyncio.Event()
        if mode == "wait":
            self.running.set()
            try:
                async with asyncio.timeout(timeout), self.idle:
                    await self.idle.wait_for(lambda: self.inside == 0)
            except TimeoutError:
                return False
            self.running.clear()
        return True

    async def tokens(self, ask: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One token after the other: the digest of the weights in place, and the version that was announced."""
        aborting = self.aborting
        self.inside += 1
        self.made += 1
        try:
            for k in range(ask.get("max_tokens", 4)):
                if k == 1 and ask.get("hold"):
                    await self.go.wait()
                if ask.get("hang") == "hard":
                    await asyncio.Event().wait()
                if ask.get("hang") == "soft":
                    await aborting.wait()
                if aborting.is_set():
                    return
                await self.running.wait()
                announced = self.engine.announced
                yield {"token": self.engine._recomputed().hex(), "version": announced and announced.number}
                await asyncio.sleep(ask.get("delay", 0))
        except asyncio.CancelledError:
            self.dropped += 1
            raise
        finally:
            self.inside -= 1
            async with self.idle:
                self.idle.notify_all()


def application(server: Server) -> Any:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    async def complete(request: Request) -> Response:
        ask = await request.json()
        if ask.get("stream"):
            return StreamingResponse(events(ask), media_type="text/event-stream")
        made = asyncio.create_task(collect(ask))
        gone = asyncio.create_task(left(request))
        await asyncio.wait({made, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not made.done():
            made.cancel()
            return Response(status_code=499)
        tokens = made.result()
        done = len(tokens) == ask.get("max_tokens", 4)
        choice = {"tokens": tokens, "logprobs": [-0.1, 1e-300], "finish_reason": "length" if done else "abort"}
        return JSONResponse({"object": "text_completion", "keys": sorted(ask), "choices": [choice]})

    async def collect(ask: dict[str, Any]) -> list[dict[str, Any]]:
        return [token async for token in server.tokens(ask)]

    async def left(request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    async def events(ask: dict[str, Any]) -> AsyncIterator[bytes]:
        async for token in server.tokens(ask):
            yield b"data: " + json.dumps({"choices": [{"text": "x", **token}]}).encode() + b"\n\n"
        if ask.get("done", True):
            yield b"data: [DONE]\n\n"

    async def echo(request: Request) -> Response:
        body = await request.body()
        facts = {"method": request.method, "path": request.scope["raw_path"].decode(), "query": request.url.query,
                 "body": body.decode("latin-1"), "headers": request.headers.items()}  # fmt: skip
        return JSONResponse(
            facts, headers={"X-Weight-Version-Start": "666", "Connection": "x-hop", "X-Hop": "1", "X-Kept": "2"}
        )

    async def door(request: Request) -> Response:
        verb, body, engine = request.path_params["verb"], await request.body(), server.engine
        if verb == "pause":
            query = request.query_params
            late = not await server.pause(query["mode"], float(query["timeout"]))
            engine.pause(PauseMode(query["mode"]), 0)
            return PlainTextResponse("late", 504) if late else Response()
        if verb == "resume":
            engine.resume()
            server.running.set()
            return Response()
        try:
            if verb == "stage":
                await run_in_threadpool(engine.stage, unpack(body))
            elif verb == "announce":
                engine.announce(common_pb2.VersionId.FromString(body))
            else:
                result = await run_in_threadpool(getattr(engine, verb))
                if isinstance(result, Digest):
                    result = result.to_proto()
                return Response(b"" if result is None else result.SerializeToString())
        except EngineInDoubtError as error:
            return PlainTextResponse(str(error), 410)
        except EngineError as error:
            return PlainTextResponse(str(error), 409)
        return Response()

    async def test(request: Request) -> Response:
        if request.path_params["verb"] == "go":
            server.go.set()
        return JSONResponse(
            {"inside": server.inside, "made": server.made, "dropped": server.dropped, "calls": server.engine.calls}
        )

    async def health(request: Request) -> Response:
        return Response()

    return Starlette(routes=[
        Route("/v1/completions", complete, methods=["POST"]), Route("/door/{verb}", door, methods=["POST"]),
        Route("/test/{verb}", test, methods=["POST"]), Route("/health", health),
        Route("/{path:path}", echo, methods=["GET", "POST", "PUT"]),
    ])  # fmt: skip


async def main(folder: Path, step: int, port: int) -> None:
    """Serves until it is killed. The weights in ``folder`` are made with the state after ``step`` unless they are there."""
    import uvicorn

    server = Server(folder, step)
    config = uvicorn.Config(application(server), log_level="warning", access_log=False)
    with socket.create_server(("127.0.0.1", port)) as listening:
        await uvicorn.Server(config).serve([listening])
