"""OpenTelemetry spans, where it is installed: one trace per version, from commit to acknowledgement, on all machines.

Owns the trace's id, which every process computes from run and number, so that nothing has to carry it. Owns no exporter
and no configuration: those are the application's.
"""

from __future__ import annotations

import hashlib
import importlib
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

_trace: Any = None
with suppress(ImportError):  # an extra
    _trace = importlib.import_module("opentelemetry.trace")

__all__ = ["span", "trace_id"]


def trace_id(run_id: str, number: int) -> int:
    """128 bits, not 0."""
    digest = hashlib.blake2b(f"{run_id}/{number}".encode(), digest_size=16, person=b"weight_sync.1").digest()
    return int.from_bytes(digest, "big") or 1


def span(name: str, run_id: str, number: int, **attributes: str | int | float) -> AbstractContextManager[Any]:
    """A span ``weight_sync.<name>`` of the version's trace; nothing without OpenTelemetry."""
    if _trace is None:
        return nullcontext()
    identity = trace_id(run_id, number)
    root = _trace.SpanContext(
        trace_id=identity, span_id=identity & (1 << 64) - 1 or 1, is_remote=True,
        trace_flags=_trace.TraceFlags(_trace.TraceFlags.SAMPLED),
    )  # fmt: skip
    context = _trace.set_span_in_context(_trace.NonRecordingSpan(root))
    known = {"run_id": run_id, "version": number, **attributes}
    tracer = _trace.get_tracer("weight_sync")
    made: AbstractContextManager[Any] = tracer.start_as_current_span(
        f"weight_sync.{name}", context=context, attributes={f"weight_sync.{key}": value for key, value in known.items()}
    )
    return made
