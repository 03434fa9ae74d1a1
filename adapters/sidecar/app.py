"""The ASGI application: the sidecar's own endpoints, everything else to the engine.

Owns the routes. Owns neither the proxy nor what the endpoints tell.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weight_sync.adapters.sidecar.exchange import Receive, Scope, Send
from weight_sync.adapters.sidecar.proxy import Proxy
from weight_sync.adapters.sidecar.status import Status

__all__ = ["App"]

_OWN = ("/metrics", "/healthz", "/readyz")


class App:
    """Dispatches by path, without a router in the way of what is proxied."""

    def __init__(self, proxy: Proxy, status: Status, wake: Callable[[], None]) -> None:
        self._proxy, self._status, self._wake = proxy, status, wake
        self._own = Starlette(
            routes=[
                Route("/weight_sync/status", self._tell),
                Route("/weight_sync/wake", self._look, methods=["POST"]),
                Route("/metrics", self._metrics),
                Route("/healthz", self._health),
                Route("/readyz", self._ready),
            ],
            lifespan=self._lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "versions do not travel over websockets"})
            return
        path = scope.get("path", "")
        if scope["type"] == "http" and path not in _OWN and path.partition("/weight_sync")[0] != "":
            await self._proxy(scope, receive, send)
        else:
            await self._own(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self._proxy.open()
        yield
        await self._proxy.close()

    async def _tell(self, request: Request) -> Response:
        return JSONResponse(self._status.document())

    async def _look(self, request: Request) -> Response:
        self._wake()
        return JSONResponse({"awake": True}, status_code=202)

    async def _metrics(self, request: Request) -> Response:
        return Response(self._status.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"healthy": True})

    async def _ready(self, request: Request) -> Response:
        reason = self._status.not_ready()
        return JSONResponse({"ready": not reason, "reason": reason}, status_code=503 if reason else 200)
