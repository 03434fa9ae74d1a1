"""A model's worth of bf16 numbers, of which a share changes by one ulp at each step: the same in every process.

Owns the numbers. Owns no claim that they are a trained model: sizes of patches are what matters here.
"""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["Model"]

_TENSOR = 8 << 20


class Model:
    """``elements`` numbers in tensors of at most 8 Mi.

    Attributes:
        tensors: by name, changed in place by `step`.
    """

    def __init__(self, elements: int, density: float) -> None:
        self._density = density
        generator = torch.Generator().manual_seed(0)
        self.tensors: dict[str, torch.Tensor] = {}
        for k, start in enumerate(range(0, elements, _TENSOR)):
            count = min(_TENSOR, elements - start)
            self.tensors[f"layer.{k}"] = torch.randn(count, generator=generator).mul_(0.02).bfloat16()

    def step(self, number: int) -> None:
        """About ``density`` of all elements move by one ulp."""
        random = np.random.default_rng(number)
        for tensor in self.tensors.values():
            bits = tensor.view(torch.int16).numpy()
            at = random.integers(0, len(bits), int(len(bits) * self._density))
            bits[at] ^= 1
