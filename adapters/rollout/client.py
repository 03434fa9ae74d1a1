"""`RolloutClient`: prompts in, trajectories out, over whatever engines can serve an acceptable version.

Owns the public face, synchronous and asynchronous, and the bound on what is in flight. Owns no request (session.py).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack
from typing import Any

from weight_sync.adapters.rollout.flavours import FLAVOURS, Flavour, Prompt
from weight_sync.adapters.rollout.fleet import Fleet, Wanted
from weight_sync.adapters.rollout.session import Session
from weight_sync.errors import ConfigError, InputError, WeightSyncError
from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["RolloutClient"]


class RolloutClient:
    """Submits prompts to a fleet of sidecars.

    Args:
        engines: base URLs; or a function that returns them, called now and then in a thread.
        flavour: ``completions`` (OpenAI's, as vLLM extends it), ``vllm`` (/inference/v1/generate), ``sglang``
            (/generate), or an object that follows `Flavour`.
        model: the name that requests carry, where the API wants one.
        sampling: ``max_tokens`` and the engine's own parameters.
        min_version, exact, max_staleness: at most one: which version may answer. Sidecars hold engines to it.
        run_id: of that version.
        current_version: the trainer's version, None while it is not known; by default the newest one that the sidecars
            have seen. With ``max_staleness``, answers that are too stale when they arrive are dropped and counted.
        concurrency: samples in flight.
        per_engine: samples in flight at one engine.
        deadline_s: for one sample, from its first request to its answer, retries included.
        request_s: for one request; then it is tried elsewhere.
        on_failure: called with a prompt and why one of its samples failed; without it the iteration ends with the error.
        poll_s: between two looks at the engines' status, and at ``engines``.
        token: sent as ``Authorization: Bearer``.
        verify: whether TLS certificates are checked, or an ssl.SSLContext.

    Attributes:
        counts: delivered, retried, too_stale and failed, since it was made.

    One iteration at a time; the fleet's state is kept between them.

    Raises ConfigError.
    """

    def __init__(
        self,
        engines: Sequence[str] | Callable[[], Iterable[str]],
        *,
        flavour: str | Flavour = "completions",
        model: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        min_version: int | None = None,
        exact: int | None = None,
        max_staleness: int | None = None,
        run_id: str | None = None,
        current_version: Callable[[], int | None] | None = None,
        concurrency: int = 64,
        per_engine: int = 64,
        deadline_s: float = 600.0,
        request_s: float = 300.0,
        on_failure: Callable[[Prompt, WeightSyncError], None] | None = None,
        poll_s: float = 1.0,
        token: str | None = None,
        verify: Any = True,
    ) -> None:
        known = FLAVOURS.get(flavour) if isinstance(flavour, str) else flavour
        if known is None:
            raise ConfigError("no such flavour", field="flavour", found=flavour, expected=", ".join(FLAVOURS))
        given = {"min_version": min_version, "exact": exact, "max_staleness": max_staleness}
        if sum(value is not None for value in given.values()) > 1 or any(
            v is not None and v < 0 for v in given.values()
        ):
            raise ConfigError(
                "not one constraint", field=", ".join(given), found=given, expected="at most one, 0 or more"
            )
        if concurrency < 1 or per_engine < 1 or min(deadline_s, request_s, poll_s) <= 0:
            raise ConfigError("too small", field="concurrency, per_engine, deadline_s, request_s, poll_s",
                              found=(concurrency, per_engine, deadline_s, request_s, poll_s), expected="above 0")  # fmt: skip
        if isinstance(engines, str) or (not callable(engines) and not engines):
            raise ConfigError("no engines", field="engines", found=engines, expected="a list of URLs, or a function")
        self.engines, self.flavour, self.model, self.sampling = engines, known, model, dict(sampling or {})
        self.wanted = Wanted(min_version, exact, max_staleness, run_id)
        self._current = current_version
        self.concurrency, self.per_engine = concurrency, per_engine
        self.deadline_s, self.request_s, self.poll_s = deadline_s, request_s, poll_s
        self.on_failure, self.token, self.verify = on_failure, token, verify
        self.fleet = Fleet()
        self.counts: Counter[str] = Counter()
        self._asking: tuple[asyncio.AbstractEventLoop, asyncio.Task[Session], AsyncExitStack] | None = None

    @property
    def trainer_version(self) -> int | None:
        """As ``current_version`` tells it."""
        return None if self._current is None else self._current()

    def newest(self, run: str | None) -> int | None:
        """The version that staleness is counted from: the trainer's, as far as it is known here."""
        return self.fleet.head(run) if self._current is None else self._current()

    async def ask(self, prompt: Prompt, number: int = 0) -> trajectory_pb2.Trajectory:
        """Sample ``number`` of a prompt, for callers that have one prompt at a time: any number of coroutines of one event
        loop. Answers that are too stale when they arrive are asked for again. The fleet is watched from the first call
        until `aclose`. Raises DeadlineError, InputError.
        """
        session = await self._session()
        deadline = time.monotonic() + self.deadline_s
        while True:
            found = await session.sample(prompt, number, deadline)
            if found is not None:
                return found

    async def _session(self) -> Session:
        """The one that `ask` keeps; another one for another event loop, and after one that could not be opened."""
        loop = asyncio.get_running_loop()
        kept = self._asking
        if kept is None or kept[0] is not loop or (kept[1].done() and (kept[1].cancelled() or kept[1].exception())):
            stack = AsyncExitStack()
            kept = self._asking = (loop, loop.create_task(stack.enter_async_context(Session.open(self))), stack)
        return await asyncio.shield(kept[1])  # it is everybody's, whoever of them leaves

    async def aclose(self) -> None:
        """Ends what `ask` has begun, in its event loop; it may be called again."""
        asking, self._asking = self._asking, None
        if asking is not None:
            await asyncio.wait([asking[1]])
            await asking[2].aclose()

    async def stream(
        self, prompts: Iterable[Prompt] | AsyncIterable[Prompt]
    ) -> AsyncGenerator[trajectory_pb2.Trajectory, None]:
        """Trajectories as they come, each sample of each prompt at most once; prompts are drawn as room appears.

        Raises DeadlineError, InputError, unless ``on_failure`` takes them. Closing it cancels what is in flight.
        """
        async with Session.open(self) as session:
            samples = _samples(prompts)
            running: dict[asyncio.Task[Any], Prompt] = {}
            drawing: asyncio.Task[tuple[Prompt, int] | None] | None = asyncio.create_task(_next(samples))
            try:
                while running or drawing is not None:
                    waited: set[asyncio.Task[Any]] = set(running)
                    if drawing is not None and len(running) < self.concurrency:
                        waited.add(drawing)
                    done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                    if drawing in done:
                        assert drawing is not None
                        drawn = drawing.result()
                        drawing = None
                        if drawn is not None:
                            running[asyncio.create_task(session.sample(*drawn))] = drawn[0]
                            drawing = asyncio.create_task(_next(samples))
                    for task in [task for task in running if task in done]:
                        found = self._outcome(task, running.pop(task))
                        if found is not None:
                            yield found
            finally:
                await _cancel([*running, *([drawing] if drawing is not None else [])])

    def _outcome(self, task: asyncio.Task[Any], prompt: Prompt) -> trajectory_pb2.Trajectory | None:
        try:
            found: trajectory_pb2.Trajectory | None = task.result()
        except WeightSyncError as error:
            self.counts["failed"] += 1
            if self.on_failure is None:
                raise
            self.on_failure(prompt, error)
            return None
        return found

    def generate(self, prompts: Iterable[Prompt]) -> Iterator[trajectory_pb2.Trajectory]:
        """`stream` for callers without an event loop: it runs in a thread, which ends with the iteration.

        ``prompts`` is drawn from in that thread.
        """
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, name="weight_sync-rollout", daemon=True)
        thread.start()
        trajectories = self.stream(prompts)
        try:
            while True:
                try:
                    yield asyncio.run_coroutine_threadsafe(_anext(trajectories), loop).result()
                except StopAsyncIteration:
                    return
        finally:
            asyncio.run_coroutine_threadsafe(trajectories.aclose(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


async def _samples(prompts: Iterable[Prompt] | AsyncIterable[Prompt]) -> AsyncIterator[tuple[Prompt, int]]:
    """Every sample of every prompt. Raises InputError for what is no prompt."""
    if isinstance(prompts, AsyncIterable):
        async for prompt in prompts:
            for number in range(_known(prompt).samples):
                yield prompt, number
    else:
        for prompt in prompts:
            for number in range(_known(prompt).samples):
                yield prompt, number


def _known(prompt: Prompt) -> Prompt:
    if not isinstance(prompt, Prompt):
        raise InputError("not a prompt", field="prompts", found=type(prompt).__name__, expected="Prompt(token_ids=...)")
    return prompt


async def _next(samples: AsyncIterator[tuple[Prompt, int]]) -> tuple[Prompt, int] | None:
    return await anext(samples, None)


async def _anext(trajectories: AsyncIterator[trajectory_pb2.Trajectory]) -> trajectory_pb2.Trajectory:
    return await anext(trajectories)


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Ends them; whatever they still wanted to say is moot."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
