"""The rollout client against a real sidecar, a real store and a real trainer: its versions are the ones that answered.

Owns no claim about faults (test_rollout_client).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from loop import digest_of, model
from sidecar_cases import scene, until

from weight_sync.adapters.rollout import Answer, Prompt, RolloutClient
from weight_sync.trajectory import TrajectoryInbox


class DigestEngine:
    """The test engine's own API, as a flavour of a third party: each token is the digest of the weights that made it."""

    path = "/v1/completions"

    def request(self, prompt: Sequence[int], sampling: Mapping[str, Any], model: str | None) -> dict[str, Any]:
        return {"prompt": list(prompt), "max_tokens": 3}

    def read(self, body: Any) -> Answer:
        choice = body["choices"][0]
        tokens = [token_of(token["token"]) for token in choice["tokens"]]
        return Answer(tokens, [-0.1] * len(tokens), choice["finish_reason"])


def token_of(digest: str) -> int:
    return int(digest[:7], 16)


@pytest.mark.slow
def test_trajectories_name_the_version_that_sampled_them(tmp_path: Path) -> None:
    with scene(tmp_path) as served, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{served.sidecar.port}"
        common: dict[str, Any] = {"flavour": DigestEngine(), "run_id": served.publisher.run_id, "deadline_s": 120.0}
        found = list(RolloutClient([url], max_staleness=0, **common).generate([Prompt([1], id="now", samples=2)]))
        waiting = RolloutClient([url], min_version=served.head + 1, **common)
        later = pool.submit(lambda: list(waiting.generate([Prompt([1], id="later")])))
        until(lambda: waiting.counts["retried"], "a 409")
        served.advance()
        found += later.result(120)
        assert [t.id for t in sorted(found, key=lambda t: t.id)] == ["later-0", "now-0", "now-1"]
        for trajectory in found:
            [span] = trajectory.spans
            assert span.number == (2 if trajectory.group == "later" else 1)
            assert list(trajectory.output_token_ids) == [token_of(digest_of(model(span.number)))] * 3
            assert trajectory.engine_id == "sidecar"
        with TrajectoryInbox(tmp_path / "inbox.sqlite", run_id=served.publisher.run_id) as inbox:
            inbox.put(found)
            fresh = inbox.take(9, max_staleness=0, current_version=served.publisher.version)
            assert [t.id for t in fresh] == ["later-0"] and inbox.counts().dropped["too_stale"] == 2
