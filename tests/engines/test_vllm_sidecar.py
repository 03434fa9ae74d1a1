"""Claims about the sidecar before a real vLLM: what an answer declares is what made it, under load and after faults.

Answers are compared with a server that vLLM's own full reload moves to each version, after a fresh start that is compared
with it, too.
"""

from __future__ import annotations

import http.client
import json
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from runs import Run, Trainer
from servers import TEXT, Server
from sidecars import Load, Made, Reply, Sidecar, completion, generation, until

IN_PLACE = ("--additional-config", '{"weight_sync": {"in_place": true}}')
VERSIONS = 20  # per mode
SHORT, LONG = 12, 64  # tokens of an answer
CLIENTS = 3
_Span = tuple[tuple[int, ...], int]  # tokens that went before, and how many follow
PROMPTS = [TEXT, TEXT + "import sys", "class Path:\n    def __init__(self):\n" * 8, "def f(x):\n    return x\n" * 12]
pytestmark = pytest.mark.timeout(2400)


@dataclass
class Scene:
    """A run that goes on, a server, and what clients saw in each mode."""

    trainer: Trainer
    server: Server
    seen: dict[str, list[Reply]] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        return self.trainer.run


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("qwen3")
    with (
        Trainer(folder, "qwen3") as trainer,
        Server(trainer.run.checkpoints[0], folder / "server", *IN_PLACE) as server,
    ):
        server.ready().complete()  # the first request makes vLLM import for seconds
        yield Scene(trainer, server)


def under_load(scene: Scene, mode: str, ask: Callable[[Sidecar, int], Reply]) -> None:
    """Versions come while clients ask; the next one when the one before was served and has answered."""
    with Sidecar(scene.run.store, scene.server, f"--set=pause={mode}") as sidecar:
        sidecar.ready(scene.trainer.head)
        with Load(lambda k: ask(sidecar, k), CLIENTS) as load:
            for _ in range(VERSIONS):
                number = scene.trainer.publish()
                until(lambda: load.made_at(number), f"an answer of version {number}")  # noqa: B023
        status = sidecar.status
    assert status["errors"] == 0 and status["aborted"] == 0, status
    scene.seen[mode] = load.replies
    refused = [reply for reply in load.replies if reply.made is None]
    assert {reply.answer.status for reply in refused} <= {409}, {reply.answer.body for reply in refused}
    assert all(reply.least is not None for reply in refused), "only a demand may be refused"
    for reply in load.replies:
        if reply.made is not None:
            assert reply.least is None or reply.answer.start >= reply.least
            assert reply.answer.start <= reply.answer.end


def answer_of(sidecar: Sidecar, k: int, route: str, body: dict[str, Any]) -> Reply:
    """Every seventh one demands a version that is probably not there."""
    least = sidecar.status["version"] + 1 if k % 7 == 6 else None
    headers = {} if least is None else {"X_Weight_Version_Min": str(least)}
    answer = sidecar.ask("POST", route, body, **headers)
    reply = Reply(k % len(PROMPTS), answer, least)
    if answer.status == 200:
        choice = answer.json["choices"][0]
        reply.made = Made.of(choice)
        reply.spans = [(int(s["version"].rpartition(":")[2]), s["start"], s["end"])
                       for s in choice.get("weight_versions") or ()]  # fmt: skip
    return reply


def test_no_request_fails_while_twenty_versions_come_in_mode_wait(scene: Scene) -> None:
    def ask(sidecar: Sidecar, k: int) -> Reply:
        return answer_of(sidecar, k, "/v1/completions", completion(PROMPTS[k % len(PROMPTS)], SHORT))

    under_load(scene, "wait", ask)
    made = [reply for reply in scene.seen["wait"] if reply.made is not None]
    assert all(reply.answer.start == reply.answer.end for reply in made)
    assert len(made) < len(scene.seen["wait"]), "a demand for the next version was refused"
    hits = [line for line in scene.server.get_text("/metrics").splitlines() if "prefix_cache_hits_total{" in line]
    assert any(float(line.split()[-1]) > 0 for line in hits), "prompts came from the prefix cache"


