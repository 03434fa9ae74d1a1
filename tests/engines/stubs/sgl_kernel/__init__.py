"""Stands in for sglang's kernel package, which is built for CUDA only, where a test runs sglang on a CPU.

Every name can be imported; calling one raises, so a test that reaches a kernel fails and says which.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"sgl_kernel.{name} is not here: this is a stub of the tests")

    return missing


def _pageable() -> None:
    """sglang's LoRA layers pin host memory, which torch cannot do without an accelerator; where memory lies changes no
    number.
    """
    import torch

    def unpinned(make: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return wrapped

    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


_pageable()
