"""Which version sampled which token, from a sidecar's headers and, where there are any, the engine's own spans. Pure.

Owns the rules for an answer that no single version made. Owns no staleness (the core's rules).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weight_sync.adapters.rollout.flavours import Answer
from weight_sync.errors import EngineError
from weight_sync.proto.v1 import trajectory_pb2

__all__ = ["Served", "read_served", "spans_of"]

_PREFIX = "x-weight-version-"
_LABEL = re.compile(r"(?:(?P<run>.*)[^0-9A-Za-z])?(?P<number>[0-9]{1,19})", re.DOTALL)


@dataclass(frozen=True)
class Served:
    """What a sidecar says about one answer; ``end_run`` differs from ``run`` when the engine changed runs meanwhile.
    ``contract`` is the id of how the engine computes, "" when it does not say.
    """

    run: str
    start: int
    end: int
    end_run: str
    contract: str = ""


def read_served(headers: Mapping[str, str]) -> Served:
    """Raises EngineError when there is no sidecar that would say it."""
    run, start, end = (headers.get(_PREFIX + name) for name in ("run", "start", "end"))
    if not run or start is None or end is None or not start.isdigit() or not end.isdigit():
        raise EngineError("the answer does not say which version made it", field=f"{_PREFIX}run, -start, -end",
                          found=(run, start, end), expected="a run and two numbers",
                          do="put a sidecar in front of the engine: weight-sync sidecar")  # fmt: skip
    contract = headers.get("x-weight-contract", "")
    return Served(run, int(start), int(end), headers.get(f"{_PREFIX}end-run", run), contract)


def spans_of(answer: Answer, served: Served) -> list[trajectory_pb2.VersionSpan]:
    """Spans that cover the output tokens exactly.

    The engine's own spans are taken when they are whole and their labels are numbers of this run, or end with one. Else
    all tokens count as the start version's: exact when the version did not change, and when it did the oldest that can
    have sampled any of them, so that staleness is never understated.
    """
    own = None if answer.labels is None else _from_labels(answer.labels, len(answer.tokens), served)
    return own or [trajectory_pb2.VersionSpan(number=served.start, begin=0, end=len(answer.tokens))]


def _from_labels(
    labels: list[tuple[str, int, int]], tokens: int, served: Served
) -> list[trajectory_pb2.VersionSpan] | None:
    """None when they do not say it."""
    spans = []
    at = 0
    for label, begin, end in labels:
        match = _LABEL.fullmatch(label)
        if match is None or match["run"] not in (None, "", served.run) or begin != at or end <= begin:
            return None
        number = int(match["number"])
        if not served.start <= number <= served.end:  # a label that some other tool has set
            return None
        spans.append(trajectory_pb2.VersionSpan(number=number, begin=begin, end=end))
        at = end
    return spans if at == tokens else None
