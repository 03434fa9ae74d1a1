"""Learning what the ranks publish, and proving that the base they diff against is the run's head.

Owns one collective step of the publisher. Owns no learning (served.py), no loading (work.py) and no order of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from weight_sync.codec.digest import Digest, header_digest
from weight_sync.consensus import together
from weight_sync.errors import ForkRequiredError, TensorError
from weight_sync.history import History
from weight_sync.lineage import HeldView
from weight_sync.ports import Group
from weight_sync.proto.v1 import report_pb2
from weight_sync.served import HeldTensors, ServedView
from weight_sync.work import RankWork

if TYPE_CHECKING:
    import torch

__all__ = ["learn_proven"]

_LOG = logging.getLogger("weight_sync")


def learn_proven(
    named: torch.nn.Module | Mapping[str, torch.Tensor] | HeldTensors,
    storages: Mapping[str, torch.Tensor],
    cast: bool,
    head: int | None,
    held: HeldView,
    work: RankWork,
    history: History,
    group: Group,
) -> None:
    """Learns ``work.view``, loads the base of its new pieces from the store and proves all by digest.

    Raises the same error on every rank: LayoutError, TensorError, VersionError, CorruptionError, ForkRequiredError.
    """
    work.view = None
    view = work.learn(named, held.table, group, cast)
    if not view.table:  # on every rank alike: the table is the group's
        raise TensorError("nothing to publish: no rank offers a tensor", field="source", found=type(named).__name__,
                          expected="a module or a mapping of names to tensors")  # fmt: skip

    if group.rank == 0 and head is not None:
        _tell_changes(head, held, view)

    def join(parts: Sequence[bytes]) -> bytes:
        _prove(view, held, [report_pb2.RankReport.FromString(part) for part in parts])
        return b""

    try:
        together(group, lambda: work.load(view, storages, history, head, held.table).SerializeToString(), join)
    except BaseException:
        work.forget()  # it may hold pieces of which only a part was loaded
        raise
    work.view = view


def _tell_changes(head: int, held: HeldView, view: ServedView) -> None:
    """Tensors may appear, vanish and change; done by mistake (a prefix, a part of the model) it must not go unseen."""
    before, now = {spec.name: spec for spec in held.table}, {spec.name: spec for spec in view.table}
    changes = {
        "appear": sorted(now.keys() - before.keys()),
        "vanish": sorted(before.keys() - now.keys()),
        "change dtype or shape": sorted(n for n in now.keys() & before.keys() if now[n] != before[n]),
    }
    told = [f"{len(names)} {what} ({', '.join(names[:3])}{', ...' if names[3:] else ''})"
            for what, names in changes.items() if names]  # fmt: skip
    if told:
        _LOG.warning("tensors of view %r after version %s: %s", held.name, head, "; ".join(told))


def _prove(view: ServedView, held: HeldView, reports: Sequence[report_pb2.RankReport]) -> None:
    """The base that the ranks loaded is the head, tensor by tensor."""
    sums: dict[str, Digest] = {}
    for report in reports:
        for item in report.tensors:
            name = view.table[item.tensor].name
            sums[name] = sums.get(name, Digest()) + Digest.from_proto(item.digest)
    specs = {spec.name: spec for spec in view.table}
    for name, part in sums.items():
        found, expected = header_digest(specs[name]) + part, held.digests[name]
        if found != expected:
            raise ForkRequiredError(
                "the base that was loaded is not the run's head",
                field=name,
                found=found.hex(),
                expected=expected.hex(),
                do="set base to the run's own base, or fork: true to start a new run",
            )
