"""Imported once by the process that the sidecar's tests fork their children from, so that they start at once.

Starts no thread and opens no socket, since neither survives a fork.
"""

from __future__ import annotations

import starlette.applications
import test_replica_crash
import uvicorn

import weight_sync.adapters.sidecar
import weight_sync.testing
import weight_sync.transport.file

__all__ = ["starlette", "test_replica_crash", "uvicorn", "weight_sync"]
