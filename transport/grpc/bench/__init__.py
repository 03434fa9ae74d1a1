"""Measurements of this transport: loopback against a plain copy, fan-out, a long thin link.

Owns what is measured and how. Owns no printing (plugin/cli/bench.py) and no link emulator (benchmarks/link/).
"""

from __future__ import annotations

from weight_sync.transport.grpc.bench.copy import CopyRow, bench_copy
from weight_sync.transport.grpc.bench.fan import FanRow, bench_fan
from weight_sync.transport.grpc.bench.link import LinkRow, bench_link, why_not

__all__ = ["CopyRow", "FanRow", "LinkRow", "bench_copy", "bench_fan", "bench_link", "why_not"]
