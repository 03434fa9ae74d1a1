"""Layout: which element of which storage is which element of the checkpoint.

    box.py        N-d strided boxes of flat indices: the geometry that all other rooms use
    link.py       boxes that belong together, their normal form, compaction
    meet.py       intersection and difference of maps made of boxes
    placement.py  Placement and Layout: composition, intersection, restriction
    coverage.py   every element of a table by exactly one rank: election, proof, words for faults
    agree.py      the exchange in which ranks settle that
    trace.py      where a converter's outputs come from, on meta tensors
    probe.py      the same with numbered elements, where tracing does not do
    storage.py    a process's weights as flat storages, and their shard map
    learn.py      layouts of models and named tensors, checked against the base checkpoint's table

Owns the public names. Those of the last four need torch, which is imported when one of them is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from weight_sync.layout.box import Box

if TYPE_CHECKING:
    from weight_sync.layout.agree import Ownership, agree_on_owners
    from weight_sync.layout.learn import fit, learn_converter, learn_module, learn_named
    from weight_sync.layout.placement import Layout, Match, Placement, StorageSpec, compose, intersect, merge
    from weight_sync.layout.probe import probe_converter
    from weight_sync.layout.storage import check_storages, flat_storage, local_storages, shard_map, take
    from weight_sync.layout.trace import Tracer, trace_converter

_HOMES = {
    "agree": ("Ownership", "agree_on_owners"),
    "learn": ("fit", "learn_converter", "learn_module", "learn_named"),
    "placement": ("Layout", "Match", "Placement", "StorageSpec", "compose", "intersect", "merge"),
    "probe": ("probe_converter",),
    "storage": ("check_storages", "flat_storage", "local_storages", "shard_map", "take"),
    "trace": ("Tracer", "trace_converter"),
}
_HOME_OF = {name: f"weight_sync.layout.{home}" for home, names in _HOMES.items() for name in names}

__all__ = [
    "Box",
    "Layout",
    "Match",
    "Ownership",
    "Placement",
    "StorageSpec",
    "Tracer",
    "agree_on_owners",
    "check_storages",
    "compose",
    "fit",
    "flat_storage",
    "intersect",
    "learn_converter",
    "learn_module",
    "learn_named",
    "local_storages",
    "merge",
    "probe_converter",
    "shard_map",
    "take",
    "trace_converter",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'weight_sync.layout' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
