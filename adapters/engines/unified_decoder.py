"""Sampling by the unified forward pass: the decode loop of decoder.py, without padding between sequences.

Owns what is fed, and the caches. Owns no kernel (unified.py) and no loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_sync.adapters.engines.decoder import Decoder, Rows
from weight_sync.adapters.engines.unified import Past, Unified

__all__ = ["UnifiedDecoder"]


class UnifiedDecoder(Decoder):
    """A `Decoder` whose logprobs are those that `Unified.logprobs` gives for the whole sequence, bit for bit."""

    def __init__(self, unified: Unified) -> None:
        super().__init__(unified.model)
        self._unified = unified

    def _forward(self, batch: Rows) -> torch.Tensor:
        if batch.age == self._age:
            feed = batch.ids[:, -1:].tolist()
            return torch.cat(self._unified.logits(feed, batch.cache, last=True))
        repeats = batch.samples if not batch.logprobs else 1  # rows of one prompt are equal until they are sampled
        pairs = zip(batch.ids[::repeats].tolist(), batch.mask[::repeats].tolist(), strict=True)
        feed = [[token for token, real in zip(*pair, strict=True) if real] for pair in pairs]
        pasts = [Past() for _ in feed]
        logits = torch.cat(self._unified.logits(feed, pasts, last=True))
        batch.cache = [past if k == 0 else past.copy() for past in pasts for k in range(repeats)]
        batch.age = self._age
        return logits.repeat_interleave(repeats, 0)

    def _score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[torch.Tensor]:
        return self._unified.logprobs(sequences, temperature)

    def _log_softmax(self, logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return self._unified.log_softmax(logits, temperature)
