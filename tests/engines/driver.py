"""One replica that takes a server to a version and ends: ``driver.py STORE URL VERSION [pause]``."""

from __future__ import annotations

import sys

import weight_sync
from weight_sync.adapters.engines.vllm.engine import VllmEngine
from weight_sync.config import load

if __name__ == "__main__":
    store, url, version = sys.argv[1:4]
    config = load({"uri": store, "threads": 2, "timeout_s": 120, "pause": sys.argv[4] if sys.argv[4:] else "wait"})
    engine = VllmEngine(url, config)
    with weight_sync.Replica.open(config, engine) as replica:
        print(replica.sync(exact=int(version)).digest, flush=True)
    engine.close()
