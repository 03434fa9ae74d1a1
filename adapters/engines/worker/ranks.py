"""All ranks of an engine as one: who counts what, and the digest of the whole.

Owns the election of one rank per region, the check that together they hold every element exactly once, and the sum.
Owns no call. Replicas of a region (norms, KV heads, tied heads) must agree with its owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from weight_sync.codec.digest import Digest, header_digest
from weight_sync.errors import EngineError, LayoutError
from weight_sync.layout.coverage import Summary, check_exactly_once, elect
from weight_sync.tensors import TensorSpec

__all__ = ["Ranks", "unheld"]

_SHOWN = 5


def unheld(table: Sequence[TensorSpec], summaries: Sequence[Summary]) -> list[str]:
    """Tensors that no rank holds any element of."""
    held = {item.tensor for summary in summaries for item in summary.held}
    return [spec.name for index, spec in enumerate(table) if spec.elements and index not in held]


class Ranks:
    """Who counts what.

    Args:
        table: of the checkpoint.
        summaries: of all ranks, by rank.

    Raises LayoutError when the ranks do not hold every element exactly once, replicas aside.
    """

    def __init__(self, table: Sequence[TensorSpec], summaries: Sequence[Summary]) -> None:
        owners = elect(table, summaries)
        if wrong := check_exactly_once(table, summaries):
            names = ", ".join(table[index].name for index in wrong[:_SHOWN])
            raise LayoutError("the engine's ranks do not hold every element once", field="tensors",
                              found=f"{len(wrong)} of {len(table)}: {names}",
                              do="start the engine from the run's base checkpoint")  # fmt: skip
        self._table, self._summaries, self._owners = tuple(table), tuple(summaries), owners
        self._headers = Digest.sum(map(header_digest, table))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self._summaries)

    def total(self, parts: Sequence[Sequence[Digest]]) -> Digest:
        """The digest of the whole from every rank's digests, by tensor in the order of its summary.

        Raises EngineError when a replica of a region differs from its owner, or a rank told another number of them.
        """
        owned: dict[tuple[int, int], Digest] = {}  # by rank and mark: a rank has one region per tensor
        total = self._headers
        for rank, (summary, digests) in enumerate(zip(self._summaries, parts, strict=True)):
            if len(digests) != len(summary.held):
                raise EngineError("a rank told digests of other tensors", field=f"rank {rank}", found=len(digests),
                                  expected=len(summary.held), do="attach the engine again")  # fmt: skip
            for held, owner, digest in zip(summary.held, self._owners[rank], digests, strict=True):
                if owner == rank:
                    owned[held.tensor, held.mark] = digest
                    total += digest
        for rank, (summary, digests) in enumerate(zip(self._summaries, parts, strict=True)):
            for held, owner, digest in zip(summary.held, self._owners[rank], digests, strict=True):
                if owned[held.tensor, held.mark] != digest:
                    raise EngineError("two ranks hold other bits of one region", field=self._table[held.tensor].name,
                                      found=f"rank {rank}: {digest.hex()}",
                                      expected=f"rank {owner}: {owned[held.tensor, held.mark].hex()}",
                                      do="sync again: it rebuilds from a full state")  # fmt: skip
        return total
