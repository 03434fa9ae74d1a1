"""Conformance suites for transports, engines and quantisers, and an engine over plain arrays.

Owns what a third party needs to prove an implementation of ``weight_sync.ports``: `check_transport`, `check_engine`,
`check_quantizer` and `MemoryEngine`, the reference. Owns no test runner: everything is plain functions that raise
AssertionError, and importing this package imports no pytest.

In a test file of yours::

    import pytest
    from weight_sync.testing import check_engine, engine_claims

    @pytest.mark.parametrize("claim", engine_claims())
    def test_my_engine(claim, tmp_path):
        check_engine(lambda: MyEngine("path/to/checkpoint"), "path/to/checkpoint", only=[claim])
"""

from __future__ import annotations

from weight_sync.testing.engines import check_engine, engine_claims
from weight_sync.testing.memory_engine import MemoryEngine
from weight_sync.testing.quantizers import check_quantizer
from weight_sync.testing.transports import check_transport, transport_claims

__all__ = ["MemoryEngine", "check_engine", "check_quantizer", "check_transport", "engine_claims", "transport_claims"]
