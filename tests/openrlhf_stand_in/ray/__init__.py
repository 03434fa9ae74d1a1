"""Stand-in for Ray 2.55: actors in this process, with the parts of the API that OpenRLHF and the adapter use.

Classes that are decorated keep the original in ``__ray_metadata__.modified_class``, as Ray's do. Coroutine methods of an
actor run on one event loop of their own, plain ones where they are called.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from types import SimpleNamespace
from typing import Any

from ray import util

__all__ = ["get", "get_runtime_context", "remote", "util"]

_current = threading.local()


class _Method:
    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self._actor.instance, self._name)
        try:
            if inspect.iscoroutinefunction(method):
                return asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self._actor.loop)
            return SimpleNamespace(result=functools.partial(lambda value: value, method(*args, **kwargs)))
        except Exception as error:
            raised = error
            return SimpleNamespace(result=lambda: _raise(raised))


def _raise(error: Exception) -> Any:
    raise error


class _Actor:
    def __init__(self, cls: Any, args: Any, kwargs: Any) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.instance = cls.__new__(cls)
        made = cls.__init__(self.instance, *args, **kwargs)
        if inspect.iscoroutine(made):
            asyncio.run_coroutine_threadsafe(made, self.loop).result()

    def __getattr__(self, name: str) -> _Method:
        return _Method(self, name)


class _ActorClass:
    def __init__(self, cls: Any) -> None:
        self.__ray_metadata__ = SimpleNamespace(modified_class=cls)

    def options(self, **_: Any) -> _ActorClass:
        return self

    def remote(self, *args: Any, **kwargs: Any) -> _Actor:
        return _Actor(self.__ray_metadata__.modified_class, args, kwargs)


def remote(*args: Any, **_: Any) -> Any:
    return _ActorClass(args[0]) if args else _ActorClass


def get(refs: Any) -> Any:
    return [get(ref) for ref in refs] if isinstance(refs, list) else refs.result()


def get_runtime_context() -> Any:
    return SimpleNamespace(get_actor_id=lambda: f"{threading.get_ident():x}")
