"""A base and an adapter in versions, and a sidecar that follows both before a real server.

Owns the publishing and the asking. Owns no claim and no kind of server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft_folders
from runs import Trainer
from servers import Server
from sidecars import Answer, Sidecar, until

import weight_sync

NAME = "tutor"
RANK = 16  # the servers' largest
LAST = 3


@dataclass
class Scene:
    """One server.

    Attributes:
        request: route and body that ask a model (None: the base's) for greedy tokens after one prompt.
        read: tokens and logprobs of an answer's JSON.
        folders: of the adapter's versions, by order.
        seen: answers of each, the first and one from the prefix cache.
    """

    trainer: Trainer
    store: Path
    server: Server
    request: Callable[[str | None], tuple[str, dict[str, Any]]]
    read: Callable[[Any], Any]
    sidecar: Sidecar | None = None
    folders: list[Path] = field(default_factory=list)
    seen: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.store.parent

    def start(self) -> Sidecar:
        """A sidecar, instead of the one before."""
        words = ("--adapter", f"{NAME}={self.store}", "--set", f"cache_dir={self.root / 'cache'}")
        self.sidecar = Sidecar(self.trainer.run.store, self.server, *words, engine=self.server.kind)
        return self.sidecar.ready(self.trainer.head)

    @property
    def adapter(self) -> dict[str, Any]:
        assert self.sidecar is not None
        return dict(self.sidecar.status["adapters"][NAME])

    def ask(self, model: str | None = NAME, **headers: str) -> Answer:
        assert self.sidecar is not None
        route, body = self.request(model)
        return self.sidecar.ask("POST", route, body, **headers)

    def made(self, answer: Answer) -> Any:
        assert answer.status == 200, answer.body
        return self.read(answer.json)

    def direct(self, server: Server, model: str | None) -> Any:
        route, body = self.request(model)
        return self.read(server.post(route, body))

    def publish(self, folder: Path, **keys: Any) -> int:
        base = f"{self.trainer.run.store}@head"
        with weight_sync.Publisher.open(str(self.store), adapter={"base": base}, **keys) as publisher:
            report = publisher.publish(folder)
        assert report is not None
        return int(report.version)

    def publish_all(self) -> None:
        """Versions 0 to LAST of the adapter, each asked for twice; once."""
        if self.seen:
            return
        base = self.trainer.run.checkpoints[0]
        for k in range(LAST + 1):
            folder = self.root / f"a{k}"
            made = peft_folders.stepped(self.folders[-1], folder, k) if k else peft_folders.make(folder, base, seed=1)
            self.folders.append(made)
            number = self.publish(folder)
            demand = {"X_Weight_Version_Min": str(number), "X_Weight_Version_Wait": "60"}
            answers = [self.ask(**demand) for _ in range(2)]
            self.seen[k] = [self.made(answer) for answer in answers]
            assert [(answer.start, answer.end) for answer in answers] == [(number, number)] * 2
            assert self.seen[k][0] == self.seen[k][1], "from the prefix cache"
        assert len({str(found[0]) for found in self.seen.values()}) == LAST + 1, "each version answers differently"

    def refuse_wide(self) -> None:
        """A rank above the largest; the version before goes on, and the next one is taken."""
        before = self.adapter["version"]
        number = self.publish(peft_folders.make(self.root / "wide", self.trainer.run.checkpoints[0], 9, 2 * RANK))
        until(lambda: "rank" in self.adapter["error"], "the refusal")
        error = self.adapter["error"]
        assert f"found {2 * RANK}" in error and f"at most {RANK}" in error and f"--max-lora-rank {2 * RANK}" in error
        answer = self.ask()
        assert answer.start == before < number and self.made(answer) == self.seen[LAST][0]
        again = self.publish(self.folders[LAST])
        answer = self.ask(X_Weight_Version_Min=str(again), X_Weight_Version_Wait="60")
        assert self.made(answer) == self.seen[LAST][0]

    def move_base(self) -> None:
        """The base goes on: the adapter is refused, with both versions named, until one for the new base comes. Once."""
        if LAST + 1 in self.seen:
            return
        assert self.sidecar is not None
        number = self.trainer.publish()
        self.sidecar.ready(number)
        answer = self.ask()
        assert answer.status == 409 and answer.json["error"]["code"] == "adapter_base_changed", answer.body
        for version in (number - 1, number):
            assert f"version {version} of run" in answer.json["error"]["message"], answer.body
        assert not self.adapter["ready"] and "to fix it" in self.adapter["reason"]
        assert self.made(self.ask(None))
        self.folders.append(peft_folders.make(self.root / "moved", self.trainer.run.checkpoints[number], 21))
        again = self.publish(self.folders[-1], fork=True)
        until(lambda: self.adapter["ready"], "the adapter for the new base")
        answers = [self.ask(), self.ask()]
        assert answers[0].start == again
        self.seen[LAST + 1] = [self.made(answer) for answer in answers]

    def finish(self) -> None:
        """Whatever test ran before: all versions have been asked for, and nothing runs any more."""
        self.publish_all()
        self.move_base()
        self.stop()

    def stop(self) -> None:
        """Sidecar and server; may be called again."""
        if self.sidecar is not None:
            self.sidecar.__exit__()
        self.server.__exit__()


@contextmanager
def scene_of(
    folder: Path, make: Callable[[Path, Path], Server], request: Callable[[str | None], tuple[str, dict[str, Any]]],
    read: Callable[[Any], Any],
) -> Iterator[Scene]:  # fmt: skip
    """``make``: a server of a checkpoint, with its files in a folder."""
    with Trainer(folder, "qwen3") as trainer:
        store = folder / "adapters"
        store.mkdir()
        scene = Scene(trainer, store, make(trainer.run.checkpoints[0], folder / "server").ready(), request, read)
        try:
            yield scene
        finally:
            scene.stop()
