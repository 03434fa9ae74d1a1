"""One iteration of a client: a connection pool, the samples in flight, and their way to an engine that answers.

Owns the waiting, the retries and the deadline of one sample. Owns no choice (fleet.py), no table of statuses
(verdict.py) and no public face (client.py). Lives in one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx

from weight_sync.adapters.rollout.flavours import Answer, Prompt
from weight_sync.adapters.rollout.fleet import Seat, choose
from weight_sync.adapters.rollout.spans import Served, read_served, spans_of
from weight_sync.adapters.rollout.verdict import Next, judge
from weight_sync.errors import DeadlineError, EngineError, InputError, LineageError
from weight_sync.proto.v1 import trajectory_pb2
from weight_sync.trajectory import check, staleness

if TYPE_CHECKING:
    from weight_sync.adapters.rollout.client import RolloutClient

__all__ = ["Session", "of_model"]

_STATUS_LIMIT_S = 5.0
_STATUS_BYTES = 1 << 20


class Session:
    """Made by `open`, in the event loop that uses it."""

    def __init__(self, client: RolloutClient, http: httpx.AsyncClient) -> None:
        self._client, self._http = client, http
        self._changed = asyncio.Event()  # an engine became free, known or new

    @classmethod
    @asynccontextmanager
    async def open(cls, client: RolloutClient) -> AsyncIterator[Session]:
        """With the fleet looked up, and its status looked at from time to time."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=client.concurrency)
        headers = {} if client.token is None else {"Authorization": f"Bearer {client.token}"}
        async with httpx.AsyncClient(limits=limits, headers=headers, timeout=None, verify=client.verify) as http:
            session = cls(client, http)
            await session._discover()
            watching = asyncio.create_task(session._watch())
            try:
                yield session
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):  # it was cancelled by us; its failures are its own
                    await watching

    # --- the fleet ---

    async def _discover(self) -> None:
        urls = self._client.engines
        self._client.fleet.set(await asyncio.to_thread(lambda: list(urls())) if callable(urls) else urls)
        self._wake()

    async def _watch(self) -> None:
        """Looks at every engine's status, so that load and versions are known before a request is spent."""
        while True:
            await asyncio.gather(*(self._look(seat) for seat in self._client.fleet.seats))
            self._wake()
            await asyncio.sleep(self._client.poll_s)
            with suppress(Exception):  # a lookup that fails leaves the fleet as it is; the deadline tells in the end
                await self._discover()

    async def _look(self, seat: Seat) -> None:
        """One status; an engine that has none, or does not answer, is judged by its answers to requests alone."""
        with suppress(httpx.HTTPError, ValueError, asyncio.TimeoutError):
            async with asyncio.timeout(_STATUS_LIMIT_S):
                response = await self._http.get(f"{seat.url}/weight_sync/status")
            status = response.json() if response.status_code == 200 and len(response.content) < _STATUS_BYTES else None
            if isinstance(status, dict):
                status = of_model(status, self._client.model)
                run, version, name = status.get("run_id"), status.get("version"), status.get("replica_id")
                if isinstance(run, str) and isinstance(version, int):
                    seat.saw(run, version)
                head_run, head = status.get("head_run_id"), status.get("head")
                if isinstance(head_run, str) and isinstance(head, int):
                    seat.head_run, seat.head = head_run, head
                seat.others = max(0, int(status.get("in_flight") or 0) - seat.in_flight)
                seat.name = name if isinstance(name, str) else ""

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _seat(self, deadline: float) -> Seat:
        """The engine that is asked next, reserved. Raises DeadlineError with what each engine said."""
        client = self._client
        while True:
            now = time.monotonic()
            choice = choose(client.fleet.seats, client.wanted, client.newest(client.wanted.run), now, client.per_engine)
            if choice.seat is not None and now < deadline:
                choice.seat.in_flight += 1
                return choice.seat
            if now >= deadline:
                raise DeadlineError("no engine has answered in time", field="deadline_s", found=client.fleet.reasons(),
                                    expected=f"an answer within {client.deadline_s:g} s")  # fmt: skip
            until = deadline if choice.wake is None else min(deadline, choice.wake)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), max(0.001, until - now))

    # --- one sample ---

    async def sample(
        self, prompt: Prompt, number: int, deadline: float | None = None
    ) -> trajectory_pb2.Trajectory | None:
        """Asks until one engine has answered, or until ``deadline`` (the client's from now); None for an answer that is
        too stale by then.

        Exactly one answer is used, whichever engine it came from: one that arrives after its connection broke is never
        read. Raises DeadlineError, InputError for what no engine would answer.
        """
        client = self._client
        deadline = time.monotonic() + client.deadline_s if deadline is None else deadline
        while True:
            seat = await self._seat(deadline)
            try:
                found = await self._ask(seat, prompt, number, deadline)
            finally:
                seat.in_flight -= 1
                self._wake()
            if found is None:
                client.counts["retried"] += 1
                continue
            most, current = client.wanted.max_staleness, client.newest(found.run_id)
            if most is not None and current is not None and staleness(found, current) > most:
                client.counts["too_stale"] += 1
                return None
            client.counts["delivered"] += 1
            return found

    async def _ask(self, seat: Seat, prompt: Prompt, number: int, deadline: float) -> trajectory_pb2.Trajectory | None:
        """One request to one engine; None, with the reason noted, when another try may do."""
        client = self._client
        sampling = {**client.sampling, **prompt.sampling}
        if prompt.samples > 1 and isinstance(sampling.get("seed"), int):
            sampling["seed"] += number  # the same seed would give the same answer each time
        try:
            async with asyncio.timeout(min(client.request_s, deadline - time.monotonic())):
                response = await self._http.post(
                    f"{seat.url}{client.flavour.path}",
                    json=client.flavour.request(prompt.token_ids, sampling, client.model),
                    headers=client.wanted.headers(client.trainer_version),
                )
        except (httpx.HTTPError, TimeoutError) as error:
            seat.failed(time.monotonic(), f"{type(error).__name__} {error}".strip())
            return None
        verdict = judge(response.status_code, response.headers, response.content)
        if verdict.next is Next.TAKE:
            return self._taken(seat, response, prompt, number)
        if verdict.next is Next.GIVE_UP:
            raise InputError("an engine refuses the request", field=prompt.id, found=verdict.reason,
                             do="correct the request; no other engine would take it")  # fmt: skip
        if verdict.next is Next.WAIT:
            seat.refused(time.monotonic(), verdict.retry_s, verdict.reason)
            seat.saw(verdict.run, None)  # by then it may serve another version
        else:
            seat.failed(time.monotonic(), verdict.reason)
        return None

    def _taken(
        self, seat: Seat, response: httpx.Response, prompt: Prompt, number: int
    ) -> trajectory_pb2.Trajectory | None:
        """The answer as a trajectory; None when it is unusable in a way that another one need not be."""
        try:
            served = read_served(response.headers)
            answer = self._client.flavour.read(response.json())
            if answer.finish_reason == "abort" or not answer.tokens:
                raise EngineError("aborted before it was done")
            if served.end_run != served.run or self._client.wanted.run not in (None, served.run):
                raise LineageError("the engine changed runs", found=f"{served.run} to {served.end_run}")
            found = _trajectory(answer, prompt, number, seat, served)
            found.spans.extend(spans_of(answer, served))
            check(found, prompt.id)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            seat.failed(time.monotonic(), f"not the answer of {self._client.flavour.path}: {error!r}")
            return None
        except (EngineError, LineageError) as error:
            seat.failed(time.monotonic(), str(error))
            return None
        seat.answered()
        seat.saw(served.end_run, served.end)
        return found


def _trajectory(answer: Answer, prompt: Prompt, number: int, seat: Seat, served: Served) -> trajectory_pb2.Trajectory:
    """Without spans."""
    metadata: dict[str, Any] = dict(prompt.metadata)
    if served.start != served.end:
        metadata["weight_sync.versions"] = f"{served.start}..{served.end}"
    return trajectory_pb2.Trajectory(
        id=f"{prompt.id}-{number}", run_id=served.run, prompt_token_ids=prompt.token_ids, output_token_ids=answer.tokens,
        output_logprobs=answer.logprobs, finish_reason=answer.finish_reason, metadata=metadata,
        router_replay=answer.router_replay, engine_id=seat.name or seat.url, group=prompt.id,
        contract_id=served.contract,
    )  # fmt: skip


def of_model(status: dict[str, Any], model: str | None) -> dict[str, Any]:
    """What a status says of the model that is asked: an adapter has versions of its own, in SGLang as ``base:adapter``."""
    lanes = status.get("adapters")
    found = lanes.get((model or "").rpartition(":")[2]) if isinstance(lanes, dict) else None
    return {**status, **found, "replica_id": status.get("replica_id")} if isinstance(found, dict) else status
