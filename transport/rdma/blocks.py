"""Memory to register: few large blocks instead of a tensor each.

Owns the joining of ranges. Owns no registration.
"""

from __future__ import annotations

from collections.abc import Iterable

from weight_sync.transport.rdma.onesided import Span

__all__ = ["blocks_of"]

_PAGE = 4096


def blocks_of(spans: Iterable[Span]) -> list[Span]:
    """Spans that touch, or share a page of host memory, as one; on a GPU the allocator's segments that hold any.

    Memory between two tensors on one page is mapped, so it may be registered along. Registration is what takes time and
    what NICs have a limited number of.
    """
    spans = [span for span in spans if span.nbytes]
    devices = {span.device for span in spans if span.device is not None}
    joined = _touching((span for span in spans if span.device is None), _PAGE)
    for device in sorted(devices):
        mine = [span for span in spans if span.device == device]
        segments = [s for s in _segments(device) if any(_holds(s, span) for span in mine)]
        rest = [span for span in mine if not any(_holds(segment, span) for segment in segments)]
        joined += segments + _touching(rest, 1)
    return joined


def _holds(segment: Span, span: Span) -> bool:
    return segment.address <= span.address and span.address + span.nbytes <= segment.address + segment.nbytes


def _touching(spans: Iterable[Span], unit: int) -> list[Span]:
    out: list[Span] = []
    for span in sorted(spans, key=lambda s: s.address):
        end = span.address + span.nbytes
        if out:
            last = out[-1]
            last_end = last.address + last.nbytes
            if span.address // unit * unit <= -(-last_end // unit) * unit and span.address - last_end < unit:
                out[-1] = Span(last.address, max(last_end, end) - last.address, last.device)
                continue
        out.append(span)
    return out


def _segments(device: int) -> list[Span]:
    """What the caching allocator has taken from the driver."""
    import torch

    found = torch.cuda.memory_snapshot()
    return [Span(item["address"], item["total_size"], device) for item in found if item["device"] == device]
