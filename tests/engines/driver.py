"""One replica that takes a server to a version and ends: ``driver.py ENGINE STORE URL VERSION [pause]``."""

from __future__ import annotations

import sys

import weight_sync
from weight_sync.config import load
from weight_sync.registry import find

if __name__ == "__main__":
    kind, store, url, version = sys.argv[1:5]
    config = load({"uri": store, "threads": 2, "timeout_s": 120, "pause": sys.argv[5] if sys.argv[5:] else "wait"})
    engine = find("engines", kind)(url, config)
    with weight_sync.Replica.open(config, engine) as replica:
        print(replica.sync(exact=int(version)).digest, flush=True)
    engine.close()
