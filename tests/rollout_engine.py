"""An engine behind a sidecar, as a process: speaks the sidecar's contract and three engines' APIs, and fails on command.

Run as ``python rollout_engine.py PORT``. ``POST /test`` with a JSON object changes how it behaves.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

DEFAULTS: dict[str, Any] = {
    "run": "run", "version": 0, "end": None, "end_run": None, "delay": 0.0, "busy": 0, "retry_after": "1", "die_at": 0,
    "status": 200, "labels": None, "finish": "stop", "plain": False, "hang": 0, "others": 0, "broken": False, "head": None,
}  # fmt: skip
state = {**DEFAULTS}
asked: list[dict[str, Any]] = []


async def test(request: Request) -> Response:
    told = await request.json()
    if "reset" in told:
        asked.clear()
        told = {**DEFAULTS, "version": told["reset"]}
    state.update(told)
    return JSONResponse(asked)


async def status(_: Request) -> Response:
    served = {"run_id": state["run"], "version": state["version"]}
    seen = {"head_run_id": state["run"], "head": state["head"]}
    document = {**served, **seen, "in_flight": state["others"], "replica_id": f"engine-{sys.argv[1]}"}
    return JSONResponse(document)


def refusal(headers: Any) -> Response | None:
    wanted = {name: headers.get(f"x-weight-version-{name}") for name in ("min", "exact", "run")}
    low, exact, run = wanted["min"], wanted["exact"], wanted["run"]
    ok = (low is None or state["version"] >= int(low)) and (exact is None or state["version"] == int(exact))
    code, status_ = "weight_version_not_ready", 409
    if state["busy"]:
        state["busy"] -= 1
        ok, code, status_ = False, "engine_not_serving", 503
    if ok and run in (None, state["run"]):
        return None
    current = {"run": state["run"], "version": state["version"], "head": None}
    error = {"message": "not now", "code": code, "current": current, "wanted": wanted}
    return JSONResponse({"error": error}, status_, {"retry-after": state["retry_after"]})


async def serve(request: Request) -> Response:
    body = await request.json()
    asked.append({"path": request.url.path, "body": body, "headers": dict(request.headers)})
    if state["die_at"] == len(asked):
        os.kill(os.getpid(), 9)
    if (refused := refusal(request.headers)) is not None:
        return refused
    if state["status"] != 200:
        return JSONResponse({"error": {"message": "as told"}}, state["status"])
    headers = (
        {}
        if state["plain"]
        else {"x-weight-version-run": state["run"], "x-weight-version-start": str(state["version"])}
    )
    if state["hang"]:
        state["hang"] -= 1
        await asyncio.sleep(3600)
    await asyncio.sleep(state["delay"])
    if not state["plain"]:
        headers["x-weight-version-end"] = str(state["end"] if state["end"] is not None else state["version"])
        if state["end_run"]:
            headers["x-weight-version-end-run"] = state["end_run"]
    return JSONResponse({"nonsense": 1} if state["broken"] else answer(request.url.path, body), headers=headers)


def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Three tokens: the version, the prompt's first token, 7."""
    prompt = body.get("prompt") or body.get("token_ids") or body.get("input_ids")
    tokens, logprobs = [state["version"], prompt[0], 7], [-0.25, -0.5, -1.0]
    if path == "/v1/completions":
        choice = {"index": 0, "text": "x", "token_ids": tokens, "finish_reason": state["finish"],
                  "logprobs": {"token_logprobs": logprobs}}  # fmt: skip
        return {"choices": [choice]}
    if path == "/inference/v1/generate":
        content = [{"token_id": t, "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]
        labels = state["labels"] and [dict(zip(("version", "start", "end"), s, strict=True)) for s in state["labels"]]
        choice = {"index": 0, "token_ids": tokens, "finish_reason": state["finish"], "logprobs": {"content": content},
                  "weight_versions": labels, "routed_experts": "AAEC"}  # fmt: skip
        return {"request_id": "r", "choices": [choice]}
    triples = [[p, t, None] for t, p in zip(tokens, logprobs, strict=True)]
    meta = {"finish_reason": {"type": state["finish"]}, "output_token_logprobs": triples}
    meta["weight_versions"] = state["labels"]
    return {"text": "x", "output_ids": tokens, "meta_info": meta}


routes = [Route(path, serve, methods=["POST"]) for path in ("/v1/completions", "/inference/v1/generate", "/generate")]
app = Starlette(routes=[*routes, Route("/test", test, methods=["POST"]), Route("/weight_sync/status", status)])

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", timeout_graceful_shutdown=1)
