"""Claims about engines elsewhere that answer verl's agent loops, by verl's own interface: what a loop gets, and its errors.

The loops themselves run in main_ppo (test_verl.py). Owns no claim about the client (tests/test_rollout_client.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from loop import checkpoint, config, model
from remote_site import Site, remote_site

from weight_sync import Publisher
from weight_sync.config import Config, load
from weight_sync.errors import ConfigError, InputError

pytest.importorskip("verl", reason="verl is not installed here; make test-hosts builds its environment")
pytestmark = pytest.mark.timeout(600)

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("run")
    return config(folder, base=str(checkpoint(folder / "base")))


@pytest.fixture(scope="module")
def publisher(keys: Config) -> Iterator[Publisher]:
    with Publisher.open(keys) as opened:
        opened.publish(model(1), step=10)
        yield opened


@pytest.fixture(scope="module")
def site(keys: Config, publisher: Publisher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with remote_site(tmp_path_factory.mktemp("site"), keys.uri, Path(str(keys.base))) as there:
        there.reached(1)
        yield there


def told(keys: Config, site: Site, **rollout: Any) -> Config:
    return load({**keys.model_dump(), "rollout": {"engines": [site.url], "deadline_s": 60, **rollout}})


async def turn(remote: Any, **more: Any) -> Any:
    try:
        return await remote.generate("r1", prompt_ids=[5, 6], sampling_params=dict(SAMPLING), **more)
    finally:
        await remote._client.aclose()


def test_a_turn_comes_with_its_versions_as_verls_steps(keys: Config, site: Site, publisher: Publisher) -> None:
    from weight_sync.adapters.trainers.verl.agent import Remote

    remote = Remote(told(keys, site, max_staleness=0), limit=3)
    first = asyncio.run(turn(remote))
    assert len(first.token_ids) == len(first.log_probs) == 3 and first.stop_reason == "completed"
    assert site.asked[-1]["max_tokens"] == 3 and site.asked[-1]["prompt"] == [5, 6]
    fields = first.extra_fields
    assert (fields["min_global_steps"], fields["max_global_steps"], fields["global_steps"]) == (10, 10, 10)
    assert fields["weight_sync"] == {"run_id": publisher.run_id, "oldest": 1, "newest": 1, "spans": [[1, 0, 3]],
                                     "engine": "site"}  # fmt: skip
    publisher.publish(model(2), step=25)
    second = asyncio.run(turn(remote))  # the sidecar lets nothing older in
    site.reached(2)
    if second.extra_fields["weight_sync"]["oldest"] == 1:  # it had not seen the new version yet
        second = asyncio.run(turn(remote))
    assert second.extra_fields["min_global_steps"] == 25 and second.extra_fields["weight_sync"]["spans"] == [[2, 0, 3]]


def test_what_is_more_than_tokens_and_an_address_that_nobody_can_dial_are_refused(keys: Config, site: Site) -> None:
    from weight_sync.adapters.trainers.verl.agent import Remote

    with pytest.raises(InputError, match="image_data"):
        asyncio.run(turn(Remote(told(keys, site), 3), image_data=["picture"]))
    everywhere = told(keys, site).replace(uri="grpc://0.0.0.0:50071", backend="grpc")
    with pytest.raises(ConfigError, match=r"rollout\.uri"):
        Remote(everywhere, 3)
    named = load({**everywhere.model_dump(), "rollout": {"engines": [site.url], "uri": "grpc://head:50071"}})
    Remote(named, 3)