def test_no_request_fails_while_twenty_versions_come_in_mode_keep(scene: Scene) -> None:
    tokens = [scene.server.post("/tokenize", {"model": "tiny", "prompt": prompt})["tokens"] for prompt in PROMPTS]

    def ask(sidecar: Sidecar, k: int) -> Reply:
        return answer_of(sidecar, k, "/inference/v1/generate", generation(tokens[k % len(PROMPTS)], LONG))

    under_load(scene, "keep", ask)
    made = [reply for reply in scene.seen["keep"] if reply.made is not None]
    for reply in made:
        first, last = reply.spans[0], reply.spans[-1]
        assert reply.answer.start <= first[0] <= last[0] <= reply.answer.end, (reply.answer.headers, reply.spans)
        assert first[1] == 0 and last[2] == LONG, reply.spans
    assert sum(len(reply.spans) > 1 for reply in made) >= VERSIONS // 2, "answers went on across commits"


# --- what the answers must have been -----------------------------------------------------------------------------------


@dataclass
class Reference:
    """A server without weight_sync, moved by vLLM's own full reload, which is exact for such a model."""

    run: Run
    server: Server

    def load(self, number: int) -> None:
        path = str(self.run.checkpoints[number])
        self.server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        self.server.post("/reset_prefix_cache", {})

    def complete(self, prompt: int) -> Made:
        return Made.of(self.server.post("/v1/completions", completion(PROMPTS[prompt], SHORT))["choices"][0])

    def generate(self, tokens: tuple[int, ...], count: int) -> Made:
        return Made.of(self.server.post("/inference/v1/generate", generation(tokens, count))["choices"][0])


