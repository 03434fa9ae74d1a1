"""The choice among equal sources.

Owns one greedy pass, deterministic. Owns no geometry and no sides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.transport.rdma.links import Nics

__all__ = ["assign"]


def assign(
    nbytes: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    pool: npt.NDArray[Any],
    pool_choice: npt.NDArray[Any],
    rank_of: npt.NDArray[Any],
    target_rank: npt.NDArray[Any],
    nics: tuple[Nics, Nics],
) -> npt.NDArray[np.int64]:
    """(n,) positions in ``pool``: the chosen candidate of each write.

    Writes without a choice count first. The others follow, largest first; each goes to the candidate whose NIC has the
    fewest bytes so far, then whose rank has, then which sends the fewest to this destination's NIC. So the last write
    that a NIC was chosen for left it with no more than any alternative's load plus that write, and since the loads of
    alternatives only grow, this bound holds in the end.

    Args:
        nbytes: (n,) of each write.
        first, count: (n,) candidates in ``pool``, which holds holdings.
        rank_of: rank by holding.
        target_rank: (n,) of the destination.
    """
    chosen = first.copy()
    if not len(chosen):
        return chosen
    ranks = rank_of[pool].astype(np.int64)
    links = nics[0].of(ranks)
    target_links = nics[1].of(target_rank)
    fixed = count == 1
    by_rank = np.bincount(ranks[first[fixed]], nbytes[fixed], int(ranks.max()) + 1).astype(np.int64).tolist()
    by_link = np.bincount(links[first[fixed]], nbytes[fixed], int(links.max()) + 1).astype(np.int64).tolist()
    free = np.flatnonzero(~fixed)
    # ties by destination and candidates, which do not depend on the order in which layouts came
    free = free[np.lexsort((free, -nbytes[free]))]
    between: dict[tuple[int, int], int] = {}
    rank_list, link_list = ranks.tolist(), links.tolist()
    for k, size, start, number, target in zip(
        free.tolist(), nbytes[free].tolist(), first[free].tolist(), count[free].tolist(),
        target_links[free].tolist(), strict=True,
    ):  # fmt: skip
        best, best_at = None, start
        for at in range(start, start + number):
            link, rank = link_list[at], rank_list[at]
            key = (by_link[link], by_rank[rank], between.get((link, target), 0), (rank - target) % 4099)
            if best is None or key < best:
                best, best_at = key, at
        link = link_list[best_at]
        by_link[link] += size
        by_rank[rank_list[best_at]] += size
        between[link, target] = between.get((link, target), 0) + size
        chosen[k] = best_at
    return chosen
