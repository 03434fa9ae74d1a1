"""Claims about the configuration block: keys with dots, and keys that are refused rather than ignored."""

from __future__ import annotations

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
