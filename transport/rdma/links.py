"""Which network link a rank sends and receives on.

Owns the map from ranks to NICs. Owns no rates (model.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weight_sync.errors import InputError

__all__ = ["Nics"]


@dataclass(frozen=True)
class Nics:
    """``per_host`` NICs shared evenly by the ``ranks_per_host`` ranks of a host; the default is one for each rank.

    With more NICs than ranks a rank has several, which count as one link of so much higher a rate.
    """

    per_host: int = 8
    ranks_per_host: int = 8

    def __post_init__(self) -> None:
        for name in ("per_host", "ranks_per_host"):
            if getattr(self, name) < 1:
                raise InputError("not a count", field=name, found=getattr(self, name), expected="1 or more")

    @property
    def links_per_host(self) -> int:
        """Links that are told apart."""
        return min(self.per_host, self.ranks_per_host)

    @property
    def nics_per_link(self) -> float:
        """How many NICs' rate a link has."""
        return max(1.0, self.per_host / self.ranks_per_host)

    def of(self, ranks: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """The link of each rank."""
        host, local = np.divmod(ranks.astype(np.int64), self.ranks_per_host)
        found: npt.NDArray[np.int64] = host * self.links_per_host + local * self.links_per_host // self.ranks_per_host
        return found