@pytest.fixture
def reference(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Started from a version in the middle: fresh, it answers as it does when it is moved there."""
    number = VERSIONS // 2
    with Server(scene.run.checkpoints[number], tmp_path_factory.mktemp("fresh"), *IN_PLACE, door="none",
                VLLM_SERVER_DEV_MODE="1") as server:  # fmt: skip
        made = Reference(scene.run, server.ready())
        fresh = [made.complete(prompt) for prompt in range(len(PROMPTS))]
        made.load(0)
        assert made.complete(0) != fresh[0]
        made.load(number)
        assert [made.complete(prompt) for prompt in range(len(PROMPTS))] == fresh
        yield made


def test_every_answer_was_made_by_the_versions_that_it_declares(scene: Scene, reference: Reference) -> None:
    whole: dict[int, dict[int, Made]] = defaultdict(dict)  # by version and prompt
    for reply in scene.seen.get("wait", ()):
        if reply.made is not None:
            before = whole[reply.answer.start].setdefault(reply.prompt, reply.made)
            assert reply.made == before, "two answers of one version differ"
    spans: dict[int, dict[_Span, Made]] = defaultdict(dict)
    ids = [reference.server.post("/tokenize", {"model": "tiny", "prompt": prompt})["tokens"] for prompt in PROMPTS]
    for reply in scene.seen.get("keep", ()):
        for number, begin, end in reply.spans:
            assert reply.made is not None
            key = (*ids[reply.prompt], *reply.made.tokens[:begin]), end - begin
            spans[number][key] = Made(reply.made.tokens[begin:end], reply.made.logprobs[begin:end])
    assert set(range(1, 2 * VERSIONS + 1)) <= whole.keys() | spans.keys(), "each version answered"
    before = None
    with ThreadPoolExecutor(8) as pool:
        for number in sorted(whole.keys() | spans.keys()):
            reference.load(number)
            for prompt, made in whole[number].items():
                assert reference.complete(prompt) == made, f"version {number}, prompt {prompt}"
            found = pool.map(lambda key: reference.generate(*key), spans[number])
            for (key, made), again in zip(spans[number].items(), found, strict=True):
                assert again == made, f"version {number}, {key[1]} tokens after {len(key[0])}"
            probe = reference.complete(0)
            assert probe != before, "versions can be told apart"
            before = probe


# --- streams and faults -----------------------------------------------------------------------------------------------


STREAM = 300  # tokens
TRIES = 8  # of a stream that may be over before a version comes


def streamed(sidecar: Sidecar, meanwhile: Callable[[], object]) -> dict[str, Any]:
    """A whole stream; what happens while it runs. Returns the event that the sidecar puts at its end."""
    connection = http.client.HTTPConnection("127.0.0.1", sidecar.port, timeout=120)
    body = json.dumps(completion(TEXT, STREAM, stream=True))
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    first = answer.readline()
    assert first.startswith(b"data: {"), "the first token comes before the last one is made"
    meanwhile()
    text = (first + answer.read()).decode()
    connection.close()
    *events, done, end = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert sum(len(choice["token_ids"] or ()) for choice in choices) == STREAM
    return dict(json.loads(end))


def test_a_version_waits_for_a_stream_in_mode_wait(scene: Scene) -> None:
    before = scene.trainer.head
    with Sidecar(scene.run.store, scene.server, "--drain=120", "--set=fence_s=300") as sidecar:
        sidecar.ready(before)
        end = streamed(sidecar, scene.trainer.publish)
        assert end["start"] == end["end"] == before
        sidecar.ready(before + 1)


def test_a_stream_goes_on_across_a_version_in_mode_keep_and_says_so(scene: Scene) -> None:
    with Sidecar(scene.run.store, scene.server, "--set=pause=keep") as sidecar:
        for _ in range(TRIES):
            before = scene.trainer.head
            sidecar.ready(before)
            end = streamed(sidecar, scene.trainer.publish)
            assert end["start"] == before
            if end["end"] == before + 1:
                return
    pytest.fail("every stream was over before the version came")


def test_an_engine_killed_behind_the_sidecar_is_served_again_once_its_digest_is_known(scene: Scene) -> None:
    with Sidecar(scene.run.store, scene.server) as sidecar:
        head = scene.trainer.head
        sidecar.ready(head)
        good = Made.of(sidecar.complete(TEXT).json["choices"][0])
        scene.server.kill()
        until(lambda: sidecar.ask("GET", "/readyz").status == 503, "not ready")
        assert sidecar.complete(TEXT).status == 503
        scene.server.start()
        number = scene.trainer.publish()
        scene.server.ready()
        sidecar.ready(number)
        answer = sidecar.complete(TEXT)
        assert answer.status == 200 and answer.start == number
        assert Made.of(answer.json["choices"][0]) != good


@pytest.mark.parametrize("step", ["replica:paused", "replica:committed"])
def test_a_sidecar_killed_inside_a_commit_goes_on_after_its_restart(scene: Scene, step: str) -> None:
    head = scene.trainer.head
    with Sidecar(scene.run.store, scene.server, WEIGHT_SYNC_CRASH_AT=step) as sidecar:
        sidecar.ready(head)
        number = scene.trainer.publish()
        assert sidecar.process.wait(120) == -signal.SIGKILL
    with Sidecar(scene.run.store, scene.server) as sidecar:
        sidecar.ready(number)
        answer = sidecar.complete(TEXT)
        assert answer.status == 200 and answer.start == answer.end == number
        digest = scene.trainer.digest(number)
        assert sidecar.status["digest"] == digest


def test_routes_that_change_weights_are_for_nobody(scene: Scene) -> None:
    with Sidecar(scene.run.store, scene.server) as sidecar:
        sidecar.ready()
        for route in ("/pause", "/collective_rpc", "/update_weights", "/sleep", "/reset_prefix_cache"):
            assert sidecar.ask("POST", route, {}).status == 403
        assert sidecar.ask("GET", "/v1/models").status == 200


@pytest.mark.full
def test_two_servers_in_a_group_take_each_version_together(scene: Scene, tmp_path: Path) -> None:
    with Server(scene.run.checkpoints[0], tmp_path, *IN_PLACE) as second:
        second.ready().complete()
        with Sidecar(scene.run.store, scene.server, f"--engine-url={second.url}") as sidecar:
            sidecar.ready(scene.trainer.head)
            for _ in range(3):
                number = scene.trainer.publish()
                sidecar.ready(number)
                answers = [sidecar.complete(TEXT) for _ in range(4)]
                assert {answer.start for answer in answers} == {number}
                first, *others = [Made.of(answer.json["choices"][0]) for answer in answers]
                assert all(other == first for other in others)
                assert scene.server.complete() == second.complete()


@pytest.mark.full
@pytest.mark.parametrize("number", [1, VERSIONS])
def test_answers_under_load_are_those_of_a_fresh_server(scene: Scene, number: int, tmp_path: Path) -> None:
    made = {reply.prompt: reply.made for reply in scene.seen["wait"] if reply.made and reply.answer.start == number}
    with Server(scene.run.checkpoints[number], tmp_path, *IN_PLACE, door="none") as server:
        fresh = Reference(scene.run, server.ready())
        assert made and all(fresh.complete(prompt) == answer for prompt, answer in made.items())
