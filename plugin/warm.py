"""Compiles the codec's kernels ahead of time, so that neither the first publish nor the first sync waits for a compiler.

Owns which kernels a run needs: those that a small run of its own goes through, for one dtype of each width. Owns no kernel
and no cache (Numba keeps one beside the sources, or in NUMBA_CACHE_DIR).
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import numpy as np
import torch

from weight_sync.config import load
from weight_sync.dtypes import dtype_of
from weight_sync.publisher import Publisher
from weight_sync.replica import Replica
from weight_sync.served import bits_of
from weight_sync.testing import MemoryEngine

__all__ = ["DTYPES", "warm"]

DTYPES = ("BF16", "F8_E4M3", "F32", "F64")
"""One of each width: kernels see unsigned numbers."""

_ELEMENTS = 1 << 16
_STEPS = ((1, 0.01), (2, 0.4), (3, 0.0001))  # step and density: rare changes, frequent ones, next to none


def warm(workers: int, dtypes: tuple[str, ...] = DTYPES) -> Iterator[tuple[str, float]]:
    """Compiles in ``workers`` processes; yields each dtype with its seconds once it is done.

    Fresh processes, since one that has threads should not fork. Raises what the small run raises.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(dtypes)), mp_context=context) as pool:
        jobs = {pool.submit(_compile, name): name for name in dtypes}
        for job in as_completed(jobs):
            yield jobs[job], job.result()


def _compile(name: str) -> float:
    """A run of a few versions, followed one by one in both forms, and in one fold. Returns seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weight_sync-warm-") as folder:
        config = load(
            {"uri": folder, "forms": ["step", "compact"], "anchor_share": 0, "collect_every": 0, "poll_s": 0.01}
        )
        state = _state(name)
        with Publisher.open(config) as publisher:
            publisher.publish(state, step=0)
            with (
                Replica.open(config, MemoryEngine({}), replica_id="each") as each,
                Replica.open(config, MemoryEngine({}), replica_id="steps", take="step") as steps,
                Replica.open(config, MemoryEngine({}), replica_id="late") as late,
            ):
                for replica in (each, steps, late):
                    replica.sync()
                for step, density in _STEPS:
                    _change(state, step, density)
                    publisher.publish(state, step=step)
                    each.sync()
                    steps.sync()
                late.sync()  # a fold
                late.engine.rollback()
    return time.monotonic() - began


def _state(name: str) -> dict[str, torch.Tensor]:
    """A long tensor, a matrix of rows that are no multiple of a block, and a few numbers."""
    dtype = dtype_of(name)
    dice = np.random.default_rng(0)
    shapes = {"long": (_ELEMENTS,), "matrix": (300, 41), "few": (7,)}
    drawn = {key: torch.from_numpy(dice.standard_normal(shape)).to(dtype.torch) for key, shape in shapes.items()}
    return {key: tensor.contiguous() for key, tensor in drawn.items()}


def _change(state: dict[str, torch.Tensor], step: int, density: float) -> None:
    """Some numbers move by one unit in the last place, some by more."""
    dice = np.random.default_rng(step)
    for tensor in state.values():
        bits = bits_of(tensor)
        at = dice.integers(0, len(bits), max(1, int(len(bits) * density)))
        bits[at] ^= dice.choice([1, 1, 1, 3], len(at)).astype(bits.dtype)
