"""Claims about the configuration block: keys with dots, and keys that are refused rather than ignored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weight_sync.config import load
from weight_sync.errors import ConfigError


def test_keys_with_dots_are_blocks_in_blocks() -> None:
    config = load({"uri": "/run", "auth.token": "t", "tls.ca": "ca.pem", "store_options.endpoint": "here"})
    assert (config.auth.token, config.tls.ca, config.store_options) == ("t", "ca.pem", {"endpoint": "here"})
    changed = config.replace(**{"auth.token": "u"})
    assert (changed.auth.token, changed.tls.ca) == ("u", "ca.pem"), "the rest of a block stays"


def test_a_misspelt_key_in_a_block_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"weight_sync\.auth\.tokn; expected 'auth\.token'"):
        load({"uri": "/run", "auth.tokn": "t"})


def test_further_outlets_are_refused_and_not_ignored() -> None:
    with pytest.raises(ConfigError, match=r"weight_sync\.also.*rdma://x:1.*with store:"):
        load({"uri": "/run", "also": [{"backend": "rdma", "uri": "rdma://x:1"}]})


@pytest.mark.parametrize("text", [
    "uri: /a\npoll_s: 1\nuri: /b\n",
    "weight_sync:\n  uri: /a\n  auth: {token: x, token: y}\n",
])  # fmt: skip
def test_a_key_given_twice_is_refused_and_not_overridden(tmp_path: Path, text: str) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="given twice") as caught:
        load(path)
    assert caught.value.field in ("uri", "token")


def test_merged_keys_of_yaml_may_be_overridden(tmp_path: Path) -> None:
    path = tmp_path / "merged.yaml"
    path.write_text("weight_sync:\n  tls: &tls {ca: a.pem, cert: c.pem, key: k.pem}\n  uri: /a\n")
    assert load(path).tls.ca == "a.pem"
    path.write_text("uri: /a\ntls:\n  <<: {ca: a.pem, cert: c.pem, key: k.pem}\n  ca: b.pem\n")
    assert load(path).tls.ca == "b.pem"


@pytest.mark.parametrize(("key", "value", "words"), [
    ("anchor_every", True, "a number"), ("rollout.max_staleness", False, "a number"),
    ("contract.bound", True, "a number"), ("snapshot", "disk", "'device', 'memory' or 'file'"),
    ("timeout_s", -1, "greater than 0"),
])  # fmt: skip
def test_a_bad_value_is_named_with_what_is_expected(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as told:
        load({"uri": "memory://x", key: value})
    assert told.value.field == f"weight_sync.{key}" and told.value.expected == words


def test_yes_and_no_are_values_of_switches_and_zero_is_a_number() -> None:
    made = load({"uri": "memory://x", "overlap": True, "fork": False, "anchor_every": 0})
    assert made.overlap and not made.fork and made.anchor_every == 0


@pytest.mark.parametrize(("data", "field", "expected"), [
    ({"forms": "compact"}, "forms", "a list"), ({"tls": "x"}, "tls", "a block of keys"),
    ({"auth": {"tokens": [{"role": "x"}]}}, "auth.tokens.0.role", "auth.tokens.0.roles"),
    ({"rollout.engins": ["x"]}, "rollout.engins", "rollout.engines"), ({"timeout_s": "soon"}, "timeout_s", "a number"),
])  # fmt: skip
def test_words_of_python_are_not_what_is_expected(data: dict[str, Any], field: str, expected: str) -> None:
    with pytest.raises(ConfigError) as told:
        load({"uri": "memory://x", **data})
    assert (told.value.field, told.value.expected) == (f"weight_sync.{field}", expected) and told.value.do


def test_beside_the_block_a_file_may_hold_what_is_the_hosts(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("custom_megatron_init_path: x.y\nweight_sync: {uri: 'memory://x'}\n")
    assert load(tmp_path / "a.yaml").uri == "memory://x"
    (tmp_path / "c.yaml").write_text("weight_sync:\n  uri: 'memory://x'\nanchor_every: 3\n")
    with pytest.raises(ConfigError, match="a key beside the block: anchor_every"):
        load(tmp_path / "c.yaml")
    (tmp_path / "b.yaml").write_text("other: 1\nweight_sync:\n")
    with pytest.raises(ConfigError, match="not a block of keys: weight_sync; found None"):
        load(tmp_path / "b.yaml")
