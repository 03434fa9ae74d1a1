"""Stands in for torchvision, of which there is no CPU wheel for this torch, where a test runs sglang on a CPU.

transformers and sglang import names of it for images. Every name is there; no test shows a model an image.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, ClassVar

__version__ = "0.28.0"


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Anything(metaclass=_Names):
    """A class whose attributes (members of an enumeration, say) are their names."""


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []  # to be importable from

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything


for _path in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = sys.modules[f"{__name__}.{_path}"] = _Module(f"{__name__}.{_path}")
    _parent, _, _name = f"{__name__}.{_path}".rpartition(".")
    setattr(sys.modules[_parent], _name, _module)
