"""The sidecar: an HTTP proxy in front of one engine, which keeps the engine at the run's versions and tells them.

Owns admission by version, the replica that drives the engine, and the control endpoints. Owns no engine (the
implementations registered under ``weight_sync.engines`` do), no bits and no choice of versions (the core does).
docs/sidecar.md is the contract with clients.
"""

from __future__ import annotations

from weight_sync.adapters.sidecar.engine import ServedEngine
from weight_sync.adapters.sidecar.server import serve
from weight_sync.adapters.sidecar.settings import Settings

__all__ = ["ServedEngine", "Settings", "serve"]
